"""The same random operations against the pool of one process and against the Lua script: the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sidecar.errors import QueueFull
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools.base import Lease
from sidecar.pools.local import LocalPool
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import Argument, WaitReply
from tests.pools.harness import Clock, allow_any_size, ask, policy_of
from tests.pools.scripted import Scripted, entering, finish_tags
from tests.support.examples import examples
from tests.support.redis_servers import RedisServer

FREE = ("back", "hand_back", "pause", "resume", "charge")
"""Operations that name no ticket."""
WEIGHTS = {"a": 1, "b": 2, "c": 3, "d": 7}
SHARES = [Fraction(0), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2), Fraction(1)]


@st.composite
def pools(draw: st.DrawFn) -> Policy:
    """Pools small enough that everything collides: few tokens, short promotions, short queues."""
    cuts = draw(st.lists(st.integers(0, 100), min_size=1, max_size=5))
    whole = max(100, sum(cuts))
    first = draw(st.booleans())
    tiers = tuple(
        Shares(
            f"t{level}",
            reserve=Fraction(cut, whole),
            lend=draw(st.sampled_from(SHARES)),
            limit=Fraction(1, 2) if first and level == 0 else draw(st.sampled_from([Fraction(1), Fraction(4, 5)])),
            always_first=first and level == 0,
        )
        for level, cut in enumerate(cuts)
    )
    tokens, requests = draw(st.sampled_from([(40, None), (40, 4), (100, 7), (13, 3), (None, 4)]))
    rules = pool_rules(
        tokens=tokens,
        requests=requests,
        tiers=tiers,
        promote_after_us=draw(st.sampled_from([None, 1, 7, 20])),
        ceiling=draw(st.integers(0, len(cuts) - 1)),
    )
    return policy_of(rules, max_waiting=draw(st.sampled_from([None, None, None, 0, 3, 5, 8])))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"), st.integers(0, 4), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 30), st.integers(1, 3)
        ),
        st.tuples(
            st.just("enter"), st.integers(0, 4), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 30), st.integers(1, 3)
        ),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["end", "resize"]), st.integers(0, 30), st.integers(1, 60)),
        st.tuples(
            st.just("charge"), st.integers(0, 4), st.sampled_from(sorted(WEIGHTS)), st.sampled_from([1, 9, 60, 2**53])
        ),
        st.tuples(st.just("pass"), st.integers(0, 30)),
        st.tuples(st.just("hold_back"), st.sampled_from([0, 0, 5, 20, 60])),
        st.tuples(st.just("hand_back"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["pause", "resume"])),
    ),
    min_size=60,  # hypothesis makes lists little longer than it must, and short ones queue hardly anybody
    max_size=240,
)


@st.composite
def preempting_pools(draw: st.DrawFn) -> Policy:
    """Pools in which much is preempted: no limits, and little that ages."""
    tiers = tuple(
        Shares(
            f"t{level}",
            reserve=draw(st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 4)])),
            lend=draw(st.sampled_from([Fraction(1), Fraction(1, 2)])),
            preemptible=level > 0 and draw(st.sampled_from([True, True, True, False])),
            preempt_after_us=draw(st.sampled_from([0, 0, 0, 5])),
        )
        for level in range(draw(st.sampled_from([2, 4])))
    )
    tokens, requests = draw(st.sampled_from([(40, None), (40, 5), (100, 7)]))
    rules = pool_rules(
        tokens=tokens,
        requests=requests,
        tiers=tiers,
        promote_after_us=draw(st.sampled_from([None, None, 10])),
        ceiling=draw(st.integers(0, 1)),
        max_preemptions=draw(st.sampled_from([1, 2, 2])),
    )
    return policy_of(rules)


PREEMPTING_OPERATIONS = st.lists(
    st.sampled_from(
        [
            *(("enter", 3, tenant, tokens, 1) for tenant in "ab" for tokens in (3, 7, 12)),
            *(("enter", level, "a", tokens, 1) for level in (0, 0, 1, 2) for tokens in (5, 14, 30)),
            *[("end_important",)] * 12,
            *(("end", index) for index in range(4)),
            *(("back", index, None) for index in range(12)),
            *(("hand_back", index) for index in range(3)),
            *(("resize", index, tokens) for index, tokens in ((0, 1), (3, 15), (2, 45))),
            *(("keep", index) for index in range(2)),
            *(("charge", 3, tenant, 30) for tenant in "ab"),
            *(("pass", us) for us in (1, 5, 5)),
        ]
    ),
    min_size=150,
    max_size=300,
)


@dataclass
class Answers:
    """What a step brought: who was admitted and how it had waited, in order; who left and how; who was refused; who is
    to give its room back, after how many times.
    """

    admitted: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    left: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    victims: list[tuple[int, int]] = field(default_factory=list)
    displaced: list[int] = field(default_factory=list)


class Local:
    """The pool of one process. The waiting requests give the order in which they are admitted."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.pool = LocalPool(policy, clock)
        allow_any_size(self.pool._sizes)
        self.names = [tier.name for tier in policy.tiers]
        self.leases: dict[int, Lease] = {}
        self.order: list[Lease] = []
        self.displaced: list[int] = []
        runtime = self.pool._runtime
        displaced, admit, admit_at_once = runtime.displaced, runtime._admit, runtime.admit_at_once

        def noted_displaced(*place: Any) -> Lease | None:
            found = displaced(*place)
            self.displaced += [ticket for ticket, lease in self.leases.items() if lease is found]
            return found

        def noted(admission: Any, now_us: int) -> None:
            self.order.append(self.pool._waiting[admission.ticket.id])
            admit(admission, now_us)

        def noted_at_once(lease: Lease, now_us: int) -> bool:
            is_admitted = admit_at_once(lease, now_us)
            if is_admitted:
                self.order.append(lease)
            return is_admitted

        def chosen(ticket_id: str) -> None:
            self.chosen.append(ticket_id)
            runtime._preemptible[ticket_id]._is_chosen = True

        self.chosen: list[str] = []
        self.handed_back: set[int] = set()
        self.is_paused = False
        runtime.displaced = noted_displaced  # type: ignore[method-assign]
        runtime._admit = noted  # type: ignore[method-assign]
        runtime.admit_at_once = noted_at_once  # type: ignore[method-assign]
        runtime._choose = chosen  # type: ignore[method-assign]

    def victims(self) -> list[int]:
        """The tickets that were chosen and have not let go, in order."""
        by_id = {lease.ticket_id: ticket for ticket, lease in self.leases.items()}
        return [by_id[victim] for victim in self.pool._runtime.scheduler._preemption._victims]

    def requeue_of(self, ticket: int) -> tuple[Argument, ...]:
        """What a replica would say of one of them."""
        lease = self.leases[ticket]
        known = self.pool._runtime.scheduler._leases[lease.ticket_id]
        held = ask(lease.ask.tier, known.tokens, requests=lease.ask.requests, tenant=lease.ask.tenant)
        return (*protocol.gain(ticket, lease.ask), *protocol.requeue(ticket, held, 0, known.returns + 1))

    def hand_back_of(self, ticket: int) -> tuple[Argument, ...]:
        """What a replica would say of a lease that no engine took."""
        lease = self.leases[ticket]
        known = self.pool._runtime.scheduler._leases[lease.ticket_id]
        held = ask(lease.ask.tier, known.tokens, requests=lease.ask.requests, tenant=known.tenant, weight=known.weight)
        said = protocol.requeue(ticket, held, 0, known.returns + 1, is_handed_back=True)
        return (*protocol.gain(ticket, lease.ask), *said)

    def statement(self) -> tuple[Argument, ...]:
        """What a replica would state of all that it has."""
        now_us, stated = self.pool.now_us(), []
        for ticket, lease in self.leases.items():
            if not lease.is_over:
                known = self.pool._runtime.scheduler._leases.get(lease.ticket_id)
                tokens = lease.ask.tokens if known is None else known.tokens
                held = msgspec.structs.replace(lease.ask, tokens=tokens)
                waited_us = None if known is not None else now_us - lease.entered_us
                stated += protocol.gain(ticket, held) if waited_us is not None else ()
                stated += protocol.statement(ticket, held, waited_us, lease.returns)
        return tuple(stated)

    async def play(self, operations: list[tuple[Any, ...]]) -> Answers:
        answers = Answers()
        for operation in operations:
            await self._play(operation, answers)
        self.pool._runtime.dispatch(self.pool.now_us())
        ids = {id(lease): ticket for ticket, lease in self.leases.items()}
        answers.admitted = [(ids[id(lease)], self._figures(lease.grant)) for lease in self.order]
        self.order.clear()
        ticket_of = {lease.ticket_id: ticket for ticket, lease in self.leases.items()}
        leases = self.pool._runtime.scheduler._leases
        answers.victims = [(ticket_of[victim], leases[victim].returns) for victim in self.chosen]
        self.chosen.clear()
        answers.displaced, self.displaced = self.displaced, []
        return answers

    async def _play(self, operation: tuple[Any, ...], answers: Answers) -> None:
        if operation[0] in ("end", "resize", "keep") and operation[1] not in self.leases:
            return  # it was refused in this step
        match operation:
            case ("enter", ticket, wanted):
                try:
                    self.leases[ticket] = await self.pool.enter(wanted)
                except QueueFull:
                    answers.refused.append(ticket)
            case ("end", ticket):
                lease = self.leases[ticket]
                if not lease.settle() and (wait := await lease.leave()) is not None:
                    answers.left.append((ticket, self._figures(wait)))
            case ("resize", ticket, tokens):
                self.leases[ticket].resize(tokens)
            case ("charge", level, tenant, tokens):
                self.pool._runtime.scheduler.charge(level, tenant, WEIGHTS[tenant], tokens)
            case ("keep", ticket):
                self.leases[ticket].keep()
            case ("back", ticket, _):
                self.leases[ticket].requeue()
            case ("hold_back", _, for_us):
                self.pool.hold_back(for_us / 1e6)
            case ("hand_back", ticket, _):
                self.handed_back.add(ticket)
                self.leases[ticket].hand_back()
            case ("pause" | "resume" as verb, *_):
                self.is_paused = verb == "pause"
                self.pool.pause("no engine" if self.is_paused else None)

    def _figures(self, grant: Any) -> tuple[Any, ...]:
        overtaken = None if grant.overtaken_at_us is None else grant.at_us - grant.overtaken_at_us
        ahead = tuple(grant.served_ahead.get(name, 0) for name in self.names)
        return (grant.queue_wait_us, overtaken, grant.level, ahead, dict(grant.passed))

    def stands(self) -> tuple[Any, ...]:
        levels = range(len(self.names))
        scheduler = self.pool._runtime.scheduler
        tags = [tier.queue._virtual for tier in scheduler._tiers]
        tiers = [
            ((*scheduler.held(level), *scheduler.queued(level), tags[level]), finish_tags(scheduler, level))
            for level in levels
        ]
        # The script may wake a replica although it can admit nothing for it.
        change = None if self.is_paused else scheduler.next_change_us(self.pool.now_us())
        return (tiers, scheduler.waiting(), scheduler.leases(), change)


