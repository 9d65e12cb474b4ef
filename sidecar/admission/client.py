"""The client's side of one request: its messages, its disconnect, and the bytes that it is sent.

While a request waits its client may get comments, which keep the connection from looking idle (`SseKeepAlive`): load
balancers and clients give up on one that stays silent for about a minute. A stream of server-sent events may begin with
comments (lines that start with a colon), which every client skips. The status, 200, is sent before the request's
outcome is known. So a response that is no stream of events, above all an error, is sent as one event, in the form from
which the client's library raises its own error.

A stream that did not ask for its usage is asked for it all the same, and its client does not see the answer
(`UsageHider`, `forwarding.ask_for_usage`).

An upload of the generic API, a body in a form or of sound or pictures, passes as it comes (`UploadChannel`). It is not
read here. Its declared length says what it holds, and it passes from the client to the app chunk by chunk, once it is
admitted. While it waits, at most `READ_AHEAD` bytes of it are kept: so a client that leaves is noticed as long as it
has not sent more.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Message, Receive, Send

from sidecar.admission.intake import SizedRequest
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.responses import early_headers
from sidecar.apis import Api
from sidecar.events import Headers
from sidecar.pools import Lease
from sidecar.tasks import is_canceled_again

if TYPE_CHECKING:
    from sidecar.admission.answer_edits import AnswerEditor, Edit

EVENTS = b"text/event-stream"
_AFTER = b"; \t,"
"""Bytes that may follow a type in `content-type`: `application/json-seq` is another one."""
LONGEST_ERROR = 64 * 1024
"""Bytes of an error's body that are passed on in an event; real ones have a few hundred."""

_HEADERS: Headers = (
    (b"content-type", EVENTS),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the comments otherwise
)
STREAMING = frozenset((Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES))
"""The APIs whose responses are streams of events where a request says `stream`."""


