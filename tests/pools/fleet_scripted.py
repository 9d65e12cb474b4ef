"""A pool of several engines in Lua beside the scheduler of one process and the slow oracle: three that must agree."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

from fleets import Twins, as_placed
from test_gain_fleet import GainTwins

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools.base import Ask
from sidecar.pools.engines import WEIGHT_PERCENT
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import Argument, Reply
from sidecar.pools.redis.script import joined
from sidecar.scheduling import Admission
from tests.pools.harness import Clock, policy_of
from tests.pools.redis_harness import clocked, undivided
from tests.pools.scripted import Scripted, finish_tags


class ScriptedFleet(Scripted):
    """One replica of a pool of several engines."""

    source = undivided(clocked(joined(has_engines=True)))

    def rules_text(self) -> str:
        return protocol.engines_rules_text(self.policy, WEIGHT_PERCENT)

    def ledgers(self) -> dict[str, list[int]]:
        """The ledger of every engine, as the store has it."""
        (key,) = self.client.keys(f"{self.root}:*:e") or [b"none"]
        return {name.decode(): json.loads(text) for name, text in self.client.hgetall(key).items()}


def engines_policy(
    shares: tuple[Shares, ...], promote_after_us: int | None = None, ceiling: int = 0, max_preemptions: int = 0
) -> Policy:
    """A policy whose size is that of its engines."""
    rules = pool_rules(
        tokens=None, requests=None, tiers=shares, promote_after_us=promote_after_us, ceiling=ceiling,
        max_preemptions=max_preemptions,
    )  # fmt: skip
    policy = policy_of(rules)
    object.__setattr__(policy, "shares", shares)
    return policy


class Triplets(Twins):
    """Twins, and the script. Every operation is followed by a decision, because the script decides after each."""

    replica_type: type[ScriptedFleet] = ScriptedFleet

    def open(self, client: Any) -> Triplets:
        self.clock = Clock()
        self.now_us = self.clock.us
        own = self.own_policy()
        self.replica = self.replica_type(client, self.clock, own)
        self.said: list[Argument] = []
        self.states = False
        self.handed_back: set[str] = set()
        self.asks: dict[str, Ask] = {}
        self.reply = self.replica.sync()
        return self

    def own_policy(self) -> Policy:
        """The policy of the replica."""
        policy = self.policy
        return engines_policy(policy.tiers, policy.promote_after_us, policy.ceiling, policy.max_preemptions)

    def _set_engines(self) -> None:
        super()._set_engines()
        self.said += self._stated_engines()

    def _stated_engines(self) -> Sequence[Argument]:
        return protocol.engines(list(self.offers.values()), (), self.now_us)

    def cap(self, engine: str, requests: int, for_us: int) -> None:
        held = self.scheduler.held_by(engine)
        requests = min(requests, held)
        super().cap(engine, requests, for_us)
        self.said += (protocol.CAP, engine, held - requests, for_us)

    def raise_cap(self, engine: str, requests: int) -> None:
        super().raise_cap(engine, requests)
        self.said += protocol.raise_cap(engine, requests)

    def submit(self, **ticket: Any) -> str:
        name = super().submit(**ticket)
        size = (ticket.get(each, 1) for each in ("weight", "tokens", "requests"))
        placing = {each: tuple(ticket[each]) for each in ("hits", "barred") if each in ticket}
        ask = Ask(ticket["tier"], ticket.get("tenant", ""), *size, prompt=ticket.get("prompt", 0), **placing)
        self.asks[name] = ask
        self.said += self._entering(name, ask)
        return name

    def _entering(self, name: str, ask: Ask) -> Sequence[Argument]:
        return (*protocol.placing(ask), *protocol.enter(int(name), ask, None))

    def settle(self, name: str) -> bool:
        return self._say(super().settle(name), protocol.END, name)

    def cancel(self, name: str) -> bool:
        return self._say(super().cancel(name), protocol.END, name)

    def prefilled(self, name: str) -> bool:
        return self._say(super().prefilled(name), protocol.PREFILLED, name)

    def resize(self, name: str, tokens: int) -> bool:
        return self._say(super().resize(name, tokens), protocol.RESIZE, name, tokens)

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        super().charge(tier, tenant, weight, tokens)
        self.said += (protocol.CHARGE_TENANT, tier, tenant, weight, tokens)

    def keep(self, name: str) -> bool:
        if name in self.scheduler._leases:
            self.said += (protocol.KEEP, name, self.asks[name].tier)
        return super().keep(name)

    def requeue(self, name: str) -> bool:
        return self._return(name, super().requeue)

    def hand_back(self, name: str, barred: tuple[str, ...] = ()) -> bool:
        if name in self.scheduler._leases:
            self.handed_back.add(name)
        return self._return(name, super().hand_back, barred)

    def _return(self, name: str, do: Any, *barred: tuple[str, ...]) -> bool:
        lease = self.scheduler._leases.get(name)
        returns = 0 if lease is None else lease.returns + 1
        did: bool = do(name, *barred)
        if did:
            assert lease is not None
            ask = self._present(name)
            is_handed_back = bool(barred)
            said = protocol.requeue(int(name), ask, 0, returns, is_handed_back=is_handed_back)
            self.said += (*protocol.placing(ask), *protocol.gain(int(name), ask), *said)
        return did

    def _present(self, name: str) -> Ask:
        scheduler = self.scheduler
        ticket = scheduler._waiting.get(name) or scheduler._leases[name]
        return msgspec.structs.replace(self.asks[name], tokens=ticket.tokens, barred=ticket.placing.barred)

    def hold_back(self, for_us: int) -> None:
        super().hold_back(for_us)
        self.said += (protocol.BACK, for_us)

    def pause(self, *, is_paused: bool) -> None:
        was_paused = self.scheduler.is_paused
        super().pause(is_paused=is_paused)
        if is_paused and not was_paused:
            self.said += (protocol.CUT_OFF,)
        elif was_paused and not is_paused:
            self.states = True
            for name in [*self.scheduler._leases]:
                super().keep(name)  # a lease that is stated is never preempted again

    def _say(self, did: bool, *operation: Argument) -> bool:
        if did:
            self.said += operation
        return did

    def statement(self) -> list[Argument]:
        """Everything that the replica has."""
        stated: list[Argument] = [*self._stated_engines()]
        for name, lease in self.scheduler._leases.items():
            placing = json.dumps([lease.placing.engine.id, lease.placing.unprefilled])  # type: ignore[union-attr]
            stated += (
                protocol.PLACING,
                placing,
                *protocol.statement(int(name), self._present(name), None, lease.returns),
            )
        for name, ticket in self.scheduler._waiting.items():
            ask = self._present(name)
            stated += (*protocol.placing(ask), *protocol.gain(int(name), ask))
            stated += protocol.statement(int(name), ask, self.now_us - ticket.arrived_us, ticket.returns)
        return stated

    def dispatch(self) -> list[Any]:
        self.clock.us = self.now_us
        states, self.states = self.states, False
        said, self.said = self.said, []
        stated = self.statement() if states else []
        admissions: list[Admission] = []
        decide = self.scheduler.dispatch

        def noted(now_us: int) -> list[Admission]:
            admissions.extend(decide(now_us))
            return admissions

        self.scheduler.dispatch = noted  # type: ignore[method-assign]
        victims: list[tuple[int, int]] = []
        preempt = self.scheduler.preempt

        def chosen(now_us: int) -> list[Any]:
            found = preempt(now_us)
            victims.extend((int(victim.id), victim.returns) for victim in found)
            return found

        self.scheduler.preempt = chosen  # type: ignore[method-assign]
        try:
            placed = super().dispatch()
        finally:
            del self.scheduler.dispatch, self.scheduler.preempt
        reply = self.replica.sync(*stated, known=1, installs=False) if states else self.replica.call(*said)
        self.reply = reply
        assert [self._figures(each) for each in admissions] == [
            self._theirs(lease_id, wait) for lease_id, wait in reply.grants
        ], said
        assert victims == list(reply.victims), said
        ours, theirs = self.stands(), self.script_stands(reply)
        assert ours == theirs, (said, ours, theirs)
        return placed

    def _figures(self, admission: Admission) -> tuple[Any, ...]:
        answer, engine = as_placed(admission)
        wait = admission.wait
        starved = None if wait.overtaken_at_us is None else wait.starvation_us
        ahead = None if answer.id in self.handed_back else tuple(wait.served_ahead)
        passed = {level: rule.value for level, rule in admission.passed}
        placing = admission.ticket.placing
        claimed_us = 0 if placing.claimed_us is None else self.now_us - placing.claimed_us
        placed = engine, placing.found, claimed_us
        return int(answer.id), placed, wait.queue_wait_us, starved, admission.level, ahead, passed

    def _theirs(self, lease_id: int, wait: protocol.WaitReply | None) -> tuple[Any, ...]:
        assert wait is not None
        name = str(lease_id)
        level = self.asks[name].tier if wait.level is None else wait.level
        ahead = None if name in self.handed_back else tuple(wait.served_ahead) or (0,) * len(self.policy.tiers)
        passed = {level: rule.value for level, rule in wait.passed}
        placed = wait.engine, wait.found, wait.claimed_us
        return lease_id, placed, wait.wait_us, wait.starved_us, level, ahead, passed

    def stands(self) -> tuple[Any, ...]:
        scheduler = self.scheduler
        levels = range(len(self.policy.tiers))
        tiers = [
            (*scheduler.held(level), *scheduler.queued(level), scheduler._tiers[level].queue._virtual,
             scheduler.held_prefill(level), len(scheduler._tiers[level].queue.claimants),
             *self._own_placing_figures(level), finish_tags(scheduler, level))
            for level in levels
        ]  # fmt: skip
        change = None if scheduler.is_paused else scheduler.next_change_us(self.now_us)
        engines = {
            engine.id: (
                engine.takes_new, engine.effective_tokens, engine.effective_requests, engine.effective_prefill,
                engine.is_capped, engine.held_tokens, engine.held_requests, engine.unprefilled_tokens,
            )
            for engine in scheduler.engines(self.now_us)
        }  # fmt: skip
        blocked_us = scheduler.blocked_us(self.now_us)
        return tiers, scheduler.waiting(), scheduler.leases(), blocked_us, change, engines

    def _placing_figures(self, figures: Sequence[float]) -> Sequence[float]:
        """The script's figures of a tier that are about engines."""
        return figures[14:]

    def _own_placing_figures(self, level: int) -> Sequence[float]:  # by gain there are some
        """More figures of a tier, of the scheduler."""
        return ()

    def script_stands(self, reply: Reply) -> tuple[Any, ...]:
        kept = self.replica.client.hget(self.replica.root, "tiers")
        of_each = len(kept) // len(self.policy.tiers)
        tiers = []
        for level in range(len(self.policy.tiers)):
            figures = struct.unpack_from(f"<{of_each // 8}d", kept, level * of_each)
            tiers.append(
                (
                    *figures[:2],
                    figures[2] + figures[12],
                    figures[3] + figures[11],
                    *figures[4:5],
                    *self._placing_figures(figures),
                    self.replica.finish_tags(level, figures[4]),
                )
            )
        change = (
            None if reply.change_after_us is None or self.scheduler.is_paused else self.now_us + reply.change_after_us
        )
        engines = {
            engine: (bool(it[0]), *it[10:13], bool(it[14]), *it[17:19], it[20])
            for engine, it in self.replica.ledgers().items()
        }
        return tiers, reply.waiting, reply.leases, reply.blocked_us, change, engines