class Lua:
    """The script, asked by one replica."""

    def __init__(self, client: Any, policy: Policy, clock: Clock) -> None:
        self.policy = policy
        self.replica = Scripted(client, clock, policy)
        self.tiers: dict[int, tuple[float, ...]] = {}
        self._note(self.replica.sync())
        self.levels: dict[int, int] = {}
        self.is_paused = False

    def play(self, operations: list[tuple[Any, ...]]) -> Answers:
        arguments: list[Argument] = []
        states: tuple[Argument, ...] | None = None
        for operation in operations:
            match operation:
                case ("enter", ticket, wanted):
                    self.levels[ticket] = wanted.tier
                    arguments += entering(ticket, wanted)
                case ("end", ticket):
                    arguments += (protocol.END, ticket)
                case ("resize", ticket, tokens):
                    arguments += (protocol.RESIZE, ticket, tokens)
                case ("charge", level, tenant, tokens):
                    arguments += (protocol.CHARGE_TENANT, level, tenant, WEIGHTS[tenant], tokens)
                case ("keep", ticket):
                    arguments += (protocol.KEEP, ticket, self.levels[ticket])
                case ("back" | "hand_back", _, said):
                    arguments += said
                case ("pause", _):
                    self.is_paused = True
                    arguments += (protocol.CUT_OFF,)
                case ("resume", _, said):
                    self.is_paused, states = False, said
                case ("hold_back", _, for_us):
                    arguments += (protocol.BACK, for_us)
        if states is None:
            self.reply = reply = self.replica.call(*arguments)
        else:
            self.reply = reply = self.replica.sync(*states, known=1, installs=False)
        self._note(reply)
        assert self._steps() <= reply.waiting
        return Answers(
            [(ticket, self._figures(ticket, wait)) for ticket, wait in reply.grants],
            [(ticket, self._figures(ticket, wait)) for ticket, wait in reply.ended],
            list(reply.refused),
            list(reply.victims),
            list(reply.displaced),
        )

    def _note(self, reply: protocol.Reply) -> None:
        self.tiers |= {level: tuple(tier[:5]) for level, tier in reply.tiers}

    def _steps(self) -> int:
        """The record of overtaking, which must not outgrow the queue."""
        return sum(self.replica.client.zcard(key) for key in self.replica.keys()["s"])

    def _figures(self, ticket: int, wait: WaitReply | None) -> tuple[Any, ...]:
        nothing = (0,) * len(self.policy.tiers)
        if wait is None:
            return (0, None, self.levels[ticket], nothing, {})
        ahead = tuple(wait.served_ahead) or nothing
        level = self.levels[ticket] if wait.level is None else wait.level
        passed = {self.policy.tiers[tier].name: rule.value for tier, rule in wait.passed}
        return (wait.wait_us, wait.starved_us, level, ahead, passed)

    def stands(self) -> tuple[Any, ...]:
        after_us = self.reply.change_after_us
        change = None if after_us is None or self.is_paused else self.replica.clock.us + after_us
        tiers = [
            (figures, self.replica.finish_tags(level, figures[4])) for level, figures in sorted(self.tiers.items())
        ]
        return (tiers, self.reply.waiting, self.reply.leases, change)


