"""Service times: how long a request would take in an engine that runs no more than the pool admits.

In `mode: observe` the engine runs everything at once. It queues, and it slows down. So a request's own time to the
first byte, and its own time for each token, are longer than they would be. This module learns the right ones from what
passes, for each model:

- **First byte.** `first_byte = base + per_prompt_token * prompt`, in microseconds. The line is fitted to requests that
  came while no more was under way than the pool has room for. What is under way is known exactly here: everything that
  was sent and has not ended. The fit is Theil's and Sen's, the median of the slopes between all pairs of points
  (P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968), each weighted by its
  length (G. L. Sievers, "Weighted rank statistics for simple linear regression", JASA 73, 1978): an engine works in
  steps, and a short pair shows little but these. A point is the median of the newest `KEPT` samples of a size class of
  prompts, so one size cannot push the others out. A prompt that no other delayed is a better sample: where there are
  such of sizes far apart, no others are used.
- **Time per token**, by the number of sequences that generate at once: medians by size class of that number, and
  straight lines between them. A stream's own time is corrected by the ratio of two of these figures, the one for the
  number that the pool would run to the one for the number that the engine ran.
- **Output lengths.** Where a shadow ends before its request has, the request's length is not known yet. It is then
  drawn from the newest lengths of the same tier, as shares of the requested maximum.

A response that is not streamed shows one time only: `first byte + per_token * output`, fitted to the same kind of
requests by turns, each part to what the other leaves (backfitting).

No I/O and no clock: every time is an argument, in microseconds of one monotonic clock. Memory is bounded: `KEPT`
samples of at most 32 size classes, for `MOST_MODELS` models. Old samples are replaced by new ones of their class, and
never by time alone: what was learned in a quiet hour is still there in a busy one.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

KEPT = 16
"""Samples of a size class. A median of 16 stands 7 wrong ones."""
ENOUGH = 8
"""Samples from which on a figure counts as learned."""
FAR_APART = 2
"""Size classes between two points that show a slope: a factor of two to eight."""
MOST_MODELS = 16
"""Models with figures of their own; clients name them, so further ones share one."""
REFIT_AFTER = 8
"""New samples after which a line is fitted again: a fit costs some 100 microseconds."""
UNLOADED_TIMES = 1.5
"""A first byte that comes later than so many times the slowest tenth of the unloaded ones was delayed by the load.

Where more was under way than the pool has room for, it need not be so many times as late.
"""
UNLOADED_MORE_US = 20_000
"""And by at least so much: the event loop of a busy process is as late."""
HARDLY_LONGER = 2.0
"""A prompt up to so many times as long has its first byte within so many times the same time."""
SAME = 0.1
"""Two times per token that differ by less are the same: medians of few samples differ by as much."""


class Line(NamedTuple):
    """A fitted line, in microseconds. `late` is how many times as long as the line the slowest tenth took."""

    base_us: float
    per_token_us: float
    late: float

    def at(self, tokens: float) -> float:
        """The typical time for so many tokens."""
        return self.base_us + self.per_token_us * tokens


class SizeClasses:
    """The newest samples (size, value) of each size class: sizes of one class differ by less than a factor of two."""

    __slots__ = ("_classes", "_sure")

    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[float, float]]] = {}
        self._sure: set[int] = set()

    def add(self, size: float, value: float, *, is_sure: bool = True) -> None:
        """Adds one; it replaces the oldest of a class that is full.

        The first sure sample of a class replaces those that are not, and these are not taken any more.
        """
        number = min(31, max(0, int(size)).bit_length())
        samples = self._classes.get(number)
        if samples is None:
            samples = self._classes[number] = deque(maxlen=KEPT)
        if is_sure and number not in self._sure:
            self._sure.add(number)
            samples.clear()
        if is_sure or number not in self._sure:
            samples.append((size, value))

    def samples(self) -> list[tuple[float, float]]:
        """Those that are used."""
        return [sample for _, samples in self._used() for sample in samples]

    def points(self) -> list[tuple[float, float]]:
        """The medians of each class, the smallest size first."""
        return [
            (statistics.median(size for size, _ in samples), statistics.median(value for _, value in samples))
            for _, samples in self._used()
        ]

    def _used(self) -> list[tuple[int, deque[tuple[float, float]]]]:
        """The classes that are used, the smallest first: the sure ones alone where they are far enough apart."""
        sure = self._sure
        is_enough = bool(sure) and max(sure) - min(sure) >= FAR_APART
        return sorted(pair for pair in self._classes.items() if not is_enough or pair[0] in sure)


def fitted(samples: SizeClasses) -> Line | None:
    """The line through the samples, None for fewer than `ENOUGH`. Neither figure is negative."""
    everything = samples.samples()
    if len(everything) < ENOUGH:
        return None
    slope = _slope(samples.points())
    base_us = max(0.0, statistics.median(value - slope * size for size, value in everything))
    ratios = sorted(value / max(1.0, base_us + slope * size) for size, value in everything)
    return Line(base_us, slope, max(1.0, ratios[int(0.9 * (len(ratios) - 1))]))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil's and Sen's, weighted by length; 0 where it is negative or there is one point only."""
    pairs = [(one, other) for one, other in combinations(points, 2) if other[0] > one[0]]
    slopes = sorted(((other[1] - one[1]) / (other[0] - one[0]), other[0] - one[0]) for one, other in pairs)
    left = sum(length for _, length in slopes) / 2
    for slope, length in slopes:
        left -= length
        if left <= 0:
            return max(0.0, slope)
    return 0.0


