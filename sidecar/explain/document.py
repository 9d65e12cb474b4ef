"""Explanation of one request as a document: `GET /requests/{id}` answers it, `sidecar explain --request` prints it.

JSON names are the field names. `*_at_s` are seconds since 1970; the other `*_s` are durations in seconds.
"""

from __future__ import annotations

import msgspec

from sidecar.events import Expectation
from sidecar.telemetry.ahead import AheadGroup, UnknownAhead


class RequestFacts(msgspec.Struct, frozen=True):
    """The tenant, its key's name, and the request: the granted tier, its source, and the tokens that it holds."""

    tenant: str
    tier: str
    source: str
    clamped_from: str | None
    api: str
    model: str | None
    stream: bool
    tokens: int
    requests: int
    max_output_tokens: int | None
    downgraded_from: str | None = None
    key: str | None = None
    risen_from: str | None = None
    user: str | None = None


class SizeDetails(Expectation, frozen=True):
    """Expected use, in tokens, where output lengths are learned.

    `held_tokens` is what its lease held at its end, None before, and `growths` how often it grew until then.
    """

    held_tokens: int | None = None
    growths: int = 0


class ObstacleDetails(msgspec.Struct, frozen=True):
    """Why it was not admitted as it came."""

    found_at_s: float
    obstacle: str
    explanation: str


class AdmittedAhead(msgspec.Struct, frozen=True):
    """Another request that was admitted while this one waited. `came_later`: it overtook."""

    request_id: str
    trace_id: str | None
    tier: str
    tenant: str
    tokens: int
    came_later: bool
    rule: str
    because: str
    arrived_at_s: float
    admitted_at_s: float


class WaitDetails(msgspec.Struct, frozen=True):
    """How the wait went, or how it has gone so far. `first` are the first of those ahead, `groups` counts them all.

    `overtaken_at_s` is the first admission of a request that had come later, and `overtaken_by` that request, None
    where it is not known here.
    """

    queue_wait_s: float
    starvation_s: float
    overtaken_at_s: float | None
    overtaken_by: AdmittedAhead | None
    groups: list[AheadGroup]
    unseen: list[UnknownAhead]
    first: list[AdmittedAhead]


class EngineChoice(msgspec.Struct, frozen=True):
    """The engine that it got in a pool of several, as it stood without the request. None is unbounded, or not known.

    `hit` of the `prompt_tokens` it was predicted to have cached; `other_hits` are those of other engines, by their
    names. `claimed_s` is for how long the request stood in line for an engine.
    """

    engine: str
    id: str
    capacity_tokens: int | None = None
    capacity_requests: int | None = None
    held_tokens: int | None = None
    held_requests: int | None = None
    unprefilled_tokens: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    other_hits: dict[str, int] = {}
    claimed_s: float = 0.0


class AdmissionDetails(msgspec.Struct, frozen=True):
    """It was admitted, at this aged level; `engine_priority` is the priority sent to the engine, None where none
    was. `engine` is None in a pool of one engine.
    """

    admitted_at_s: float
    level: int
    aged_to: str | None
    engine_priority: float | None
    engine: EngineChoice | None = None


class AttemptDetails(msgspec.Struct, frozen=True):
    """It was admitted, and preempted before its first byte: `engine_s` of the engine's time are lost.

    Or the engine could not be reached (`is_unreached`), and nothing is lost. In a pool of several engines it is also
    that where the engine did not serve the request: `replay` says why, and `engine` which one it was.

    `queue_wait_s` is how long it had waited until then, since its arrival or the preemption before. `waited_again_s` is
    how long it waited after it, or has up to now.
    """

    admitted_at_s: float
    preempted_at_s: float
    queue_wait_s: float
    engine_s: float
    waited_again_s: float
    is_unreached: bool = False
    replay: str | None = None
    engine: str | None = None


class FirstByteDetails(msgspec.Struct, frozen=True):
    """The first byte of the answer went out."""

    first_byte_at_s: float
    status: int


class Ending(msgspec.Struct, frozen=True):
    """It gave back what it held."""

    settled_at_s: float
    outcome: str
    status: int | None
    tokens_used: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    error: str | None


class RefusalDetails(msgspec.Struct, frozen=True):
    """It was refused. `status` is None where the client had disconnected; `tenant` and `tier`, where its key was not
    known.
    """

    refused_at_s: float
    status: int | None
    code: str
    message: str
    tenant: str | None = None
    tier: str | None = None
    key: str | None = None


class DryRunDetails(msgspec.Struct, frozen=True):
    """It passed in `mode: observe`. What enforcing would have done; `verdict` is None where that is not known yet.

    `code` is the refusal's, or says why the verdict is unknown.
    """

    verdict: str | None = None
    code: str | None = None
    queue_wait_s: float = 0.0
    starvation_s: float = 0.0


class Explanation(msgspec.Struct, frozen=True):
    """Everything that is known of a request at `told_at_s`.

    `state` is `arriving`, `waiting`, `running`, `refused`, `abandoned`, or how it ended: `completed`, `client_left`,
    `failed`. `preempted` has every time that it had to begin anew; `admitted` is the last admission. `others` are more
    requests of the same id. `conclusion` says it all in a sentence.
    """

    request_id: str
    conclusion: str
    state: str
    pool: str
    told_at_s: float
    method: str
    path: str
    arrived_at_s: float
    trace_id: str | None = None
    span_id: str | None = None
    others: int = 0
    asked: RequestFacts | None = None
    in_the_way: ObstacleDetails | None = None
    wait: WaitDetails | None = None
    preempted: list[AttemptDetails] = []
    admitted: AdmissionDetails | None = None
    answered: FirstByteDetails | None = None
    ended: Ending | None = None
    refused: RefusalDetails | None = None
    dry_run: DryRunDetails | None = None
    size: SizeDetails | None = None
