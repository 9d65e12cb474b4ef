"""The probe: first whether a field gets through, then bursts, each no larger than necessary.

    one request alone -> longer prompts, each alone, where no others are there -> the field, each way
        -> bursts at mixed priorities until enough requests wait
        -> where the order shows nothing, or the wrong direction: the same burst, another way
        -> a control at equal priorities

Every step is bounded in time. A step does not begin when no time is left.
"""

from __future__ import annotations

import math
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sidecar.durations import policy_duration
from sidecar.engines.pages import Pages
from sidecar.tools.doctor.burst import LONGER, TIER_HEADER, Burst, BurstPlan, queueing, queueing_at_sidecar, send
from sidecar.tools.doctor.judgment import Effect
from sidecar.tools.doctor.recommendation import Queueing, Recommendation
from sidecar.tools.doctor.survey import CannotLook, Survey
from sidecar.tools.doctor.target import COMPLETIONS, COUNT, Clock, ExaminedServer, PriorityField
from sidecar.tools.loadgen import Seen
from sidecar.tools.step_model.model import EngineModel

# -- Speed of an engine that has nothing else to do, and the `slo` that it can be held to: twice its own times.

PROMPT_TOKENS, PROMPT_BYTES = 1_000, 4_000
ANSWER_TOKENS = 16
TIMES = 2
"""Of the idle engine's own times: as slow as that its clients hardly notice, and it does more than twice as much."""
HOLD = "97%"
_SHORTEST_S = 20e-6
"""Tokens that follow each other faster came together: a server before the engine collects them."""


class IdleSpeed(NamedTuple):
    """Times to the first token of a prompt, and between two tokens after it, with nothing beside it."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int


def measured(alone: Sequence[Seen]) -> IdleSpeed | None:
    """The medians of answers that each were alone; None where they show no speed."""
    known = [(one, one.ttft_s, one.tpot_s) for one in alone]
    times = [(ttft_s, tpot_s) for _, ttft_s, tpot_s in known if ttft_s is not None and tpot_s is not None]
    if not times or statistics.median(tpot_s for _, tpot_s in times) < _SHORTEST_S:
        return None
    ttft_s, tpot_s = (statistics.median(column) for column in zip(*times, strict=True))
    prompts = [one.prompt_tokens for one in alone if one.prompt_tokens is not None]
    return IdleSpeed(ttft_s, tpot_s, round(statistics.median(prompts)) if prompts else PROMPT_TOKENS)


def predicted(model: EngineModel, outside_us: float = 0.0) -> IdleSpeed:
    """The speed of a model. `outside_us` is what a first token takes beside the engine's steps."""
    first_us = outside_us + model.idle_first_us(PROMPT_TOKENS)
    return IdleSpeed(first_us / 1e6, model.duration_us(1, 0) / 1e6, PROMPT_TOKENS)


def promise(speed: IdleSpeed) -> str:
    """The members of a tier's `slo`."""
    ttft, tpot = (policy_duration(_round_s(TIMES * own_s)) for own_s in (speed.ttft_s, speed.tpot_s))
    return f"ttft: {ttft}, tpot: {tpot}, hold: {HOLD}"


def recommended_slo(speed: IdleSpeed) -> Recommendation:
    """The `slo` of an interactive tier."""
    return Recommendation(
        f"slo: {{{promise(speed)}}}",
        f"twice what the idle engine takes: {speed.ttft_s * 1e3:.3g} ms to the first token of a prompt of "
        f"{speed.prompt_tokens:,} tokens, {speed.tpot_s * 1e3:.3g} ms for each token after it. In an interactive tier "
        f"it lets less important work fill the pool only so far that {HOLD} of the tier's requests meet both; a longer "
        "prompt needs a longer ttft",
    )


def _round_s(seconds: float) -> float:
    """Up to two digits that count, a millisecond or more."""
    unit: float = 10.0 ** max(-3, math.floor(math.log10(max(seconds, 1e-3))) - 1)
    return round(math.ceil(seconds / unit - 1e-9) * unit, 3)


LEAST_S = 2.0
"""No burst begins with less time left."""
ALONE_TOKENS = 8
IDLE_PROMPTS, IDLE_PART = 3, 0.2
"""Prompts that show the speed of an idle engine, and the part of the time for them."""
TEMPLATE_TOKENS = 64
Say = Callable[[str], None]


@dataclass(slots=True)
class Probed:
    """Observations of the probe. `mixed` are the bursts by the first way in `checks` that was accepted, the last one
    counts.

    `compared` is the same burst by another way, `control` one at equal priorities; None where there was no reason for
    one, or no time. `idle` are answers to longer prompts that each were alone, none where other clients are there.
    """

    target: ExaminedServer
    alone: Seen
    checks: list[Check] = field(default_factory=list)
    mixed: list[Burst] = field(default_factory=list)
    compared: Burst | None = None
    control: Burst | None = None
    idle: Sequence[Seen] = ()

    @property
    def is_sidecar(self) -> bool:
        """True if one of our own sidecars answers."""
        return TIER_HEADER in self.alone.headers

    @property
    def bursts(self) -> Sequence[Burst]:
        """All of them."""
        return [*self.mixed, *(burst for burst in (self.compared, self.control) if burst is not None)]

    @property
    def effect(self) -> Effect | None:
        """Of the burst that counts; None where none was sent."""
        return self.mixed[-1].judgment.effect if self.mixed else None

    def queueing(self, survey: Survey) -> Queueing:
        """Sign that requests had to wait inside the engine."""
        if not self.mixed:
            return Queueing.TOO_LITTLE
        if self.is_sidecar:
            return queueing_at_sidecar(self.mixed[-1])
        return queueing(self.mixed[-1], self.control, survey.engine, survey.gauges.max_running)


