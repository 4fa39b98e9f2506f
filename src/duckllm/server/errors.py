"""What a client sees of an error: a status, and the envelope of the API that it speaks.

Used by every module of the server. Errors of ours become :class:`ApiError` by :func:`as_api_error`; nothing
of any other error is shown.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from duckllm.errors import (
    ConfigError,
    DuckError,
    EngineError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    ServerError,
    UnreadError,
    WorkerLostError,
    show_value,
)

RETRY_AFTER_S = 2
_log = logging.getLogger("duckllm")
# A client that went away before its reply: nobody sees the status, nginx's logs call it so.
CLIENT_CLOSED_REQUEST = 499
# In a request's scope: the status that it would have, had its answer not begun or its client not left before.
FINAL_STATUS = "duckllm.final_status"
ANTHROPIC_PATHS = "/v1/messages"
# The name of each of Anthropic's kinds of error, by status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(HTTPException):
    """A refusal with all that the envelopes need.

    Args:
        status: Of HTTP.
        message: One sentence.
        kind: OpenAI's ``type``.
        param: The field that it is about.
        code: A name for programs.
        facts: More members of the error object.
        headers: Of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        facts: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.facts = dict(facts or {})

    def openai(self) -> dict[str, Any]:
        """OpenAI's envelope."""
        about = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**about, **self.facts}}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's envelope."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"type": "error", "error": {"type": kind, "message": self.message, **self.facts}}

    def envelope(self, path: str) -> dict[str, Any]:
        """The envelope of the API that the path belongs to."""
        return self.anthropic() if path.startswith(ANTHROPIC_PATHS) else self.openai()

    def response(self, path: str) -> JSONResponse:
        """The reply of HTTP, in the envelope of the API that the path belongs to."""
        return JSONResponse(self.envelope(path), self.status, self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    retry = {"retry-after": str(RETRY_AFTER_S)}
    if isinstance(error, PromptTooLongError):
        kind, limit = "exceed_context_size_error", error.limit_tokens + 1
        least = "at least " if error.is_least else ""
        message = (
            f"the request has {least}{error.got_tokens} tokens, expected at most {error.limit_tokens}, "
            f"as the context holds {limit} and a reply needs one"
        )
        facts = {"n_prompt_tokens": error.got_tokens, "n_ctx": limit}
        return ApiError(400, message, kind, param=error.field, code=kind, facts=facts)
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, RequestError):
        field = re.match(r"[\w.\[\]]+(?=: got )", str(error))
        return ApiError(400, str(error), param=field[0] if field else None)
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), "rate_limit_error", code="overloaded", headers=retry)
    if isinstance(error, UnreadError):
        return ApiError(CLIENT_CLOSED_REQUEST, str(error), code="unread")
    if isinstance(error, WorkerLostError):
        return ApiError(503, str(error), "server_error", code="worker_lost", headers=retry)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), "server_error", code="internal_error")
    if isinstance(error, ServerError):
        return ApiError(503, str(error), "server_error", code="unavailable", headers=retry)
    if isinstance(error, DuckError):
        return ApiError(500, str(error), "server_error")
    if isinstance(error, HTTPException):  # of the framework
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return ApiError(error.status_code, str(error.detail), kind, headers=error.headers)
    return ApiError(500, "internal error (the server's log says where; please report it)", "server_error")


def no_such_call(method: str, path: str, error: HTTPException, known: Collection[str]) -> ApiError:
    """A path that there is not (404), or not with this method (405).

    Args:
        method: The request's method.
        path: The request's path.
        error: What the framework says of it.
        known: The paths that there are.
    """
    if error.status_code == 405:
        takes = (error.headers or {}).get("Allow", "another")
        told = f"method: got {method}, expected {takes} for {show_value(path)}"
    else:
        meant = f"/v1{path}"
        expected = "one of " + ", ".join(map(repr, sorted(known)))
        if meant in known:
            expected = f"{meant!r} (the address of the API ends with /v1)"
        told = f"path: got {show_value(path)}, expected {expected}"
    return ApiError(error.status_code, told, headers=error.headers)


