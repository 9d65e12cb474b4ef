"""The script as a player of golden programs: one replica, on a server."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

from golden_programs import Program, Step
from todays_scheduler import Today, figures_of, offer_of

from sidecar.policy.model import Policy
from sidecar.pools.base import Ask
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import Argument, Reply
from tests.pools.fleet_scripted import ScriptedFleet, ScriptedGainFleet, engines_policy
from tests.pools.harness import Clock, policy_of
from tests.pools.scripted import Scripted


class InStore:
    """One program on the script for it, one of four."""

    def __init__(self, client: Any, program: Program) -> None:
        client.flushall()
        self.today = Today(program)  # for the words of the policy
        self.clock = Clock()
        self.started_us = self.clock.us
        self.asks: dict[str, Ask] = {}
        self.returns: Counter[str] = Counter()
        self.places: dict[str, str | None] = {}
        self.said: list[Argument] = []
        self.victims: list[str] = []
        self.replica = self._replica(client)
        self.replica.sync()
        if self.today.has_engines:
            self.engines({"engines": program["engines"]}, 0)
            self.dispatch(0)

    def _replica(self, client: Any) -> Scripted:
        today = self.today
        if not today.has_engines:
            return Scripted(client, self.clock, policy_of(today.scheduler.rules))
        rules = today.rules_of(None, None)
        policy = engines_policy(today.shares, rules.promote_after_us, rules.ceiling, rules.max_preemptions)
        kind = ScriptedGainFleet if today.is_by_gain else ScriptedFleet
        return kind(client, self.clock, self._ordered(policy))

    def _ordered(self, policy: Policy) -> Policy:
        if self.today.is_by_gain:
            object.__setattr__(policy, "fair", Fraction(str(self.today.program["fair"])))
            return replace(policy, rules=replace(policy.rules, is_by_gain=True))
        return policy

    def do(self, step: Step, now_us: int) -> None:
        getattr(self, step["do"])(step, now_us)

    def dispatch(self, now_us: int) -> list[tuple[str, str | None, dict[str, str]]]:
        self.clock.us = self.started_us + now_us
        said, self.said = self.said, []
        reply = self.replica.call(*said)
        self.victims = [f"r{victim - 1}" for victim, _ in reply.victims]
        return self._admitted(reply)

    def _admitted(self, reply: Reply) -> list[tuple[str, str | None, dict[str, str]]]:
        found = []
        for lease, wait in reply.grants:
            name, engine = f"r{lease - 1}", wait.engine if wait else None
            self.places[name] = engine
            passed = {self.today.names[level]: rule.value for level, rule in wait.passed} if wait else {}
            found.append((name, engine, passed))
        return found

    def preempt(self, now_us: int) -> list[str]:
        return self.victims

    # -- steps

    def submit(self, step: Step, now_us: int) -> None:
        gain = figures_of(step["gain"]) if "gain" in step else None
        size = step["weight"], step["tokens"], step.get("requests", 1)
        placing = {name: tuple(step[name]) for name in ("hits", "barred") if name in step}
        level = self.today.names.index(step["tier"])
        ask = Ask(level, step["tenant"], *size, prompt=step.get("prompt", 0), gain=gain, **placing)
        self.asks[step["id"]] = ask
        lease = number(step)
        self.said += (*self._placing(ask), *protocol.gain(lease, ask), *protocol.enter(lease, ask, None))

    def _placing(self, ask: Ask) -> tuple[Argument, ...]:
        return tuple(protocol.placing(ask)) if self.today.has_engines else ()

    def settle(self, step: Step, now_us: int) -> None:
        self.said += (protocol.END, number(step))

    cancel = settle

    def prefilled(self, step: Step, now_us: int) -> None:
        self.said += (protocol.PREFILLED, number(step))

    def keep(self, step: Step, now_us: int) -> None:
        self.said += (protocol.KEEP, number(step), self.asks[step["id"]].tier)

    def resize(self, step: Step, now_us: int) -> None:
        self.asks[step["id"]] = msgspec.structs.replace(self.asks[step["id"]], tokens=step["tokens"])
        self.said += (protocol.RESIZE, number(step), step["tokens"])

    def charge(self, step: Step, now_us: int) -> None:
        level = self.today.names.index(step["tier"])
        self.said += (protocol.CHARGE_TENANT, level, step["tenant"], step["weight"], step["tokens"])

    def requeue(self, step: Step, now_us: int) -> None:
        self._return(step, is_handed_back=False)

    def hand_back(self, step: Step, now_us: int) -> None:
        ask = self.asks[step["id"]]
        barred = (*ask.barred, *(it for it in step.get("barred", ()) if it not in ask.barred))
        self.asks[step["id"]] = msgspec.structs.replace(ask, barred=barred)
        self._return(step, is_handed_back=True)

    def _return(self, step: Step, *, is_handed_back: bool) -> None:
        self.returns[step["id"]] += 1
        ask, lease = self.asks[step["id"]], number(step)
        said = protocol.requeue(lease, ask, 0, self.returns[step["id"]], is_handed_back=is_handed_back)
        self.said += (*self._placing(ask), *protocol.gain(lease, ask), *said)
        del self.places[step["id"]]

    def engines(self, step: Step, now_us: int) -> None:
        offers = [offer_of(engine) for engine in step["engines"]]
        self.said += protocol.engines(offers, (), now_us)

    def cap(self, step: Step, now_us: int) -> None:
        """A replica says how many of the engine's requests were refused."""
        assert isinstance(self.replica, ScriptedFleet)
        held = self.replica.ledgers()[step["engine"]][18]
        self.said += protocol.cap(step["engine"], held - step["requests"], round(step["until"] * 1e6) - now_us)

    def wait(self, step: Step, now_us: int) -> None:
        pass


def number(step: Step) -> int:
    """The ids of the script are numbers above 0."""
    return int(step["id"].removeprefix("r")) + 1
