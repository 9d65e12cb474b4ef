"""The protocol of the admission script: its arguments and its replies, as text and as values. No I/O.

The header of `lua/admission.lua` is the contract.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from dataclasses import fields
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec

from sidecar.policy.model import Policy, Tier
from sidecar.policy.rules import PoolRules, Shares, TierRules
from sidecar.pools.base import Ask
from sidecar.pools.engines import EngineOffer, Found
from sidecar.pools.runtime import figures_of
from sidecar.scheduling import Rule
from sidecar.scheduling.rate_limit import ExceededLimit, Limit
from sidecar.version import store_layout

TIER_FIELDS = [field.name for field in fields(TierRules) if field.name not in ("name", "level")]
TIER_FIELDS.insert(TIER_FIELDS.index("preemptible"), "max_waiting")
"""The figures of a tier in the rules' text, in order: those of `TierRules` and `Tier.max_waiting`. Lua reads them by
these names in capitals: `rule[RESERVE_TOKENS]`. So a new field of `TierRules` reaches Lua by itself."""

BEAT_S = 2.0
"""A replica calls at least this often. The script knows the same figure."""
SILENCE_S = 10.0
"""A replica without a call for so long counts as dead. The script knows the same figure."""

CALL, BEAT, BEGIN, SYNC, BYE = b"call", b"beat", b"begin", b"sync", b"bye"
ENTER, END, RESIZE, BACK, LEASE, TICKET = b"e", b"x", b"z", b"b", b"l", b"t"
KEEP, REQUEUE, HAND_BACK, CUT_OFF = b"k", b"p", b"r", b"h"
METERED_ENTER, METERED_END, COUNTED, UNTOLD = b"m", b"u", b"a", b"f"
ENTER_PROMISED, METERED_ENTER_PROMISED = b"E", b"M"
CHARGED, CHARGE_TENANT = b"y", b"q"
GAIN = b"G"
LEASES_STATED, ALL_STATED = b"n", b"d"
PLACING, ENGINES, PREFILLED, CAP, RAISE_CAP, DRAIN = b"w", b"g", b"i", b"c", b"j", b"o"
OK, UNKNOWN, STALE, FOREIGN, ABSENT = b"ok", b"unknown", b"stale", b"foreign", b"absent"
JOINS, KEEPS, REPLACES, TAKES_OVER = -1, 0, 1, 2
"""The fate of the rules in the store. KEEPS: they stay, if there are any. REPLACES: the rules of this replica replace
them. JOINS: the same, but it makes no pool where there is none. TAKES_OVER: also those of another ladder of tiers."""

_RULES = {
    "a": Rule.ALWAYS_FIRST,
    "r": Rule.RESERVE,
    "t": Rule.TURN,
    "l": Rule.LEVEL,
    "x": Rule.LIMIT,
    "o": Rule.PASSED_OVER,
    "c": Rule.CLAIM,
    "g": Rule.GAIN,
}

MOST_DENOMINATOR = 2**40
_LIMITS = {b"t": Limit.TOKENS, b"r": Limit.REQUESTS, b"c": Limit.CONCURRENT}

_TIER = struct.Struct("<7d32x2d8x")
"""The first seven figures of a tier, and those of its parked requests, as the script keeps them."""
_PACKED, _PACKED_TIER = struct.Struct("<8d"), struct.Struct("<8d32x2d8x")
"""The figures of a packed answer, and those of a tier there, behind its level."""

_NO_ENGINES: Sequence[Any] = ((), (), b"", 0)

Argument = str | bytes | int


def root_key(pool: str, *, has_engines: bool = False, is_by_gain: bool = False) -> str:
    """The key that everything of a pool begins with; the braces keep it on one node of a cluster."""
    return f"admission:{store_layout(has_engines=has_engines, is_by_gain=is_by_gain)}:{{{pool}}}"


def ledger_key(pool: str) -> str:
    """The root of a pool's ledger, with which all of its keys begin; the braces keep them on one node of a cluster."""
    return f"ledger:{{{pool}}}"


