"""How many KV heads all layers of a model have, where its configuration says so beyond doubt. Pure."""

from __future__ import annotations

import re
from typing import Any

SAYS_HEADS = re.compile(r"(key_value|kv).*heads?(_|$)|heads?_kv")
"""Names of attributes that speak of KV heads, whatever a model's authors call those of some of its layers."""


def only_kv_heads(hf_config: Any) -> int | None:
    """The KV heads of every attention layer of the model, all ranks together; None if layers may differ.

    A configuration that names KV heads once, `num_key_value_heads`, means all layers. One that has a second name for them (of
    global layers, windows, drafts) or a list does not say which layers have how many.
    """
    given = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    named = {name: value for name, value in given.items() if SAYS_HEADS.search(name) and value is not None}
    heads = named.get("num_key_value_heads")
    return heads if len(named) == 1 and isinstance(heads, int) and not isinstance(heads, bool) and heads > 0 else None
