"""Load of a simulation: the requests of a trace with their tiers and tenants, the same for every policy and baseline.

A public trace has neither. With `request` each request gets a tier by the mix, and each tier is one tenant. With
`tenant` there are 20 tenants, of which the k-th sends 1/k as much as the first; each belongs to the tier that lacks
most of its part of the mix.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import accumulate

from sidecar.tools.replay.plan import Sizing, assign, rounding_s, schedule
from sidecar.tools.replay.trace import BLOCK_TOKENS, BadTrace, Trace, TraceRow
from sidecar.tools.step_model.kv_cache import BlockHash
from sidecar.tools.step_model.queue import Job

TENANTS = 20


class Assign(str, Enum):
    """Unit that gets a tier: each request, or each tenant."""

    REQUEST = "request"
    TENANT = "tenant"


class Request(Job):
    """One request that is offered: in `tier`, a level, at `at_us`. In an engine it is the engine's job.

    `engine` is where it runs, None where it never did. `end_us` is the end of its answer, or of its wait where it got
    none: then `refusal` says why. `first_us` is when its first token came. One that `has_left` has no client any more.
    """

    __slots__ = ("at_us", "deadline_s", "end_us", "engine", "first_us", "has_left", "refusal", "tenant", "tier")

    def __init__(self, row: TraceRow, tier: int, tenant: str, blocks: Sequence[BlockHash]) -> None:
        super().__init__(row.input_tokens or 1, row.output_tokens or 1, blocks)
        self.at_us = round((row.at_s or 0.0) * 1e6)
        self.deadline_s = row.deadline_s
        self.tier = tier
        self.tenant = tenant
        self.engine: int | None = None
        self.end_us: int | None = None
        self.first_us: int | None = None
        self.has_left = False
        self.refusal: str | None = None


def check(trace: Trace) -> None:
    """Raises BadTrace for a trace whose rows do not all say how long prompt and answer are."""
    for row in trace.rows:
        if row.input_tokens is None or row.output_tokens is None:
            raise BadTrace(f"{trace.name}:{row.line}: a simulation needs the tokens of prompt and answer of each row")
        if row.at_s is None:
            raise BadTrace(f"{trace.name}:{row.line}: timestamp: is missing; a simulation needs one for each row")


def load(
    trace: Trace,
    tiers: Sequence[str],
    mix: Mapping[str, float] | None,
    *,
    by: Assign,
    scale: float,
    block_tokens: int,
    seed: int,
) -> list[Request]:
    """The requests of one run in the order of their arrival, times divided by `scale`. The same for the same seed."""
    rng = random.Random(f"{seed} jitter")
    rows = schedule(trace.rows, Sizing(speed=scale), rounding_s(trace.rows), rng)
    rows = sorted(rows, key=lambda row: row.at_s or 0.0)
    if by is Assign.REQUEST:
        names = assign(rows, tiers, mix, random.Random(f"{seed} tiers"))
        tenants: Sequence[str] = names
    else:
        tenants, names = _by_tenant(rows, tiers, mix, random.Random(f"{seed} tenants"))
    return [
        Request(row, tiers.index(name), tenant, _blocks(row, block_tokens))
        for row, name, tenant in zip(rows, names, tenants, strict=True)
    ]


def _by_tenant(
    rows: Sequence[TraceRow], tiers: Sequence[str], mix: Mapping[str, float] | None, rng: random.Random
) -> tuple[list[str], list[str]]:
    """The tenant and the tier of every row."""
    parts = [1 / (number + 1) for number in range(TENANTS)]
    wanted = dict(mix or dict.fromkeys(tiers, 1.0))
    whole = sum(wanted.values())
    lacking = {tier: part / whole * sum(parts) for tier, part in wanted.items()}
    tier_of = []
    for part in parts:
        tier = max(lacking, key=lambda name: lacking[name])
        lacking[tier] -= part
        tier_of.append(tier)
    sums = list(accumulate(parts))
    of_session: dict[str, int] = {}
    numbers = []
    for row in rows:
        number = rng.choices(range(TENANTS), cum_weights=sums)[0]
        numbers.append(number if row.session is None else of_session.setdefault(row.session, number))
    return [f"tenant-{number + 1}" for number in numbers], [tier_of[number] for number in numbers]


def _blocks(row: TraceRow, block_tokens: int) -> Sequence[BlockHash]:
    """The hashes of the prompt's full blocks. Only rows with `hash_ids` share any."""
    if not row.hash_ids:
        return ()
    found = [block for number in row.hash_ids for block in _parts(number, block_tokens)]
    return found[: (row.input_tokens or 0) // block_tokens]


@lru_cache(maxsize=1 << 18)
def _parts(number: int, block_tokens: int) -> Sequence[BlockHash]:
    return [f"{number}.{part}".encode() for part in range(BLOCK_TOKENS // block_tokens)]
