"""From what a user typed (a family's name or a file) to a layout."""

from __future__ import annotations

import difflib
import os

from kvactors.core.layout import KVLayout
from kvactors.errors import LayoutError
from kvactors.layouts.families import FAMILIES, Family
from kvactors.layouts.file import read_layout_file


def find_layout(name_or_file: str) -> tuple[KVLayout, Family | None]:
    """The layout of a built-in family, or of a layout file; the family is None for a file.

    Raises:
        LayoutError: unknown name (with close ones), unreadable or contradictory file.
    """
    family = FAMILIES.get(name_or_file)
    if family is not None:
        return family.build(), family
    is_file = name_or_file.endswith((".yaml", ".yml", ".json")) or os.sep in name_or_file or os.path.exists(name_or_file)
    if is_file:
        return read_layout_file(name_or_file), None
    if name_or_file == "-":
        raise LayoutError("layout '-': is no name and no file; for standard input give /dev/stdin")
    close = difflib.get_close_matches(name_or_file.lower(), FAMILIES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"built in are {', '.join(FAMILIES)}"
    raise LayoutError(f"unknown layout {name_or_file!r}: {hint} (or give a .yaml or .json file)")
