"""What vLLM's own model runner allocated when an engine started, and what we make of the same buffer.

`python -m tests.vllm.view_record MODEL FOLDER OUT` starts the engine, which is all it takes, and writes a `Record` as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm import engine


class Seen(NamedTuple):
    """All that says where a view lies and how."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    address: int


class Record(NamedTuple):
    layout: str
    config_layout: str | None
    """What the configuration itself says, for callers that pass no layout."""
    kernel_block_sizes: list[int]
    groups: list[tuple[str, int]]
    """(type of the specification, tokens of a block)."""
    theirs: dict[str, Seen]
    ours: dict[str, Seen]
    their_states: dict[str, list[Seen]]
    """The states into which each recurrent layer of the model split its view."""
    our_states: dict[str, list[Seen]]


def seen(view: Any) -> Seen:
    return Seen(str(view.dtype), tuple(view.shape), view.stride(), view.storage_offset(), view.data_ptr())


def whole_buffer(views: Iterable[Any]) -> Any:
    """The byte buffer under all views, as a runner has it."""
    import torch

    (storage,) = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}.values()
    return torch.empty(0, dtype=torch.int8).set_(storage)


def record(model: str, folder: Path) -> Record:
    from vllm.v1.worker import gpu_model_runner

    from kvactors.memory import cache_views, state_views
    from kvactors.memory.placement import is_state, layer_specs

    runner: Any = gpu_model_runner
    real = runner.allocate_kv_cache
    calls: list[tuple[Any, Any]] = []

    def spy(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        calls.append((signature(real).bind(*args, **options), made))
        return made

    runner.allocate_kv_cache = spy
    llm = engine.start(model, folder)
    ((call, theirs),) = calls
    given = call.arguments
    config, layout, kernel = given["kv_cache_config"], given["layout"].name, given.get("kernel_block_sizes")
    buffer = whole_buffer(theirs.values())
    ours: dict[str, Any] = {**cache_views(config, buffer, layout=layout, kernel_block_sizes=kernel)}

    specs = layer_specs(config)
    states = [name for name, (_, spec) in specs.items() if is_state(spec)]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    our_states = {}
    for name in states:
        spec, view = specs[name][1], ours[name]
        page = view.stride(0)  # of bytes
        memory = buffer[view.storage_offset() : view.storage_offset() + view.shape[0] * page]
        our_states[name] = [seen(state) for state in state_views(memory, spec.shapes, spec.dtypes, page)]
    return Record(
        layout,
        config.kv_cache_layout,
        kernel,
        [(type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in config.kv_cache_groups],
        {name: seen(view) for name, view in theirs.items()},
        {name: seen(view) for name, view in ours.items()},
        {name: [seen(state) for state in layers[name].kv_cache] for name in states},
        our_states,
    )


def read(path: Path) -> Record:
    raw = json.loads(path.read_text())
    record = Record(*raw)
    return record._replace(groups=[(name, tokens) for name, tokens in record.groups])


if __name__ == "__main__":
    model, folder, out = sys.argv[1:]
    Path(out).write_text(json.dumps(record(model, Path(folder))))
