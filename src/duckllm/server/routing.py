"""Routers whose bodies are read by a parser that refuses deep nesting, broken Unicode and what is no number.

Every API module makes its router here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from duckllm.server.limits import check_nodes


def new_router(tag: str) -> APIRouter:
    """An empty router; ``tag`` groups its paths in the description of the server."""
    return APIRouter(route_class=_JsonRoute, tags=[tag])


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body's value. Python's own parser takes NaN and half characters, and recurses without end."""
        try:
            body = from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        check_nodes(body)
        return body
