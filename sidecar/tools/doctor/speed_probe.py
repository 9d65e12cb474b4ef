"""Speed probe: a bounded number of streamed requests from which an engine's step model can be fitted.

    calibration -> prompts of several lengths, one at a time -> batches of short requests that run at once

A prompt alone shows what its tokens cost. A batch shows what a step costs with so many sequences. Every prompt begins
with a word of its own run, so that no prefix cache has it. No request has a priority.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from sidecar.tools.doctor.burst import TIER_HEADER
from sidecar.tools.doctor.examination import Options
from sidecar.tools.doctor.probe import Probe, Say
from sidecar.tools.doctor.survey import CannotLook, Survey, survey
from sidecar.tools.doctor.target import Clock, ExaminedServer
from sidecar.tools.loadgen import Planned, Seen
from sidecar.tools.loadgen.pages import HttpPages

PROMPTS = (64, 490, 550, 1_000, 1_080, 2_010, 2_120, 3_900)
"""Tokens of the prompts that are sent alone. Neighbors lie on both sides of 512, 1,024 and 2,048: usual chunk sizes."""
PROMPT_ROUNDS, BATCH_ROUNDS = 3, 2
BATCHES = (1, 4, 16, 64)
"""Requests that are sent at once: few enough for the KV cache, and enough to see what a sequence costs."""
ANSWER_TOKENS, BATCH_PROMPT_TOKENS = 32, 32
"""Of each request of a batch: 31 steps, against one or two for the prompts of a batch."""
LONE_ANSWER_TOKENS = 2
CALIBRATION_BYTES = 2_400
"""Of the longer of two prompts; the other has a sixth. In a short context a token of one byte fits, too."""
PROMPTS_PART = 0.5
"""Of the time that is allowed, for the prompts sent alone."""
FEWEST_LENGTHS, FEWEST_SIZES = 3, 2
"""A slope needs two points. With three lengths one that went wrong can be seen."""
FEWEST_TOKENS = 8
"""Of an answer that counts for the time per token."""
AT_ONCE_S = 20e-6
"""Tokens that follow each other faster came together: no engine makes 50,000 tokens a second for one answer."""
_USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
_WORDS = "one two three four five six seven eight nine ten "
_TEMPLATE_TOKENS = 64


@dataclass(slots=True)
class SpeedProbe:
    """Answers of the probe. `lone` are the prompts that were alone, `batches` the requests that were sent at once.

    Only complete answers with the engine's own token counts are kept. `failed` are the errors of the others.
    """

    survey: Survey
    target: ExaminedServer
    lone: list[Seen] = field(default_factory=list)
    batches: list[list[Seen]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def lengths(self) -> Sequence[int]:
        """The different lengths of the prompts sent alone, in tokens, as the plan had them."""
        return sorted({int(one.planned.label) for one in self.lone})

    @property
    def sizes(self) -> Sequence[int]:
        """The different sizes of the batches of which an answer counts for the time per token."""
        sent = {int(one.planned.label) for batch in self.batches for one in batch if one.output_tokens >= FEWEST_TOKENS}
        return sorted(sent)

    @property
    def requests(self) -> int:
        """Requests that count."""
        return len(self.lone) + sum(map(len, self.batches))


def largest_batch(options: Options) -> int:
    """The requests that are sent at once at most."""
    return min(BATCHES[-1], options.most)


def announcement(options: Options, found: Survey) -> str:
    """How much is about to be sent, in one line."""
    lengths, sizes = _lengths(found), _sizes(options)
    batched = sum(sizes) * BATCH_ROUNDS
    requests = 3 + len(lengths) * PROMPT_ROUNDS + batched
    prompts = sum(lengths) * PROMPT_ROUNDS + batched * BATCH_PROMPT_TOKENS + sum(_calibration_bytes(found)) // 4
    outputs = len(lengths) * PROMPT_ROUNDS * LONE_ANSWER_TOKENS + batched * ANSWER_TOKENS
    return (
        f"{found.name} at {options.url}: will send at most {requests} streamed requests, at most {max(sizes)} at once, "
        f"with about {prompts:,} tokens of prompts and {outputs:,} of answers, within {options.allowed_s:g} s"
        f"{found.beside}"
    )


async def measure(options: Options, say: Say) -> SpeedProbe:
    """Measures an engine. `say` gets a line about what is about to be sent. Raises CannotLook where it shows no speed.

    A probe that ran out of time has fewer lengths or sizes. Raises CannotLook where they are too few to fit anything.
    """
    async with aiohttp.ClientSession() as session:
        pages = HttpPages(session, options.url, options.headers)
        found = await survey(pages, options.engine)
        model = found.served_model(options.url, options.model)
        say(announcement(options, found))
        clock = Clock(options.allowed_s)
        target = ExaminedServer(options.url, model, options.headers)
        probed = await Probe(found, pages, options.most, clock, say).first_answer(target)
        if TIER_HEADER in probed.alone.headers:
            raise CannotLook(
                f"{options.url} is an admission sidecar, which keeps requests waiting: give the address of its engine"
            )
        run = _Run(SpeedProbe(found, probed.target), clock, options)
        await run.calibrate()
        await run.prompts()
        await run.batches()
    _check(run.probe, options)
    return run.probe


def _lengths(found: Survey) -> Sequence[int]:
    """Lengths of `PROMPTS` that the model takes, with room for the chat template."""
    context = found.identity.context_tokens
    most = PROMPTS[-1] if context is None else context - _TEMPLATE_TOKENS - LONE_ANSWER_TOKENS
    lengths = [length for length in PROMPTS if length <= most]
    if len(lengths) >= FEWEST_LENGTHS:
        return lengths
    return sorted({max(1, most * part // 4) for part in (1, 2, 3, 4)})


def _calibration_bytes(found: Survey) -> tuple[int, int]:
    context = found.identity.context_tokens
    longer = CALIBRATION_BYTES if context is None else min(CALIBRATION_BYTES, context - 2 * _TEMPLATE_TOKENS)
    return max(1, longer // 6), max(1, longer)


def _sizes(options: Options) -> Sequence[int]:
    return sorted({min(size, largest_batch(options)) for size in BATCHES})


class _Run:
    """One probe under way."""

    def __init__(self, probe: SpeedProbe, clock: Clock, options: Options) -> None:
        self.probe = probe
        self._clock = clock
        self._options = options
        self._run = secrets.token_hex(4)
        self._count = 0
        self._bytes_per_token = 4.0
        self._template_tokens = 0.0

    async def calibrate(self) -> None:
        """Two prompts alone, for the bytes of a token. Raises CannotLook where the engine cannot be measured."""
        sizes = _calibration_bytes(self.probe.survey)
        seen = [await self._ask(self._plan(size, 0, ANSWER_TOKENS)) for size in sizes]
        for one in seen:
            if (why := _no_measure(one)) is not None:
                raise CannotLook(f"{self._options.url}: {why}")
        short, long = (one.prompt_tokens or 0 for one in seen)
        if long > short:
            self._bytes_per_token = (sizes[1] - sizes[0]) / (long - short)
            self._template_tokens = short - sizes[0] / self._bytes_per_token

    async def prompts(self) -> None:
        """Prompts one at a time, every length once in a round, as far as the time suffices."""
        ends_s = self._clock.left_s * (1 - PROMPTS_PART)
        second_per_token = 0.0
        for _ in range(PROMPT_ROUNDS):
            for length in _lengths(self.probe.survey):
                if self._clock.left_s - second_per_token * length <= ends_s:
                    break  # a longer one takes longer still
                seen = await self._ask(self._plan(self._bytes(length), length, LONE_ANSWER_TOKENS))
                if self._keep(self.probe.lone, seen) and seen.ttft_s is not None:
                    second_per_token = seen.ttft_s / length

    async def batches(self) -> None:
        """Batches of several sizes, the smallest first, as far as the time suffices."""
        took_s = 0.0
        for _ in range(BATCH_ROUNDS):
            for size in _sizes(self._options):
                left_s = self._clock.left_s
                if left_s <= took_s:
                    return
                size_bytes = self._bytes(BATCH_PROMPT_TOKENS)
                seen = await self._send([self._plan(size_bytes, size, ANSWER_TOKENS) for _ in range(size)])
                took_s = left_s - self._clock.left_s
                batch: list[Seen] = []
                for one in seen:
                    self._keep(batch, one)
                if len(batch) == size:  # else it is not known what ran beside those that were answered
                    self.probe.batches.append(batch)

    def _bytes(self, tokens: int) -> int:
        """Of a prompt that has so many tokens with the chat template around it."""
        return max(1, round((tokens - self._template_tokens) * self._bytes_per_token))

    def _plan(self, size_bytes: int, label: int, tokens: int) -> Planned:
        self._count += 1
        name = f"{self._run}.{self._count}"
        text = (_WORDS * (size_bytes // len(_WORDS) + 1))[: max(1, size_bytes - len(name) - 2)]
        planned = self.probe.target.request(name, tokens, _USAGE, text=text)
        return replace(planned, label=str(label))

    async def _ask(self, planned: Planned) -> Seen:
        return (await self._send([planned]))[0]

    async def _send(self, planned: Sequence[Planned]) -> Sequence[Seen]:
        return await self.probe.target.send(planned, max(1.0, self._clock.left_s))

    def _keep(self, kept: list[Seen], seen: Seen) -> bool:
        if (why := _no_measure(seen)) is not None:
            self.probe.failed.append(why)
            return False
        kept.append(seen)
        return True


def _no_measure(seen: Seen) -> str | None:
    """Why an answer measures nothing; None for one that does."""
    if seen.error is not None:
        return f"a request was not answered: {seen.error}"
    if seen.first_token_s is None:
        return "the answer does not stream, so the times of its tokens cannot be seen: a server before the engine may"
    if seen.prompt_tokens is None:
        return (
            "the stream has no usage, so its tokens cannot be counted; the engine must know "
            "`stream_options: {include_usage: true}`"
        )
    if seen.output_tokens >= FEWEST_TOKENS and (seen.tpot_s or 0.0) < AT_ONCE_S:
        return (
            f"the {seen.output_tokens} tokens of an answer came all at once: a server before the engine collects the "
            "stream; give the engine's own address"
        )
    return None


def _check(probe: SpeedProbe, options: Options) -> None:
    """Raises CannotLook for a probe from which nothing can be fitted."""
    why = f"; {probe.failed[-1]}" if probe.failed else "; allow more time with --timeout"
    if len(probe.lengths) < FEWEST_LENGTHS:
        raise CannotLook(
            f"too few measurements of {options.url}: prompts of {len(probe.lengths)} lengths were answered in time, "
            f"{FEWEST_LENGTHS} are needed{why}"
        )
    if len(probe.sizes) < min(FEWEST_SIZES, len(_sizes(options))):
        raise CannotLook(
            f"too few measurements of {options.url}: batches of {len(probe.sizes)} sizes were answered whole and with "
            f"{FEWEST_TOKENS} tokens or more, {FEWEST_SIZES} are needed{why}"
        )
