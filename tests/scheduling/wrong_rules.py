"""One rule broken at a time, on purpose: a check that does not notice it proves nothing.

Each is a change of the scheduler (`PATCHES`), or a program that leaves a word out (`CHANGES`): what the scheduler would
answer if it knew nothing of that word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sidecar.scheduling import preemption
from sidecar.scheduling import scheduler as module
from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, plus, within
from sidecar.scheduling.engines import Gone, ScheduledEngine
from sidecar.scheduling.figures import Rules, figures_for
from sidecar.scheduling.guard import GuardedTier, Guards
from sidecar.scheduling.preemption import _Search
from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.scheduler import FIRST, INSIDE, LINE, OTHER, TURN, Scheduler
from sidecar.scheduling.tickets import ScheduledLease, Ticket, TicketGain
from sidecar.scheduling.user_turns import UserTurns

Patch = tuple[Any, str, Any]

class_of, place, heads, need, fits = (
    Scheduler.class_for, Scheduler.place, Scheduler.heads, Scheduler.need, Scheduler.fits,
)  # fmt: skip
engine_for, begin, hold, look = Scheduler._engine_for, Scheduler._begin_to_count, Scheduler.hold, Scheduler.look
wanted, is_small, would_enter = Scheduler.wanted, Scheduler.is_small, Scheduler.would_enter
remove, charge, charge_for, could_take, search_init = (
    FairQueue.remove,
    FairQueue.charge,
    FairQueue._charge_for,
    ScheduledEngine.could_take,
    _Search.__init__,
)
engines_for = preemption._engines_for
keeping_out, change_guards, leaves = Guards._keeping_out, Guards.change_rules, GuardedTier.leaves


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _charges_who_leaves(queue: FairQueue, ticket: Ticket) -> None:
    charge_for(queue, ticket)
    remove(queue, ticket)


def _knows_no_weights(queue: FairQueue, ticket: Ticket) -> None:
    weight, ticket.weight = ticket.weight, 1
    charge_for(queue, ticket)
    ticket.weight = weight


def _gives_nothing_back(queue: FairQueue, tenant: str, tokens: int, *others: Any) -> None:
    charge(queue, tenant, max(0, tokens), *others)


def _gives_back_behind_the_first(queue: FairQueue, tenant: str, *others: Any) -> None:
    first = queue._lanes.pop(tenant, None)
    charge(queue, tenant, *others)
    if first is not None:
        queue._lanes[tenant] = first


def _gives_back_more_than_the_lead(queue: FairQueue, tenant: str, tokens: int, *others: Any) -> None:
    virtual, queue.virtual = queue.virtual, queue.virtual if tokens > 0 else -1e9
    charge(queue, tenant, tokens, *others)
    queue.virtual = virtual


def _forgets_charges(queue: FairQueue, ticket: Ticket) -> None:
    if (lane := queue._lanes.get(ticket.tenant)) and not ticket.has_returned:
        queue.finish[ticket.tenant] = lane[0].start or 0.0
    charge_for(queue, ticket)


def _puts_last_after_a_turn_only(pool: Scheduler, ticket: Ticket, order_class: int, needed: Any) -> None:
    before = pool.tiers[ticket.tier].latest
    begin(pool, ticket, order_class, needed)
    if order_class != TURN:
        pool.tiers[ticket.tier].latest = before


def _leaks(pool: Scheduler, tier: int, engine: str, amount: Any, *others: Any) -> None:
    hold(pool, tier, engine, (max(0, amount[0]), *amount[1:]), *others)


def _forgets_who_is_gone(pool: Scheduler, now_us: int) -> None:
    look(pool, now_us)
    sizes = [engine.size(now_us) for engine in pool.engines.values() if engine.is_ready]
    pool._figures = figures_for(pool.rules, tuple(min(UNBOUNDED, sum(s[d] for s in sizes)) for d in range(3)))


def _in_vain(search: _Search, _: Any) -> bool:
    search._chosen += [lease for lease in search._left if search._may_take(lease)][:1]
    return True


def _takes_what_comes_back_first(search: _Search, pool: Scheduler, found: Any, *others: Any) -> None:
    search_init(search, pool, replace(found, closed=frozenset(), place=(-1, 0, 0, (0, "", 0))), *others)


def _takes_what_has_to_stay(_: _Search, lease: ScheduledLease) -> bool:
    return not (lease.is_kept or lease.is_chosen)


def _no_burst(search: _Search, leases: Any) -> Any:
    lacking, search._left = search.lacking(search._found.served), leases
    return search._needed(search._chosen, lacking) if search._take(lacking) else None


def _knows_no_holders(pool: Scheduler, candidate: Any, earlier: Any) -> Any:
    before = engines_for(pool, candidate, earlier)
    return {engine: before.get(engine, []) for engine in pool.would_enter(candidate.ticket, candidate.order_class)}


def _leaves_no_room_beside_nothing(
    guarded: GuardedTier, needed: Amount, below: Amount, _: Amount, total: Amount
) -> bool:
    return within(plus(total, needed), guarded.most) or within(plus(below, needed), guarded.floors)


def _forgets_floors(guarded: GuardedTier, needed: Amount, below: Amount, _: Amount, total: Amount) -> bool:
    guarded.floors = NOTHING
    return leaves(guarded, needed, below, below, total)


def _guards_against_all(guards: Guards, rules: Rules) -> None:
    change_guards(guards, rules)
    for guarded in guards.tiers:
        guarded.below = range(len(rules.tiers))


PATCHES: dict[str, Patch] = {
    # rules 1 and 2
    "charges tickets that leave": (FairQueue, "remove", _charges_who_leaves),
    "knows no weights": (FairQueue, "_charge_for", _knows_no_weights),
    "serves tenants by arrival": (FairQueue, "_charge_for", always(None)),
    "charges no growth": (FairQueue, "charge", always(None)),
    "knows no costs": (Ticket, "charged", property(lambda t: t.tokens)),
    "gives nothing back": (FairQueue, "charge", _gives_nothing_back),
    "gives back after the first": (FairQueue, "charge", _gives_back_behind_the_first),
    "gives back more than the lead": (FairQueue, "charge", _gives_back_more_than_the_lead),
    "forgets charges at the next admission": (FairQueue, "_charge_for", _forgets_charges),
    "time stands still for users": (UserTurns, "pass_time", always(None)),
    "charges no user": (UserTurns, "charge", always(None)),
    "charges no user's growth": (UserTurns, "grow", always(None)),
    "a user's turn is a tenant's": (UserTurns, "__contains__", always(False)),
    "last in, first out": (Ticket, "arrival", property(lambda t: (-t.arrived_us, t.owner, -t.number))),
    # rule 3
    "admits nothing": (Scheduler, "decide", always([])),
    "first come, first served": (Scheduler, "place", lambda s, t, c: (0, 0, 0, t.arrival)),
    "has no floors": (Scheduler, "class_for", lambda s, t, *f: LINE if t.is_for_floor else OTHER),
    "a turn is inside": (Scheduler, "class_for", lambda *it: INSIDE if class_of(*it) == TURN else class_of(*it)),
    "turns by level": (Scheduler, "place", lambda s, t, c: (c, (c != TURN) * place(s, t, c)[1], *place(s, t, c)[2:])),
    "one head while the tier owes": (Scheduler, "heads", lambda s, level: heads(s, level)[:1]),
    "last after a turn only": (Scheduler, "_begin_to_count", _puts_last_after_a_turn_only),
    "those for the floor wait in their order": (
        Scheduler, "class_for", lambda *it: OTHER if class_of(*it) == LINE else class_of(*it),
    ),
    "a floor is for all in line": (
        Scheduler, "class_for",
        lambda s, t, front, heads: class_of(s, t, None, [t]),
    ),
    # rules 4 and 5
    "small ones slip past": (Scheduler, "holds", always(False)),
    "holds every place": (Scheduler, "holds", always(True)),
    "leaks tokens": (Scheduler, "hold", _leaks),
    "counts tokens only": (Scheduler, "need", lambda s, t: (t.tokens, 0, 0)),
    "counts no prompts in the pool": (Scheduler, "need", lambda s, t: (t.tokens, t.requests, 0)),
    "ignores headroom": (Scheduler, "_tiers_above", always(0)),
    "owes nothing": (Scheduler, "owe", always(None)),
    # rules 6 and 8
    "takes whichever engine has room": (ScheduledEngine, "score", lambda e, t, p: (0, e.order)),
    "lets others into an engine that is closed": (
        Scheduler, "_engine_for", lambda s, t, w, open_, any_: engine_for(s, t, w, [*s.engines.values()], any_),
    ),
    "a late one enters a closed engine": (
        Scheduler, "_engine_for",
        lambda s, t, w, open_, any_: engine_for(s, t, w, [*s.engines.values()] if any_ else open_, any_),
    ),
    "counts no prompts in line": (Scheduler, "_wait_for", lambda s, t, w: setattr(t, "engine", w)),
    "is patient for ever": (module, "PATIENCE_US", 10**15),
    "is not patient": (module, "PATIENCE_US", 0),
    "lets small ones in line be passed": (Scheduler, "is_small", lambda s, t: not t.is_in_line and is_small(s, t)),
    "what no engine takes closes one": (
        Scheduler, "wanted", lambda s, t: wanted(s, t) or next(iter(s.engines), None),
    ),
    "no line": (Scheduler, "_has_place", always(False)),
    "a line without end": (Scheduler, "_has_place", always(True)),
    "ignores caps": (ScheduledEngine, "set_cap", always(None)),
    "forgets who is gone": (Scheduler, "look", _forgets_who_is_gone),
    # rule 7
    "takes from every tier": (preemption, "_levels_that_give", lambda pool, *_: range(len(pool.tiers))),
    "takes what has to stay": (_Search, "_may_take", _takes_what_has_to_stay),
    "takes floors": (Scheduler, "would_be_below_floor", always(False)),
    "takes what could not come back": (Scheduler, "could_come_back", always(True)),
    "takes more than it needs": (_Search, "_needed", lambda search, taken, lacking: taken),
    "takes in vain": (_Search, "_take", _in_vain),
    "takes what comes back first": (_Search, "__init__", _takes_what_comes_back_first),
    "takes for one of a burst": (_Search, "leases", _no_burst),
    "takes on the wanted engine only": (Scheduler, "would_enter", lambda *it: would_enter(*it)[:1]),
    "takes where one before it holds its place": (preemption, "_engines_for", _knows_no_holders),
    "takes on any engine": (Scheduler, "would_enter", lambda s, t, _: would_enter(s, t, FIRST)),
    "a burst beyond its limit": (Scheduler, "is_within_limit", always(True)),
    "forgets what is on its way": (Gone, "add", always(None)),
    # rule 9
    "late tokens earn": (TicketGain, "earned_after", lambda g, waited: g.weight * 10**9 // g.cost_us),
    "knows no cost": (TicketGain, "earned_after", lambda g, waited: g.weight),
    "nobody is ahead": (FairQueue, "is_ahead", always(False)),
    "all that a tier holds is in its floor": (Scheduler, "on_floor", lambda s, level: s.tiers[level].used),
    "by gain by level": (Scheduler, "_gain_key", lambda s, t: (1, s.aged_level(t))),
    # rule 10
    "guards nothing": (Guards, "allowed", lambda _, order: list(order)),
    "guards where it may enter at once only": (GuardedTier, "leaves", always(True)),
    "keeps a large one out for ever": (GuardedTier, "leaves", _leaves_no_room_beside_nothing),
    "small ones pass a large one": (Guards, "_keeping_out", lambda g, ticket, _: keeping_out(g, ticket, ())),
    "cuts floors": (GuardedTier, "leaves", _forgets_floors),
    "counts only what is less important": (GuardedTier, "leaves", lambda g, n, *held: leaves(g, n, *held[:2], held[0])),
    "lets one in beside nothing only": (GuardedTier, "leaves", lambda g, n, u, _, total: leaves(g, n, u, u, total)),
    "guards against an always_first tier": (Guards, "change_rules", _guards_against_all),
}  # fmt: skip


def _of_tiers(**words: Any) -> Callable[[dict[str, Any]], None]:
    def changed(program: dict[str, Any]) -> None:
        for tier in program["tiers"]:
            tier.update({word: value for word, value in words.items() if word in tier})

    return changed


def _of_engines(**words: Any) -> Callable[[dict[str, Any]], None]:
    def changed(program: dict[str, Any]) -> None:
        for each in (program, *program["steps"]):
            for engine in each.get("engines", ()):
                engine.update(words)

    return changed


def _without(*verbs: str) -> Callable[[dict[str, Any]], None]:
    def changed(program: dict[str, Any]) -> None:
        for step in program["steps"]:
            if step["do"] in verbs:
                step["do"] = "wait"

    return changed


def _ages_past_the_ceiling(program: dict[str, Any]) -> None:
    if program.get("aging"):
        program["aging"]["ceiling"] = program["tiers"][0]["name"]


def _knows_no_users(program: dict[str, Any]) -> None:
    for step in program["steps"]:
        step.pop("user", None)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "knows no users": _knows_no_users,
    "knows no limit": _of_tiers(limit=1),
    "knows no headroom": _of_tiers(lend=1),
    "knows nothing of always_first": _of_tiers(always_first=False),
    "takes room back at once": _of_tiers(preempt_after_s=0),
    "ages past the ceiling": _ages_past_the_ceiling,
    "nothing ages": lambda program: program.update(aging=None),
    "takes room back for ever": lambda p: p.update(max_preemptions=10**6 if p.get("max_preemptions") else 0),
    "takes what was kept": _without("keep"),
    "counts a prompt to the end": _without("prefilled"),
    "starts at full speed": _of_engines(ramp_s=0),
    "knows no speed": _of_engines(speed=1000),
    "knows no hits": lambda p: p.update(weight_percent=0),
    "a floor is all of the reserve by gain": lambda p: p.update(fair=1),
}


def changed(program: dict[str, Any], name: str) -> dict[str, Any]:
    """A program without a word, whose answers are those with it."""
    found = copy.deepcopy(program)
    CHANGES[name](found)
    return found
