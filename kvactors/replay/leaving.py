"""The end of a replay: the store forgets the local memory and is closed. A store that does not answer makes that take long, so
a further signal cuts it short; the process must then end without destructors, because a native call may still be under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from kvactors.actors.loops import call_on
from kvactors.core.store import Store
from kvactors.errors import KVActorsError
from kvactors.replay.interrupts import Interrupts
from kvactors.replay.local_pool import LocalPool
from kvactors.stores import FaultyStore

SAY_AFTER_S = 1.0
"""Who looks on is told after so long that leaving takes its time."""

_never_freed: list[LocalPool] = []
"""pools that a store call may still touch"""
_cut_short: list[str] = []
"""names of the stores that a signal kept from being left"""


def left_in_a_hurry() -> bool:
    """Whether a signal kept a replay of this process from leaving its store: then end the process by `os._exit`."""
    return bool(_cut_short)


async def leave(pool: LocalPool, store: Store, interrupts: Interrupts | None, on_waiting: Callable[[], None] | None) -> bool:
    """Leaves on a thread of its own, until it is done or a further signal comes. False when it was cut short."""
    if interrupts is not None and interrupts.hopeless:
        _cut(store)
        return False
    loop = asyncio.get_running_loop()
    left: asyncio.Future[None] = loop.create_future()
    hurry: asyncio.Future[None] = loop.create_future()
    act = partial(leave_now, pool, store)
    threading.Thread(target=_run, args=(loop, left, act), name="kvactors leave", daemon=True).start()
    telling = None if on_waiting is None else loop.call_later(SAY_AFTER_S, on_waiting)
    try:
        with _further(interrupts, partial(call_on, loop, partial(_succeed, hurry))):
            await asyncio.wait({left, hurry}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if telling is not None:
            telling.cancel()
        if not left.done():
            _cut(store)
    if not left.done():
        return False
    left.result()
    return True


def leave_now(pool: LocalPool, store: Store) -> None:
    """Waits until no call uses the pool's memory any more, and closes the store; frozen calls are let go first."""
    if isinstance(store, FaultyStore):
        for gate in store.gates:
            store.release(gate)
    for step in (partial(pool.unregister, store), store.close):
        try:
            step()
        except KVActorsError:
            # A store that was killed by a fault plan answers like that, and one whose calls do not return.
            _never_freed.append(pool)


def _further(interrupts: Interrupts | None, act: Callable[[], object]) -> AbstractContextManager[None]:
    return nullcontext() if interrupts is None else interrupts.passed_to(lambda _: act(), only_further=True)


def _cut(store: Store) -> None:
    _cut_short.append(store.name)


def _run(loop: asyncio.AbstractEventLoop, left: asyncio.Future[None], act: Callable[[], None]) -> None:
    try:
        act()
    except BaseException as error:
        call_on(loop, partial(_fail, left, error))
    else:
        call_on(loop, partial(_succeed, left))


def _succeed(left: asyncio.Future[None]) -> None:
    if not left.done():
        left.set_result(None)


def _fail(left: asyncio.Future[None], error: BaseException) -> None:
    if not left.done():
        left.set_exception(error)
