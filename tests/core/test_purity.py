"""Who may import whom: the table of the architecture, kept by parsing every module.

Imports inside functions and under TYPE_CHECKING count too: a room that needs another's types depends on it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "kvactors"

ANY = frozenset({"any"})
ROOMS: dict[str, frozenset[str]] = {
    # room: the other rooms it may import; errors are open to all, and log to all but core
    "errors": frozenset(),
    "log": frozenset(),
    "textfiles": frozenset(),
    "fitting": frozenset(),
    "core": frozenset(),
    "messages": frozenset({"core"}),
    "stores": frozenset({"core", "textfiles"}),
    "memory": frozenset({"core"}),
    "devices": frozenset({"core"}),
    "layouts": frozenset({"core", "textfiles", "fitting"}),
    "actors": frozenset({"core", "messages"}),
    "disagg": frozenset({"core", "memory", "messages", "actors", "devices", "stores"}),
    # The engine puts the pieces together; it names the CPU's clock and device events as its defaults.
    "engine": frozenset({"core", "messages", "actors", "devices"}),
    "live": frozenset({"core", "engine", "console", "fitting", "__init__"}),
    "vllm": frozenset({"core", "memory", "stores", "devices", "disagg", "engine", "live"}),
    # What a person runs may use anything.
    "replay": ANY,
    "simulate": ANY,
    "bench": ANY,
    "console": ANY,
    "doctor": ANY,
    "cli": ANY,
    "__main__": ANY,
    "__init__": ANY,
}

_CONCURRENCY = {"asyncio", "anyio", "trio", "uvloop", "threading", "_thread", "concurrent", "multiprocessing", "queue", "sched"}
_CLOCK_AND_CHANCE = {"time", "datetime", "random", "secrets", "uuid"}
_IO = {"io", "os", "pathlib", "shutil", "tempfile", "glob", "mmap", "socket", "ssl", "select", "selectors", "signal"}
_IO |= {"subprocess", "urllib", "http", "logging", "ctypes", "importlib", "sys"}
IMPURE = frozenset(_CONCURRENCY | _CLOCK_AND_CHANCE | _IO)
"""What `core` must do without; of other people's packages it may use numpy alone."""

HOMES: dict[str, frozenset[str]] = {
    "torch": frozenset({"memory", "devices", "vllm"}),
    "torch_npu": frozenset({"memory", "devices", "vllm"}),
    "vllm": frozenset({"vllm"}),
    "vllm_ascend": frozenset({"vllm"}),
    "mooncake": frozenset({"stores", "disagg"}),
}
"""Optional packages, and the rooms below the command line that may import them."""

LAZY = {"devices": frozenset({"torch", "torch_npu"}), "stores": frozenset({"mooncake"}), "disagg": frozenset({"mooncake"})}
"""Imports that must stay inside functions, so that the room loads without the package."""


class Import(NamedTuple):
    line: int
    name: str
    lazy: bool


def imports(source: str, package: str) -> Iterator[Import]:
    """Every module that the source imports; `package` is where its relative imports start."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(node.lineno, alias.name, lazy)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""
                base = ".".join(part for part in (base, module or "") if part)
                # `from kvactors import core` imports a room; of other packages the base is enough.
                for alias in names:
                    yield Import(node.lineno, f"{base}.{alias.name}" if base == "kvactors" else base, lazy)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"), args=args):
                if args and isinstance(args[0], ast.Constant) and isinstance(args[0].value, str):
                    yield Import(node.lineno, args[0].value, lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "__init__"


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What the module imports against the table, one line each."""
    package = module if is_package else module.rpartition(".")[0]
    room = room_of(module)
    allowed = ROOMS[room]
    found = []
    for line, name, lazy in imports(source, package):
        top = name.split(".")[0]
        if top == "kvactors":
            target = room_of(name)
            everywhere = {room, "errors"} if room == "core" else {room, "errors", "log"}
            if allowed is not ANY and target not in everywhere and target not in allowed:
                found.append(f"{module}:{line}: {room} must not import {name}")
        elif allowed is not ANY and room not in HOMES.get(top, {room}):
            found.append(f"{module}:{line}: {room} must not import {name}; it belongs in {sorted(HOMES[top])}")
        elif top in LAZY.get(room, ()) and not lazy:
            found.append(f"{module}:{line}: {room} must import {name} inside a function")
        elif room == "core" and (top in IMPURE or (top not in sys.stdlib_module_names and top != "numpy")):
            found.append(f"{module}:{line}: core is pure and must not import {name}")
    return found


