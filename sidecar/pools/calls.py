"""Messages between a replica and the ledger of its pool. Packed as arrays, so the order of the fields counts.

Times are in microseconds. A call has spans, since both clocks may differ; what is answered has moments on the ledger's
clock, and says what that shows now.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, TypeAlias

import msgspec

from sidecar.policy.rules import Shares, StatedShares
from sidecar.scheduling import rate_limit
from sidecar.scheduling.amounts import NOTHING
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.reports import Found
from sidecar.scheduling.tickets import TicketGain
from sidecar.version import STORE_LAYOUT

LAYOUT = STORE_LAYOUT
"""The number of the format of the state, and of these records. Two numbers are never in force at once."""

HEARTBEAT_US = 1_800_000
"""A replica states all its cells at least so often."""

LOST_US = 2_200_000
"""A store without any call for so long begins an epoch."""

HOLD_US = 2_200_000
"""The longest time in which nothing is granted at the beginning of an epoch."""

ALONE_US = 2_500_000
"""Without an answer for so long a replica admits alone. More than LOST_US, so who was alone finds a new epoch."""

DEAD_US = 10_000_000
"""A replica without an accepted call for so long is dropped; one that is alone takes its whole part."""

PPM = 1_000_000
"""Shares cross in millionths."""

BIDS_SHOWN = 32
"""The most bids of one replica and tier, and in one call."""


Sums: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The figures of a `Cell`."""


class Cell(msgspec.Struct, array_like=True, frozen=True):
    """The absolute sums of one tier of one replica on one engine.

    `prompt` counts in the pool, `sent` in the engine. `floor_...`: the part that fills the tier's floor, by gain.
    """

    tier: str
    engine: str
    tokens: int = 0
    requests: int = 0
    prompt: int = 0
    sent: int = 0
    floor_tokens: int = 0
    floor_requests: int = 0
    floor_prompt: int = 0

    @property
    def sums(self) -> Sums:
        """Its figures."""
        sums: Sums = msgspec.structs.astuple(self)[2:]
        return sums


class Bid(msgspec.Struct, array_like=True, frozen=True):
    """A ticket that its replica shows. A ticket that is shown again has a new `id`; its `number` stays."""

    id: int
    tier: str
    tenant: str
    tokens: int
    requests: int
    prompt: int
    weight: int
    hits: dict[str, int]
    barred: list[str]
    waited_us: int
    number: int
    gain: TicketGain | None = None
    has_returned: bool = False
    hint: float | None = None
    user: str | None = None
    cost: int | None = None


class Withdrawn(msgspec.Struct, array_like=True, frozen=True):
    """A bid whose client left."""

    id: int
    tier: str


class LeaseGrowth(msgspec.Struct, array_like=True, frozen=True):
    """The growth of a lease, as its tenant is charged for it; below 0 what it did not use is given back.

    `first_call` is the number of the first call that had it: it counts once.
    """

    tier: str
    tenant: str
    tokens: int
    weight: int
    first_call: int
    user: str | None = None


class Owed(msgspec.Struct, array_like=True, frozen=True):
    """A turn that its tier pays back. `first_call`: see `LeaseGrowth`."""

    tier: str
    owed_us: int
    first_call: int


class SloSeen(msgspec.Struct, array_like=True, frozen=True):
    """Requests of a guarded tier that met its SLO, and those that missed it. `first_call`: see above."""

    tier: str
    met: int
    missed: int
    first_call: int


class GuardDecided(msgspec.Struct, array_like=True, frozen=True):
    """Rule 10: a guarded tier leaves a `share` of the pool to less important ones, in millionths.

    It counts where nothing was decided since the moment `since_us`; 0: where nothing was decided at all. `met` and
    `missed` are those that it rests upon; `state` is what the next decision needs of it.
    """

    tier: str
    since_us: int
    share_ppm: int
    met: int
    missed: int
    state: list[float]


class GuardHeld(msgspec.Struct, array_like=True, frozen=True):
    """A guarded tier as the ledger has it, decided at `decided_us`, 0 for never.

    Since then its SLO was `met` and `missed` so often, and `has_kept_out`: something has waited for it alone.
    """

    share_ppm: int = 0
    decided_us: int = 0
    met: int = 0
    missed: int = 0
    has_kept_out: bool = False
    state: list[float] = []


NO_GUARD = GuardHeld()
"""Of a tier that is not guarded."""


class EngineView(msgspec.Struct, array_like=True, frozen=True):
    """An engine as a replica sees it."""

    id: str
    tokens: int
    requests: int
    prefill: int
    speed: int
    is_reachable: bool
    age_us: int = 0
    ramp_us: int = 0


class Cap(msgspec.Struct, array_like=True, frozen=True):
    """An engine refused, or too many wait in it: at most so many `requests` for so long."""

    engine: str
    requests: int
    for_us: int


class Drain(msgspec.Struct, array_like=True, frozen=True):
    """An operator's word on an engine; `at_us` is the ledger's time of it, 0 for now."""

    engine: str
    is_drained: bool
    at_us: int = 0


