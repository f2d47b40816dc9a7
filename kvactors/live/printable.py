"""Values as text: for a terminal, and as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def encoded(value: Any) -> bytes:
    """As a line of JSON, whatever texts others chose: what UTF-8 cannot say (half of a surrogate pair, as in the names of files
    that are no UTF-8) becomes a question mark."""
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def printable(text: str, most: int = 200) -> str:
    """Text that somebody else chose, without what a terminal obeys: control characters and escapes are spelt out."""
    kept = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode("ascii", "replace") for c in kept)


def shown_bytes(count: float) -> str:
    """1536 as 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def shown_seconds(seconds: float) -> str:
    """0.0025 as 2.5 ms, 125 as 2 min 5 s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
