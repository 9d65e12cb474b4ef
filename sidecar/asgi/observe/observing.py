"""One request in `mode: observe`: it passes at once, byte for byte, while its shadow goes through the pool.

The law, for the request. The app is called at once, with the client's own messages, one by one, as it asks for them;
every message of its answer goes out as it comes. Nothing is refused, held or changed, the client's own priority fields
and its API key included. Only headers are added to the answer: `x-admission-mode: observe`, `x-admission-tier` where
the tier is known by then, and the request's id. One thing is done because the request would break without: a path that
the policy maps with `forward_to` goes where the policy says, as the engine need not know it. `granted()` has nothing to
say. Whatever fails in looking on is logged once, and the request goes on without being looked at.

The law, for its shadow (`shadow`):

1. It enters the pool when the request's last byte has come, as the request would when enforcing, with the same ask.
   What enforcing would refuse before that (an unknown key, a body that is no JSON, one that is too large or too late)
   has no shadow: it takes no room.
2. It waits for as long as its tier, and its client's `x-admission-max-wait`, let it; then it would have been refused.
   Where both wait for ever it is given up after an hour, and what would have become of it is not known.
3. It holds its lease for as long as the real request took, counted from its own grant, also where that has long ended.
   So the pool is as full as it would be.
4. Its room may be taken back for a more important request, as when enforcing, until the moment at which its first byte
   would have gone out. It then stands in line again at once, and its request's time begins anew with the next grant.
5. A client that hung up before the first byte of its answer had run out of patience: that counts from its arrival, and
   ends the shadow at that very moment, waiting or holding. One that hung up later had seen enough: rule 3.
6. What only we do to it (the door closes, there are too many shadows) ends it as unknown. When the policy changes to
   `mode: enforce`, only those shadows stay that hold, and whose requests still run: no real request waits for another.

What the shadow cannot know:

- that whoever is refused tries again, or that a client sends its next request later because this one had to wait:
  what the clients send is taken as given;
- that a client which was served at once would have hung up on a longer wait: the report counts long waits, not clients;
- that the engine would have been faster: it runs everything at once now, and fewer at a time when enforcing. Where it
  slows down under load, requests take longer than they would have, the pool is fuller, and the waits that are told are
  longer than those would be;
- a client's leaving that the app does not listen for: its server notices, and tells nobody else.
"""

from __future__ import annotations

from sidecar.asgi.door import Door
from sidecar.asgi.forwarding import forwarded_scope
from sidecar.asgi.observe.witness import Witness
from sidecar.asgi.types import Message, Receive, Scope, Send
from sidecar.events import Headers
from sidecar.policy.model import Endpoint


class Observing:
    """One request. Made by the middleware for every request to a guarded endpoint; `run` is called once."""

    __slots__ = ("_door", "_endpoint", "_receive", "_scope", "_send", "_witness")

    def __init__(self, door: Door, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._door = door
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._send = send
        self._witness: Witness | None = None

    async def run(self) -> None:
        """Takes the request to the app and its answer back. Raises only what the app raises."""
        self._door.rounds.add(self)
        try:
            self._look_on()
            scope = self._scope if self._endpoint.forward_to is None else forwarded_scope(self._scope, self._endpoint)
            await self._door.app(scope, self._receive_for_app, self._send_for_app)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._end(None)
            self._door.rounds.discard(self)

    def on_round(self) -> None:
        """See `rounds.Visited`. Nobody needs to be looked after here: whoever serves the app does."""

    async def _receive_for_app(self) -> Message:
        message = await self._receive()
        if self._witness is not None:
            try:
                self._witness.on_request(message)
            except Exception as defect:
                self._look_away(defect)
        return message

    async def _send_for_app(self, message: Message) -> None:
        if self._witness is not None:
            message = self._seen(self._witness, message)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._end(None, is_complete=True)

    def _seen(self, witness: Witness, message: Message) -> Message:
        added: Headers = ()
        headers: Headers = ()
        try:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                message = {**message, "headers": headers}  # what it was may be read only once
                added = witness.headers(headers)
            witness.on_response(message)
        except Exception as defect:
            self._look_away(defect)
        return {**message, "headers": [*headers, *added]} if added else message

    def _look_on(self) -> None:
        try:
            self._witness = Witness(self._door, self._endpoint, self._scope)
        except Exception as defect:
            self._look_away(defect)

    def _end(self, error: BaseException | None, *, is_complete: bool = False) -> None:
        witness = self._witness
        if witness is not None:
            try:
                witness.on_end(error, is_complete=is_complete)
            except Exception as defect:
                self._look_away(defect)

    def _look_away(self, defect: Exception) -> None:
        """Something of ours is broken: the request goes on, and nobody looks on any more."""
        witness, self._witness = self._witness, None
        self._door.shadows.report(defect)
        if witness is not None:
            witness.release()