class LedgerTierRules(msgspec.Struct, array_like=True, frozen=True):
    """The rules of one tier, its shares in millionths of the pool."""

    name: str
    reserve_ppm: int
    lend_ppm: int
    limit_ppm: int
    always_first: bool
    preemptible: bool
    preempt_after_us: int | None
    hold_ppm: int = 0

    @classmethod
    def of(cls, tier: StatedShares) -> LedgerTierRules:
        """The shares of a tier, to a millionth."""
        reserve, lend, limit, hold = (round(share * PPM) for share in (tier.reserve, tier.lend, tier.limit, tier.hold))
        return cls(tier.name, reserve, lend, limit, tier.always_first, tier.preemptible, tier.preempt_after_us, hold)

    def as_shares(self) -> Shares:
        """The shares themselves."""
        reserve, lend, limit = (Fraction(ppm, PPM) for ppm in (self.reserve_ppm, self.lend_ppm, self.limit_ppm))
        hold = Fraction(self.hold_ppm, PPM)
        return Shares(self.name, reserve, lend, limit, self.always_first, self.preemptible, self.preempt_after_us, hold)


class LedgerRules(msgspec.Struct, array_like=True, frozen=True):
    """The rules of a pool: `figures.Rules`."""

    tiers: list[LedgerTierRules]
    promote_after_us: int | None
    ceiling: int
    max_preemptions: int
    affinity_percent: int
    by_gain: bool
    fair_ppm: int

    @classmethod
    def of(cls, rules: Rules) -> LedgerRules:
        """`rules`, whose shares count to a millionth."""
        return cls(
            [LedgerTierRules.of(tier) for tier in rules.tiers],
            rules.promote_after_us,
            rules.ceiling,
            rules.max_preemptions,
            rules.affinity_percent,
            rules.by_gain,
            round(rules.fair * PPM),
        )

    def as_rules(self) -> Rules:
        """The rules themselves."""
        return Rules(
            tuple(tier.as_shares() for tier in self.tiers),
            self.promote_after_us,
            self.ceiling,
            self.max_preemptions,
            self.affinity_percent,
            self.by_gain,
            Fraction(self.fair_ppm, PPM),
        )


class Metered(msgspec.Struct, array_like=True, frozen=True):
    """Asks whether a request is within the limits of an account. If so it is charged; else its bid is not taken.

    `number` is its bid's, `tenant` the account: its tenant's, or one beside it. Those about one request follow each
    other: it is charged to all of its accounts, or to none. Without `charges` it is only a question. None: there is no
    such limit. `most`: so many accounts of its kind are kept, 0 for all.
    """

    number: int
    tenant: str
    tokens: int
    charges: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    burst_us: int
    most: int = 0


class ChargeSettled(msgspec.Struct, array_like=True, frozen=True):
    """A request that was charged has ended: it `used` so many tokens, None for its estimate.

    `first_call` is the number of the first call that had it: it counts once. `is_counted`: it counts as a request.
    `was_held`: it ran, so its time says how long requests take.
    """

    first_call: int
    charge: rate_limit.Charge
    used: int | None
    is_counted: bool
    was_held: bool


class Running(msgspec.Struct, array_like=True, frozen=True):
    """Number of a limited tenant's requests that wait or run at the replica."""

    tenant: str
    count: int


Kind = Literal["ask", "state", "call", "bye"]


class Call(msgspec.Struct, array_like=True):
    """A replica's question or news.

    `ask`: is the store there? `state`: all that it has. `call`: the changes. `bye`: it leaves.
    `number` goes up by one with each call of the replica `who`. `whole`: the cells are all that there are. `bid_count`,
    with a heartbeat: the bids that it has shown and not seen granted. `leaving`: all sums of leases that are being
    taken back, if they changed. `knew`: how many replicas it knew last. `replaces`: its rules replace others of the
    same tiers; `takes_over`: also those of other tiers. `virtual`: the virtual times of its tiers, as it knew them.
    `running`: the counts that fell; in a statement all. What a verdict charged counts already.
    `seen`: of guarded tiers. `guards`: what the replica decided about them.
    """

    layout: int
    who: str
    number: int
    kind: Kind
    cells: list[Cell] = []
    whole: bool = False
    bid_count: int | None = None
    leaving: list[Cell] | None = None
    acks: list[int] = []
    bids: list[Bid] = []
    withdrawn: list[Withdrawn] = []
    charges: list[LeaseGrowth] = []
    owes: list[Owed] = []
    engines: list[EngineView] | None = None
    caps: list[Cap] = []
    drains: list[Drain] = []
    rules: LedgerRules | None = None
    replaces: bool = False
    takes_over: bool = False
    knew: int = 0
    virtual: list[float] = []
    metered: list[Metered] = []
    settled: list[ChargeSettled] = []
    running: list[Running] = []
    seen: list[SloSeen] = []
    guards: list[GuardDecided] = []


