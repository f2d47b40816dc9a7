"""`kv_connector_extra_config`: every key with what it takes, and what is refused is refused by name, all at once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvactors.errors import ConfigError
from kvactors.vllm.settings import BOTH, CONSUMER, PRODUCER, REFUSED, WITHOUT_EFFECT, ConnectorSettings

FLAGS = ("consumer_is_to_load", "consumer_is_to_put", "save_decode_cache", "discard_partial_chunks", "allow_unvalidated")
COUNTS = ("layerwise_prefetch_layers", "layerwise_max_transfer_blocks", "layerwise_max_transfer_bytes", "load_min_tokens")
SIZES = ("prefill_pp_size", "prefill_tp_size", "decode_tp_size")
SECONDS = ("load_deadline_s", "lookup_budget_s", "abort_timeout_s")


def test_what_nobody_sets_has_the_documented_defaults() -> None:
    assert ConnectorSettings.of(None) == ConnectorSettings.of({}) == ConnectorSettings()
    settings = ConnectorSettings()
    assert {f.name: getattr(settings, f.name) for f in fields(settings)} == {
        "backend": "mooncake",
        "use_layerwise": None,
        "load_async": None,
        "layerwise_prefetch_layers": 2,
        "layerwise_max_transfer_blocks": 64,
        "layerwise_max_transfer_bytes": 16777216,
        "consumer_is_to_load": True,
        "consumer_is_to_put": False,
        "save_decode_cache": False,
        "discard_partial_chunks": True,
        "namespace": "",
        "load_min_tokens": 0,
        "load_deadline_s": 30.0,
        "lookup_budget_s": 0.02,
        "abort_timeout_s": 480.0,
        "mooncake_protocol": "",
        "memory_capacity": 1 << 30,
        "allow_unvalidated": False,
        "prefill_pp_size": None,
        "prefill_tp_size": None,
        "decode_tp_size": None,
        "handoff": None,
        "handoff_host": "127.0.0.1",
        "handoff_deadline_s": None,
        "bootstrap_port": None,
        "bootstrap_server_address": "",
        "device_name": "",
        "live": "",
    }


GOOD: list[tuple[str, Any, Any]] = [
    ("backend", "memory", "memory"),
    ("backend", "Mooncake", "mooncake"),
    ("backend", "none", "none"),
    *[(key, value, value) for key in ("use_layerwise", "load_async", "handoff") for value in (None, True, False)],
    *[(key, value, value) for key in FLAGS for value in (True, False)],
    *[(key, value, value) for key in COUNTS for value in (0, 1, 1 << 40)],
    *[(key, "64", 64) for key in (*COUNTS, *SIZES)],  # AscendStoreConnector takes numbers as text
    *[(key, value, value) for key in SIZES for value in (None, 1, 16)],
    *[(key, value, float(value)) for key in SECONDS for value in (1, 0.005)],
    ("namespace", "", ""),
    ("namespace", "tenant-1/epoch.2", "tenant-1/epoch.2"),
    ("mooncake_protocol", "rdma", "rdma"),
    ("memory_capacity", 4096, 4096),
    ("memory_capacity", "16 MB", 16777216),
    ("memory_capacity", "1.5GB", 1610612736),
    *[("handoff_host", value, value) for value in ("10.0.0.2", "::1", "node-7")],
    *[("handoff_deadline_s", given, taken) for given, taken in ((None, None), (30, 30.0))],
    *[("bootstrap_port", given, taken) for given, taken in ((None, None), (8998, 8998), ("65535", 65535))],
    *[("bootstrap_server_address", value, value) for value in ("", "10.0.0.1:8998", "[::1]:1")],
    ("device_name", "mlx5_0", "mlx5_0"),
    *[("live", value, value) for value in ("", "/run/kvactors/live.sock", "127.0.0.1:9400")],
]


@pytest.mark.parametrize(("key", "given", "taken"), GOOD)
def test_a_good_value_is_taken(key: str, given: Any, taken: Any) -> None:
    settings = ConnectorSettings.of({key: given})
    assert getattr(settings, key) == taken
    assert type(getattr(settings, key)) is type(taken)


BAD: list[tuple[str, Any]] = [
    *[("backend", value) for value in ("yuanrong", "", 1, None)],
    *[(key, value) for key in ("use_layerwise", "load_async", "handoff") for value in ("true", 1, 0)],
    *[(key, value) for key in FLAGS for value in ("false", 1, 0, None)],
    *[(key, value) for key in COUNTS for value in (-1, 1.5, "-1", "1.5", "many", "", "²", True, None, "9" * 5000)],
    *[(key, value) for key in SIZES for value in (0, -1, "0", 1.5, True)],
    *[(key, value) for key in SECONDS for value in (0, -1, float("nan"), float("inf"), "30", True, None)],
    *[("namespace", value) for value in (None, 5)],
    *[("mooncake_protocol", value) for value in (None, True)],
    *[("memory_capacity", value) for value in ("-5", -5, "50%", "10XB", None, True, 1.5)],
    *[("handoff_host", value) for value in ("", None, "a b", "http://node")],
    *[("handoff_deadline_s", value) for value in (0, -1, "30")],
    *[("bootstrap_port", value) for value in (0, -1, 65536, "http", True)],
    *[("bootstrap_server_address", value) for value in ("node", "node:", ":8998", "node:0", "node:65536", None)],
    *[("device_name", value) for value in (None, 5)],
    *[("live", value) for value in (None, 5, " ", "0.0.0.0:9400", "127.0.0.1:http", "/" + "x" * 200)],
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=lambda v: f"{v!r:.20}")
def test_a_bad_value_is_refused_by_the_name_of_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config: {key} = .*: \S"):
        ConnectorSettings.of({key: value})


def test_every_key_is_tried_above() -> None:
    every = {f.name for f in fields(ConnectorSettings)}
    assert {key for key, *_ in GOOD} == {key for key, _ in BAD} == every


@pytest.mark.parametrize("key", SIZES)
def test_a_refusal_says_what_would_do(key: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole number >= 1"):
        ConnectorSettings.of({key: -1})


@pytest.mark.parametrize("value", ["two words", "a@b", "ä", "::"])
def test_a_namespace_that_no_key_can_have_is_refused_at_once(value: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        ConnectorSettings.of({"namespace": value})


def test_a_store_that_can_hold_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_capacity"):
        ConnectorSettings.of({"memory_capacity": 0})


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("use_layer_wise", "use_layerwise"),
        ("load_min_token", "load_min_tokens"),
        ("lookup_rpc_prot", "lookup_rpc_port"),
        ("consumer_is_to_save", "consumer_is_to_load"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{key}' \(did you mean '{meant}'\?\)"):
        ConnectorSettings.of({key: 1})


def test_an_unknown_key_like_none_is_named_with_all_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'xyzzy'; known are backend, use_layerwise, .*decode_tp_size"):
        ConnectorSettings.of({"xyzzy": 1})


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
def test_keys_of_ascend_store_that_have_nothing_to_do_here_are_taken_and_say_why(key: str) -> None:
    assert ConnectorSettings.of({key: "whatever"}) == ConnectorSettings()
    assert WITHOUT_EFFECT[key]


@pytest.mark.parametrize("key", ["lookup_rpc_port", "mooncake_rpc_port", "h2d_stagger_us", "prefill_pp_layer_partition"])
def test_the_documented_keys_of_ascend_store_are_among_them(key: str) -> None:
    assert key in WITHOUT_EFFECT


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_keys_that_ask_for_shared_buffers_are_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: layers keep their own caches"):
        ConnectorSettings.of({key: 2})


def test_everything_that_is_wrong_is_said_at_once() -> None:
    wrong = {"backend": "disk", "use_layrwise": True, "load_deadline_s": 0, "layerwise_num_shared_buffers": 2, "namespace": 5}
    with pytest.raises(ConfigError) as error:
        ConnectorSettings.of({**wrong, "load_min_tokens": 128})
    assert all(key in str(error.value) for key in wrong)
    assert "load_min_tokens" not in str(error.value)


def test_no_store_and_no_handoff_is_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing would be left to do"):
        ConnectorSettings.of({"backend": "none", "handoff": False})


# -- what follows from them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "given", "loads", "saves"),
    [
        (BOTH, {}, True, True),
        (BOTH, {"consumer_is_to_load": False, "consumer_is_to_put": False}, True, True),
        (PRODUCER, {}, True, True),
        (PRODUCER, {"consumer_is_to_load": False}, True, True),
        (CONSUMER, {}, True, False),
        (CONSUMER, {"consumer_is_to_put": True}, True, True),
        (CONSUMER, {"consumer_is_to_load": False}, False, False),
    ],
)
def test_a_consumer_loads_and_saves_as_it_is_told(role: str, given: dict[str, bool], loads: bool, saves: bool) -> None:
    settings = ConnectorSettings.of(given)
    assert (settings.loads(role), settings.saves(role)) == (loads, saves)


def test_the_layerwise_limits_are_the_engines() -> None:
    engine = ConnectorSettings.of(
        {"layerwise_prefetch_layers": 0, "layerwise_max_transfer_blocks": 7, "layerwise_max_transfer_bytes": 0}
    ).engine()
    assert (engine.prefetch_layers, engine.max_transfer_blocks, engine.max_transfer_bytes) == (0, 7, 0)


@pytest.mark.parametrize(
    ("role", "given", "tries", "must"),
    [
        (PRODUCER, {}, True, False),
        (CONSUMER, {}, True, False),
        (BOTH, {}, False, False),
        (BOTH, {"handoff": True}, True, True),
        (PRODUCER, {"handoff": True}, True, True),
        (PRODUCER, {"handoff": False}, False, False),
        (BOTH, {"backend": "none"}, True, True),
        (CONSUMER, {"backend": "none"}, True, True),
    ],
)
def test_who_hands_over(role: str, given: dict[str, Any], tries: bool, must: bool) -> None:
    settings = ConnectorSettings.of(given)
    assert (settings.hands_over(role), settings.must_hand_over) == (tries, must)
