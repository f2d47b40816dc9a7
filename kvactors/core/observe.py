"""Spans of work, for timelines: who did what, from when to when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class Span:
    """One piece of work on one track; times are the injected clock's seconds."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    def span(self, span: Span) -> None:
        """Takes a span; called from any thread, must not block."""
        ...
