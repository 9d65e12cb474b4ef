"""Histogram of the output lengths of one kind of request: decayed, censored, with conditional quantiles.

Bins are 16 tokens wide up to 4,096 tokens. From there their width doubles with every doubling of the length, so that a
bin is never wider than 1/128 of the lengths in it, and a histogram takes 14 KB at most.

A sample is censored where the answer was cut short, by max_tokens or by a disconnect: its length is a lower bound.
The distribution is the product-limit estimate of Kaplan and Meier (Nonparametric Estimation from Incomplete
Observations, 1958), with weights: a sample counts half after 2,000 more.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from math import ceil

BIN_TOKENS = 16
FINE_BINS = 256
"""Bins of 16 tokens; those after them come in octaves of half as many."""
FINE_TOKENS = BIN_TOKENS * FINE_BINS
LONGEST = 131_072
"""Tokens. A longer answer is known only to be longer: it counts as censored here."""
HALF_LIFE = 2000
"""Samples after which a sample counts half."""
_LARGEST_STEP = 2.0**20
"""The weight of the newest sample at which all weights are scaled back to 1; the older ones, worth a millionth, go."""
_STALE_SHARE = 8
"""The table is rebuilt when an eighth of the samples is newer than it, so that learning and asking cost the same on
average however they alternate."""
_STALE_MOST = 64
_TOLERANCE = 1 + 1e-9
"""Rounding of the survival probabilities must not push a quantile on to the next edge."""


def bin_for(length: int) -> int:
    """The bin of a length: 0 up to 16 tokens, 1 up to 32, and so on. The last one also has all that is longer."""
    if length <= FINE_TOKENS:
        return (length - 1) // BIN_TOKENS if length > 0 else 0
    last = min(length, LONGEST) - 1
    octave = last.bit_length() - 12
    return FINE_BINS // 2 * octave + (last >> (4 + octave))


def _edge(index: int) -> int:
    if index < FINE_BINS:
        return BIN_TOKENS * (index + 1)
    octave, rest = divmod(index - FINE_BINS, FINE_BINS // 2)
    return (FINE_BINS // 2 + 1 + rest) << (5 + octave)


EDGES = tuple(_edge(index) for index in range(bin_for(LONGEST) + 1))
"""The upper edge of each bin, in tokens."""
_FINE = tuple(bin_for(length) for length in range(FINE_TOKENS + 1))
"""The bins of the lengths that most answers have."""


class Survival:
    """The share of answers that are longer than each length: the product-limit estimate of weights by bin.

    `edges` are the lengths where it falls, `beyond` the shares that are longer than each of them.
    """

    __slots__ = ("_negated", "edges")

    def __init__(self, complete: Sequence[float], censored: Sequence[float]) -> None:
        at_risk, falls = 0.0, []
        for index in range(len(complete) - 1, -1, -1):
            ended = complete[index]
            after = at_risk + censored[index]
            at_risk = after + ended
            if ended > 0.0:
                falls.append((EDGES[index], after / at_risk))
        falls.reverse()
        self.edges = [edge for edge, _ in falls]
        self._negated: list[float] = []
        share = 1.0
        for _, kept in falls:
            share *= kept
            self._negated.append(-share)

    @property
    def beyond(self) -> list[float]:
        """The share of answers that are longer than the edge of the same index."""
        return [-share for share in self._negated]

    def quantile(self, q: float, beyond: int = 0) -> int | None:
        """The smallest edge that at least the share `q` of the answers longer than `beyond` do not exceed.

        None where the samples do not say: none is longer, or too many of those are censored. O(log bins).
        """
        edges, negated = self.edges, self._negated
        before = bisect_right(edges, beyond)
        left = 1.0 - q if before == 0 else (q - 1.0) * negated[before - 1]
        found = bisect_left(negated, -left * _TOLERANCE, before)
        return edges[found] if found < len(edges) else None

    def length(self, q: float, beyond: int = 0) -> int | None:
        """Quantile inside its bin, as if the answers were spread evenly there: its upper edge holds 8 tokens too much.

        More than `beyond`, and never above `quantile`. None where that is None.
        """
        edges, negated = self.edges, self._negated
        before = bisect_right(edges, beyond)
        left = 1.0 - q if before == 0 else (q - 1.0) * negated[before - 1]
        found = bisect_left(negated, -left * _TOLERANCE, before)
        if found >= len(edges):
            return None
        upper = edges[found]
        index = bin_for(upper)
        lower = max(beyond, EDGES[index - 1] if index else 0)
        longer = 1.0 if found == 0 else -negated[found - 1]
        falls = longer + negated[found]
        part = (longer - left) / falls if falls > 0.0 else 1.0
        return max(beyond + 1, lower + ceil((upper - lower) * min(1.0, max(0.0, part))))


class LengthHistogram:
    """The lengths of one kind of request. Not thread-safe; the same calls give the same answers.

    `samples` counts the complete samples, `censored` the others; neither decays. The table is too old when they are
    `stale_from` together.
    """

    __slots__ = (
        "_censored", "_complete", "_growth", "_step", "_survival", "censored", "samples", "stale_from",
    )  # fmt: skip

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self.clear()

    def clear(self) -> None:
        """Forgets every sample."""
        self.samples = self.censored = self.stale_from = 0
        self._complete = array("d")
        self._censored = array("d")
        self._step = 1.0
        self._survival: Survival | None = None

    def add(self, length: int, is_censored: bool) -> None:
        """Adds the output length of one sequence, in tokens, at least 0; `is_censored` where it was cut short."""
        if length <= FINE_TOKENS:
            index = _FINE[length]
        else:
            index, is_censored = bin_for(length), is_censored or length > LONGEST
        step = self._step * self._growth
        try:
            if is_censored:
                self._censored[index] += step
                self.censored += 1
            else:
                self._complete[index] += step
                self.samples += 1
        except IndexError:
            self._widen(index + 1)
            self.add(length, is_censored)
            return
        self._step = step
        if step > _LARGEST_STEP:
            self._scale()

    def _widen(self, bins: int) -> None:
        more = bytes(8 * (bins - len(self._complete)))
        self._complete.frombytes(more)
        self._censored.frombytes(more)

    def _scale(self) -> None:
        step, self._step = self._step, 1.0
        for weights in (self._complete, self._censored):
            for index, weight in enumerate(weights):
                if weight:
                    weights[index] = weight / step if weight > 1.0 else 0.0

    def survival(self) -> Survival:
        """The distribution, at most an eighth of the samples (64 of them) old."""
        survival = self._survival
        if survival is None or self.samples + self.censored >= self.stale_from:
            survival = self._survival = self._tabulate()
        return survival

    def _tabulate(self) -> Survival:
        known = self.samples + self.censored
        # So many new samples are an eighth of all when they are a seventh of those that the table has.
        self.stale_from = known + max(1, min(_STALE_MOST, -(-known // (_STALE_SHARE - 1))))
        return Survival(self._complete, self._censored)

    def length(self, q: float, beyond: int = 0) -> int | None:
        """See `Survival.length`."""
        return self.survival().length(q, beyond)

    def quantile(self, q: float, beyond: int = 0) -> int | None:
        """See `Survival.quantile`."""
        return self.survival().quantile(q, beyond)


# -- Median over tenants of their quantiles: every tenant has one vote, however many requests it sends.

FEWEST_TENANTS = 3
"""With fewer, one tenant's traffic would size the leases of another."""
MOST_VOTERS = 63
"""The first so many tenants vote: more would not make the median better, but slower."""
_FRESH = 64
"""Samples after which the medians are computed anew."""
_MOST_KEPT = 1024
_UNKNOWN = LONGEST + 1


