"""Element kinds of known size."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "int32": 4}
)
"""Bytes of an element of each canonical kind; torch would know them, but a layout is read and shown without it."""
