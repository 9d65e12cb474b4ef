"""Records of the events of a request, and the interfaces by which telemetry receives them.

The middleware reports to one `Observation` per request, in the order of the classes below: at most one of each,
`Received` first, `Refused` or `Settled` last. Only a request that is preempted or handed back begins again: after
`Preempted` come `Queued` and, if it is admitted again, `Admitted`; it ends in `Settled` either way. `Risen` may come
any number of times after a `Queued`. In a pool of
several engines `Replayed` comes before such a `Preempted`, and says which engine did not serve it. A request that
passes in `mode: observe` is reported as it really went (admitted, without a wait), or with `Settled` alone where it
would have been refused before its tier was known; `Observed` comes anywhere in between, where it is known in time.
Times are whole microseconds of the process's monotonic clock (`*_us`); `Received` also has the wall clock, so that an
observer can place the others in calendar time. Records are msgspec Structs because they are made on every request: ten
times cheaper than a frozen dataclass, and as immutable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

import msgspec
from starlette.types import Message, Send

Headers = Sequence[tuple[bytes, bytes]]


FIRST_FAILURE = 500
"""The lowest status of an answer that says that the engine failed."""


class Outcome(str, Enum):
    """How an admitted request ended."""

    COMPLETED = "completed"
    CLIENT_LEFT = "client_left"
    FAILED = "failed"


class Received(msgspec.Struct, frozen=True, gc=False):
    """A guarded request reached the middleware. `headers` are the client's, for trace context: they hold its API key.

    `request_id` is the client's own `x-request-id`, or one that was made for it; the response has it.
    """

    at_us: int
    wall_ns: int
    method: str
    path: str
    headers: Headers
    request_id: str


class Expectation(msgspec.Struct, frozen=True, gc=False):
    """Expected use of a request when it entered the pool, where output lengths are learned.

    `output_tokens` is the assumed length of each of its `sequences`, `source` where that comes from: own, tenants
    or maximum (nothing is known: what the old rule holds). `samples` are the answers that its length
    rests on and `quantile` the share of them that are no longer; 0 where there are none. `overlap` is the ratio by
    which its tokens were counted, `most_tokens` what it may use at most: its prompt and maximum output. `prompt_tokens`
    is that of all sequences; `bytes_per_token` is None where it was not text alone. `bucket` is the class of requests
    that its length is learned in, beside its tenant, endpoint and model.
    """

    output_tokens: int
    sequences: int
    source: str
    samples: int
    quantile: float
    overlap: float
    most_tokens: int
    prompt_tokens: int = 0
    bytes_per_token: float | None = None
    bucket: str = ""


LONGEST_MODEL = 128
"""Characters of a model's name that are told: the client chooses the name, and its length, and records are kept."""


class Classified(msgspec.Struct, frozen=True, gc=False):
    """The request's tenant, its tier, and the tokens it will hold. `clamped_from` is the tier that was asked for.

    `preemptible` says that what it is admitted with may be taken back until its first byte goes out; `downgraded_from`
    is the tier it would have had, had its tenant not been over its limits. `expected` is None where no output length is
    learned. One that `is_deferred` has a deadline, and waits for as long as it may. `risen_from` is in the record of
    one that rose. `user` is the tenant's user as it may be shown, empty for an unknown one. `key` is the name of its
    API key, None where it has none.
    """

    at_us: int
    tier: str
    tenant: str
    source: str
    clamped_from: str | None
    api: str
    model: str | None
    max_output_tokens: int | None
    stream: bool
    tokens: int
    requests: int
    preemptible: bool = False
    downgraded_from: str | None = None
    expected: Expectation | None = None
    key: str | None = None
    risen_from: str | None = None
    is_deferred: bool = False
    user: str | None = None


class Obstacle(str, Enum):
    """Why a request could not be admitted as it came: the first of these that is so."""

    PREEMPTED = "preempted"
    ENGINE = "engine"
    STORE = "store"
    HELD_BACK = "held_back"
    LIMIT = "limit"
    NO_ROOM = "no_room"
    HEADROOM = "headroom"
    GUARDED = "guarded"
    BEHIND = "behind"
    CLAIM = "claim"


class Queued(msgspec.Struct, frozen=True, gc=False):
    """The request did not fit at once and waits. `explanation` says the obstacle in a sentence, with its figures.

    `mark` is where it stands in its tier, for `Pool.standing`; None where it had been admitted before.
    """

    at_us: int
    obstacle: Obstacle
    explanation: str
    mark: tuple[int, int] | None = None


