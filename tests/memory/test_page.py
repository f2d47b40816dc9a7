"""What docs/memory.md shows runs and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs/memory.md"


def test_the_program_of_the_memory_page_prints_what_it_says() -> None:
    text = PAGE.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"It prints\n\n((?:    .*\n)+)", text)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, PAGE.name, "exec"), {})
    assert out.getvalue() == re.sub(r"^    ", "", shown, flags=re.MULTILINE)
