"""What messages show of values: on one line, not too much, and without passwords."""

from __future__ import annotations

from pathlib import Path

import pytest

from duckllm.errors import (
    HIDDEN,
    ConfigError,
    InWords,
    ModelNotFoundError,
    describe_error,
    show_value,
    without_credentials,
)

SECRET = [
    ("http://drake:sesame@h", "http://***@h"),
    ("https://sesame@h/x", "https://***@h/x"),
    ("http://drake:ses/ame@h:80", "http://***@h:80"),
    ("http:/drake:sesame@h/x", "http:/***@h/x"),  # as a path writes it
    ("ray:http://drake:sesame@h:1", "ray:http://***@h:1"),
    ("drake:sesame@h:7411", "***@h:7411"),
    ("a:1,drake:ses@me@h:2", "a:1,***@h:2"),
    ("http://h/?api_key=sesame", "http://h/?***"),
    ("h/?x=1&Access-Token=sesame&y=2", "h/?x=1&Access-Token=***&y=2"),
]
PLAIN = [
    "http://h:8000/a@b",
    "http://[::1]:80/x",
    "239.77.0.1:7400@192.168.1.2",
    "org/name@revision",
    "/data/a:b@c/model",
    "why? me@there: here",
    "discover:10.0.0.1",
]


@pytest.mark.parametrize(("value", "shown"), SECRET)
def test_passwords_and_keys_are_in_no_message(value: str, shown: str) -> None:
    assert show_value(value) == repr(shown)
    assert show_value([value]) == repr([shown])
    assert str(ConfigError("workers", value, "another")) == f"workers: got {shown!r}, expected another"
    assert str(ConfigError("workers", InWords(value), "another")) == f"workers: got {shown}, expected another"
    missing = ModelNotFoundError(f"{value}: no such folder")
    assert str(missing) == f"{shown}: no such folder"
    assert describe_error(missing) == (str(missing), 1)
    assert describe_error(FileNotFoundError(2, "No such file", value)) == (f"{shown}: No such file", 1)
    assert "ame" not in without_credentials(value)


@pytest.mark.parametrize("value", PLAIN)
def test_what_is_no_password_is_shown(value: str) -> None:
    assert show_value(value) == repr(value)
    assert without_credentials(value, HIDDEN) == value


def test_a_password_is_left_out_before_a_long_value_is_cut() -> None:
    around = "x" * 5000
    address = "http://drake:" + "sesame" * 30 + "@h"
    for value in (f"{address} {around}", f"{around} {address}"):
        shown = show_value(value)
        assert "http://***@h" in shown
        assert "sesame" not in shown
        assert len(shown) <= 240


def test_a_path_is_shown_as_its_text() -> None:
    assert show_value(Path("/tmp/x")) == "'/tmp/x'"
    assert str(ConfigError("cache_dir", Path("/tmp/x"), "a folder")) == (
        "cache_dir: got '/tmp/x', expected a folder"
    )
