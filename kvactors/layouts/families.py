"""Built-in model families. Every number states the public configuration it comes from.

All sizes are those of one tensor-parallel rank that holds the whole model (TP 1), for one block. The block sizes are ours:
each divides the layout's boundary, and the boundary suits traces with one id per 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvactors.core.layout import CacheEntry, Group, GroupKind, KVLayout

BF16, FP32, FP8 = 2, 4, 1


@dataclass(frozen=True, slots=True)
class Family:
    """A built-in layout.

    Attributes:
        name: what `--layout` takes.
        summary: one line for a list.
        sources: the public configurations that the numbers come from.
        notes: what was chosen or left out here.
        build: makes the layout.
    """

    name: str
    summary: str
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    build: Callable[[], KVLayout]


def _same(layers: Iterable[int], *entries: CacheEntry) -> Mapping[int, tuple[CacheEntry, ...]]:
    return dict.fromkeys(layers, entries)


def _kv(block_tokens: int, heads: int, head_dim: int) -> tuple[CacheEntry, CacheEntry]:
    nbytes = block_tokens * heads * head_dim * BF16
    return CacheEntry("k", nbytes, dtype="bf16"), CacheEntry("v", nbytes, dtype="bf16")


def _llama_31_8b() -> KVLayout:
    # 32 layers, 8 KV heads, head_dim 4096 / 32 = 128: 32 * 2 * 8 * 128 * 2 = 131072 bytes a token.
    group = Group(0, GroupKind.FULL, 128, _same(range(32), *_kv(128, 8, 128)), kv_heads=8)
    return KVLayout("llama-3.1-8b", [group])


def _gemma_3_27b() -> KVLayout:
    # 62 layers, every sixth is global (sliding_window_pattern 6): layers 5, 11, …, 59. 16 KV heads of 128, window 1024.
    full = [layer for layer in range(62) if (layer + 1) % 6 == 0]
    local = [layer for layer in range(62) if (layer + 1) % 6]
    entries = _kv(128, 16, 128)
    return KVLayout(
        "gemma-3-27b",
        [
            Group(0, GroupKind.FULL, 128, _same(full, *entries), kv_heads=16),
            Group(1, GroupKind.SLIDING_WINDOW, 128, _same(local, *entries), window=1024, kv_heads=16),
        ],
    )


def _qwen_35_9b() -> KVLayout:
    # 32 layers, every fourth has full attention (layers 3, 7, …, 31): 8 * 2 * 4 heads * 256 * 2 = 32768 bytes a token.
    # The others are gated delta nets: 16 key heads and 32 value heads of 128, convolution kernel 4, recurrent state in FP32.
    full = [layer for layer in range(32) if (layer + 1) % 4 == 0]
    gdn = [layer for layer in range(32) if (layer + 1) % 4]
    conv = CacheEntry("conv", (4 - 1) * (2 * 16 * 128 + 32 * 128) * BF16, dtype="bf16")
    ssm = CacheEntry("ssm", 32 * 128 * 128 * FP32, dtype="fp32")
    return KVLayout(
        "qwen3.5-9b",
        [
            Group(0, GroupKind.FULL, 512, _same(full, *_kv(512, 4, 256)), kv_heads=4),
            Group(1, GroupKind.STATE, 512, _same(gdn, conv, ssm)),
        ],
    )


def _deepseek_v4_flash() -> KVLayout:
    # 43 layers, compress_ratios [0, 0, 4] + [128, 4] * 20. A latent row is 448 FP8 + 64 BF16 + 8 scale bytes = 584; an
    # indexer row 128 FP8 + one FP32 scale = 132. The compressors keep FP32 (kv, score) pairs: with ratio 4 two overlapping
    # halves (window 8, blocks of 4), with ratio 128 one (window 128, blocks of 8). vLLM holds these as window groups.
    ratio = [0, 0, 4] + [128, 4] * 20
    c4 = [layer for layer, r in enumerate(ratio) if r == 4]
    c128 = [layer for layer, r in enumerate(ratio) if r == 128]
    row, index_row = 448 * FP8 + 64 * BF16 + 8, 128 * FP8 + 4

    def one(name: str, nbytes: int, dtype: str) -> tuple[CacheEntry]:
        return (CacheEntry(name, nbytes, dtype=dtype),)

    return KVLayout(
        "deepseek-v4-flash",
        [
            Group(0, GroupKind.COMPRESSED, 256, _same(c4, *one("kv_c4", 256 // 4 * row, "fp8_e4m3")), kv_heads=1),
            Group(1, GroupKind.COMPRESSED, 256, _same(c128, *one("kv_c128", 256 // 128 * row, "fp8_e4m3")), kv_heads=1),
            Group(2, GroupKind.INDEXER, 256, _same(c4, *one("index_k", 256 // 4 * index_row, "fp8_e4m3")), kv_heads=1),
            Group(3, GroupKind.SLIDING_WINDOW, 64, _same(range(43), *one("kv", 64 * row, "fp8_e4m3")), window=128, kv_heads=1),
            Group(
                4,
                GroupKind.SLIDING_WINDOW,
                4,
                _same(
                    c4,
                    CacheEntry("index_state", 4 * 2 * 2 * 128 * FP32, dtype="fp32"),
                    CacheEntry("kv_state", 4 * 2 * 2 * 512 * FP32, dtype="fp32"),
                ),
                window=8,
                kv_heads=1,
            ),
            Group(
                5,
                GroupKind.SLIDING_WINDOW,
                8,
                _same(c128, *one("kv_state", 8 * 2 * 512 * FP32, "fp32")),
                window=128,
                kv_heads=1,
            ),
        ],
    )


def _kimi_k3() -> KVLayout:
    # 93 layers. full_attn_layers (from 1) 4, 8, …, 92, 93 are MLA: kv_lora_rank 512 + qk_rope_head_dim 64, BF16. The other
    # 69 are KDA: 96 heads of 128, convolution kernel 4 over q, k and v, recurrent state in FP32.
    mla = [*range(3, 92, 4), 92]
    kda = [layer for layer in range(93) if layer not in mla]
    width = 96 * 128
    conv = CacheEntry("conv", (4 - 1) * 3 * width * BF16, dtype="bf16")
    ssm = CacheEntry("ssm", 96 * 128 * 128 * FP32, dtype="fp32")
    latent = CacheEntry("latent", 512 * (512 + 64) * BF16, dtype="bf16")
    return KVLayout(
        "kimi-k3",
        [
            Group(0, GroupKind.MLA, 512, _same(mla, latent), kv_heads=1),
            Group(1, GroupKind.STATE, 3072, _same(kda, conv, ssm)),
        ],
    )


def _seed_example() -> KVLayout:
    return KVLayout(
        "seed-example",
        [
            Group(0, GroupKind.FULL, 512, {0: (CacheEntry("kv", 8),), 2: (CacheEntry("kv", 8),)}),
            Group(
                1, GroupKind.COMPRESSED, 1024, {1: (CacheEntry("c", 10),), 2: (CacheEntry("c", 11),), 3: (CacheEntry("c", 11),)}
            ),
            Group(2, GroupKind.STATE, 512, {0: (CacheEntry("state", 18),), 3: (CacheEntry("state", 18),)}),
        ],
    )


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "seed-example",
            "full + compressed + state; a few bytes a block, for a first look",
            ("the worked example of docs/layout-files.md (objects of 16, 32 and 36 bytes)",),
            ("Not a real model. Groups of 512, 1024 and 512 tokens; boundary 1024.",),
            _seed_example,
        ),
        Family(
            "llama-3.1-8b",
            "full attention only, 131072 bytes a token in BF16",
            (
                "huggingface.co/meta-llama/Llama-3.1-8B config.json: num_hidden_layers 32, num_key_value_heads 8, "
                "hidden_size 4096, num_attention_heads 32",
            ),
            ("Blocks of 128 tokens, the default of vLLM on Ascend NPUs.",),
            _llama_31_8b,
        ),
        Family(
            "gemma-3-27b",
            "10 full and 52 sliding-window layers, window 1024",
            (
                "huggingface.co/google/gemma-3-27b-it config.json, text_config: num_hidden_layers 62, num_key_value_heads 16, "
                "head_dim 128, sliding_window 1024, sliding_window_pattern 6",
            ),
            ("vLLM splits the 52 window layers into groups of equal size; here they are one group.",),
            _gemma_3_27b,
        ),
        Family(
            "qwen3.5-9b",
            "8 full-attention and 24 gated-delta-net layers",
            (
                "vLLM and Transformers Qwen3_5TextConfig defaults (the 9B model): num_hidden_layers 32, "
                "full_attention_interval 4, num_key_value_heads 4, head_dim 256, linear_num_key_heads 16, "
                "linear_num_value_heads 32, linear_key_head_dim 128, linear_value_head_dim 128, linear_conv_kernel_dim 4, "
                "mamba_ssm_dtype float32",
            ),
            ("vLLM sizes the blocks so that attention and state pages match (528 tokens); here both are 512.",),
            _qwen_35_9b,
        ),
        Family(
            "deepseek-v4-flash",
            "compressed (ratios 4 and 128), indexer, sliding window 128 and compressor state",
            (
                "Transformers DeepseekV4Config defaults (DeepSeek-V4-Flash): num_hidden_layers 43, head_dim 512, "
                "qk_rope_head_dim 64, index_head_dim 128, sliding_window 128; compress_ratios [0, 0, 4] + [128, 4] * 20 from "
                "the published training recipe and model card",
                "vLLM models/deepseek_v4/compressor.py: rows of 584 and 132 bytes, compressor state in FP32 with blocks of 4 "
                "(window 8) and 8 (window 128)",
            ),
            (
                "FP8 cache (fp8_ds_mla), blocks of 256 raw tokens, window blocks of 64; alignment to 576 bytes is left out.",
                "Compressor state is a window group, saved at attention entry; it is no recurrent state.",
                "The indexer's compressor state shares the group of the ratio-4 compressor state.",
            ),
            _deepseek_v4_flash,
        ),
        Family(
            "kimi-k3",
            "24 MLA and 69 Kimi-delta-attention layers",
            (
                "huggingface.co/moonshotai/Kimi-K3 config.json, text_config, as quoted by inference-sim#1635 and "
                "llama.cpp#26185: num_hidden_layers 93, full_attn_layers 4, 8, …, 92, 93, kv_lora_rank 512, "
                "qk_rope_head_dim 64, linear_attn_config num_heads 96, head_dim 128, short_conv_kernel_size 4",
            ),
            (
                "The configuration was read as quoted in public issues, not from the model's own page.",
                "The recurrent state is taken as FP32 and the convolution state as BF16, as for Kimi-Linear-48B.",
                "State blocks of 3072 tokens (seen in LMCache#4278), MLA blocks of 512.",
            ),
            _kimi_k3,
        ),
    )
}
