"""Whether a store answers as its contract says, and what becomes of a call that it does not answer so.

Anybody may write a store. What one answers is looked at here, once, before anything else sees it: then nothing has to ask what
`True` means in the place of a list, and whoever wrote it is told which method answered what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from kvactors.core.store import Health, Outcome, RangeBatch, Store
from kvactors.errors import ConfigError, StoreCallError, StoreUnreachableError

T = TypeVar("T")

MOST_CHARACTERS = 300
"""Of a reason: it stands in the story of every block of the call."""
MOST_SAID = 180
"""Of what an exception says, so that its place fits behind it."""

_OURS = __file__.rpartition("core")[0]
"""The package's folder, with its last separator."""

_OUTCOMES: frozenset[type] = frozenset({Outcome})
_BOOLS: frozenset[type] = frozenset({bool, np.bool_})


class CheckedStore:
    """Delegates every call to `store`, whose attributes are looked at and copied once.

    Raises:
        ConfigError: an attribute is not what the contract has; names the store, the attribute, what is needed, what came.
        StoreCallError: a call raised, or answered what it may not; names the store, the method, what was expected, what came.
        StoreUnreachableError: the store raised it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.name = _name(store)
        self.lease_s, self.put_safe_age_s = _seconds(store, "lease_s"), _seconds(store, "put_safe_age_s")
        self.good_range_bytes = _nbytes(store, "good_range_bytes")
        self.reads_whole_objects = _flag(store, "reads_whole_objects")

    def put_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return self._list("put_open", len(keys), _OUTCOMES, self._store.put_open, keys, sizes)

    def put_ranges(self, batch: RangeBatch) -> list[Outcome]:
        return self._list("put_ranges", len(batch.keys), _OUTCOMES, self._store.put_ranges, batch)

    def put_commit(self, keys: Sequence[str]) -> list[Outcome]:
        return self._list("put_commit", len(keys), _OUTCOMES, self._store.put_commit, keys)

    def put_revoke(self, keys: Sequence[str]) -> list[Outcome]:
        return self._list("put_revoke", len(keys), _OUTCOMES, self._store.put_revoke, keys)

    def get_open(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
        return self._list("get_open", len(keys), _OUTCOMES, self._store.get_open, keys, sizes)

    def get_ranges(self, batch: RangeBatch) -> list[Outcome]:
        return self._list("get_ranges", len(batch.keys), _OUTCOMES, self._store.get_ranges, batch)

    def get_close(self, keys: Sequence[str]) -> list[Outcome]:
        return self._list("get_close", len(keys), _OUTCOMES, self._store.get_close, keys)

    def readable(self, keys: Sequence[str]) -> list[bool]:
        return self._list("readable", len(keys), _BOOLS, self._store.readable, keys)

    def health(self) -> Health:
        answer = self._made("health", self._store.health)
        if not isinstance(answer, Health):
            raise StoreCallError(f"store {self._called}: health answered {shown(answer)}; expected a Health")
        return answer

    def register(self, address: int, nbytes: int) -> None:
        self._store.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._store.unregister(address)

    def stats(self) -> Mapping[str, Any]:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()

    @property
    def _called(self) -> str:
        return self.name[:60]

    def _made(self, method: str, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except StoreUnreachableError:
            raise
        except BaseException as error:  # a worker outlives anything that a store raises
            raise StoreCallError(f"store {self._called}: {method} raised {said(error)[:MOST_SAID]}{_at(error)}") from error

    def _list(self, method: str, keys: int, kinds: Collection[type], call: Callable[..., list[T]], *args: Any) -> list[T]:
        answers = self._made(method, call, *args)
        if type(answers) is list and len(answers) == keys and set(map(type, answers)) <= kinds:  # type: ignore[operator]
            return answers
        one_each = f"expected a list with one {'bool' if kinds is _BOOLS else 'Outcome'} for each key"
        raise StoreCallError(f"store {self._called}: {method} answered {came(answers, keys, kinds)}; {one_each}")


def _name(store: Store) -> str:
    if not isinstance(store.name, str) or not store.name.strip():
        raise ConfigError(f"store {type(store).__name__}: name is {shown(store.name)}; give a text that is not empty")
    return store.name


def _seconds(store: Store, attribute: str) -> float:
    value: Any = getattr(store, attribute)
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:  # "not a number" is not
        raise _amiss(store, attribute, value, "a number of seconds, more than 0 (math.inf where nothing expires)")
    return float(value)


def _nbytes(store: Store, attribute: str) -> int:
    value: Any = getattr(store, attribute, 0)
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise _amiss(store, attribute, value, "a whole number of bytes, 0 or more (or leave it out)")
    return int(value)


def _flag(store: Store, attribute: str) -> bool:
    value = getattr(store, attribute, False)
    if type(value) not in _BOOLS:
        raise _amiss(store, attribute, value, "True or False (or leave it out)")
    return bool(value)


def _amiss(store: Store, attribute: str, value: object, needed: str) -> ConfigError:
    return ConfigError(f"store {store.name[:60]}: {attribute} is {shown(value)}; give {needed}")


def in_words(outcome: Outcome, error: BaseException | None) -> str:
    """An outcome as people read it; `error`: what its call raised, which a call that failed as a whole has for its reason."""
    if outcome is Outcome.CALL_FAILED and error is not None:
        return f"{outcome.value}: {reason(error)}"
    return outcome.value


def reason(error: BaseException) -> str:
    """Why a call failed, as a line."""
    return (str(error) if isinstance(error, StoreCallError) else said(error))[:MOST_CHARACTERS]


def said(error: BaseException) -> str:
    """An exception as a line: its type, and what it says."""
    text = " ".join(f"{error}".split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _at(error: BaseException) -> str:
    """Where a store raised, in brackets: the innermost line in the folder of the first file that is none of kvactors', so that
    neither a wrapper of ours nor a library that the store calls is told in its place. Nothing if there is none."""
    trace, folder, at = error.__traceback__, None, ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        inside, _, file = path.rpartition("/")
        if folder is None and not path.startswith(_OURS):
            folder = inside
        if folder == inside:
            at = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return at


def came(answers: object, keys: int, kinds: Collection[type]) -> str:
    """What came in the place of a list that has for each key something of these types."""
    what = shown(answers)
    if type(answers) is list and len(answers) == keys:
        at = next(i for i, answer in enumerate(answers) if type(answer) not in kinds)
        what = f"a list whose item {at} is {shown(answers[at])}"
    return f"{what} for {keys} key{'s'[: keys != 1]}"


def shown(answer: object) -> str:
    """What came, in words, whatever it is: nothing of it is printed that could be long."""
    match answer:
        case None | bool():
            return f"{answer}"
        case Outcome():
            return f"the Outcome {answer.name}"
        case int() if abs(answer) >= 10**20:
            return "a number of more than 20 digits"
        case int() | float():
            return f"the number {answer}"
        case str():
            return f"the text {answer[:40]!r}"
        case bytes():
            return f"{len(answer)} bytes"
        case list() | tuple() | set() | dict():
            return f"a {type(answer).__name__} of {len(answer)}"
        case BaseException():
            return f"the exception {said(answer)}"
        case _:
            return f"an object of type {type(answer).__name__}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in a row, as many as can be read at a glance."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"{name!r}" for name in names[:most]) + more
