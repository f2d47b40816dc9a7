"""Starts a worker rank's end of the prefill/decode hand-off, as the settings say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvactors.errors import ConfigError, KVActorsError
from kvactors.log import get_logger
from kvactors.vllm.handoff_geometry import handoff_geometry, transfer_memory
from kvactors.vllm.handoff_worker import HandoffSide
from kvactors.vllm.heads import only_kv_heads
from kvactors.vllm.layouts import Caches, ModelFacts, WorkerMemory
from kvactors.vllm.settings import BOTH, CONSUMER, PRODUCER, ConnectorSettings, split_address

if TYPE_CHECKING:
    from kvactors.disagg.worker import HandoffConfig

log = get_logger("kvactors.vllm.handoff")

PORT_VARIABLE = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
PORT = 8998


def sends(role: str) -> bool:
    """Whether an instance of this role hands requests over."""
    return role in (PRODUCER, BOTH)


def receives(role: str) -> bool:
    """Whether an instance of this role takes requests over."""
    return role in (CONSUMER, BOTH)


def start_handoff(
    vllm_config: Any,
    config: Any,
    caches: Caches,
    facts: ModelFacts,
    settings: ConnectorSettings,
    stored: WorkerMemory | None = None,
) -> HandoffSide | None:
    """The rank's end, running; None if it cannot be started and need not be.

    Args:
        config: vLLM's KVCacheConfig.
        stored: the layout of the caches that are stored, if any are.

    Raises:
        ConfigError: it cannot be started, and the settings ask for it; says why.
    """
    try:
        memory = transfer_memory(config, caches, facts, stored)
        return _start(vllm_config, config, caches, facts, memory, settings)
    except (KVActorsError, ImportError, OSError) as error:
        if settings.must_hand_over:
            raise ConfigError(f"the prefill/decode hand-off cannot be started: {error}") from error
        log.warning(
            "there is no prefill/decode hand-off, requests go through the store alone; set handoff to false to be rid of this "
            "warning, or to true to make it an error",
            problem=str(error),
        )
        return None


def _start(
    vllm_config: Any, config: Any, caches: Caches, facts: ModelFacts, memory: WorkerMemory, settings: ConnectorSettings
) -> HandoffSide:
    from kvactors.disagg.transports.mooncake import MooncakeTransport  # what these need may not be installed
    from kvactors.disagg.worker import HandoffWorker

    transfer = vllm_config.kv_transfer_config
    cpu = str(vllm_config.device_config.device_type) == "cpu"
    drafts = getattr(vllm_config, "speculative_config", None) is not None  # a draft's heads stand in a configuration of its own
    heads = None if drafts else only_kv_heads(vllm_config.model_config.hf_text_config)
    geometry = handoff_geometry(config, caches, memory, facts.tp_rank, heads)
    protocol = settings.mooncake_protocol or ("tcp" if cpu else "rdma")
    transport = MooncakeTransport(settings.handoff_host, protocol, settings.device_name)
    try:
        for address, nbytes in memory.regions:
            transport.register(address, nbytes)
        worker = HandoffWorker(
            handoff_config(vllm_config.parallel_config, facts, settings, serves=sends(transfer.kv_role)),
            geometry,
            transport,
            engine_id=str(transfer.engine_id),
            sends=sends(transfer.kv_role),
            receives=receives(transfer.kv_role),
        )
    except BaseException:
        transport.close()
        raise
    log.info("hand-off started", role=transfer.kv_role, bootstrap=worker.bootstrap, memory=transport.memory, protocol=protocol)
    return HandoffSide(worker, geometry, memory.layout, early=cpu)


def handoff_config(parallel: Any, facts: ModelFacts, settings: ConnectorSettings, *, serves: bool) -> HandoffConfig:
    """Where this rank listens, and where prefill workers register.

    Args:
        parallel: vLLM's parallel_config.
        serves: the instance hands requests over, so it needs a registry: of its own, on its first rank, if none is given.

    Raises:
        ConfigError: the variable that says the port is no port.
    """
    from kvactors.disagg.listening import is_loopback
    from kvactors.disagg.worker import HandoffConfig

    local = bool(getattr(parallel, "local_engines_only", False))
    index = int(getattr(parallel, "data_parallel_index", 0))
    dp_rank = int(getattr(parallel, "data_parallel_rank_local", 0) or 0) if local else index
    host, public = settings.handoff_host, not is_loopback(settings.handoff_host)
    if settings.bootstrap_server_address:
        bootstrap = split_address(settings.bootstrap_server_address)
    elif public and dp_rank and not local:
        bootstrap = (str(parallel.data_parallel_master_ip), _port(settings))
    else:
        bootstrap = (host, _port(settings))
    first = facts.tp_rank == 0 and facts.pp_rank == 0 and dp_rank == 0
    deadline_s = settings.handoff_deadline_s
    return HandoffConfig(
        host=host,
        public=public,
        bootstrap=bootstrap,
        serve_bootstrap=serves and first and not settings.bootstrap_server_address,
        dp_rank=dp_rank,
        abort_timeout_s=settings.abort_timeout_s,
        deadline_s=settings.abort_timeout_s if deadline_s is None else deadline_s,
    )


def _port(settings: ConnectorSettings) -> int:
    if settings.bootstrap_port is not None:
        return settings.bootstrap_port
    text = os.environ.get(PORT_VARIABLE, str(PORT))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ConfigError(f"{PORT_VARIABLE} = {text!r}: must be a port, from 1 to 65535; or set bootstrap_port")
    return int(text)
