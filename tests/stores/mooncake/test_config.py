"""How a client is configured: the usual file, options that go before it, and one line for everything that is wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvactors.errors import ConfigError
from kvactors.stores import MooncakeConfig, MooncakeStore, open_store
from kvactors.stores.mooncake.config import CONFIG_PATH
from tests.stores.mooncake.fake_native import Bench

MASTER = "10.0.0.1:50051"


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MOONCAKE_CONFIG_PATH's file, to be written by the test."""
    path = tmp_path / "mooncake.json"
    monkeypatch.setenv(CONFIG_PATH, str(path))
    return path


def write(path: Path, **options: Any) -> None:
    path.write_text(json.dumps({"master_server_address": MASTER, **options}))


def test_reads_the_usual_file_with_sizes_as_numbers_and_as_text(config_file: Path) -> None:
    write(
        config_file,
        local_hostname="10.0.0.7",
        metadata_server="http://10.0.0.1:8080/metadata",
        protocol="RDMA",
        device_name="mlx5_0,mlx5_1",
        global_segment_size="1.5GB",
        local_buffer_size=16777216,
    )
    config = MooncakeConfig.from_environment()
    assert (config.master_server_address, config.local_hostname) == (MASTER, "10.0.0.7")
    assert (config.metadata_server, config.protocol) == ("http://10.0.0.1:8080/metadata", "rdma")
    assert config.device_name == "mlx5_0,mlx5_1"
    assert (config.segment_bytes, config.buffer_bytes) == (3 << 29, 16 << 20)


def test_options_go_before_the_file(config_file: Path) -> None:
    write(config_file, global_segment_size="1GB", lease_s=5)
    config = MooncakeConfig.from_environment(global_segment_size=0, master_server_address="other:1")
    assert (config.segment_bytes, config.lease_s, config.master_server_address) == (0, 5, "other:1")


def test_what_the_file_leaves_empty_is_as_if_it_were_not_there(config_file: Path) -> None:
    write(config_file, device_name=None)
    assert MooncakeConfig.from_environment().device_name == ""


def test_keys_of_the_file_that_are_not_ours_are_left_alone(config_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(config_file, prefill_url="10.0.0.2:13003", store_url="x")
    with caplog.at_level(logging.INFO, "kvactors"):
        assert MooncakeConfig.from_environment().master_server_address == MASTER
    assert "['prefill_url', 'store_url']" in caplog.text


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option 'segment_size'; known are master_server_address, "):
        MooncakeConfig.from_options({"master_server_address": MASTER, "segment_size": 1})
    with pytest.raises(ConfigError, match="unknown option 'segment_size'"):
        open_store("mooncake", master_server_address=MASTER, segment_size=1)


@pytest.mark.parametrize("name", ["global_segment_size", "local_buffer_size", "staging_bytes"])
@pytest.mark.parametrize("value", ["-5", "50%", "10XB", -1, 1.5, True, "", [], {}])
def test_what_is_no_size_is_refused_by_the_name_of_its_key_and_file(config_file: Path, name: str, value: object) -> None:
    write(config_file, **{name: value})
    with pytest.raises(ConfigError) as refusal:
        MooncakeConfig.from_environment()
    assert str(refusal.value).startswith(f"{config_file}: {name} = {value!r}: not a size")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"global_segment_size": "15MB"}, "global_segment_size = 15728640: must be 0 .* or at least 16 MiB"),
        ({"local_buffer_size": 0}, "local_buffer_size = 0: must be at least 16 MiB"),
        ({"master_server_address": "10.0.0.1"}, "master_server_address = '10.0.0.1': must be host:port"),
        ({"master_server_address": "10.0.0.1:0"}, "must be host:port"),
        ({"master_server_address": "10.0.0.1:65536"}, "must be host:port"),
        ({"master_server_address": "10.0.0.1:٣"}, "must be host:port"),
        ({"master_server_address": "10.0.0.1:" + "9" * 5000}, "must be host:port"),
        ({"master_server_address": 50051}, "master_server_address = 50051: must be host:port"),
        ({"protocol": " "}, "protocol = ' ': must be a non-empty text"),
        ({"local_hostname": 7}, "local_hostname = 7: must be a non-empty text"),
        ({"device_name": ["mlx5_0"]}, "device_name = .*: must be a text"),
        ({"tenant_id": 1}, "tenant_id = 1: must be a text"),
        ({"replica_num": 0}, "replica_num = 0: must be a whole number of at least 1"),
        ({"replica_num": True}, "replica_num = True"),
        ({"replica_num": "2"}, "replica_num = '2'"),
        ({"preferred_segments": "10.0.0.1:1"}, "preferred_segments = '10.0.0.1:1': must be a list of texts"),
        ({"preferred_segments": [""]}, "must be a list of texts"),
        ({"with_hard_pin": 1}, "with_hard_pin = 1: must be true or false"),
        ({"prefer_alloc_in_same_node": "no"}, "prefer_alloc_in_same_node = 'no': must be true or false"),
        ({"lease_s": 0}, "lease_s = 0: must be a number of seconds, more than 0"),
        ({"discard_timeout_s": "30"}, "discard_timeout_s = '30'"),
        ({"negative_s": float("nan")}, "negative_s = nan"),
        ({"suspect_after_s": True}, "suspect_after_s = True"),
        ({"close_deadline_s": float("inf")}, "close_deadline_s = inf"),
    ],
)
def test_each_wrong_value_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        MooncakeConfig.from_options({"master_server_address": MASTER, **options})


@pytest.mark.parametrize("text", ["[]", "7", "null", "{", "\x00", ""])
def test_a_file_that_is_no_mapping_is_refused_by_name(config_file: Path, text: str) -> None:
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=str(config_file)):
        MooncakeConfig.from_environment()


def test_a_file_that_is_not_there_is_refused_by_name(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=str(config_file)):
        MooncakeConfig.from_environment()


def test_a_master_must_be_named_somewhere(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file.write_text("{}")
    with pytest.raises(ConfigError, match="master_server_address is missing"):
        MooncakeStore()
    monkeypatch.delenv(CONFIG_PATH)
    with pytest.raises(ConfigError, match=f"master_server_address is missing; give it, or a file through {CONFIG_PATH}"):
        MooncakeStore()


def test_a_config_and_options_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="lease_s are part of the config"):
        MooncakeStore(MooncakeConfig(MASTER), lease_s=1.0)


def test_a_put_session_may_grow_to_half_of_the_discard_timeout() -> None:
    store = Bench(discard_timeout_s=7.0, lease_s=3.0).store
    assert (store.put_safe_age_s, store.lease_s) == (3.5, 3.0)
