"""Which prefill ranks send which heads to a decode rank, for any two tensor-parallel sizes, and which stages send which layers.

Shares of a cache: with H KV heads and T ranks, a rank holds H / T heads in order; with fewer heads than ranks each head is
held by T / H neighbouring ranks. An MLA cache is one head that every rank holds. A decode rank gets each of its heads from
exactly one prefill rank; of several copies, neighbouring decode ranks take different ones. Recurrent state is cut by rank in
more than one dimension, so it moves only between equal sizes, or where it is replicated (`kv_heads` 1).

A slice of heads is one run of bytes because a block holds its heads one behind the other, [head, token, dim], in K and in V.
Source: docs/design/disagg.md; who holds what is as in `KVLayout.put_step`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvactors.core.layout import GroupKind
from kvactors.errors import PeerMismatchError, TransferPlanError


class ByteRange(NamedTuple):
    """A part of a payload: where it begins in the source's and in the destination's piece, and how long it is."""

    src_offset: int
    dst_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What one prefill rank sends of a group to one decode rank, counted in heads.

    Attributes:
        prefill_rank: the sender.
        heads: how many it sends.
        src_first, src_heads: the first of them in the sender's share, and how many heads that share has.
        dst_first, dst_heads: the same for the receiver's share.
    """

    prefill_rank: int
    heads: int = 1
    src_first: int = 0
    src_heads: int = 1
    dst_first: int = 0
    dst_heads: int = 1

    @property
    def whole(self) -> bool:
        """Whether both shares are sent as they are."""
        return self.heads == self.src_heads == self.dst_heads

    def cut(self, src_payload_bytes: int, dst_payload_bytes: int, where: str) -> ByteRange:
        """The part in bytes, of pieces that hold the heads of each share one behind the other.

        Args:
            where: what is cut, for the message.

        Raises:
            PeerMismatchError: a payload is no whole number of heads, or a head has another size on each side.
        """
        if src_payload_bytes % self.src_heads or dst_payload_bytes % self.dst_heads:
            raise PeerMismatchError(
                f"{where}: payload is no whole number of heads",
                f"{src_payload_bytes} bytes for {self.src_heads}",
                f"{dst_payload_bytes} bytes for {self.dst_heads}",
                "register payloads without padding",
            )
        head = src_payload_bytes // self.src_heads
        if head != dst_payload_bytes // self.dst_heads:
            raise PeerMismatchError(
                f"{where}: bytes of a block",
                f"{src_payload_bytes} ({self.src_heads} share(s))",
                f"{dst_payload_bytes} ({self.dst_heads} share(s))",
                "use the same element kind and sizes on both",
            )
        return ByteRange(self.src_first * head, self.dst_first * head, self.heads * head)


