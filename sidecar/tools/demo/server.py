"""Server process of one demo run: an emulated TensorRT-LLM, alone or with the middleware mounted.

`python -m sidecar.tools.demo.server admission|alone POLICY` listens on a free port of loopback and prints it.
`GET /demo/log` gives the engine's record of every request, which the demo joins with its clients' results. The process
ends when its standard input does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import asdict, replace

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.app import AdmissionMiddleware
from sidecar.engines import TensorRtLlm
from sidecar.policy.model import Policy
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel

LOG_PATH = "/demo/log"
BACKLOG = 2048

# A step of a full batch takes 46 ms, so 160 sequences give about 3,500 tokens a second: 110 requests of this size, and
# little enough work for the emulator that two cores are idle most of the time.
STEP_S = 0.030
STEP_S_PER_SEQUENCE = 0.0001
PREFILL_TOKENS_PER_STEP = 4096


def emulated_engine(policy: Policy) -> Emulator:
    """An engine that holds exactly what the policy's pool says it holds."""
    return Emulator(
        EmulatorConfig(
            engine=TensorRtLlm,
            steps=StepModel(
                max_num_seqs=policy.rules.requests,
                prefill_tokens_per_step=PREFILL_TOKENS_PER_STEP,
                kv_tokens=policy.rules.tokens,
                step_s=STEP_S,
                step_s_per_seq=STEP_S_PER_SEQUENCE,
            ),
        )
    )


def with_log(emulator: Emulator, app: ASGIApp) -> ASGIApp:
    """Adds the engine's record to an app."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != LOG_PATH:
            await app(scope, receive, send)
            return
        body = msgspec.json.encode([asdict(served) for served in emulator.engine.log])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return logged


def end_with_parent() -> None:
    """Ends this process with the demo that started it, also where the demo had no time to: its pipe is our input."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main(kind: str, policy_path: str) -> None:
    """Serves until it is terminated."""
    from sidecar.policy.compiler import load

    end_with_parent()
    policy = replace(load(policy_path), store=None)  # a pool in a store is none for a demo to play with
    emulator = emulated_engine(policy)
    app: ASGIApp = AdmissionMiddleware(emulator.app, policy) if kind == "admission" else emulator.app
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(with_log(emulator, app), access_log=False, log_level="warning", server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:3])
