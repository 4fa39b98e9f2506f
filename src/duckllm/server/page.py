"""The web page's files over HTTP, with headers that let the page do what it must and nothing more.

The app mounts :func:`router`; what the page asks for, it asks the APIs. Knows no model and no engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline, nothing from elsewhere, no frame around the page. Trusted types forbid every script, also
# the page's own, to turn text into HTML.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), clipboard-write=(self)",
    # Kept by the browser, and asked about each time: an updated server never meets an old page.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page.

    Args:
        body: What it holds.
        media_type: Its type.
        etag: Its hash, as an entity tag.
    """

    body: bytes
    media_type: str
    etag: str


def assets() -> dict[str, Asset]:
    """Every file of the page by its name."""
    found = {}
    for file in files("duckllm.server").joinpath("page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            body = file.read_bytes()
            found[file.name] = Asset(body, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "ETag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


def router() -> APIRouter:
    """The routes ``/`` and ``/page/NAME``, which need no key; the files are read once, now."""
    found = assets()
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(request, found["index.html"])

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def asset(request: Request, name: str) -> Response:
        if name not in found or name == "index.html":
            raise HTTPException(404, f"the page has no file {name!r}")
        return _answer(request, found[name])

    return routes