def old_pools(pool: str) -> Sequence[str]:
    """The roots of the layouts before the ledger. While a pool there is alive, the ledger grants nothing."""
    return [f"admission:{layout}:{{{pool}}}" for layout in ("9", "engines-5", "gain-4", "gain-engines-4")]


def tenants_key(pool: str) -> str:
    """The key that the tenants in the store begin with. Other than the pool's, it is the same for every layout."""
    return f"admission:tenants:{{{pool}}}"


def usage_key(pool: str) -> str:
    """The key that the use of the tenants begins with, the same for every layout, too."""
    return f"admission:usage:{{{pool}}}"


def grants_channel(pool: str, replica: str, *, has_engines: bool = False, is_by_gain: bool = False) -> str:
    """Where other replicas' calls publish the grants of `replica`."""
    return f"{root_key(pool, has_engines=has_engines, is_by_gain=is_by_gain)}:grants:{replica}"


def rules_text(policy: Policy, rules: PoolRules) -> str:
    """The rules as the script reads them, the same text for the same rules. `rules` are the policy's in some size."""
    tiers = [_tier(rule, tier, rules) for rule, tier in zip(rules.tiers, policy.tiers, strict=True)]
    pool = [rules.tokens, rules.requests, rules.promote_after_us or 0, rules.ceiling]
    return json.dumps([[tier.name for tier in rules.tiers], *pool, *tiers], separators=(",", ":"))


def _tier(rule: TierRules, tier: Tier, rules: PoolRules) -> list[int]:
    """The figures of a tier, -1 for None. `preemptible` says how often a request may be preempted, 0 for never."""
    own = {"max_waiting": tier.max_waiting, "preemptible": rules.max_preemptions if rule.preemptible else 0}
    figures = (own[name] if name in own else getattr(rule, name) for name in TIER_FIELDS)
    return [-1 if figure is None else int(figure) for figure in figures]


def engines_rules_text(policy: Policy, weight_percent: int) -> str:
    """The same for a pool of several engines, whose size the script computes. The weight of a hit stands in place of
    the pool's tokens, and each tier has its shares after its figures: reserve, headroom and limit as fractions.
    """
    rules = policy.rules_of(0, 0, 0)
    tiers = [
        _tier(rule, tier, rules) + _fractions(shares, policy.fair if rules.is_by_gain else Fraction(1))
        for rule, tier, shares in zip(rules.tiers, policy.tiers, policy.shares, strict=True)
    ]
    pool = [weight_percent, 0, rules.promote_after_us or 0, rules.ceiling]
    return json.dumps([[tier.name for tier in rules.tiers], *pool, *tiers], separators=(",", ":"))


def _fractions(shares: Shares, floor_of_reserve: Fraction) -> list[int]:
    """Numerators and denominators, of at most 2^40: the script computes with doubles."""
    exact = (shares.reserve * floor_of_reserve, (1 - shares.lend) * shares.reserve, shares.limit)
    fractions = (
        share if share.denominator <= MOST_DENOMINATOR else share.limit_denominator(MOST_DENOMINATOR) for share in exact
    )
    return [figure for share in fractions for figure in (share.numerator, share.denominator)]


def enter(lease_id: int, ask: Ask, lower: int | None, promised: int | None = None) -> Sequence[Argument]:
    """The operation by which a request asks for a lease; over its tenant's limits it falls to the level `lower`.

    `promised`: the free places of its tier's queue are promised to other requests, so many of them to its tenant.
    """
    last = () if promised is None else (promised,)
    size = (lease_id, ask.tier, ask.tenant, ask.weight, ask.tokens, ask.requests)
    limits = ask.limits
    if limits is None:
        return (ENTER if promised is None else ENTER_PROMISED, *size, *last)
    figures = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests, limits.burst_us, lower)
    operation = METERED_ENTER if promised is None else METERED_ENTER_PROMISED
    charged = (CHARGED, ask.most) if ask.most > ask.tokens else ()
    return (*charged, operation, *size, *(-1 if figure is None else figure for figure in figures), *last)


