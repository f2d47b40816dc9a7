"""Ranks agree on which loads failed, at the same place of the same step, outside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Failures = Mapping[str, tuple[int, int]]
"""Name of a life -> (first stage layer whose load failed, first token that did not arrive)."""

Gather = Callable[[Any], list[Any]]
"""What every rank gave, in the order of ranks; every rank calls it."""


def agreed(mine: Failures, gather: Gather) -> dict[str, tuple[int, int]]:
    """The failures of all ranks: for each life the first layer and the first token of any rank."""
    found: dict[str, tuple[int, int]] = {}
    for failures in gather(dict(mine)):
        for life, (layer, token) in failures.items():
            known = found.get(life, (layer, token))
            found[life] = (min(known[0], layer), min(known[1], token))
    return found


def tp_gather(value: Any) -> list[Any]:
    """Through the CPU group of the tensor-parallel ranks: no device, and none of the model's own collectives."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values
