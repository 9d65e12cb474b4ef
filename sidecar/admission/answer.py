"""The way back of one attempt at a request: from the head of its answer to the last byte, and what it cost.

The answer passes as it comes, chunk by chunk. It is read as it passes: its first byte, its tokens, its cost, and with
them its lease grows.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextvars import Token
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Message, Scope, Send

from sidecar.admission.background import BackgroundRequest
from sidecar.admission.client import ClientChannel
from sidecar.admission.handover import Write
from sidecar.admission.intake import SizedRequest
from sidecar.admission.pending_aborts import Held, PendingAbort, PendingAborts
from sidecar.admission.request_gain import RequestGain
from sidecar.admission.responses import send_error
from sidecar.admission.usage import UsageReader, weighed
from sidecar.apis import Api
from sidecar.context import Granted, Holder, current
from sidecar.errors import AdmissionError, EngineUnreachable
from sidecar.events import AppTrace, Outcome
from sidecar.lengths.lease_size import LeaseSize
from sidecar.policy.endpoint import CostPlace
from sidecar.policy.model import Policy
from sidecar.tenants.tenant_usage import TenantUsage

if TYPE_CHECKING:
    from sidecar.admission.controller import AdmissionController
    from sidecar.engines.watch import EngineHealth

BODIES = frozenset(("http.response.body", "http.response.pathsend", "http.response.zerocopysend"))
"""The messages that are an answer's body: its bytes, or a file that the server reads (ASGI's extensions)."""


def body_bytes(message: Message) -> bytes | None:
    """The bytes of a part of an answer's body, None where it has none. Those of a file are not read: none is there."""
    body: bytes | None = message.get("body")
    return body or (None if message["type"] == "http.response.body" else b"")


def without_files(scope: Scope) -> dict[str, Any]:
    """The server's extensions without those for files: the app then sends bytes, which are read or framed here."""
    return {name: value for name, value in (scope.get("extensions") or {}).items() if name not in BODIES}


class EngineCall(msgspec.Struct, eq=False):
    """One call of the app for a request, and so of the engine: what is current while it runs, and how it ends.

    The engine computes from the call on, until its response is complete; an error is a response, too. A proxy that
    answers in the engine's place calls `failed` first, because its answer does not end the engine's work.

    `engine_watch` knows whether the engine can be used. `may_run` says whether the engine may still compute for it.
    `error` is the proxy's answer. `is_handed_back` says that the proxy could not connect, and left the request
    unanswered: it waits again for the engine. `granted` is None before the app is called, and from the request's end
    on. `trace` is the request's trace, where there is one. Both are current between `current.set` and `returned`.
    """

    _engine_watch: EngineHealth | None = None
    may_run: bool = True
    error: AdmissionError | None = None
    is_handed_back: bool = False
    granted: Granted | None = None
    trace: AppTrace | None = None
    _pending: PendingAbort | None = None

    def returned(self, token: Token[Holder | None]) -> None:
        """The app has returned."""
        current.reset(token)
        if self.trace is not None:
            self.trace.detach()

    def send_last(self, send: Send, message: Message) -> Awaitable[None]:
        """Sends the last part of the answer.

        A server may begin the next request of the connection while it does so, as a task that inherits the context: so
        nothing of this request is in it (uvicorn, where the next one has come already).
        """
        self.granted = None
        return send(message) if self.trace is None else self.trace.outside(send, message)

    def answered(self) -> None:
        """The response is complete."""
        if self.error is None:
            self.may_run = False

    def failed(self, error: AdmissionError, *, was_sent: bool) -> bool:
        """The proxy has an error for the request. Whether it answers with it: else the request waits again.

        `was_sent`: the engine may have received the request. It waits again only while the engine is known to be away:
        nothing would keep an engine that is not watched from failing it again and again.
        """
        self.may_run = was_sent
        watch = self._engine_watch
        if isinstance(error, EngineUnreachable) and not was_sent and watch is not None and not watch.is_usable:
            self.is_handed_back = True
            return False
        self.error = error
        return True

    def engine_error(self) -> AdmissionError | None:
        """The proxy's answer in place of the engine's, where the engine failed: no one is charged for it."""
        return self.error if self.error is not None and self.error.status >= 500 else None

    def when_aborted(self, release: Callable[[], object], aborts: PendingAborts, due_us: int, held: Held) -> None:
        """Calls `release` at `due_us`. A second call replaces `release`; the due time stays."""
        if self._pending is None:
            self._pending = aborts.add(release, due_us=due_us, held=held)
        else:
            self._pending.then(release)


