"""Which blocks of a request may be looked up, saved and loaded, and how long a hit is.

A hit of L tokens is worth something only if every group has what its layers need to go on at token L: all blocks before L
for full attention, the last few for a window, one state for a recurrent layer. Each kind comes down to two numbers: the
first block that a hit needs (`_Spec.first_block`), and how many blocks past L a speculative group looks (`_Spec.extra`).
A hit of L tokens is valid when in every group all blocks from the first needed one up to L, plus the extra ones, can be
read; the longest hit is the greatest such multiple of the boundary.

Terms: lengths are raw tokens from the start of the prompt; blocks are counted from 0 in blocks of their own group. The hash
unit is the granularity of the fine chained hashes; the hash of a block that spans k units is the last of its k. The
boundary B is the least common multiple of all block sizes. The rules are those of vLLM's cache managers for hits that end
on B; tests/core/test_reachability_oracle.py compares the two and names the few differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, cycle, repeat
from operator import indexOf, truth
from typing import Protocol

from kvactors.core.layout import Group, GroupKind
from kvactors.errors import LayoutError, ReachabilityError

Mask = tuple[bool, ...]
Readable = Callable[[int, bytes], bool]
"""(group id, block hash) -> whether that block can be read, whole."""
ReadableMany = Callable[[int, Sequence[bytes]], Sequence[bool]]
"""(group id, block hashes) -> the same for many blocks of a group, in order."""

_LEAST_BATCH, _BATCH_GROWTH, _MOST_BATCH = 16, 4, 4096
"""Blocks in one `readable_many` call, growing from call to call: a miss stays cheap, a long hit takes few calls."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a prompt is stored and usable.

    Attributes:
        tokens: length of the hit, a multiple of B; 0 = nothing.
        masks: per group, in order: which of its `tokens // block_tokens` blocks to load. Equals `load_mask(tokens)`.
    """

    tokens: int
    masks: tuple[Mask, ...]


class Reachability:
    """The reachability rules for one set of groups.

    Args:
        groups: the groups that take part, in the order of all masks. Their layers are not looked at.
        hash_tokens: tokens per fine block hash.

    Raises:
        LayoutError: no groups, one id twice, or a hash unit that does not divide every group's block.
    """

    def __init__(self, groups: Sequence[Group], hash_tokens: int) -> None:
        self.groups = tuple(groups)
        self.hash_tokens = hash_tokens
        _check_geometry(self.groups, hash_tokens)
        self.boundary_tokens = math.lcm(*(g.block_tokens for g in self.groups))
        """B: every hit ends on a multiple of it. With a single group it is that group's own block."""
        self._specs = _distinct_specs(self.groups)
        self._spec_of = [next(i for i, s in enumerate(self._specs) if g.id in s.group_ids) for g in self.groups]

    def longest_hit(
        self,
        block_hashes: Sequence[bytes],
        prompt_tokens: int,
        readable: Readable | None = None,
        *,
        readable_many: ReadableMany | None = None,
    ) -> Hit:
        """The longest stored prefix from which every group can go on; at most `prompt_tokens - 1` tokens.

        Each (group, block) is asked about at most once, and only if a hit at some multiple of B needs it.

        Args:
            block_hashes: fine chained hashes from token 0, one per hash unit; shorter or longer than the prompt is fine.
            prompt_tokens: one token of them is always left to compute.
            readable: asked block by block, unless `readable_many` is given.
            readable_many: asked in batches of up to 4096 blocks, a little ahead of what turns out to be needed.

        Raises:
            ReachabilityError: a negative length, nobody to ask, or a batch answered with a list of another length.
        """
        limit = _whole("prompt_tokens", prompt_tokens) - 1
        searches = (self._search(spec, block_hashes, readable, readable_many) for spec in self._specs)
        tokens = _common_length(searches, len(self._specs), limit)
        return Hit(tokens, self.load_mask(tokens))

    def load_mask(self, num_tokens: int) -> tuple[Mask, ...]:
        """Per group, the blocks that a hit of `num_tokens` (a multiple of B) needs in local memory.

        The extra block of a speculative group proves the hit and is not part of it.

        Raises:
            ReachabilityError: when no hit can have that length.
        """
        self._check_aligned("num_tokens", num_tokens)
        return self._per_group([_load(spec, num_tokens) for spec in self._specs])

    def lookup_mask(self, num_tokens: int) -> tuple[Mask, ...]:
        """Per group, the blocks worth asking a store about, for any length; it is rounded up to B.

        Always the dense one: what another request stored under retention ends at its own boundaries, unknown to this one.

        Raises:
            ReachabilityError: a negative length.
        """
        return self.store_mask(-(-_whole("num_tokens", num_tokens) // self.boundary_tokens) * self.boundary_tokens)

    def store_mask(
        self,
        num_tokens: int,
        prompt_tokens: int | None = None,
        retention: int | None = None,
        junctions: Sequence[int] = (),
    ) -> tuple[Mask, ...]:
        """Per group, the blocks of the first `num_tokens` (a multiple of B) that some later hit can need.

        Without retention these are the blocks for a hit at every multiple of B. For recurrent state that is all true:
        in align mode the scheduler leaves null blocks where there is no state, and the caller never saves those.

        Args:
            num_tokens: computed tokens, aligned down to B by the caller.
            prompt_tokens: length of the prompt; under retention its replay boundary is kept: prompt_tokens - 1, aligned down
                to B. A replay in a speculative layout may only match one B less: pass that as a junction to keep it too.
            retention: None = every multiple of B; n > 0 = every multiple of n; 0 = only replay boundary and junctions.
                Groups that need all blocks anyway ignore it.
            junctions: multiples of B where a shared prefix is known to end; kept under retention.

        Raises:
            ReachabilityError: a length, retention or junction that is negative or not a multiple of B.
        """
        self._check_aligned("num_tokens", num_tokens)
        kept_ends: list[int] = []
        if retention is not None:
            self._check_aligned("retention", retention)
            for junction in junctions:
                self._check_aligned("junction", junction)
            if prompt_tokens is not None:
                last = _whole("prompt_tokens", prompt_tokens) - 1
                kept_ends.append(last // self.boundary_tokens * self.boundary_tokens)
            kept_ends.extend(junctions)
        return self._per_group([_store(spec, num_tokens, self.boundary_tokens, retention, kept_ends) for spec in self._specs])

    def _per_group(self, of_spec: Sequence[Mask]) -> tuple[Mask, ...]:
        return tuple(of_spec[i] for i in self._spec_of)

    def _search(
        self, spec: _Spec, block_hashes: Sequence[bytes], readable: Readable | None, readable_many: ReadableMany | None
    ) -> _Search:
        hashes = _GroupHashes(block_hashes, spec.block_tokens // self.hash_tokens)
        probe: _Probe
        if readable_many is not None:
            probe = _Batched(spec, hashes, readable_many)
        elif readable is not None:
            probe = _OneByOne(spec, hashes, readable)
        else:
            raise ReachabilityError("longest_hit: needs readable or readable_many, else it cannot know what is stored")
        return _Search(spec, probe, hashes.blocks, self.boundary_tokens)

    def _check_aligned(self, what: str, tokens: int) -> None:
        if _whole(what, tokens) % self.boundary_tokens:
            below = tokens // self.boundary_tokens * self.boundary_tokens
            raise ReachabilityError(
                f"{what} = {tokens}: must be a multiple of the boundary of {self.boundary_tokens} tokens (the least common "
                f"multiple of all groups' block_tokens); the next one below is {below}"
            )


# -- what each kind needs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spec:
    """Groups that are alike for reachability, treated as one: a block counts only if all of them can read it.

    Attributes:
        need: blocks before the boundary that a hit needs at most (window, state); None = decided by `first_block` alone.
        extra: blocks past the boundary that must be readable too. A draft model re-reads the last block of what matched,
            so a speculative group matches one block more and drops it. Draft models have no recurrent layers.
    """

    kind: GroupKind
    block_tokens: int
    chunk_tokens: int | None
    need: int | None
    extra: int
    group_ids: tuple[int, ...]

    def first_block(self, end: int) -> int:
        """First of the blocks that a hit of `end` blocks needs; `end` itself when it needs none."""
        if self.need is not None:
            return max(0, end - self.need)
        if self.chunk_tokens is not None:
            return end * self.block_tokens // self.chunk_tokens * self.chunk_tokens // self.block_tokens
        return 0


def _need(group: Group) -> int | None:
    if group.kind is GroupKind.STATE:
        return 1
    if group.window is not None:
        # A query sees itself and window - 1 tokens before it.
        return -(-(group.window - 1) // group.block_tokens)
    return None


def _distinct_specs(groups: Sequence[Group]) -> list[_Spec]:
    """One spec for all groups that are alike; those that need an unbroken prefix come first.

    If one of them is speculative all are, as in vLLM: their blocks are looked up and dropped together.
    """
    alike: dict[tuple[object, ...], list[Group]] = {}
    for g in groups:
        alike.setdefault((g.kind, g.block_tokens, g.window, g.chunk_tokens), []).append(g)
    specs = []
    for members in alike.values():
        g = members[0]
        extra = int(any(m.speculative for m in members) and g.kind is not GroupKind.STATE)
        specs.append(_Spec(g.kind, g.block_tokens, g.chunk_tokens, _need(g), extra, tuple(m.id for m in members)))
    # The prefix is found once, left to right, and bounds what the others have to look at.
    return sorted(specs, key=lambda s: s.need is not None or s.chunk_tokens is not None)


def _load(spec: _Spec, num_tokens: int) -> Mask:
    end = num_tokens // spec.block_tokens
    first = spec.first_block(end)
    return (False,) * first + (True,) * (end - first)


def _store(spec: _Spec, num_tokens: int, boundary: int, retention: int | None, kept_ends: Sequence[int]) -> Mask:
    blocks = num_tokens // spec.block_tokens
    segment = boundary if retention is None else retention
    if spec.need is None or (spec.kind is GroupKind.STATE and retention is None):
        return (True,) * blocks
    run = spec.need + spec.extra
    period = segment // spec.block_tokens
    if segment and run >= period:
        return (True,) * blocks
    if segment:
        # A segment that num_tokens cuts short keeps the part of its run that is there already: its end may still come.
        keep = [False] * spec.extra + ([False] * (period - run) + [True] * run) * (blocks // period + 1)
        del keep[blocks:]
    else:
        keep = [False] * blocks
    for end_tokens in kept_ends:
        end = end_tokens // spec.block_tokens + spec.extra
        for block in range(max(0, end - run), min(end, blocks)):
            keep[block] = True
    return tuple(keep)


# -- the search for the longest hit ----------------------------------------------------------------------------------


class _Probe(Protocol):
    def answers(self, blocks: range) -> Iterator[object]:
        """For each of the blocks, in order, something true if all groups of the spec can read it. Asks as it is read."""
        ...


class _GroupHashes:
    """The block hashes of one spec, picked from the fine ones without copying the list."""

    __slots__ = ("_fine", "_units", "blocks")

    def __init__(self, fine: Sequence[bytes], units: int) -> None:
        self._fine, self._units = fine, units
        self.blocks = len(fine) // units
        """How many whole blocks have a hash."""

    def of(self, blocks: range) -> Iterator[bytes]:
        units = self._units
        last_units = range((blocks.start + 1) * units - 1, (blocks.stop + 1) * units - 1, blocks.step * units)
        return map(self._fine.__getitem__, last_units)

    def pick(self, blocks: Sequence[int]) -> list[bytes]:
        fine, units = self._fine, self._units
        return [fine[(block + 1) * units - 1] for block in blocks]


class _OneByOne:
    """Asks block by block. Its loops run in C, because a prompt may have 100,000 blocks."""

    __slots__ = ("_group_ids", "_hashes", "_readable")

    def __init__(self, spec: _Spec, hashes: _GroupHashes, readable: Readable) -> None:
        self._group_ids, self._hashes, self._readable = spec.group_ids, hashes, readable

    def answers(self, blocks: range) -> Iterator[object]:
        if len(self._group_ids) == 1:
            return map(self._readable, repeat(self._group_ids[0]), self._hashes.of(blocks))
        return map(self._all_readable, self._hashes.of(blocks))

    def _all_readable(self, block_hash: bytes) -> bool:
        return all(map(self._readable, self._group_ids, repeat(block_hash)))


class _Batched:
    """Asks for many blocks in a call, and remembers the answers that were not used at once."""

    __slots__ = ("_batch", "_group_ids", "_hashes", "_known", "_readable_many")

    def __init__(self, spec: _Spec, hashes: _GroupHashes, readable_many: ReadableMany) -> None:
        self._group_ids, self._hashes, self._readable_many = spec.group_ids, hashes, readable_many
        self._batch = _LEAST_BATCH
        self._known: dict[int, object] = {}

    def answers(self, blocks: range) -> Iterator[object]:
        return chain.from_iterable(map(self._ask, self._batches(blocks)))

    def _batches(self, blocks: range) -> Iterator[range]:
        while blocks:
            batch, self._batch = self._batch, min(self._batch * _BATCH_GROWTH, _MOST_BATCH)
            yield blocks[:batch]
            blocks = blocks[batch:]

    def _ask(self, blocks: range) -> Iterator[object]:
        known = self._known
        unknown = [block for block in blocks if block not in known]
        known.update(dict.fromkeys(unknown, False))
        for group_id in self._group_ids:
            if not unknown:
                break
            answers = self._readable_many(group_id, self._hashes.pick(unknown))
            if len(answers) != len(unknown):
                raise ReachabilityError(
                    f"readable_many answered {len(answers)} values for {len(unknown)} blocks of group {group_id}; it must "
                    "answer one per hash, in order"
                )
            unknown = list(compress(unknown, answers))
        known.update(dict.fromkeys(unknown, True))
        return map(known.__getitem__, blocks)


class _Search:
    """Finds the longest hit of one spec below ever smaller limits.

    What was learnt stays: `_low` is the lowest block looked at, and all blocks from there to the end of the present
    candidate are known to be readable. So a prefix is found once and then only trimmed, no block is asked about twice,
    and all calls together are linear in the blocks.
    """

    __slots__ = ("_boundary_blocks", "_low", "_most", "_probe", "_spec")

    def __init__(self, spec: _Spec, probe: _Probe, blocks: int, boundary: int) -> None:
        self._spec, self._probe = spec, probe
        self._boundary_blocks = boundary // spec.block_tokens
        self._low = blocks
        self._most = blocks - spec.extra

    def longest(self, limit: int) -> int:
        """Tokens of the spec's longest hit of at most `limit` tokens (not more than in the call before); a multiple of B."""
        spec, extra = self._spec, self._spec.extra
        end, seen = self._align(min(limit // spec.block_tokens, self._most)), 0
        while end > 0:
            first = spec.first_block(end)
            run = range(first + seen, min(self._low, end + extra))
            readable = _before(False, self._probe.answers(run)) if run else 0
            self._low = min(self._low, first)
            if readable == len(run):
                return end * spec.block_tokens
            # Runs move left with their end, so every shorter hit that ends past the hole would need that block as well.
            end, seen = self._skip(self._align(run[readable] - extra))
        return 0

    def _skip(self, end: int) -> tuple[int, int]:
        """Goes on to the next hit whose leftmost block is there: that block alone rules out most of the others.

        Returns its blocks, and how many of its run (from the left) are now known to be readable.
        """
        need = self._spec.need
        if need is None or end < need:
            return end, 0
        # Without its leftmost block a hit fails, and so do the shorter ones down to the first that lies all to its left.
        stride = -self._align(-(need + self._spec.extra))
        leftmost = range(end - need, -1, -stride)
        skipped = _before(True, self._probe.answers(leftmost))
        return end - skipped * stride, int(skipped < len(leftmost))

    def _align(self, blocks: int) -> int:
        return blocks // self._boundary_blocks * self._boundary_blocks


def _before(wanted: bool, answers: Iterator[object]) -> int:
    """How many answers come before the first that is `wanted`; all of them if none is."""
    return indexOf(chain(map(truth, answers), (wanted,)), wanted)


def _common_length(searches: Iterable[_Search], count: int, limit: int) -> int:
    """The greatest length that all `count` specs accept: each in turn may only shrink it, until all agree."""
    tokens, agreed = limit, 0
    for search in cycle(searches):
        longest = search.longest(tokens)
        agreed = agreed + 1 if longest == tokens else 1
        tokens = longest
        if agreed == count or not tokens:
            break
    return tokens


# -- arguments -------------------------------------------------------------------------------------------------------


def _check_geometry(groups: Sequence[Group], hash_tokens: int) -> None:
    if not groups:
        raise LayoutError("reachability needs at least one group")
    if isinstance(hash_tokens, bool) or not isinstance(hash_tokens, int) or hash_tokens < 1:
        raise LayoutError(f"hash_tokens = {hash_tokens!r}: must be a whole number of tokens >= 1")
    seen: set[int] = set()
    for g in groups:
        if g.id in seen:
            raise LayoutError(f"group id {g.id} is given twice; ids must be unique")
        seen.add(g.id)
        if g.block_tokens % hash_tokens:
            raise LayoutError(
                f"group {g.id}: block_tokens {g.block_tokens} is not a multiple of the hash unit of {hash_tokens} tokens, so "
                "its blocks have no hash; use a hash unit that divides every group's block_tokens"
            )


def _whole(what: str, tokens: int) -> int:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ReachabilityError(f"{what} = {tokens!r}: must be a whole number of tokens >= 0")
    return tokens
