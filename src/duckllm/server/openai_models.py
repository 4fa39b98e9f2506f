"""``/v1/models``: the one model that is served; and what it is called.

Mounted by :mod:`duckllm.server.app`; every API asks :class:`ServedModel` for the model's names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from duckllm.server.chat_service import ChatService
from duckllm.server.errors import ApiError
from duckllm.server.openai_requests import check_model
from duckllm.server.routing import new_router


class ServedModel:
    """The model as clients know it.

    Args:
        names: What it may be called in requests, its own name first.
        service: Serves it.
    """

    def __init__(self, names: Sequence[str], service: ChatService) -> None:
        self.names, self._service = tuple(names), service
        self.created = int(time.time())

    def fingerprint(self) -> str:
        """What replies depend on beside the request: the model's weights."""
        return f"fp_{self._service.llm.model_hash[:12]}"

    def card(self, name: str) -> dict[str, Any]:
        """The model under one of its names, in OpenAI's form; its context length by vLLM's name as well.

        Beside it, for the web page: what a request has that leaves sampling to the model, and whether its
        thinking can be turned on and off.
        """
        length = self._service.llm.max_model_len
        params = self._service.llm.default_sampling_params
        sampling = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        about = {"id": name, "object": "model", "created": self.created, "owned_by": "duckllm"}
        return {
            **about,
            "max_model_len": length,
            "context_length": length,
            "default_sampling_params": sampling,
            "can_switch_thinking": self._service.format.can_switch_thinking,
        }


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The paths about models, and embeddings, which no model here has."""
    routes = new_router("OpenAI")

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": [model.card(name) for name in model.names]}

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """One of them."""
        return model.card(check_model(name, model.names))

    @routes.post("/v1/embeddings", status_code=501, response_description="Not Implemented")
    async def create_embeddings() -> None:
        """Refused: models that write text have no embedding of one."""
        raise ApiError(501, "this server's model writes text and has no embeddings", code="not_implemented")

    return routes
