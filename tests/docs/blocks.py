"""Blocks of code in the pages, what a shell makes of them, and whether that is what the page shows."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]

ANY = "…"
"""In shown output: anything within a line, or, alone on a line, any number of lines."""


@dataclass(frozen=True)
class Block:
    """A fenced or indented block: its page, the line it begins in, its language ("" if none, "indented"), its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.split("\n", 1)[0].strip()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """All blocks of a page, in order. Indented lines within a list are text, as Markdown has it."""
    lines = text.split("\n")
    at, blank, in_list = 0, True, False
    while at < len(lines):
        line = lines[at]
        if fence := re.match(r"( *)```+(\w*) *$", line):
            end = next(n for n in range(at + 1, len(lines)) if re.match(r" *```+ *$", lines[n]))
            yield Block(page, at + 1, fence[2], "\n".join(row.removeprefix(fence[1]) for row in lines[at + 1 : end]))
            at, blank = end + 1, True
            continue
        if line.startswith("    ") and blank and not in_list:
            end = next((n for n in range(at, len(lines)) if lines[n].strip() and not lines[n].startswith("    ")), len(lines))
            yield Block(page, at + 1, "indented", "\n".join(row[4:] for row in lines[at:end]).rstrip())
            at, blank = end, True
            continue
        if line.strip() and not line.startswith(" "):
            in_list = re.match(r"[*+-] |\d+\. ", line) is not None
        blank = not line.strip()
        at += 1


def blocks(page: Path) -> list[Block]:
    return list(blocks_of(page.read_text(), page.relative_to(ROOT).as_posix()))


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block (lines that begin with `$ `, their further lines with `> `), each with its output."""
    command: list[str] = []
    shown: list[str] = []
    for line in text.split("\n"):
        if line.startswith("$ "):
            if command:
                yield "\n".join(command), "\n".join(shown)
            command, shown = [line[2:]], []
        elif line.startswith("> ") and command and not shown:
            command.append(line[2:])
        elif not command:
            raise ValueError(f"a console block begins with {line!r}; it has to begin with '$ ' and a command")
        else:
            shown.append(line)
    yield "\n".join(command), "\n".join(shown)


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed. How wide a table is depends on figures such as seconds, and does not count."""
    pattern = []
    for line in _narrow(shown).split("\n"):
        if line.strip() == ANY:
            pattern.append(r"(?:.*\n)*?")
        else:
            pattern.append(r".*?".join(map(re.escape, line.split(ANY))) + r"\n")
    return re.fullmatch("".join(pattern), _narrow(printed) + "\n") is not None


def _narrow(text: str) -> str:
    lines = (re.sub(r"([ ─━═])\1+", r"\1", line.rstrip()) for line in text.strip("\n").split("\n"))
    return "\n".join(lines)


class Shell:
    """A folder in which commands of the pages run as they stand: with `kvactors`, the examples, a trace and a layout in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        programs = folder / "bin"
        programs.mkdir()
        self.folder.mkdir()
        for name, words in {"kvactors": "-m kvactors", "python": ""}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (programs / name).chmod(0o755)
        (self.folder / "examples").symlink_to(ROOT / "examples")
        with (ROOT / "examples/sample_trace.jsonl").open() as rows:
            few = "".join(islice(rows, 12))
        (self.folder / "trace.jsonl").write_text(few)
        (self.folder / "trace.jsonl.gz").write_bytes(gzip.compress(few.encode()))
        (layout,) = (block for block in blocks(ROOT / "docs/layout-files.md") if block.first.startswith("name:"))
        (self.folder / "my-model.yaml").write_text(layout.text)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(("MOONCAKE", "KVACTORS"))}
        self._environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}

    def run(self, command: str) -> str:
        """What a command prints on standard output; progress and complaints go elsewhere. AssertionError if it fails."""
        done = subprocess.run(
            ["bash", "-c", f"set -eo pipefail\n{command}"],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout
