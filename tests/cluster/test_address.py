"""Addresses as users write them."""

from __future__ import annotations

import pytest

from duckllm.cluster import open_cluster
from duckllm.cluster.address import Address, is_loopback, parse_address, parse_addresses
from duckllm.cluster.static import StaticCluster
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:7411", Address("node1", 7411)),
        ("10.0.0.3:1", Address("10.0.0.3", 1)),
        ("[::1]:7411", Address("::1", 7411)),
        (" duck.local:65535 ", Address("duck.local", 65535)),
    ],
)
def test_good(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert str(expected) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            "node1",
            ":7411",
            "node1:",
            "node1:0",
            "node1:65536",
            "node1:-1",
            "node1:+5",
            "node1:7411x",
        ),
        *(
            "node1:\uff11",
            "::1:7411",
            "[::1]",
            "[::1]7411",
            "[node1]:5",
            "[127.0.0.1]:5",
            "no de:5",
            "http://a:5",
        ),
        "u@a:5",
        "a\0b:5",
        "a\x1b[2Jb:5",
    ],
)
def test_bad_names_the_entry(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert "expected name:port" in str(caught.value)
    assert caught.value.field == "addresses"


def test_port_0_is_for_listening_only() -> None:
    assert parse_address("127.0.0.1:0", "listen", allow_port_0=True).port == 0
    with pytest.raises(ConfigError, match=r"listen: got '127\.0\.0\.1:0'"):
        parse_address("127.0.0.1:0", "listen")


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback(ip: str, expected: bool) -> None:
    assert is_loopback(ip) is expected


def test_a_static_cluster_takes_its_addresses_in_order() -> None:
    cluster = open_cluster(ClusterConfig(addresses=("b:2", "a:1")))
    assert isinstance(cluster, StaticCluster)
    assert cluster.addresses == (Address("b", 2), Address("a", 1))
    assert cluster.num_workers == 2


def test_a_static_cluster_refuses_an_address_twice_or_malformed() -> None:
    with pytest.raises(ConfigError, match="addresses: got 'a:1'"):
        StaticCluster(ClusterConfig(addresses=("a:1", "b:1", "a:1")))
    with pytest.raises(ConfigError, match="addresses: got 'b', expected"):
        StaticCluster(ClusterConfig(addresses=("a:1", "b")))
    with pytest.raises(ConfigError, match="expected at least one"):
        StaticCluster(ClusterConfig())


@pytest.mark.parametrize(
    ("first", "again"),
    [("a:1", "a:1"), ("PC1:1", "pc1:1"), ("pc1.lan.:1", "pc1.lan:1"), ("[::1]:1", "[0:0::1]:1")],
)
def test_a_worker_is_listed_once_however_it_is_spelled(first: str, again: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_addresses((first, "b:1", again), "workers")
    assert str(caught.value) == f"workers: got {again!r}, expected each worker once"
    assert parse_addresses(("PC1:1", "pc1:2")) == (Address("PC1", 1), Address("pc1", 2))


@pytest.mark.parametrize(("field", "value"), [("threads_per_worker", 3), ("spin_us", 0), ("prefill", "bf16")])
def test_options_that_workers_elsewhere_have_of_their_own(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got {value!r}, expected nothing with workers elsewhere"):
        StaticCluster(ClusterConfig(addresses=("a:1",), **{field: value}))
