"""The operators of a gated delta net layer, under the names and signatures of `fla_npu.ops.ascendc`.

`causal_conv1d_fn` (prefill), `causal_conv1d_update` (decode) and `recurrent_gated_delta_rule` (decode) run on the AscendC
operators where tensors lie on an NPU and `fla_npu` is installed, else on independent PyTorch references that accumulate in
float32, so that gather → kernel → scatter runs on any CPU. `chunked_gated_delta_rule` is the prefill form, a reference only.

Layouts, all with the channels last: x (tokens, channels), convolution weights (width, channels), convolution states
(pages, length, channels) with the newest token last, delta-rule states (pages, value heads, value dim, key dim). States may be
padded between pages. Nothing here was verified on hardware.
"""

from kvactors.memory.fla.delta_rule import chunked_gated_delta_rule
from kvactors.memory.fla.operators import (
    causal_conv1d_fn,
    causal_conv1d_update,
    recurrent_gated_delta_rule,
    using_operators,
)

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunked_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "using_operators",
]