_MOST_DIGITS = 12
"""Of a cost in tokens."""


class CostReader:
    """Reads what an answer says that it cost, as it passes. `tokens` is the last figure, None where there is none."""

    def __init__(self, place: CostPlace) -> None:
        self.tokens: int | None = None
        self._header = place.header
        self._number: re.Pattern[bytes] | None = None
        self._carried = b""
        self._longest = 0
        if place.member is not None:
            self._number = re.compile(
                rb'"%b"\s{0,8}:\s{0,8}(\d{1,%d})(?![\d.eE])' % (re.escape(place.member), _MOST_DIGITS)
            )
            self._longest = len(place.member) + _MOST_DIGITS + 20

    def feed(self, message: Message) -> None:
        """Takes a message of the answer."""
        if message["type"] == "http.response.start":
            self._read_headers(message)
        elif self._number is not None and message["type"] == "http.response.body":
            is_last = not message.get("more_body", False)
            window = self._carried + bytes(message.get("body", b""))
            for found in self._number.finditer(window):
                # A number at the very end may go on with the next chunk.
                if is_last or found.end() < len(window):
                    self.tokens = int(found[1])
            self._carried = window[-self._longest :]

    def tell(self, usage: UsageReader) -> None:
        """Counts the cost in place of what the answer's usage says, where there is one."""
        if self.tokens is not None:
            usage.read()
            usage.input_tokens = usage.output_tokens = None
            usage.counted(self.tokens, 0)

    def _read_headers(self, message: Message) -> None:
        for name, value in message.get("headers", ()):
            if name.lower() == self._header and value.isdigit() and len(value) <= _MOST_DIGITS:
                self.tokens = int(value)


