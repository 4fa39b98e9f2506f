"""Who may ask, and from where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from app_harness import Call, InProcess, ask

from duckllm.errors import ConfigError
from duckllm.server.app import ServerConfig, make_app

KEYS = ("first-key", "second-key")
BODY = {"messages": [{"role": "user", "content": "What is a duck?"}], "max_tokens": 2}
Asking = Callable[..., Call]


@pytest.fixture
def asking(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> Callable[[ServerConfig], Asking]:
    """Requests to the same model behind another configuration."""

    def of(config: ServerConfig) -> Asking:
        monkeypatch.setattr(here, "app", make_app(here.service, config))
        return lambda *arguments, **options: ask(here, *arguments, **options)

    return of


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("authorization", "Bearer first-key")], 200),
        ([("authorization", "bearer second-key")], 200),
        ([("x-api-key", "second-key")], 200),
        ([("x-api-key", "first-ke")], 401),
        ([("x-api-key", "first-key2")], 401),
        ([("authorization", "first-key")], 401),
        ([("authorization", "Basic first-key")], 401),
        ([("authorization", "Bearer none"), ("x-api-key", "first-key")], 200),
        ([("authorization", "Bearer ")], 401),
        ([("x-api-key", "é")], 401),
    ],
)
def test_a_key_is_asked_for(asking: Any, headers: list[tuple[str, str]], status: int) -> None:
    call = asking(ServerConfig(api_keys=KEYS))
    done = call("/v1/chat/completions", BODY, headers=headers)
    assert done.status == status
    if status == 401:
        assert done.json()["error"]["code"] == "invalid_api_key"
        assert done.headers["www-authenticate"] == "Bearer"


def test_what_is_public_and_what_is_not(asking: Any) -> None:
    call = asking(ServerConfig(api_keys=KEYS))
    assert call("/health").json() == {"status": "ok"}
    for path in ("/v1/models", "/openapi.json", "/nowhere", "//v1/models", "/health/../v1/models"):
        assert call(path).status == 401, path


def test_an_anthropic_path_gets_anthropics_envelope(asking: Any) -> None:
    done = asking(ServerConfig(api_keys=KEYS))("/v1/messages", {})
    assert done.json() == {
        "type": "error",
        "error": {
            "type": "authentication_error",
            "message": "got no API key, expected one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        },
    }


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:8000", 200), ("localhost", 200), ("LOCALHOST:80", 200), ("[::1]:8000", 200)),
        *(
            ("192.168.1.5", 200),
            ("duck.localhost", 200),
            ("evil.example", 403),
            ("127.0.0.1.evil.example", 403),
        ),
        *(("", 403), ("localhost.evil.example:80", 403)),
    ],
)
def test_a_name_of_somebody_else_is_refused_without_a_key(asking: Any, host: str, status: int) -> None:
    assert asking(ServerConfig())("/v1/models", headers=[("host", host)]).status == status


def test_with_a_key_or_insecure_any_name_will_do(asking: Any) -> None:
    named = [("host", "host.docker.internal:8000"), ("x-api-key", KEYS[0])]
    assert asking(ServerConfig(api_keys=KEYS))("/v1/models", headers=named).status == 200
    assert asking(ServerConfig(is_insecure=True))("/v1/models", headers=named).status == 200


def test_other_pages_may_ask_only_where_they_are_let_in(asking: Any) -> None:
    origin = [("origin", "https://page.example")]
    preflight = [*origin, ("access-control-request-method", "POST")]
    call = asking(ServerConfig(api_keys=KEYS))
    assert "access-control-allow-origin" not in call("/v1/models", headers=origin).headers
    call = asking(ServerConfig(api_keys=KEYS, cors_origins=("https://page.example",)))
    done = call("/v1/chat/completions", method="OPTIONS", headers=preflight)
    assert (done.status, done.headers["access-control-allow-origin"]) == (200, "https://page.example")
    refused = call("/v1/models", headers=origin)  # a page is to see why
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")
    other = call("/v1/models", headers=[("origin", "https://evil.example")])
    assert "access-control-allow-origin" not in other.headers


def test_a_model_may_have_several_names(asking: Any) -> None:
    call = asking(ServerConfig(model_names=("mine", "gpt-4o")))
    assert [model["id"] for model in call("/v1/models").json()["data"]] == ["mine", "gpt-4o"]
    assert call("/v1/chat/completions", BODY).json()["model"] == "mine"
    assert call("/v1/chat/completions", {**BODY, "model": "gpt-4o"}).json()["model"] == "gpt-4o"
    assert call("/v1/models/gpt-4o").json()["id"] == "gpt-4o"
    refused = call("/v1/chat/completions", {**BODY, "model": "other"})
    assert (refused.status, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_a_page_cannot_post_without_being_let_in(asking: Any) -> None:
    """What needs no preflight, text/plain, is not read."""
    done = asking(ServerConfig())("/v1/chat/completions", BODY, headers=[("content-type", "text/plain")])
    assert done.status == 400
    assert done.json()["error"]["message"] == "content-type: got 'text/plain', expected 'application/json'"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "duck.example"])
def test_without_a_key_it_stays_on_loopback(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host: got '{host}', expected a loopback address"):
        ServerConfig(host=host)
    ServerConfig(host=host, api_keys=KEYS)
    ServerConfig(host=host, is_insecure=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port: got 65536"),
        ({"max_waiting": -1}, "max_waiting: got -1"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s: got -1"),
        ({"model_names": ("demo", "a b")}, "served_model_name: got 'a b'"),
        ({"cors_origins": ("example.org",)}, "cors_origin: got 'example.org'"),
        ({"cors_origins": ("https://example.org/path",)}, "cors_origin: got 'https://example.org/path'"),
        ({"api_keys": ("a key",)}, "api_key: got 5 characters"),
        ({"api_keys": ("",)}, "api_key: got nothing"),
    ],
)
def test_a_wrong_value_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert str(caught.value).startswith(message)
