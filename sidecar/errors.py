"""Errors that the admission controller answers in place of the engine's response, as one shallow tree.

Each error knows its HTTP status, its stable `code` (which clients and dashboards match on) and, where waiting helps,
the seconds after which to retry. `middleware/error_responses.py` writes them in OpenAI's and Anthropic's shapes.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class RemainingLimit(NamedTuple):
    """One limit: the amount per minute, the amount allowed now, and the microseconds until the whole amount is."""

    per_minute: int
    left: int
    reset_us: int


class RemainingLimits(NamedTuple):
    """Rest of a tenant's limits, None for a limit that it does not have. Every response reports it.

    `is_downgraded` says that the request was over the limits and entered at a lower tier: it counts in none of them.
    """

    requests: RemainingLimit | None = None
    tokens: RemainingLimit | None = None
    is_downgraded: bool = False


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
    """A header that contradicts itself or cannot be read."""

    code = "invalid_header"


class InvalidHttp(BadRequest):
    """Bytes that are no request, or whose framing contradicts itself."""

    code = "invalid_http"


class HeadTooLarge(BadRequest):
    """The request line and headers, trailers, or the framing of a chunk are over the bound."""

    status = 431
    code = "headers_too_large"


class HeadTimeout(BadRequest):
    """The headers did not arrive in time."""

    status = 408
    code = "headers_timeout"


class RequestTooLarge(BadRequest):
    """More tokens, or more sequences, than the tier could ever be given: refused at once, never a wait."""

    code = "request_too_large"
    never_fits = True


class OutputTooLong(BadRequest):
    """More output than the tenant's `max_output_tokens`."""

    code = "output_too_long"
    never_fits = True


class TooManyChoices(BadRequest):
    """More choices of a prompt than the policy's `max_choices` lets one request ask for."""

    code = "too_many_choices"
    never_fits = True


class UnsizedPrompt(BadRequest):
    """Its prompt, or a part of it, is not in the body, and the policy says `unsized: refuse`."""

    code = "unsized_prompt"
    never_fits = True


class ModelNotFound(BadRequest):
    """A model that no pool of the policy's `models` serves."""

    status = 404
    code = "model_not_found"


class UnknownTier(BadRequest):
    """A tier name that is not in the policy, or a number outside [0, 1]."""

    code = "unknown_tier"


class InvalidApiKey(AdmissionError):
    """The key is unknown, or there is none and the policy says `anonymous: deny`."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class InvalidToken(InvalidApiKey):
    """A signed token (JWT) that is not believed, or that names no tenant or tier of the policy."""

    code = "invalid_token"


class UnknownTenant(InvalidApiKey):
    """The gateway before the sidecar, or the app around it, named a tenant or a tier that the policy does not have."""

    code = "unknown_tenant"


class BackgroundNotAllowed(BadRequest):
    """A response that would run on after its answer, where the policy says `background: refuse`."""

    code = "background_not_allowed"


class NotGuarded(BadRequest):
    """A path that the policy does not guard, and does not let pass (`unguarded`)."""

    status = 404
    code = "not_guarded"


class UpgradeRequired(BadRequest):
    """A WebSocket on a path that the policy guards: it is served over HTTP alone."""

    status = 426
    code = "websocket_not_served"


class BodyTimeout(BadRequest):
    """The body did not arrive within the policy's `body_timeout`."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(BadRequest):
    """The body is over the policy's `max_body`."""

    status = 413
    code = "body_too_large"


class UnknownCoding(BadRequest):
    """The body is compressed in a way that is not read here. `known` is the value of `accept-encoding`: what is."""

    status = 415
    code = "unsupported_encoding"

    def __init__(self, message: str, known: str) -> None:
        super().__init__(message)
        self.known = known


class TenantLimit(AdmissionError):
    """Over the tenant's own limits. `retry_after_s` is when the request would conform, `allowance` what is left.

    It is exact for the limits by the minute, and an estimate for `concurrent_requests`.
    """

    status = 429
    code = "tenant_limit"
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float | None, allowance: RemainingLimits) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.never_fits = retry_after_s is None
        self.allowance = allowance


class EngineUnreachable(AdmissionError):
    """The reverse proxy could not connect to the engine, or the engine broke off before it answered.

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
    """The engine did not answer within the reverse proxy's limit."""

    status = 504
    code = "engine_timeout"
    kind = "server_error"


class NotStarted(AdmissionError):
    """The middleware could not start: the server, or the environment, is not one that it can serve in."""

    status = 500
    code = "not_started"
    kind = "server_error"


class TenantNotFound(AdmissionError):
    """The app's function that names the tenants failed."""

    status = 500
    code = "tenant_failed"
    kind = "server_error"


class LoopDetected(AdmissionError):
    """The request came back to the sidecar whose proxy had sent it: the proxy's address leads to itself."""

    status = 508
    code = "loop_detected"
    kind = "server_error"
    never_fits = True


class Unavailable(AdmissionError):
    """The pool's doing: the same request may well succeed later."""

    status = 503
    kind = "server_error"


class QueueFull(Unavailable):
    """The queue of the tier at `level` holds as many requests as the policy allows."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float | None = None, level: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.level = level


class QueueTimeout(Unavailable):
    """The request waited as long as its tier, or its client, allows."""

    code = "queue_timeout"


class NoEngine(Unavailable):
    """The request waited as long as its tier, or its client, allows, and no engine could be reached."""

    code = "no_engine"


class StoreUnavailable(Unavailable):
    """The leases live in a store that cannot be reached, and this process may not, or cannot, admit without it."""

    code = "store_unavailable"


class TenantsUnavailable(Unavailable):
    """The tenants in the store have not been read since the process began, and no file has the one of the request."""

    code = "tenants_unavailable"


class IssuerUnavailable(Unavailable):
    """A signed token cannot be checked, because its issuer's keys could not be fetched."""

    code = "issuer_unavailable"


class CapacityUnknown(Unavailable):
    """The pool's size is what the engine says, and the engine has not said it yet."""

    code = "capacity_unknown"


class Draining(Unavailable):
    """This process is shutting down and takes no new request."""

    code = "draining"