class SseKeepAlive:
    """An ASGI `send` for the rest of a response that has begun with comments. `headers` are added to its head.

    A response that is sent through it continues the same stream: events unchanged, and any other body as one event,
    an error event where its status says so.
    """

    __slots__ = ("_api", "_body", "_has_begun", "_headers", "_passes", "_send", "_status")

    def __init__(self, send: Send, api: Api, headers: Headers) -> None:
        self._send = send
        self._api = api
        self._headers = headers
        self._has_begun = False
        self._status = 200
        self._passes = False
        self._body = bytearray()

    async def comment(self, text: str) -> None:
        """Sends a line that clients skip; the first one sends the response's head before it."""
        if not self._has_begun:
            self._has_begun = True
            head = [*_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._send(_body(f": {text}\n\n".encode(), more=True))

    async def __call__(self, message: Message) -> None:
        """See ASGI's `send`."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._passes = self._status < 400 and has_type(message.get("headers", ()))
        elif message["type"] != "http.response.body" or self._passes:
            await self._send(message)
        else:
            self._body += message.get("body", b"")[: LONGEST_ERROR - len(self._body)]
            if not message.get("more_body", False):
                await self._send(_body(self._event(bytes(self._body)), more=False))

    async def break_off(self) -> None:
        """Reports that the app failed before it answered, and leaves the end of the response to the server."""
        if not self._passes:
            self._status = 500
            await self._send(_body(self._event(b""), more=True))

    def _event(self, body: bytes) -> bytes:
        if self._status < 400:
            return b"".join(b"data: %s\n" % line for line in body.splitlines()) + b"\n"
        event = _error(self._api, _object(body), self._status)
        name = b"" if self._api in (Api.CHAT, Api.COMPLETIONS) else b"event: error\n"
        return b"%sdata: %s\n\n" % (name, msgspec.json.encode(event))


def _error(api: Api, body: dict[str, object], status: int) -> dict[str, object]:
    """An error's body as the event that the API's clients know. Without a body it is made from the status."""
    error = body.get("error")
    if not isinstance(error, dict):
        message = body.get("message") or body.get("detail") or _phrase(status)
        error = {"message": str(message), "type": "server_error", "code": status}
    if api is Api.MESSAGES:
        return {"type": "error", "error": {"type": "api_error", **error}}
    if api is Api.RESPONSES:  # flat in the API's own event; its clients also read `error`, as everywhere else
        flat = {name: error[name] for name in ("code", "message", "param") if name in error}
        return {"type": "error", "sequence_number": 0, "param": None, **flat, "error": error}
    return {"error": error}


def _object(body: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = body.decode("utf-8", "replace").strip()
        return {"message": text} if text else {}


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"status {status}"


def has_type(headers: Headers, kind: bytes = EVENTS) -> bool:
    """True if a response's headers say that its body is of this type, by default a stream of events."""
    return any(
        name.lower() == b"content-type"
        and value.lower().startswith(kind)
        and value[len(kind) : len(kind) + 1] in _AFTER
        for name, value in headers
    )


def may_be_edited(head: Message, *, errors: bool = False) -> bool:
    """True if the start of a response announces an answer, perhaps one of the `errors`, and not a compressed one."""
    is_coded = any(name.lower() == b"content-encoding" for name, _ in head.get("headers", ()))
    return not is_coded and bool(errors or head["status"] < 300)


def without_length(head: Message) -> Message:
    """The start of a response that is not as long as the app says."""
    return {**head, "headers": [pair for pair in head.get("headers", ()) if pair[0].lower() != b"content-length"]}


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


LARGEST_USAGE = 16 * 1024
"""Bytes of an event that may be one of usage. The beginning of a larger one passes before its end has come."""


_WITHOUT_USAGE = (b"}]}\n\n", b'"usage":null}\n\n')
"""Ends of an event without usage. The event of usage is the last but for `[DONE]`: no chunk that ends so has it."""


_END = re.compile(rb"\r?\n\r?\n|\r\r")


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw()


_decode_event = msgspec.json.Decoder(_Event).decode


class UsageHider:
    """An ASGI `send` that takes the event of usage out of a stream. Every other byte passes, and whole events at once.

    The beginning of an event is held until its end has come.
    """

    __slots__ = ("_held", "_is_stream", "_send")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held = b""
        self._is_stream = False

    def send(self, message: Message) -> Awaitable[None]:
        """See ASGI's `send`."""
        if not self._is_stream:
            return self._send(self._begun(message) if message["type"] == "http.response.start" else message)
        body, is_last = bytes(message.get("body", b"")), not message.get("more_body", False)  # perhaps a memoryview
        if message["type"] != "http.response.body" or (self.passes(body) if body else not is_last):
            return self._send(message)
        shown = self._shown(body, is_last=is_last)
        # Also without bytes: the head may wait for this message, and `engine_time` asks so whether the client reads.
        return self._send({**message, "body": shown})

    def passes(self, body: bytes) -> bool:
        """True if the stream's next bytes are shown as they are: so are nearly all. Else they have to be sent."""
        return not self._is_stream or (not self._held and body.endswith(_WITHOUT_USAGE))

    def _begun(self, message: Message) -> Message:
        """The response's start. A stream that is shorter than its engine says has no length."""
        self._is_stream = may_be_edited(message) and has_type(message.get("headers", ()))
        return without_length(message) if self._is_stream else message

    def _shown(self, body: bytes, *, is_last: bool = False) -> bytes:
        """The part that the client sees of the stream's next bytes, and of those held before."""
        window = self._held + body
        shown, since = [], 0
        for end in _END.finditer(window):
            event, since = window[since : end.end()], end.end()
            if not _is_usage(event):
                shown.append(event)
        rest = window[since:]
        if is_last and not _is_usage(rest):
            shown.append(rest)
        elif len(rest) > LARGEST_USAGE:
            begun = rest.rstrip(b"\r\n")  # what is left may be half of the event's end
            shown.append(begun)
            rest = rest[len(begun) :]
        self._held = rest
        return b"".join(shown)


def _is_usage(event: bytes) -> bool:
    """True if the event has no choices, and says the usage."""
    if b'"usage"' not in event or len(event) > LARGEST_USAGE:
        return False
    lines = [line.removeprefix(b"data:") for line in event.splitlines() if line.startswith(b"data:")]
    try:
        found = _decode_event(b"\n".join(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return found.choices == [] and bytes(found.usage)[:1] == b"{"


_INSTRUMENTATION = "opentelemetry.instrumentation.asgi"


class ClientChannel(msgspec.Struct, eq=False):
    """The client's `receive` and `send`. Detects disconnects when the app is not receiving.

    `disconnected_us` is when a disconnect was seen, by `now_us`, the pool's clock in microseconds; None before.
    `send` takes the response. Once comments have begun it, `keepalive` is the rest of the response's `send`. From
    `cut_us` on the app gets no message but a disconnect, though the client has not left.
    `hider`: see `hide_usage`. `editor`: see `edit`.
    """

    _receive: Receive
    send: Send
    _now_us: Callable[[], int]
    keepalive: SseKeepAlive | None = None
    disconnected_us: int | None = None
    hider: UsageHider | None = None
    editor: AnswerEditor | None = None
    cut_us: int | None = None
    _disconnect: asyncio.Task[Message] | None = None
    _receiving: tuple[asyncio.Task[object] | None, ...] = ()
    _context: Context = msgspec.field(default_factory=copy_context)

    def edit(self, edits: Sequence[Edit]) -> None:
        """From now on the client gets answers with these edits. Before `hide_usage`, which reads the engine's own."""
        if self.editor is None:
            from sidecar.admission.answer_edits import AnswerEditor

            self.editor = AnswerEditor(self.send, edits)
            self.send = self.editor.send
        self.editor.edits = edits

    def hide_usage(self) -> None:
        """From now on the client does not see the usage of a stream. Harmless when repeated."""
        if self.hider is None:
            self.hider = UsageHider(self.send)
            self.send = self.hider.send

    def disconnect(self) -> asyncio.Task[Message]:
        """The task that ends when the client disconnects. It starts when it is first asked for.

        Its context is the one that the request came with: not the app's, nor that of the watchdog's timer.
        """
        if self._disconnect is None:
            self._disconnect = self._context.run(asyncio.ensure_future, self._watched())
        return self._disconnect

    async def receive(self) -> Message:
        """The next message, for the app: it sees a disconnect as it would without the middleware."""
        if self.cut_us is not None:
            return {"type": "http.disconnect"}
        if self._disconnect is not None:
            return await asyncio.shield(self._disconnect)
        return await self._next_message(self._receive)

    def cut(self) -> None:
        """For the app, the client disconnects now, also where it waits for its next message."""
        self.cut_us = self._now_us()
        for task in self._receiving:
            if task is not None:
                task.cancel()

    def watch(self) -> None:
        """Starts to look for a disconnect, where the app does not."""
        if self.disconnected_us is None and not self._receiving:
            self.disconnect()

    def close(self) -> None:
        """Stops to look for a disconnect."""
        if self._disconnect is not None and not self._disconnect.done():
            self._disconnect.cancel()

    def _watched(self) -> Coroutine[Any, Any, Message]:
        """The message by which the client disconnects."""
        return self._next_message(unobserved(self._receive))

    async def _next_message(self, receive: Receive) -> Message:
        task = asyncio.current_task()
        self._receiving += (task,)
        try:
            message = await receive()
        except asyncio.CancelledError:
            if self.cut_us is None or is_canceled_again(task):
                raise
            return {"type": "http.disconnect"}
        finally:
            self._receiving = tuple(other for other in self._receiving if other is not task)
        if message["type"] == "http.disconnect" and self.disconnected_us is None:
            self.disconnected_us = self._now_us()
        return message


def unobserved(receive: Receive) -> Receive:
    """`receive` without the span that OpenTelemetry's instrumentation of ASGI makes of each call.

    The app does not ask for a disconnect that we look for: in its trace that span would be as long as the request.
    """
    while getattr(receive, "__globals__", {}).get("__name__") == _INSTRUMENTATION and hasattr(receive, "__wrapped__"):
        receive = receive.__wrapped__  # `functools.wraps` leaves it there (0.48b0 to 0.66b2)
    return receive


class ClientComments(msgspec.Struct, frozen=True):
    """Comments for a streaming client while it waits, one every `every_s` seconds. `headers` begin the response."""

    every_s: float
    _client: ClientChannel
    _api: Api
    _headers: Headers

    async def comment(self, text: str) -> None:
        """Sends a line that the client skips. The first one begins the response."""
        client = self._client
        if client.keepalive is None:
            client.send = client.keepalive = SseKeepAlive(client.send, self._api, self._headers)
        await client.keepalive.comment(text)

    async def admitted(self, wait_s: float) -> None:
        """Says that the wait is over, where a comment was sent before."""
        if self._client.keepalive is not None:
            await self.comment(f"admitted after {wait_s:.1f} s")


def comments_for(
    client: ClientChannel, request: SizedRequest, snapshot: PolicySnapshot, request_id: str, lease: Lease
) -> ClientComments | None:
    """The comments while a request waits; None where the policy has none, or its client does not stream."""
    every_s, api = snapshot.policy.keep_alive_s, request.api
    if every_s is None or not request.payload.stream or api not in STREAMING:
        return None
    return ClientComments(every_s, client, api, early_headers(request, lease, snapshot.tier_names, request_id))


READ_AHEAD = 256 * 1024
"""Bytes of an upload that are kept while it waits."""


class UploadChannel(ClientChannel):
    """The client's messages where the body is not read before the request is admitted."""

    _ahead: deque[Message] = msgspec.field(default_factory=deque)
    _ahead_bytes: int = 0
    _passed: list[Message] = msgspec.field(default_factory=list)
    _passed_bytes: int = 0
    _changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_complete: bool = False

    @property
    def is_watched(self) -> bool:
        """True if its messages are read already: `receive` alone has them."""
        return self._disconnect is not None

    def cut(self) -> None:
        """See `ClientChannel.cut`. What comes of the upload is still read."""
        self.cut_us = self._now_us()
        self._changed.set()

    def rewind(self) -> bool:
        """The app gets the body once more, from its beginning. False where too much has passed to be kept."""
        if self._passed_bytes > READ_AHEAD:
            return False
        self._ahead.extendleft(reversed(self._passed))
        self._ahead_bytes += self._passed_bytes
        self._passed, self._passed_bytes = [], 0
        return True

    async def receive(self) -> Message:
        """See `ClientChannel.receive`: the body's chunks, in their order, and then a disconnect."""
        reading = self.disconnect()
        while not (self._ahead or reading.done() or self.cut_us is not None):
            self._changed.clear()
            await self._changed.wait()
        if self.cut_us is not None:
            return {"type": "http.disconnect"}
        return self._next() or reading.result()

    async def receive_rest(self) -> Message:
        """As `receive`, for what is left of the body: also once the app has been cut off from it."""
        reading = self.disconnect()
        while not (self._ahead or reading.done()):
            self._changed.clear()
            await self._changed.wait()
        return self._next() or reading.result()

    def _next(self) -> Message | None:
        """The next chunk that was read ahead."""
        if not self._ahead:
            return None
        message = self._ahead.popleft()
        size = len(message.get("body", b""))
        self._ahead_bytes -= size
        self._passed_bytes += size
        if self._passed_bytes <= READ_AHEAD:
            self._passed.append(message)
        else:
            self._passed.clear()
        self._changed.set()
        return message

    async def _watched(self) -> Message:
        """Reads ahead until the client disconnects."""
        try:
            while True:
                while self._ahead_bytes >= READ_AHEAD:
                    self._changed.clear()
                    await self._changed.wait()
                receive = unobserved(self._receive) if self.is_complete else self._receive
                message = await self._next_message(receive)
                if message["type"] != "http.request":
                    return message
                self.is_complete = not message.get("more_body", False)
                self._ahead.append(message)
                self._ahead_bytes += len(message.get("body", b""))
                self._changed.set()
        finally:
            self._changed.set()
