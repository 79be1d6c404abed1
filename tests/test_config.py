from __future__ import annotations

import pytest

from sglang_pat.config import ConfigError, PatConfig

pytestmark = pytest.mark.once


def test_defaults() -> None:
    assert (
        PatConfig.from_environment({"PATH": "/bin", "SGLANG_PAT_CPU_PLATFORM": "1", "SGLANG_PAT_API_KEY": "x"})
        == PatConfig()
    )


def test_values() -> None:
    config = PatConfig.from_environment(
        {
            "SGLANG_PAT_POLICY": "query",
            "SGLANG_PAT_REUSE": "0",
            "SGLANG_PAT_AHEAD": "0",
            "SGLANG_PAT_DEFER": "0",
            "SGLANG_PAT_VERIFY": "1",
        }
    )
    assert config == PatConfig(policy="query", reuse=False, ahead=False, defer=False, verify=True)


def test_layers_of_4_bits_are_named_beside_2_bits() -> None:
    for value, layers in (("17,3,17", (3, 17)), ("0", (0,)), ("", ())):
        found = PatConfig.from_environment({"SGLANG_PAT_INT4_LAYERS": value, "SGLANG_PAT_KV": "int2"})
        assert found.int4_layers == layers
    with pytest.raises(ConfigError, match="beside SGLANG_PAT_KV=int2"):
        PatConfig.from_environment({"SGLANG_PAT_INT4_LAYERS": "1", "SGLANG_PAT_KV": "int4"})


def test_a_trace_may_be_any_file() -> None:
    config = PatConfig.from_environment({"SGLANG_PAT_TRACE": "/tmp/a b", "SGLANG_PAT_TRACE_MB": "7"})
    assert (config.trace, config.trace_mb) == ("/tmp/a b", 7)


@pytest.mark.parametrize(("user", "number"), [("root", "0"), ("1000", "1000"), ("4294967294", "4294967294"), ("", "")])
def test_the_owner_of_a_cache_has_a_name_or_number(user: str, number: str) -> None:
    assert PatConfig.from_environment({"SGLANG_PAT_CACHE_OWNER": user}).cache_owner == number


@pytest.mark.parametrize("service", ["", "_ROUTER", "_TRACE"])
def test_what_kubernetes_puts_into_a_pod_is_no_setting(service: str) -> None:
    """A Service named `sglang-pat`, or `sglang-pat-router`, in the pod's namespace."""
    name = f"SGLANG_PAT{service}"
    environment = {
        f"{name}_SERVICE_HOST": "10.0.0.11",
        f"{name}_SERVICE_PORT": "30000",
        f"{name}_SERVICE_PORT_HTTP_METRICS": "30000",
        f"{name}_PORT": "tcp://10.0.0.11:30000",
        f"{name}_PORT_30000_TCP": "tcp://10.0.0.11:30000",
        f"{name}_PORT_30000_TCP_PROTO": "tcp",
        f"{name}_PORT_30000_TCP_PORT": "30000",
        f"{name}_PORT_30000_TCP_ADDR": "10.0.0.11",
    }
    assert PatConfig.from_environment(environment) == PatConfig()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SGLANG_PAT_POLICY", "fast", "SGLANG_PAT_POLICY='fast' must be one of query, naive, pat, optimal"),
        *(
            ("SGLANG_PAT_INT4_LAYERS", value, "must be numbers of layers with commas, such as 15,17,20")
            for value in ("1,", ",1", "1, 2", "-1", "1000", "1-3", "one", "٣", "1\n", " ")
        ),
        (
            "SGLANG_PAT_INT4_LAYERS",
            "1",
            "SGLANG_PAT_INT4_LAYERS names layers beside SGLANG_PAT_KV=int2: set that, or unset it",
        ),
        ("SGLANG_PAT_KV", "int8", "SGLANG_PAT_KV='int8' must be one of int4, int2"),
        ("SGLANG_PAT_REUSE", "yes", "SGLANG_PAT_REUSE='yes' must be one of 0, 1"),
        ("SGLANG_PAT_TRACE_MB", "0", "SGLANG_PAT_TRACE_MB='0' must be a number of megabytes, from 1 to 999,999,999"),
        ("SGLANG_PAT_TRACE_MB", "1.5", "SGLANG_PAT_TRACE_MB='1.5' must be a number"),
        ("SGLANG_PAT_CACHE_OWNER", "no such", "SGLANG_PAT_CACHE_OWNER='no such' must be the name or number of a user"),
        (
            "SGLANG_PAT_CACHE_OWNER",
            "65534",
            "SGLANG_PAT_CACHE_OWNER='65534' must be another user: files of all users that",
        ),
        ("SGLANG_PAT_PORTS", "80", "SGLANG_PAT_PORTS is not a setting of sglang-pat"),
        ("SGLANG_PAT_POLCY", "pat", "SGLANG_PAT_POLCY is not a setting of sglang-pat"),
        ("SGLANG_PAT_\x1b[2J", "1", r"'SGLANG_PAT_\\x1b\[2J' is not a setting of sglang-pat"),
        ("SGLANG_PAT_TRACE", "/tmp/\udcff", r"SGLANG_PAT_TRACE='/tmp/\\udcff' has characters that cannot be shown"),
        ("SGLANG_PAT_TILES", "a\u202eb", r"SGLANG_PAT_TILES='a\\u202eb' has characters that cannot be shown"),
        ("SGLANG_PAT_kv", "int4", "SGLANG_PAT_kv is not a setting of sglang-pat"),
    ],
)
def test_unknown_settings_are_refused_by_name(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PatConfig.from_environment({variable: value})