class Answer(msgspec.Struct, eq=False):
    """The answer to one attempt. `usage` reads its tokens, `reader` what passes, and `size` grows its lease.

    `_at_head` may change its head, `_at_first_byte` gets the status, and `_at_end` how it ended.
    `status` is None until its head is there. `streams` is true from the first byte of a stream on, while chunks need
    nothing but to be read. One that `is_over` is not read any more, and one that `is_dropped` does not pass. `cost`
    reads the cost that the policy names. `background` is there where the request's answer does not end with it.
    """

    usage: UsageReader
    reader: UsageReader | RequestGain
    _client: ClientChannel
    _call: EngineCall
    _at_head: Callable[[Message], Message]
    _at_first_byte: Callable[[int | None], None]
    _at_end: Callable[[Outcome, str | None], None]
    size: LeaseSize | None = None
    cost: CostReader | None = None
    background: BackgroundRequest | None = None
    status: int | None = None
    streams: bool = False
    is_over: bool = False
    is_dropped: bool = False

    async def send_error(self, error: AdmissionError, api: Api) -> None:
        """Answers in the engine's place, as if it had."""
        self.is_dropped = False
        await send_error(self.send, error, anthropic=api is Api.MESSAGES)

    def send(self, message: Message) -> Awaitable[None]:
        """The app's `send`. Streams have many chunks: each costs no more than this, and no coroutine of its own."""
        if self.cost is not None:
            self.cost.feed(message)
        if self.streams and message.get("more_body"):
            self._read_chunk(message.get("body", b""))
            return self._client.send(message)
        if self.is_dropped:
            return _nothing()
        if self.background is None:
            if message["type"] == "http.response.start":
                return self._client.send(self._begun(message))
            if message["type"] in BODIES and not message.get("more_body"):
                return self._send_last(message)
        return self._send_other(message)

    def write(self, write: Write, body: bytes) -> bool:
        """See `handover.Write`, around the server's: from the first byte on, a chunk is read as one that is sent."""
        hider = self._client.hider
        if not self.streams or self.cost is not None or (hider is not None and not hider.passes(body)):
            return False
        if not write(body):
            return False
        self._read_chunk(body)
        return True

    def used(
        self, request: SizedRequest, controller: AdmissionController, policy: Policy, *, is_complete: bool
    ) -> tuple[int, int | None]:
        """The tokens that it cost, and those that its accounts are charged for: None for the estimate.

        Call it after its end: the growth of its lease ends, and what it was like is learned. `policy` is the request's.
        """
        usage, is_failure = self.usage, self._call.engine_error() is not None
        if self.cost is not None:
            self.cost.tell(usage)
        usage.conclude(controller.output_ratios, request.classification.tenant.name, request.payload.model)
        tokens = 0 if is_failure else usage.used_tokens(request.prompt_tokens)
        if self.size is not None:
            self.size.ended(tokens)
        learn(controller, request, policy, usage, self.status, is_complete=is_complete, is_failure=is_failure)
        if not (is_failure or usage.is_known(self.status)):
            return tokens, None
        cost = request.token_cost
        return tokens, tokens if cost is None else weighed(cost, usage, request.prompt_tokens, tokens)

    def _begun(self, message: Message) -> Message:
        self.status = message["status"]
        return self._at_head(message)

    def _read(self, body: bytes) -> None:
        if self.is_over:  # what comes after a disconnect's grace: no one gets it
            return
        if not self.usage.has_begun:
            self.usage.has_begun = True
            self._at_first_byte(self.status)
        self._read_chunk(body)
        if self.background is not None:
            self.background.feed(body)

    def _read_chunk(self, body: bytes) -> None:
        if self.reader.feed(body) and self.size is not None:
            self.size.answer_read()

    async def _send_last(self, message: Message) -> None:
        """The last bytes of an answer, and most often its only ones."""
        if (body := body_bytes(message)) is not None:
            self._read(body)
        # Servers also say `http.disconnect` after a complete response: only an earlier one is the client's.
        has_left = self._client.disconnected_us is not None
        self._call.answered()
        await self._call.send_last(self._client.send, message)
        self._end(Outcome.CLIENT_LEFT if has_left else Outcome.COMPLETED)

    async def _send_other(self, message: Message) -> None:
        """The first bytes of a stream; every message of a background response; what HTTP servers may add."""
        kind, background, is_end = message["type"], self.background, False
        if kind == "http.response.start":
            message = self._begun(message)
        elif kind in BODIES:
            if is_end := background is not None and not message.get("more_body"):
                self._call.answered()
            if (body := body_bytes(message)) is not None:
                self._read(body)
                self.streams = background is None and not self.is_over
        await (self._client.send if background is None else background.sender(self._client.send))(message)
        if is_end:
            self._end(Outcome.COMPLETED)

    def _end(self, outcome: Outcome) -> None:
        """The answer is complete. It may be the proxy's, because the engine failed."""
        error = None if self._call.error is None else self._call.engine_error()
        self._at_end(outcome if error is None else Outcome.FAILED, None if error is None else error.code)


def learn(  # names at the call would cost as much as the rest
    controller: AdmissionController,
    request: SizedRequest,
    policy: Policy,
    usage: UsageReader,
    status: int | None,
    *,
    is_complete: bool,
    is_failure: bool,
) -> None:
    """Learns from a request's answer, and counts what its tenant used. `is_failure`: the engine gave no answer."""
    if request.expected is not None and not is_failure and (status or 0) < 400:
        controller.lease_sizes.learn(request.expected, usage, is_complete)
    if usage.input_tokens is not None:
        controller.estimator.learn(request.payload, request.classification.tenant.name, usage.input_tokens)
    if controller.usage is not None and not is_failure:
        _count_use(controller.usage, request, policy, usage, status)


def _count_use(
    counted: TenantUsage, request: SizedRequest, policy: Policy, usage: UsageReader, status: int | None
) -> None:
    """Counts what a request used. `usage` is that of its response, `status` is None where there was none."""
    tokens = usage.used_tokens(request.prompt_tokens)
    if not usage.is_known(None):
        if status is not None and status >= 400:
            return  # the engine refused it, or failed
        # An answer that says nothing of its tokens: it may be one that its client has cut off before its end.
        tokens = request.most_tokens if usage.has_begun else tokens
    classification = request.classification
    input_tokens = usage.prompt_part(tokens, request.prompt_tokens)
    tenant, tier = classification.tenant.name, policy.tiers[classification.level].name
    cost = request.token_cost
    charged = None if cost is None else weighed(cost, usage, request.prompt_tokens, tokens)
    counted.add(tenant, tier, request.payload.model, input_tokens, tokens - input_tokens, charged, request.beside)


async def _nothing() -> None:
    """The `send` of what no one gets any more."""
