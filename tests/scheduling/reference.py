"""The rules of a pool, read literally: lists and fractions; nothing kept that can be computed anew. Slow on purpose.

One scheduler for one engine or many, by level or by gain. The product still has four: `rules/differences.txt` has the
answers that are others there. The numbers in the comments are those of the rules:

1. Floors: a tier has its reserve R, its headroom H, its limit L. 2. Tenants: fair tags; in a tenant its users take
turns, those with tags of their own. 3. Order: classes 0 to 4.
4. Room: headroom is kept free, and the first that does not fit holds its place. 5. A turn is paid back.
6. Engines, and the line of those that wait for the right one. 7. Preemption. 8. A full engine is capped.
9. The order by gain. 10. What less important tiers may hold beside one whose SLO is held.

`answers(scenario)` plays a scenario of `rules/*.json`. For every step it gives what entered an engine, and what was
chosen to be taken back. `new(scenario)` is a pool that takes one step at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

FIRST, LINE, INSIDE, TURN, OTHER = range(5)  # 3: classes 0 to 4
PATIENCE_US = 5_000_000
MOST_X = 1_000
ENDS = {"cancel": ("line",), "settle": ("running", "line")}
INFINITE = 2**53 - 1  # a dimension without bounds
ZERO = Fraction(0)


def plus(*amounts) -> tuple:
    return tuple(map(sum, zip((0, 0, 0), *amounts, strict=True)))


def within(amounts, most) -> bool:
    return all(a <= m for a, m in zip(amounts, most, strict=True))


def by_name(engine: str) -> tuple:
    name, _, number = engine.rpartition("#")
    return name.encode(), int(number)


@dataclass(eq=False)
class Request:
    id: str
    tier: int
    tenant: str
    weight: int
    tokens: int
    requests: int
    prompt: int
    hits: dict
    barred: tuple
    arrived: int
    number: int
    gain: dict | None
    seen: int  # how many had entered when it came
    cost: int  # what its tenant is charged for: its tokens, or their weights
    user: str | None = None  # within its tenant; None where its users take no turns
    place: Fraction | None = None  # in its tenant's queue, once it is the first of its user
    state: str = "waiting"  # then perhaps "line"; "running"; "over"
    start: Fraction | None = None  # its tag, once it is the first of its tenant
    returns: int = 0
    engine: str | None = None  # where it runs, or what it waits for in line
    since: int = 0  # when it came to stand in line
    for_floor: int | None = None  # in line for its tier's floor: the number of its admission
    admitted_tokens: int = 0  # when it entered
    admitted: int = 0  # when it began to count as held
    admission: int = 0  # how many began before it
    count: int = 0  # of its prompt, in the pool, until its first byte
    owing: tuple = (0, 0)  # 5: whole reserves too much: for the whole lease, and more until its first byte
    in_floor: bool = False  # 9: it counts for the floor
    kept: bool = False  # its first byte is on its way: it is taken back no more
    chosen: bool = False  # to be taken back

    def on(self, engine: str) -> int:
        """What an engine has to prefill of it."""
        return max(1, self.prompt - self.hits.get(engine, 0))

    @property
    def counts(self) -> bool:
        return self.state == "running" or (self.state == "line" and self.for_floor is not None)


@dataclass
class Reference:
    tiers: list
    promote: int | None = None
    ceiling: int = 0
    max_preemptions: int = 0
    weight: int = 300
    by_gain: bool = False
    fair: Fraction = Fraction(1)
    divide: type = Fraction  # or float division, as in a product: the same unless two tags are nearly equal
    now: int = 0
    all: list = field(default_factory=list)
    line: list = field(default_factory=list)
    engines: dict = field(default_factory=dict)
    caps: dict = field(default_factory=dict)
    finish: dict = field(default_factory=dict)
    virtual: dict = field(default_factory=dict)
    users: dict = field(default_factory=dict)  # of a tier and tenant: its users' virtual time, and their finish tags
    largest: dict = field(default_factory=dict)
    owes: dict = field(default_factory=dict)
    latest: dict = field(default_factory=dict)
    admissions: int = 0
    entered: list = field(default_factory=list)  # (request, when)
    shares: dict = field(default_factory=dict)  # 10: of each guarded tier, what it leaves to those below it

    # -- the words: the pool, its engines, its figures

    def ready(self) -> list[str]:
        return sorted((e for e, o in self.engines.items() if o["known"] and o.get("takes_new", True)), key=by_name)

    def size(self, engine: str) -> list:
        """What an engine may hold now: in slow start so many tenths, at least one request."""
        offer, tenths = self.engines[engine], 10
        if offer["ramp"]:
            tenths = min(10, 1 + max(0, self.now - offer["since"]) * 10 // offer["ramp"])
        sizes = [offer.get(key, INFINITE) for key in ("tokens", "requests", "prefill")]
        tokens, requests, prefill = (s if s == INFINITE else s * tenths // 10 for s in sizes)
        return [tokens, max(1, requests), prefill]

    def cap(self, engine: str) -> int:
        """8: the most requests it may run now."""
        requests, until = self.caps.get(engine, (INFINITE, 0))
        return requests if self.now < until else INFINITE

    def running(self, engine: str | None = None, gone=()) -> list[Request]:
        return [r for r in self.all if r.state == "running" and engine in (None, r.engine) and r not in gone]

    def pool(self) -> list:
        """C: what the ready engines may hold, and what the others hold still."""
        ready = self.ready()
        sizes = [self.size(e) for e in ready]
        sizes += [plus(*map(self.holding, self.running(e))) for e in self.engines if e not in ready]
        return [INFINITE if any(s[d] == INFINITE for s in sizes) else sum(s[d] for s in sizes) for d in range(3)]

    def reserve(self, tier: int) -> list:
        """R. By gain a part of the reserve, at least the headroom (9)."""
        part = self.tiers[tier]["reserve"] * self.fair
        sizes = [(INFINITE if part else 0) if c == INFINITE else math.ceil(part * c) for c in self.pool()]
        return list(map(max, sizes, self.headroom(tier))) if self.by_gain else sizes

    def headroom(self, tier: int) -> list:
        """H."""
        t = self.tiers[tier]
        return [0 if c == INFINITE else math.floor((1 - t["lend"]) * t["reserve"] * c) for c in self.pool()]

    def limit(self, tier: int) -> list:
        """L."""
        return [c if c == INFINITE else math.floor(self.tiers[tier]["limit"] * c) for c in self.pool()]

    def admissible(self, tier: int) -> list:
        """The most that could ever be let in: beside the headroom of tiers above the best level that it can age to."""
        best = tier if self.promote is None else min(tier, self.ceiling)
        above = plus(*(self.headroom(q) for q in range(best)))
        return [min(most, c - h) for most, c, h in zip(self.limit(tier), self.pool(), above, strict=True)]

    def size_limit(self, tier: int, d: int) -> int:
        """The largest request of a tier, in one dimension."""
        pool, own = self.pool()[d], self.reserve(tier)[d]
        if pool == INFINITE or not own:
            return self.admissible(tier)[d]
        others = [
            max(self.reserve(q)[d], self.headroom(q)[d] if q < tier else 0) for q in range(len(self.tiers)) if q != tier
        ]
        return min(self.admissible(tier)[d], max(own, pool - sum(others)))

    def need(self, r: Request) -> tuple:
        """t. A prompt counts less its best hit, and for no more than its tier's size limit and the largest engine's."""
        largest = max((self.size(e)[2] for e in self.ready()), default=0)
        uncached = max(1, r.prompt - max(r.hits.values(), default=0))
        return r.tokens, r.requests, min(uncached, largest, self.size_limit(r.tier, 2))

    @staticmethod
    def holding(r: Request) -> tuple:
        return r.tokens, r.requests, r.count

    def used(self, tier: int, gone=()) -> tuple:
        """U: on engines, and in line for the floor."""
        return plus(*(self.holding(r) for r in self.all if r.tier == tier and r.counts and r not in gone))

    def floor_used(self, tier: int, gone=()) -> tuple:
        """U where it is compared with R. By gain, only what was let in for the floor (9)."""
        mine = [r for r in self.all if r.tier == tier and r.counts and r not in gone]
        return plus(*(self.holding(r) for r in mine if r.in_floor or not self.by_gain))

    # -- 2: tenants

    def waiting(self, tier: int) -> list[Request]:
        return [r for r in self.all if r.state == "waiting" and r.tier == tier]

    def firsts(self, tier: int) -> list[Request]:
        """The first of each tenant, and all that returned; in fair order."""
        queues = {r.tenant: self.queue(tier, r.tenant) for r in self.waiting(tier)}
        found = [queue[0] for queue in queues.values() if queue] + [r for r in self.waiting(tier) if r.returns]
        return sorted(found, key=lambda r: (INFINITE if r.start is None else r.start, r.number))

    def queue(self, tier: int, tenant: str) -> list[Request]:
        """A tenant's: by arrival. Where its users take turns the oldest of each, the smallest place first."""
        found: dict = {}
        for r in self.waiting(tier):
            if r.tenant == tenant and not r.returns:
                found.setdefault(r.number if r.user is None else r.user, r)
        return sorted(found.values(), key=lambda r: (r.place or 0, r.number))

    def by_turns(self, r: Request) -> bool:
        """True if users of a request's tenant wait or are ahead: one without a user is of an unknown one then."""
        virtual, finish = self.users.get((r.tier, r.tenant), (0, {}))
        waits = any(q.user is not None for q in self.queue(r.tier, r.tenant))
        return waits or any(f > virtual for f in finish.values())

    def tag(self, tier: int) -> None:
        waiting = self.waiting(tier)
        if not waiting:  # tags start afresh
            self.virtual.pop(tier, None), self.largest.pop(tier, None)
            self.finish = {k: v for k, v in self.finish.items() if k[0] != tier}
            self.users = {k: v for k, v in self.users.items() if k[0] != tier}
        for tenant in {r.tenant for r in waiting}:
            virtual, finish = self.users.get((tier, tenant), (0, {}))
            for r in self.queue(tier, tenant):
                if r.user is not None and r.place is None:
                    r.place = max(virtual, finish.get(r.user, 0)) + r.cost
        for key, (virtual, finish) in list(self.users.items()):
            if key[0] == tier and not self.queue(*key) and all(f <= virtual for f in finish.values()):
                del self.users[key]
        firsts = self.firsts(tier)
        for r in firsts:
            before = [
                q for q in waiting if q.tenant == r.tenant and not q.returns and q.start is not None and q is not r
            ]
            if r.start is None and before:  # its user's turn is before that of the one that was first
                (q,) = before
                r.start, q.start = q.start, None
            if r.start is None:
                r.start = max(self.virtual.get(tier, ZERO), self.finish.get((tier, r.tenant), ZERO))
        if self.by_gain and firsts:  # V is the smallest start of those that wait
            self.virtual[tier] = max(self.virtual.get(tier, ZERO), min(r.start for r in firsts))

    def leave_queue(self, r: Request) -> None:
        """Its tenant is charged, unless it returned: then it was charged before."""
        first = r if r.returns else self.queue(r.tier, r.tenant)[0]
        is_last, key = len(self.waiting(r.tier)) == 1, (r.tier, r.tenant)
        r.state = "line"
        if not is_last and not r.returns:
            self.finish[key] = max(first.start, self.finish.get(key, ZERO)) + self.divide(r.cost, r.weight)
            if first is not r:  # by gain
                first.start = max(first.start, self.finish[key])
            if r.user is not None:
                self.charge_user(r, first)
        if not is_last and not self.by_gain:
            self.virtual[r.tier] = max(self.virtual.get(r.tier, ZERO), r.start)
        r.place = None
        self.tag(r.tier)

    def charge_user(self, r: Request, first: Request) -> None:
        """Its user is charged as it leaves its tenant's queue, whose first was `first`; time passes to that one."""
        virtual, finish = self.users.get((r.tier, r.tenant), (0, {}))
        virtual = max(virtual, (first.place or 0) - (first.cost if self.by_gain else 0))
        own = next(
            q for q in self.all if q is r or (q.place and (q.tier, q.tenant, q.user) == (r.tier, r.tenant, r.user))
        )
        finish[r.user] = max(own.place - own.cost, finish.get(r.user, 0)) + r.cost
        if own is not r:  # by gain
            own.place = max(virtual, finish[r.user]) + own.cost
        self.users[r.tier, r.tenant] = virtual, finish

    def grow_user(self, key: tuple, user: str, tokens: int) -> None:
        """A user's lease has grown, or used less: then its first is placed so much earlier, but never before V."""
        virtual, finish = self.users.setdefault(key, (0, {}))
        finish[user] = max(virtual, max(virtual, finish.get(user, 0)) + tokens)
        for r in self.queue(*key):
            if tokens < 0 and r.user == user:
                r.place = min(r.place, max(virtual + r.cost, r.place + tokens))

    # -- 3, 5, 9: order

    def is_small(self, r: Request) -> bool:
        return within(self.need(r), self.reserve(r.tier))

    def does_owe(self, tier: int) -> bool:
        return self.now < self.owes.get(tier, 0)

    def heads(self, tier: int) -> list[Request]:
        """The next in fair order; and while the tier owes and that is larger than R, the next that is not (5)."""
        order = self.firsts(tier)
        if order and self.does_owe(tier) and not self.is_small(order[0]):
            return order[:1] + [r for r in order if self.is_small(r)][:1]
        return order[:1]

    def front(self, tier: int) -> Request | None:
        """The one that the tier's floor is for next: of those in line for no floor yet the first, else the head."""
        return next((r for r in self.line if r.tier == tier and r.for_floor is None), None)

    def class_for(self, r: Request) -> int:
        if self.tiers[r.tier]["always_first"]:
            return FIRST
        if r.for_floor is not None:
            return LINE
        front = self.front(r.tier)
        is_front = r is front if front else r in self.heads(r.tier)
        passes = (
            front
            and self.does_owe(r.tier)
            and not self.is_small(front)
            and self.is_small(r)
            and (r in self.line or r in self.heads(r.tier))
        )
        if not (is_front or passes):
            return OTHER
        held, reserve = self.floor_used(r.tier), self.reserve(r.tier)
        if within(plus(held, self.need(r)), reserve):
            return INSIDE
        if all(a < m for a, m in zip(held, reserve, strict=True)) and not self.does_owe(r.tier):
            return TURN
        return OTHER

    def level(self, r: Request) -> Fraction:
        """Its level now: it rises one per `promote`, not past the ceiling."""
        if self.promote is None or r.tier <= self.ceiling:
            return Fraction(r.tier)
        return max(r.tier - Fraction(self.now - r.arrived, self.promote), Fraction(self.ceiling))

    def place(self, r: Request, order_class: int) -> tuple:
        """What the order compares."""
        before, key = 0, self.level(r)
        if order_class == LINE:
            before = r.for_floor
        elif order_class == TURN:
            before = self.latest.get(r.tier, 0)
        elif order_class == OTHER and self.by_gain:
            before, key = self.gain_key(r)
        return order_class, before, key, r.arrived, r.number

    def gain_key(self, r: Request) -> tuple:
        """9: what it still earns for the engine's time; nothing, or its tenant is ahead: after all others, by level."""
        ahead = self.finish.get((r.tier, r.tenant), ZERO) - self.virtual.get(r.tier, ZERO)
        is_ahead = r.state == "waiting" and not r.returns and ahead * r.weight > 2 * self.largest[r.tier]
        if r.user is not None and r.state == "waiting" and not r.returns:
            virtual, finish = self.users.get((r.tier, r.tenant), (0, {}))
            is_ahead = is_ahead or finish.get(r.user, 0) - virtual > 2 * self.largest[r.tier]
        if r.gain is None or is_ahead:
            return 1, self.level(r)
        lost = max(0, self.now - r.arrived - r.gain["start_by"]) // r.gain["slack"]
        share = max(0, r.gain["tokens"] - lost) * 1_000 // r.gain["tokens"]
        gain = r.gain["weight"] * share * 1_000_000 // r.gain["cost"]
        return (0, -gain) if gain else (1, self.level(r))

    def in_order(self) -> list[tuple[Request, int]]:
        """The candidates with their classes: who stands in line, the heads, by gain the best of each tier."""
        candidates = list(self.line)
        for tier, t in enumerate(self.tiers):
            heads = self.heads(tier)
            candidates += heads
            if self.by_gain and not t["always_first"]:
                # The page says "of all that wait": a tier without objectives would then serve first come, first served.
                earning = [r for r in self.waiting(tier) if not self.gain_key(r)[0]]
                best = min(earning, key=lambda r: self.place(r, OTHER), default=None)
                candidates += [best] if best and best not in heads else []
        found = []
        for r in candidates:
            is_free = r.counts or self.tiers[r.tier]["limit"] >= 1
            if is_free or within(plus(self.used(r.tier), self.need(r)), self.limit(r.tier)):
                order_class = self.class_for(r)
                found.append((self.place(r, order_class), r, order_class))
        return self.guarded([(r, order_class) for _, r, order_class in sorted(found, key=lambda it: it[0])])

    # -- 10: guarded tiers

    def below(self, tier: int) -> list[int]:
        return [q for q in range(tier + 1, len(self.tiers)) if not self.tiers[q]["always_first"]]

    def guarded(self, order: list) -> list:
        """Without those of class 4 that find no room below a guarded tier, and those like them that come after."""
        found, closed = [], set()
        for r, order_class in order:
            keeping = []
            for tier, share in self.shares.items():
                if (
                    order_class == OTHER
                    and r.tier in self.below(tier)
                    and (tier in closed or not self.leaves(share, r, tier))
                ):
                    keeping.append(tier)
            closed |= {*keeping}
            found += [] if keeping else [(r, order_class)]
        return found

    def leaves(self, share: Fraction, r: Request, tier: int) -> bool:
        """In each dimension: the pool may be as full, or those below their floors; one is let in beside floors only."""
        below, floors = (plus(*map(of, self.below(tier))) for of in (self.used, self.reserve))
        beyond = plus(
            *[[max(0, u - r) for u, r in zip(self.used(q), self.reserve(q), strict=True)] for q in self.below(tier)]
        )
        total, need = plus(*map(self.holding, self.running())), self.need(r)
        most = [INFINITE if c == INFINITE else share * c // 1 for c in self.pool()]
        return all(not beyond[d] or below[d] + need[d] <= floors[d] or total[d] + need[d] <= most[d] for d in range(3))

    # -- 4: room

    def fits(self, r: Request, gone=(), more=()) -> bool:
        """Beside what engines hold (but for leases that are gone, with more), and headroom of more important tiers."""
        held = [self.holding(q) for q in self.running(gone=gone)] + [self.need(q) for q in [*more, r]]
        kept = [
            [max(0, h - u) for h, u in zip(self.headroom(q), self.used(q, gone), strict=True)]
            for q in range(len(self.tiers))
            if q < self.level(r) and q != r.tier
        ]
        return within(plus(*held, *kept), self.pool())

    def holds(self, r: Request, order_class: int) -> bool:
        """Whether it keeps its place though it does not fit."""
        if order_class == FIRST:
            return True
        kept = [self.need(r)]
        for q, t in enumerate(self.tiers):
            if q == r.tier:
                continue
            is_better, u = q < self.level(r), self.used(q)
            if not (t["always_first"] or (order_class == OTHER and not self.by_gain and is_better)):
                u = list(map(min, self.floor_used(q), self.reserve(q)))
            kept.append(list(map(max, u, self.headroom(q))) if is_better else u)
        return within(plus(*kept), self.pool())

    # -- 6, 8: engines and the line

    def could(self, r: Request) -> list[str]:
        """The engines that could ever hold it, and may get it now."""
        found = [
            e
            for e in self.ready()
            if within((r.tokens, r.requests), [self.engines[e].get(k, INFINITE) for k in ("tokens", "requests")])
        ]
        return [
            e
            for e in found
            if e.rpartition("#")[0] not in r.barred
            and sum(q.requests for q in self.running(e)) + r.requests <= self.cap(e)
        ]

    def score(self, r: Request, e: str) -> tuple:
        sent = sum(q.on(e) for q in self.running(e) if q.count)
        sent += sum(q.prompt for q in self.line if q.engine == e and q is not r)
        work = sent + r.prompt - self.weight * r.hits.get(e, 0) // 100
        held = sum(q.tokens for q in self.running(e))
        return (work * 50 + held) * 1000 // self.engines[e].get("speed", 1000), by_name(e)

    def best(self, r: Request, engines: list[str]) -> str | None:
        """The one with the smallest score."""
        return min(engines, key=lambda e: self.score(r, e), default=None)

    def has_room(self, r: Request, e: str, gone=(), more=()) -> bool:
        """Tokens, requests, and the prompt's turn: one prompt of any size, or several within `prefill`."""
        on, (tokens, requests, prefill) = [*self.running(e, gone), *more, r], self.size(e)
        if sum(q.tokens for q in on) > tokens or sum(q.requests for q in on) > min(requests, self.cap(e)):
            return False
        prompts = [q for q in self.running(e, gone) if q.count] + list(more)
        return not prompts or sum(q.on(e) for q in [*prompts, r]) <= prefill

    def wanted(self, r: Request) -> str | None:
        """In line it keeps to the engine that it waits for."""
        return r.engine if r in self.line and r.engine in self.could(r) else self.best(r, self.could(r))

    def choose_again(self) -> None:
        """Who waits in line for an engine that cannot take it now."""
        for r in [r for r in self.line if r.engine not in self.could(r)]:
            r.engine = None
            r.engine = self.best(r, self.could(r))

    def takes_any(self, r: Request, order_class: int) -> bool:
        """Whether it enters any engine with room, also one that has less of its prompt than the one that it wants."""
        if order_class == FIRST:
            return True
        return self.now >= r.since + PATIENCE_US if r in self.line else not self.has_place(r, order_class)

    def would_enter(self, r: Request, order_class: int) -> list[str]:
        """The engines that it would enter if they had room: the one that it wants, then the next best."""
        wanted, takes_any = self.wanted(r), self.takes_any(r, order_class)
        if wanted is None:
            return []
        found = [wanted]
        for e in sorted(self.could(r), key=lambda e: self.score(r, e)):
            if not takes_any and r.hits.get(e, 0) < r.hits.get(wanted, 0):
                break
            found += [e] if e != wanted else []
        return found

    def has_place(self, r: Request, order_class: int) -> bool:
        own = [q for q in self.line if q.tier == r.tier]
        return order_class == FIRST or len(own) < max(1, len(self.ready()))

    def next(self, out: list) -> bool:
        """The next step: one enters an engine, or comes to stand in line. False where there is none."""
        if not self.ready():
            return False
        self.choose_again()
        closed: set = set()  # engines that those before wait for
        is_stopped = False  # a small one before it has stood in line for 5 s
        for r, order_class in self.in_order():
            if order_class == OTHER and is_stopped:
                continue
            if not self.fits(r):
                if self.holds(r, order_class):
                    return False
                continue
            in_line = r in self.line
            wanted = self.wanted(r)
            joins = not in_line and self.has_place(r, order_class)
            is_late = in_line and self.now >= r.since + PATIENCE_US
            takes_any = self.takes_any(r, order_class)
            open_ = [e for e in self.could(r) if e not in closed and self.has_room(r, e)]
            other, to = self.best(r, open_), None
            if wanted in open_:
                to = wanted
            elif other and (takes_any or r.hits.get(other, 0) >= r.hits.get(wanted, 0)):
                to = other
            if to or joins:
                if not in_line:
                    self.leave_queue(r)
                if to:
                    if not in_line or r.for_floor is None:
                        self.begin_to_count(r, order_class)
                    self.line = [q for q in self.line if q is not r]
                    r.state, r.engine, r.for_floor = "running", to, None
                    r.admitted_tokens = r.tokens
                    self.entered.append((r, self.now))
                    out.append((r.id, to))
                    return True
                r.engine, r.since = wanted, self.now
                self.line.append(r)
            if r in self.line and r.for_floor is None and wanted and order_class in (FIRST, INSIDE, TURN):
                self.begin_to_count(r, order_class)
                r.for_floor = r.admission
                return True
            if joins:
                return True
            if wanted:
                closed.add(wanted)
                if is_late and self.is_small(r):
                    is_stopped = True
        return False

    def begin_to_count(self, r: Request, order_class: int) -> None:
        """It counts as held by its tier from now on. 5: by a turn, how many whole reserves too much."""
        if order_class == TURN:
            excess = [
                (u + n - m) // m
                for m, u, n in zip(self.reserve(r.tier), self.floor_used(r.tier), self.need(r), strict=True)
            ]
            x = min(MOST_X, max(0, *excess[:2]))
            r.owing = x, max(0, min(MOST_X, excess[2]) - x)
        r.count = self.need(r)[2]
        r.in_floor, r.admitted = self.by_gain and order_class != OTHER, self.now
        self.admissions += 1
        self.latest[r.tier] = r.admission = self.admissions

    def dispatch(self, now: int) -> list:
        self.now, out = now, []
        while self.next(out):
            pass
        return out

    # -- 7: preemption

    def preempt(self, now: int) -> list[str]:
        self.now, order = now, self.in_order()
        after = [self.tiers[r.tier]["preempt_after"] for r, _ in order]
        at = next((n for n, (r, _) in enumerate(order) if after[n] is not None and now - r.arrived >= after[n]), None)
        if at is None:
            return []
        served, order_class = order[at]
        gone = [r for r in self.running() if r.chosen]

        def enough(e: str, taken: list, group: list) -> bool:
            off = [*gone, *taken]
            more = [r for r, c in order[:at] if self.wanted(r) == e and (self.fits(r) or self.holds(r, c))]
            for r in group:
                if not self.has_room(r, e, off, more) or not self.fits(r, off, more):
                    return False
                more.append(r)
            return True

        place = self.place(served, order_class)

        def victims(e: str, *group: Request) -> list[Request] | None:
            return self.victims(served, place, e, gone, lambda taken: enough(e, taken, group))

        holding = [self.wanted(r) for r, c in order[:at] if not self.fits(r) and self.holds(r, c)]
        engines = self.would_enter(served, order_class)
        engines = engines[:1] + [e for e in engines[1:] if all(other == e for other in holding)]
        engines.sort(key=lambda e: not enough(e, [], [served]))  # where enough is on its way, no other gives more
        e = next((e for e in engines if victims(e, served) is not None), None)
        if e is None:
            return []
        group, chosen = [served], victims(e, served)
        if self.tiers[served.tier]["always_first"]:  # all that wait there, one more at a time
            for r in self.waiting(served.tier):
                held = [q for q in [*group, r] if not q.counts]
                if r is not served and within(plus(self.used(r.tier), *map(self.need, held)), self.limit(r.tier)):
                    found = victims(e, *group, r)
                    if found is None:
                        break
                    group, chosen = [*group, r], found
        for r in chosen:
            r.chosen = True
        return [r.id for r in chosen]

    def victims(self, served: Request, place: tuple, e: str, gone: list, enough) -> list[Request] | None:
        """Least important tiers first, newest first, as many as are enough; None where all together are not."""
        found: list[Request] = []
        entered = {r.id: n for n, (r, _) in enumerate(self.entered)}
        for r in sorted(self.running(e), key=lambda r: (-r.tier, -entered[r.id])):
            if enough(found):
                break
            if r.tier <= served.tier or not self.tiers[r.tier]["preemptible"] or r.kept or r.chosen or r.in_floor:
                continue
            if r.returns >= self.max_preemptions or not within((r.tokens, r.requests), self.admissible(r.tier)[:2]):
                continue  # taken back often enough; or it could not come back
            left = self.floor_used(r.tier, [*gone, *found, r])
            if all(u < m for u, m in zip(left, self.reserve(r.tier), strict=True)):
                continue  # its tier would be below its floor
            if any(self.place(q, OTHER) < place for q in [*self.heads(r.tier), r]):
                continue  # its room would go back to it, or to one of its tier
            found.append(r)
        if not enough(found):
            return None
        for r in list(reversed(found)):
            if enough([q for q in found if q is not r]):
                found.remove(r)
        return found

    # -- what comes, ends and changes

    def find(self, id: str, *states: str) -> Request | None:
        return next((r for r in self.all if r.id == id and r.state in states), None)

    def owe(self, r: Request, x: int) -> None:
        """5: its tier has no turn for x times as long as it counted."""
        if x:
            self.owes[r.tier] = max(self.now, self.owes.get(r.tier, 0)) + x * (self.now - r.admitted)

    def first_byte(self, r: Request) -> None:
        r.count = 0
        self.owe(r, r.owing[1])
        r.owing = r.owing[0], 0

    def end(self, r: Request) -> None:
        self.first_byte(r)
        self.owe(r, r.owing[0])
        self.line = [q for q in self.line if q is not r]
        r.state, r.owing, r.in_floor, r.chosen, r.engine, r.for_floor = "over", (0, 0), False, False, None, None

    def back(self, r: Request) -> None:
        """It waits again, behind none of its tier that came later."""
        self.end(r)
        r.kept = False
        r.start = min([self.virtual.get(r.tier, ZERO), *(q.start for q in self.firsts(r.tier))])
        r.state, r.returns = "waiting", r.returns + 1
        self.largest[r.tier] = max(self.largest.get(r.tier, 1), r.cost)

    def do(self, step: dict, now: int) -> None:
        self.now, what, ticket, get = now, step["do"], step.get("id"), step.get
        tier = next((n for n, t in enumerate(self.tiers) if t["name"] == get("tier")), 0)
        if what == "submit":
            gain = None
            if "gain" in step:
                gain = {k: v if k in ("weight", "tokens") else round(v * 1e6) for k, v in step["gain"].items()}
            sizes = step["tokens"], get("requests", 1), get("prompt", 0)
            r = Request(
                ticket,
                tier,
                get("tenant", ""),
                get("weight", 1),
                *sizes,
                dict(get("hits", ())),
                tuple(get("barred", ())),
                now,
                len(self.all),
                gain,
                len(self.entered),
                get("cost", step["tokens"]),
                get("user"),
            )
            if r.user is None and self.by_turns(r):
                r.user = ""
            self.all.append(r)
            self.largest[tier] = max(self.largest.get(tier, 1), r.cost)
            self.tag(tier)
        elif what == "cancel" and (r := self.find(ticket, "waiting")):
            r.state, r.place = "over", None
            self.tag(r.tier)
        elif what in ("cancel", "settle") and (r := self.find(ticket, *ENDS[what])):
            self.end(r)
        elif what == "prefilled" and (r := self.find(ticket, "running")):
            self.first_byte(r)
        elif what == "resize" and (r := self.find(ticket, "running", "line")):
            r.tokens = step["tokens"]
        elif what == "keep" and (r := self.find(ticket, "running")):
            r.kept, r.chosen = True, False
        elif what == "requeue" and (r := self.find(ticket, "running")) and r.chosen:
            self.back(r)
        elif what == "hand_back" and (r := self.find(ticket, "running")):
            r.barred += tuple(get("barred", ()))
            self.back(r)
        elif what == "charge" and self.waiting(tier):
            key, virtual = (tier, get("tenant", "")), self.virtual.get(tier, ZERO)
            more, user = self.divide(step["tokens"], get("weight", 1)), get("user")
            self.finish[key] = max(virtual, max(virtual, self.finish.get(key, ZERO)) + more)
            if user is not None and self.queue(*key):
                self.grow_user(key, user, step["tokens"])
            if more < 0:  # a lease did not use it: its tenant's first comes so much earlier, but never before V
                self.tag(tier)
                for r in self.queue(*key)[:1]:
                    r.start = max(virtual, r.start + more)
                self.tag(tier)
        elif what == "engines":
            offers = {o["id"]: o for o in step["engines"]}
            stay = [e for e, o in self.engines.items() if self.running(e) or (o["known"] and e in offers)]
            self.caps = {e: c for e, c in self.caps.items() if e in stay}
            self.engines = {e: {**self.engines[e], "known": False} for e in stay}
            for e, o in offers.items():
                self.engines[e] = {
                    **o,
                    "known": True,
                    "ramp": round(o.get("ramp_s", 0) * 1e6),
                    "since": round(o.get("since_s", 0) * 1e6),
                }
        elif what == "guard" and tier in self.shares:
            self.shares[tier] = Fraction(str(step["share"]))
        elif what == "cap" and step["engine"] in self.engines:
            requests, until, e = step["requests"], round(step["until"] * 1e6), step["engine"]
            if self.cap(e) < INFINITE:  # a cap in force only falls, and lasts on
                requests, until = min(requests, self.caps[e][0]), max(until, self.caps[e][1])
            self.caps[e] = requests, until


def new(scenario: dict) -> Reference:
    def part(tier: dict, key: str, default: int) -> Fraction:
        return Fraction(str(tier.get(key, default)))

    def microseconds(of: dict, key: str) -> int | None:
        return None if of.get(key) is None else round(of[key] * 1e6)

    tiers = [
        {
            "name": t["name"],
            "reserve": part(t, "reserve", 0),
            "lend": part(t, "lend", 1),
            "limit": part(t, "limit", 1),
            "always_first": bool(t.get("always_first")),
            "preemptible": bool(t.get("preemptible")),
            "preempt_after": microseconds(t, "preempt_after_s"),
        }
        for t in scenario["tiers"]
    ]
    aging, names = scenario.get("aging") or {}, [t["name"] for t in tiers]
    ceiling = names.index(aging["ceiling"]) if aging else 0
    found = Reference(tiers, microseconds(aging, "promote_after_s"), ceiling, scenario.get("max_preemptions", 0))
    found.weight, found.by_gain = scenario.get("weight_percent", 200), scenario.get("order") == "gain"
    found.fair = part(scenario, "fair", 1)
    found.shares = {n: Fraction(1, 10) for n, t in enumerate(scenario["tiers"]) if t.get("hold")}
    found.do(
        {"do": "engines", "engines": scenario.get("engines", [{"id": "pool#1", **scenario.get("capacity", {})}])}, 0
    )
    return found


def waits(pool: Reference, r: Request) -> dict:
    """How long it waited, how much of that was starvation, and the tokens that entered before it meanwhile."""
    own = next(n for n, (q, _) in enumerate(pool.entered) if q is r)
    meanwhile = pool.entered[r.seen : own]
    overtaken = min((when for q, when in meanwhile if q.number > r.number), default=pool.now)
    ahead: dict = {}
    for q, _ in sorted(meanwhile, key=lambda it: it[0].tier):
        name = pool.tiers[q.tier]["name"]
        ahead[name] = ahead.get(name, 0) + q.admitted_tokens
    return {"wait_s": (pool.now - r.arrived) / 1e6, "starvation_s": (pool.now - overtaken) / 1e6, "served_ahead": ahead}


def answers(scenario: dict) -> list[dict]:
    """For each step what entered which engine, in order, and what was chosen to be taken back."""
    pool, found = new(scenario), []
    for step in scenario["steps"]:
        now = round(step["at"] * 1e6)
        pool.do(step, now)
        admitted = []
        for ticket, engine in pool.dispatch(now):
            where = {"engine": engine} if "engines" in scenario else waits(pool, pool.find(ticket, "running"))
            admitted.append({"id": ticket, **where})
        found.append({"admitted": admitted, "chosen": pool.preempt(now)})
    return found
