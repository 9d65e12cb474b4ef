"""An admission controller that shows everything: its events, the requests that its app got, and what it still holds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar.admission.controller import AdmissionController, Monitor, Services
from sidecar.events import (
    Admitted,
    AppTrace,
    Classified,
    Event,
    Headers,
    Observed,
    Observer,
    Queued,
    Received,
    Refused,
    Settled,
    UnguardedRequest,
)  # fmt: skip
from sidecar.lengths.token_estimates import Estimator
from sidecar.middleware import serve_scope
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.proxy import EngineProxy
from tests.support.serving import Served, serving
from tests.support.wire import exchange, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KEYS = {"acme": "sk-acme", "nightly": "sk-nightly"}
"""Of the two tenants: `acme` gets normal and may ask for high, `nightly` gets batch and nothing better."""

POOL = """\
engine: {engine}
capacity: {{tokens: 100k, requests: {requests}}}
tiers:
  critical: {{}}
  high: {{}}
  normal: {{queue: {{max_wait: {max_wait}{of_normal}}}}}
  batch: {{queue: {{max_requests: {max_requests}{deadline}}}}}
anonymous: normal
endpoints:
  /v1/chat/completions: {{}}
  /v1/completions: {{}}
  /v1/responses: {{}}
  /v1/messages: {{}}
  /v1/embeddings: {{}}
  /v1/batch/completions: {{tier: batch, forward_to: /v1/completions}}
