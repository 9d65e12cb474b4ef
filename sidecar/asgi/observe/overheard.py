"""What the door makes of a request that it does not stop: its body is listened to on its way to the app.

Nothing is asked for, kept back or changed. What enforcing would have found is found from the same messages, by the same
functions, in the same order: the key, the length, the body's size and time, and then what it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.asgi.body import too_large, too_late
from sidecar.asgi.credentials import refuse_two_keys
from sidecar.asgi.ruling import Ruling
from sidecar.asgi.types import Message, Scope
from sidecar.asgi.understanding import Understood, declared_length, longest_wait_s
from sidecar.errors import AdmissionError
from sidecar.policy.model import Endpoint, Tenant


class Overheard:
    """One request. `finding` is what it asks for or, as soon as that is certain, why enforcing would refuse it.

    `tenant` is whose it is, None where its key is unknown.
    """

    __slots__ = (
        "_chunks",
        "_endpoint",
        "_headers",
        "_received_us",
        "_ruling",
        "_size",
        "finding",
        "tenant",
    )

    def __init__(
        self, ruling: Ruling, endpoint: Endpoint, scope: Scope, headers: Mapping[bytes, bytes], received_us: int
    ) -> None:
        self.finding: Understood | AdmissionError | None = None
        self.tenant: Tenant | None = None
        self._ruling = ruling
        self._endpoint = endpoint
        self._headers = headers
        self._received_us = received_us
        self._chunks: list[bytes] = []
        self._size = 0
        try:
            refuse_two_keys(scope, headers)
            self.tenant = ruling.intake.tenant(headers)
            self._grow(declared_length(scope, headers) or 0)
            self._size = 0
        except AdmissionError as refusal:
            self.finding = refusal

    def hear(self, message: Message, now_us: int) -> None:
        """Takes a message that the app is about to be given."""
        if self.finding is not None or message["type"] != "http.request":
            return
        try:
            self.refuse_what_is_late(now_us)
            chunk: bytes = message.get("body", b"")
            self._grow(len(chunk))
            self._chunks.append(chunk)
            if not message.get("more_body", False):
                self._understand()
        except AdmissionError as refusal:
            self.finding = refusal
        if self.finding is not None:
            self._chunks.clear()

    def refuse_what_is_late(self, now_us: int) -> None:
        """Raises BodyTimeout where the body has been on its way for too long."""
        most_s = self._ruling.policy.body_timeout_s
        if now_us - self._received_us > most_s * 1e6:
            raise too_late(most_s)

    def _grow(self, more_bytes: int) -> None:
        self._size += more_bytes
        if self._size > self._ruling.policy.max_body_bytes:
            raise too_large(self._ruling.policy.max_body_bytes)

    def _understand(self) -> None:
        assert self.tenant is not None
        ruling, chunks = self._ruling, self._chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        understood = ruling.intake.understand(self._endpoint, self._headers, self.tenant, body)
        longest_wait_s(understood.headers, None)  # raises for what is no duration
        self.finding = understood
