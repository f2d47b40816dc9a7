"""A live view of a replay: the engine's own, with what the harness counts and how long its steps waited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from kvactors.engine import Engine
from kvactors.live import Address, LiveView
from kvactors.replay.tally import Tally


class Onlooker:
    """Opens the view while the engine runs; `progress` is called after each step."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._view: LiveView | None = None
        self._tally: Tally | None = None
        self._load_s = self._save_s = 0.0

    @contextlib.contextmanager
    def look(self, engine: Engine) -> Iterator[None]:
        """Shows the engine while it is entered.

        Raises:
            ConfigError: the address cannot be had.
        """
        with LiveView(engine, self._address, name="replay", totals=self._totals) as self._view:
            yield

    def progress(self, tally: Tally) -> None:
        """A step has ended: notes how long it waited."""
        self._tally = tally
        load_s, save_s = tally.exposed_load_s - self._load_s, tally.exposed_save_s - self._save_s
        self._load_s, self._save_s = tally.exposed_load_s, tally.exposed_save_s
        if self._view is not None:
            waits = {"exposed_wait_s": load_s, "save_wait_s": save_s}
            self._view.note_waits({key: waited for key, waited in waits.items() if waited > 0})

    def _totals(self) -> Mapping[str, float]:
        tally = self._tally
        return {} if tally is None else {"hit_tokens": tally.hit_tokens, "failed_loads": tally.load_failed}
