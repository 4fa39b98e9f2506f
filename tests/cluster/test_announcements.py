"""What a node says of itself on the network, and what is believed of it."""

from __future__ import annotations

import ipaddress
import types
from typing import Any

import pytest

from duckllm.cluster.address import Address
from duckllm.cluster.discovery_announcement import (
    MAX_BYTES,
    Announcement,
    UnprovenError,
    listening_at,
    node_name,
    parse,
    reachable,
    sign,
)
from duckllm.cluster.discovery_mdns import texts_of
from duckllm.errors import ConfigError, ProtocolError

TOKEN = "swan"
NODE = Announcement(
    "node", "duck-1", (Address("10.0.0.5", 7411),), "avx2", 1 << 34, 35.5, 1_700_000_000_000_000
)
NETWORKS = [ipaddress.IPv4Interface("10.0.0.1/24"), ipaddress.IPv4Interface("127.0.0.1/8")]


def read(entries: dict[str, Any], token: str = TOKEN, num_bytes: int = 300) -> Announcement:
    return parse(entries, num_bytes, token)


def resigned(**changes: str) -> dict[str, str]:
    """Entries with other words, signed by somebody who holds the token."""
    from duckllm.cluster import discovery_announcement as module

    entries = {**sign(NODE, TOKEN), **changes}
    entries.pop("proof")
    return {**entries, "proof": module._proof(entries, TOKEN)}


def test_what_is_signed_is_what_is_read() -> None:
    assert read(sign(NODE, TOKEN)) == NODE
    silent = Announcement("node", "n", (Address("10.0.0.5", 1), Address("10.1.0.5", 1)), "scalar", 0, None, 5)
    assert read(sign(silent, TOKEN)) == silent
    host = Announcement("host", "swan", time_us=7)
    assert read(sign(host, TOKEN)) == host


def test_every_announcement_has_a_time_of_its_own() -> None:
    undated = Announcement("node", "n", (Address("10.0.0.5", 1),))
    first, second = (int(sign(undated, TOKEN)["time_us"]) for _ in range(2))
    assert 1_600_000_000_000_000 < first <= second


def test_a_record_fits_into_one_text_record() -> None:
    addresses = tuple(Address(f"100.100.100.{100 + number}", 65535) for number in range(8))
    long = Announcement("node", "n" * 40, addresses, "avx512+avx512_bf16", (1 << 63) - 1, 999999.9)
    entries = sign(long, TOKEN)
    assert all(len(f"{name}={value}".encode()) <= 255 for name, value in entries.items())
    assert sum(len(f"{name}={value}") + 1 for name, value in entries.items()) <= MAX_BYTES


@pytest.mark.parametrize("entry", ["role", "name", "at", "isa", "memory_bytes", "read_gb_per_s", "time_us"])
def test_the_proof_covers_every_entry(entry: str) -> None:
    entries = sign(NODE, TOKEN)
    other = {"role": "host", "name": "duck-2", "at": "10.0.0.6:7411"}.get(entry, entries[entry] + "1")
    with pytest.raises(UnprovenError, match="cluster_token: it has another one than this side"):
        read({**entries, entry: other})


def test_another_token_proves_nothing() -> None:
    with pytest.raises(UnprovenError):
        read(sign(NODE, "goose"))
    with pytest.raises(UnprovenError):
        read({**sign(NODE, TOKEN), "proof": ""})
    with pytest.raises(UnprovenError):
        read({**sign(NODE, TOKEN), "proof": "\N{DUCK}"})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({}, "its form: got None, expected '1'"),
        ({"form": "2"}, "its form: got '2', expected '1': is it another release's"),
        ({"form": "\x1b[2J" * 99}, r"its form: got '\\x1b\[2J"),
        ({"form": "1"}, "its entries: got 1, expected form"),
        ({**sign(NODE, TOKEN), "more": ""}, "its entries: got 10"),
        ({**sign(NODE, TOKEN), "isa": None}, "cluster_token"),
        (resigned(role="king"), "its role: got 'king', expected one of node, host"),
        (resigned(name="a b"), "its name: got 'a b', expected letters"),
        (resigned(name="n" * 41), "its name"),
        (resigned(name="du\u0441k"), "its name"),
        (resigned(isa="avx2\x1b"), r"its isa: got 'avx2\\x1b'"),
        (resigned(at=""), "its addresses: got 0, expected 1 to 8"),
        (resigned(at=",".join(["10.0.0.5:1"] * 9)), "its addresses: got 9"),
        (resigned(at="duck.local:7411"), "its addresses: got 'duck.local:7411'"),
        (resigned(at="[::1]:7411"), "its addresses"),
        (resigned(at="10.0.0.5:0"), "its addresses"),
        (resigned(at="10.0.0.5"), "its addresses"),
        (resigned(role="host"), "its addresses: got 1, expected none of a host"),
        (resigned(memory_bytes="-1"), "its memory_bytes: got '-1', expected a whole number"),
        (resigned(memory_bytes="9" * 19), "its memory_bytes"),
        (resigned(time_us="\u0665"), "its time_us"),
        (resigned(read_gb_per_s="nan"), "its read_gb_per_s: got 'nan', expected GB/s"),
        (resigned(read_gb_per_s="1e99"), "its read_gb_per_s"),
        (resigned(read_gb_per_s="fast"), "its read_gb_per_s"),
    ],
)
def test_malformed_announcements(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as caught:
        read(entries)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_a_huge_record_is_not_even_read() -> None:
    with pytest.raises(ProtocolError, match="its record: got 1025 bytes, expected at most 1024"):
        read(sign(NODE, TOKEN), num_bytes=MAX_BYTES + 1)


def test_names() -> None:
    assert node_name("duck-1") == "duck-1"
    assert 1 <= len(node_name()) <= 40
    for name in ("", "-duck", "duck.local", "n" * 41, "a b", "\N{DUCK}"):
        with pytest.raises(ConfigError, match="node_name"):
            node_name(name)


def test_a_label_is_one_place() -> None:
    labels = {
        NODE.label,
        Announcement("node", "duck-1", (Address("10.0.0.5", 7412),)).label,
        Announcement("node", "duck-2", (Address("10.0.0.5", 7411),)).label,
    }
    assert len(labels) == 3
    assert NODE.label == Announcement("node", "duck-1", (Address("10.0.0.5", 7411),), time_us=1).label
    assert len(Announcement("node", "n" * 40, ()).label) <= 63


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["10.0.0.5"], "10.0.0.5"),
        (["192.168.7.5", "10.0.0.5"], "10.0.0.5"),
        (["127.0.0.1"], "127.0.0.1"),
        (["8.8.8.8"], None),
        (["10.0.1.5", "169.254.169.254"], None),
    ],
)
def test_only_addresses_of_own_networks(names: list[str], expected: str | None) -> None:
    found = reachable(Announcement("node", "n", tuple(Address(name, 7) for name in names)), NETWORKS)
    assert found == (None if expected is None else Address(expected, 7))


def test_where_a_worker_says_that_it_is() -> None:
    assert listening_at(Address("0.0.0.0", 7), NETWORKS) == (["10.0.0.1"], (Address("10.0.0.1", 7),))
    assert listening_at(Address("0.0.0.0", 7), NETWORKS[1:]) == (["127.0.0.1"], (Address("127.0.0.1", 7),))
    assert listening_at(Address("127.0.0.1", 7), NETWORKS) == (["127.0.0.1"], (Address("127.0.0.1", 7),))
    assert listening_at(Address("0.0.0.0", 7), []) == ([], ())
    with pytest.raises(ConfigError, match=r"listen: got .*expected an IPv4 address with --announce"):
        listening_at(Address("::1", 7), NETWORKS)


def test_every_text_under_a_name_is_read() -> None:
    zeroconf = pytest.importorskip("zeroconf")
    names = ("duck-1.local.", "duck-1.local.", "duck-2.local.", "duck-1.local.")
    records: list[Any] = [
        zeroconf.DNSText(name, 16, 1, 120, text)
        for name, text in zip(names, (b"first", b"second", b"other", b""), strict=True)
    ]
    records.append(zeroconf.DNSPointer("duck-1.local.", 12, 1, 120, "alias.local."))
    heard = types.SimpleNamespace(cache=zeroconf.DNSCache())
    heard.cache.async_add_records(records)
    assert sorted(texts_of("duck-1.local.", heard)) == [b"first", b"second"]
    assert texts_of("duck-3.local.", heard) == []