def steps_of(program: list[tuple[Any, ...]], batch: int, tiers: int) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Turns a program into steps of some operations each, at a moment. What is over is not ended or resized again."""
    open_tickets: list[int] = []
    levels: dict[int, int] = {}
    at_us, tickets, step = 0, 0, []
    for operation in program:
        match operation:
            case ("enter", level, tenant, tokens, requests):
                tickets += 1
                open_tickets.append(tickets)
                levels[tickets] = level % tiers
                wanted = ask(level % tiers, tokens, requests=requests, tenant=tenant, weight=WEIGHTS[tenant])
                step.append(("enter", tickets, wanted))
            case ("end_important",) if important := [t for t in open_tickets if levels[t] < tiers - 1]:
                open_tickets.remove(important[0])
                step.append(("end", important[0]))
            case ("end", index, *_) if open_tickets:
                step.append(("end", open_tickets.pop(index % len(open_tickets))))
            case ("resize", index, tokens) if open_tickets:
                step.append(("resize", open_tickets[index % len(open_tickets)], tokens))
            case ("keep", index) if open_tickets:
                step.append(("keep", open_tickets[index % len(open_tickets)]))
            case ("charge", level, tenant, tokens):
                step.append(("charge", level % tiers, tenant, tokens))
            case ("back", index, _):
                step.append(("back", index))
            case ("hold_back", for_us):
                step.append(("hold_back", None, for_us))
            case ("hand_back", index) if batch == 1:
                step.append(("hand_back", index))
            case ("pause" | "resume" as verb,) if batch == 1:
                step.append((verb, None))
            case ("pass", us):
                at_us += us
        if len(step) >= batch:
            yield at_us, step
            step = []
    yield at_us + 1, step


def of_a_victim(local: Local, operation: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The operation with the ticket that it means, where there is any, and with what a replica would say."""
    if operation[0] == "hand_back":
        held = [t for t, lease in local.leases.items() if lease.grant and not lease.is_over and not lease._is_kept]
        if held:
            ticket = held[operation[1] % len(held)]
            yield ("hand_back", ticket, local.hand_back_of(ticket))
    elif operation[0] == "resume":
        yield ("resume", None, local.statement())
    elif operation[0] != "back":
        yield operation
    elif victims := local.victims():
        ticket = victims[operation[1] % len(victims)]
        yield ("back", ticket, local.requeue_of(ticket))


