"""A stand-in for vLLM-Ascend's model runner V1.

It allocates as that runner does (raw bytes by layer, K and V apart, one tensor for the layers of a hybrid row) and knows what
the runner knows when it builds its views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

BLOCKS = 5
ALIGNED = 2 << 20
"""Where a connector is configured, the runner moves its raw tensors to multiples of this."""


class AttentionSpec(SimpleNamespace):
    """Heads of `head_size` elements, and the page of a block, padding included."""


class StateSpec(SimpleNamespace):
    """`shapes` and `dtypes` of the states in the order of the page."""


class TokenMajor:
    """A backend as today's: its operators read [block, token, head, element]."""

    @staticmethod
    def get_kv_cache_shape(blocks: int, tokens: int, heads: int, head: int) -> tuple[int, ...]:
        return 2, blocks, tokens, heads, head


class HeadMajor:
    """A backend for the block-major view [block, head, token, element]."""

    @staticmethod
    def get_kv_cache_shape(blocks: int, tokens: int, heads: int, head: int) -> tuple[int, ...]:
        return 2, blocks, heads, tokens, head


class Fractal:
    """A backend whose operators want elements in sixteens."""

    @staticmethod
    def get_kv_cache_shape(blocks: int, tokens: int, heads: int, head: int) -> tuple[int, ...]:
        return 2, blocks, heads * head // 16, tokens, 16


class NoShape:
    """The backend of recurrent states."""


def attention(
    heads: int = 2,
    tokens: int = 4,
    head: int = 6,
    head_v: int | None = None,
    page: int | None = None,
    kind: Callable[..., Any] = AttentionSpec,
    **more: Any,
) -> Any:
    v = head if head_v is None else head_v
    payload = heads * tokens * (head + v) * 2
    return kind(
        block_size=tokens,
        num_kv_heads=heads,
        head_size=head,
        head_size_v=v,
        dtype=torch.float16,
        page_size_bytes=page or payload,
        **more,
    )


def states(page: int, tokens: int = 4) -> StateSpec:
    """A convolution of 12 bfloat16 (24 bytes), then a state of 12 float32 (48 bytes)."""
    return StateSpec(
        block_size=tokens,
        shapes=((3, 4), (2, 2, 3)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_bytes=page,
    )


class StandInRunner:
    """What NPUModelRunner has when it comes to its caches."""

    def __init__(
        self,
        *groups: dict[str, Any],
        rows: list[list[str]] | None = None,
        backend: type = HeadMajor,
        kernel: list[Any] | None = None,
        **settings: Any,
    ) -> None:
        specs = {name: spec for group in groups for name, spec in group.items()}
        self.specs = specs
        self.runner_only_attn_layers: set[str] = settings.pop("runner_only", set())
        self.use_aclgraph = self.use_sparse = self.use_compress = self.sparse_kv_offload_enabled = False
        self.third_part = 0
        """Bytes of a part of each layer's cache that no specification names."""
        self.kernel_block_sizes = [
            [0] if isinstance(next(iter(g.values())), StateSpec) else [next(iter(g.values())).block_size] for g in groups
        ]
        self.kernel_block_sizes = kernel or self.kernel_block_sizes
        self.backend = backend
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=settings.pop("transfer", None),
            cache_config=SimpleNamespace(kv_offloading_size=settings.pop("kv_offloading_size", None)),
            compilation_config=SimpleNamespace(cudagraph_mode=settings.pop("cudagraph_mode", "NONE")),
            model_config=SimpleNamespace(enforce_eager=settings.pop("enforce_eager", True)),
            quant_config=settings.pop("quant_config", None),
        )
        self.__dict__.update(settings)
        rows = rows or [[name] for name in specs if name not in self.runner_only_attn_layers]
        self.config = SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_groups=[
                SimpleNamespace(
                    layer_names=list(group),
                    kv_cache_spec=SimpleNamespace(block_size=next(iter(group.values())).block_size, kv_cache_specs=group),
                )
                for group in groups
            ],
            kv_cache_tensors=[SimpleNamespace(size=BLOCKS * specs[row[0]].page_size_bytes, shared_by=row) for row in rows],
        )

    def _kv_cache_spec_attn_group_iterator(self) -> Iterator[Any]:
        for group in self.config.kv_cache_groups:
            recurrent = isinstance(self.specs[group.layer_names[0]], StateSpec)
            yield SimpleNamespace(layer_names=group.layer_names, backend=NoShape if recurrent else self.backend)

    def _bytes(self, size: int) -> torch.Tensor:
        if self.vllm_config.kv_transfer_config is None:
            return torch.zeros(size, dtype=torch.int8)
        whole = torch.zeros(size + ALIGNED, dtype=torch.int8)
        begin = -whole.data_ptr() % ALIGNED
        return whole[begin : begin + size]

    def _allocate_kv_cache_tensors(self, config: Any) -> dict[str, Any]:
        """One tensor for each row as soon as a model has both kinds of layer, else K and V apart."""
        hybrid = any(isinstance(spec, StateSpec) for spec in self.specs.values())
        raw: dict[str, Any] = {}
        for tensor in config.kv_cache_tensors:
            spec = self.specs[tensor.shared_by[0]]
            if hybrid:
                made: Any = self._bytes(tensor.size)
            else:
                k = tensor.size * spec.head_size // (spec.head_size + spec.head_size_v)
                made = (self._bytes(k), self._bytes(tensor.size - k))
                if self.third_part:
                    made = (*made, self._bytes(self.third_part))
            raw.update(dict.fromkeys(tensor.shared_by, made))
        return raw

    def _reshape_kv_cache_tensors(self, kv_cache_config: Any, kv_cache_raw_tensors: Any) -> dict[str, Any]:
        raise NotImplementedError("the runner's own layout")  # what the plugin replaces: a test that gets here has failed

    def initialize_kv_cache_tensors(self) -> dict[str, Any]:
        self.raw = self._allocate_kv_cache_tensors(self.config)
        return self._reshape_kv_cache_tensors(self.config, self.raw)


def gqa(**settings: Any) -> StandInRunner:
    return StandInRunner({"layers.0.attn": attention(), "layers.1.attn": attention()}, **settings)


def hybrid(page: int = 128, **settings: Any) -> StandInRunner:
    """Two attention layers over 96 bytes of payload, each sharing its tensor with a layer of 72 bytes of states."""
    return StandInRunner(
        {"layers.1.attn": attention(head=3, page=page), "layers.3.attn": attention(head=3, page=page)},
        {"layers.0.linear_attn": states(page), "layers.2.linear_attn": states(page)},
        rows=[["layers.0.linear_attn", "layers.1.attn"], ["layers.2.linear_attn", "layers.3.attn"]],
        **settings,
    )


def built(views_on: type[Any], runner: StandInRunner) -> dict[str, Any]:
    runner.__class__ = views_on
    return runner.initialize_kv_cache_tensors()
