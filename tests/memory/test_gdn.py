"""A gated delta net saved layer by layer: what is published is the state after the layer's compute, not the previous step's.

The layer gathers its states from padded pages, gives them to operators that stand in for FLA's, and scatters them back
(vllm-ascend#17194: states that were saved at the entry of attention were a step old).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from kvactors.core.steps import Phase, StepRequest
from kvactors.memory import gather_state_rows, scatter_state_rows_
from kvactors.stores.memory import MemoryStore
from tests.engine.rig import quiet
from tests.memory.worker import CONV, FULL, SSM, STATE, STATES, WINDOW, Worker, fine_hashes

STATE_LAYERS = [layer for _, layer in STATES]
CHUNKS_PER_BLOCK = 2
"""A block of states is complete after two chunks; the first one is a decode step that publishes nothing of them."""


class Operators:
    """Mocks of FLA's: they change the rows that they are given, in place, and count their calls."""

    def __init__(self) -> None:
        self.calls = {"causal_conv1d_update": 0, "recurrent_gated_delta_rule": 0}

    def causal_conv1d_update(self, x: Tensor, conv_state: Tensor) -> Tensor:
        """The window moves on by one input."""
        self.calls["causal_conv1d_update"] += 1
        conv_state.copy_(torch.cat([conv_state[:, 1:], x[:, None].to(conv_state.dtype)], 1))
        return conv_state.float().sum(1)

    def recurrent_gated_delta_rule(self, x: Tensor, state: Tensor) -> Tensor:
        """Decays by half, and adds the input."""
        self.calls["recurrent_gated_delta_rule"] += 1
        state.mul_(0.5).add_(x[:, None, :4, None])
        return state.sum((1, 3))


def input_of(layer: int, chunk: int) -> Tensor:
    return torch.arange(8.0)[None] + 16 * chunk + layer


def state_after(layer: int, chunks: int) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Both states after so many chunks, in plain Python."""
    inputs = [[float(i + 16 * chunk + layer) for i in range(8)] for chunk in range(chunks)]
    conv = ([[0.0] * 8] * 3 + inputs)[-3:]
    ssm = [[[0.0] * 4 for _ in range(4)] for _ in range(2)]
    for x in inputs:
        ssm = [[[cell * 0.5 + x[row] for cell in cells] for row, cells in enumerate(head)] for head in ssm]
    return conv, ssm


class GdnWorker(Worker):
    """Computes its state layers from the states of the chunk before; the other layers as the parent does."""

    def __init__(self, store: MemoryStore, form: str, seed: int) -> None:
        super().__init__(store, form, seed)
        self.operators = Operators()
        self.chunk = 0
        self.before: int | None = None
        """The local block of the state of the chunk before."""
        self.now = -1

    def compute(self, layer: int, request: StepRequest, fine: list[bytes]) -> None:
        if layer not in STATE_LAYERS:
            super().compute(layer, request, fine)
            return
        read, written = torch.tensor([self.now if self.before is None else self.before]), torch.tensor([self.now])
        has_initial_state = torch.tensor([self.before is not None])
        x = input_of(layer, self.chunk)
        for name, operator in (
            ("conv", self.operators.causal_conv1d_update),
            ("ssm", self.operators.recurrent_gated_delta_rule),
        ):
            view = self.memory.placed[STATE, layer, name].view
            rows = gather_state_rows(view, read, has_initial_state)
            operator(x, rows)
            scatter_state_rows_(view, written, rows)

    async def step(self, request: StepRequest, fine: list[bytes]) -> Mapping[str, object]:
        """Signals the entry of each layer before its states are computed, and lets everything that was started then finish."""
        step = self.engine.begin_step([request])
        for layer in range(self.layout.stage_layers):
            assert await step.wait_layer(layer) == frozenset()
            if layer not in STATE_LAYERS:
                self.compute(layer, request, fine)
            step.layer_ready(layer, phase=Phase.ENTRY)
            await quiet(self)  # type: ignore[arg-type]  # it asks for the engine alone
            if layer in STATE_LAYERS:
                self.compute(layer, request, fine)
            step.layer_ready(layer)
            await step.checkpoint(layer)
        await step.end()
        await step.settled()
        return step.failures


@pytest.mark.parametrize("form", ["pages", "apart", "pool"])
async def test_each_save_holds_the_states_after_the_compute(form: str) -> None:
    store = MemoryStore()
    async with GdnWorker(store, form, 11) as one, Worker(store, "lanes", 12) as two:
        fine = fine_hashes(8, "gdn")
        ids = one.ids({FULL: 8, STATE: 4, WINDOW: 8})
        for block in range(4):
            one.now = ids[STATE][block]
            for part in range(CHUNKS_PER_BLOCK):
                small = [CHUNKS_PER_BLOCK * block + part]  # of the groups with blocks of half the size
                at = {group: {i: ids[group][i] for i in small} for group in (FULL, WINDOW)}
                complete = part == CHUNKS_PER_BLOCK - 1
                if complete:
                    at[STATE] = {block: one.now}
                assert await one.step(one.request("a", fine, at, load=False), fine) == {}
                one.chunk, one.before = one.chunk + 1, one.now
                published = store.contains(one.layout.key(STATE, one.block_hash(STATE, block, fine)))
                assert published is complete

            local = two.ids({STATE: 1})[STATE][0]
            request = two.request(f"read {block}", fine, {STATE: {block: local}}, load=True)
            assert await two.step(request, fine) == {}
            for layer in STATE_LAYERS:
                loaded = [two.memory.placed[STATE, layer, name].view[local].tolist() for name in ("conv", "ssm")]
                chunks = CHUNKS_PER_BLOCK * (block + 1)
                assert loaded == list(state_after(layer, chunks))
                assert loaded != list(state_after(layer, chunks - 1)), "not the step before's"
        assert one.operators.calls == dict.fromkeys(one.operators.calls, 4 * CHUNKS_PER_BLOCK * len(STATE_LAYERS))
    store.close()


@pytest.mark.parametrize("form", ["pages", "pool"])
async def test_a_loaded_state_goes_on_where_the_saved_one_ended(form: str) -> None:
    """Gather, compute and scatter on what came from the store give what the first worker would have computed."""
    store = MemoryStore()
    async with GdnWorker(store, form, 21) as one, GdnWorker(store, "apart", 22) as two:
        fine = fine_hashes(4, "gdn")
        (saved, last) = one.ids({STATE: 2})[STATE]
        one.now = saved
        assert await one.step(one.request("a", fine, {STATE: {0: saved}}, load=False), fine) == {}
        (loaded, after) = two.ids({STATE: 2})[STATE]
        done = await two.engine.load("b", two.request("b", fine, {STATE: {0: loaded}}, load=True).groups, fine)
        assert done.failure is None
        for worker, before, now in ((one, saved, last), (two, loaded, after)):
            worker.chunk, worker.before, worker.now = 1, before, now
            for layer in STATE_LAYERS:
                worker.compute(layer, StepRequest("x", fine, {}), fine)
        for layer in STATE_LAYERS:
            for name, expected in zip(("conv", "ssm"), state_after(layer, 2), strict=True):
                for worker, block in ((one, last), (two, after)):
                    assert worker.memory.placed[STATE, layer, name].view[block].tolist() == expected
    store.close()


def test_the_mocked_states_have_the_sizes_of_the_worker() -> None:
    conv, ssm = state_after(1, 2)
    assert torch.tensor(conv).shape == CONV[0]
    assert torch.tensor(ssm).shape == SSM[0]
