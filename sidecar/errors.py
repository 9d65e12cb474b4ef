"""Errors that the admission controller answers in place of the engine's response, as one shallow tree.

Each error knows its HTTP status, its stable `code` (which clients and dashboards match on) and, where waiting helps,
the seconds after which to retry. `admission/responses.py` writes them in OpenAI's and Anthropic's shapes. The first
paragraph of a class's docstring is its row in docs/http.md.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class RemainingLimit(NamedTuple):
    """One limit: the amount per minute, the amount allowed now, and the microseconds until the whole amount is."""

    per_minute: int
    left: int
    reset_us: int


class RemainingLimits(NamedTuple):
    """Rest of a tenant's limits, None for a limit that it does not have. Every response reports it."""

    requests: RemainingLimit | None = None
    tokens: RemainingLimit | None = None


class ResponseCut(Exception):
    """The response breaks off. Raised to the server, which must not end it cleanly: half of it never looks complete."""


class AdmissionError(Exception):
    """A request that ends without a call of the engine. Its message says what was wrong and what would be right.

    `retry_after_s` is None where it is not known when a retry of the same request would help; `never_fits` where none
    ever will, as things are. `param` is the member of the body that is wrong, None where it is not one.
    """

    status: ClassVar[int]
    code: ClassVar[str]
    kind: ClassVar[str]
    never_fits: bool = False

    def __init__(self, message: str, *, retry_after_s: float | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.status}, {self.code!r}, {self.message!r})"


class BadRequest(AdmissionError):
    """The client's doing: the same request fails again."""

    status = 400
    kind = "invalid_request_error"


class InvalidBody(BadRequest):
    """Not JSON, not an object, or a field of the wrong type."""

    code = "invalid_body"


class InvalidHeader(BadRequest):
    """A header that contradicts itself, cannot be read, or was sent twice with two values."""

    code = "invalid_header"


class InvalidHttp(BadRequest):
    """Bytes that are no HTTP request, or whose framing contradicts itself (`sidecar serve`)."""

    code = "invalid_http"


class HeadTooLarge(BadRequest):
    """Headers, trailers, or the framing of a chunk are over 64 KiB (`sidecar serve`)."""

    status = 431
    code = "headers_too_large"


class HeadTimeout(BadRequest):
    """The headers did not arrive within 30 s (`sidecar serve`)."""

    status = 408
    code = "headers_timeout"


class RequestTooLarge(BadRequest):
    """More tokens, or more sequences, than the tier's size limit, which the message names."""

    code = "request_too_large"
    never_fits = True


class OutputTooLong(BadRequest):
    """More output than the tenant's `max_output_tokens`."""

    code = "output_too_long"
    never_fits = True


class TooManyChoices(BadRequest):
    """More choices of a prompt (`n`, `best_of`) than the policy's `max_choices`."""

    code = "too_many_choices"
    never_fits = True


class UnsizedPrompt(BadRequest):
    """Its prompt, or a part of it, is not in the body, and the policy says `unsized: refuse`."""

    code = "unsized_prompt"
    never_fits = True


class ModelNotFound(BadRequest):
    """A model that no pool of the policy's `models` serves, or not for this tenant; the message lists others."""

    status = 404
    code = "model_not_found"


class UnknownTier(BadRequest):
    """A tier name that is not in the policy, or a number outside [0, 1]; the message lists the tiers."""

    code = "unknown_tier"


class InvalidApiKey(AdmissionError):
    """The key is unknown, or there is none and the policy says `anonymous: deny`."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class ExpiredApiKey(InvalidApiKey):
    """The key's `expires` is past. The message has its name."""

    code = "expired_api_key"


class InvalidToken(InvalidApiKey):
    """A signed token (JWT) that is not believed, or that names no tenant or tier of the policy."""

    code = "invalid_token"


class UnknownTenant(InvalidApiKey):
    """The gateway, or the app around the middleware, named a tenant or a tier that the policy does not have."""

    code = "unknown_tenant"


