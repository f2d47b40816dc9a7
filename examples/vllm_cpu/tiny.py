"""Tiny models with random weights, and vLLM around them on a CPU: what `run.py` and `compare.py` share.

vLLM reads its environment when it is imported, so this module imports it only inside of functions.
"""

from __future__ import annotations

import json
import os
import random
import time
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in this process
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}
DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

SEGMENT_BYTES, BUFFER_BYTES = 256 << 20, 64 << 20
"""What each client gives to its Mooncake pool, and keeps for itself."""

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {  # full attention only: one group, loaded layer by layer
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
    },
    "gptoss": {  # windows of 64 tokens and full attention by turns: two groups
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "experts_per_token": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000,
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
    },
    "qwen3next": {  # three gated delta nets and one full attention: four groups, three of them recurrent state
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.5,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}


def require_vllm() -> None:
    """Ends the program with a line that says how vLLM is installed, if it is not."""
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed here; in the root of the repository, for a CPU: .ci/install-vllm VENV")


def prompts(count: int, tokens: int) -> list[dict[str, list[int]]]:
    """Random prompts that have nothing in common, the same each time."""
    draw = random.Random(1)
    return [{"prompt_token_ids": [draw.randrange(3, 500) for _ in range(tokens)]} for _ in range(count)]


def pool_file(folder: Path, master: str) -> Path:
    """A Mooncake configuration file; `mode` is for vLLM's own connector."""
    path = folder / "mooncake.json"
    pool = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "mode": "embedded",
        "global_segment_size": SEGMENT_BYTES,
        "local_buffer_size": BUFFER_BYTES,
    }
    path.write_text(json.dumps(pool))
    return path


def start(model: str, folder: Path, kv_transfer: dict[str, Any], pause: bool = True) -> Any:
    """A running `vllm.LLM`, warmed up. Sets the environment: call it before anything else imports vLLM.

    Args:
        kv_transfer: arguments of `KVTransferConfig` that name the connector.
        pause: see `pause_as_a_server`.
    """
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.config import KVTransferConfig

    path = folder / f"tiny-{model}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(BASE | MODELS[model]))
    llm = LLM(
        model=str(path),
        load_format=register_seeded_weights(),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_gpu_blocks_override=256,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=True,
        seed=0,
        dtype="bfloat16",
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **kv_transfer),
    )
    if pause:
        pause_as_a_server(llm)
    generate(llm, [{"prompt_token_ids": [3, 4, 5, 6, 7]}], 1)  # a first step of one token can crash some CPU kernels
    return llm


def pause_as_a_server(llm: Any) -> None:
    """Gives other threads a millisecond after a step in which nothing could run, so that loads get on.

    A server's engine does that by itself; the one of `LLM` in one process steps on at once and holds Python's lock meanwhile.
    """
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def stepped() -> Any:
        outputs, ran = step()
        if not ran and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, ran

    core.step_fn = stepped


def stop(llm: Any) -> None:
    """Ends the engine and its store clients, while the master is still there."""
    llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, requests: list[dict[str, list[int]]], tokens: int) -> list[Any]:
    """The outputs, greedy: the same cache gives the same tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    return list(llm.generate(requests, sampling, use_tqdm=False))


def register_seeded_weights() -> str:
    """A load format that draws each weight by its parameter's name, in place of a checkpoint.

    vLLM's own "dummy" weights are so small that the last token alone decides what comes next, and a wrong cache would not show.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("seeded")
    class SeededLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ARG002 - vLLM's interface
            with torch.no_grad():
                for name, weight in model.state_dict().items():
                    if weight.is_floating_point() and weight.ndim:
                        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
                        weight.copy_(_scaled(name, noise).to(weight.dtype))

    return "seeded"


def _scaled(name: str, noise: Any) -> Any:
    if name.endswith("A_log"):
        return noise.abs().log1p()
    if noise.ndim == 1:
        return noise / 10 + ("norm" in name)
    return noise if "embed" in name else noise * (3.0 if "lm_head" in name else 1.5) / sqrt(noise.shape[-1])
