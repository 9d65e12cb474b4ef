"""Trust in learned output lengths: which quantile a lease holds, raised by the engine's preemptions.

An engine whose KV cache is full preempts a running request, and computes it again later. It counts that
(`engines.base.Gauges.preemptions`). Preemptions say that leases held too little. Each step above the base holds more:

| step | cautious | full |
|---|---|---|
| 0, the base | 0.95 | 0.90, with overlap |
| 1 | 0.975 | 0.95, with overlap |
| 2 | 0.9875 | 0.975, with overlap |
| 3 | 0.99 | 0.9875, with overlap |
| 4 | | 0.99, with overlap |
| 5 | | 0.99 |

A step halves the part of answers that are longer than what is held, down to one in a hundred. Where that does not help,
`full` gives up the overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from sidecar.durations import policy_duration
from sidecar.policy.choices import Learn

TOLERATED_PER = 1_000
"""Admitted requests for which one preemption is tolerated: half of the target of 2 for 1,000."""
CALM_US = 60 * 1_000_000
"""Time without a preemption before a step back: some times as long as most requests run. With five minutes the few
preemptions after a change of the traffic cost a tenth of the engine for that long (benchmarks/reservations)."""

_log = logging.getLogger("sidecar.lengths")


class _Step(NamedTuple):
    quantile: float
    uses_overlap: bool


_STEPS: Mapping[Learn, tuple[_Step, ...]] = {
    Learn.OFF: (_Step(1.0, False),),
    Learn.CAUTIOUS: (_Step(0.95, False), _Step(0.975, False), _Step(0.9875, False), _Step(0.99, False)),
    Learn.FULL: (
        *(_Step(0.90, True), _Step(0.95, True), _Step(0.975, True), _Step(0.9875, True), _Step(0.99, True)),
        _Step(0.99, False),
    ),
}


class Trust:
    """The quantile in force, of one pool in one process. Not thread-safe; times are microseconds of one clock.

    The rule is a bucket. Each preemption adds 1,000, each admitted request takes 1 away, and it never holds less than
    nothing. More than 1,000 in it is one step up, and empties it. So a single preemption is tolerated, and after that
    one for every 1,000 admitted requests. One reading makes one step at most, whatever it says. A minute without a
    preemption is one step down, and empties the bucket.

    `preempted` gets counters that only rise, the engine's and that of the admitted requests. One that falls began again
    at 0, and the first reading is where counting begins. Without any reading, the base stays in force. More preemptions
    never lead to a lower step. `on_change` are called after each change of what is in force.

    `quantile` is the part of answers that are not longer than what a lease holds for them, 1 where nothing is learned;
    `uses_overlap` whether it counts that requests end at different times.
    """

    def __init__(self, learn: Learn, now_us: int) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._learn = learn
        self._step = 0
        self.quantile, self.uses_overlap = _STEPS[learn][0]
        self._bucket = 0
        self._since_us = now_us
        self._total: int | None = None
        self._admitted = 0

    def __repr__(self) -> str:
        return f"Trust({self._learn.value}, step={self._step}, bucket={self._bucket})"

    @property
    def learn(self) -> Learn:
        """The policy's choice."""
        return self._learn

    @property
    def is_raised(self) -> bool:
        """True if preemptions hold the quantile above the base."""
        return self._step > 0

    @property
    def reason(self) -> str:
        """Why this quantile is in force: one sentence."""
        if self._learn is Learn.OFF:
            return "learn is off, so a lease holds its maximum output"
        if self._step == 0:
            return f"learn is {self._learn.value}, and the engine has not preempted more than is tolerated"
        if self._learn is Learn.FULL and not self.uses_overlap:
            return "the engine went on to preempt requests at quantile 0.99, so the overlap is not used"
        base = _STEPS[self._learn][0].quantile
        return f"the engine preempted requests, so the quantile is above the {base:g} of learn: {self._learn.value}"

    def preempted(self, total: int, now_us: int, admitted: int) -> None:
        """A reading: so many preemptions and admitted requests there were until now. Negative totals are ignored."""
        if total < 0 or admitted < 0:
            return
        new, entered = self._since(total, admitted)
        if new:  # when they were is not known: perhaps just after the reading before, so there was no calm
            self._since_us = max(self._since_us, now_us)
        else:
            self.look(now_us)
        self._bucket = max(0, self._bucket - entered) + TOLERATED_PER * new
        if self._bucket > TOLERATED_PER:
            self._bucket = 0
            self._raise(new)

    def look(self, now_us: int) -> None:
        """Time passed: a step down for each minute without a preemption."""
        calm = max(0, now_us - self._since_us) // CALM_US
        if not calm:
            return
        self._since_us += calm * CALM_US
        self._bucket = 0
        before, self._step = self._step, max(0, self._step - calm)
        if self._step != before:
            self._report()
            message = "no preemption for %s: leases hold quantile %g of the output lengths%s from now on"
            _log.info(message, policy_duration(CALM_US / 1e6), *self._in_force(), extra={"event": "quantile_lowered"})

    def change_mode(self, learn: Learn) -> None:
        """The policy chose another mode: its base is in force. The same mode changes nothing."""
        if learn is self._learn:
            return
        self._learn, self._step, self._bucket = learn, 0, 0
        self._report()

    def _since(self, total: int, admitted: int) -> tuple[int, int]:
        """The preemptions and the admitted requests since the reading before."""
        before, self._total = self._total, total
        entered_before, self._admitted = self._admitted, admitted
        if before is None:
            return 0, 0
        return (
            total - before if total >= before else total,
            admitted - entered_before if admitted >= entered_before else admitted,
        )

    def _raise(self, new: int) -> None:
        if self._step + 1 == len(_STEPS[self._learn]):
            return
        self._step += 1
        self._report()
        message = "requests that the engine preempted: %d. Leases hold quantile %g of the output lengths%s from now on"
        _log.warning(message, new, *self._in_force(), extra={"event": "quantile_raised"})

    def _in_force(self) -> tuple[float, str]:
        return self.quantile, ", less the overlap," if self.uses_overlap else ""

    def _report(self) -> None:
        self.quantile, self.uses_overlap = _STEPS[self._learn][self._step]
        for changed in list(self.on_change):
            changed()


