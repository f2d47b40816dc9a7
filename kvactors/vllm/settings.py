"""The connector's configuration: every key of `kv_connector_extra_config`, its default, and what is refused.

Keys that vLLM-Ascend's AscendStoreConnector documents are accepted with their meaning there; those that have nothing to do here
are accepted without effect, and docs/vllm.md says so. Any other key is refused by name: a misspelt option must not be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from kvactors.core.config import EngineConfig, seconds
from kvactors.core.layout import namespace_pattern
from kvactors.errors import ConfigError
from kvactors.live.address import Address
from kvactors.stores.sizes import parse_size

PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"

NO_STORE = "none"
"""The backend that is none."""

WHERE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What a user may set; docs/vllm.md has the same table.

    Attributes:
        backend: "mooncake" (a pool that processes share), "memory" (a store in this process, for one worker), or "none" (no
            store, nothing but the prefill/decode hand-off).
        use_layerwise: load layer by layer inside the forward pass; None = where one attention group allows it.
        load_async: True = never load inside the forward pass.
        layerwise_prefetch_layers: how many layers with loads are read ahead of the compute; 0 = on demand.
        layerwise_max_transfer_blocks: most blocks in one store call; 0 = no limit.
        layerwise_max_transfer_bytes: most bytes in one store call; 0 = no limit.
        consumer_is_to_load, consumer_is_to_put: whether an instance with role kv_consumer loads, and saves.
        save_decode_cache: save the blocks that decoding fills too, not only those of prompts.
        discard_partial_chunks: False asks for partly filled blocks; they are never a hit, so none are saved.
        namespace: prefix of every key: other weights, other tenants, an epoch after a weight update.
        load_min_tokens: load only what saves at least so many tokens of prefill.
        load_deadline_s: a load that takes longer is given up; its request recomputes (or fails, by vLLM's policy).
        lookup_budget_s: how long all lookups of one scheduling step may hold it up, seconds.
        abort_timeout_s: how long prefill keeps the blocks of a hand-off that nobody fetches, seconds.
        mooncake_protocol: goes before the `protocol` of Mooncake's configuration file; for the hand-off unset is "tcp" on a CPU
            and "rdma" on other devices.
        memory_capacity: size of the "memory" store, bytes or text such as "4GB".
        allow_unvalidated: go on with graph modes and attention backends that nobody has validated.
        prefill_pp_size: pipeline stages of the instances that save; must be this instance's own.
        prefill_tp_size, decode_tp_size: TP ranks of the instances that share the pool; must be this instance's own.
        handoff: whether requests are handed from prefill to decode; None = with roles kv_producer and kv_consumer, if it can be
            started.
        handoff_host: address of this machine for peers; one that other machines reach has to be given.
        handoff_deadline_s: how long decode waits for a hand-off before its request recomputes (or fails, by vLLM's policy),
            seconds; None = `abort_timeout_s`.
        bootstrap_port: of the registry in which decode finds prefill workers; None = VLLM_MOONCAKE_BOOTSTRAP_PORT, else 8998.
        bootstrap_server_address: "host:port" of a registry that is there already; then none is started.
        device_name: network device for RDMA; "" = Mooncake chooses.
        live: where live views of the ranks and of the scheduler listen (docs/live.md); "" = as KVACTORS_LIVE says.
    """

    backend: Literal["mooncake", "memory", "none"] = "mooncake"
    use_layerwise: bool | None = None
    load_async: bool | None = None
    layerwise_prefetch_layers: int = 2
    layerwise_max_transfer_blocks: int = 64
    layerwise_max_transfer_bytes: int = 16 << 20
    consumer_is_to_load: bool = True
    consumer_is_to_put: bool = False
    save_decode_cache: bool = False
    discard_partial_chunks: bool = True
    namespace: str = ""
    load_min_tokens: int = 0
    load_deadline_s: float = 30.0
    lookup_budget_s: float = 0.02
    abort_timeout_s: float = 480.0
    mooncake_protocol: str = ""
    memory_capacity: int | str = 1 << 30
    allow_unvalidated: bool = False
    prefill_pp_size: int | None = None
    prefill_tp_size: int | None = None
    decode_tp_size: int | None = None
    handoff: bool | None = None
    handoff_host: str = "127.0.0.1"
    handoff_deadline_s: float | None = None
    bootstrap_port: int | None = None
    bootstrap_server_address: str = ""
    device_name: str = ""
    live: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> ConnectorSettings:
        """The settings that `kv_connector_extra_config` asks for.

        Raises:
            ConfigError: names every unknown key and every value that makes no sense.
        """
        given = dict(extra or {})
        problems = [f"{key}: {why}" for key, why in REFUSED.items() if key in given]
        problems += [_unknown(key) for key in given if not any(key in known for known in (_CHECKS, WITHOUT_EFFECT, REFUSED))]
        values: dict[str, Any] = {}
        for key, check in _CHECKS.items():
            if key in given:
                try:
                    values[key] = check(given[key])
                except (ValueError, TypeError) as error:
                    problems.append(f"{key} = {given[key]!r}: {error}")
        if values.get("backend") == NO_STORE and values.get("handoff") is False:
            problems.append("backend 'none' with handoff = false: nothing would be left to do; start without the connector")
        if problems:
            raise ConfigError(f"{WHERE}: {'; '.join(problems)}")
        return cls(**values)

    def engine(self) -> EngineConfig:
        """The engine's limits. A store call may take as long as Mooncake's own time-outs do before its worker is given up."""
        return EngineConfig(
            prefetch_layers=self.layerwise_prefetch_layers,
            max_transfer_blocks=self.layerwise_max_transfer_blocks,
            max_transfer_bytes=self.layerwise_max_transfer_bytes,
        )

    def loads(self, role: str) -> bool:
        """Whether an instance of this role asks the store for anything."""
        return role != CONSUMER or self.consumer_is_to_load

    def saves(self, role: str) -> bool:
        """Whether an instance of this role puts anything into the store."""
        return role != CONSUMER or self.consumer_is_to_put

    @property
    def stores(self) -> bool:
        """Whether there is a store."""
        return self.backend != NO_STORE

    @property
    def must_hand_over(self) -> bool:
        """Whether a hand-off that cannot be started is an error, rather than a warning."""
        return bool(self.handoff) or not self.stores

    def hands_over(self, role: str) -> bool:
        """Whether an instance of this role tries to hand requests over, or to take them."""
        return self.must_hand_over or (self.handoff is None and role in (PRODUCER, CONSUMER))