def leave_out_served(answers: Answers, handed_back: set[int]) -> None:
    """The script does not count for a lease that is handed back what was served while it was one: milliseconds."""
    for listed in (answers.admitted, answers.left):
        listed[:] = [
            (ticket, (*figures[:3], None, figures[4]) if ticket in handed_back else figures)
            for ticket, figures in listed
        ]


async def compare(client: Any, policy: Policy, program: list[tuple[Any, ...]], batch: int) -> None:
    clock = Clock()
    begun_us = clock.us
    local, lua = Local(policy, clock), Lua(client, policy, clock)
    refused: set[int] = set()
    for at_us, step in steps_of(program, batch, len(policy.tiers)):
        clock.us = begun_us + at_us
        operations = [operation for operation in step if operation[0] in FREE or operation[1] not in refused]
        operations = [known for operation in operations for known in of_a_victim(local, operation)]
        expected, got = await local.play(operations), lua.play(operations)
        refused |= {*expected.refused, *expected.displaced}
        for answers in (expected, got):
            leave_out_served(answers, local.handed_back)
        assert expected == got, (at_us, operations)
        assert local.stands() == lua.stands(), (at_us, operations)
    await local.pool.close()


FEW = settings(
    max_examples=examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a shorter example would take minutes to find
)


@given(policy=pools(), program=OPERATIONS, batch=st.sampled_from([1, 1, 4, 16]))
@FEW
def test_a_real_server_decides_as_one_process_does(
    redis_server: RedisServer, policy: Policy, program: Any, batch: int
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, program, batch))


