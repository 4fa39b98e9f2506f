"""Who may ask: API keys, the names that a browser may call this server by, and origins of pages elsewhere.

Middlewares of :mod:`duckllm.server.app`, and checks of the command line's values.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from duckllm.errors import ConfigError, InWords
from duckllm.server.errors import ApiError

# What a browser opens before it knows a key, and what tells whether the server is up.
PUBLIC_PATHS = ("/", "/health")
PUBLIC_FOLDER = "/page/"
MAX_KEY_CHARACTERS = 512


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address or name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, keys: Sequence[str], *, is_insecure: bool) -> None:
    """Refuses to be open to others without a key.

    Raises:
        ConfigError: ``host`` is beyond loopback, and there is neither a key nor ``--insecure``.
    """
    if not keys and not is_insecure and not is_loopback(host):
        expected = "a loopback address such as 127.0.0.1 without an API key"
        hint = "give one with --api-key-file or $DUCKLLM_API_KEY, or say --insecure to let anybody in"
        raise ConfigError("host", host, expected, hint)


def check_key(field: str, key: str) -> str:
    """``key``, once it is known that a header can hold it.

    Raises:
        ConfigError: It cannot. The message does not show it.
    """
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS or not all("!" <= each <= "~" for each in key):
        got = InWords(f"{len(key)} characters" if key else "nothing")
        raise ConfigError(
            field, got, f"1 to {MAX_KEY_CHARACTERS} letters, digits and signs of ASCII, no spaces"
        )
    return key


class ApiKeys:
    """Lets requests in that have one of the keys, as ``Authorization: Bearer`` or ``x-api-key``.

    Args:
        app: Gets the others.
        keys: Known keys; none lets everybody in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it before its body is read."""
        if scope["type"] == "http" and self._keys and not is_public(scope["path"]):
            given = _given_keys(scope)
            # Every pair is compared, so that the time says nothing.
            good = [hmac.compare_digest(each, key) for each in given for key in self._keys]
            if not any(good):
                what = "a wrong API key" if given else "no API key"
                message = f"got {what}, expected one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                headers = {"www-authenticate": "Bearer"}
                error = ApiError(401, message, code="invalid_api_key", headers=headers)
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER)


def _given_keys(scope: Scope) -> list[bytes]:
    keys = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value)
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].strip())
    return keys


class KnownNames:
    """Refuses requests for names that are not this server's.

    A page anywhere may have its own name point at this machine and then talk to a server here as if it had
    come from it (DNS rebinding). Such requests name the page's server in ``Host``. An address of numbers, or
    localhost, cannot be anybody else's.

    Args:
        app: Gets the others.
        names: Further names.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app, self._names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if not all(self._is_known(host) for host in hosts):
                error = ApiError(
                    403,
                    f"host: got {hosts[0][:100]!r}, expected an address or localhost while there is no API "
                    "key; set one, or start the server with --insecure",
                    code="unknown_host",
                )
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names or is_loopback(name.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