WITHOUT_EFFECT: Mapping[str, str] = {
    "lookup_rpc_port": "the scheduler asks the store itself, there is no lookup server",
    "mooncake_rpc_port": "the scheduler asks the store itself, there is no lookup server",
    "h2d_stagger_us": "loads are ordered by the engine's queue",
    "prefill_pp_layer_partition": "stages publish their layers when they start",
    "ascend_local_comm_res_path": "vLLM-Ascend's worker reads it itself",
    "prefill": "vLLM-Ascend reads it itself",
    "decode": "vLLM-Ascend reads it itself",
}
"""Keys that have nothing to do here, and why."""

REFUSED: Mapping[str, str] = {
    "layerwise_num_shared_buffers": "layers keep their own caches here; blocks of several groups cannot share a buffer",
    "layerwise_independent_layers": "layers keep their own caches here; blocks of several groups cannot share a buffer",
}
"""Keys of AscendStoreConnector that ask for what is not here."""


def _unknown(key: str) -> str:
    near = get_close_matches(key, [*_CHECKS, *WITHOUT_EFFECT], 1)
    return f"unknown key {key!r}" + (f" (did you mean {near[0]!r}?)" if near else f"; known are {', '.join(_CHECKS)}")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _flag_or_none(value: Any) -> bool | None:
    return None if value is None else _flag(value)


def _count(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():  # AscendStoreConnector takes numbers as text
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a whole number >= 0")
    return value


def _positive(value: Any) -> int | None:
    if value is None:
        return None
    try:
        count = _count(value)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError("must be a whole number >= 1")
    return count


def _seconds(value: Any) -> float:
    if not seconds(value):
        raise ValueError("must be a number of seconds, more than 0")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _namespace(value: Any) -> str:
    if text := _text(value):
        namespace_pattern(text)  # it must do for a key
    return text


def _size(value: Any) -> int:
    if not (size := parse_size(value, "memory_capacity")):
        raise ValueError("must be more than 0")
    return size


def _backend(value: Any) -> str:
    name = _text(value).lower()
    if name not in ("mooncake", "memory", NO_STORE):
        raise ValueError("must be 'mooncake', 'memory' or 'none'")
    return name


def _seconds_or_none(value: Any) -> float | None:
    return None if value is None else _seconds(value)


def _host(value: Any) -> str:
    text = _text(value)
    if not text or any(c.isspace() or c == "/" for c in text):
        raise ValueError("must be the name or address of a host, without a port")
    return text


def _port(value: Any) -> int | None:
    port = _positive(value)
    if port is not None and port > 65535:
        raise ValueError("must be a port, from 1 to 65535")
    return port


def _address(value: Any) -> str:
    text = _text(value)
    if text:
        split_address(text)
    return text


def _live(value: Any) -> str:
    if text := _text(value):
        Address.of(text)
    return text


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is not made like that.
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError("must be host:port, such as 10.0.0.1:8998")
    return _host(bare), int(port)


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "backend": _backend,
    "use_layerwise": _flag_or_none,
    "load_async": _flag_or_none,
    "layerwise_prefetch_layers": _count,
    "layerwise_max_transfer_blocks": _count,
    "layerwise_max_transfer_bytes": _count,
    "consumer_is_to_load": _flag,
    "consumer_is_to_put": _flag,
    "save_decode_cache": _flag,
    "discard_partial_chunks": _flag,
    "namespace": _namespace,
    "load_min_tokens": _count,
    "load_deadline_s": _seconds,
    "lookup_budget_s": _seconds,
    "abort_timeout_s": _seconds,
    "mooncake_protocol": _text,
    "memory_capacity": _size,
    "allow_unvalidated": _flag,
    "prefill_pp_size": _positive,
    "prefill_tp_size": _positive,
    "decode_tp_size": _positive,
    "handoff": _flag_or_none,
    "handoff_host": _host,
    "handoff_deadline_s": _seconds_or_none,
    "bootstrap_port": _port,
    "bootstrap_server_address": _address,
    "device_name": _text,
    "live": _live,
}

assert set(_CHECKS) == {f.name for f in fields(ConnectorSettings)}
