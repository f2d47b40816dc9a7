"""How a client finds its Mooncake pool, what it gives to it, and how careful it is: from a file or from explicit options."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvactors.core.config import seconds
from kvactors.errors import ConfigError
from kvactors.log import get_logger
from kvactors.stores.sizes import parse_size
from kvactors.textfiles import BadFileError, read_data

log = get_logger("kvactors.mooncake")

CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
"""The environment variable that names the configuration file, for every program that uses Mooncake."""

LEAST_SEGMENT_BYTES = 16 << 20
"""A client gives at least this much memory to the pool, or none."""


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """The usual keys of a Mooncake configuration file, and our own.

    Attributes:
        master_server_address: "host:port" of the master.
        metadata_server: "P2PHANDSHAKE", or the address of a metadata service.
        local_hostname: how other clients reach this one.
        protocol: "tcp", "rdma", "ascend", …
        device_name: RDMA devices; empty = none, or found by Mooncake.
        global_segment_size: memory that this client gives to the pool, bytes or text such as "1.5GB"; 0, or at least 16 MiB.
        local_buffer_size: Mooncake's own buffer in this client, bytes or text; at least 16 MiB.
        replica_num: copies of each object.
        preferred_segments: hosts ("host:port") whose segments are tried first.
        prefer_alloc_in_same_node: put all replicas of a call's objects on one node if that works.
        with_hard_pin: objects are never evicted.
        tenant_id: Mooncake's own isolation of tenants.
        lease_s: the master's `default_kv_lease_ttl`, seconds; must not be larger than it.
        discard_timeout_s: the master's `put_start_discard_timeout_sec`; must not be larger than it. Half of it is how old a put
            session may grow.
        suspect_after_s: a read that takes longer makes the segment it reads from a suspect.
        negative_s: for how long keys on a suspect segment, and keys whose read failed, count as not readable.
        close_deadline_s: how long `close` waits for calls under way.
        read_whole_objects: ranges that make up a whole object are read by Mooncake's call for objects where it lies in a
            segment of this process: at the speed of memory, where ranges always go through a socket.
        staging_bytes: memory for ranges that are put together before they are sent, bytes or text; 0 = off.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    device_name: str = ""
    global_segment_size: int | str = 0
    local_buffer_size: int | str = LEAST_SEGMENT_BYTES
    replica_num: int = 1
    preferred_segments: tuple[str, ...] = ()
    prefer_alloc_in_same_node: bool = False
    with_hard_pin: bool = False
    tenant_id: str = "default"
    lease_s: float = 10.0
    discard_timeout_s: float = 30.0
    suspect_after_s: float = 5.0
    negative_s: float = 30.0
    close_deadline_s: float = 30.0
    read_whole_objects: bool = True
    staging_bytes: int | str = 32 << 20

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("metadata_server", "local_hostname", "protocol"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"{name} = {value!r}: must be a non-empty text")
        for name in ("device_name", "tenant_id"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be a text")
        _host_and_port("master_server_address", self.master_server_address)
        put(self, "protocol", self.protocol.strip().lower())  # the client compares it with lower-case names
        for name in ("global_segment_size", "local_buffer_size", "staging_bytes"):
            put(self, name, parse_size(getattr(self, name), name))
        if 0 < self.segment_bytes < LEAST_SEGMENT_BYTES:
            raise ConfigError(f"global_segment_size = {self.segment_bytes}: must be 0 (give nothing) or at least 16 MiB")
        if self.buffer_bytes < LEAST_SEGMENT_BYTES:
            raise ConfigError(f"local_buffer_size = {self.buffer_bytes}: must be at least 16 MiB")
        if not isinstance(self.replica_num, int) or isinstance(self.replica_num, bool) or self.replica_num < 1:
            raise ConfigError(f"replica_num = {self.replica_num!r}: must be a whole number of at least 1")
        for name in ("prefer_alloc_in_same_node", "with_hard_pin", "read_whole_objects"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be true or false")
        segments: object = self.preferred_segments
        if not isinstance(segments, list | tuple) or not all(isinstance(s, str) and s for s in segments):
            raise ConfigError(f"preferred_segments = {segments!r}: must be a list of texts")
        put(self, "preferred_segments", tuple(segments))
        for field in dataclasses.fields(self):
            if field.name.endswith("_s") and not seconds(getattr(self, field.name)):
                raise ConfigError(f"{field.name} = {getattr(self, field.name)!r}: must be a number of seconds, more than 0")

    @property
    def segment_bytes(self) -> int:
        return int(self.global_segment_size)

    @property
    def buffer_bytes(self) -> int:
        return int(self.local_buffer_size)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MooncakeConfig:
        """The fields by name. ConfigError for a name that does not exist."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"mooncake: unknown option {name!r}; known are {', '.join(known)}")
        if "master_server_address" not in options:
            raise ConfigError(f"mooncake: master_server_address is missing; give it, or a file through {CONFIG_PATH}")
        return cls(**options)

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> MooncakeConfig:
        """A configuration file as Mooncake's own tools read it (JSON, or YAML); `options` go before what it says.

        Keys that are not ours are left to those they belong to, and named in the log.
        """
        try:
            found = read_data(path)
        except BadFileError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(
                f"{path}: must be a mapping of options, such as {json.dumps({'master_server_address': 'host:50051'})}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        foreign = sorted(str(name) for name in found if name not in known)
        if foreign:
            log.info("options of the file that are not ours", file=str(path), options=foreign)
        given = {name: value for name, value in found.items() if name in known and value is not None}
        try:
            return cls.from_options({**given, **options})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_environment(cls, **options: Any) -> MooncakeConfig:
        """The file that MOONCAKE_CONFIG_PATH names, if it is set; `options` go before what it says."""
        path = os.environ.get(CONFIG_PATH)
        return cls.from_file(path, **options) if path else cls.from_options(options)


def _host_and_port(name: str, value: object) -> None:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise ConfigError(f"{name} = {value!r}: must be host:port, such as 10.0.0.1:50051")
