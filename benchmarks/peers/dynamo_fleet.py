"""Dynamo before emulated engines: its frontend with the KV router, and a worker of ours for each engine.

    python -m benchmarks.peers.dynamo_fleet --python DYNAMO_PYTHON --port PORT ENGINE_URL...

Run by `real.py`. Discovery is by files, requests go over TCP, so neither etcd nor NATS is needed. Where a worker ends,
because its engine has, another is started as soon as the engine answers again, as an orchestrator does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from benchmarks.peers.four_byte_tokenizer import write_model

WORKER = Path(__file__).with_name("dynamo_worker.py")
LOOK_EVERY_S = 0.5
LOCAL = {
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SELF_HOST_METADATA": "0",
}


def main() -> int:
    """Runs until SIGTERM, or the frontend's end."""
    parser = argparse.ArgumentParser(description="Dynamo's KV router before emulated engines")
    parser.add_argument("--python", required=True, help="the interpreter of Dynamo's environment")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("engines", nargs="+", metavar="ENGINE_URL")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="dynamo-") as folder:
        model = str(write_model(Path(folder) / "model"))
        environment = {**os.environ, **LOCAL, "DYN_FILE_KV": f"{folder}/discovery", "DYN_LOG": "warn"}
        line = [args.python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(args.port)]
        line += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        line += ["--router-mode", "kv"]
        frontend = subprocess.Popen(line, env=environment)
        try:
            while frontend.poll() is None:
                for url in args.engines:
                    if (url not in processes or processes[url].poll() is not None) and _answers(url):
                        processes[url] = _worker(args.python, url, model, environment)
                time.sleep(LOOK_EVERY_S)
        finally:
            for process in (frontend, *processes.values()):
                process.kill()
            for process in (frontend, *processes.values()):
                process.wait()
    return frontend.returncode


def _worker(python: str, engine: str, model: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([python, str(WORKER), "--engine", engine, "--model-path", model], env=environment)


def _answers(engine: str) -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{engine}/health", timeout=2.0):
        return True
    return False


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main())
