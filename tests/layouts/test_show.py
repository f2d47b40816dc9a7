"""`kvactors layout show` prints each entry as a view of local memory: shape, strides, offset, contiguity."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout
from kvactors.layouts import FAMILIES, layout_from_data
from kvactors.layouts.show import EntryView, describe, entry_view, show_layout

PAGE = Path(__file__).parent.parent.parent / "docs/layout-files.md"


def shown(layout: KVLayout, width: int = 200) -> list[str]:
    out = io.StringIO()
    show_layout(layout, console=Console(file=out, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("entry", "view"),
    [
        (CacheEntry("k", 96, 128, "fp16"), EntryView("fp16", 48, 64)),  # the worked example
        (CacheEntry("k", 96, None, "bf16"), EntryView("bf16", 48, 48)),
        (CacheEntry("s", 96, 128, "fp32"), EntryView("fp32", 24, 32)),
        (CacheEntry("k", 96, 128, "fp8_e4m3"), EntryView("fp8_e4m3", 96, 128)),
        (CacheEntry("k", 96, 128), EntryView("byte", 96, 128)),  # no kind
        (CacheEntry("k", 96, 128, "nf4"), EntryView("byte", 96, 128)),  # one of unknown size
        (CacheEntry("k", 97, 128, "fp16"), EntryView("byte", 97, 128)),  # no whole number of elements
        (CacheEntry("k", 96, 129, "fp16"), EntryView("byte", 96, 129)),
    ],
)
def test_the_view_of_an_entry(entry: CacheEntry, view: EntryView) -> None:
    assert entry_view(entry) == view
    assert view.contiguous is (entry.stride == entry.nbytes)


def test_the_table_of_a_padded_layout() -> None:
    entries = [CacheEntry("conv", 96, 128, "fp16"), CacheEntry("ssm", 4096, dtype="fp32"), CacheEntry("x", 6, 9, "fp32")]
    lines = shown(KVLayout("m", [Group(0, GroupKind.STATE, 16, {4: entries})]))
    at = next(i for i, line in enumerate(lines) if "contiguous" in line)
    assert [re.split(r" {2,}", line.strip()) for line in lines[at : at + 4]] == [
        ["layer", "entry", "offset", "bytes", "shape", "stride", "contiguous", "kind"],
        ["4", "conv", "0", "96", "(blocks, 48)", "(64, 1)", "no, 16 padding", "fp16"],
        ["4", "ssm", "96", "4,096", "(blocks, 1024)", "(1024, 1)", "yes", "fp32"],
        ["4", "x", "4,192", "6", "(blocks, 6)", "(9, 1)", "no, 3 padding", "fp32 (bytes)"],
    ]


def cells_of(lines: list[str]) -> list[str]:
    """Every word of the entries, in order."""
    at = next(i for i, line in enumerate(lines) if line.startswith("  key "))
    return [w for w in " ".join(lines[at + 1 :]).replace(", ", " ").replace(",", "").split() if w not in TITLES]


TITLES = ("layer", "entry", "offset", "bytes", "shape", "stride", "contiguous", "kind")


@pytest.mark.parametrize("width", [10, 40, 60, 80, 95])
def test_nothing_is_cut_on_a_narrow_console(width: int) -> None:
    name = "a_cache_whose_name_is_longer_than_a_narrow_console"
    entries = [CacheEntry("conv", 96_000_000, 128_000_000, "fp16"), CacheEntry(name, 4096, dtype="fp32"), CacheEntry("x", 6, 9)]
    layout = KVLayout("m", [Group(0, GroupKind.STATE, 16, dict.fromkeys(range(9), entries))])
    narrow = shown(layout, width)
    assert cells_of(narrow) == cells_of(shown(layout))
    assert narrow[-2].strip() != "…"
    assert sum("…" in line for line in narrow) == 1, "for the layers that are left out"
    assert f"  layer 8, entry {name}" in narrow


@pytest.mark.parametrize("name", FAMILIES)
def test_lines_of_a_narrow_console_are_no_longer_than_it(name: str) -> None:
    lines = shown(FAMILIES[name].build(), 60)
    entries = [line for line in lines if re.match("  layer [0-9]|    ", line)]
    assert len(entries) > 4
    assert all(len(line) <= 60 for line in entries)


def test_views_as_data() -> None:
    layout = KVLayout("m", [Group(0, GroupKind.FULL, 16, {0: [CacheEntry("k", 96, 128, "fp16"), CacheEntry("v", 96)]})])
    k, v = json.loads(json.dumps(describe(layout)))["groups"][0]["ranges"]
    assert k["view"] == {"unit": "fp16", "shape": ["blocks", 48], "stride": [64, 1], "padding": 16, "contiguous": False}
    assert v["view"] == {"unit": "byte", "shape": ["blocks", 96], "stride": [96, 1], "padding": 0, "contiguous": True}
    assert [k["offset"], v["offset"]] == [0, 96]


@pytest.mark.parametrize("name", FAMILIES)
def test_views_of_families_are_the_payload(name: str) -> None:
    layout = FAMILIES[name].build()
    for group in describe(layout)["groups"]:
        assert sum(r["bytes"] for r in group["ranges"]) == group["object_bytes"]
        assert all(r["view"]["contiguous"] for r in group["ranges"])


def test_the_page_shows_what_is_printed() -> None:
    """The table of docs/layout-files.md is that of its own file."""
    text = PAGE.read_text()
    (document,) = re.findall(r"^    name: my-hybrid\n(?:    .*\n)+", text, re.MULTILINE)
    layout = layout_from_data(yaml.safe_load(re.sub(r"^    ", "", document, flags=re.MULTILINE)), "the page")
    (table,) = re.findall(r"^ +layer +entry +offset.*\n(?: +4 .*\n)+", text, re.MULTILINE)
    lines = shown(layout)
    assert [line.removeprefix("    ").rstrip() for line in table.splitlines()] == lines[-3:]
