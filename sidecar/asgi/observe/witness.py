"""Looks on while one request passes: what it is, what its answer costs, and what enforcing would have done to it.

Whatever is wrong in here may raise: `observing` lets the request go on without.
"""

from __future__ import annotations

import asyncio

from sidecar.asgi.allowances import used_tokens
from sidecar.asgi.door import Door
from sidecar.asgi.naming import id_header, request_id
from sidecar.asgi.observe.overheard import Overheard
from sidecar.asgi.observe.shadow import CLIENT_LEFT, Found, Shadow
from sidecar.asgi.report import Report
from sidecar.asgi.types import Message, Scope
from sidecar.asgi.understanding import Understood
from sidecar.asgi.usage import UsageReader
from sidecar.errors import AdmissionError
from sidecar.events import Headers, Observed, Outcome, Verdict
from sidecar.policy.model import Endpoint
from sidecar.pools import Grant

UNREAD, TOO_MANY = "body_unread", "too_many_shadows"
_MODE = (b"x-admission-mode", b"observe")
_NO_WAIT = Grant(0, 0, 0, None, {}, 0)


class Witness:
    """One request's. It is shown every message on its way, and the end."""

    __slots__ = (
        "_client_left", "_door", "_endpoint", "_is_answered", "_is_over", "_overheard", "_received_us", "_report",
        "_request_id", "_ruling", "_shadow", "_status", "_usage",
    )  # fmt: skip

    def __init__(self, door: Door, endpoint: Endpoint, scope: Scope) -> None:
        headers = dict(scope["headers"])
        self._door = door
        self._ruling = door.ruling
        self._endpoint = endpoint
        self._received_us = door.pool.now_us()
        self._request_id = request_id(headers)
        self._report = Report(door.observer, scope, self._request_id, self._received_us, door.pool.now_us)
        self._usage = UsageReader()
        self._shadow: Shadow | None = None
        self._status: int | None = None
        self._client_left = self._is_answered = self._is_over = False
        self._overheard = Overheard(door.ruling, endpoint, scope, headers, self._received_us)
        self._look_into()

    def on_request(self, message: Message) -> None:
        """The app is about to be given this."""
        if message["type"] == "http.disconnect":
            self._client_left = True
        elif self._overheard.finding is None:
            self._overheard.hear(message, self._now_us())
            self._look_into()

    def on_response(self, message: Message) -> None:
        """The client is about to be sent this."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                if not self._usage.has_begun:
                    self._report.first_byte(self._status)
                    if self._shadow is not None:
                        self._shadow.begun()
                self._usage.feed(body)
            # Servers say `http.disconnect` behind a complete response, too: only one from before is a departure.
            self._is_answered = not message.get("more_body", False) and not self._client_left

    def headers(self, of_app: Headers) -> Headers:
        """What the answer gets beside the app's own headers."""
        finding = self._overheard.finding
        named = id_header(self._request_id, of_app)
        if not isinstance(finding, Understood):
            return (_MODE, named)
        return (_MODE, (b"x-admission-tier", self._ruling.tier_names[finding.classification.level]), named)

    def on_end(self, error: BaseException | None, *, is_complete: bool) -> None:
        """The app is done, or the last byte is out. `error` is what it raised."""
        if self._is_over:
            return
        self._is_over = True
        if self._overheard.finding is None:
            self._look_no_further()
        outcome, code = self._outcome(error, is_complete=is_complete)
        self._follow_to_the_end(outcome)
        finding, usage = self._overheard.finding, self._usage
        prompt_tokens = finding.prompt_tokens if isinstance(finding, Understood) else 0
        if isinstance(finding, Understood) and usage.input_tokens is not None:
            self._door.estimator.learn(finding.payload, finding.classification.tenant.name, usage.input_tokens)
        used = usage.used_tokens(prompt_tokens), usage.input_tokens, usage.output_tokens
        self._report.settled(outcome, status=self._status, used=used, error=code)

    def release(self) -> None:
        """Whatever else happened: nobody holds anything for this request any more."""
        if self._shadow is not None:
            self._shadow.ended()

    # -- what it is

    def _look_into(self) -> None:
        """Sends a shadow into the pool for what is in order, and tells what is not."""
        finding = self._overheard.finding
        if isinstance(finding, AdmissionError):
            self._tell(Found(Verdict.REFUSED, finding.code, None))
        elif finding is not None:
            if not self._usage.has_begun:  # an app may answer before it has read the body
                self._report.classified(finding, self._endpoint, self._ruling.policy, self._now_us())
                self._report.passed(self._now_us(), finding.classification.level)
            self._send_shadow(finding)

    def _send_shadow(self, understood: Understood) -> None:
        door = self._door
        shadow = Shadow(door.pool, self._ruling, understood, self._tell)
        if door.shadows.follow(shadow):
            self._shadow = shadow
        else:
            self._tell(Found(Verdict.UNKNOWN, TOO_MANY, None))

    def _look_no_further(self) -> None:
        """The request is over before its body was."""
        try:
            self._overheard.refuse_what_is_late(self._now_us())
        except AdmissionError as refusal:
            self._tell(Found(Verdict.REFUSED, refusal.code, None))
            return
        verdict, code = (Verdict.ABANDONED, CLIENT_LEFT) if self._client_left else (Verdict.UNKNOWN, UNREAD)
        self._tell(Found(verdict, code, None))

    # -- what became of it

    def _outcome(self, error: BaseException | None, *, is_complete: bool) -> tuple[Outcome, str | None]:
        if is_complete and self._is_answered:
            return Outcome.COMPLETED, None
        if self._client_left or isinstance(error, asyncio.CancelledError):
            return Outcome.CLIENT_LEFT, None  # whatever the app made of it
        return Outcome.FAILED, "incomplete_response" if error is None else type(error).__name__

    def _follow_to_the_end(self, outcome: Outcome) -> None:
        if self._shadow is None:
            return
        if outcome is Outcome.CLIENT_LEFT and not self._usage.has_begun:
            self._shadow.left()
        else:
            self._shadow.ended(self._used())

    def _used(self) -> int | None:
        finding = self._overheard.finding
        if not isinstance(finding, Understood):
            return None
        used, is_known = used_tokens(self._usage, finding.prompt_tokens, self._status)
        return used if is_known else None

    def _tell(self, found: Found) -> None:
        finding, tenant = self._overheard.finding, self._overheard.tenant
        tier = None
        if isinstance(finding, Understood):
            tier = self._ruling.policy.tiers[finding.classification.level].name
        wait = found.wait or _NO_WAIT
        observed = Observed(
            at_us=self._now_us() if found.wait is None else wait.at_us,
            request_id=self._request_id,
            generation=self._ruling.policy.generation,
            verdict=found.verdict,
            code=found.code,
            tier=tier,
            tenant=None if tenant is None else tenant.name,
            queue_wait_us=wait.queue_wait_us,
            starvation_us=wait.starvation_us,
            served_ahead=wait.served_ahead,
        )
        if not self._is_over:
            self._report.observed(observed)
        if self._door.observed is not None:
            self._door.observed(observed)

    def _now_us(self) -> int:
        return self._door.pool.now_us()
