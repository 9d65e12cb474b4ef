"""The admin port of several workers: the supervisor's own ASGI app, which asks the workers.

Health, readiness, state, metrics and engines are of all workers. A request's explanation comes from the one that served
it. Every other page shows the whole pool in every worker, and comes from one of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from sidecar.admin.answers import refused
from sidecar.admin.stream import receive_disconnect
from sidecar.tasks import end
from sidecar.workers.crew import Crew
from sidecar.workers.documents import Document, merged_engines, merged_state
from sidecar.workers.metrics import OPEN_METRICS, RESTARTS, WORKERS, WorkersMetrics, counter, gauge, scraped
from sidecar.workers.process import WorkerProcess

_FRESH = {"cache-control": "no-store"}
_OF_A_REQUEST = re.compile(r"(/models/.+)?/(requests?)(/.*)?")
_METRICS = re.compile(r"(/models/.+)?/metrics")
_ENGINES = re.compile(r"(/models/.+)?/engines")
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"proxy-connection")
)


class WorkerPages:
    """An ASGI app."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._metrics = WorkersMetrics()
        self._scraping = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP scope."""
        request = Request(scope, receive)
        answer = await self._answer(request)
        if answer is None:
            await self._pass_on(request, send)
        else:
            await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """The answer of the supervisor itself; None where a worker has it."""
        path = request.url.path
        if request.method not in ("GET", "HEAD"):
            return None
        if path == "/healthz":
            return JSONResponse({"status": "alive"})
        if path == "/readyz":
            return await self._readyz()
        if path == "/state":
            return JSONResponse(merged_state(await self._states()))
        if _METRICS.fullmatch(path):
            return await self._scrape(request.headers.get("accept"))
        if _ENGINES.fullmatch(path):
            return await self._engines(path)
        return None

    async def _readyz(self) -> Response:
        """Ready where every worker that listens is ready: any of them gets the next request."""
        workers = self._crew.workers
        answers = [_document(answer) for answer in await _ask_all(workers, "/readyz")]
        serving = [answer for worker, answer in zip(workers, answers, strict=True) if worker.is_serving and answer]
        reasons = list(dict.fromkeys(reason for answer in serving for reason in answer["reasons"]))
        if not serving:
            reasons = ["draining" if self._crew.ending.is_set() else "no worker serves"]
        notices = dict.fromkeys(notice for answer in serving for notice in answer["notices"])
        notices |= dict.fromkeys(
            _why_not(worker, answer)
            for worker, answer in zip(workers, answers, strict=True)
            if not worker.is_serving or answer is None
        )
        status = "not ready" if reasons else "ready"
        body = {"status": status, "reasons": reasons, "notices": list(notices)}
        return JSONResponse(body, 503 if reasons else 200)

    async def _states(self) -> Sequence[tuple[Document, Document]]:
        workers = self._crew.workers
        serving = self._crew.serving()
        answers = dict(zip(serving, await _ask_all(serving, "/state"), strict=True))
        return [(_row(worker), _document(answers.get(worker)) or {}) for worker in workers]

    async def _scrape(self, accept: str | None) -> Response:
        async with self._scraping:
            asked = {worker.pid: worker for worker in self._crew.serving() if worker.pid is not None}
            answers = dict(zip(asked, await _ask_all(list(asked.values()), "/metrics", OPEN_METRICS), strict=True))
            found = {pid: answer for pid, answer in answers.items() if answer is not None}
            for status, body in found.values():
                if status != 200:
                    return PlainTextResponse(body, status)  # there are no metrics here, and it says why
            text, content_type = await asyncio.to_thread(
                self._text, accept, {p: body for p, (_, body) in found.items()}
            )
        return Response(text, headers={"content-type": content_type})

    def _text(self, accept: str | None, found: Mapping[int, bytes]) -> tuple[bytes, str]:
        """The sum of the workers' metrics. In a thread: reading them takes milliseconds for each."""
        self._metrics.note({pid: scraped(body.decode()) for pid, body in found.items()})
        self._metrics.end_but([worker.pid for worker in self._crew.workers if worker.pid is not None])
        restarts = sum(worker.restarts.total for worker in self._crew.workers)
        own = [
            gauge(WORKERS, "Workers that serve.", len(self._crew.serving())),
            counter(RESTARTS, "How often a worker was started again.", restarts),
        ]
        return self._metrics.text(accept, own)

    async def _engines(self, path: str) -> Response:
        answers = [answer for answer in await _ask_all(self._crew.serving(), path) if answer is not None]
        if not answers:
            return _no_worker()
        failed = [answer for answer in answers if answer[0] != 200]
        if failed:
            return Response(failed[0][1], failed[0][0], _FRESH, "application/json")
        return JSONResponse(merged_engines([json.loads(body) for _, body in answers]), headers=_FRESH)

    async def _pass_on(self, request: Request, send: Send) -> None:
        """Answers as a worker does, until one of both sides ends it: a drain may wait for minutes."""
        body = await request.body()
        left = asyncio.ensure_future(receive_disconnect(request.receive))
        relaying = asyncio.ensure_future(self._relay(request, body, send))
        try:
            await asyncio.wait((left, relaying), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(left)
            await end(relaying)

    async def _relay(self, request: Request, body: bytes, send: Send) -> None:
        """The answer of one worker. Where a request is asked for, that of the first that knows it."""
        workers, is_of_a_request = list(self._crew.serving()), _OF_A_REQUEST.fullmatch(request.url.path) is not None
        while workers:
            worker = workers.pop(0)
            try:
                answer = await _open(worker, request, body)
            except (aiohttp.ClientConnectorError, asyncio.TimeoutError):
                continue  # it has just ended
            except (aiohttp.ClientError, OSError):
                break
            async with answer:
                if answer.status == 404 and is_of_a_request and workers:
                    continue
                await _forward(answer, send)
                return
        await _no_worker()(request.scope, request.receive, send)


async def _ask_all(
    workers: Sequence[WorkerProcess], path: str, accept: str = "*/*"
) -> Sequence[tuple[int, bytes] | None]:
    return await asyncio.gather(*(worker.ask(path, accept) for worker in workers))


def _document(answer: tuple[int, bytes] | None) -> dict[str, Any] | None:
    return None if answer is None else msgspec.json.decode(answer[1], type=dict[str, Any])


def _row(worker: WorkerProcess) -> Mapping[str, object]:
    return {
        "worker": worker.number,
        "pid": worker.pid,
        "state": worker.state.value,
        "since_s": round(worker.since_s, 3),
        "restarts": worker.restarts.total,
        "reason": worker.reason or None,
    }


def _why_not(worker: WorkerProcess, answer: Document | None) -> str:
    """Why a worker takes no request, or says nothing."""
    if worker.is_serving:
        return f"worker {worker.number} does not answer"
    reason = worker.reason or "; ".join(answer["reasons"] if answer else ())
    return f"worker {worker.number} does not serve ({worker.state.value})" + (f": {reason}" if reason else "")


def _no_worker() -> Response:
    message = "no worker serves at this moment; try again"
    return refused(503, "no_worker", message, {"retry-after": "1"})


async def _open(worker: WorkerProcess, request: Request, body: bytes) -> aiohttp.ClientResponse:
    """The worker's answer, at its headers."""
    query = request.scope["query_string"]
    target = (request.scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
    headers = [(name, value) for name, value in request.headers.items() if name.encode() not in _HOP_BY_HOP]
    url = URL(f"http://worker{target}", encoded=True)
    return await worker.session.request(request.method, url, headers=headers, data=body or None, allow_redirects=False)


async def _forward(answer: aiohttp.ClientResponse, send: Send) -> None:
    """Sends an answer as it comes."""
    headers = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _HOP_BY_HOP]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    with suppress(aiohttp.ClientError):  # the worker has ended; a live page connects again
        async for part in answer.content.iter_any():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
