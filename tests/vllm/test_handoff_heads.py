"""What a model's configuration says of its KV heads; only one clear word is believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvactors.vllm.heads import only_kv_heads


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ({"num_key_value_heads": 8, "num_attention_heads": 64}, 8),
        ({"num_key_value_heads": 8, "num_global_key_value_heads": None}, 8),
        ({"num_key_value_heads": 8, "num_global_key_value_heads": 4}, None),
        ({"num_key_value_heads": 8, "swa_num_key_value_heads": 8}, None),
        ({"num_key_value_heads": 8, "num_kv_heads": 2}, None),
        ({"num_key_value_heads": 8, "num_key_value_heads_per_layer": [8, 2]}, None),
        ({"num_key_value_heads": 8, "n_head_kv": 2}, None),
        ({"num_key_value_heads": [8, 2]}, None),
        ({"num_key_value_heads": True}, None),
        ({"num_key_value_heads": 0}, None),
        ({"num_kv_heads": 8}, None),
        ({"num_attention_heads": 64, "kv_lora_rank": 512, "num_kv_shared_layers": 3}, None),
        ({"num_key_value_heads": 8, "kv_lora_rank": 512, "num_kv_shared_layers": 3}, 8),
        ({}, None),
    ],
)
def test_only_one_clear_word_is_believed(given: dict[str, Any], heads: int | None) -> None:
    assert only_kv_heads(SimpleNamespace(**given)) == heads
    assert only_kv_heads(SimpleNamespace(to_dict=lambda: given)) == heads
