"""`python -m tests.docs.fill PAGE...` writes into console blocks what their commands print, where a page shows else."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import Shell, blocks_of, commands, same


def fill(page: Path) -> None:
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        for block in blocks_of(text, str(page)):
            if block.language == "console":
                parts = []
                for command, shown in commands(block.text):
                    printed = "\n".join(line.rstrip() for line in shell.run(command).strip("\n").split("\n"))
                    parts += ["$ " + command.replace("\n", "\n> "), shown if same(shown, printed) else printed]
                text = text.replace(f"```console\n{block.text}\n```", "```console\n" + "\n".join(filter(None, parts)) + "\n```")
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        fill(Path(name))
