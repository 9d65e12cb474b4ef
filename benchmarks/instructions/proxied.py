"""Counted program: `sidecar serve` as a process, with its client and its engine in this process.

    python -m benchmarks.instructions.proxied SERVE-ARGUMENTS

runs `sidecar serve` with marks: SIGUSR1 begins a counted part, SIGUSR2 ends it, and each answers with a line on
standard output. `run` starts that under a counter and sends the requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.instructions import marks
from benchmarks.instructions.counters import IDLE
from benchmarks.load import exchange, post

ENDS_WITHIN_S = 900
WARM_UP = 200
"""Requests, and chunks of the stream, before the first mark."""
IDLE_S = 10.0
_MARKED = b"marked\n"


class Engine:
    """An engine that answers whole requests at once, and sends a chunk of a stream whenever it is asked to."""

    def __init__(self, answer: bytes, chunk: bytes) -> None:
        self._answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            len(answer),
            answer,
        )
        self._frame = b"%x\r\n%s\r\n" % (len(chunk), chunk)
        self._stream: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one connection's requests."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1])) if length else b""
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                elif b'"stream": true' in body:
                    self._stream = writer
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                    )
                else:
                    writer.write(self._answer)
        writer.close()

    def send_chunk(self) -> None:
        """Sends one chunk of the stream, in one write."""
        if self._stream is None:
            raise RuntimeError("no stream has begun")
        self._stream.write(self._frame)

    def end_stream(self) -> None:
        """Ends the stream."""
        if self._stream is not None:
            self._stream.write(b"0\r\n\r\n")
            self._stream = None


class Proxy:
    """A running `sidecar serve`."""

    def __init__(self, process: asyncio.subprocess.Process, pid: int, port: int) -> None:
        self.process = process
        self.pid = pid
        self.port = port

    async def count(self, part: Callable[[int], Awaitable[None]], count: int, *, warm_up: int = WARM_UP) -> float:
        """Warms one part up, then repeats it `count` times between two marks. Returns the seconds between them."""
        await part(warm_up)
        await self._mark(signal.SIGUSR1)
        began_s = time.monotonic()
        await part(count)
        await self._mark(signal.SIGUSR2)
        return time.monotonic() - began_s

    async def _mark(self, mark: signal.Signals) -> None:
        os.kill(self.pid, mark)
        await line_of(self.process, re.compile(_MARKED))


async def line_of(process: asyncio.subprocess.Process, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
    """The next line of a process that matches. Raises RuntimeError where it ends before."""
    if process.stdout is None:
        raise RuntimeError("the process has no pipe")
    while line := await process.stdout.readline():
        if found := pattern.search(line):
            return found
    raise RuntimeError(f"sidecar serve ended before a line like {pattern.pattern!r}")


async def drive(proxy: Proxy, engine: Engine, parts: Mapping[str, int]) -> dict[str, float]:
    """Sends the requests of each part over one connection. Returns the seconds that each part took."""
    from benchmarks.overhead import BODY, HEADERS, REQUEST

    stream = post("/v1/chat/completions", BODY.replace(b"{", b'{"stream": true, ', 1), HEADERS)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

    async def requests(repetitions: int) -> None:
        for _ in range(repetitions):
            status, _ = await exchange(reader, writer, REQUEST)
            if status != 200:
                raise RuntimeError(f"sidecar serve answered with status {status}")

    async def chunks(repetitions: int) -> None:
        for _ in range(repetitions):
            engine.send_chunk()
            await reader.readuntil(b"\n\n")

    seconds = {}
    for name, count in parts.items():
        if name == "proxied":
            seconds[name] = await proxy.count(requests, count)
        elif name == IDLE:
            seconds[name] = await proxy.count(lambda repetitions: asyncio.sleep(repetitions * IDLE_S), 1, warm_up=0)
        else:
            writer.write(stream)
            await reader.readuntil(b"\r\n\r\n")
            seconds[name] = await proxy.count(chunks, count)
            engine.end_stream()
            await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return seconds


async def _run(
    prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int], policy: Path
) -> dict[str, float]:
    from benchmarks.overhead_apps import ANSWER, CHUNK

    engine = Engine(ANSWER, CHUNK)
    listener = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    words = ["--upstream", url, "--policy", str(policy), "--port", "0", "--admin-port", "0"]
    command = [*prefix, sys.executable, "-m", "benchmarks.instructions.proxied", *words]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        try:
            pid = int((await line_of(process, re.compile(rb"^pid (\d+)")))[1])
            port = int((await line_of(process, re.compile(rb"http://127\.0\.0\.1:(\d+)")))[1])
            seconds = await drive(Proxy(process, pid, port), engine, parts)
            os.kill(pid, signal.SIGTERM)
            await process.wait()
        except (RuntimeError, asyncio.IncompleteReadError) as error:
            log.seek(0)
            raise RuntimeError(f"{error}\n{log.read().decode(errors='replace')[-4000:]}") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    listener.close()
    return seconds


def run(
    prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int], *, policy: Path
) -> dict[str, float]:
    """Runs `sidecar serve` under the command `prefix`, and sends it the requests of `parts`: see `counters.Run`."""
    return asyncio.run(asyncio.wait_for(_run(prefix, environment, parts, policy), ENDS_WITHIN_S))


def serve(arguments: Sequence[str]) -> int:
    """Runs `sidecar serve` with marks."""
    from sidecar.cli import main

    def mark(number: int, _frame: object) -> None:
        (marks.begin if number == signal.SIGUSR1 else marks.end)()
        os.write(1, _MARKED)

    signal.signal(signal.SIGUSR1, mark)
    signal.signal(signal.SIGUSR2, mark)
    print(f"pid {os.getpid()}", flush=True)
    return main(["serve", *arguments])


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