def rank_heads(kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """The KV heads of a rank.

    Raises:
        TransferPlanError: there is no such rank, or the heads cannot be shared evenly.
    """
    if not 0 <= tp_rank < tp_size:
        raise TransferPlanError(f"TP rank {tp_rank}: there are {tp_size} ranks, from 0")
    if max(kv_heads, tp_size) % min(kv_heads, tp_size):
        raise TransferPlanError(f"{kv_heads} KV heads cannot be shared evenly by {tp_size} ranks")
    first = tp_rank * kv_heads // tp_size
    return range(first, first + max(1, kv_heads // tp_size))


class SharedGroup(NamedTuple):
    """What the mapping needs to know of a group: its kind, and the KV heads of the whole model (None = not known)."""

    kind: GroupKind
    kv_heads: int | None


class TpMap:
    """Who sends what to whom between a prefill instance and a decode instance, inside one pair of pipeline stages.

    Args:
        groups: in order.
        prefill_tp, decode_tp: tensor-parallel sizes.

    Raises:
        PeerMismatchError: the sizes cannot be mapped for one of the groups; says which, and names both.
    """

    def __init__(self, groups: Sequence[SharedGroup], prefill_tp: int, decode_tp: int) -> None:
        self.prefill_tp, self.decode_tp = prefill_tp, decode_tp
        self._parts = [
            [_parts(i, group, prefill_tp, decode_tp, rank) for rank in range(decode_tp)] for i, group in enumerate(groups)
        ]
        senders = [{part.prefill_rank for of_group in self._parts for part in of_group[d]} for d in range(decode_tp)]
        busy = set[int]().union(*senders)
        for idle in set(range(prefill_tp)) - busy:
            senders[idle % decode_tp].add(idle)
        self._pulls = [tuple(sorted(ranks)) for ranks in senders]

    def parts(self, group_index: int, decode_rank: int) -> tuple[HeadPart, ...]:
        """What a decode rank gets of a group: each of its heads exactly once."""
        return self._parts[group_index][decode_rank]

    def pulls(self, decode_rank: int) -> tuple[int, ...]:
        """The prefill ranks that a decode rank pulls from, in order.

        A rank whose copies nobody needs is pulled from with nothing to move, by one decode rank, so that it frees its blocks.
        """
        return self._pulls[decode_rank]

    def pullers(self, prefill_rank: int) -> tuple[int, ...]:
        """The decode ranks that pull from a prefill rank; never empty."""
        return tuple(d for d, ranks in enumerate(self._pulls) if prefill_rank in ranks)


def _parts(index: int, group: SharedGroup, prefill_tp: int, decode_tp: int, rank: int) -> tuple[HeadPart, ...]:
    if prefill_tp == decode_tp:
        return (HeadPart(rank),)
    heads = 1 if group.kind is GroupKind.MLA else group.kv_heads
    if group.kind is GroupKind.STATE and heads != 1:
        raise _refused(index, "recurrent state is not cut by head", prefill_tp, decode_tp, "use the same TP size on both")
    if heads is None:
        raise _refused(index, "its KV heads are not known", prefill_tp, decode_tp, "use the same TP size on both")
    if any(max(heads, size) % min(heads, size) for size in (prefill_tp, decode_tp)):
        advice = "use sizes that divide the heads, or are multiples of them"
        raise _refused(index, f"{heads} KV heads cannot be shared evenly", prefill_tp, decode_tp, advice)
    wanted = rank_heads(heads, decode_tp, rank)
    copies = max(1, prefill_tp // heads)
    copy = rank % max(1, decode_tp // heads) % copies
    parts: list[HeadPart] = []
    head = wanted.start
    while head < wanted.stop:
        sender = head * prefill_tp // heads + copy
        held = rank_heads(heads, prefill_tp, sender)
        count = min(held.stop, wanted.stop) - head
        parts.append(HeadPart(sender, count, head - held.start, len(held), head - wanted.start, len(wanted)))
        head += count
    return tuple(parts)


def _refused(index: int, reason: str, prefill_tp: int, decode_tp: int, advice: str) -> PeerMismatchError:
    return PeerMismatchError(f"group {index}: {reason}", f"TP {prefill_tp}", f"TP {decode_tp}", advice)


def expected_pulls(tp: TpMap, prefill_rank: int, decode_stages: int) -> int:
    """Decode workers whose report a prefill worker waits for, whatever its own stage.

    Every decode stage pulls from every prefill stage, also where they share no layer: nobody has to know how the other side cut
    its layers to count.
    """
    return len(tp.pullers(prefill_rank)) * decode_stages


def layers_by_stage(prefill_stages: Sequence[Collection[str]], decode_layers: Collection[str]) -> list[list[str]]:
    """Which of a decode worker's layers each prefill stage sends; the worker waits for every stage, also for one with none.

    Args:
        prefill_stages: the layer names of each stage, in order of stages.

    Raises:
        PeerMismatchError: a layer is held by no stage, or by more than one.
    """
    for layer in decode_layers:
        holders = [stage for stage, layers in enumerate(prefill_stages) if layer in layers]
        if len(holders) != 1:
            raise PeerMismatchError(
                f"layer {layer}", f"stages {holders} that hold it", "to get it once", "register each layer on one stage"
            )
    return [[layer for layer in decode_layers if layer in layers] for layers in prefill_stages]
