"""One burst: requests sent at once, in a shuffled order of levels, while the engine's gauges are read.

Also says whether the requests waited inside the engine, where its scheduler orders them, and not only for a long time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sidecar.engines import Engine
from sidecar.engines.base import Gauges
from sidecar.engines.pages import Pages, Unread
from sidecar.tools.doctor.judgment import FEWEST, Judgment, ServedRequest, judge
from sidecar.tools.doctor.recommendation import Queueing
from sidecar.tools.doctor.target import LEVELS, Clock, ExaminedServer, PriorityField
from sidecar.tools.loadgen import Planned, Seen, most_at_once

LONGEST_PART = 0.5
"""Of the time that is left: a burst that takes longer is cut short, and judged by what came until then."""
TIER_HEADER, WAIT_HEADER = "x-admission-tier", "x-admission-wait-ms"
CUT_WITHIN_S = 0.1
"""A request that ended so shortly before the cut was ended by it."""
WATCH_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class BurstPlan:
    """A burst to send: so many requests, each with one to two times `tokens` tokens of output.

    `way` is None for a control: the levels are drawn just the same, but nothing is sent of them. The lengths differ, so
    that slots come free one after the other and not all in one step.
    """

    requests: int
    tokens: int
    way: PriorityField | None
    seed: int

    @property
    def output_tokens(self) -> int:
        """The most that the engine generates for it."""
        return sum(self.lengths())

    def levels(self) -> Sequence[int]:
        """By arrival: each block of as many requests as there are levels has each level once, in a shuffled order."""
        chance = random.Random(self.seed)
        blocks = math.ceil(self.requests / LEVELS)
        drawn = [level for _ in range(blocks) for level in chance.sample(range(LEVELS), LEVELS)]
        return drawn[: self.requests]

    def lengths(self) -> Sequence[int]:
        """By arrival: evenly from `tokens` to twice as many, in a shuffled order."""
        lengths = [self.tokens + self.tokens * index // self.requests for index in range(self.requests)]
        random.Random(self.seed + 1).shuffle(lengths)
        return lengths

    def planned(self, target: ExaminedServer) -> Sequence[Planned]:
        """The requests in the order of their arrival."""
        way, pairs = self.way, zip(self.levels(), self.lengths(), strict=True)
        return [
            target.request(
                f"{self.seed}.{arrival}",
                tokens,
                way.members(way.values[level]) if way else None,
                way.headers(way.values[level]) if way else None,
            )
            for arrival, (level, tokens) in enumerate(pairs)
        ]


@dataclass(frozen=True, slots=True)
class Burst:
    """Observations of a burst, which was cut short after `allowed_s` seconds.

    `gauges` are the engine's own, in the order in which they were read meanwhile.
    """

    plan: BurstPlan
    seen: Sequence[Seen]
    gauges: Sequence[Gauges]
    allowed_s: float

    @property
    def is_cut(self) -> bool:
        """True if requests were still waiting when it was cut short."""
        return any(map(self._is_cut, self.seen))

    @property
    def refused(self) -> Sequence[Seen]:
        """Requests that were answered with an error, or not at all."""
        return [one for one in self.seen if one.first_token_s is None and not self._is_cut(one)]

    @property
    def is_refused(self) -> bool:
        """True if most of its requests were."""
        return 2 * len(self.refused) > len(self.seen)

    def is_answered_by(self, status: int) -> bool:
        """True if any of its requests was refused with this status."""
        return any(one.status == status for one in self.refused)

    @property
    def first_completion_s(self) -> float:
        """When the first answer was complete: before that no slot came free. Infinite where none was."""
        return min((one.end_s for one in self.seen if one.is_complete), default=math.inf)

    @property
    def judgment(self) -> Judgment:
        """Judgment of the order of the requests that had to wait."""
        waited = [
            ServedRequest(level, arrival, math.inf if one.first_token_s is None else one.first_token_s)
            for arrival, (level, one) in enumerate(zip(self.plan.levels(), self.seen, strict=True))
            if self._has_waited(one)
        ]
        return judge(waited, LEVELS)

    @property
    def median_wait_s(self) -> float | None:
        """Time to first token of those that had to wait, as far as they got one."""
        waits_s = [one.ttft_s for one in self.seen if self._has_waited(one) and one.ttft_s is not None]
        return statistics.median(waits_s) if waits_s else None

    @property
    def at_once(self) -> int:
        """How many ran at the same moment, as their clients saw it."""
        return most_at_once(self.seen)

    @property
    def mean_at_once(self) -> float:
        """Requests at once on average, while any ran; 0 where none did."""
        stays = [(one.first_token_s, one.end_s) for one in self.seen if one.first_token_s is not None]
        busy_s = max((end_s for _, end_s in stays), default=0.0) - min((first_s for first_s, _ in stays), default=0.0)
        return sum(end_s - first_s for first_s, end_s in stays) / busy_s if busy_s > 0 else 0.0

    @property
    def waiting_inside(self) -> int | None:
        """The most that waited inside the engine by its own gauge; None where it was not to be read."""
        return max((one.waiting for one in self.gauges if one.waiting is not None), default=None)

    @property
    def running_inside(self) -> int | None:
        """The most that ran by its own gauge; None where it was not to be read."""
        return max((one.running for one in self.gauges if one.running is not None), default=None)

    @property
    def held_at_sidecar(self) -> int:
        """Requests that one of our own sidecars says it held."""
        return sum(one.headers.get(WAIT_HEADER, "0") != "0" for one in self.seen)

    @property
    def tiers(self) -> Sequence[Sequence[str]]:
        """By level, the tiers that one of our own sidecars says it gave."""
        given: list[set[str]] = [set() for _ in range(LEVELS)]
        for level, one in zip(self.plan.levels(), self.seen, strict=True):
            if TIER_HEADER in one.headers:
                given[level].add(one.headers[TIER_HEADER])
        return [sorted(names) for names in given]

    def _has_waited(self, one: Seen) -> bool:
        if one.first_token_s is None:
            return self._is_cut(one)
        return one.first_token_s > self.first_completion_s

    def _is_cut(self, one: Seen) -> bool:
        """True if it was still waiting when the burst was cut short."""
        return one.first_token_s is None and one.end_s - one.sent_s >= self.allowed_s - CUT_WITHIN_S


async def send(plan: BurstPlan, target: ExaminedServer, engine: type[Engine], pages: Pages, clock: Clock) -> Burst:
    """Sends a burst and watches. Canceling it breaks all its requests off."""
    allowed_s = clock.left_s * LONGEST_PART
    async with _watching(engine, pages) as gauges:
        seen = await target.send(plan.planned(target), allowed_s)
    return Burst(plan, seen, tuple(gauges), allowed_s)


@asynccontextmanager
async def _watching(engine: type[Engine], pages: Pages) -> AsyncIterator[list[Gauges]]:
    found: list[Gauges] = []
    task = asyncio.ensure_future(_watch(engine, pages, found))
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(engine: type[Engine], pages: Pages, found: list[Gauges]) -> None:
    while not engine.gauges_stand_still:
        with contextlib.suppress(Unread):
            found.append(await engine.gauges(pages))
        await asyncio.sleep(WATCH_EVERY_S)


FULL = 0.8
"""Of what the engine says it can run: clients see a little less, for a first token comes after its slot."""
LONGER = 3
"""By this factor a control's answers are longer, where no gauge shows that the engine was full."""
SAME = 1.7
"""At most this much more ran at once then, on average: the number is held by a bound. Otherwise it grows by `LONGER`.

A little growth is the first tokens' doing: a slot is taken before them, and clients do not see it yet."""
ON_GAUGE = 0.25
"""Of the requests that waited, for a reading to be their queue: a request that just came in is counted for a step."""
FEWEST_READINGS = 3
"""Of the gauge within one burst, for its silence to mean anything."""


