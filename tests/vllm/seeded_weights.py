"""The load format "seeded": weights drawn from the name of each parameter, the same in every process.

vLLM's own "dummy" weights are so small that the last token alone decides what comes next. These keep the variance of what
flows through the model, so that an output depends on the whole prompt: a wrong cache shows.

Import the module in each process that loads a model.
"""

from __future__ import annotations

from math import sqrt
from typing import Any
from zlib import crc32

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

FORMAT = "seeded"


@register_model_loader(FORMAT)
class SeededLoader(DummyModelLoader):  # type: ignore[misc, unused-ignore]
    def load_weights(self, model: Any, model_config: Any) -> None:
        gemma = model_config.hf_config.model_type.startswith("gemma")
        with torch.no_grad():
            for name, parameter in model.state_dict().items():
                if not parameter.is_floating_point():
                    parameter.zero_()
                elif parameter.ndim and "_scale" not in name and "_range" not in name:  # scales keep their defaults
                    parameter.copy_(drawn(name, parameter.shape, gemma).to(parameter.dtype))


def drawn(name: str, shape: torch.Size, gemma: bool = False) -> torch.Tensor:
    """Values for one parameter; Gemma adds 1 to its norms and scales its embeddings up by itself."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
    last = name.rpartition(".")[2]
    if last == "A_log":
        return noise.abs().log1p()
    if last == "A":
        return -(noise.abs() + 0.5)
    if last == "D":
        return torch.ones_like(noise)
    if last == "dt_bias":
        return noise / 2
    if noise.ndim == 1:
        return noise / 10 + (1 if "norm" in name and not gemma else 0)
    if "embed" in name:
        return noise * (0.03 if gemma else 1.0)
    gain = 3.0 if "lm_head" in name else 1.5
    return noise * gain / sqrt(shape[-1])
