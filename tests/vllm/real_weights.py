"""Weights in a file, as a real model has them: ranks of a process group then load their own parts of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.vllm import seeded_weights, tiny_models


def write(model: str, folder: Path) -> None:
    """`model.safetensors` beside the configuration, for `load_format="safetensors"`; seeded by the names of the parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_models.write(model, folder)
    if (path / "model.safetensors").exists():
        return
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.state_dict().items():
            parameter.copy_(seeded_weights.drawn(name, parameter.shape).to(parameter.dtype))
    made.save_pretrained(path)
    tiny_models.write(model, folder)  # the library has written its own idea of it