tenants: tenants/*.yaml
max_body: {max_body}
body_timeout: {body_timeout}
disconnect_grace: {grace}
"""
_DEFAULTS = {
    "engine": "none",
    "requests": "4",
    "max_wait": "30s",
    "max_requests": "1000",
    "of_normal": "",
    "deadline": "",
    "max_body": "64KiB",
    "body_timeout": "10s",
    "grace": "2s",
}


def write_policy(folder: Path, more: str = "", **settings: str) -> Path:
    """Writes a pool's file and its two tenants. `settings` fill in `POOL`, `more` is added to it.

    Those called after a tenant are added to its file.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "policy.yaml"
    path.write_text(POOL.format(**{**_DEFAULTS, **settings}) + more)
    (folder / "tenants").mkdir(exist_ok=True)
    for name, tier, best in (("acme", "normal", "high"), ("nightly", "batch", "batch")):
        digest = hashlib.sha256(KEYS[name].encode()).hexdigest()
        text = f'tenant: {name}\nkeys: ["sha256:{digest}"]\ntier: {tier}\nmax_tier: {best}\n'
        text += settings.get(name, "")
        (folder / "tenants" / f"{name}.yaml").write_text(text)
    return path


def policy(more: str = "", **settings: str) -> Policy:
    """The same, loaded."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write_policy(Path(folder), more, **settings))


def key(tenant: str) -> str:
    """The header with which a tenant shows its key."""
    return f"authorization: Bearer {KEYS[tenant]}"


# The events

_IN_ORDER = re.compile(
    "((Classified )?(Queued (Risen )*)?Refused)"  # or admitted, perhaps preempted and admitted again, and settled
    "|(Classified (Queued (Risen )*)?Admitted ((Replayed )?Preempted Queued (Risen )*Admitted )*"
    "((Replayed )?Preempted Queued (Risen )*|(FirstByte )?)Settled)"
)


@dataclass
class Story:
    """All events of one request."""

    received: Received
    events: list[Event] = field(default_factory=list)

    def headers(self) -> Headers:
        return ()

    def app_trace(self) -> AppTrace | None:
        return None

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def one(self, kind: type[Any]) -> Any:
        """The only event of its kind."""
        (found,) = (event for event in self.events if isinstance(event, kind))
        return found

    @property
    def kinds(self) -> list[str]:
        """The events' names, in order."""
        return [type(event).__name__ for event in self.events]

    @property
    def end(self) -> Refused | Settled:
        """How it ended. Fails where it did not, or ended twice, or an event came after the end."""
        ends = [event for event in self.events if isinstance(event, Refused | Settled)]
        assert len(ends) == 1, self.kinds
        assert self.events[-1] is ends[0], self.kinds
        return ends[0]

    def check(self) -> None:
        """That the events come in their order, and times never run back."""
        kinds = self.kinds
        assert _IN_ORDER.fullmatch(" ".join(kinds)), kinds
        ends_refused = isinstance(self.end, Refused)
        assert ends_refused != any(isinstance(event, Admitted) for event in self.events), kinds
        times = [self.received.at_us, *(event.at_us for event in self.events)]
        assert times == sorted(times), kinds
        if not ends_refused:
            assert self.one(Classified).tokens >= 1
            first = next(event for event in self.events if isinstance(event, Admitted))
            assert (first.queue_wait_us > 0) <= any(isinstance(event, Queued) for event in self.events)


class Recorder:
    """An observer that keeps every story."""

    def __init__(self) -> None:
        self.stories: list[Story] = []

    def listens(self) -> bool:
        return True

    def follows(self) -> bool:
        return True

    def received(self, event: Received) -> Story:
        self.stories.append(Story(event))
        return self.stories[-1]

    def check(self) -> None:
        """That every story is whole."""
        for story in self.stories:
            story.check()

    @property
    def ends(self) -> list[str]:
        """A word for how each request ended: an error's code or an outcome."""
        return [end.code if isinstance(end := story.end, Refused) else end.outcome.value for story in self.stories]


# The app


@dataclass
class Seen:
    """One request as the app got it."""

    scope: Mapping[str, Any]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def all(self, name: bytes) -> list[bytes]:
        """Every value of a header."""
        return [value for found, value in self.scope["headers"] if found == name]


class App:
    """Records what it is given. With `is_held` a request is answered when `release` is called, in order of arrival."""

    def __init__(self, *, is_held: bool = False, answer: bytes = b'{"ok":true}') -> None:
        self.seen: list[Seen] = []
        self.others: list[str] = []
        self.is_held = is_held
        self.answer = answer
        self._turns = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            self.others.append(scope["type"])
            await _other(scope, receive, send)
            return
        self.seen.append(Seen(scope, await whole_body(receive)))
        if self.is_held:
            await self._turns.acquire()
        await answer(send, self.answer)

    def release(self, count: int = 1) -> None:
        """Lets that many requests be answered."""
        for _ in range(count):
            self._turns.release()


async def _other(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            message = await receive()
            await send({"type": message["type"] + ".complete"})
    else:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hello"})
        await send({"type": "websocket.close"})


async def whole_body(receive: Any) -> bytes:
    """Reads a request's body."""
    body = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        body += message["body"]
        if not message["more_body"]:
            return body


async def start(send: Any, status: int = 200, content_type: bytes = b"application/json") -> None:
    """Begins a response."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})


async def chunk(send: Any, body: bytes, *, more: bool = True) -> None:
    """A part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def answer(send: Any, body: bytes, status: int = 200) -> None:
    """A whole response."""
    await start(send, status)
    await chunk(send, body, more=False)


# The controller


class TestedMiddleware(AdmissionController):
    """A controller that is its own ASGI app, for tests that need nothing of what `AdmissionMiddleware` adds.

    Its engine's dialect is the policy's, and nothing is learned yet, where a test names no other.
    """

    __test__ = False

    def __init__(  # the services that a test names, and its observers
        self,
        app: Any,
        *,
        policy: Policy,
        observer: Observer | None = None,
        observed: Callable[[Observed], None] | None = None,
        **services: Any,
    ) -> None:
        named = {"dialect": policy.engine(policy.carrier), "estimator": Estimator(), **services}
        super().__init__(Services(app=app, monitor=lambda _: Monitor(observer, observed), **named), policy)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await serve_scope(self, self.app, scope, receive, send)


def monitor(
    controller: AdmissionController,
    observer: Observer | None = None,
    observed: Callable[[Observed], None] | None = None,
    unguarded: Callable[[UnguardedRequest], None] | None = None,
) -> None:
    """Other observers in place of those that the controller was made with; without one, the same for requests."""
    monitor = Monitor(observer or controller.observer, observed, unguarded)
    object.__setattr__(controller, "monitor", monitor)
    object.__setattr__(controller, "observer", monitor.observer)


def recorded(controller: AdmissionController) -> Recorder:
    """A recorder of the controller's requests from now on."""
    recorder = Recorder()
    monitor(controller, recorder)
    return recorder


class Guarded:
    """A controller around an app, with its observer."""

    patience_s = 60.0

    def __init__(self, app: Any, policy: Policy) -> None:
        self.recorder = Recorder()
        self.pool = Pool(policy)
        self.sidecar = TestedMiddleware(
            app, policy=policy, pool=self.pool, observer=self.recorder, is_proxied=isinstance(app, EngineProxy)
        )
        self.served: Served | None = None

    @property
    def port(self) -> int:
        return self.served.port

    @property
    def leases(self) -> int:
        return int(str(self.pool.state()["leases"]))

    @property
    def waiting(self) -> int:
        return int(str(self.pool.state()["waiting"]))

    async def until(self, *, leases: int | None = None, waiting: int | None = None, stories: int | None = None) -> None:
        """Waits until the pool, or the observer, stands so; fails after `patience_s`."""
        wanted = (leases, waiting, stories)
        end_s = time.monotonic() + self.patience_s
        while True:
            now = (self.leases, self.waiting, len(self.recorder.stories))
            if all(want is None or want == is_now for want, is_now in zip(wanted, now, strict=True)):
                return
            if time.monotonic() > end_s:
                raise AssertionError(f"leases, waiting, stories: wanted {wanted}, got {now}")
            await asyncio.sleep(0.001)

    async def ask(self, body: Any = None, *headers: str, path: str = CHAT) -> Answer:
        """One request on a connection of its own. `body` is bytes, or JSON to be; by default the smallest there is."""
        raw = body if isinstance(body, bytes) else json.dumps(chat() if body is None else body).encode()
        return Answer.parsed(await asyncio.wait_for(exchange(self.port, post(path, raw, *headers)), 20))

    async def nothing_left(self) -> None:
        """Fails unless no lease, ticket, task or story is open, at once or soon.

        What keeps its room for the engine's abort latency, 4.5 s by default, gives it up: `test_pending_aborts` waits.
        """
        end_s = time.monotonic() + self.patience_s
        while (self.leases or len(self.sidecar.watchdog) or tasks_of_ours()) and time.monotonic() < end_s:
            await self.sidecar.pending_aborts.close(waits=False)
            await asyncio.sleep(0.001)
        await self.until(leases=0, waiting=0)
        assert len(self.sidecar.watchdog) == 0
        assert tasks_of_ours() == []
        assert self.pool._requests.all() == []
        self.recorder.check()


def tasks_of_ours() -> list[str]:
    """The middleware's own tasks that are not done."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return [name for name in names if name.startswith(("RequestHandler.", "TestedMiddleware.", "ClientChannel."))]


@asynccontextmanager
async def guarding(app: Any, with_policy: Policy | None = None, **settings: Any) -> AsyncIterator[Guarded]:
    """Serves `app` behind the middleware with uvicorn; at the end of the block nothing may be left of any request."""
    guarded = Guarded(app, with_policy or policy())
    async with serving(guarded.sidecar, **settings) as guarded.served:
        yield guarded
        await guarded.nothing_left()


def chat(**members: Any) -> dict[str, Any]:
    """A small chat request."""
    return {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **members}


# What came back


@dataclass
class Answer:
    """A response, after removing chunks."""

    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def parsed(cls, raw: bytes) -> Answer:
        head, _, body = raw.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        pairs = (line.decode("latin-1").split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(_unchunked(body))
        return cls(int(status.split()[1]), headers, body)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> Answer:
        """Reads one response with a Content-Length, and leaves the connection open."""
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        answer = cls.parsed(head)
        answer.body = await asyncio.wait_for(reader.readexactly(int(answer.headers["content-length"])), 5)
        return answer

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code."""
        return str(self.json["error"]["code"])

    @property
    def message(self) -> str:
        """The error's sentence."""
        return str(self.json["error"]["message"])

    def is_error(self, status: int, code: str, *words: str) -> bool:
        """Fails, saying why, unless it is this error in OpenAI's shape, with these words in its sentence."""
        assert (self.status, self.code) == (status, code), self
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        missing = [word for word in words if word not in error["message"]]
        assert not missing, (missing, error["message"])
        return True


def _unchunked(body: bytes) -> Iterable[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        yield rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]


# Without a server


class Caller:
    """One request made straight to an ASGI app: the test plays the server."""

    def __init__(self, app: Any, body: bytes | None = None, *, path: str = CHAT, **scope: Any) -> None:
        self.sent: list[Any] = []
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.receivers = self.most_receivers = 0
        self.has_left = False
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            **scope,
        }
        self._app = app
        if body is not None:
            self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    def begin(self) -> asyncio.Task[None]:
        """Calls the app in a task of its own."""
        return asyncio.create_task(self._app(self.scope, self._receive, self._send))

    async def run(self) -> None:
        """Calls the app and waits for its end."""
        await self._app(self.scope, self._receive, self._send)

    def leave(self) -> None:
        """Disconnects."""
        self.has_left = True
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def json(self) -> Any:
        return json.loads(b"".join(message.get("body", b"") for message in self.sent[1:]))

    async def _receive(self) -> Any:
        self.receivers += 1
        self.most_receivers = max(self.most_receivers, self.receivers)
        try:
            message = await self.incoming.get()
        finally:
            self.receivers -= 1
        if message["type"] == "http.disconnect":
            self.incoming.put_nowait(message)  # as servers do: said again to every later call
        return message

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


SMALL = json.dumps(chat()).encode()
