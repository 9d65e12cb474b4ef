"""Random programs, and the answers of the literal reference to them.

A program has the words of `rules/*.json`, which no class of the product knows. A seed makes the same program anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.scheduling import reference

Program = dict[str, Any]
Step = dict[str, Any]

RULES = Path(__file__).parent / "rules"
STEPS = 25
FILLS, DRAINS = 3, 8
"""The steps at the beginning that fill the pool, and those at the end that only empty it: all that waits gets in."""
WEIGHTS = {"a": 1, "b": 2, "c": 4}
USERS = ["", "u", "v", "v", "w", None]
NAMES = "abcd"


def random_tiers(luck: random.Random) -> list[dict[str, Any]]:
    count = luck.choice([1, 2, 2, 3, 3, 4])
    has_first, preempts = luck.random() < 0.2, luck.random() < 0.5
    tiers: list[dict[str, Any]] = []
    for level in range(count):
        tier: dict[str, Any] = {"name": f"t{level}", "reserve": luck.choice([0, 0.05, 0.1, 0.2, 0.2, 0.3])}
        if luck.random() < 0.3:
            tier["lend"] = luck.choice([0, 0.5])
        if luck.random() < 0.15:
            tier["limit"] = luck.choice([0.5, 0.8])
        if has_first and level == 0:
            tier |= {"always_first": True, "limit": 0.5}
        if preempts and level and luck.random() < 0.9:
            tier |= {"preemptible": True, "reserve": luck.choice([0, 0, 0.05, 0.2])}
        if preempts and level < count - 1:
            tier["preempt_after_s"] = luck.choice([0, 0, 2])
        tiers.append(tier)
    return tiers


def random_engine(luck: random.Random, engine: str, at: float) -> dict[str, Any]:
    found: dict[str, Any] = {"id": engine, "tokens": luck.choice([12, 30, 30, 60])}
    optional = {
        "requests": (luck.choice([1, 3, 4]), 0.5),
        "prefill": (luck.choice([5, 10, 10, 20]), 0.7),
        "speed": (luck.choice([500, 1300]), 0.2),
        "takes_new": (False, 0.05),
    }
    found |= {name: value for name, (value, chance) in optional.items() if luck.random() < chance}
    return found | ({"ramp_s": 10, "since_s": at} if luck.random() < 0.1 else {})


def random_header(luck: random.Random, name: str, *, several: bool, by_gain: bool) -> Program:
    tiers = random_tiers(luck)
    other_luck = random.Random(name)
    for tier in tiers[:-1]:
        if other_luck.random() < 0.2:
            tier["hold"] = 0.97
    program: Program = {"name": name, "tiers": tiers, "users": other_luck.choice(["", "", "a", "ab", "abc"])}
    if luck.random() < 0.6:
        ceiling = luck.choice(tiers)["name"]
        program["aging"] = {"promote_after_s": luck.choice([2, 4, 20]), "ceiling": ceiling}
    if any(tier.get("preemptible") for tier in tiers):
        program["max_preemptions"] = luck.choice([1, 1, 2])
    if by_gain:
        program |= {"order": "gain", "fair": luck.choice([0.25, 0.25, 0.5, 1])}
    if several:
        program["engines"] = [random_engine(luck, f"{each}#1", 0) for each in NAMES[: luck.choice([1, 2, 2, 3, 4])]]
    else:
        program["capacity"] = {"tokens": luck.choice([20, 40, 60])}
        if luck.random() < 0.5:
            program["capacity"]["requests"] = luck.choice([3, 5, 7])
    return program


class Author:
    """Writes one program: it knows of its requests what a client would know."""

    def __init__(self, luck: random.Random, program: Program) -> None:
        self.luck, self.program = luck, program
        self.pool = reference.new(program)
        self.pool.divide = lambda tokens, weight: tokens / weight  # as a product does
        self.at = 0.0
        self.count = 0
        self.engines = {engine["id"]: engine for engine in program.get("engines", ())}
        self.favored = luck.choices(program["tiers"], k=2)
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.places: dict[str, str] = {}  # the engine of each
        self.requests: dict[str, int] = {}
        self.kept: set[str] = set()
        self.answered: set[str] = set()
        self.over: list[str] = []
        self.chosen: list[str] = []
        self.cost_luck = random.Random(f"costs of {program['name']}")
        self.is_weighted = self.cost_luck.random() < 0.4
        self.user_luck = random.Random(program["name"])

    def user_within(self, tenant: str) -> dict[str, str]:
        """The user of a tenant whose users take turns."""
        user = self.user_luck.choice(USERS) if tenant in self.program["users"] else None
        return {} if user is None else {"user": user}

    def write(self, steps: int) -> Program:
        self.program["steps"] = []
        while len(self.program["steps"]) < steps:
            if step := self.next(len(self.program["steps"]), steps):
                self.take({"at": self.at, **step})
        return self.program

    def take(self, step: Step) -> None:
        now_us = round(step["at"] * 1e6)
        self.pool.do(step, now_us)
        entered = self.pool.dispatch(now_us)
        step |= {"admitted": [{"id": ticket, "engine": engine} for ticket, engine in entered]}
        step |= {"chosen": self.pool.preempt(now_us)}
        self.program["steps"].append(step)
        self.places |= dict(entered)
        self.waiting = [ticket for ticket in self.waiting if ticket not in self.places]
        self.running += [ticket for ticket, _ in entered]
        self.chosen += step["chosen"]

    def next(self, number: int, steps: int) -> dict[str, Any] | None:
        if number < FILLS:
            return self.submit(least=3)
        if number >= steps - DRAINS:
            self.at += self.luck.choice([0, 0, 0.5, 2])
            return self.settle() or self.wait()
        often: list[tuple[float, Callable[[], dict[str, Any] | None]]] = [
            (9, self.submit), (2, self.settle), (1, self.cancel), (0.7, self.resize), (1, self.charge),
            (0.7, self.hand_back), (3, self.requeue), (0.6, self.keep), (0.7, self.wait), (0.4, self.change),
            (0.3, self.repeat),
        ]  # fmt: skip
        if "engines" in self.program:
            often += [(2, self.prefilled), (0.4, self.cap)]
        if any("hold" in tier for tier in self.program["tiers"]):
            often += [(0.7, self.guard)]
        (made,) = self.luck.choices([each for _, each in often], [chance for chance, _ in often])
        if made is not self.wait:
            self.at += self.luck.choice([0, 0, 0, 0.25, 1])
        return made()

    def submit(self, least: int = 0) -> dict[str, Any]:
        luck, ticket = self.luck, f"r{self.count}"
        self.count += 1
        self.waiting.append(ticket)
        tier = luck.choice(self.favored if luck.random() < 0.4 else self.program["tiers"])
        most = int(self.largest() * (1 if luck.random() < 0.1 else tier.get("limit", 1)))
        tenths = luck.choice([5, 8, 10]) if least else luck.choice([2, 3, 5, 5, 8])
        tokens = luck.randint(1 + most * least // 10, max(1 + most * least // 10, most * tenths // 10))
        tenant = luck.choice("aabbc")
        step = {
            "do": "submit",
            "id": ticket,
            "tier": tier["name"],
            "tokens": tokens,
            "tenant": tenant,
            "weight": WEIGHTS[tenant],
            **self.user_within(tenant),
        }
        if luck.random() < 0.2:
            step["requests"] = 2
        self.requests[ticket] = step.get("requests", 1)
        if self.is_weighted and self.cost_luck.random() < 0.9:
            step["cost"] = max(1, tokens * self.cost_luck.choice([0, 1, 3, 10]) // 3)
        if "engines" in self.program:
            step["prompt"] = luck.randint(0, tokens)
            ids = luck.sample(sorted(self.engines), luck.randint(0, min(2, len(self.engines))))
            if ids:
                step["hits"] = [(engine, luck.randint(0, step["prompt"])) for engine in ids]
            if luck.random() < 0.05:
                step["barred"] = [luck.choice(NAMES)]
        if self.program.get("order") == "gain" and luck.random() < 0.85:
            start_by = luck.choice([0, 1, 4, 10])
            step["gain"] = {
                "weight": luck.choice([1, 2, 4]), "tokens": luck.choice([1, 3, 5, 9, 14]),
                "cost": luck.choice([0.5, 1, 3, 10]), "start_by": start_by, "slack": luck.choice([0.25, 1, 3]),
            }  # fmt: skip
        return step

    def guard(self) -> dict[str, Any]:
        guarded = [tier["name"] for tier in self.program["tiers"] if "hold" in tier]
        return {"do": "guard", "tier": self.luck.choice(guarded), "share": self.luck.choice([0.02, 0.1, 0.3, 0.6, 1])}

    def largest(self) -> int:
        """The tokens of the pool, or of its largest engine."""
        engines = self.engines.values() if "engines" in self.program else [self.program["capacity"]]
        return max((engine["tokens"] for engine in engines), default=12)

    def leave(self, ticket: str) -> str:
        self.running.remove(ticket)
        self.kept.discard(ticket)
        self.answered.discard(ticket)
        self.chosen = [it for it in self.chosen if it != ticket]
        return ticket

    def settle(self) -> dict[str, Any] | None:
        if not self.running:
            return None
        self.over.append(self.leave(self.luck.choice(self.running)))
        return {"do": "settle", "id": self.over[-1]}

    def cancel(self) -> dict[str, Any] | None:
        if not self.waiting:
            return None
        ticket = self.luck.choice(self.waiting)
        self.waiting.remove(ticket)
        self.over.append(ticket)
        return {"do": "cancel", "id": ticket}

    def prefilled(self) -> dict[str, Any] | None:
        free = [ticket for ticket in self.running if ticket not in self.answered]
        if not free:
            return None
        ticket = self.luck.choice(free)
        self.answered.add(ticket)
        return {"do": "prefilled", "id": ticket}

    def repeat(self) -> dict[str, Any] | None:
        """An end that came before, or an end of another kind: nothing changes."""
        if not self.over:
            return None
        return {"do": self.luck.choice(["settle", "cancel"]), "id": self.luck.choice(self.over)}

    def keep(self) -> dict[str, Any] | None:
        if not self.running:
            return None
        ticket = self.luck.choice(self.running)
        self.kept.add(ticket)
        self.chosen = [it for it in self.chosen if it != ticket]
        return {"do": "keep", "id": ticket}

    def resize(self) -> dict[str, Any] | None:
        if not self.running:
            return None
        return {"do": "resize", "id": self.luck.choice(self.running), "tokens": self.luck.randint(1, 20)}

    def charge(self) -> dict[str, Any]:
        tenant = self.luck.choice("aabbc")
        tier = self.luck.choice(self.favored)["name"]
        return {
            "do": "charge",
            "tier": tier,
            "tenant": tenant,
            "weight": WEIGHTS[tenant],
            **self.user_within(tenant),
            "tokens": self.luck.choice([1, 7, 30]) * (-1 if self.is_weighted and self.cost_luck.random() < 0.6 else 1),
        }

    def hand_back(self) -> dict[str, Any] | None:
        free = [ticket for ticket in self.running if ticket not in self.kept]
        if not free:
            return None
        ticket = self.leave(self.luck.choice(free))
        self.waiting.append(ticket)
        step: dict[str, Any] = {"do": "hand_back", "id": ticket}
        if self.engines and self.luck.random() < 0.4:
            step["barred"] = [self.luck.choice(NAMES)]
        return step

    def requeue(self) -> dict[str, Any] | None:
        if not self.chosen:
            return None
        ticket = self.leave(self.chosen[0])
        self.waiting.append(ticket)
        return {"do": "requeue", "id": ticket}

    def wait(self) -> dict[str, Any]:
        self.at += self.luck.choice([1, 2, 5.25])
        return {"do": "wait"}

    def change(self) -> dict[str, Any]:
        """The engines are others from now on; one engine is larger or smaller."""
        if "engines" not in self.program:
            return {
                "do": "engines",
                "engines": [{"id": "pool#1", **self.program["capacity"], "tokens": self.luck.choice([15, 30, 60])}],
            }
        name = self.luck.choice(NAMES)
        known = next((engine for engine in self.engines if engine.startswith(name)), None)
        if known is None:
            number = 1 + sum(f'"{name}#' in str(step) for step in self.program["steps"])
            engine = f"{name}#{number + 1}"
            self.engines[engine] = random_engine(self.luck, engine, self.at)
        elif self.luck.random() < 0.4:
            del self.engines[known]
        else:
            self.engines[known] = random_engine(self.luck, known, self.at)
        return {"do": "engines", "engines": list(self.engines.values())}

    def cap(self) -> dict[str, Any] | None:
        """An engine refuses, so it is capped at no more than what it runs."""
        if not self.engines:
            return None
        engine = self.luck.choice(sorted(self.engines))
        runs = sum(self.requests[ticket] for ticket in self.running if self.places[ticket] == engine)
        until = self.at + self.luck.choice([1, 5])
        return {"do": "cap", "engine": engine, "requests": min(runs, self.luck.randint(0, 3)), "until": until}


def scenarios() -> list[Program]:
    """All of `rules/*.json`, with the answers that were worked out."""
    return [
        {**scenario, "name": f"{file.stem}: {scenario['name']}"}
        for file in sorted(RULES.glob("*.json"))
        for scenario in json.loads(file.read_text(encoding="utf-8"))
    ]


def random_program(seed: int, *, several: bool, by_gain: bool) -> Program:
    luck = random.Random(seed)
    return Author(luck, random_header(luck, f"seed {seed}", several=several, by_gain=by_gain)).write(STEPS)


def programs(seeds: Iterable[int]) -> Iterator[Program]:
    """One of each seed: one engine or several, by level or by gain, in turn."""
    for seed in seeds:
        yield random_program(seed, several=bool(seed & 1), by_gain=bool(seed & 2))


def expected(step: Step) -> tuple[list[tuple[str, str]], list[str]]:
    """What entered which engine, and what was chosen to be taken back."""
    return [(it["id"], it.get("engine", "pool#1")) for it in step["admitted"]], step.get("chosen", [])