class Median:
    """The upper median of the tenants' quantiles. A tenant whose samples do not say counts as one that says much.

    Fewer than half of the voters cannot move it out of the range of the others' quantiles, whatever they send.
    """

    def __init__(self) -> None:
        self._members: dict[str, LengthHistogram] = {}
        self._kept: dict[tuple[float, int], tuple[int | None, int]] = {}
        self._news = 0

    def __len__(self) -> int:
        return len(self._members)

    def put(self, tenant: str, evidence: LengthHistogram) -> None:
        """Gives a tenant its vote, or replaces what it votes by."""
        if self._members.get(tenant) is not evidence:
            self._members[tenant] = evidence
            self._kept.clear()

    def remove(self, tenant: str) -> None:
        """Takes a tenant's vote, if it has one."""
        if self._members.pop(tenant, None) is not None:
            self._kept.clear()

    def learned(self, samples: int = 1) -> None:
        """Notes that voters learned so many samples."""
        self._news = news = self._news + samples
        if news >= _FRESH:
            self._news = 0
            self._kept.clear()

    @property
    def is_full(self) -> bool:
        """Enough tenants vote."""
        return len(self._members) >= FEWEST_TENANTS

    def quantile(self, q: float, beyond: int = 0) -> tuple[int | None, int]:
        """The median of the voters' quantiles, None where they have none, and the number of samples.

        At most 64 samples old. `beyond` may be rounded down to its bin, because all edges are multiples of one.
        """
        asked = (q, beyond // BIN_TOKENS)
        found = self._kept.get(asked)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[asked] = self._vote(q, beyond)
        return found

    def _vote(self, q: float, beyond: int) -> tuple[int | None, int]:
        voters = list(islice(self._members.values(), MOST_VOTERS))
        votes = sorted(voter.quantile(q, beyond) or _UNKNOWN for voter in voters)
        median = votes[len(votes) // 2]
        return None if median == _UNKNOWN else median, sum(voter.samples for voter in voters)


# -- How the tokens of answers come: the bytes of text that one has, and how many an event of a stream has.
#
# Both are learned from answers with usage, and estimate the tokens of answers without: streams whose usage no one
# asked for, and those that broke off before it came. Each tenant and model has its own: no tenant's answers change
# what another one is charged.

BYTES_PER_TOKEN = 4.0
"""Of text of which nothing is known: English has 4 to 5."""
LEARNING_RATE = 0.1
"""Weight of the newest answer, as for prompts (`sidecar.lengths.token_estimates`)."""
MOST_TOKENS_PER_EVENT = 64.0
_JOINED = 1.05
"""Events count as one token each unless their text has more tokens than this: the bytes of texts vary by as much."""
_SURELY_JOINED = 2.0
"""The same where nothing was learned."""
MOST_KEPT = 8192
"""Tenants and models. The one that was used least recently is forgotten."""
LONGEST_MODEL_NAME = 256
"""Characters. Model names come from clients, and memory must stay small."""


class OutputRatio:
    """The ratios of one tenant and model, None while nothing is known."""

    __slots__ = ("bytes_per_token", "tokens_per_event")

    def __init__(self) -> None:
        self.bytes_per_token: float | None = None
        self.tokens_per_event: float | None = None

    def tokens(self, events: int, text_bytes: int | None) -> int:
        """The tokens of so many events, whose text has so many bytes; None where it was not measured."""
        if text_bytes is None:
            return round(events * (self.tokens_per_event or 1))
        by_text = text_bytes / (self.bytes_per_token or BYTES_PER_TOKEN)
        is_joined = by_text > events * (_JOINED if self.bytes_per_token else _SURELY_JOINED)
        return round(by_text) if is_joined else events

    def learn(self, tokens: int, events: int, text_bytes: int | None) -> None:
        """Learns from an answer of so many tokens; one that did not stream has no events."""
        if text_bytes:
            self.bytes_per_token = _nearer(self.bytes_per_token, text_bytes / tokens)
        if events > 0:
            joined = min(MOST_TOKENS_PER_EVENT, max(1.0, tokens / events))
            self.tokens_per_event = _nearer(self.tokens_per_event, joined)


def _nearer(value: float | None, seen: float) -> float:
    return seen if value is None else value + LEARNING_RATE * (seen - value)


class OutputRatios:
    """The ratios of every tenant and model that was used lately."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str | None], OutputRatio] = OrderedDict()

    def of(self, tenant: str, model: str | None) -> OutputRatio:
        """The ratios of a tenant's answers by a model, to use and to teach."""
        key = tenant, model
        found = self._kept.get(key)
        if found is None:
            found = OutputRatio()
            if model is not None and len(model) > LONGEST_MODEL_NAME:
                return found
            if len(self._kept) >= MOST_KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = found
        else:
            self._kept.move_to_end(key)
        return found
