"""An emulated engine that serves certain models only, as vLLM does: names, the list, and the 404 of another name."""

from __future__ import annotations

import json
from typing import Any

from sidecar.engines.base import COUNTING
from sidecar.engines.vllm import Vllm
from sidecar.tools.emulator import Emulator
from sidecar.tools.emulator.config import EmulatorConfig
from tests.support.middleware import answer, whole_body

JSON = (b"content-type", b"application/json")


class NamedEngine:
    """An ASGI app with these `models` and LoRA `adapters`. `asked` has the model of each request.

    Read from vLLM 0.33: `entrypoints/openai/models/serving.py` (the list), `engine/serving.py` (`_check_model`).
    """

    def __init__(self, *models: str, adapters: tuple[str, ...] = ()) -> None:
        self.models, self.adapters = models, adapters
        self.asked: list[str | None] = []
        self.headers: dict[bytes, bytes] = {}
        self._emulator = Emulator(EmulatorConfig(engine=Vllm))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/models":
            await answer(send, json.dumps({"object": "list", "data": self._list()}).encode())
        elif scope["type"] == "http" and scope["method"] == "POST":
            await self._serve(scope, receive, send)
        else:
            await self._emulator.app(scope, receive, send)

    def _list(self) -> list[dict[str, Any]]:
        base = {"object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096}
        own = [{"id": name, **base, "root": "/weights", "parent": None} for name in self.models]
        return [*own, *({"id": name, **base, "root": f"/{name}", "parent": self.models[0]} for name in self.adapters)]

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = await whole_body(receive)
        model = json.loads(body).get("model") if body else None
        self.asked.append(model)
        self.headers = dict(scope["headers"])
        assert int(self.headers.get(b"content-length", len(body))) == len(body)
        if model and model not in (*self.models, *self.adapters):
            error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError", "param": "model"}
            await answer(send, json.dumps({"error": {**error, "code": 404}}).encode(), 404)
            return
        if scope["path"] in COUNTING:  # the emulator has no such page
            await answer(send, b'{"input_tokens": 3, "count": 3}')
            return
        messages = [{"type": "http.request", "body": body}]

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        await self._emulator.app(scope, again, send)