def gain(lease_id: int, ask: Ask) -> Sequence[Argument]:
    """The operation before that of a request that asks for a lease, waits or returns, in a pool that orders by gain."""
    return () if ask.gain is None else (GAIN, lease_id, ask.tier, ",".join(map(str, figures_of(ask.gain))))


def placing(ask: Ask) -> Sequence[Argument]:
    """The operation before those of a request that asks for a lease, or waits, in a pool of several engines."""
    if not ask.hits and not ask.barred:
        return (PLACING, ask.prompt)
    return (PLACING, msgspec.json.encode((ask.prompt, dict(ask.hits), ask.barred)))


def on_engine(engine: str | None, unprefilled: int) -> Sequence[Argument]:
    """The operation before the statement of a lease: its engine, and what is un-prefilled there."""
    return (PLACING, msgspec.json.encode((engine or "-", unprefilled)))


def engines(offers: Sequence[EngineOffer], draining: Collection[str], now_us: int) -> Sequence[Argument]:
    """The operation by which a replica states all engines that it knows. `draining` are names."""
    stated = [
        (*offer[:5], int(offer.takes_new), offer.ramp_us, now_us - offer.since_us, int(name_of(offer.id) in draining))
        for offer in offers
    ]
    return (ENGINES, msgspec.json.encode(stated))


def cap(engine: str, refused: int, for_us: int) -> Sequence[Argument]:
    """The operation by which an engine runs no more requests for so long than now, less those that it refused."""
    return (CAP, engine, refused, for_us)


def raise_cap(engine: str, requests: int) -> Sequence[Argument]:
    """The operation by which a capped engine may run so many requests more."""
    return (RAISE_CAP, engine, requests)


def drain(name: str, *, drains: bool) -> Sequence[Argument]:
    """The operation by which the engine of a name takes no new requests, or does again."""
    return (DRAIN, name, int(drains))


def name_of(engine: str) -> str:
    """The name in an engine's id."""
    return engine.rpartition("#")[0]


def end(lease_id: int, ask: Ask, used_tokens: int | None, *, is_counted: bool = True) -> Sequence[Argument]:
    """The operation that ends a lease or a wait. `used_tokens` is None where the number is not known.

    A request that is not counted used none, and its tenant gets the request back, too.
    """
    if ask.limits is None:
        return (END, lease_id)
    return (METERED_END, lease_id, -2 if not is_counted else -1 if used_tokens is None else used_tokens)


def statement(lease_id: int, ask: Ask, waited_us: int | None, returns: int = 0) -> Sequence[Argument]:
    """The statement of one lease, or of a ticket that has waited for so long."""
    if waited_us is None:
        return (LEASE, lease_id, ask.tier, ask.tokens, ask.requests, returns)
    return (TICKET, *_waiting(lease_id, ask, waited_us, returns))


def requeue(
    lease_id: int, ask: Ask, waited_us: int, returns: int, *, is_handed_back: bool = False
) -> Sequence[Argument]:
    """The operation by which a victim, or a lease that no engine took, waits again, for the `returns`-th time."""
    return (HAND_BACK if is_handed_back else REQUEUE, *_waiting(lease_id, ask, waited_us, returns))


def _waiting(lease_id: int, ask: Ask, waited_us: int, returns: int) -> Sequence[Argument]:
    size = (ask.tokens, ask.requests)
    return (lease_id, ask.tier, ask.tenant, ask.weight, *size, max(0, waited_us), returns)


class TierReply(NamedTuple):
    """One tier in the store; `served` and `admitted` count tokens and requests since the pool was made.

    Those that wait outside the queue, because their replica cannot reach the engine, count as queued. Only the script
    reads the other figures of the text.
    """

    held_tokens: int
    held_requests: int
    queued_tokens: int
    queued: int
    virtual: float
    served: int
    admitted: int


class WaitReply(NamedTuple):
    """How a ticket waited, in microseconds; `starved_us` is None where it was not overtaken.

    `level` is None where it was admitted as it came: it is its tier's. `passed` is as in `scheduling.Admission`.
    `returns` is how often it had waited again before: a line may arrive late, and twice. In a pool of several engines
    `engine` is the id of its own, `found` that one's ledger without it, where the store says so, and `claimed_us` for
    how long it had claimed an engine.
    """

    wait_us: int
    starved_us: int | None
    level: int | None
    served_ahead: Sequence[int]
    passed: Sequence[tuple[int, Rule]] = ()
    returns: int = 0
    engine: str | None = None
    found: Found | None = None
    claimed_us: int = 0


