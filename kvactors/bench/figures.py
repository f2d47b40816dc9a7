"""What a benchmark answers: figures beside their baselines, each with its target if it has one."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvactors.errors import KVActorsError

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


class Skipped(KVActorsError):
    """A benchmark that cannot run here; says what is missing, and how to install it."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should reach.

    Attributes:
        sign: one of <=, >=, < and >.
        limit: of the ratio; with a unit, of `ours` itself.
    """

    sign: str
    limit: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}{' ' + self.unit if self.unit else ''}"

    def met_by(self, ratio: float, ours: float) -> bool:
        return _HOLDS[self.sign](ours if self.unit else ratio, self.limit)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured case.

    Attributes:
        bench, case: which benchmark, and what of it; the case names what it is measured beside.
        ours, baseline: medians, both in `unit`; without a baseline the target's own limit stands for it.
    """

    bench: str
    case: str
    ours: float
    baseline: float | None
    unit: str
    target: Target | None = None

    @property
    def ratio(self) -> float:
        """ours / baseline, or ours / limit. Always a finite number: a baseline that took no time at all is a mistake."""
        below = self.baseline
        if below is None:
            assert self.target is not None, "a figure has a baseline, a target, or both"
            below = self.target.limit
        return self.ours / below

    @property
    def ok(self) -> bool:
        return self.target is None or self.target.met_by(self.ratio, self.ours)

    def as_dict(self) -> dict[str, Any]:
        """A row of the JSON answer."""
        if not math.isfinite(self.ratio):
            raise ValueError(f"{self.bench}, {self.case}: {self.ours} / {self.baseline} is no number")
        return {
            "bench": self.bench,
            "case": self.case,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "ok": self.ok,
            "ours": self.ours,
            "baseline": self.baseline,
            "unit": self.unit,
        }


@dataclass(slots=True)
class Answer:
    """What one benchmark found; `notes`: lines for a reader, which are no figures."""

    figures: Sequence[Figure] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)
