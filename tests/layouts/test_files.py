"""Files that people write are refused rather than misread, with one line that says where and what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvactors.errors import ConfigError, LayoutError
from kvactors.layouts import read_layout_file
from kvactors.stores import FaultPlan
from kvactors.textfiles import BadFileError, read_data

GROUP = "{kind: full, block_tokens: 16, layers: [0], entries: [{name: k, bytes: 8}]}"
LAYOUT = "{name: m, groups: [%s]}"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("f.yaml", "a: 1\nb: 2\na: 3", "line 3: 'a' is given twice"),
        ("f.json", '{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is given twice"),
        ("f.yaml", "a: 01000", "line 1: '01000' would be read as 512"),
        ("f.yaml", "a: 8:32", "'8:32' would be read as 512"),
        ("f.yaml", "a: 1_000", "'1_000' would be read as 1000"),
        ("f.yaml", "a: 0x10", "'0x10' would be read as 16"),
        ("f.yaml", "a: 0b10", "'0b10' would be read as 2"),
        ("f.yaml", "a: 1:30.5", "'1:30.5' would be read as 90.5"),
        ("f.yaml", "a: no", "'no' would be read as false"),
        ("f.yaml", "on: 1", "'on' would be read as true"),
        ("f.yaml", "a: 2024-01-02", "'2024-01-02' would be read as a date"),
        ("f.yaml", "[" * 5000, "is nested too deeply"),
        ("f.json", "[" * 100_000, "is nested too deeply"),
        ("f.yaml", "{", "is not valid YAML"),
        ("f.json", "{", "is not valid JSON"),
        ("f.json", "", "is not valid JSON"),
    ],
)
def test_what_would_be_misread_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadFileError) as caught:
        read_data(path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("{a: 0, b: -12, c: 0.5, d: true, e: False, f: text, g: '01000', h: 1.5e+3, i: null, j: .inf}")
    assert read_data(path) == {
        "a": 0, "b": -12, "c": 0.5, "d": True, "e": False, "f": "text", "g": "01000", "h": 1500.0, "i": None, "j": float("inf"),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["l.yaml", "l.json"])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    entries = [{"name": "k", "bytes": 8}]
    data = {"name": "m", "groups": [{"kind": "full", "block_tokens": 16, "layers": [0], "entries": entries}]}
    path.write_text(json.dumps(data), encoding="utf-8-sig")
    assert read_layout_file(path).model == "m"


def test_not_utf8_and_not_there(tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    with pytest.raises(LayoutError, match="cannot be read: No such file"):
        read_layout_file(path)
    path.write_bytes(b"name: \xff")
    with pytest.raises(LayoutError, match="is not UTF-8 text"):
        read_layout_file(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAYOUT % GROUP.replace("full", "[full]"), r"group 0: kind: unknown kind \['full'\]"),
        (LAYOUT % GROUP.replace("full", "{a: 1}"), "group 0: kind: unknown kind"),
        (LAYOUT % GROUP.replace("16", "01000"), "'01000' would be read as 512"),
        ((LAYOUT % GROUP).replace("name: m", 'name: "a\\nb"'), "name: .* printable"),
        ((LAYOUT % GROUP).replace("name: m", 'name: "a\\e[2J"'), "name: .* printable"),
        (LAYOUT % GROUP.replace("name: k", 'name: "k\\t"'), "entries: name: .* printable"),
        (LAYOUT % GROUP.replace("bytes: 8", 'bytes: 8, dtype: "\\e"'), "dtype: .* printable"),
        ((LAYOUT % GROUP).replace("name: m", "name: no"), "'no' would be read as false"),
    ],
)  # fmt: skip
def test_a_layout_file_that_would_surprise(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "l.yaml"
    path.write_text(text)
    with pytest.raises(LayoutError, match=problem) as caught:
        read_layout_file(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{seed: -1, faults: []}", "seed = -1"),
        ("{seed: null, faults: []}", "seed = None"),
        ("{seed: 1.5}", "seed = 1.5"),
        ("{faults: [{what: [kill]}]}", r"what = \['kill'\]"),
        ("{faults: [{what: kill, call: [put_open]}]}", r"call = \['put_open'\]"),
        ("{faults: [{what: kill, nth: 010}]}", "'010' would be read as 8"),
        ("{seed: 1, seed: 2}", "'seed' is given twice"),
        ("[" * 5000, "nested too deeply"),
        ("[]", "must be a mapping"),
    ],
)
def test_a_fault_plan_that_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        FaultPlan.load(path)
    assert str(path) in str(caught.value)


def test_a_plan_knows_whether_it_has_a_seed() -> None:
    assert FaultPlan.from_mapping({"preset": "evicting"}).seed is None
    assert FaultPlan.from_mapping({"preset": "evicting", "seed": 0}).seed == 0


def test_a_name_that_would_share_keys_with_a_namespace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    path.write_text(LAYOUT.replace("name: m", "name: 'a::m'", 1) % GROUP)
    with pytest.raises(LayoutError, match=r"l\.yaml: model name 'a::m': must not hold '::', which ends a namespace"):
        read_layout_file(path)