class Lines(NamedTuple):
    """The lines of a reply or a message: grants, the victims with their returns, and the tickets that gave their
    place in a full queue to a tenant below its share.
    """

    grants: Sequence[tuple[int, WaitReply | None]]
    victims: Sequence[tuple[int, int]] = ()
    displaced: Sequence[int] = ()


class LimitVerdict(NamedTuple):
    """The verdict on a request with limits: it entered at `level`, downgraded or not, or it is `over` them and refused.

    `requests` and `tokens` are the amount that is left of the limit per minute now, and the microseconds until all of
    it is; None for no limit.
    """

    lease_id: int
    level: int
    is_downgraded: bool
    over: ExceededLimit | None
    requests: tuple[int, int] | None
    tokens: tuple[int, int] | None


class Reply(NamedTuple):
    """The reply of a call. A grant whose wait is None was given as the ticket came.

    The last four are for a pool of several engines: see `engine_ledgers`. `blocked_us` is for how long, in all, some
    ticket has waited that fitted the pool and not its engine.

    `latest_age_us` is the age of the latest arrival among all admitted tickets: an earlier ticket that still waits has
    been overtaken. None where none was admitted yet.

    `expected` replicas may be alive. They include the `unheard` ones, which an empty store does not know yet: the
    figures lack the amounts that these hold. `is_on_hold`: nothing is admitted before replicas have stated their
    leases. `is_stating`: the store waits for the rest of the statement of this replica, or has records of it left to
    end.
    """

    replicas: int
    change_after_us: int | None
    listed: int
    waiting: int
    leases: int
    late: int
    held_tokens: int
    held_requests: int
    latest_age_us: int | None
    expected: int
    is_on_hold: bool
    unheard: int
    is_stating: bool
    tiers: Sequence[tuple[int, TierReply]]
    grants: Sequence[tuple[int, WaitReply | None]]
    victims: Sequence[tuple[int, int]]
    displaced: Sequence[int]
    ended: Sequence[tuple[int, WaitReply | None]]
    refused: Sequence[int]
    verdicts: Sequence[LimitVerdict]
    engines: Sequence[bytes] = ()
    named: Sequence[bytes] = ()
    claims: bytes = b""
    blocked_us: int = 0


_NO_LINES = Lines(())


def is_ok(answer: Any) -> bool:
    """Whether a call was done, so that `read_reply` reads its answer."""
    if isinstance(answer, bytes):
        return len(answer) >= _PACKED.size
    return isinstance(answer, list) and bool(answer[0] == OK)


def read_reply(answer: Any) -> Reply:
    """The answer of a call that was done."""
    if isinstance(answer, bytes):
        return _read_packed(answer)
    _, figures, tiers, grants, ended, refused, verdicts, *of_engines = answer
    replicas, change_after_us, listed, waiting, leases, late, tokens, requests, *rest = figures
    latest_age_us, expected, is_on_hold, unheard, is_stating = rest
    lines = read_lines(grants) if grants else _NO_LINES
    return Reply(
        replicas,
        None if change_after_us < 0 else change_after_us,
        listed,
        waiting,
        leases,
        late,
        tokens,
        requests,
        None if latest_age_us < 0 else latest_age_us,
        expected,
        is_on_hold == 1,
        unheard,
        is_stating == 1,
        list(map(_read_tier, tiers[::2], tiers[1::2])),
        *lines,
        list(map(read_wait, ended)),
        list(map(int, refused)),
        list(map(_read_verdict, verdicts)),
        *(of_engines or _NO_ENGINES),
    )