class BackgroundNotAllowed(BadRequest):
    """`background: true`, where the policy says `background: refuse`."""

    code = "background_not_allowed"


class NotGuarded(BadRequest):
    """A path that is not guarded, and does not pass (`unguarded`); the message says how to guard it."""

    status = 404
    code = "not_guarded"


class UpgradeRequired(BadRequest):
    """A WebSocket on a path that the policy guards: clients such as Codex go on over HTTP."""

    status = 426
    code = "websocket_not_served"


class BodyTimeout(BadRequest):
    """The body did not arrive within the policy's `body_timeout`."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(BadRequest):
    """The body is over the policy's `max_body`, an upload over `max_upload`, or it unpacks to more."""

    status = 413
    code = "body_too_large"


class UnknownCoding(BadRequest):
    """The body is compressed in a way that is not read; `accept-encoding` lists what is."""

    status = 415
    code = "unsupported_encoding"

    def __init__(self, message: str, known: str) -> None:
        super().__init__(message)
        self.known = known


class TenantLimit(AdmissionError):
    """The tenant is over its own limits; the message says which, and when the request fits.

    `retry_after_s` is when the request would conform, `allowance` what is left. It is exact for the limits by the
    minute, and an estimate for `concurrent_requests`.
    """

    status = 429
    code = "tenant_limit"
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float | None, allowance: RemainingLimits) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.never_fits = retry_after_s is None
        self.allowance = allowance


class EngineUnreachable(AdmissionError):
    """The engine could not be reached, or broke off before it answered.

    `trouble` says what is wrong, with the engine's address: for the operator, and never for the client. `is_connected`
    says that there was a connection.
    """

    status = 502
    code = "engine_unreachable"
    kind = "server_error"

    def __init__(
        self, message: str, *, trouble: str = "", is_connected: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.trouble = trouble or message
        self.is_connected = is_connected


class EngineTimeout(AdmissionError):
    """The engine took longer than `timeouts` allow."""

    status = 504
    code = "engine_timeout"
    kind = "server_error"


class DeadlinePassed(AdmissionError):
    """Its `x-admission-deadline` passed before it was admitted."""

    status = 504
    code = "deadline"
    kind = "server_error"
    never_fits = True


class NotStarted(AdmissionError):
    """The mounted middleware cannot serve in this server or environment; the server's log says why."""

    status = 500
    code = "not_started"
    kind = "server_error"


class TenantNotFound(AdmissionError):
    """The app's function that names the tenants failed: see the log."""

    status = 500
    code = "tenant_failed"
    kind = "server_error"


class LoopDetected(AdmissionError):
    """The request came back to the sidecar that had sent it: `--upstream` leads to the sidecar itself."""

    status = 508
    code = "loop_detected"
    kind = "server_error"
    never_fits = True


class Unavailable(AdmissionError):
    """The pool's doing: the same request may well succeed later."""

    status = 503
    kind = "server_error"


class QueueFull(Unavailable):
    """The tier's queue in this process holds `max_requests` already."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float | None = None, level: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.level = level


class QueueTimeout(Unavailable):
    """It waited for `max_wait`, or as long as its client allows."""

    code = "queue_timeout"


class NoEngine(Unavailable):
    """It waited for `max_wait`, or as long as its client allows, and no engine could be reached."""

    code = "no_engine"


class StoreUnavailable(Unavailable):
    """The shared pool's store cannot be reached, and this process may not, or cannot, admit without it."""

    code = "store_unavailable"


class TenantsUnavailable(Unavailable):
    """The tenants in the store have not been read since the start, and no file has the one of the request."""

    code = "tenants_unavailable"


class IssuerUnavailable(Unavailable):
    """A signed token cannot be checked, because its issuer's keys could not be fetched."""

    code = "issuer_unavailable"


class CapacityUnknown(Unavailable):
    """The pool's size is read from the engine, and was not read yet."""

    code = "capacity_unknown"


class Draining(Unavailable):
    """This process is shutting down and takes no new request."""

    code = "draining"