class BidGranted(msgspec.Struct, array_like=True, frozen=True):
    """A bid that got an engine. It counts since `counted_us`; `excess` and `excess_prompt`: rule 5.

    For reports: `found` is the engine as it found it, `passed` the tiers whose first had come before it, each with the
    rule (`reports.Rule`).
    """

    bid: int
    tier: str
    engine: str
    tokens: int
    requests: int
    prompt: int
    sent: int
    excess: int
    excess_prompt: int
    is_in_floor: bool
    counted_us: int
    found: Found = Found(0, 0, 0, 0, 0, 0)
    passed: list[tuple[str, str]] = []

    @property
    def sums(self) -> Sums:
        """The figures of a cell that contains it alone."""
        amount = self.tokens, self.requests, self.prompt
        return *amount, self.sent, *(amount if self.is_in_floor else NOTHING)


class EngineHeld(msgspec.Struct, array_like=True, frozen=True):
    """Sums that an engine holds of all replicas; `lined`: the prompts of those in line for it.

    It may run at most `cap_requests` until `cap_until_us` (rule 8).
    """

    id: str
    tokens: int
    requests: int
    prompt: int
    sent: int
    lined: int
    cap_requests: int
    cap_until_us: int


class EngineConfig(msgspec.Struct, array_like=True, frozen=True):
    """An engine as the pool sees it."""

    id: str
    tokens: int
    requests: int
    prefill: int
    speed: int
    is_ready: bool
    since_us: int
    ramp_us: int


class Lined(msgspec.Struct, array_like=True, frozen=True):
    """A bid of the replica that stands in line for an engine, or for none (`engine` is empty)."""

    bid: int
    engine: str
    since_us: int


class TierHeld(msgspec.Struct, array_like=True, frozen=True):
    """Sums that a tier holds: `scheduler.TierState`. Its virtual time, and how often its tags started afresh.

    `served`: the tokens that were granted since the pool began. `guard`: where the tier is guarded.
    """

    tier: str
    virtual: float
    afresh: int
    owes_until_us: int
    on_engines: tuple[int, int, int]
    in_line: tuple[int, int, int]
    on_floor: tuple[int, int, int]
    in_line_on_floor: tuple[int, int, int]
    served: int = 0
    guard: GuardHeld = NO_GUARD


class Needed(msgspec.Struct, array_like=True, frozen=True):
    """A bid as who is asked for room sees it: what it needs. Cached: at most, and on each engine that is asked for."""

    bid: int
    tier: str
    tokens: int
    requests: int
    prompt: int
    cached: int
    cached_there: list[int]
    arrived_us: int
    number: int


class ReportedShortage(msgspec.Struct, array_like=True, frozen=True):
    """`preemption.Shortage`. The place is the ledger's but for arrivals: it is `order_class`, `before_key`, `key`.

    `before`: of each of the engines.
    """

    engines: list[str]
    order_class: int
    before_key: int
    key: int
    served: Needed
    before: list[list[Needed]]
    burst: list[Needed]
    closed: list[str]


class MeterVerdict(msgspec.Struct, array_like=True, frozen=True):
    """The answer to `Metered`: its charge, or the limit that it exceeds and when it would fit, None for never.

    Then what is left of requests and of tokens, each with the time until all of it is there.
    """

    number: int
    charge: rate_limit.Charge | None
    over: rate_limit.Limit | None
    after_us: int | None
    requests: tuple[int, int] | None
    tokens: tuple[int, int] | None


class Reply(msgspec.Struct, array_like=True):
    """`unknown`: state all. `wait`: another layout is in force. `ok`: with the fields that follow.

    `grants` are all that are not acknowledged. `next_us`: when time alone changes something. `latest`: of all that were
    granted the one that came last, if it is another replica's: when it arrived, and when it was granted. `is_foreign`:
    the pool has other tiers than the replica. `finish`: the tags of the tenants of this call's bids that are ahead.
    `shortage`: room that this replica is to take back from its leases; `leaving` is what all take back already.
    If they changed since its last reply: `config`, the engines, `drained`, and `lined`, its bids in line.
    """

    number: int
    kind: Literal["unknown", "wait", "ok"]
    now_us: int = 0
    grants: list[BidGranted] = []
    alive: int = 0
    on_hold: bool = False
    is_foreign: bool = False
    waiting: int = 0
    next_us: int | None = None
    latest: tuple[int, int] | None = None
    held: list[EngineHeld] = []
    tiers: list[TierHeld] = []
    finish: list[tuple[str, str, float]] = []
    leaving: list[Cell] = []
    shortage: ReportedShortage | None = None
    config: list[EngineConfig] | None = None
    drained: list[Drain] | None = None
    lined: list[Lined] | None = None
    verdicts: list[MeterVerdict] = []


class WakeUp(msgspec.Struct, array_like=True, frozen=True):
    """Published to one replica, or to all at a new epoch (`to` is empty). A hint that may get lost.

    `is_asked`: room is short that this replica may take back; its next call gets the shortage.
    """

    to: str
    grants: list[BidGranted] = []
    is_asked: bool = False
    now_us: int = 0
