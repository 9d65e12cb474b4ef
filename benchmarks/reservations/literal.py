"""The rules of the specification, stated as literally as possible: what the product's runs are compared with.

Every running request is looked at in every step. Nothing is cached, rounded to bins, or skipped for being small:

- the output length is the quantile of all lengths seen so far, longer than what was generated, without decay;
- the peak is that of all that runs and the newcomer, and the newcomer enters where the peak is within the KV cache.

It is slow: some hundred requests are enough for a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reservations.engine import Hardware, RooflineEngine
from benchmarks.reservations.traces import Asked
from sidecar.tools.step_model.queue import Job

ENOUGH = 50
"""Lengths from which a quantile is taken."""


def quantile(lengths: Sequence[int], q: float, beyond: int) -> int | None:
    """The smallest of the lengths above `beyond` that a share `q` of them does not exceed."""
    longer = sorted(length for length in lengths if length > beyond)
    if len(lengths) < ENOUGH or not longer:
        return None
    return next(length for rank, length in enumerate(longer, start=1) if rank >= q * len(longer) - 1e-9)


def peak(pairs: Sequence[tuple[int, int]]) -> int:
    """The most that all of them use at one time, each growing by a token in each step until it ends."""
    ends = {remaining for _, remaining in pairs}
    return max((sum(used + at for used, remaining in pairs if remaining >= at) for at in ends), default=0)


def used_share(requests: Sequence[Asked], q: float | None, hardware: Hardware, *, has_overlap: bool) -> float:
    """The tokens in the KV cache to its size, in the mean of the steps. `q` None is the old rule."""
    engine, waiting = RooflineEngine(hardware), list(requests)
    lengths, running = list[int](), dict[Job, Asked]()
    shares: list[float] = []

    def holds(asked: Asked, generated: int) -> tuple[int, int]:
        most = asked.max_tokens or asked.output
        found = None if q is None else quantile(lengths, q, generated)
        return asked.prompt + generated, max(0, min(most, most if found is None else found) - generated)

    while waiting:
        pairs = [holds(asked, engine.length(sequence)) for sequence, asked in running.items()]
        while waiting:
            more = [*pairs, holds(waiting[0], 0)]
            if (peak(more) if has_overlap else sum(map(sum, more))) > hardware.kv_tokens:
                break
            pairs, asked = more, waiting.pop(0)
            sequence = Job(asked.prompt, asked.output)
            running[sequence] = asked
            engine.add(sequence)
        lengths += [running.pop(sequence).output for sequence in engine.step().finished]
        shares.append(engine.used_tokens / hardware.kv_tokens)
    return sum(shares[len(shares) // 4 :]) / len(shares[len(shares) // 4 :])
