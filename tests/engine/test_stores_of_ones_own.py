"""A store of one's own: what it lacks is said when the engine is made, what it answers amiss is said where the call failed."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvactors.actors import saver
from kvactors.core.answers import CheckedStore, in_words, reason
from kvactors.core.stats import cause_label
from kvactors.core.store import STORE_CALLS, STORE_NEEDS, Health, Outcome, Store, require_store
from kvactors.engine import BlockingEngine, Engine
from kvactors.errors import ConfigError, StoreCallError, StoreUnreachableError
from kvactors.stores import FaultyStore, MemoryStore
from tests.engine.rig import Rig, full_layout, hashes


class Counting:
    """Someone's first try: the calls that pages tell of, and no attributes."""

    def put_open(self, keys: Any, sizes: Any) -> None: ...
    def get_open(self, keys: Any, sizes: Any) -> None: ...


def test_the_list_is_the_protocols() -> None:
    named = {n for n in vars(Store) if not n.startswith("_")} | set(Store.__annotations__)
    assert set(STORE_NEEDS) == named


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="store Counting lacks name, lease_s, put_safe_age_s, put_ranges, put_commit"):
        require_store(Counting())
    with pytest.raises(ConfigError, match="store Counting lacks"):
        Engine(None, Counting(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [MemoryStore, FaultyStore])
def test_the_projects_own_have_all(kind: type) -> None:
    given = set(dir(kind)) | set(getattr(kind, "__annotations__", ()))
    assert set(STORE_CALLS) <= given or hasattr(kind, "__getattr__")


class CountingStore:
    """As docs/design/store-contract.md has it."""

    def __init__(self, store: Any) -> None:
        self._store, self.reads = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_ranges(self, batch: Any) -> Any:
        self.reads += len(batch.keys)
        return self._store.get_ranges(batch)


def test_a_wrapper_is_a_store() -> None:
    require_store(CountingStore(MemoryStore()))


# -- its attributes ----------------------------------------------------------------------------------------------------

SECONDS = "give a number of seconds, more than 0"
NBYTES = "give a whole number of bytes, 0 or more"

ATTRIBUTES: list[tuple[str, Any, str]] = [
    ("name", None, "store Named: name is None; give a text that is not empty"),
    ("name", " ", "store Named: name is the text ' '; give a text that is not empty"),
    *((name, "10", f"store mine: {name} is the text '10'; {SECONDS}") for name in ("lease_s", "put_safe_age_s")),
    *((name, None, f"store mine: {name} is None; {SECONDS}") for name in ("lease_s", "put_safe_age_s")),
    *((name, 0.0, f"store mine: {name} is the number 0.0; {SECONDS}") for name in ("lease_s", "put_safe_age_s")),
    ("lease_s", math.nan, f"store mine: lease_s is the number nan; {SECONDS}"),
    ("lease_s", True, f"store mine: lease_s is True; {SECONDS}"),
    ("put_safe_age_s", -1, f"store mine: put_safe_age_s is the number -1; {SECONDS}"),
    ("good_range_bytes", "4K", f"store mine: good_range_bytes is the text '4K'; {NBYTES}"),
    ("good_range_bytes", None, f"store mine: good_range_bytes is None; {NBYTES}"),
    ("good_range_bytes", 4096.0, f"store mine: good_range_bytes is the number 4096.0; {NBYTES}"),
    ("good_range_bytes", -1, f"store mine: good_range_bytes is the number -1; {NBYTES}"),
    ("reads_whole_objects", "no", "store mine: reads_whole_objects is the text 'no'; give True or False"),
    ("put_open", None, "store Named: put_open cannot be called; it must be a method"),
]
"""Attribute, what it is, how that is said."""


class Named(MemoryStore):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.name = "mine"
        vars(self).update(attributes)


@pytest.mark.parametrize(("attribute", "value", "words"), ATTRIBUTES)
@pytest.mark.parametrize("kind", [Engine, BlockingEngine])
def test_an_attribute_that_the_contract_does_not_have(kind: Any, attribute: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(full_layout(), Named(**{attribute: value}), {})
    assert f"{refused.value}".startswith(words)


@pytest.mark.parametrize(
    "attributes",
    [
        {"lease_s": math.inf, "put_safe_age_s": 1},
        {"lease_s": np.float32(3), "put_safe_age_s": np.int64(2)},
        {"good_range_bytes": np.int64(4096), "reads_whole_objects": np.True_},
    ],
)
def test_numbers_of_any_kind_are_taken(attributes: dict[str, Any]) -> None:
    checked = CheckedStore(Named(**attributes))
    assert {name: getattr(checked, name) for name in attributes} == attributes
    assert {type(getattr(checked, name)) for name in attributes} <= {float, int, bool}


def test_a_class_is_no_store() -> None:
    with pytest.raises(ConfigError, match=r"store MemoryStore is a class; give an instance of it, as MemoryStore\(\.\.\.\)"):
        BlockingEngine(full_layout(), MemoryStore, {})  # type: ignore[arg-type]  # a class is the mistake


@pytest.mark.parametrize("bases", [None, [1, 2]])
def test_bases_are_a_mapping(bases: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^bases: came (None|a list of 2); give \(group id, physical layer, entry name\) -> "
    ):
        BlockingEngine(full_layout(), MemoryStore(), bases)


# -- what it answers amiss ---------------------------------------------------------------------------------------------

Answer = Callable[[Any], Any]


class Odd:
    """A right store but for one method, whose answer is changed after the call was made."""

    def __init__(self, store: Any, method: str, answer: Answer) -> None:
        self._store, self._method, self._answer = store, method, answer

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        return (lambda *args: self._answer(real(*args))) if name == self._method else real


def raises(error: BaseException) -> Answer:
    def answer(_: Any) -> Any:
        raise error

    return answer


CAME: dict[str, tuple[Answer, str]] = {
    "a bool": (lambda _: True, "answered True for 3 keys"),
    "nothing": (lambda _: None, "answered None for 3 keys"),
    "a number": (lambda _: -800, "answered the number -800 for 3 keys"),
    "an object": (lambda _: object(), "answered an object of type object for 3 keys"),
    "one too few": (lambda right: right[:-1], "answered a list of 2 for 3 keys"),
    "one too many": (lambda right: [*right, right[0]], "answered a list of 4 for 3 keys"),
    "a tuple": (tuple, "answered a tuple of 3 for 3 keys"),
    "text": (lambda right: [right[0], "ok", "ok"], "answered a list whose item 1 is the text 'ok' for 3 keys"),
    "nothing inside": (lambda right: [None] * len(right), "answered a list whose item 0 is None for 3 keys"),
    "an error": (raises(OSError(28, "no space left\non it")), "raised OSError: [Errno 28] no space left on it"),
    "an error without words": (raises(KeyError()), "raised KeyError"),
    "an end": (raises(SystemExit("over")), "raised SystemExit: over"),
}
"""What came, and how it is said."""

METHODS = ("put_open", "put_ranges", "put_commit", "get_open", "get_ranges", "readable")


async def played(method: str, answer: Answer) -> tuple[Rig, list[str], dict[str, str]]:
    """Saves three blocks, loads them as another request; the rig, both stories, reasons of failed loads by request."""
    rig = Rig(full_layout())
    bases = {where: array.ctypes.data for where, array in rig.local.items()}
    rig.engine = Engine(rig.layout, Odd(rig.store, method, answer), bases, rig.config)  # type: ignore[arg-type]
    rig.engine.keep_stories()
    async with rig:
        await rig.save("a", hashes(3))
        step, _ = await rig.run(rig.request("b", hashes(3), load={0: [0, 1, 2]}, first_id=9))
        await rig.engine.drain()
        assert rig.memory.stats()["open_puts"] == 0
        told = [line for name in "ab" for line in rig.engine.story(name)]
        return rig, told, {name: failure.reason for name, failure in step.failures.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("came", CAME)
async def test_what_was_expected_and_what_came_is_said_everywhere(
    method: str, came: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, said = CAME[came]
    whole = f"store memory: {method} {said}"
    rig, told, reasons = await played(method, answer)
    logged = caplog.text.replace("\\\\n", " ")
    assert whole in logged
    assert any(whole in line for line in told), told
    if method.startswith("get"):
        assert whole in reasons["b"]
    sessions = rig.engine.stats().sessions
    assert sessions.open_now == 0
    assert sessions.put_opened == sessions.put_committed + sessions.put_revoked
    assert set(sessions.revoked_by) <= {"call failed", "preparation failed"}, "a label has no details"


@pytest.mark.parametrize("method", ["get_close", "put_revoke"])
@pytest.mark.parametrize("came", CAME)
async def test_a_session_ends_although_its_end_is_not_answered(method: str, came: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close is made again, and then the lease ends it; a revoke too, and then nobody uses the key."""
    monkeypatch.setattr(saver, "REVOKE_RETRY_S", (0.0, 0.0, 0.0))
    odd = Odd(
        MemoryStore(), "put_ranges" if method == "put_revoke" else "none", lambda right: [Outcome.TRANSFER_FAILED] * len(right)
    )
    answer, _ = CAME[came]
    rig = Rig(full_layout(), inner=odd)  # type: ignore[arg-type]
    bases = {where: array.ctypes.data for where, array in rig.local.items()}
    rig.engine = Engine(rig.layout, Odd(rig.store, method, answer), bases, rig.config)  # type: ignore[arg-type]
    async with rig:
        await rig.save("a", hashes(3))
        if method == "get_close":
            await rig.run(rig.request("b", hashes(3), load={0: [0, 1, 2]}, first_id=9))
        await rig.engine.drain(5.0)
        assert rig.engine.stats().sessions.open_now == 0


def test_what_goes_through_as_it_is() -> None:
    checked = CheckedStore(Odd(MemoryStore(), "readable", raises(StoreUnreachableError("no master"))))  # type: ignore[arg-type]
    with pytest.raises(StoreUnreachableError, match=r"^no master$"):
        checked.readable(["k"])
    assert checked.health() == Health(True)
    assert checked.lease_s == MemoryStore().lease_s
    assert checked.stats()["open_puts"] == 0


RAISING = """import json

class Mine:
    def raises(self, keys, sizes):
        return self.divide(len(keys))

    def divide(self, n):
        return [1 / 0] * n

    def in_a_library(self, keys, sizes):
        return json.loads("{")

    def too_few(self):
        pass
"""


def test_where_a_store_raised_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_raising.py").write_text(RAISING)
    monkeypatch.syspath_prepend(tmp_path)
    mine = import_module("mine_raising").Mine()
    store = Named()
    for call, words in (
        (mine.raises, "raised ZeroDivisionError: division by zero (mine_raising.py:8)"),
        (mine.in_a_library, "(char 1) (mine_raising.py:11)"),
        (mine.too_few, "takes 1 positional argument but 3 were given"),
    ):
        store.put_open = call  # type: ignore[method-assign]  # what a store of one's own may do
        for behind in (store, FaultyStore(store)):
            with pytest.raises(StoreCallError) as raised:
                CheckedStore(behind).put_open(["k"], [1])
            assert f"{raised.value}".endswith(words)


def test_the_place_stands_behind_a_long_text_too() -> None:
    store = Named(name="n" * 80)
    store.put_commit = raises(ValueError("x" * 500))  # type: ignore[method-assign]  # as above
    with pytest.raises(StoreCallError) as raised:
        CheckedStore(store).put_commit(["k"])
    assert reason(raised.value) == f"{raised.value}"
    assert Path(__file__).name in f"{raised.value}"


@pytest.mark.parametrize("answer", [True, None, "ok", {"ok": True}])
def test_health_is_a_health(answer: Any) -> None:
    checked = CheckedStore(Odd(MemoryStore(), "health", lambda _: answer))  # type: ignore[arg-type]
    with pytest.raises(StoreCallError, match=r"^store memory: health answered .*; expected a Health$"):
        checked.health()


@pytest.mark.parametrize("answer", [[1], [Outcome.OK], [Outcome.NOT_FOUND], [-1]])
def test_readable_answers_bools(answer: list[Any]) -> None:
    """An Outcome, or a code of a client library, is true whatever it means: a block would count as saved that is not there."""
    checked = CheckedStore(Odd(MemoryStore(), "readable", lambda _: answer))  # type: ignore[arg-type]
    with pytest.raises(StoreCallError, match="readable answered a list whose item 0 is the"):
        checked.readable(["k"])


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (Outcome.CALL_FAILED, ValueError("x"), "call failed: ValueError: x"),
        (
            Outcome.CALL_FAILED,
            StoreCallError("store a: put_open answered None"),
            "call failed: store a: put_open answered None",
        ),
        (Outcome.CALL_FAILED, None, "call failed"),
        (Outcome.UNREACHABLE, StoreUnreachableError("no master"), "unreachable"),
        (Outcome.NO_REPLICA, None, "no replica"),
    ],
)
def test_a_failed_call_is_said_with_its_reason(outcome: Outcome, error: Exception | None, words: str) -> None:
    assert in_words(outcome, error) == words
    assert cause_label(f"layer 3: {words}") == outcome.value


def test_a_reason_has_an_end() -> None:
    assert len(in_words(Outcome.CALL_FAILED, ValueError("x" * 500))) <= 320
