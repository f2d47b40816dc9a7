"""Real vLLM on the CPU: what its process needs around it, and the arguments that all tests share.

vLLM reads its environment when it is imported, so an engine runs in a process of its own: `run_alone` starts one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm import tiny_models

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in this process
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "kv_cache_memory_bytes": 1 << 28,
    "enable_prefix_caching": True,
    "seed": 0,
    "dtype": "bfloat16",
}

MORE: dict[str, dict[str, Any]] = {
    "dsv3": {"num_gpu_blocks_override": 128},  # without AMX its blocks have 16 tokens in place of 128
}
"""What a model needs besides."""


def start(model: str, folder: Path, **changes: Any) -> Any:
    """A running `LLM`; call it in a process that `run_alone` started."""
    from vllm import LLM

    from tests.vllm import seeded_weights

    arguments = ARGUMENTS | {"load_format": seeded_weights.FORMAT} | MORE.get(model, {}) | changes
    return LLM(model=str(tiny_models.write(model, folder)), **arguments)


def ask_alone(module: str, *words: str | Path, timeout_s: float = 280) -> str:
    """The last line that `run_alone` prints."""
    return run_alone(module, *words, timeout_s=timeout_s).rstrip().rpartition("\n")[2]


def run_alone(module: str, *words: str | Path, timeout_s: float = 280) -> str:
    """What `python -m module words…` prints, with vLLM's environment; a failure shows what it printed last."""
    ran = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if ran.returncode:
        raise AssertionError(f"{module} {' '.join(map(str, words))} ended with {ran.returncode}:\n{ran.stderr[-4000:]}")
    return ran.stdout
