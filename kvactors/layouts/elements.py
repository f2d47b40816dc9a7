"""Element kinds of known size."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "int32": 4}
)
"""Bytes of an element of each canonical kind; torch would know them, but a layout is read and shown without it."""

_OTHER_NAMES = MappingProxyType(
    {
        "float32": "fp32",
        "float": "fp32",
        "float16": "fp16",
        "half": "fp16",
        "bfloat16": "bf16",
        "float8_e4m3fn": "fp8_e4m3",
        "float8_e4m3": "fp8_e4m3",
        "float8_e5m2": "fp8_e5m2",
    }
)


def canonical_kind(name: str) -> str:
    """The canonical name of an element kind that is named as torch does (`torch.bfloat16`, `float8_e4m3fn`) or in capitals; one
    that is not known stays as it is."""
    plain = name.lower().removeprefix("torch.")
    return plain if plain in ELEMENT_BYTES else _OTHER_NAMES.get(plain, name)