def queueing(burst: Burst, control: Burst | None, engine: type[Engine], max_running: int | None) -> Queueing:
    """Where a burst's requests waited. `BOUNDED` is certainly a queue, but it is not known whose."""
    if burst.judgment.waited < FEWEST:
        return Queueing.TOO_LITTLE
    shows_on_gauge = (burst.waiting_inside or 0) >= ON_GAUGE * burst.judgment.waited
    if shows_on_gauge or (max_running is not None and burst.at_once >= FULL * max_running):
        return Queueing.INSIDE
    if control is None or control.plan.tokens < LONGER * burst.plan.tokens:
        return Queueing.TOO_LITTLE
    if control.mean_at_once > SAME * burst.mean_at_once:
        return Queueing.TOO_LITTLE
    readings = [one.waiting for one in burst.gauges if one.waiting is not None]
    is_watched = not engine.gauge_leaves_some_out and len(readings) >= FEWEST_READINGS
    return Queueing.BEFORE if is_watched else Queueing.BOUNDED


def seems_switched_off(burst: Burst, engine: type[Engine]) -> bool:
    """True if the engine shows no queue: requests beyond its size are refused, and none waits."""
    status = engine.overload_status
    return status is not None and burst.is_answered_by(status) and burst.waiting_inside == 0


def queueing_at_sidecar(burst: Burst) -> Queueing:
    """Queueing at one of our own sidecars, which says of each request how long it held it."""
    return Queueing.INSIDE if burst.held_at_sidecar >= FEWEST else Queueing.TOO_LITTLE
