"""What --disaggregation-mode demands, changes and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.config.check import check_options
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"disable_radix_cache": True}, "cannot be combined with --disable-radix-cache"),
        ({"tp_size": 2, "nnodes": 2}, "cannot be combined with --nnodes 2"),
        ({"engine_standby": True}, "cannot be combined with --engine-standby"),
        ({"record": "x"}, "cannot be combined with --record and --record-content off"),
        ({"is_embedding": True}, "cannot be combined with --is-embedding"),
        ({"enable_return_hidden_states": True}, "hidden states are not handed over"),
    ],
)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_what_cannot_be_combined(values: dict[str, Any], words: str, mode: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(Options.of(disaggregation_mode=mode, **values))


def test_offload_is_refused_in_sglangs_words() -> None:
    flag = "disaggregation_decode_enable_offload_kvcache"
    with pytest.raises(ConfigError, match="offload-kvcache is only supported for decode side"):
        check_options(Options.of(**{flag: True}))
    with pytest.raises(ConfigError, match="when hicache-storage-backend is provided"):
        check_options(Options.of(disaggregation_mode="decode", **{flag: True}))
    tiers = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    check_options(Options.of(disaggregation_mode="decode", **{flag: True}, **tiers))
    with pytest.raises(ConfigError, match="offload-kvcache is only supported for decode side"):
        check_options(Options.of(disaggregation_mode="prefill", **{flag: True}, **tiers))


def test_prefill_servers_are_urls_and_for_decode_servers() -> None:
    name = "disaggregation_prefill_servers"
    check_options(Options.of(disaggregation_mode="decode", **{name: ("http://a:1", "http://b:2/")}))
    with pytest.raises(ConfigError, match="give --disaggregation-mode decode, or leave"):
        check_options(Options.of(**{name: ("http://a:1",)}))
    with pytest.raises(ConfigError, match="this is a prefill server"):
        check_options(Options.of(disaggregation_mode="prefill", **{name: ("http://a:1",)}))
    for url in ("a:1", "https://a:1", "http://", "http://a:1/v1", "http://a:x", "http://a:1?b"):
        with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
            check_options(Options.of(disaggregation_mode="decode", **{name: (url,)}))


def test_a_room_determines_the_engine_of_a_prefill_server() -> None:
    with pytest.raises(ConfigError, match="Use follow_bootstrap_room"):
        check_options(Options.of(disaggregation_mode="prefill", load_balance_method="round_robin"))
    for method in ("auto", "follow_bootstrap_room"):
        check_options(Options.of(disaggregation_mode="prefill", load_balance_method=method))


@pytest.mark.parametrize("backend", ["nixl", "mori", "ascend"])
def test_libraries_for_rdma_are_refused_with_what_is_missing(backend: str) -> None:
    with pytest.raises(ConfigError, match="for which there is no adapter yet"):
        check_options(Options.of(disaggregation_transfer_backend=backend))