class Probe:
    """One run of at most `most` requests in a burst. `say` gets a line about each burst before it is sent."""

    def __init__(self, survey: Survey, pages: Pages, most: int, clock: Clock, say: Say) -> None:
        self._survey = survey
        self._pages = pages
        self._most = most
        self._clock = clock
        self._say = say
        self._seeds = iter(range(1, 1_000))

    async def run(self, target: ExaminedServer, ways: Sequence[PriorityField], sidecar_tier: PriorityField) -> Probed:
        """Probes an engine by its `ways`, its adapter's first, or one of our own sidecars by the way `sidecar_tier`.

        Raises CannotLook where no request is answered.
        """
        probed = await self.first_answer(target)
        if not probed.is_sidecar and not self._survey.others:
            probed.idle = await self._idle(probed)
        for way in (sidecar_tier,) if probed.is_sidecar else ways:
            probed.checks.append(await check(way, probed.target, self._clock))
        accepted = [one for one in probed.checks if one.refusal is None]
        if accepted:
            await self._find_load(probed, accepted[0].way)
            await self._compare(probed, accepted[1:])
            await self._control(probed)
        return probed

    async def first_answer(self, target: ExaminedServer) -> Probed:
        """The simplest request that the server answers: some know no `ignore_eos`, some models have no chat.

        Raises CannotLook where it answers none.
        """
        refusals: list[str] = []
        # Its usage also shows whether answers report cached tokens, where a switch decides that.
        usage = {"stream_options": {"include_usage": True}} if self._survey.engine.advice.cache_report else None
        for path in (target.path, COMPLETIONS):
            for ignores_end in (True, False):
                tried = replace(target, path=path, ignores_end=ignores_end)
                alone = await tried.ask(tried.request("alone", ALONE_TOKENS, usage), self._clock)
                if alone.error is None:
                    return Probed(tried, alone)
                if alone.status not in (400, 404, 422, 500):
                    raise CannotLook(_explain(tried, alone))
                refusals.append(_explain(tried, alone))
        raise CannotLook(refusals[0])

    async def _idle(self, probed: Probed) -> Sequence[Seen]:
        context, target = self._survey.identity.context_tokens, probed.target
        most = PROMPT_BYTES if context is None else min(PROMPT_BYTES, context - ANSWER_TOKENS - TEMPLATE_TOKENS)
        text = (COUNT + " ") * (max(0, most) // len(COUNT))
        usage = {"stream_options": {"include_usage": True}} if probed.alone.prompt_tokens is not None else None
        clock, found = Clock(IDLE_PART * self._clock.left_s), list[Seen]()
        while len(found) < IDLE_PROMPTS and clock.left_s > 0:
            name = f"idle {secrets.token_hex(4)}"
            found.append(await target.ask(target.request(name, ANSWER_TOKENS, usage, text=text), clock))
        return found

    async def _find_load(self, probed: Probed, way: PriorityField) -> None:
        """Bursts until enough requests waited, the bound is reached, or time is short."""
        known = None if probed.is_sidecar else self._survey.gauges.max_running
        size: int | None = first_size(known, self._most)
        while size is not None and self._clock.left_s > LEAST_S:
            at_once = known if known is not None else probed.mixed[-1].at_once if probed.mixed else None
            length = tokens(size, at_once, probed.alone, self._survey.identity.context_tokens)
            burst = await self._burst(probed, size, way, length, f"by {way.title}")
            probed.mixed.append(burst)
            size = None if self._is_enough(probed) else next_size(burst, self._most)

    def _is_enough(self, probed: Probed) -> bool:
        """True if the last burst says something, or a larger one would not say more."""
        match probed.effect:
            case Effect.BY_PRIORITY | Effect.INVERTED:
                return True
            case Effect.NONE:
                # With neither gauge nor limit to compare with, the control's longer answers show it.
                is_blind = probed.mixed[-1].waiting_inside is None and self._survey.gauges.max_running is None
                return is_blind or probed.queueing(self._survey) is Queueing.INSIDE
            case _:
                last = probed.mixed[-1]
                return last.is_cut or last.is_refused

    async def _compare(self, probed: Probed, others: Sequence[Check]) -> None:
        """Where the adapter's way shows nothing or the wrong direction, another one may."""
        effect, other = probed.effect, next((one for one in others if one.arrives is not False), None)
        if effect in (Effect.NONE, Effect.INVERTED) and other is not None and self._clock.left_s > LEAST_S:
            plan = probed.mixed[-1].plan
            probed.compared = await self._burst(probed, plan.requests, other.way, plan.tokens, f"by {other.way.title}")

    async def _control(self, probed: Probed) -> None:
        if probed.effect in (None, Effect.TOO_FEW) or self._clock.left_s <= LEAST_S:
            return
        plan, is_full = probed.mixed[-1].plan, probed.queueing(self._survey) is Queueing.INSIDE
        probed.control = await self._burst(
            probed, plan.requests, None, plan.tokens * (1 if is_full else LONGER), "at equal priorities, a control"
        )

    async def _burst(self, probed: Probed, requests: int, way: PriorityField | None, tokens: int, what: str) -> Burst:
        plan = BurstPlan(requests, tokens, way, next(self._seeds))
        self._say(f"sending {requests} requests at once {what}, {plan.output_tokens:,} output tokens in all")
        engine = self._survey.engine
        return await send(plan, probed.target, engine, self._pages, self._clock)


def _explain(target: ExaminedServer, alone: Seen) -> str:
    hint = "; give a key: set SIDECAR_API_KEY, or use --key-file" if alone.status in (401, 403) else ""
    hint = "; name a model it serves with --model" if alone.status == 404 else hint
    return f"POST {target.url}{target.path} with model {target.model}: {alone.error}{hint}"


_MIDDLE = 1  # no request is harmed by a value in the middle, whatever the direction


@dataclass(frozen=True, slots=True)
class Check:
    """Fate of the field on its way to the engine.

    `refusal` is the answer to a right value where that was an error, None where it was accepted. `arrives` is None
    where it is not known.
    """

    way: PriorityField
    refusal: str | None
    arrives: bool | None

    @property
    def evidence(self) -> str:
        """One clause for people."""
        if self.refusal is not None:
            return f"a request with the {self.way.title} is refused: {self.refusal}"
        if self.arrives is None:
            return (
                f"the {self.way.title} is accepted; engines ignore a bad value there, so its arrival cannot be probed"
            )
        shown = f"{self.way.title} = {self.way.invalid!r}"
        return (
            f"{shown} is refused with 400, so it arrives" if self.arrives else f"{shown} is accepted, so it is not read"
        )


async def check(way: PriorityField, target: ExaminedServer, clock: Clock) -> Check:
    """Sends one or two requests of one token each."""
    fine = await _send(way, way.values[_MIDDLE], target, clock)
    if fine.error is not None:
        return Check(way, fine.error, None)
    if way.invalid is None:
        return Check(way, None, None)
    wrong = await _send(way, way.invalid, target, clock)
    if wrong.error is None:
        return Check(way, None, arrives=False)
    return Check(way, None, arrives=True if wrong.status in (400, 422) else None)


async def _send(way: PriorityField, value: object, target: ExaminedServer, clock: Clock) -> Seen:
    return await target.ask(target.request("field", 1, way.members(value), way.headers(value)), clock)


WAITING = 36
"""Requests that should wait: twelve of each level, half more than `judgment.FEWEST`."""
FIRST = 40
"""Used where no page says how many run at once. It is enough for an engine that runs four."""
GROWTH = 4
MOST_REQUESTS = 400
"""In one burst, unless the user allows more: some ten thousand tokens."""
GOAL_S = 2.0
"""For one burst, about: long enough to watch gauges, short enough for a server with work to do."""
FEWEST_TOKENS, MOST_TOKENS = 3, 64
LONGEST_ANSWER = 6
"""Measured in the shortest: a burst's longest has twice its tokens, and a control may be three times as long again."""
_SLOWER_TOGETHER = 2.0  # a token of many sequences at once, against a token of one alone: a guess that only sizes
_MEAN_LENGTH = 1.5  # answers have one to two times the plan's tokens
_PROMPT_TOKENS = 64  # more than the prompt has, with a chat template around it


def first_size(max_running: int | None, most: int) -> int:
    """The size of the first burst. `max_running` is None where the engine does not say it."""
    return min(most, FIRST if max_running is None else max_running + WAITING)


def next_size(burst: Burst, most: int) -> int | None:
    """A larger size after a burst in which too few waited; None where the bound is reached."""
    size, waited = burst.plan.requests, burst.judgment.waited
    if size >= most:
        return None
    wanted = burst.at_once + WAITING if waited else size * GROWTH
    return min(most, max(wanted, size * 3 // 2))


def tokens(requests: int, at_once: int | None, alone: Seen, context_tokens: int | None) -> int:
    """The shortest answer's length, so that the burst takes about its goal. `alone` is a request that had no company.

    `at_once` is None while it is not known how many run at once.
    """
    waves = max(1.0, requests / (at_once or requests / GROWTH))
    per_token_s = (alone.tpot_s or 0.02) * _SLOWER_TOGETHER * _MEAN_LENGTH
    wanted = int(GOAL_S / waves / max(per_token_s, 1e-4))
    room = MOST_TOKENS if context_tokens is None else (context_tokens - _PROMPT_TOKENS) // LONGEST_ANSWER
    return max(1, min(max(wanted, FEWEST_TOKENS), MOST_TOKENS, room))
