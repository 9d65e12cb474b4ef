"""A file that granian sends itself, because the app only says its path (`http.response.pathsend`)."""

from __future__ import annotations

import importlib.util
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.server.launched import WITHIN_S, running, write_app
from tests.support.middleware import key
from tests.support.redis_servers import free_port

SPEECH = "/v1/audio/speech"
APP = f"""\
from starlette.applications import Starlette
from starlette.responses import FileResponse
from starlette.routing import Route
from sidecar import AdmissionMiddleware


async def speech(request):
    assert "http.response.pathsend" in request.scope["extensions"]
    return FileResponse("speech.mp3")


app = AdmissionMiddleware(Starlette(routes=[Route("{SPEECH}", speech, methods=["POST"])]), policy="policy.yaml")
"""


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("granian") is None, reason="granian is not installed: pip install -e '.[dev]'"
)
def test_a_file_that_granian_sends_by_its_path_completes_its_request(tmp_path: Path) -> None:
    write_app(tmp_path, APP)
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        policy.read_text().replace("endpoints:\n", f"endpoints:\n  {SPEECH}: {{api: generic, tokens: 9}}\n")
    )
    (tmp_path / "speech.mp3").write_bytes(b"x" * 300_000)
    port = free_port()
    arguments = ("granian", "--interface", "asgi", "main:app", "--port", str(port))
    with running(tmp_path, *arguments, SIDECAR_ACCESS_LOG="all", SIDECAR_LOG_LEVEL="info") as server:
        status, tier, body = answer_of(port)
        assert (status, tier, body) == (200, "normal", b"x" * 300_000)
        assert "failed" not in server.until("completed")


def answer_of(port: int) -> tuple[int, str | None, bytes]:
    """The status, tier and body that a client gets, as soon as the server listens."""
    name, value = key("acme").split(": ")
    ends_s = time.monotonic() + WITHIN_S
    while True:
        with closing(HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)) as client:
            try:
                client.request("POST", SPEECH, b'{"input": "hi"}', {name: value, "content-type": "application/json"})
            except ConnectionRefusedError:
                assert time.monotonic() < ends_s
                time.sleep(0.1)
            else:
                answer = client.getresponse()
                return answer.status, answer.getheader("x-admission-tier"), answer.read()
