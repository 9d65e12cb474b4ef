"""The admin port of several workers: the supervisor's own ASGI app, which asks the workers.

Health, readiness, state, metrics and engines are of all workers. A request's explanation comes from the one that served
it. Every other page comes from one of them: it shows the pool as it stands, and what that worker saw of the past.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin.answers import FRESH, Liveness, Readiness, json_answer, refused
from sidecar.admission.engine_pages import fetch_page
from sidecar.admission.handover import INTERNAL_REQUEST
from sidecar.engines.pages import Page, Unread
from sidecar.errors import AdmissionError, EngineUnreachable, ResponseCut
from sidecar.workers.crew import Crew
from sidecar.workers.documents import Document, merged_engines, merged_state
from sidecar.workers.metrics import OPEN_METRICS, WorkersMetrics
from sidecar.workers.process import WorkerProcess, WorkerState

_OF_A_REQUEST = re.compile(r"(/models/.+)?/(requests?)(/.*)?")
_SUM = re.compile(r"(?:/models/.+)?/(metrics|engines)")


class WorkerPages:
    """An ASGI app."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._metrics = WorkersMetrics()
        self._scraping = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP scope."""
        answer = await self._answer(Request(scope, receive))
        scope = {**scope, "extensions": {INTERNAL_REQUEST: {}}}  # for a worker
        try:
            await answer(scope, receive, send)
        except ResponseCut:  # the worker has ended; a live page connects again
            await send({"type": "http.response.body", "body": b""})
        except EngineUnreachable:  # it has just ended
            await _no_worker()(scope, receive, send)
        except AdmissionError as error:  # it cannot be relayed
            await refused(error.status, error.code, error.message)(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        """The answer of the supervisor itself, or the pages of the worker that has it."""
        path = request.scope["path"]  # `request.url` has the one that the `Host` says (Starlette 0.49 to 1.0)
        if request.method in ("GET", "HEAD"):
            if path == "/healthz":
                return json_answer(Liveness())
            if path in ("/readyz", "/state"):
                answers = [_document(answer) for answer in await _ask_all(self._crew.workers, path)]
                return self._readyz(answers) if path == "/readyz" else self._state(answers)
            if summed := _SUM.fullmatch(path):
                return await self._summed(request, path, summed[1])
        worker = await self._one_for(request)
        return _no_worker() if worker is None else worker.pages

    def _state(self, answers: Sequence[Document | None]) -> Response:
        return JSONResponse(merged_state([_row(worker) for worker in self._crew.workers], answers))

    def _readyz(self, answers: Sequence[Document | None]) -> Response:
        """Ready where every worker that listens is ready: any of them gets the next request."""
        found = list(zip(self._crew.workers, answers, strict=True))
        serving = [answer for worker, answer in found if worker.is_serving and answer]
        reasons = [reason for answer in serving for reason in answer["reasons"]]
        if not serving:
            reasons = ["draining" if self._crew.ending.is_set() else "no worker serves"]
        notices = [notice for answer in serving for notice in answer["notices"]]
        notices += [_why_not(*each) for each in found if not (each[0].is_serving and each[1])]
        status: Literal["ready", "not ready"] = "not ready" if reasons else "ready"
        answer = Readiness(status, list(dict.fromkeys(reasons)), list(dict.fromkeys(notices)))
        return json_answer(answer, 503 if reasons else 200)

    async def _summed(self, request: Request, path: str, page: str) -> ASGIApp:
        """The sum of the workers' pages, or those of one that refuses it."""
        async with self._scraping:
            serving = self._crew.serving()
            pids, answers = [worker.pid for worker in serving], await _ask_all(serving, path, OPEN_METRICS)
            for worker, answer in zip(serving, answers, strict=True):
                if answer is not None and answer.status != 200:
                    return worker.pages
            found = {pid: answer for pid, answer in zip(pids, answers, strict=True) if pid and answer}
            if page == "engines":
                documents = [json.loads(answer.text) for answer in found.values()]
                return JSONResponse(merged_engines(documents), headers=FRESH) if found else _no_worker()
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
            # In a thread: reading them takes milliseconds for each.
            text = await asyncio.to_thread(self._scrape, found, encode)
        return Response(text, headers={"content-type": content_type})

    def _scrape(self, found: Mapping[int, Page], encode: Callable[[WorkersMetrics], bytes]) -> bytes:
        workers = self._crew.workers
        self._metrics.note(
            {pid: answer.text for pid, answer in found.items()},
            [worker.pid for worker in workers],
            serving=len(self._crew.serving()),
            restarts=sum(worker.restarts.total for worker in workers),
        )
        return encode(self._metrics)

    async def _one_for(self, request: Request) -> WorkerProcess | None:
        """A worker that serves. Where a request is asked for, the first that knows it."""
        serving = self._crew.serving()
        path, query = request.scope["path"], request.scope["query_string"]
        if _OF_A_REQUEST.fullmatch(path):
            answers = await _ask_all(serving, path, query=query)
            for worker, answer in zip(serving, answers, strict=True):
                if answer is not None and answer.status != 404:
                    return worker
        return serving[0] if serving else None


async def _ask_all(
    workers: Sequence[WorkerProcess], path: str, accept: str = "*/*", query: bytes = b""
) -> Sequence[Page | None]:
    """One admin page of each; None where it does not answer."""
    return await asyncio.gather(*(_ask(worker, path, accept, query) for worker in workers))


async def _ask(worker: WorkerProcess, path: str, accept: str, query: bytes) -> Page | None:
    if worker.state not in (WorkerState.STARTED, WorkerState.SERVING):
        return None
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query,
        "headers": [(b"accept", accept.encode())],
        "extensions": {INTERNAL_REQUEST: {}},
    }
    try:
        return await fetch_page(worker.pages, scope)
    except Unread:
        return None


def _document(answer: Page | None) -> dict[str, Any] | None:
    return None if answer is None else json.loads(answer.text)


def _row(worker: WorkerProcess) -> Document:
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
