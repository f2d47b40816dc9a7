"""Tiny models that real vLLM runs on a CPU: a `config.json` each, no weights and no tokenizer.

Each stands for a kind of cache: attention alone, windows of attention, recurrent states beside attention, latent vectors (MLA).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Config = dict[str, Any]

BASE: Config = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def qwen3() -> Config:
    """Attention with grouped queries, all of it."""
    return BASE | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "rope_theta": 1e4,
        "attention_bias": False,
    }


def gemma3() -> Config:
    """Two windows of 64 tokens before each full attention; the windows make two groups."""
    return BASE | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    }


def gptoss() -> Config:
    """Windows and full attention by turns, with experts."""
    return BASE | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
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
    }


def qwen3next() -> Config:
    """Three gated delta nets before each full attention."""
    return BASE | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


def granite() -> Config:
    """Mamba 2 with one full attention, and no experts."""
    kinds = ["mamba", "mamba", "attention", "mamba"]
    return BASE | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 128,
        "shared_intermediate_size": 128,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "layers_block_type": kinds,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "attention_bias": False,
        "attention_multiplier": 0.177,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }


def nemotronh() -> Config:
    """Mamba 2 (M), full attention (*) and feed-forward (-) as layers of their own."""
    return BASE | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*M-",
        "num_hidden_layers": 6,
        "attention_head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 64,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
    }


def dsv3() -> Config:
    """Latent vectors in place of keys and values."""
    config = BASE | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_theta": 1e4,
        "attention_bias": False,
    }
    del config["head_dim"]
    return config


MODELS = {make.__name__: make for make in (qwen3, gemma3, gptoss, qwen3next, granite, nemotronh, dsv3)}


def write(name: str, folder: Path) -> Path:
    """The folder of the model, as `LLM(model=…)` takes it. Several processes may write the same one while others read it."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    whole = path / f"config.json.{os.getpid()}"
    whole.write_text(json.dumps(MODELS[name](), indent=1))
    whole.replace(path / "config.json")
    return path
