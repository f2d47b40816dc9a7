"""Lookups and masks, beside vLLM's own coordinator and cache managers on the same data.

Five groups, one prompt of 100,000 fine hashes, of which none, the first half or all are stored. Both sides ask dictionaries in
memory: vLLM its block pool, we a set for each group, many blocks in a call as the engine does. Masks: which blocks of the whole
prompt to save, `Reachability.store_mask` beside `reachable_block_mask` of vLLM's managers; where those answer None, which
stands for all blocks, the list of them is made, so that both sides end with the same answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvactors.bench.figures import Answer, Figure, Skipped, Target
from kvactors.bench.measure import in_turn, timed
from kvactors.core.layout import Group, GroupKind
from kvactors.core.reachability import Reachability
from kvactors.errors import StoreError

NAME = "lookup"
UNIT = 16
GROUPS = (
    Group(0, GroupKind.FULL, 16, {}),
    Group(1, GroupKind.SLIDING_WINDOW, 16, {}, window=1024),
    Group(2, GroupKind.MLA, 32, {}),
    Group(3, GroupKind.STATE, 64, {}),
    Group(4, GroupKind.SLIDING_WINDOW, 32, {}, window=128),
)
SHARES = (0.0, 0.5, 1.0)
LIMIT = 0.8


@dataclass(frozen=True, slots=True)
class Sizes:
    hashes: int
    repeat: int


FULL, QUICK = Sizes(100_000, 31), Sizes(100_000, 5)


def measure(sizes: Sizes, say: Callable[[str], object]) -> Answer:
    """Every share of hits, and the masks.

    Raises:
        Skipped: vLLM is not here, or has no such coordinator.
    """
    _vllm()
    rng = random.Random(10)
    hashes = [rng.randbytes(32) for _ in range(sizes.hashes)]
    figures = []
    for share in SHARES:
        say(f"{share:.0%} hits")
        case = f"longest_hit, {sizes.hashes} hashes, five groups, {share:.0%} hits / vLLM"
        figures.append(_figure(case, _Lookups(hashes, share), sizes.repeat))
    say("masks")
    figures.append(_figure(f"store_mask, {sizes.hashes} hashes, five groups / vLLM", _Masks(sizes.hashes), sizes.repeat))
    return Answer(figures)


def _figure(case: str, pair: _Lookups | _Masks, repeat: int) -> Figure:
    pair.check()
    measured = in_turn({"ours": partial(timed, pair.ours), "vllm": partial(timed, pair.theirs)}, repeat)
    return Figure(NAME, case, measured.median("ours") * 1e3, measured.median("vllm") * 1e3, "ms", Target("<=", LIMIT))


class _Lookups:
    """One prompt whose first blocks are stored, for both sides."""

    def __init__(self, hashes: Sequence[bytes], share: float) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self._hashes, self._prompt = hashes, len(hashes) * UNIT + 1
        self._vllm = _coordinator()
        self._stored: dict[int, set[bytes]] = {}
        pool = self._vllm.block_pool
        for i, group in enumerate(GROUPS):
            own = hashes[group.block_tokens // UNIT - 1 :: group.block_tokens // UNIT]
            self._stored[group.id] = set(own[: int(len(own) * share)])
            for h in self._stored[group.id]:
                pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(h, i), pool.blocks[1])
        self._reach = Reachability(GROUPS, UNIT)

    def check(self) -> None:
        """Both find the same.

        Raises:
            StoreError: they do not, so their times cannot be compared.
        """
        found, theirs = self.ours().tokens, self.theirs()[1]
        if found != theirs:
            raise StoreError(f"bench lookup: {found} tokens here, {theirs} in vLLM, on the same data")

    def ours(self) -> Any:
        return self._reach.longest_hit(self._hashes, self._prompt, readable_many=self._readable)

    def theirs(self) -> Any:
        return self._vllm.find_longest_cache_hit(self._hashes, self._prompt - 1)

    def _readable(self, group_id: int, asked: Sequence[bytes]) -> list[bool]:
        held = self._stored[group_id]
        return [h in held for h in asked]


class _Masks:
    """Which blocks of a whole prompt to save, on both sides."""

    def __init__(self, hashes: int) -> None:
        self._reach = Reachability(GROUPS, UNIT)
        self._boundary = self._reach.boundary_tokens
        self._tokens = hashes * UNIT // self._boundary * self._boundary
        self._managers = [(g, _manager(g), _spec(g)) for g in GROUPS]

    def check(self) -> None:
        """Both keep the same.

        Raises:
            StoreError: they do not.
        """
        for group, mine, theirs in zip(GROUPS, self.ours(), self.theirs(), strict=True):
            if list(mine) != list(theirs):
                raise StoreError(f"bench lookup: the masks of group {group.id} differ from vLLM's")

    def ours(self) -> Any:
        return self._reach.store_mask(self._tokens)

    def theirs(self) -> list[Any]:
        masks = []
        for group, manager, spec in self._managers:
            blocks = self._tokens // group.block_tokens
            mask = manager.reachable_block_mask(
                start_block=0,
                end_block=blocks,
                alignment_tokens=self._boundary,
                kv_cache_spec=spec,
                use_eagle=False,
                retention_interval=None,
                reachable_boundaries=[],
            )
            masks.append([True] * blocks if mask is None else mask)
        return masks


# -- vLLM --------------------------------------------------------------------------------------------------------------


def _vllm() -> None:
    try:
        _coordinator()
        for group in GROUPS:
            _manager(group)
    except (ImportError, OSError) as error:
        raise Skipped(f"vLLM cannot be imported here ({error}): pip install 'kvactors[vllm]'") from error
    except (TypeError, AttributeError) as error:
        raise Skipped(
            f"this vLLM's coordinator is built in another way ({error}): install a version of 'kvactors[vllm]'"
        ) from error


def _coordinator() -> Any:
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    members = [KVCacheGroupSpec([f"layer{i}"], _spec(g), is_eagle_group=False) for i, g in enumerate(GROUPS)]
    return HybridKVCacheCoordinator(
        kv_cache_config=KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=members),
        max_model_len=1 << 22,
        max_in_flight_tokens=8192,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*(g.block_tokens for g in GROUPS)),
        hash_block_size=UNIT,
        allow_partial_hash_hits=False,
    )


def _spec(group: Group) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    common: dict[str, Any] = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    if group.kind is GroupKind.SLIDING_WINDOW:
        return specs.SlidingWindowSpec(**common, sliding_window=group.window)
    if group.kind is GroupKind.STATE:
        return specs.MambaSpec(
            block_size=group.block_tokens, shapes=((8,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
        )
    return specs.MLAAttentionSpec(**common) if group.kind is GroupKind.MLA else specs.FullAttentionSpec(**common)


def _manager(group: Group) -> Any:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    if group.kind is GroupKind.SLIDING_WINDOW:
        return managers.SlidingWindowManager
    return managers.MambaManager if group.kind is GroupKind.STATE else managers.FullAttentionManager
