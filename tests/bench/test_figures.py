"""What a figure says of itself."""

from __future__ import annotations

import pytest

from kvactors.bench.figures import Figure, Target

BY_RATIO = [
    # sign, limit, ours, baseline, ok
    ("<=", 1.05, 1.05, 1.0, True),
    ("<=", 1.05, 1.06, 1.0, False),
    (">=", 0.8, 8.0, 10.0, True),
    (">=", 0.8, 7.9, 10.0, False),
    ("<", 1.0, 1.0, 1.0, False),
    (">", 1.0, 1.0, 1.0, False),
    (">", 1.0, 2.0, 1.0, True),
]


@pytest.mark.parametrize(("sign", "limit", "ours", "baseline", "ok"), BY_RATIO)
def test_a_target_without_a_unit_is_the_ratios(sign: str, limit: float, ours: float, baseline: float, ok: bool) -> None:
    figure = Figure("copy", "put", ours, baseline, "GB/s", Target(sign, limit))
    assert figure.ratio == ours / baseline
    assert figure.ok is ok
    assert figure.as_dict()["target"] == f"{sign} {limit:g}"


@pytest.mark.parametrize(("ours", "ok"), [(25.0, True), (25.1, False)])
def test_a_target_with_a_unit_is_our_own(ours: float, ok: bool) -> None:
    figure = Figure("hooks", "p50", ours, 5.0, "µs", Target("<=", 25, "µs"))
    assert figure.ratio == ours / 5.0
    assert figure.ok is ok
    assert figure.as_dict()["target"] == "<= 25 µs"


def test_without_a_baseline_the_ratio_is_to_the_limit() -> None:
    figure = Figure("step", "fixed", 30.0, None, "µs", Target("<=", 60, "µs"))
    assert figure.as_dict() == {
        "bench": "step",
        "case": "fixed",
        "ratio": 0.5,
        "target": "<= 60 µs",
        "ok": True,
        "ours": 30.0,
        "baseline": None,
        "unit": "µs",
    }


def test_what_has_no_target_is_well() -> None:
    assert Figure("copy", "put", 1.0, 100.0, "GB/s").as_dict()["ok"] is True


def test_a_ratio_is_a_number() -> None:
    with pytest.raises(ValueError, match="is no number"):
        Figure("copy", "put", float("inf"), 1.0, "GB/s").as_dict()