@given(policy=preempting_pools(), program=PREEMPTING_OPERATIONS)
@settings(FEW, max_examples=examples(6))
def test_a_real_server_preempts_as_one_process_does(redis_server: RedisServer, policy: Policy, program: Any) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, program, 1))


@pytest.mark.soak
@given(policy=preempting_pools(), program=PREEMPTING_OPERATIONS)
@settings(FEW, max_examples=3000)
def test_a_real_server_preempts_as_one_process_does_for_long(
    redis_server: RedisServer, policy: Policy, program: Any
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, program, 1))


@pytest.mark.soak
@given(policy=pools(), program=OPERATIONS, batch=st.sampled_from([1, 4, 16]))
@settings(FEW, max_examples=5000)
def test_a_real_server_decides_as_one_process_does_for_long(
    redis_server: RedisServer, policy: Policy, program: Any, batch: int
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, program, batch))


A_NEWCOMER_PASSES_ONE_THAT_RETURNED = [
    ("enter", 1, "c", 9, 2),
    ("enter", 0, "c", 21, 1),
    ("hold_back", 5),
    ("pass", 1),
    ("hand_back", 0),  # larger than the reserve: it waits
    ("enter", 1, "b", 5, 1),
]


def test_a_tier_without_a_queue_admits_a_newcomer_that_passes_one_that_returned(redis_server: RedisServer) -> None:
    """The newcomer is stored while it is decided about, because another request stands before it."""
    tiers = (Shares("high", reserve=Fraction(1, 4)), Shares("low", reserve=Fraction(1, 4)))
    policy = policy_of(pool_rules(tokens=None, requests=4, tiers=tiers), max_waiting=0)
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, A_NEWCOMER_PASSES_ONE_THAT_RETURNED, 1))


SMALL_ONES_PASS_AND_A_LEASE_RETURNS = [
    ("enter", 1, "c", 50, 1),  # by a turn: the tier owes when it has ended
    ("enter", 0, "d", 45, 1),
    ("enter", 1, "a", 5, 1),  # the one that returns
    ("enter", 1, "a", 60, 1),
    *[("enter", 1, "b", 9, 1)] * 3,
    ("pass", 10),
    ("end", 0),
    ("enter", 0, "d", 30, 1),
    ("hand_back", 1),
    ("pass", 100),
    ("end", 3),
]


