"""A sidecar to throw bytes at: served on a real socket, watched for whatever must never happen."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from sidecar.server import http_protocol
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.security.responses import Response, responses
from tests.support.middleware import Guarded, policy
from tests.support.serving import serving
from tests.support.wire import connected

QUICK_S = 0.05
"""For a head, a body and an idle connection: what never ends must end so soon."""
WITHIN_S = 20.0
"""For one input, of which a busy machine may take many at once. One that takes longer hangs."""
OURS = {400, 401, 404, 408, 413, 415, 429, 431, 503}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers everything alike; of what is not guarded it reads no body, as a server's own 404 would not."""
    if scope.get("admission") is not None:
        is_as_granted(scope["path"], scope["headers"])
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass
        await asyncio.sleep(0.003)  # long enough for others to wait, and for some to wait too long
    body = b"" if scope["method"] == "HEAD" else b"ok"
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def is_as_granted(path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Fails where a guarded request has reached the app with a key, or with a priority that is not the sidecar's."""
    seen = [(name, value) for name, value in headers if name.startswith((b"x-vllm", b"x-override", b"x-dynamo"))]
    granted = [[(b"x-vllm-priority", b"%d" % priority)] for priority in (0, 10, 20, 30)]
    assert seen == [] if "embeddings" in path else seen in granted, headers  # theirs is in the body
    assert [name for name, _ in headers if name == b"x-api-key"] == [], headers
    assert not any(name == b"authorization" and value.lower().startswith(b"bearer") for name, value in headers), headers


class Trouble(logging.Handler):
    """Keeps every record that tells of an exception or an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.records.append(record)


class FuzzedSidecar:
    """One sidecar, in an event loop that is run as long as there is something to answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, guarded: Guarded, trouble: Trouble) -> None:
        self._loop = loop
        self._guarded = guarded
        self._trouble = trouble

    def answers(self, inputs: Sequence[bytes]) -> list[bytes]:
        """What came back for each, each on a connection of its own, all at once."""

        async def all_of_them() -> list[bytes]:
            return await asyncio.gather(*(self._answer(each) for each in inputs))

        return self._loop.run_until_complete(all_of_them())

    async def _answer(self, sent: bytes) -> bytes:
        answer = b""
        async with connected(self._guarded.port) as (reader, writer):
            try:
                writer.write(sent)
                while part := await asyncio.wait_for(reader.read(65536), WITHIN_S):
                    answer += part
            except ConnectionError:
                pass  # the sidecar closes behind a refusal, also where more was to come
        return answer

    def check(self, inputs: Sequence[bytes]) -> list[list[Response]]:
        """Sends them all. Fails unless each is answered in order, refused in our shape, and nothing is left behind."""
        found = [is_in_order(sent, raw) for sent, raw in zip(inputs, self.answers(inputs), strict=True)]
        self._loop.run_until_complete(self._guarded.nothing_left())
        assert self._guarded.sidecar.under_way == 0
        self._guarded.recorder.stories.clear()
        records, self._trouble.records = self._trouble.records, []
        assert [record.getMessage() for record in records] == [], inputs
        return found


def is_in_order(sent: bytes, raw: bytes) -> list[Response]:
    """What a strict client makes of an answer. Fails where it is none, or an error in no one's shape."""
    found = responses(raw, may_be_to_head=b"HEAD " in sent)
    for response in found:
        assert response.status in {200, *OURS}, (sent, raw)
        if response.status != 200 and (response.body or b"HEAD " not in sent):
            is_error(response, sent)
    return found


def is_error(response: Response, sent: bytes) -> None:
    """Fails unless the body is OpenAI's shape, or Anthropic's."""
    body = json.loads(response.body)
    assert response.all(b"content-type") == [b"application/json"], sent
    error = body["error"]
    if body.get("type") == "error":
        assert set(error) == {"type", "message", "code"}, sent
    else:
        assert set(body) == {"error"}, sent
        assert set(error) == {"message", "type", "param", "code"}, sent
    assert error["message"], sent
    assert error["code"], sent
    assert response.status != 503 or response.all(b"retry-after"), sent


@contextmanager
def fuzzed_sidecar(around: Any = app, quick_s: float = QUICK_S) -> Iterator[FuzzedSidecar]:
    """Serves one. What must end by itself ends after `quick_s` here."""
    trouble = Trouble()
    before, http_protocol.HEAD_WITHIN_S = http_protocol.HEAD_WITHIN_S, quick_s
    logging.getLogger().addHandler(trouble)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    quick = {
        "body_timeout": f"{round(quick_s * 1000)}ms",
        "max_wait": "20ms",
        "max_requests": "1",
        "deadline": ", max_deadline: 30ms",
        "grace": "10ms",
        "requests": "2",
    }
    guarded = Guarded(around, policy(engine="vllm", max_body="8KiB", **quick))

    async def serve() -> None:
        settings: dict[str, Any] = {"http": BoundedHttpProtocol, "lifespan": "off", "timeout_keep_alive": quick_s}
        guarded.served = await stack.enter_async_context(serving(guarded.sidecar, log_config=None, **settings))

    try:
        loop.run_until_complete(serve())
        yield FuzzedSidecar(loop, guarded, trouble)
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()
        logging.getLogger().removeHandler(trouble)
        http_protocol.HEAD_WITHIN_S = before
