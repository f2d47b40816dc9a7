"""Every block of the pages runs and prints what is shown, or stands in `table.py` with the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, Shell, blocks, blocks_of, commands, same
from tests.docs.table import ELSEWHERE, LINES_NOT_RUN, NOT_RUN, SHORTER

BY_PAGE = {page.relative_to(ROOT).as_posix(): blocks(page) for page in PAGES}


def excused(block: Block) -> bool:
    """Whether the table says why this block does not run here."""
    reasons = list(NOT_RUN.get(block.page, {})) + [begin for pages in ELSEWHERE.values() for begin in pages.get(block.page, [])]
    return any(block.first.startswith(begin) for begin in reasons)


def is_script(block: Block) -> bool:
    """Commands of a shell: a block that says so, or an indented one with nothing but commands of kvactors."""
    known = ("kvactors ", *LINES_NOT_RUN.get(block.page, {}))
    lines = [line for line in block.text.split("\n") if line.strip()]
    return block.language == "bash" or (block.language == "indented" and all(line.startswith(known) for line in lines))


def script(block: Block) -> str:
    """What of a block runs."""
    left_out = tuple(LINES_NOT_RUN.get(block.page, {}))
    text = "\n".join(line for line in block.text.split("\n") if not left_out or not line.startswith(left_out))
    for shown, run in SHORTER.get(block.page, {}).items():
        text = text.replace(shown, run)
    return text


def runs(page: str) -> list[tuple[Block, Block | None]]:
    """The blocks of a page that run, each with the block of text right after it, which is its output."""
    found: list[tuple[Block, Block | None]] = []
    for block in BY_PAGE[page]:
        if excused(block):
            continue
        if block.language == "console" or is_script(block):
            found.append((block, None))
        elif block.language == "text" and found and found[-1][0].language != "console" and found[-1][1] is None:
            found[-1] = (found[-1][0], block)
    return found


@pytest.mark.parametrize("page", list(BY_PAGE))
def test_a_block_runs_or_has_a_reason(page: str) -> None:
    run = {id(block) for pair in runs(page) for block in pair if block is not None}
    left = [f"{block}: {block.first}" for block in BY_PAGE[page] if id(block) not in run and not excused(block)]
    assert not left, "neither run nor listed in tests/docs/table.py"


@pytest.mark.parametrize("page", [page for page in BY_PAGE if runs(page)])
@pytest.mark.docs
@pytest.mark.timeout(300)
def test_what_a_page_shows_is_what_happens(page: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for block, output in runs(page):
        pairs = commands(block.text) if block.language == "console" else [(script(block), output.text if output else None)]
        for command, shown in pairs:
            printed = shell.run(command)
            assert shown is None or same(shown, printed), (
                f"{block}: `{command}` printed\n{printed}\nand the page shows\n{shown}\n"
                f"If the page is to follow: python -m tests.docs.fill {page}"
            )


def entries() -> Iterator[tuple[str, str]]:
    for table in (NOT_RUN, *ELSEWHERE.values()):
        for page, begins in table.items():
            for begin in begins:
                yield page, begin


@pytest.mark.parametrize(("page", "begin"), list(entries()))
def test_an_entry_of_the_table_has_its_block(page: str, begin: str) -> None:
    assert any(block.first.startswith(begin) for block in BY_PAGE[page])


@pytest.mark.parametrize("table", [LINES_NOT_RUN, SHORTER], ids=["lines", "shorter"])
def test_a_line_of_the_table_is_on_its_page(table: dict[str, dict[str, str]]) -> None:
    missing = [(page, text) for page, texts in table.items() for text in texts if text not in (ROOT / page).read_text()]
    assert not missing


@pytest.mark.parametrize(("test", "page"), [(test, page) for test, pages in ELSEWHERE.items() for page in pages])
def test_another_test_names_the_page(test: str, page: str) -> None:
    assert page in (ROOT / test).read_text()


TEXT = """A page.

```console
$ echo 'a
> b'
a
b
```

* A list

    goes on

Text
    goes on

    indented

    still

``` yaml
x: 1
```
"""


def test_blocks_are_found() -> None:
    found = [(block.line, block.language, block.text) for block in blocks_of(TEXT.replace("``` yaml", "```yaml"), "page.md")]
    assert found == [
        (3, "console", "$ echo 'a\n> b'\na\nb"),
        (17, "indented", "indented\n\nstill"),
        (21, "yaml", "x: 1"),
    ]
    assert list(commands(found[0][2])) == [("echo 'a\nb'", "a\nb")]


def test_a_console_block_begins_with_a_command() -> None:
    with pytest.raises(ValueError, match=r"begins with 'ls'"):
        list(commands("ls\nfiles"))


@pytest.mark.parametrize(
    ("shown", "printed", "is_same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a", "a\nb\n", False),
        ("took … s │", "took 0.25 s    │\n", True),
        ("took … s", "took 0.25 s\nmore\n", False),
        ("a\n…\nz", "a\nb\nc\nz\n", True),
        ("a\n…\nz", "a\nz\n", True),
        ("a\n…", "a\n", True),
        ("┌──┐", "┌─────┐\n", True),
        ("1.5", "175\n", False),
        ("", "\n", True),
        ("", "warning\n", False),
    ],
)
def test_what_counts_as_the_same(shown: str, printed: str, is_same: bool) -> None:
    assert same(shown, printed) is is_same