def test_a_lease_that_returns_stands_before_a_later_ticket_of_its_tenant_that_small_ones_have_passed(
    redis_server: RedisServer,
) -> None:
    tiers = (Shares("high"), Shares("low", reserve=Fraction(1, 10)))
    policy = policy_of(pool_rules(tokens=100, requests=None, tiers=tiers))
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, SMALL_ONES_PASS_AND_A_LEASE_RETURNS, 1))


SIZES = [
    ("enter", 0, "a", 30, 1),
    ("enter", 0, "a", 30, 1),
    ("resize", 0, 60),
    ("resize", 0, 45),
    ("resize", 0, 10),
]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pool.book(level, tokens - held, 0)", ""),
        ("pool.book(level, tokens - held, 0)", "pool.book(level, math.min(0, tokens - held), 0)"),
        ("pool.resize(id, tonumber(ARGV[index + 2]))", ""),
    ],
)
@pytest.mark.parametrize("batch", [1, 5])
def test_another_size_is_noticed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, batch: int
) -> None:
    """The negative control of leases that change their size."""
    from tests.pools import scripted

    policy = policy_of(pool_rules(tokens=40, requests=None, tiers=(Shares("t0"),)))
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, policy, SIZES, batch))
        client.flushall()
        assert right in scripted.CLOCKED_SOURCE
        monkeypatch.setattr(scripted, "CLOCKED_SOURCE", scripted.CLOCKED_SOURCE.replace(right, wrong))
        with pytest.raises(AssertionError):
            asyncio.run(compare(client, policy, SIZES, batch))


CHARGES = [
    ("enter", 0, "a", 30, 1),
    ("enter", 0, "b", 30, 1),  # waits: the head, not stored yet where all is one step
    ("charge", 0, "b", 9),  # it keeps its start
    ("charge", 0, "c", 50),
    ("enter", 0, "c", 30, 1),
    ("enter", 0, "b", 30, 1),
    ("enter", 0, "d", 30, 1),
    *[("end", 0)] * 5,
]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pool.charge_more(tonumber(id),", "local _ = select(1, tonumber(id),"),
        ("lane.finish = math.max(tier[VIRTUAL], lane.finish) + tokens / weight", "lane.finish = tokens / weight"),
        ("lane.finish = math.max(lane.finish, ticket.start) +", "lane.finish = ticket.start +"),
        ("'%.17g %d %d', lane.finish", "'%.14g %d %d', lane.finish"),
    ],
)
def test_another_charge_is_noticed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    """The negative control of tenants that pay for leases that grow."""
    from tests.pools import scripted

    policy = policy_of(pool_rules(tokens=40, requests=None, tiers=(Shares("t0"),)))
    program = [*CHARGES[:6], ("end", 0), ("charge", 0, "b", 1), ("charge", 0, "b", 1), *CHARGES[6:]]
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        for batch in (1, 6, 100):
            client.flushall()
            asyncio.run(compare(client, policy, program, batch))
        assert right in scripted.CLOCKED_SOURCE
        monkeypatch.setattr(scripted, "CLOCKED_SOURCE", scripted.CLOCKED_SOURCE.replace(right, wrong))
        client.flushall()
        with pytest.raises(AssertionError):
            asyncio.run(compare(client, policy, program, 1))


def test_another_rule_is_noticed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a script that lets everybody overtake must not pass."""
    from tests.pools import scripted

    wrong = scripted.CLOCKED_SOURCE.replace("return tokens >= 0 and requests >= 0", "return true")
    assert wrong != scripted.CLOCKED_SOURCE
    monkeypatch.setattr(scripted, "CLOCKED_SOURCE", wrong)
    policy = policy_of(pool_rules(tokens=40, requests=None, tiers=(Shares("t0"),)))
    program = [("enter", 0, "a", 30, 1), ("enter", 0, "a", 30, 1)]
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        with pytest.raises(AssertionError):
            asyncio.run(compare(client, policy, program, 1))