class Risen(msgspec.Struct, frozen=True, gc=False):
    """The waiting request rose to a better tier, `tier`, as its deadline came near. `mark` is that of `Queued`."""

    at_us: int
    tier: str
    mark: tuple[int, int]


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Why an engine got a request: its ledger without that request, and the predictions. None is unbounded.

    `capacity_tokens` and `capacity_requests` are what it had at that moment, less while it starts slowly. `hits` are
    tokens of the `prompt` that engines, by their ids, were predicted to have. `claimed_us` is for how long the request
    stood in line for an engine; 0 where it did not.
    """

    capacity_tokens: int | None
    capacity_requests: int | None
    held_tokens: int
    held_requests: int
    unprefilled_tokens: int
    prompt: int = 0
    hits: tuple[tuple[str, int], ...] = ()
    claimed_us: int = 0


class Grant(msgspec.Struct, frozen=True, gc=False):
    """How a wait ended, in a lease or not. Times in microseconds; `level` is the aged level in whole levels.

    `at_us` is the moment of the decision and `overtaken_at_us` that of the first overtaking, None where no later
    request went first; both are on the clock of `Pool.now_us`. `served_ahead` counts the tokens admitted meanwhile, by
    the tier's name; tiers with none are left out. `passed` has those it overtook: of every other tier whose first in
    line had come before it, by which rule it went first all the same: `always_first`, `reserve`, `reserve_turn`,
    `level`, `gain`, `limit`, `passed_over` or `claim` (`scheduling.reports.Rule` says what each means). In a pool of
    several engines `engine` is the id of the one that got it, `name#incarnation`, and `placed` says why, where the
    pool says so.
    """

    at_us: int
    queue_wait_us: int
    starvation_us: int
    overtaken_at_us: int | None
    served_ahead: Mapping[str, int]
    level: int
    passed: Mapping[str, str] = {}
    engine: str | None = None
    placed: Placed | None = None


class Admitted(Grant, frozen=True, gc=False):
    """The request holds its lease. `engine_priority` was sent to the engine, None where nothing was forwarded.

    `is_dry_run` says that it passed without a lease, in `mode: observe`.
    """

    engine_priority: int | float | None = None
    is_dry_run: bool = False


class ReplayReason(str, Enum):
    """Why a request left its engine before the first byte of its answer, and waits for one again.

    UNREACHED: no connection could be made, or the engine had restarted or gone before the request was sent. FULL: it
    answered 429, 503 or 529. CRASHED: the connection broke, and the engine is gone. BROKEN: the connection broke, and
    the engine answers.
    """

    UNREACHED = "unreached"
    FULL = "full"
    CRASHED = "crashed"
    BROKEN = "broken"


class Replayed(msgspec.Struct, frozen=True, gc=False):
    """An engine, by its id, did not serve the request, which waits again for one, unseen by its client.

    `Preempted` with `is_unreached` follows at once.
    """

    at_us: int
    engine: str
    reason: ReplayReason


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """The request gave its room to a more important one before its first byte, and waits again from now on.

    Or it gave its room back because the proxy could not connect to the engine (`is_unreached`). `admitted_us` is when
    it had been admitted: what the engine has done since is lost. `times` counts how often the request was preempted,
    or how often it was handed back. A later `Admitted` has its whole wait, from the arrival on. Where there is none,
    because it was refused or left while it waited again, `Settled` has no tokens used, and the refusal's code as its
    `error`.
    """

    at_us: int
    admitted_us: int
    times: int
    is_unreached: bool = False


class ServiceGain(msgspec.Struct, frozen=True, gc=False):
    """Gain of a request, in weighted tokens that came before their deadlines, of what it could have earned.

    `slo` is its outcome by its tier's objective: met, ttft, tpot, refused or abandoned.
    """

    earned: int
    attainable: int
    slo: str


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The middleware ended the request: it answered with an error, or had no one to answer (`status` is None).

    The latter is `client_left` (the client disconnected) or `canceled` (the server stopped). The waiting figures
    are zero where it never waited. `tenant`, `tier` and `key`, the key's name, are None where the key was not known
    yet, and `key` where it has no name. The tier is the one
    that its path and its key give it, where it ended before its body was read. `gain` is there where its tier has an
    objective.
    """

    at_us: int
    code: str
    message: str
    status: int | None
    queue_wait_us: int = 0
    starvation_us: int = 0
    overtaken_at_us: int | None = None
    served_ahead: Mapping[str, int] = {}
    tenant: str | None = None
    gain: ServiceGain | None = None
    tier: str | None = None
    key: str | None = None


class FirstByte(msgspec.Struct, frozen=True, gc=False):
    """The first byte of the response's body went out."""

    at_us: int
    status: int


class Settled(msgspec.Struct, frozen=True, gc=False):
    """The lease was given back.

    `input_tokens` and `output_tokens` are the engine's own count, None where it sent none, and `cached_tokens` the part
    of `input_tokens` that its prefix cache had, where it says so. `tokens_used` is the best
    known: the engine's count, or else the estimate of the prompt and the chunks that went out. `error` is a word from
    a small set (an error code, an exception's class), None where the request did not fail. `wait` is what `Refused`
    would have had, for a request that was preempted and ended while it waited again; None where that is not known.
    `message` is what the proxy answered in the engine's place, None where the app answered. `held_tokens` is what the
    lease held at last, None where no output length is learned, and `growths` how often it grew while it streamed.
    `gain` is there where its tier has an objective.
    """

    at_us: int
    outcome: Outcome
    status: int | None
    tokens_used: int
    input_tokens: int | None
    output_tokens: int | None
    error: str | None
    wait: Refused | None = None
    message: str | None = None
    held_tokens: int | None = None
    growths: int = 0
    gain: ServiceGain | None = None
    cached_tokens: int | None = None


