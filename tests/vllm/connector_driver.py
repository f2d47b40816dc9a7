"""One process with real vLLM in it, led by a test through `tests.vllm.led`.

`python -m tests.vllm.connector_driver FD` reads commands from its standard input, a line of JSON each, and answers on the file
descriptor FD; vLLM may print what it likes. Each public method of `Driver` is a command.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.vllm import engine, handoff_tricks, real_weights, store_tricks

WARM_UP = 5  # tokens; the first pass of a process with a single token may crash where the CPU has AMX


class Driver(store_tricks.StoreTricks, handoff_tricks.HandoffTricks):
    """At most one engine at a time, step by step if a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.llm: Any = None
        self.wanted: Any = None
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.matched: dict[str, list[int]] = {}
        self.totals = {"queries": 0, "hits": 0}
        self.preempted: dict[str, int] = {}  # requests that gave way, and how many tokens each had made by then
        self.connector_stats: list[Any] = []
        self.scheduled: dict[str, list[int]] = {}  # tokens that each request computed in each of its steps

    def start(self, model: str, folder: str, connector: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """An engine; one that was started with the same words goes on, with an empty prefix cache.

        `connector`: fields of a `KVTransferConfig`, or None for an engine without.
        """
        began = time.monotonic()
        wanted = [model, folder, connector, dict(changes)]
        if self.wanted != wanted:
            self.stop()
            if connector is not None:
                from vllm.config import KVTransferConfig

                changes["kv_transfer_config"] = KVTransferConfig(**connector)
            self.llm = engine.start(model, Path(folder), disable_log_stats=False, **changes)
            self.wanted = wanted
            if changes.get("pipeline_parallel_size", 1) > 1:
                self.llm.collective_rpc(make_room_between_stages)
            self._watch()
            self.generate([["warm up", list(range(3, 3 + WARM_UP)), 2]])
        self.reset()
        config = self._scheduler().kv_cache_config
        groups = [[type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size] for group in config.kv_cache_groups]
        boundary = math.lcm(*(tokens for _, tokens in groups))
        took = time.monotonic() - began
        return {"groups": groups, "boundary": boundary, "blocks": config.num_blocks, "seconds": took}

    def write_weights(self, model: str, folder: str) -> None:
        real_weights.write(model, Path(folder))

    def stop(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = self.wanted = None
            gc.collect()
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    # Requests

    def add(self, requests: Iterable[tuple[str, list[int], int]], params: dict[str, dict[str, Any]] | None = None) -> None:
        """Requests (name, tokens of the prompt, tokens to make), to be run by `steps` and `finish`.

        `params`: `kv_transfer_params` of some of them.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for name, prompt, count in requests:
            parameters = SamplingParams(
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                logprobs=5,
                max_tokens=count,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": params[name]} if params and name in params else None,
            )
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)

    def steps(self, count: int) -> list[str]:
        """Names of the requests that have ended in so many steps."""
        ended = []
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                (made,) = output.outputs
                local, external = self.matched.pop(output.request_id, (None, None))
                self.outcomes[output.request_id] = {
                    "tokens": list(made.token_ids),
                    "logprobs": [sorted((t, p.logprob) for t, p in at.items()) for at in made.logprobs],
                    "local": local,
                    "external": external,
                    "end": made.finish_reason,
                    "scheduled": self.scheduled.pop(output.request_id, []),
                }
                ended.append(output.request_id)
        return ended

    def abort(self, names: list[str]) -> None:
        self.llm.llm_engine.abort_request(names)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Runs everything that was added to its end: what came of each request since the last call."""
        while self.llm.llm_engine.has_unfinished_requests() or self.hands_over():
            self.steps(1)
        outcomes, self.outcomes = self.outcomes, {}
        return outcomes

    def generate(self, requests: Iterable[tuple[str, list[int], int]]) -> dict[str, dict[str, Any]]:
        """All of them at once."""
        self.add(requests)
        return self.finish()

    def one_by_one(
        self,
        requests: Iterable[tuple[str, list[int], int]],
        resets: bool = True,
        params: dict[str, dict[str, Any]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Each alone, and with an empty prefix cache."""
        outcomes = {}
        for request in requests:
            if resets:
                self.reset()
            self.add([request], params)
            outcomes.update(self.finish())
        return outcomes

    def parted(self, requests: Iterable[tuple[str, list[int], int]]) -> dict[str, dict[str, Any]]:
        """As `one_by_one`, with the last token of each prompt computed alone, as decode does it after a hand-off."""
        scheduler = self._scheduler()
        most = scheduler.max_num_scheduled_tokens
        outcomes = {}
        for request in requests:
            self.reset()
            self.add([request])
            try:
                for done in range(0, len(request[1]) - 1, most):
                    scheduler.max_num_scheduled_tokens = min(most, len(request[1]) - 1 - done)
                    self.steps(1)
            finally:
                scheduler.max_num_scheduled_tokens = most
            outcomes.update(self.finish())
        return outcomes

    def reset(self) -> None:
        """Empties vLLM's own prefix cache; steps until it may be."""
        while not self.llm.llm_engine.reset_prefix_cache():
            self.steps(1)

    def counts(self) -> dict[str, Any]:
        """What was counted since the last call."""
        counts: dict[str, Any] = {**self.totals, "preempted": self.preempted, "connector": self.connector_stats}
        self.totals, self.preempted, self.connector_stats = dict.fromkeys(self.totals, 0), {}, []
        return counts

    def waits(self) -> list[str]:
        """Names of the requests that wait for an asynchronous load."""
        from vllm.v1.request import RequestStatus

        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [_name(key) for key, request in self._scheduler().requests.items() if request.status == waiting]

    def free_blocks(self) -> int:
        return int(self._scheduler().kv_cache_manager.block_pool.get_num_free_blocks())

    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def _watch(self) -> None:
        """Reads what the scheduler says of each request and of all."""
        core, scheduler = self.llm.llm_engine.engine_core, self._scheduler()
        get_output, preempt, schedule = core.get_output, scheduler._preempt_request, scheduler.schedule

        def watched_output() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if (stats := output.prefill_stats) is not None:
                    self.matched[_name(output.request_id)] = [stats.num_local_cached_tokens, stats.num_external_cached_tokens]
            self._count(outputs.scheduler_stats)
            return outputs

        def watched_preempt(request: Any, *arguments: Any, **options: Any) -> Any:
            self.preempted.setdefault(_name(request.request_id), request.num_output_tokens)
            return preempt(request, *arguments, **options)

        def watched_schedule(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            for request_id, tokens in output.num_scheduled_tokens.items():
                self.scheduled.setdefault(_name(request_id), []).append(tokens)
            return output

        core.get_output, scheduler._preempt_request, scheduler.schedule = watched_output, watched_preempt, watched_schedule

    def _count(self, stats: Any) -> None:
        if stats is None:
            return
        if (hits := stats.connector_prefix_cache_stats) is not None:
            self.totals["queries"] += hits.queries + hits.preempted_queries
            self.totals["hits"] += hits.hits + hits.preempted_hits
        if stats.kv_connector_stats:
            self.connector_stats.append(stats.kv_connector_stats)


def make_room_between_stages(worker: Any) -> None:
    """The runner makes it when it warms up, which on a CPU it does not do where nothing is compiled."""
    from vllm.distributed.parallel_state import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _name(request_id: str) -> str:
    """As the test named it: vLLM puts something random behind."""
    return request_id.rpartition("-")[0]


def main() -> None:
    driver = Driver()
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            name, arguments, options = json.loads(line)
            try:
                answer = {"answer": getattr(driver, name)(*arguments, **options)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer, default=repr), file=answers, flush=True)
    driver.release()
    driver.stop()


if __name__ == "__main__":
    main()