class TokenTimes:
    """The time per token of streams, by the number of sequences that generate at once."""

    __slots__ = ("_learned", "_points", "_samples", "_stale")

    def __init__(self) -> None:
        self._samples = SizeClasses()
        self._points: list[tuple[float, float]] = []
        self._learned = self._stale = 0

    def learn(self, generating: float, per_token_us: float) -> None:
        """One stream: how many generated meanwhile, on average, and its time per token."""
        self._samples.add(generating, per_token_us)
        self._learned += 1
        self._stale -= 1
        if self._stale <= 0 or self._learned < ENOUGH:  # before the first few, each says more than all before it
            self._points, self._stale = self._samples.points(), REFIT_AFTER

    def at(self, generating: float) -> float | None:
        """The time per token among so many, in microseconds; at the nearest number seen where it is beyond them."""
        points = self._points
        if not points:
            return None
        if generating <= points[0][0]:
            return points[0][1]
        for (low, low_us), (high, high_us) in pairwise(points):
            if generating <= high:
                return low_us + (high_us - low_us) * (generating - low) / max(1e-9, high - low)
        return points[-1][1]

    def knows(self, generating: float) -> bool:
        """Whether about so few were ever seen to generate."""
        return bool(self._points) and self._points[0][0] <= 2 * generating

    def stretch(self, would: float, did: float) -> float:
        """The factor that corrects a time among `did` sequences to one among `would`."""
        here, there = self.at(did), self.at(would)
        if not here or not there:
            return 1.0
        ratio = there / here
        return 1.0 if abs(ratio - 1) < SAME else ratio


class WholeTimes:
    """Responses that are not streamed: `base + per_prompt_token * prompt + per_token * output`, by backfitting."""

    __slots__ = ("_lines", "_samples", "_seen", "_stale")
    _ROUNDS = 4

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=8 * KEPT)
        self._lines: tuple[Line, Line] | None = None
        self._stale = ENOUGH

    def learn(self, prompt_tokens: float, output_tokens: float, whole_us: float) -> None:
        """One response."""
        self._samples.append((prompt_tokens, output_tokens, whole_us))
        self._stale -= 1
        if self._stale <= 0:
            self._fit()
            self._stale = REFIT_AFTER

    def at(self, prompt_tokens: float, output_tokens: float) -> float | None:
        """The typical time, None where it is not known."""
        if self._lines is None:
            return None
        of_prompt, of_output = self._lines
        return of_prompt.per_token_us * prompt_tokens + of_output.at(output_tokens)

    @property
    def late(self) -> float:
        """How many times as long as typical the slowest tenth took."""
        return 1.0 if self._lines is None else self._lines[1].late

    def _fit(self) -> None:
        of_prompt = of_output = Line(0.0, 0.0, 1.0)
        for _ in range(self._ROUNDS):
            by_output, by_prompt = SizeClasses(), SizeClasses()
            for prompt, output, whole_us in self._samples:
                by_output.add(output, whole_us - of_prompt.per_token_us * prompt)
            of_output = fitted(by_output) or of_output
            for prompt, output, whole_us in self._samples:
                by_prompt.add(prompt, whole_us - of_output.per_token_us * output)
            of_prompt = fitted(by_prompt) or of_prompt
        self._lines = of_prompt, of_output


