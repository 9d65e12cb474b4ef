"""Real servers behind a real `sidecar serve`, for bytes that two servers might read differently."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.commands import address, command
from tests.support.engine import Connection, Received, raw_engine
from tests.support.in_process import in_thread
from tests.support.middleware import write_policy
from tests.support.serving import serving

RAW, REAL = "raw", ("h11", "httptools")
"""A server that only records, and those that uvicorn has."""
WITHIN_S = 10.0
LAST = b"GET /last HTTP/1.1\r\nhost: sidecar\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Seen:
    """One request as the server behind the sidecar understood it. Headers are in order, names in lower case."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def all(self, name: bytes) -> list[bytes]:
        """Every value of a header."""
        return [value for found, value in self.headers if found == name]


@dataclass
class Behind:
    """A sidecar and the server behind it. `seen` is all that the server got, in order."""

    kind: str
    port: int = 0
    url: str = ""
    admin: str = ""
    seen: list[Seen] = field(default_factory=list)

    def send(self, request: bytes, last: bytes = LAST) -> bytes:
        """Sends bytes on a connection of their own and, behind the first answer, `last`; returns all that came back.

        The sidecar closes behind `last`, or before, if it refuses what came first.
        """
        answer = b""
        with socket.create_connection(("127.0.0.1", self.port), WITHIN_S) as connection:
            connection.settimeout(WITHIN_S)
            try:
                connection.sendall(request)
                while not _is_answered(answer):
                    if not (part := connection.recv(65536)):
                        return answer
                    answer += part
                connection.sendall(last)
                while part := connection.recv(65536):
                    answer += part
            except ConnectionError:
                pass  # the sidecar closes behind a refusal, also while we still send
        return answer

    def echo(self, seen: Seen) -> bytes:
        """What the server answers a request with: which one it was."""
        return b"<%s %s %d>" % (seen.method, seen.target, len(seen.body))


def _is_answered(answer: bytes) -> bool:
    """Whether the first response is whole; an interim one is none."""
    while answer.startswith(b"HTTP/1.1 1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, end, body = answer.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(end) and (found is None or len(body) >= int(found[1]))


def _recorder(behind: Behind) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            for _ in range(2):
                message = await receive()
                await send({"type": message["type"] + ".complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # broken off: never a whole request
            body, more = body + message.get("body", b""), message.get("more_body", False)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        seen = Seen(scope["method"].encode(), target, tuple(scope["headers"]), body)
        behind.seen.append(seen)
        text = behind.echo(seen)
        headers = [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text if scope["method"] != "HEAD" else b""})

    return app


@asynccontextmanager
async def _raw(behind: Behind) -> AsyncIterator[Any]:
    async def script(connection: Connection) -> None:
        while True:
            request: Received = await connection.request()
            method, target, _ = request.head.split(b" ", 2)
            seen = Seen(method, target, tuple(request.headers), request.body)
            behind.seen.append(seen)
            text = b"" if method == b"HEAD" else behind.echo(seen)
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))

    async with raw_engine(script) as engine:
        yield engine


def _server(behind: Behind) -> AbstractAsyncContextManager[Any]:
    return _raw(behind) if behind.kind == RAW else serving(_recorder(behind), http=behind.kind)


@contextmanager
def standing(
    kind: str, folder: Path, more: str = "", *, in_engines: bool = False, **variables: str
) -> Iterator[Behind]:
    """`sidecar serve` before a server of that kind; `more` is added to its policy.

    `in_engines`: the policy names the server as its engine `e0`.
    """
    behind = Behind(kind)
    with in_thread(_server(behind)) as server:
        upstream = server.url
        path = write_policy(folder, more, engine="vllm", max_body="1MiB")
        if in_engines:
            engines = f"engines:\n  static: [{{name: e0, url: {upstream}}}]\n  capacity: "
            path.write_text(path.read_text().replace("capacity: ", engines))
        to = () if in_engines else ("--upstream", upstream)
        served = ("serve", *to, "--policy", str(path), "--port", "0", "--admin-port", "0")
        # No probe of the engine's health: these tests count every request.
        with command(*served, SIDECAR_ENGINE_CHECK="off", **variables) as process:
            behind.url = address(process)
            behind.port = int(behind.url.rpartition(":")[2])
            behind.admin = address(process)
            yield behind