def modules() -> list[tuple[str, Path]]:
    out = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        out.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return out


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_modules_import_only_what_their_room_may(module: str, path: Path) -> None:
    assert violations(module, path.read_text(encoding="utf-8"), path.name == "__init__.py") == []


def test_every_room_has_a_row() -> None:
    names = {p.stem if p.is_file() else p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert names <= set(ROOMS), "a new room needs a row in the table of the architecture and in this one"


BAD = [
    ("kvactors.core.layout", "import asyncio", "core is pure"),
    ("kvactors.core.layout", "import os.path", "core is pure"),
    ("kvactors.core.layout", "from time import monotonic", "core is pure"),
    ("kvactors.core.layout", "def f():\n    import threading", ":2: core is pure"),
    ("kvactors.core.layout", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import anyio", ":3: core is pure"),
    ("kvactors.core.layout", "import structlog", "core is pure"),
    ("kvactors.core.layout", "import torch", "core must not import torch; it belongs in"),
    ("kvactors.core.layout", "from vllm.v1 import core", "core must not import vllm.v1"),
    ("kvactors.core.layout", "import kvactors.messages", "core must not import kvactors.messages"),
    ("kvactors.core.layout", "from kvactors import stores", "core must not import kvactors.stores"),
    ("kvactors.core.layout", "from kvactors import __version__", "core must not import kvactors.__version__"),
    ("kvactors.core.layout", "from ..actors import pool", "core must not import kvactors.actors"),
    ("kvactors.core.layout", "import importlib\nimportlib.import_module('torch')", "core must not import torch"),
    ("kvactors.messages", "from kvactors.actors.pool import TransferPool", "messages must not import kvactors.actors.pool"),
    ("kvactors.actors.pool", "from kvactors.stores.memory import MemoryStore", "actors must not import kvactors.stores.memory"),
    ("kvactors.actors.pool", "from kvactors.engine import Engine", "actors must not import kvactors.engine"),
    ("kvactors.stores.memory", "from kvactors.messages import Open", "stores must not import kvactors.messages"),
    ("kvactors.stores.mooncake", "import mooncake.store", "stores must import mooncake.store inside a function"),
    ("kvactors.stores.memory", "import torch", "stores must not import torch"),
    ("kvactors.devices", "import torch", "devices must import torch inside a function"),
    ("kvactors.engine", "from kvactors.stores import open_store", "engine must not import kvactors.stores"),
    ("kvactors.memory", "from kvactors.engine import Engine", "memory must not import kvactors.engine"),
    ("kvactors.vllm.worker", "from kvactors.replay import trace", "vllm must not import kvactors.replay"),
    ("kvactors.errors", "from kvactors.core.ids import GroupId", "errors must not import kvactors.core.ids"),
]


@pytest.mark.parametrize(("module", "source", "says"), BAD)
def test_a_bad_import_is_found(module: str, source: str, says: str) -> None:
    assert any(says in line for line in violations(module, source))


GOOD = [
    ("kvactors.core.layout", "import math, json, hashlib\nimport numpy as np\nfrom kvactors.errors import LayoutError"),
    ("kvactors.core.layout", "from kvactors.core.ids import GroupId\nfrom kvactors import errors"),
    ("kvactors.core.layout", "from . import ids"),
    ("kvactors.actors.pool", "import asyncio, threading\nfrom kvactors.messages import Open"),
    ("kvactors.devices", "def cuda():\n    import torch"),
    ("kvactors.stores.mooncake", "def connect():\n    from mooncake import store"),
    ("kvactors.vllm.worker", "import torch\nimport vllm\nfrom kvactors.engine import Engine"),
    ("kvactors.cli", "import torch\nfrom kvactors.replay.command import run"),
]


@pytest.mark.parametrize(("module", "source"), GOOD)
def test_a_good_import_is_not(module: str, source: str) -> None:
    assert violations(module, source) == []
