"""The server's description of itself is true: schemathesis makes requests of it, and holds the answers to it.

``API_EXAMPLES=400 pytest tests/server/test_openapi.py`` makes more of them.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import schemathesis
from app_harness import InProcess, ask
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from server_harness import ServerProcess

from duckllm.server.app import ServerConfig, make_app

NUM_EXAMPLES = int(os.environ.get("API_EXAMPLES", "8"))
TIMEOUT_S = 60.0
OPERATIONS = [
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize"),
    "GET /tokenizer_info",
    *("GET /v1/models", "GET /v1/models/{name}", "GET /cluster", "GET /metrics", "GET /health"),
    "POST /v1/embeddings",
]
CHECK_NAMES = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance", "negative_data_rejection"),
]
# What the description does not say of numbers: most random ones are refused, and nothing behind them is seen.
RANGES = {
    **{
        "temperature": (0.1, 2),
        "top_p": (0.05, 1),
        "min_p": (0, 1),
        "top_k": (-1, 100),
        "min_tokens": (0, 3),
    },
    **{"repetition_penalty": (0.5, 2), "frequency_penalty": (-2, 2), "presence_penalty": (-2, 2)},
    **{"top_logprobs": (0, 5), "n": (1, 2), "logprobs": (0, 5), "best_of": (2, 3)},
}
# Where a reply has no limit unless it is given one.
LIMITS = {
    "POST /v1/chat/completions": "max_tokens",
    "POST /v1/completions": "max_tokens",
    "POST /v1/responses": "max_output_tokens",
    "POST /v1/messages": "max_tokens",
}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def keep_short(label: str, body: Any) -> None:
    """Has replies be short, and of the model that there is, where nothing was meant to be wrong with that."""
    if not isinstance(body, dict) or label not in LIMITS:
        return
    if isinstance(body.get("model"), str):
        body["model"] = "demo"
    name, most = LIMITS[label], body.get(LIMITS[label])
    other = body.get("max_completion_tokens")
    if other is None or is_number(other):
        body.pop("max_completion_tokens", None)
    is_open = most is None and label != "POST /v1/messages"
    if is_open or (is_number(most) and most > 4):
        body[name] = 4


def make_likely(body: Any) -> None:
    """Takes out what is most often refused."""
    if not isinstance(body, dict):
        return
    for name, (least, most) in RANGES.items():
        if is_number(body.get(name)):
            body[name] = min(max(body[name], least), most)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {"7": 1.5}
    for name in ("stop_token_ids", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [int(each) % 100 for each in body[name]]
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [
            message
            for message in messages
            if isinstance(message, dict) and set(message) == {"role", "content"} and message["role"] == "user"
        ] or [{"role": "user", "content": "What is a duck?"}]


@pytest.fixture(scope="module")
def operations(server: ServerProcess) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {operation.ok().label: operation.ok() for operation in schema.get_all_operations()}


def test_all_paths_are_described(operations: dict[str, Any]) -> None:
    assert set(operations) == set(OPERATIONS)


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
        *((label, GenerationMode.NEGATIVE) for label in OPERATIONS[:7]),  # those with a body
    ],
)
def test_answers_are_as_described(operations: dict[str, Any], label: str, mode: GenerationMode) -> None:
    operation = operations[label]
    load_all_checks()
    names = [name for name in CHECK_NAMES if "embeddings" not in label or name != "not_a_server_error"]
    statuses: Counter[int] = Counter()

    @seed(7)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        keep_short(label, case.body)
        if mode is GenerationMode.POSITIVE and sum(statuses.values()) % 5:
            make_likely(case.body)
        response = case.call(timeout=TIMEOUT_S)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS.get_by_names(names))

    run()
    if mode is GenerationMode.NEGATIVE:
        assert set(statuses) == {400}


def describe(here: InProcess, monkeypatch: pytest.MonkeyPatch, config: ServerConfig) -> Any:
    monkeypatch.setattr(here, "app", make_app(here.service, config))
    key = [("x-api-key", key) for key in config.api_keys]
    return ask(here, "/openapi.json", headers=key).json()


def test_keys_are_described(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    told = describe(here, monkeypatch, ServerConfig(api_keys=("key",)))
    assert set(told["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    for path, operations in told["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == ("security" in operation) == (path != "/health")
            assert "403" not in operation["responses"]
    open_to_all = describe(here, monkeypatch, ServerConfig())
    assert "securitySchemes" not in open_to_all["components"]
    models = open_to_all["paths"]["/v1/models"]["get"]
    assert set(models["responses"]) == {"200", "403", "500", "503"}


def test_refusals_are_described_in_the_apis_own_form(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = describe(here, monkeypatch, ServerConfig(is_insecure=True))
    for path, name in (("/v1/chat/completions", "OpenAIError"), ("/v1/messages", "AnthropicError")):
        responses = told["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "404", "408", "413", "429", "500", "503"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        schema = responses["400"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
