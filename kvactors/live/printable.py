"""Values as text for a terminal."""

from __future__ import annotations


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