def log_fault(what: str, error: Exception) -> None:
    """Notes what went wrong: ours as it is; of others kind and place, as their text may quote a user.

    With $DUCKLLM_DEBUG=1 all of it, with the traceback.
    """
    told = str(error)
    if not isinstance(error, DuckError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        told = f"internal error: {type(error).__name__} at {last.filename}:{last.lineno}"
    is_debugged = os.environ.get("DUCKLLM_DEBUG") == "1"
    _log.error("%s: %s", what, told, exc_info=error if is_debugged else None)


def refuse(param: str, got: object, expected: str) -> ApiError:
    """A field that cannot be honoured."""
    return ApiError(400, f"{param}: got {show_value(got)}, expected {expected}", param=param)


@contextmanager
def prompt_named(field: str) -> Iterator[None]:
    """Says of a prompt that is too long in which field the client has it."""
    try:
        yield
    except PromptTooLongError as error:
        raise error.named(field) from error


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Says of an error the field as the client's API has it.

    Args:
        names: Parts of the names that our own values have, and what stands for them there.
    """
    try:
        yield
    except (ConfigError, PromptTooLongError) as error:
        field = error.field
        for ours, theirs in names.items():
            field = field.replace(ours, theirs)
        raise error.named(field) from error


def from_validation(errors: Sequence[Mapping[str, Any]], content_type: str) -> ApiError:
    """What pydantic found first in a body that was sent as ``content_type``."""
    error = errors[0]
    param = path_of([part for part in error["loc"] if part != "body"])
    if error["type"] == "extra_forbidden":
        kind = _type_of(error["loc"][-2]) if len(error["loc"]) > 1 else None
        told = f"{param}: unknown field{'' if kind is None else f' with type {kind!r}'}"
        return ApiError(400, f"{told}, which cannot be honoured", param=param, code="unknown_field")
    if error["type"] == "missing":
        return ApiError(400, f"{param or 'body'}: got nothing, expected a value", param=param or None)
    if error["type"] == "json_invalid":
        why = error.get("ctx", {}).get("error", "malformed")
        return ApiError(400, f"body: got no valid JSON ({why}), expected a JSON object")
    if error["type"] == "too_many_fields":
        got = f"{len(error['input'])} fields"
        return ApiError(400, f"{param or 'body'}: got {got}, expected {error['msg']}", param=param or None)
    if not param:
        kind = content_type.partition(";")[0].strip().lower()
        if not re.fullmatch(r"application/([^+]+\+)?json", kind):  # else it was not read as JSON
            return ApiError(400, f"content-type: got {show_value(kind)}, expected 'application/json'")
        return ApiError(400, "body: got no JSON object, expected one")
    if error["type"] == "union_tag_invalid" and isinstance(error["input"], dict):
        found, param = error["input"].get("type"), f"{param}.type"
        got = "nothing" if found is None else show_value(found)
        kinds = str(error["ctx"]["expected_tags"]).replace(_TYPE, "").replace(">", "")
        return ApiError(400, f"{param}: got {got}, expected one of {kinds}", param=param)
    return ApiError(
        400, f"{param}: got {show_value(error.get('input'))}, expected {_expected(error)}", param=param
    )


def _expected(error: Mapping[str, Any]) -> str:
    """What pydantic expected, in our words where its own are of Python."""
    kind, facts = error["type"], error.get("ctx", {})
    if kind in {"model_type", "model_attributes_type", "dict_type", "union_tag_invalid"}:
        return "an object"
    if kind == "string_pattern_mismatch":
        return f"text that matches {facts['pattern']}"
    for bound, words in (("min_length", "at least"), ("max_length", "at most")):
        if bound in facts:
            unit = "character" if kind.startswith("string_") else "item"
            number = facts[bound]
            return f"{words} {'one' if number == 1 else number} {unit}{'' if number == 1 else 's'}"
    return re.sub("^(Input should be |Value error, |Assertion failed, )", "", str(error["msg"]))


_TYPE = "<type="


def type_tag(name: object) -> str:
    """How a place in a body says of which ``type`` the value there is."""
    return f"{_TYPE}{name}>"


def _type_of(part: int | str) -> str | None:
    """The type that a part of a place is the tag of, or None."""
    text = str(part)
    return text[len(_TYPE) : -1] if text.startswith(_TYPE) else None


def path_of(parts: Sequence[int | str]) -> str:
    """A place in a body as people write it: ``messages[0].content``. Names in <> are of our unions."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{part}" if text else part
    return text