class OutputLengths:
    """The newest output lengths: as shares of the maximum where the client set one, else in tokens."""

    __slots__ = ("_lengths", "_luck", "_shares")

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=8 * KEPT)
        self._lengths: deque[int] = deque(maxlen=8 * KEPT)
        self._luck = random.Random(14)  # the same draws in every process

    def learn(self, output_tokens: int, most: int | None) -> None:
        """One response's length; `most` is the client's maximum."""
        if most:
            self._shares.append(min(1.0, output_tokens / most))
        else:
            self._lengths.append(output_tokens)

    def draw(self, most: int | None) -> float | None:
        """A length such as those that were seen, None where none was."""
        if most and self._shares:
            return most * self._luck.choice(self._shares)
        if most or not self._lengths:
            return None
        return float(self._luck.choice(self._lengths))


class _FirstByte(NamedTuple):
    delay_us: float
    prompt_tokens: float
    is_crowded: bool


class ModelTimes:
    """What is learned of one model."""

    __slots__ = ("_fastest", "_line", "_stale", "first_bytes", "lengths", "tokens", "wholes")

    def __init__(self) -> None:
        self._fastest: _FirstByte | None = None
        self.first_bytes = SizeClasses()
        self.tokens = TokenTimes()
        self.wholes = WholeTimes()
        self.lengths: dict[int, OutputLengths] = {}
        self._line: Line | None = None
        self._stale = ENOUGH

    def saw_first_byte(self, prompt_tokens: float, delay_us: float, *, is_crowded: bool) -> None:
        """Any first byte of a stream: unloaded, none is later than the fastest of the same prompt."""
        if self._fastest is None or delay_us < self._fastest.delay_us:
            self._fastest = _FirstByte(delay_us, prompt_tokens, is_crowded)

    def fastest_us(self, prompt_tokens: float) -> float:
        """The first byte of a prompt as the fastest one that was seen has it, 0 before any; longer for a longer one."""
        fastest = self._fastest
        if fastest is None:
            return 0.0
        return fastest.delay_us * max(1.0, prompt_tokens / max(1.0, fastest.prompt_tokens))

    def knows_first_byte(self, prompt_tokens: float) -> bool:
        """Whether it was learned how long a prompt takes unloaded, or seen of one that is hardly shorter."""
        fastest = self._fastest
        if self._line is not None or fastest is None or fastest.is_crowded:
            return self._line is not None
        return prompt_tokens <= HARDLY_LONGER * fastest.prompt_tokens

    def learn_first_byte(self, prompt_tokens: float, delay_us: float, *, is_alone: bool) -> None:
        """A first byte that no other request delayed but those whose prompts are counted in; alone, there are none."""
        self.first_bytes.add(prompt_tokens, delay_us, is_sure=is_alone)
        self._stale -= 1
        if self._stale <= 0:
            self._line, self._stale = fitted(self.first_bytes), REFIT_AFTER

    @property
    def first_byte(self) -> Line | None:
        """The line of first bytes, None where too few were seen."""
        return self._line

    def lengths_of(self, level: int) -> OutputLengths:
        """The output lengths of a tier."""
        lengths = self.lengths.get(level)
        if lengths is None:
            lengths = self.lengths[level] = OutputLengths()
        return lengths

    def drawn_length(self, level: int, most: int | None) -> float | None:
        """A length of the tier, or else of any."""
        of_tier = self.lengths_of(level).draw(most)
        if of_tier is not None:
            return of_tier
        return next((one for lengths in self.lengths.values() if (one := lengths.draw(most)) is not None), None)
