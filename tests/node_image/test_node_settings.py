"""Settings of a node: three sources, one meaning, and mistakes that name the field and keep the token."""

from __future__ import annotations

from importlib.resources import files

import pytest

from duckllm.errors import ConfigError
from duckllm.node_image.init import worker_command
from duckllm.node_image.settings import NodeSettings, merge, read_command_line, read_fetched, read_file


def test_the_command_line_gives_what_begins_with_duck() -> None:
    line = (
        'quiet console=ttyS0 duck.token="two words" duck.port=7500 duckling=1 duck.host=10.0.0.1,10.0.0.2 ro'
    )
    found = read_command_line(line)
    assert found == {"token": "two words", "port": 7500, "host": "10.0.0.1,10.0.0.2"}
    assert merge(found).hosts == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("splash=it's duck.token=a", "a"),
        ('duck.token=a splash="no end', "a"),
        (r"duck.token=a\b'c", r"a\b'c"),
        ('"duck.token=two words"', "two words"),
        ('duck.token="two words', "two words"),
        ('duck.token=a"b c"d', 'a"b c"d'),
        ("duck.token=a duck.token=b", "b"),
    ],
)
def test_words_are_the_kernels_and_not_a_shells(line: str, token: str) -> None:
    assert read_command_line(line) == {"token": token}


def test_a_mark_of_byte_order_is_no_part_of_a_file() -> None:
    assert read_file('\ufefftoken = "a"\r\n', "node.toml") == {"token": "a"}


@pytest.mark.parametrize("text", ["port = " + "1" * 5000, "token = " + "[" * 5000])
def test_numbers_and_nesting_without_end_are_a_mistake_like_others(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_file(text, "node.toml")
    assert error.value.field == "node.toml"


def test_unknown_names_are_shown_as_one_short_line() -> None:
    with pytest.raises(ConfigError) as error:
        read_file('"\\u001b[2J\\n' + "x" * 5000 + '" = 1', "node.toml")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_the_boot_server_gives_no_node_its_address() -> None:
    assert read_fetched('token = "a"\nname = "b"', "http://x/y") == {"token": "a", "name": "b"}
    for name in ("address", "gateway"):
        with pytest.raises(ConfigError, match=f"{name}: got '10.0.0.1/24', expected it on the medium"):
            read_fetched(f'{name} = "10.0.0.1/24"', "http://x/y")


def test_a_gateway_lies_in_the_nodes_network() -> None:
    assert merge({"address": "10.0.0.2/24", "gateway": "10.0.0.1"}).gateway == "10.0.0.1"
    for address in ("", "10.0.1.2/24"):
        with pytest.raises(ConfigError, match="gateway"):
            merge({"address": address, "gateway": "10.0.0.1"})


def test_the_first_source_that_names_a_field_decides() -> None:
    settings = merge({"port": 1}, {"port": 2, "token": "b"}, {"port": 3, "token": "c", "threads": 4})
    assert (settings.port, settings.token, settings.threads) == (1, "b", 4)
    assert merge() == NodeSettings()


def test_the_file_that_ships_with_images_sets_nothing_and_names_every_field() -> None:
    text = (files("duckllm.node_image") / "files/node.toml").read_text(encoding="utf-8")
    assert read_file(text, "node.toml") == {}
    uncommented = "\n".join(
        line.removeprefix("# ").partition("  #")[0] for line in text.splitlines() if " = " in line
    )
    found = read_file(uncommented, "node.toml")
    assert set(found) | {"config"} == set(NodeSettings.__dataclass_fields__)
    merge(found)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("duck.tokn=x", "duck.tokn"),
        ("duck.port=many", "duck.port"),
        ("duck.port=-1", "duck.port"),
        ("duck.port=\uff17\uff14", "duck.port"),
        ("duck.threads=" + "9" * 5000, "duck.threads"),
    ],
)
def test_mistakes_on_the_command_line(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_command_line(line)
    assert error.value.field == named


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("port", 65536),
        ("port", "7411"),
        ("threads", -1),
        ("host", "duck.local"),
        ("host", "10.0.0.1,"),
        ("gateway", "10.0.0"),
        ("time_server", "::1"),
        ("address", "10.0.0.11/33"),
        ("address", "10.0.0.11"),
        ("token", " \n"),
        ("token", "\udc80"),
        ("config", "ftp://10.0.0.1/x"),
        ("config", "http://[::1/x"),
        ("config", "http://10.0.0.1:x/"),
        ("config", "http:///node.toml"),
        ("config", "tftp://10.0.0.1/a b"),
        ("cache_label", ""),
        ("cache_label", "a\0b"),
        ("cache_label", "x" * 17),
        ("cache_bytes", "0"),
        ("cache_bytes", "much"),
        ("announce", "yes"),
        ("name", "a b"),
        ("name", "x" * 64),
    ],
)
def test_values_that_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        merge({field: value})
    assert error.value.field == field


def test_a_token_is_in_no_message() -> None:
    for token in ("s3cret" * 1000, 12345678, "s3cret"):
        with pytest.raises(ConfigError) as error:
            merge({"token": token, "port": 0})
        assert "s3cret" not in str(error.value)
        assert "12345678" not in str(error.value)


def test_a_file_that_is_no_toml_or_redirects_is_refused() -> None:
    with pytest.raises(ConfigError, match="no TOML"):
        read_file("token", "node.toml")
    with pytest.raises(ConfigError, match="command line alone"):
        read_file('config = "http://10.0.0.1/x"', "node.toml")
    with pytest.raises(ConfigError, match=r"node.toml: tokne: got an unknown name"):
        read_file('tokne = "x"', "node.toml")


def test_how_the_worker_is_started() -> None:
    """With words that the worker's own parser takes, and never with the token in them."""
    from duckllm.worker.__main__ import make_parser

    settings = NodeSettings(
        token="s3cret", host="10.0.0.1,10.0.0.2", port=7500, cache_bytes="2GiB", threads=3
    )
    for has_cache in (False, True):
        command = worker_command(settings, has_cache, can_announce=True)
        assert "s3cret" not in " ".join(command)
        parsed = make_parser().parse_args(command[command.index("duckllm.worker") + 1 :])
        assert (parsed.listen, parsed.threads, parsed.allow) == ("0.0.0.0:7500", 3, ["10.0.0.1", "10.0.0.2"])
        assert parsed.token_file == "/run/worker/token"
        assert (parsed.cache, parsed.copy) == (has_cache, has_cache)
        assert parsed.cache_bytes == ("2GiB" if has_cache else None)
        assert parsed.announce
    assert "--announce" not in worker_command(settings, False, can_announce=False)
    quiet = NodeSettings(token="s3cret", announce="off")
    assert "--announce" not in worker_command(quiet, False, can_announce=True)
