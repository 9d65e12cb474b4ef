"""An emulated vLLM whose answers may end before `max_tokens`: after `answer_tokens`, a field of the request's body.

    python -m benchmarks.gain_engine MODEL.yaml

MODEL.yaml is an engine model of `sidecar simulate`. Prints its address, then serves until it is stopped. The KV cache
is taken as it is written, and what runs is preempted where it is full, as in vLLM and in `sidecar simulate`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import uvicorn

from sidecar.engines import Vllm
from sidecar.tools.emulator import Emulator, EmulatorConfig
from sidecar.tools.emulator.server import bind
from sidecar.tools.step_model.model import load_model


class EndsEarly:
    """An ASGI app before the emulator's: `answer_tokens` takes the place of `max_tokens`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        asked = json.loads(body)
        asked["max_tokens"] = asked.pop("answer_tokens", asked.get("max_tokens"))
        changed = json.dumps(asked).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(changed)).encode())]}
        first = [{"type": "http.request", "body": changed, "more_body": False}]

        async def again() -> Any:
            return first.pop() if first else await receive()

        await self._app(scope, again, send)


def main() -> None:
    """See the module."""
    listener = bind("127.0.0.1", 0)
    listener.listen(2048)
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = EndsEarly(Emulator(EmulatorConfig(engine=Vllm, steps=load_model(sys.argv[1]), preempts=True)).app)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="on")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