# -- Overlap of the requests of one engine: they end at different times, so together they need less than their sum.
#
# The peak is that of the specification: sort what runs by the tokens that are still to come, r, descending; u is
# what each uses. While the k-th is just about to end, the first k use u_1 + ... + u_k + k * r_k. The largest of
# these sums is the peak. It is exact where all generate at the same rate. The peak of two engines together, or of
# two replicas, is not larger than the sum of their peaks.

_REMAINING = itemgetter(1)
WHOLE = 2**16
"""The ratio of an engine whose requests all need their most at once."""
STALE_SHARE = 16
"""The ratio is computed anew when a 16th of the requests or of their tokens changed. Until then no more than this share
of the tokens is counted by a ratio that it did not contribute to."""


def peak_tokens(running: Iterable[tuple[int, int, int]]) -> int:
    """Peak from (used, remaining, sequences): each of the sequences has `remaining` tokens to come."""
    used_so_far = sequences_so_far = most = 0
    for used, remaining, sequences in sorted(running, key=_REMAINING, reverse=True):
        used_so_far += used
        sequences_so_far += sequences
        most = max(most, used_so_far + sequences_so_far * remaining)
    return most


class Overlap:
    """The overlap of one engine, as one process sees it: its running requests, and the ratio of peak to plain sum."""

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[int, int, int]] = {}
        self._sum = 0
        self._ratio = WHOLE
        self._changes = 0
        self._moved = 0

    def put(self, lease: Hashable, used: int, remaining: int, sequences: int = 1) -> None:
        """States what a lease uses now, and the tokens to come of each of its sequences; the lease may be new."""
        before = self._running.get(lease, (0, 0, 1))
        self._running[lease] = now = (used, remaining, sequences)
        self._note(before, now)

    def remove(self, lease: Hashable) -> None:
        """Forgets a lease that has ended; one that is not known is ignored."""
        before = self._running.pop(lease, None)
        if before is not None:
            self._note(before, (0, 0, 1))

    def _note(self, before: tuple[int, int, int], now: tuple[int, int, int]) -> None:
        change = now[0] + now[1] * now[2] - before[0] - before[1] * before[2]
        self._sum += change
        self._changes += 1
        self._moved += abs(change)

    @property
    def ratio(self) -> int:
        """The peak in 65,536ths of the plain sum, rounded up: 1 to 65,536. At most a 16th of the requests old."""
        if self._changes * STALE_SHARE > len(self._running) or self._moved * STALE_SHARE > self._sum:
            self._recompute()
        return self._ratio

    def _recompute(self) -> None:
        total = self._sum
        self._ratio = (
            WHOLE if total <= 0 else max(1, min(WHOLE, -(-peak_tokens(self._running.values()) * WHOLE // total)))
        )
        self._changes = self._moved = 0

    def counted(self, tokens: int) -> int:
        """The tokens that a need of `tokens` is counted as: its share of the peak, rounded up, at least 1."""
        return max(1, -(-tokens * self.ratio // WHOLE))
