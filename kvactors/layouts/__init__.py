"""Layouts by name and from files: the built-in model families, YAML/JSON layout files, and scaling."""

from kvactors.layouts.families import FAMILIES, Family
from kvactors.layouts.file import layout_from_data, read_layout_file
from kvactors.layouts.resolve import find_layout
from kvactors.layouts.scale import boundary_tokens, scale, with_block_tokens

__all__ = [
    "FAMILIES",
    "Family",
    "boundary_tokens",
    "find_layout",
    "layout_from_data",
    "read_layout_file",
    "scale",
    "with_block_tokens",
]
