"""The prefill/decode hand-off in vLLM's scheduler: what `kv_transfer_params` ask for, and what each step tells the workers.

A request goes through two instances. At prefill (`do_remote_decode`) it is cut where decode takes over and computed, and its
blocks are held until they were fetched. At decode (`do_remote_prefill`) its blocks are fetched before it runs. Whatever cannot
be handed over is served plainly: at decode it is computed again, or loaded from the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvactors.core.layout import GroupKind
from kvactors.disagg.blocks import RequestBlocks
from kvactors.disagg.boundary import Boundary, boundary
from kvactors.disagg.messages import Source
from kvactors.disagg.wire import is_name
from kvactors.log import get_logger
from kvactors.vllm.handoff_blocks import HandoffGroup, decode_blocks, loses_a_block, prefill_blocks
from kvactors.vllm.messages import HandoffPlan, HeldPrefill, Pull

log = get_logger("kvactors.vllm.handoff", burst=10)

SOURCE_KEYS = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
"""What decode has to be told of a request's prefill."""

CUT = "_p_side_truncated"
"""Set in the parameters of a request that was cut; vLLM's own connectors use the same word."""

COMPUTED = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Ends of a request that has sampled a token, so that its prompt is computed. The first token may be a stop token."""


@dataclass(slots=True)
class Fetch:
    """What is known of a pull. `over`: all ranks have reported it."""

    name: str
    over: bool = False


class HandoffScheduler:
    """See the module.

    Args:
        groups: those that take part, in order.
        hash_tokens: tokens per fine hash of `Request.block_hashes`.
        sends, receives: what the role allows.
        replays: windows are replayed to a bound after a hit; decode's last token is laid out as with a recurrent state.
        lookahead: tokens that a speculative prefill drafts ahead.
    """

    def __init__(
        self,
        groups: Sequence[HandoffGroup],
        *,
        hash_tokens: int,
        sends: bool,
        receives: bool,
        replays: bool = False,
        lookahead: int = 0,
    ) -> None:
        self._groups, self._hash_tokens = groups, hash_tokens
        self._sends, self._receives = sends, receives
        self._lookahead = lookahead
        self._stops_early = replays or any(g.kind is GroupKind.STATE for g in groups)
        self._has_state = any(g.kind is GroupKind.STATE for g in groups)
        self._plan = HandoffPlan()
        self._pulls = 0
        self._fetches: dict[str, Fetch] = {}
        """decode: request id -> its pull, until the request ends or is matched anew"""
        self._prefills: dict[str, str] = {}
        """prefill: request id -> transfer id, until it ends"""
        self._transfers: dict[str, str] = {}
        """prefill: transfer id -> request id, until its blocks are vLLM's again"""
        self._leaving: list[str] = []
        """prefill: cancelled; their ids may be used again in a later step, as a plan has no order"""

    # -- a request comes in --------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request: at prefill it is cut before anything is matched. One that cannot be handed over is a plain one."""
        params = _params(request)
        if params.get("do_remote_prefill"):
            problem = "" if self._receives else "this instance's kv_role takes no hand-offs"
            if not problem and (missing := [key for key in SOURCE_KEYS if not is_name(params.get(key))]):
                problem = f"kv_transfer_params lack {', '.join(missing)}"
            if problem:
                _refuse(request, "do_remote_prefill", problem)
                params["do_remote_prefill"] = False
        elif params.get("do_remote_decode"):
            transfer: Any = params.get("transfer_id")
            problem = "" if self._sends else "this instance's kv_role hands nothing over"
            if not problem and not is_name(transfer):
                problem = "kv_transfer_params lack transfer_id"
            if not problem and transfer in self._transfers:
                problem = f"transfer_id {transfer!r} is in use by request {self._transfers[transfer]!r}"
            if problem:
                _refuse(request, "do_remote_decode", problem)
                return
            self._cut(request, params)
            self._prefills[request.request_id] = transfer
            self._transfers[transfer] = request.request_id
            self._plan.requests.append(transfer)

    def _boundary(self, request: Any) -> Boundary:
        tokens = int(request.num_prompt_tokens)
        return boundary(
            tokens,
            has_state=self._stops_early or loses_a_block(self._groups, tokens),
            lookahead=self._lookahead,
            skips_prefix_cache=bool(getattr(request, "skip_reading_prefix_cache", False)),
            has_ids=request.prompt_token_ids is not None,
        )

    def _cut(self, request: Any, params: dict[str, Any]) -> None:
        """Drops what decode computes by itself: once, whatever becomes of the request. Lists that others see are replaced."""
        where = self._boundary(request)
        if params.get(CUT) or not where.truncated:
            return
        params[CUT] = True
        request.prompt_token_ids = list(where.cut(request.prompt_token_ids))
        for name in ("prompt_embeds", "prompt_is_token_ids"):
            if (value := getattr(request, name, None)) is not None:
                setattr(request, name, where.cut(value))
        request.num_prompt_tokens = where.prefill_tokens
        request.max_tokens = 1
        del request._all_token_ids[where.prefill_tokens :]  # in place: vLLM's views of it stay right
        del request.block_hashes[where.prefill_tokens // self._hash_tokens :]

    # -- decode --------------------------------------------------------------------------------------------------------

    def expects(self, request: Any) -> bool:
        """Whether the request's blocks come from a prefill instance, and have not been asked for."""
        return self._receives and bool(_params(request).get("do_remote_prefill"))

    def matched(self, request: Any, local_tokens: int) -> tuple[int, bool] | None:
        """Tokens beyond vLLM's own that prefill has; vLLM may ask as often as it likes. None: the request waits for none."""
        if not self.expects(request):
            self._fetches.pop(request.request_id, None)  # it failed, and something else may load now
            return None
        more = self._boundary(request).decode_tokens(local_tokens)
        return more, more > 0

    def loads(self, request: Any) -> bool:
        """Whether what the request loads, or has just loaded, is a hand-off."""
        return self.expects(request) or request.request_id in self._fetches

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> bool:
        """vLLM has blocks for the request: they are asked for, once. Nothing to fetch: prefill is told to free its own.

        Returns:
            whether the request waits for a hand-off now.
        """
        if not self.expects(request):
            return False
        tokens = self._boundary(request).handoff_tokens
        wanted = RequestBlocks(tokens)
        if external_tokens:
            wanted = decode_blocks(self._groups, blocks.get_block_ids(), tokens - external_tokens, tokens)
        pull = self._pull(request, wanted)
        if external_tokens:
            self._fetches[request.request_id] = Fetch(pull.name)
        return bool(external_tokens)

    def _pull(self, request: Any, wanted: RequestBlocks) -> Pull:
        params = _params(request)
        params["do_remote_prefill"] = False
        self._pulls += 1
        pull = Pull(
            f"{request.request_id}/{self._pulls}",
            request.request_id,
            Source(*(params[key] for key in SOURCE_KEYS)),
            wanted,
        )
        self._plan.pulls.append(pull)
        return pull

    # -- a request ends ------------------------------------------------------------------------------------------------

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """The request has ended, however; whether vLLM is to keep its blocks until they are reported sent."""
        request_id = request.request_id
        if self.expects(request):  # aborted before it had blocks
            self._pull(request, RequestBlocks(0))
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None and not fetch.over:
            self._plan.given_up.append((fetch.name, f"request {request_id} ended: {_status(request)}"))
        transfer = self._prefills.pop(request_id, None)
        if transfer is None:
            return False
        problem = self._unfit(request)
        if problem:
            self._leaving.append(transfer)
            self._plan.cancelled.append((transfer, problem))
            return False
        held = prefill_blocks(self._groups, tables, int(request.num_prompt_tokens))
        self._plan.prefilled.append(HeldPrefill(transfer, request_id, held))
        return True

    def _unfit(self, request: Any) -> str:
        """Why what prefill computed is not what decode wants; empty if it is."""
        computed, prompt = int(request.num_computed_tokens), int(request.num_prompt_tokens)
        if (status := _status(request)) not in COMPUTED:
            return f"the request ended at prefill: {status}"
        if computed < prompt:
            return f"the request ended at prefill with {computed} of {prompt} tokens computed"
        if self._has_state and computed > prompt and _params(request).get(CUT):
            return f"prefill computed {computed} tokens of a prompt of {prompt}, and a state cannot be rewound"
        return ""

    # -- steps ---------------------------------------------------------------------------------------------------------

    def plan(self) -> HandoffPlan:
        """What the workers are told with the next step."""
        plan, self._plan = self._plan, HandoffPlan()
        for transfer in self._leaving:
            self._transfers.pop(transfer, None)
        self._leaving = []
        return plan

    def reported(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """Requests whose pulls are over on all ranks, and those whose blocks no rank holds any more."""
        for request_id in received:
            if (fetch := self._fetches.get(request_id)) is not None:
                fetch.over = True
        gone = set(sent)
        self._transfers = {t: r for t, r in self._transfers.items() if r not in gone} if gone else self._transfers

    @property
    def busy(self) -> bool:
        """Whether a step is needed, because something has to reach the workers."""
        return bool(self._plan)


def refuse_all(request: Any) -> None:
    """A request of an instance that takes no part in hand-offs: it is served plainly, and that is said."""
    params = _params(request)
    for key in ("do_remote_prefill", "do_remote_decode"):
        if params.get(key):
            _refuse(request, key, "this instance takes no part in hand-offs; see the settings handoff and kv_role")
            if key == "do_remote_prefill":
                params[key] = False


def _params(request: Any) -> dict[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}


def _status(request: Any) -> str:
    return str(getattr(request.status, "name", request.status))


def _refuse(request: Any, key: str, problem: str) -> None:
    log.warning("a request is served without hand-off", request=request.request_id, asked=key, problem=problem)
