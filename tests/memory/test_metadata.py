"""What the scheduler says stays as it is: block ids, block tables and slot mappings serve every layout of the memory.

Prefill fills whole blocks, decode one token of one, and multi-token prediction (MTP) a few tokens that may cross into the next.
The slot of a token is `block id * block_tokens + its place in the block`, whatever the page of a block is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kvactors.memory import allocate_kv_cache, cache_views, kernel_block_ids
from tests.memory.model import raw
from tests.memory.runner import attention_spec, by_layer, placed, placed_attention_spec, placed_state_spec, state_spec

TOKENS, BLOCKS = 4, 9
STATES = (((3, 4), (2, 2, 3)), (torch.bfloat16, torch.float32))
Table = npt.NDArray[np.int32]


@dataclass
class Phase:
    """A step's metadata, as a runner hands it to the model: request -> its blocks, and the tokens that are computed."""

    tables: Mapping[str, Table]
    positions: Sequence[tuple[int, int]]
    """(request, token) of each token of the step."""

    @property
    def slots(self) -> list[int]:
        table = self.tables["attention"]
        return [int(table[request, token // TOKENS]) * TOKENS + token % TOKENS for request, token in self.positions]


def phase(*positions: tuple[int, int]) -> Phase:
    tables = {"attention": np.array([[7, 2, 5], [4, 8, 0]], np.int32), "state": np.array([[1], [3]], np.int32)}
    return Phase(tables, positions)


PHASES = {
    "prefill": phase(*((0, t) for t in range(8)), *((1, t) for t in range(5))),
    "decode": phase((0, 8), (1, 5)),
    "mtp": phase((0, 9), (0, 10), (0, 11), (1, 6), (1, 7), (1, 8)),
}


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    """K and V of one attention layer in memory of each kind, beside a state layer where there is one."""
    dense, padded = attention_spec(), attention_spec(page=160)
    states = state_spec(*STATES, 160)
    gqa = by_layer(BLOCKS, [{"a": padded}])
    hybrid = by_layer(BLOCKS, [{"a": padded}, {"s": states}], shared=[("a", "s")])
    tall = by_layer(BLOCKS, [{"a": attention_spec(page=120)}, {"s": state_spec(*STATES, 120)}], shared=[("a", "s")])
    buffer = placed(
        BLOCKS, BLOCKS * 256, [{"a": placed_attention_spec()}, {"s": placed_state_spec(104)}], {"a": (96, 256), "s": (0, 256)}
    )
    one = cache_views(buffer, allocate_kv_cache(buffer))["a"]
    assert isinstance(one, Tensor)
    return {
        "gqa": cache_views(gqa, allocate_kv_cache(gqa))["a"],
        "hybrid": cache_views(hybrid, allocate_kv_cache(hybrid))["a"],
        "contiguous": cache_views(tall, allocate_kv_cache(tall), contiguous=True)["a"],
        "tuple": cache_views(by_layer(BLOCKS, [{"a": dense}]), {"a": (raw(BLOCKS * 48), raw(BLOCKS * 48))})["a"],
        "buffer": (one[..., :3], one[..., 3:]),
    }  # type: ignore[return-value]  # placed layers have one view each


@pytest.mark.parametrize("name", PHASES)
def test_the_same_slots_serve_every_layout(name: str) -> None:
    """What is written by slot is read by block table, in each layout the same."""
    step = PHASES[name]
    read: dict[str, list[list[list[float]]]] = {}
    for layout, lanes in layouts().items():
        for lane in lanes:
            assert lane.shape == (BLOCKS, 2, TOKENS, 3), "one block of the view for each id of the scheduler"
            for number, slot in enumerate(step.slots):
                lane[slot // TOKENS, :, slot % TOKENS] = number + 1
        table = step.tables["attention"]
        read[layout] = [lane[table.astype(np.int64)].flatten().tolist() for lane in lanes]
        written = sum(int((lane != 0).sum()) for lane in lanes)
        assert written == 2 * len(step.slots) * 2 * 3, "no other token was touched"
    assert all(found == read["gqa"] for found in read.values())


@pytest.mark.parametrize("name", PHASES)
def test_kernel_tables_are_made_from_the_scheduler_s_and_states_keep_theirs(name: str) -> None:
    """Where a kernel has smaller blocks its table is another one; slots count tokens, so that they are the same."""
    step = PHASES[name]
    before = {group: table.copy() for group, table in step.tables.items()}
    config = by_layer(BLOCKS, [{"a": attention_spec()}, {"s": state_spec(*STATES, 96)}])
    memory = {"a": (raw(BLOCKS * 48), raw(BLOCKS * 48)), "s": raw(BLOCKS * 96)}
    k, _ = cache_views(config, memory, kernel_block_sizes=[2, 2])["a"]
    conv, ssm = cache_views(config, memory, kernel_block_sizes=[2, 2])["s"]
    expanded = kernel_block_ids(step.tables["attention"], 2)
    assert expanded.tolist() == [[14, 15, 4, 5, 10, 11], [8, 9, 16, 17, 0, 1]]
    for (request, token), slot in zip(step.positions, step.slots, strict=True):
        assert int(expanded[request, token // 2]) * 2 + token % 2 == slot
    assert k.shape[0] == 2 * BLOCKS
    assert conv.shape[0] == ssm.shape[0] == BLOCKS
    for slot in step.slots:
        k[slot // 2, :, slot % 2] = 1
    whole, _ = cache_views(config, memory)["a"]
    per_block = {b: int(whole[b].sum()) for b in range(BLOCKS) if whole[b].any()}
    assert per_block == {b: 2 * 3 * n for b, n in Counter(slot // TOKENS for slot in step.slots).items()}, "in its own block"
    states = torch.from_numpy(step.tables["state"][:, 0].astype(np.int64))
    conv[states] = 1
    assert [b for b in range(BLOCKS) if conv[b].any()] == [1, 3], "a state's row is its block id, not expanded"
    assert all(np.array_equal(step.tables[group], table) for group, table in before.items()), "expanding makes new tables"
