"""A table for terminals of any width: where its columns do not fit, each row becomes lines that break between cells only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDEST = 1_000_000
_INDENT = "    "

Cell = str | Text


@dataclass
class FittingTable:
    """Shows its rows as a table if that is no wider than the console, else as `title value, title value, …` below the first
    cells of a row. Nothing is ever cut: a cell that is wider than the console is folded, or left to a terminal that wraps.

    Attributes:
        titles: of the columns.
        right: titles of the columns whose cells stand on the right.
        lead: how many cells begin the narrow form of a row, on a line of their own.
        box, padding: of the table.
    """

    titles: Sequence[str]
    right: frozenset[str] = frozenset()
    lead: int = 1
    box: Box | None = None
    padding: tuple[int, int] = (0, 1)
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add_row(self, *cells: Cell) -> None:
        """One cell for each title; or one cell alone, for what stands between two rows."""
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        if Measurement.get(console, options.update(max_width=_WIDEST), table).maximum <= options.max_width:
            yield table
        else:
            for row in self.rows:
                yield from self._lines(row, options.max_width)

    def _table(self) -> Table:
        table = Table(box=self.box, pad_edge=False, padding=self.padding)
        for title in self.titles:
            table.add_column(title, justify="right" if title in self.right else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def _lines(self, row: Sequence[Cell], width: int) -> Iterator[Text]:
        cells = [_joined(title.strip(), cell) for title, cell in zip(self.titles, row, strict=False)]
        if len(row) < len(self.titles):
            yield _line("  ", [_text(cell) for cell in row])
            return
        yield _line("  ", cells[: self.lead])
        waiting: list[Text] = []
        for cell in cells[self.lead :]:
            if waiting and cell_len(_INDENT) + sum(c.cell_len + 2 for c in [*waiting, cell]) > width:
                yield _line(_INDENT, waiting)
                waiting = []
            waiting.append(cell)
        if waiting:
            yield _line(_INDENT, waiting)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _joined(title: str, cell: Cell) -> Text:
    return Text.assemble((f"{title} ", "dim"), _text(cell))


def _line(indent: str, cells: Sequence[Text]) -> Text:
    return Text(indent).append_text(Text(", ").join(cells))
