"""What `kvactors layout` prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvactors.core.layout import CacheEntry, Group, KVLayout
from kvactors.fitting import FittingTable
from kvactors.layouts.checks import spans
from kvactors.layouts.elements import ELEMENT_BYTES
from kvactors.layouts.families import FAMILIES, Family
from kvactors.layouts.scale import boundary_tokens

_EXAMPLE_HASH = bytes(range(8))


@dataclass(frozen=True, slots=True)
class EntryView:
    """An entry as a view of local memory: (blocks, elements of a block), as far as a layout says.

    Attributes:
        unit: the element kind that is counted; "byte" where the layout names none, or sizes are no whole number of it.
        elements: payload of a block.
        stride: from one block to the next.
    """

    unit: str
    elements: int
    stride: int

    @property
    def contiguous(self) -> bool:
        """Whether neighbouring blocks touch: the stride is the payload."""
        return self.stride == self.elements


def entry_view(entry: CacheEntry) -> EntryView:
    """The view that an entry describes."""
    item = ELEMENT_BYTES.get(entry.dtype)
    if item is None or entry.nbytes % item or entry.stride % item:
        return EntryView("byte", entry.nbytes, entry.stride)
    return EntryView(entry.dtype, entry.nbytes // item, entry.stride // item)


def list_layouts(as_json: bool = False) -> str:
    """The built-in families, one a line, or as JSON."""
    rows = [
        {"name": f.name, "summary": f.summary, "groups": len(layout.groups), "boundary_tokens": boundary_tokens(layout)}
        for f in FAMILIES.values()
        for layout in [f.build()]
    ]
    if as_json:
        return json.dumps(rows, indent=2) + "\n"
    width = max(len(name) for name in FAMILIES)
    return "".join(f"{row['name']:<{width}}  {row['summary']}\n" for row in rows)


def describe(layout: KVLayout, family: Family | None = None) -> dict[str, Any]:
    """A layout as plain data: groups with their ranges and views, object bytes, commit layers, digest, example keys."""
    groups = [
        {
            "id": g.id,
            "kind": g.kind.value,
            "block_tokens": g.block_tokens,
            "window": g.window,
            "chunk_tokens": g.chunk_tokens,
            "speculative": g.speculative,
            "kv_heads": g.kv_heads,
            "layers": list(g.layers),
            "commit_layer": int(layout.commit_layer(g.id)),
            "object_bytes": layout.object_bytes(g.id),
            "ranges": [
                {
                    "layer": int(r.layer),
                    "entry": r.entry.name,
                    "offset": r.offset,
                    "bytes": r.entry.nbytes,
                    "stride": r.entry.stride,
                    "dtype": r.entry.dtype,
                    "view": {
                        "unit": view.unit,
                        "shape": ["blocks", view.elements],
                        "stride": [view.stride, 1],
                        "padding": view.stride - view.elements,
                        "contiguous": view.contiguous,
                    },
                }
                for r in layout.ranges(g.id)
                for view in [entry_view(r.entry)]
            ],
            "example_key": layout.key(g.id, _EXAMPLE_HASH),
        }
        for g in layout.groups
    ]
    return {
        "name": layout.model,
        "digest": layout.digest,
        "boundary_tokens": boundary_tokens(layout),
        "groups": groups,
        "sources": list(family.sources) if family else [],
        "notes": list(family.notes) if family else [],
    }


def show_layout(layout: KVLayout, family: Family | None = None, console: Console | None = None) -> None:
    """Prints a layout for people; entries that repeat from layer to layer are shown for the first and last layers.

    Of each entry: where it lies in the object, and its view of local memory; in a table, or on a narrow console in lines.
    """
    console = console or Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    console.print(layout.model, style="bold")
    console.print(f"digest    {layout.digest}")
    console.print(f"boundary  {boundary_tokens(layout)} tokens: hits end on a multiple of it")
    console.print(
        "views     offset: in the object, bytes; shape and stride: elements of the kind, or bytes where none is named"
    )
    if family is not None:
        for source in family.sources:
            console.print(f"source    {source}")
        for note in family.notes:
            console.print(f"note      {note}")
    for group in layout.groups:
        _show_group(layout, group, console)


def _show_group(layout: KVLayout, group: Group, console: Console) -> None:
    extra = "".join(
        f", {name} {value}" for name, value in (("window", group.window), ("chunk", group.chunk_tokens)) if value is not None
    )
    if group.speculative:
        extra += ", speculative"
    console.print()
    console.print(f"group {group.id}: {group.kind.value}, {group.block_tokens} raw tokens a block{extra}", style="bold")
    console.print(f"  layers    {spans(list(group.layers))}; committed after layer {layout.commit_layer(group.id)}")
    console.print(f"  object    {layout.object_bytes(group.id):,} bytes")
    console.print(f"  key       {layout.key(group.id, _EXAMPLE_HASH)}")
    titles = ("  layer", "entry", "offset", "bytes", "shape", "stride", "contiguous", "kind")
    table = FittingTable(titles, frozenset(("  layer", "offset", "bytes")), lead=2, padding=(0, 2))
    layers = list(group.layers)
    shown = set(layers) if len(layers) <= 6 else {*layers[:2], layers[-1]}
    hidden = False
    for r in layout.ranges(group.id):
        if r.layer in shown:
            view = entry_view(r.entry)
            table.add_row(
                str(r.layer),
                r.entry.name,
                f"{r.offset:,}",
                f"{r.entry.nbytes:,}",
                f"(blocks, {view.elements})",
                f"({view.stride}, 1)",
                "yes" if view.contiguous else f"no, {view.stride - view.elements} padding",
                (r.entry.dtype or "-") + (" (bytes)" if r.entry.dtype and view.unit == "byte" else ""),
            )
        elif not hidden:
            hidden = True
            table.add_row("…")
    console.print(table)