class ScriptedGainFleet(ScriptedFleet):
    """The same of a pool that orders by gain."""

    source = undivided(clocked(joined(has_engines=True, is_by_gain=True)))


class GainTriplets(Triplets, GainTwins):
    """The same by gain. The script's floors and costs are compared, too."""

    replica_type = ScriptedGainFleet

    def own_policy(self) -> Policy:
        own = super().own_policy()
        object.__setattr__(own, "fair", self.policy.fair)
        return replace(own, rules=replace(own.rules, is_by_gain=True))

    def _entering(self, name: str, ask: Ask) -> Sequence[Argument]:
        self.asks[name] = ask = msgspec.structs.replace(ask, gain=self.scheduler._waiting[name].gain)
        return (*protocol.placing(ask), *protocol.gain(int(name), ask), *protocol.enter(int(name), ask, None))

    def _placing_figures(self, figures: Sequence[float]) -> Sequence[float]:
        level_figures = figures[14:]
        floors, cost, prefill = level_figures[:2], level_figures[2], level_figures[5:]
        return (*prefill[:2], *floors, prefill[2], cost)

    def _own_placing_figures(self, level: int) -> Sequence[float]:
        tier = self.scheduler._tiers[level]
        return (tier.floor_tokens, tier.floor_requests, tier.floor_prefill, tier.queue.cost_us)


