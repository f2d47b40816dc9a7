"""The loop that actors run on, where they have one of their own; and calling on a loop from other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

START_S = 30.0
"""How long the thread of a loop may take to start."""


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it can be installed (a wake costs 1 µs rather than 24), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Has a loop call back, from any thread. False: it is closed, so nobody waits any more. (It may be closed at any time, so
    asking first is no help.)"""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True
