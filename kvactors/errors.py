"""Every error that kvactors raises, under one root.

Families, so that a caller can tell whose fault it was: `LocalError` (the caller's own mistake, nothing was lost),
`StoreError` (the store or the transport misbehaved), `EngineError` (the engine itself cannot go on) and `DisaggError`
(prefill and decode worker do not fit each other, or one request of theirs does not).
Each message says what happened, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class KVActorsError(Exception):
    """The root of all errors raised by kvactors."""


class LocalError(KVActorsError):
    """The caller did something that is not allowed; nothing was changed."""


class LayoutError(LocalError, ValueError):
    """A layout (groups, entries, block sizes) contradicts itself."""


class StateError(LocalError, ValueError):
    """Rows of a recurrent state, or what goes into a state operator, do not fit each other; nothing was written."""


class ReachabilityError(LocalError, ValueError):
    """A mask or a hit was asked for with arguments that have no meaning."""


class ConfigError(LocalError, ValueError):
    """An option or a configuration value is out of its range."""


class TraceError(LocalError, ValueError):
    """A recorded trace cannot be read; names file, line and field."""

    def __init__(self, path: str, line: int, field: str, problem: str) -> None:
        self.path, self.line, self.field, self.problem = path, line, field, problem
        super().__init__(f"{path}:{line}: {field}: {problem}" if field else f"{path}:{line}: {problem}")


class StepError(LocalError):
    """A step was driven in an order that is not allowed."""


class SessionError(LocalError):
    """A session was asked to make a transition that its table does not have."""


class StoreError(KVActorsError):
    """The store refused an operation as a whole (per-key results are outcomes, not errors)."""


class StoreCallError(StoreError):
    """A store raised, or answered what its contract does not have; names it, the method, what was expected and what came."""


class UnregisteredMemoryError(StoreError):
    """An address range was used that no `register` call covers."""


class StoreUnreachableError(StoreError):
    """The store, or its master, does not answer."""


class DisaggError(KVActorsError):
    """A hand-off from a prefill worker to a decode worker cannot be done as asked; see the families below."""


class TransferPlanError(DisaggError, LocalError, ValueError):
    """Regions, ranks, sizes or tokens that the caller gave for a hand-off contradict themselves; nothing was sent."""


class PeerMismatchError(DisaggError):
    """Two workers can hand nothing over to each other; refused once, at the handshake.

    Attributes:
        what: what does not fit, and where.
        prefill, decode: the value on each side, as text.
    """

    def __init__(self, what: str, prefill: object, decode: object, advice: str) -> None:
        self.what, self.prefill, self.decode = what, str(prefill), str(decode)
        super().__init__(f"{what}: prefill has {prefill}, decode has {decode}; {advice}")


class HandoffBlocksError(DisaggError):
    """The blocks of one request cannot be handed over; other requests go on."""


class HandoffStateError(DisaggError, LocalError):
    """A hand-off was asked to make a transition that its table does not have; nothing was changed."""


class WireError(DisaggError):
    """A message of a peer makes no sense: malformed, too large, or of another protocol version."""


class LinkClosedError(DisaggError):
    """The link to a peer has ended; what was asked over it and not answered has failed."""


class PeerUnreachableError(DisaggError):
    """A peer does not answer; whether it lives is not known."""


class PeerGoneError(PeerUnreachableError):
    """The process at a peer's address is gone: its machine refuses the connection."""


class TransferFailedError(DisaggError):
    """A transfer failed; part of it may have been written, and what is on its way may land until a moment later."""


class LiveViewError(KVActorsError):
    """The live view of an engine cannot be read: nobody answers, or what answers is none."""


class EngineError(KVActorsError):
    """The engine cannot do what was asked in its present state."""


class EngineDeadError(EngineError):
    """The engine's loop or its coordinator died; the model goes on without a KV cache."""


class EngineClosedError(EngineError):
    """The engine was drained or closed."""


class ActorCrashedError(EngineError):
    """An actor raised in a handler; its sessions were revoked by the supervisor."""


class MailboxOverflowError(EngineError):
    """A bounded mailbox got more messages than its bound: a bug in the engine, never a load problem."""


class LoadFailedError(EngineError):
    """A load failed and the engine runs in strict mode."""


class DeadlineError(EngineError):
    """A waiter's deadline passed before the engine answered."""


class DrainTimeout(EngineError):
    """A drain ended at its deadline with work left; `left` lists it, one line each."""

    def __init__(self, left: Sequence[str]) -> None:
        self.left = tuple(left)
        shown = "; ".join(self.left[:5]) + (" …" if len(self.left) > 5 else "")
        super().__init__(f"drain deadline passed with {len(self.left)} item(s) left: {shown}; only close() is legal now")