class TwoReplicas(Triplets):
    """The same with two replicas, of which the second cannot use some engines: for its tickets they are barred.

    A replica hears of its grants by its own calls, so what is compared after each operation is the state of the pool.
    """

    barred = ("a", "c")

    def open(self, client: Any) -> TwoReplicas:
        super().open(client)
        self.second = self.replica_type(client, self.clock, self.replica.policy, "replica-b")
        self.second.sync(known=1, installs=False)
        return self

    def owner_of(self, name: str) -> ScriptedFleet:
        return self.second if int(name) % 2 else self.replica

    def submit(self, **ticket: Any) -> str:
        if self.count % 2:
            ticket["barred"] = tuple(dict.fromkeys((*ticket.get("barred", ()), *self.barred)))
        return super().submit(**ticket)

    def dispatch(self) -> list[Any]:
        self.clock.us = self.now_us
        said, self.said = self.said, []
        placed = Twins.dispatch(self)
        if said and said[0] == protocol.ENGINES:
            self._state_both(said)
            said = []
        owner = self.replica
        if said and said[0] not in (protocol.BACK, protocol.CAP, protocol.RAISE_CAP):
            named = said[3] if said[0] == protocol.PLACING else said[1]
            owner = self.owner_of(str(named))
            if owner is self.second and said[0] == protocol.PLACING:
                said[1] = protocol.placing(self._without_reach(str(named)))[1]
        self.reply = reply = owner.call(*said)
        (*ours, _, engines), (*theirs, _, their_engines) = self.stands(), self.script_stands(reply)
        assert (ours, engines) == (theirs, their_engines), said  # they look for silent replicas, too
        assert self._held() == self._theirs_held(), said
        return placed

    def _without_reach(self, name: str) -> Ask:
        """The request as its replica states it: what that cannot use is no part of it."""
        ask = self.asks[name]
        ticket = self.scheduler._waiting.get(name) or self.scheduler._leases.get(name)
        barred = ask.barred if ticket is None else ticket.placing.barred
        return msgspec.structs.replace(ask, barred=tuple(it for it in barred if it not in self.barred))

    def _state_both(self, said: list[Argument]) -> None:
        """Both statements count at once: that of the second is written as the script would, just before."""
        stated = [
            [*offer[:5], int(offer.takes_new and protocol.name_of(offer.id) not in self.barred), offer.ramp_us,
             offer.since_us if offer.ramp_us else 0, 0]
            for offer in self.offers.values()
        ]  # fmt: skip
        birth = int(struct.unpack_from("<d", self.replica.client.hget(self.replica.root, "meta"))[0])
        self.replica.client.hset(f"{self.replica.root}:{birth}:n", self.second.name, f"0 {json.dumps(stated)}")
        self.replica.call(*said)

    def _held(self) -> dict[str, str]:
        return {name: lease.placing.engine.id for name, lease in self.scheduler._leases.items() if lease.placing.engine}

    def _theirs_held(self) -> dict[str, str]:
        client, found = self.replica.client, {}
        for key in client.keys(f"{self.replica.root}:*:r:*"):
            for name, record in client.hgetall(key).items():
                if record.startswith(b"L"):
                    found[name.decode()] = record.split()[8].decode()
        return found


class TwoGainReplicas(TwoReplicas, GainTriplets):
    """The same by gain."""
