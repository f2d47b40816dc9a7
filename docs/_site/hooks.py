"""What the site needs beyond the pages of `docs`: links that leave the folder lead into the site too.

On GitHub a page links to files beside `docs` (`../examples/embed.py`). The site has those files as well: READMEs of examples
become pages, other files are copied, and a folder becomes a page that lists its files. A link to anything that is not there
stays as it is, and is a warning, which `mkdocs build --strict` takes for an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`]*`")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)

log = logging.getLogger("mkdocs.hooks.kvactors")


def place(path: str) -> str:
    """Where the site has a file of the repository; both are named from their roots."""
    return path.removeprefix("docs/")


def source(page: str) -> str:
    """The file of the repository that a page of the site is made from."""
    return page if page.startswith("examples/") else f"docs/{page}"


def target(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page means; None for other sites, and for places on the same page."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source(page)), parts.path))


def bare_pipes(row: re.Match[str]) -> str:
    """A row of a table whose code spans have their pipes as they are; here code is taken as it stands."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def listing(folder: Path) -> str:
    """A page for a folder of the repository."""
    rows = "\n".join(f"* [{path.name}]({path.name})" for path in sorted(folder.iterdir()) if path.is_file())
    return f"# {folder.relative_to(ROOT).as_posix()}\n\n{rows}\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds what the pages link to outside of `docs`."""

    def add(path: Path) -> None:
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            files.append(File.generated(config, f"{name}/README.md", content=listing(path)))
            for part in path.iterdir():
                if part.is_file():
                    add(part)
        elif files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))

    for readme in sorted(ROOT.glob("examples/*/README.md")):
        add(readme)
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            path = target(page.src_uri, link)
            if path is None or path.startswith(("docs/", "..")):
                continue
            if (ROOT / path).exists():
                add(ROOT / path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links that leave `docs` into links of the site, and `a\\|b` in a table's code, as GitHub wants it, into `a|b`."""
    here = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        path = target(here, match[1])
        if path is None or not (ROOT / path).exists():
            return match[1]
        name = place(path) + ("/README.md" if (ROOT / path).is_dir() else "")
        fragment = urlsplit(match[1]).fragment
        return posixpath.relpath(name, PurePosixPath(here).parent.as_posix()) + (f"#{fragment}" if fragment else "")

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else ROW.sub(bare_pipes, LINK.sub(turned, part)) for part in parts)
