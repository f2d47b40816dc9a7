"""Tables of the pages that say how it is built and run are those of the code, and what they name is there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import reduce
from pathlib import Path

import pytest

from kvactors import messages
from kvactors.actors import group, put_opens
from kvactors.core.sessions import GET_TRANSITIONS, PUT_TRANSITIONS
from kvactors.disagg.states import PEER_TRANSITIONS, PULL_TRANSITIONS, RECEIVE_TRANSITIONS, SEND_TRANSITIONS
from tests.core.test_purity import ANY, ROOMS
from tests.docs.blocks import ROOT
from tests.sim.mutants import MUTANTS

SESSIONS = (ROOT / "docs/design/sessions.md").read_text()
INVARIANTS = (ROOT / "docs/design/invariants.md").read_text()
Transitions = Mapping[tuple[Enum, Enum], Enum]


def rows(text: str, heading: str) -> Iterator[list[str]]:
    """The cells of each row of the first table whose heading begins so."""
    body = text.split(f"\n| {heading}", 1)[1].split("\n\n", 1)[0].strip().split("\n")[2:]
    for row in body:
        yield [cell.strip() for cell in row.strip("|").split("|")]


def named(transitions: Transitions) -> set[tuple[str, str, str]]:
    return {(before.value, event.value, after.value) for (before, event), after in transitions.items()}


@pytest.mark.parametrize(
    ("heading", "transitions"),
    [
        ("in prefill: a request", SEND_TRANSITIONS),
        ("in prefill: a decode worker", PULL_TRANSITIONS),
        ("in decode: a request", RECEIVE_TRANSITIONS),
        ("in decode: a prefill worker", PEER_TRANSITIONS),
    ],
)
def test_the_records_of_a_hand_off(heading: str, transitions: Transitions) -> None:
    shown = [(before, event, after) for before, events, after in rows(SESSIONS, heading) for event in events.split(", ")]
    assert set(shown) == named(transitions)
    assert len(shown) == len(transitions)


@pytest.mark.parametrize(
    ("part", "transitions", "events"),
    [("## A put session", PUT_TRANSITIONS, "PutEvent"), ("## A get session", GET_TRANSITIONS, "GetEvent")],
)
def test_the_states_of_a_session(part: str, transitions: Transitions, events: str) -> None:
    table = list(rows(SESSIONS.split(part)[1], "in | event"))
    assert {tuple(row[:3]) for row in table} == named(transitions)
    assert len(table) == len(transitions)
    shown = {(event, module) for _, event, _, modules, *_ in table for module in modules.split(", ")}
    assert shown == set(causes(events))
    for *_, at, because in table:
        for name in re.findall(r"`(\w+)`", at):
            assert any(hasattr(module, name) for module in (messages, put_opens, group)), name
        assert because


def causes(events: str) -> Iterator[tuple[str, str]]:
    """Which file of the engine causes which event of a session."""
    kinds = importlib.import_module("kvactors.core.sessions").__dict__[events]
    for path in [*sorted((ROOT / "kvactors/actors").glob("*.py")), ROOT / "kvactors/core/sessions.py"]:
        text = path.read_text().partition("class SessionTable")[2] if path.stem == "sessions" else path.read_text()
        for name in set(re.findall(rf"\b{events}\.([A-Z_]+)\b", text)):
            yield kinds[name].value, path.stem


def test_the_rooms_of_the_architecture_are_those_that_are_enforced() -> None:
    table = list(rows((ROOT / "docs/architecture.md").read_text(), "room | "))
    shown = {
        room.removesuffix("/").removesuffix(".py"): ANY
        if may == "anything"
        else frozenset(re.findall(r"\w+", may)) & set(ROOMS)
        for names, _, may in table
        for room in re.findall(r"`([\w./]+)`", names)
    }
    everywhere = {"errors", "log", "__init__", "__main__"}
    assert shown == {
        room: may if may is ANY else may - everywhere - {room} for room, may in ROOMS.items() if room not in everywhere
    }


def test_the_environment_variables_are_those_that_are_read() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "kvactors").rglob("*.py"))
    read = set(re.findall(r"\bKVACTORS_[A-Z_]+\b", sources))
    shown = {row[0].strip("`") for row in rows((ROOT / "docs/operating.md").read_text(), "variable")}
    assert shown == read | {"MOONCAKE_CONFIG_PATH"}


PARTS = dict(re.findall(r"^## (I\d+) [^\n]*\n(.*?)(?=^## |\Z)", INVARIANTS, re.MULTILINE | re.DOTALL))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", INVARIANTS)))
PLACES = sorted(set(re.findall(r"`((?:core|actors|engine|simulate)/\w+\.py): ([\w.]+)`", INVARIANTS)))


def test_every_invariant_has_its_part() -> None:
    known = re.findall(r"^\| (I\d+) (\w[\w ]*) \| (.+) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert [number for number, *_ in known] == list(PARTS) == [f"I{n}" for n in range(1, 13)]
    for number, name, _ in known:
        assert f"\n## {number} {name}\n" in INVARIANTS
        for what in ("* **held by**", "* **tests**", "* **watched by**"):
            assert what in PARTS[number], f"{number}: {what}"


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_test_of_the_page_is_there(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(" if name else "^def test_", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_a_place_of_the_page_is_there(path: str, name: str) -> None:
    module = importlib.import_module("kvactors." + Path(path).with_suffix("").as_posix().replace("/", "."))
    assert reduce(getattr, name.split("."), module) is not None


def test_the_seeded_bugs_are_those_of_the_simulator() -> None:
    shown = [
        name
        for part in PARTS.values()
        for line in re.findall(r"\* \*\*seeded bugs\*\*: (.*)", part)
        for name in re.findall(r"`(\w+)`", line)
    ]
    assert set(shown) <= set(MUTANTS)
    assert set(MUTANTS) - set(shown) == set(re.findall(r"`(\w+)`", INVARIANTS.split("## Other seeded bugs\n")[1]))
    assert f"; {len(MUTANTS)} seeded bugs that it must catch" in (ROOT / "README.md").read_text()
