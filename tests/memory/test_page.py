"""What docs/memory.md shows runs and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs/memory.md"


PROGRAMS = re.findall(r"```python\n(.*?)```\n\nIt prints\n\n((?:    [^\n]*\n)+)", PAGE.read_text(), re.DOTALL)


def test_every_program_of_the_page_says_what_it_prints() -> None:
    assert len(PROGRAMS) == PAGE.read_text().count("```python") >= 2


@pytest.mark.parametrize(("program", "shown"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_memory_page_prints_what_it_says(program: str, shown: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, PAGE.name, "exec"), {})
    assert out.getvalue() == re.sub(r"^    ", "", shown, flags=re.MULTILINE)
