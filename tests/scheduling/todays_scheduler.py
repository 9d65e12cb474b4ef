"""The schedulers of today as players of programs: the one place that knows their classes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from golden_programs import Program, Step

from sidecar.policy.rules import UNLIMITED, PoolRules, Shares, pool_rules
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.scheduling import Admission, Scheduler
from sidecar.scheduling.fleet_scheduler import FleetScheduler
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_fleet_scheduler import GainFleetScheduler
from sidecar.scheduling.gain_scheduler import GainScheduler

ONE = "pool#1"
"""The engine of a program without engines."""


def microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


class Today:
    """One program on the scheduler for it: one of four, or with `is_fleet` the one of several engines for any."""

    def __init__(self, program: Program, *, is_fleet: bool = False) -> None:
        self.program = program
        self.shares = shares_of(program)
        self.names = [tier["name"] for tier in program["tiers"]]
        self.has_engines = "engines" in program or is_fleet
        self.is_by_gain = program.get("order") == "gain"
        self.scheduler: Any
        if self.has_engines:
            kind = GainFleetScheduler if self.is_by_gain else FleetScheduler
            self.scheduler = kind(self.rules_of, program.get("weight_percent", WEIGHT_PERCENT))
            self.engines(program.get("engines", [{"id": ONE, **program.get("capacity", {})}]), 0)
        else:
            capacity = program["capacity"]
            one = GainScheduler if self.is_by_gain else Scheduler
            self.scheduler = one(self.rules_of(capacity.get("tokens"), capacity.get("requests")))

    def rules_of(self, tokens: int | None, requests: int | None, prefill: int | None = None) -> PoolRules:
        program = self.program
        aging = program.get("aging") or {}
        return pool_rules(
            tokens=tokens,
            requests=requests,
            prefill=prefill,
            tiers=self.shares,
            promote_after_us=microseconds(aging.get("promote_after_s")),
            ceiling=self.names.index(aging["ceiling"]) if aging else 0,
            max_preemptions=program.get("max_preemptions", 0),
            floor_of_reserve=Fraction(str(program.get("fair", 1))) if self.is_by_gain else Fraction(1),
            is_by_gain=self.is_by_gain,
        )

    def do(self, step: Step, now_us: int) -> None:
        getattr(self, step["do"])(step, now_us)

    def dispatch(self, now_us: int) -> list[tuple[str, str | None, dict[str, str]]]:
        """Each admitted ticket, its engine, and the rule by which it passed the head of each other tier."""
        return [self._answer(admission) for admission in self.scheduler.dispatch(now_us)]

    def _answer(self, admission: Admission) -> tuple[str, str | None, dict[str, str]]:
        reasons = {self.names[level]: rule.value for level, rule in admission.passed}
        return admission.ticket.id, admission.engine if "engines" in self.program else None, reasons

    def preempt(self, now_us: int) -> list[str]:
        return [victim.id for victim in self.scheduler.preempt(now_us)]

    # -- steps

    def submit(self, step: Step, now_us: int) -> None:
        fields = {name: step[name] for name in ("tokens", "requests", "tenant", "weight") if name in step}
        if self.has_engines:
            fields |= {name: step[name] for name in ("prompt", "hits", "barred") if name in step}
        ticket = self.scheduler.submit(step["id"], tier=self.names.index(step["tier"]), now_us=now_us, **fields)
        if self.is_by_gain and (gain := step.get("gain")):
            self.scheduler.appraise(ticket, figures_of(gain))

    def cancel(self, step: Step, now_us: int) -> None:
        self.scheduler.cancel(step["id"], now_us)

    def settle(self, step: Step, now_us: int) -> None:
        if not self.scheduler.settle(step["id"], now_us):
            self.cancel_in_line(step, now_us)

    def cancel_in_line(self, step: Step, now_us: int) -> None:
        """On the page a ticket in line is settled as a lease is. Here it waits."""
        if self.has_engines and any(step["id"] in tier.queue.claimants for tier in self.scheduler._tiers):
            self.scheduler.cancel(step["id"], now_us)

    def prefilled(self, step: Step, now_us: int) -> None:
        self.scheduler.prefilled(step["id"], now_us)

    def keep(self, step: Step, now_us: int) -> None:
        self.scheduler.keep(step["id"])

    def resize(self, step: Step, now_us: int) -> None:
        self.scheduler.resize(step["id"], step["tokens"])

    def charge(self, step: Step, now_us: int) -> None:
        tier = self.names.index(step["tier"])
        self.scheduler.charge(tier, step.get("tenant", ""), step.get("weight", 1), step["tokens"])

    def requeue(self, step: Step, now_us: int) -> None:
        self.scheduler.requeue(step["id"], now_us)

    def hand_back(self, step: Step, now_us: int) -> None:
        if self.has_engines:
            self.scheduler.bar(step["id"], step.get("barred", ()))
        self.scheduler.hand_back(step["id"], now_us, None)

    def engines(self, step: Step | list[dict[str, Any]], now_us: int) -> None:
        engines = step["engines"] if isinstance(step, dict) else step
        if self.has_engines:
            self.scheduler.set_engines([offer_of(engine) for engine in engines], now_us)
        else:
            (engine,) = engines
            self.scheduler.change_rules(self.rules_of(engine.get("tokens"), engine.get("requests")))

    def cap(self, step: Step, now_us: int) -> None:
        self.scheduler.cap(step["engine"], step["requests"], round(step["until"] * 1e6), now_us)

    def wait(self, step: Step, now_us: int) -> None:
        pass


def shares_of(program: Program) -> tuple[Shares, ...]:
    return tuple(
        Shares(
            name=tier["name"],
            reserve=Fraction(str(tier.get("reserve", 0))),
            lend=Fraction(str(tier.get("lend", 1))),
            limit=Fraction(str(tier.get("limit", 1))),
            always_first=bool(tier.get("always_first")),
            preemptible=bool(tier.get("preemptible")),
            preempt_after_us=microseconds(tier.get("preempt_after_s")),
        )
        for tier in program["tiers"]
    )


def figures_of(gain: dict[str, Any]) -> GainFigures:
    """The page has no deadline: the moment up to which a request may start stands for it."""
    times = (gain["cost"], gain.get("deadline", gain["start_by"]), gain["start_by"], gain["slack"])
    return GainFigures(gain["weight"], gain["tokens"], *(round(seconds * 1e6) for seconds in times))


def offer_of(engine: dict[str, Any]) -> EngineOffer:
    return EngineOffer(
        engine["id"],
        engine.get("tokens", UNLIMITED),
        engine.get("requests", UNLIMITED),
        engine.get("prefill", UNLIMITED),
        engine.get("speed", 1000),
        engine.get("takes_new", True),
        round(engine.get("ramp_s", 0) * 1e6),
        round(engine.get("since_s", 0) * 1e6),
    )
