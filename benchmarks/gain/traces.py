"""Arrivals of the benchmark: windows of the public traces, and a synthetic trace of tenants with bursts.

The public traces are read from a folder that is no part of this project. `azure_conv.csv` and `azure_code.csv` are the
Azure Public Dataset's AzureLLMInferenceTrace of 2023 (CC-BY 4.0), `mooncake_conversation.jsonl` is the Mooncake
project's FAST'25 release (Apache-2.0). Each seed plays another window of a trace. Tiers are assigned as by `sidecar
simulate`.

The synthetic trace follows what ServeGen (Xiang et al., arXiv 2505.09999) found in production: a load is the sum of its
clients, a few of which send most; the times between a client's requests are gamma distributed, with a coefficient of
variation above 1 for those that send most; prompts are a mixture of log-normal and Pareto lengths, answers are
exponential. Its parameters are ours, not fitted: the constants below. Each seed is another trace.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log
from pathlib import Path

from sidecar.tools.replay.trace import Trace, TraceRow, read_trace
from sidecar.tools.simulate.load import Assign, Request, load

TENANTS = 20
"""The k-th sends 1/k as much as the first, as in `sidecar simulate`."""
BURSTY = 5
"""So many of the largest have bursts: a coefficient of variation of 2 to 4; the others of 0.8 to 1.2."""
MEDIAN_PROMPT = (200, 1600)
"""Log-uniform over the tenants, in tokens; sigma 0.8 within one."""
PROMPT_SIGMA = 0.8
PARETO_SHARE, PARETO_SHAPE, PARETO_LEAST = 0.1, 1.7, 1000
MEAN_ANSWER = (60, 500)
MOST_PROMPT, MOST_ANSWER = 16_000, 2_000
SYNTHETIC_S = 3600.0
SYNTHETIC_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Source:
    """A trace: its file, or None for the synthetic one; and the engine that is fast enough for its prompts.

    `chunk_tokens` of the engine's model: a slow engine needs small chunks, or a step with a prompt takes longer than
    the tpot of the most important tier. `block_tokens` of its KV cache: where prompts are long, larger blocks cost less
    time here, and are small enough for prefixes that the trace has in blocks of 512.
    """

    name: str
    file: str | None
    model: str
    chunk_tokens: int
    block_tokens: int = 16


A100, H100 = "llama-3.1-8b-a100", "llama-3.1-8b-h100"
CONV = Source("Azure-conv", "azure_conv.csv", A100, 512)
CODE = Source("Azure-code", "azure_code.csv", A100, 512)
MOONCAKE = Source("Mooncake", "mooncake_conversation.jsonl", H100, 2048, 64)
SYNTHETIC = Source("synthetic", None, A100, 512)
SOURCES: Mapping[str, Source] = {one.name: one for one in (CONV, CODE, MOONCAKE, SYNTHETIC)}


@dataclass(frozen=True, slots=True)
class Window:
    """Requests of a trace. `tenants` are theirs, None where the trace has none."""

    trace: Trace
    tenants: Sequence[str] | None

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return max(row.at_s or 0.0 for row in self.trace.rows)


@lru_cache(maxsize=8)
def window(name: str, folder: Path, rows: int, seed: int, seeds: int) -> Window:
    """So many requests: windows of the seeds begin evenly over a public trace. Raises BadTrace without the file."""
    source = SOURCES[name]
    if source.file is None:
        return _synthetic(rows, seed)
    trace = _read(folder / source.file)
    begin = (len(trace.rows) - rows) * (seed - 1) // max(1, seeds - 1) if rows < len(trace.rows) else 0
    found = trace.rows[begin : begin + rows]
    start_s = found[0].at_s or 0.0
    return Window(Trace(name, trace.format, [row.at((row.at_s or 0.0) - start_s) for row in found]), None)


@lru_cache(maxsize=4)
def _read(path: Path) -> Trace:
    trace = read_trace(str(path))
    return Trace(trace.name, trace.format, sorted(trace.rows, key=lambda row: row.at_s or 0.0))


def _synthetic(rows: int, seed: int) -> Window:
    rng = random.Random(f"{seed} synthetic")
    whole = sum(1 / (number + 1) for number in range(TENANTS))
    found: list[tuple[float, int, int, str]] = []
    for number in range(TENANTS):
        mean_s = SYNTHETIC_S / SYNTHETIC_ROWS * whole * (number + 1)
        variation = rng.uniform(2.0, 4.0) if number < BURSTY else rng.uniform(0.8, 1.2)
        shape = 1 / variation**2
        prompt, answer = _log_uniform(rng, *MEDIAN_PROMPT), _log_uniform(rng, *MEAN_ANSWER)
        at_s = rng.uniform(0.0, mean_s)
        while at_s < SYNTHETIC_S:
            found.append((at_s, _prompt(rng, prompt), _answer(rng, answer), f"tenant-{number + 1}"))
            at_s += rng.gammavariate(shape, mean_s / shape)
    found.sort()
    found = found[:rows]
    start_s = found[0][0]
    made = [
        TraceRow(line=line, at_s=at_s - start_s, input_tokens=prompt, output_tokens=answer)
        for line, (at_s, prompt, answer, _) in enumerate(found, 1)
    ]
    return Window(Trace(SYNTHETIC.name, "synthetic", made), [one[3] for one in found])


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return float(least * (most / least) ** rng.random())


def _prompt(rng: random.Random, median: float) -> int:
    if rng.random() < PARETO_SHARE:
        drawn = PARETO_LEAST * rng.paretovariate(PARETO_SHAPE)
    else:
        drawn = rng.lognormvariate(log(median), PROMPT_SIGMA)
    return min(MOST_PROMPT, max(1, round(drawn)))


def _answer(rng: random.Random, mean: float) -> int:
    return min(MOST_ANSWER, max(1, round(rng.expovariate(1 / mean))))


def offered(
    found: Window, tiers: Sequence[str], mix: Mapping[str, float], *, by: Assign, scale: float, block_tokens: int,
    seed: int,
) -> list[Request]:  # fmt: skip
    """The requests of one run, times divided by `scale`. Tenants of the trace stay; others are those of `load`."""
    if found.tenants is None:
        return load(found.trace, tiers, mix, by=by, scale=scale, block_tokens=block_tokens, seed=seed)
    rng = random.Random(f"{seed} tiers")
    of_tenant = _tiers_of(found.tenants, mix, rng)
    names, parts = list(mix), list(mix.values())
    made = []
    for row, tenant in zip(found.trace.rows, found.tenants, strict=True):
        tier = rng.choices(names, parts)[0] if by is Assign.REQUEST else of_tenant[tenant]
        made.append(Request(row.at((row.at_s or 0.0) / scale), tiers.index(tier), tenant, ()))
    assert all(one.at_us <= other.at_us for one, other in pairwise(made))
    return made


def _tiers_of(tenants: Sequence[str], mix: Mapping[str, float], rng: random.Random) -> Mapping[str, str]:
    """Each tenant's tier: the one that lacks most of its part of the requests, the largest tenants first."""
    counts = {tenant: tenants.count(tenant) for tenant in sorted(set(tenants))}
    whole = sum(mix.values())
    lacking = {tier: part / whole * len(tenants) * rng.uniform(0.9, 1.1) for tier, part in mix.items()}
    found = {}
    for tenant in sorted(counts, key=lambda name: -counts[name]):
        tier = max(lacking, key=lambda name: lacking[name])
        lacking[tier] -= counts[tenant]
        found[tenant] = tier
    return found
