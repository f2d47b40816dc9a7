"""Plain numpy loops in float64 for the operators, written from their definitions and sharing no code with the references."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def convolution(history: Array, x: Array, weight: Array, bias: Array | None, silu: bool) -> Array:
    """One sequence: history (width-1, channels), x (tokens, channels)."""
    width, channels = weight.shape
    before = [*history, *x]
    out = np.zeros_like(x)
    for t in range(len(x)):
        for c in range(channels):
            total = 0.0 if bias is None else bias[c]
            for j in range(width):
                total += weight[j, c] * before[t + j][c]
            out[t, c] = total / (1 + np.exp(-total)) if silu else total
    return out


def delta_rule(
    q: Array, k: Array, v: Array, s: Array, beta: Array, g: Array, scale: float, gk: Array | None = None
) -> tuple[Array, list[Array]]:
    """One sequence: q, k (tokens, key heads, dk), v (tokens, heads, dv), s (heads, dv, dk). Outputs, states."""
    heads, share = v.shape[1], v.shape[1] // k.shape[1]
    out = np.zeros_like(v)
    states = []
    s = s.copy()
    for t in range(len(v)):
        for h in range(heads):
            key, query = k[t, h // share], q[t, h // share]
            decay: Any = np.exp(g[t, h])
            if gk is not None:
                decay = decay * np.exp(gk[t, h])[None, :]
            # S (a (I - b k k^T)) + b v k^T, multiplied out as the definition has it
            s[h] = s[h] * decay
            s[h] = s[h] @ (np.eye(len(key)) - beta[t, h] * np.outer(key, key)) + beta[t, h] * np.outer(v[t, h], key)
            out[t, h] = scale * (s[h] @ query)
        states.append(s.copy())
    return out, states


def normalized(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