def _read_packed(kept: bytes) -> Reply:
    """The answer of a call that found no one waiting: see `plain_calls.lua`."""
    replicas, listed, leases, late, tokens, requests, age_us, changed = map(int, _PACKED.unpack_from(kept))
    place = _PACKED.size
    tiers = []
    for _ in range(changed):
        level, *figures = _PACKED_TIER.unpack_from(kept, place)
        tiers.append((int(level), _tier_reply(figures)))
        place += _PACKED_TIER.size
    lines = read_lines(kept[place:].split(b"\n")) if place < len(kept) else _NO_LINES
    return Reply(
        replicas,
        None,
        listed,
        0,
        leases,
        late,
        tokens,
        requests,
        None if age_us < 0 else age_us,
        replicas,
        False,
        0,
        False,
        tiers,
        *lines,
        [],
        [],
        [],
    )


def read_lines(texts: Sequence[bytes]) -> Lines:
    """Lines that are grants, `!ID TIMES` or `-ID`."""
    grants: list[tuple[int, WaitReply | None]] = []
    victims: list[tuple[int, int]] = []
    displaced: list[int] = []
    for text in texts:
        if text.isdigit():  # most often
            grants.append((int(text), None))
        elif text.startswith(b"!"):
            victims.append(_read_victim(text))
        elif text.startswith(b"-"):
            displaced.append(int(text[1:]))
        else:
            grants.append(read_wait(text))
    return Lines(grants, victims, displaced)


def _read_verdict(text: bytes) -> LimitVerdict:
    lease_id, kind, *rest = text.split()
    over, level = None, -1
    if kind == b"o":
        after_us = int(rest[1])
        over, rest = ExceededLimit(_LIMITS[rest[0]], None if after_us < 0 else after_us), rest[2:]
    else:
        level, rest = int(rest[0]), rest[1:]
    requests, requests_reset_us, tokens, tokens_reset_us = map(int, rest)
    return LimitVerdict(
        int(lease_id),
        level,
        kind == b"d",
        over,
        None if requests < 0 else (requests, requests_reset_us),
        None if tokens < 0 else (tokens, tokens_reset_us),
    )


def _read_victim(text: bytes) -> tuple[int, int]:
    lease_id, times = text[1:].split()
    return int(lease_id), int(times)


def read_wait(text: bytes) -> tuple[int, WaitReply | None]:
    """The id, and how it waited: `ID [PASSED] [ON_ENGINE]` or `ID WAIT_US STARVED_US LEVEL SERVED... [PASSED] [rTIMES]
    [ON_ENGINE]`. ON_ENGINE is `[fFOUND,...[,CLAIMED_US]] @ENGINE`.
    """
    if b" " not in text:
        return int(text), None
    words = text.split()
    engine = words.pop()[1:].decode() if words[-1].startswith(b"@") else None
    found, claimed_us = _read_found(words.pop()) if words[-1].startswith(b"f") else (None, 0)
    returns = int(words.pop()[1:]) if words[-1].startswith(b"r") else 0
    passed = _read_passed(words.pop()) if words[-1].startswith(b"p") else ()
    if len(words) == 1:
        return int(words[0]), WaitReply(0, None, None, (), passed, returns, engine, found, claimed_us)
    ticket, wait_us, starved_us, level, *served = map(int, words)
    starved = None if starved_us < 0 else starved_us
    return ticket, WaitReply(wait_us, starved, level, served, passed, returns, engine, found, claimed_us)


def _read_found(text: bytes) -> tuple[Found, int]:
    figures = [int(figure) for figure in text[1:].split(b",")]
    return Found._make(figures[:5]), sum(figures[5:])


def _read_passed(codes: bytes) -> Sequence[tuple[int, Rule]]:
    return [(level, _RULES[code]) for level, code in enumerate(codes[1:].decode()) if code != "."]


def _read_tier(level: int, kept: bytes) -> tuple[int, TierReply]:
    return level, _tier_reply(_TIER.unpack_from(kept))


def _tier_reply(figures: Sequence[float]) -> TierReply:
    held_tokens, held_requests, tokens, queued, virtual, served, admitted, parked, parked_tokens = figures
    waiting = (int(tokens + parked_tokens), int(queued + parked))
    return TierReply(int(held_tokens), int(held_requests), *waiting, virtual, int(served), int(admitted))