class Verdict(str, Enum):
    """The end that enforcing would have given a request, as far as that can be known."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    ABANDONED = "abandoned"
    UNKNOWN = "unknown"


class Observed(msgspec.Struct, frozen=True, gc=False):
    """The end that enforcing would have given a request that passed in `mode: observe`, by the policy of `generation`.

    `code` is the refusal's; `client_left` where the client would have disconnected before it was admitted; why it is
    unknown where it is; None where it would have been admitted. `tier` and `tenant` are None where the request would
    have been refused before they were known. The waiting figures are those of `Admitted`. `received_us` is when the
    request came, on the same clock as `at_us`. `path` is the endpoint's in the policy, `client` the address from which
    the connection came. `clamped_from` is the tier that it asked for, where that is better than it may have.
    """

    at_us: int
    request_id: str
    generation: str
    verdict: Verdict
    code: str | None
    tier: str | None
    tenant: str | None
    queue_wait_us: int = 0
    starvation_us: int = 0
    served_ahead: Mapping[str, int] = {}
    received_us: int = 0
    path: str | None = None
    client: str | None = None
    clamped_from: str | None = None


class ShadowHolds(msgspec.Struct):
    """Of one tier in `mode: observe`: how the times were found for which shadow requests held their room.

    `shadows` counts those that have held. Of them, `guessed` ended before their requests, so that the output length was
    drawn; `guessed_s` and `known_s` are the times of the `guessed_and_known` whose requests have ended since, as drawn
    and as they would have been. `unlearned` held for as long as their requests ran among more than the pool admits,
    because nothing was known of a quiet engine. `lost` were refused by the engine or failed there, `left` by their
    clients before the first byte that they would have had by then. `arrivals` came while the pool would have been full,
    and `followed` of them directly after an end. Of a tier that is to be held to its SLO, `met` and `missed` count the
    requests as they passed, and `would_meet` and `would_miss` their shadows.
    """

    shadows: int = 0
    guessed: int = 0
    guessed_and_known: int = 0
    guessed_s: float = 0.0
    known_s: float = 0.0
    unlearned: int = 0
    lost: int = 0
    left: int = 0
    arrivals: int = 0
    followed: int = 0
    met: int = 0
    missed: int = 0
    would_meet: int = 0
    would_miss: int = 0


Event = Classified | Queued | Risen | Admitted | Replayed | Preempted | Observed | Refused | FirstByte | Settled


class AppTrace(Protocol):
    """A request's trace, current while its app runs: what the app traces and logs belongs to it."""

    def detach(self) -> None:
        """The app has returned, in the task in which the trace was made current."""

    def outside(self, send: Send, message: Message) -> Awaitable[None]:
        """Sends a message in the context that the request came with."""


class Observation(Protocol):
    """The receiver of one request's events. Must not raise and must not block: it is called on the request's path."""

    def headers(self) -> Headers:
        """Headers that carry the trace context on to the engine; they replace the client's own of the same names."""

    def app_trace(self) -> AppTrace | None:
        """Makes the request's trace current in this task, until it is detached. None where there is none."""

    def on_event(self, event: Event) -> None:
        """One thing that happened."""


class Observer(Protocol):
    """Makes an `Observation` for a request, or None where this one is not observed."""

    def listens(self) -> bool:
        """True if requests are observed now: where they are not, `received` returns None."""

    def follows(self) -> bool:
        """True if each event of a request is to be reported as it comes. Else those of failures alone, at their end.

        `received` is called then, and after it come all events that there were.
        """

    def received(self, event: Received) -> Observation | None:
        """Called once per guarded request, before any of its events."""


class StoreState(str, Enum):
    """Where a pool's leases are decided on. WAITING: nowhere, until the replicas of another version have ended."""

    CONNECTING = "connecting"
    WAITING = "waiting"
    SHARED = "shared"
    DIVIDED = "divided"
    CLOSED = "closed"


class StoreChanged(msgspec.Struct, frozen=True, gc=False):
    """A replica lost its store, or has it again. `reason` is one line for people, without secrets."""

    at_us: int
    state: StoreState
    reason: str


StoreObserver = Callable[[StoreChanged], None]
"""Called with every change of a store's state. Must not raise and must not block."""


class UnguardedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request on a path that the policy does not guard, other than one that only reads.

    `route` is a known path or a route's template, never what a client made up. `code` and `message` are those of the
    refusal, None where there is none; with `is_refused` false it passed all the same, in `mode: observe`. `request_id`
    is the id in the response of a refused request, None of another.
    """

    route: str
    is_refused: bool
    code: str | None = None
    message: str | None = None
    status: int | None = None
    request_id: str | None = None


UnguardedObserver = Callable[[UnguardedRequest], None]
"""Called once for every such request. Must not raise and must not block."""


ObservedObserver = Callable[[Observed], None]
"""Called once for every request that passed in `mode: observe`, perhaps after its end. Must not raise or block.
"""
