"""Tiers of the policy: the keys of a tier, as its file has them and as the process uses them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

from pydantic import ValidationInfo, field_validator

from sidecar.policy import fields as of
from sidecar.policy.declared import OrDefault, ReadAs, declared, given, key, values
from sidecar.policy.hours import ByHours, HoursText, not_too_many


@dataclass(frozen=True, slots=True)
@declared
class Aging:
    """How a waiting request rises, so that old work is not overtaken forever."""

    promote_after_us: of.PositiveMicroseconds = key(
        ..., "A waiting request rises one tier each time this long has passed.", "5m"
    )
    ceiling: of.Level = key(..., "No request rises past this tier.", "normal")


@dataclass(frozen=True, slots=True)
@declared
class ServiceObjectives:
    """The promises of a tier. Telemetry and alerts compare with them; only `hold` has a part in admission."""

    ttft_s: of.PositiveSeconds | None = key(None, "Time to the first token, in 99 of 100.", "500ms")
    tpot_s: of.PositiveSeconds | None = key(
        None,
        "Time per output token after the first. With it and `ttft` the tier's service gain is measured.",
        "60ms",
    )
    queue_wait_s: of.PositiveSeconds | None = key(None, "The wait for admission, in 99 of 100.", "2s")
    starvation_s: of.PositiveSeconds | None = key(
        None, "The longest that any request may starve: wait after it was overtaken.", "30m"
    )
    hold: of.HeldShare | None = key(
        None,
        "The share of requests that must meet both `ttft` and `tpot`: while fewer do, less important tiers hold less of"
        " the pool. Default: they may hold what is free.",
        "97%",
    )

    @field_validator("hold")
    @classmethod
    def _hold_has_objectives(cls, hold: Fraction | None, info: ValidationInfo) -> Fraction | None:
        if hold is not None and None in (info.data.get("ttft_s", 0), info.data.get("tpot_s", 0)):
            raise ValueError(
                "a tier is held to its time to a first token and its time per token: write `ttft` and `tpot` beside it"
            )
        return hold


@dataclass(frozen=True, slots=True)
@declared
class Gain:
    """The worth of a tier's service, beside that of other tiers."""

    weight: of.GainWeight = key(1, "The worth of an output token that comes in time, from 1 to 1000.", "4")


@dataclass(frozen=True, slots=True)
@declared
class Queue:
    """How much may wait."""

    max_requests: of.Count | None = key(
        None, "Requests that may wait in each process; one more is refused. Default: no bound.", "10k"
    )
    max_wait_s: of.Seconds | None = key(
        None, "The longest a request waits before it is refused. Default: no bound.", "30m"
    )
    max_deadline_s: of.PositiveSeconds | None = key(
        None,
        "The longest a request waits by its own `x-admission-deadline`, instead of `max_wait`. Default: none may.",
        "24h",
    )

    @field_validator("max_deadline_s")
    @classmethod
    def _deadline_is_later(cls, most_s: float | None, info: ValidationInfo) -> float | None:
        max_wait_s = info.data.get("max_wait_s")
        if most_s is not None and max_wait_s is not None and most_s <= max_wait_s:
            raise ValueError("not longer than `max_wait`, for which any request may wait; write more, or leave it out")
        return most_s


@dataclass(frozen=True, slots=True)
@declared
class Timeouts:
    """How long the engine may take. Then the request ends with `engine_timeout`, and is sent to no other engine."""

    first_byte_s: of.PositiveSeconds = key(
        "10m",  # a prompt of a million tokens is read in less; and OpenAI's and Anthropic's clients wait no longer
        "From admission to the first byte of a stream; any other answer has only `total`.",
        "30s",
    )
    between_bytes_s: of.PositiveSeconds = key(
        "10m",  # an engine may think, or write a tool's arguments, for minutes before it sends them; and see above
        "The longest silence after the first byte.",
        "60s",
    )
    total_s: of.PositiveSeconds = key(
        "4h",  # 128k tokens at 10 a second take 3.6 hours: no answer takes longer
        "From admission to the last byte. Not of responses in the background.",
        "30m",
    )

    @property
    def shortest_s(self) -> float:
        """The shortest of them."""
        return min(self.first_byte_s, self.between_bytes_s, self.total_s)


@dataclass(frozen=True, slots=True)
@declared
class TierTimeouts:
    """A tier's own timeouts of the engine. Default of each: the pool's."""

    first_byte_s: of.PositiveSeconds | None = key(None, "From admission to the first byte of a stream.", "30s")
    between_bytes_s: of.PositiveSeconds | None = key(None, "The longest silence after the first byte.", "60s")
    total_s: of.PositiveSeconds | None = key(None, "From admission to the last byte.", "30m")

    def beside(self, pool: Timeouts) -> Timeouts:
        """The tier's timeouts: those of the pool where it has none of its own."""
        return replace(pool, **given(self))


@dataclass(frozen=True, slots=True)
@declared
class TierHours:
    """Shares of a tier in some hours. A key that is left out is as at other times."""

    reserve: of.Share | None = key(None, "The part of the pool this tier can always get back.", "20%")
    lend: of.Share | None = key(None, "How much of the unused reserve less important tiers may use meanwhile.", "50%")
    limit: of.Share | None = key(None, "The most of the pool this tier may ever hold.", "10%")


_HOURS = of.mapped('{"mon-fri 08:00-18:00 Europe/Berlin": {limit: 10%}}')
_NO_PROMISES, _NO_GAIN, _NO_BOUNDS = ServiceObjectives(), Gain(), Queue()


@dataclass(frozen=True, slots=True)
@declared
class TierBody:
    """One tier's part of the pool."""

    reserve: of.Share = key("0%", "The part of the pool this tier can always get back.", "20%")
    lend: of.Share = key(
        "100%",  # keeps nothing idle: holding capacity back is a price that an operator should choose to pay
        "How much of the unused reserve less important tiers may use meanwhile.",
        "50%",
    )
    limit: of.Share = key("100%", "The most of the pool this tier may ever hold.", "60%")
    always_first: of.Flag = key(
        False, "Goes before all others, whatever it holds. First tier only, with a limit below 100%."
    )
    preemptible: of.Flag = key(
        False,
        "Its requests may be put back in the queue, while nothing of their answer was sent, for a more important tier.",
    )
    preempt_after_us: of.Microseconds | None = key(
        None,
        "After so long a waiting request takes room back from preemptible, less important tiers. Default: never.",
        "500ms",
    )
    slo: Annotated[ServiceObjectives, OrDefault(_NO_PROMISES)] = key(None, "The promises of this tier.")
    gain: Annotated[Gain, OrDefault(_NO_GAIN)] = key(
        None, "The worth of a token in time. Needs `slo` with `ttft` and `tpot`."
    )
    queue: Annotated[Queue, OrDefault(_NO_BOUNDS)] = key(None, "How much may wait in this tier.")
    default_output_tokens: of.PositiveCount = key(
        512,  # a long chat answer: rather too much than an overfull KV cache; real usage gives back the difference
        "The output assumed of a request without a maximum, until usage says better.",
    )
    own_timeouts: TierTimeouts | None = key(
        None,
        "How long the engine may take for its requests. Default: the pool's `timeouts`.",
        {"first_byte": "30s"},
        name="timeouts",
        compare=False,
    )
    max_request_tokens: of.PositiveCount | None = key(
        None, "The most tokens one request may hold. Default: the tier's size limit.", "32k"
    )

    hours: Annotated[ByHours[TierHours], ReadAs(Annotated[dict[HoursText, TierHours], _HOURS] | None, not_too_many)] = (
        key(
            None,
            "Other shares by days and hours, such as `mon-fri 08:00-18:00 Europe/Berlin`, `sat,sun UTC` or "
            "`22:00-06:00 UTC`. The first that covers the time counts.",
            {"mon-fri 08:00-18:00 Europe/Berlin": {"limit": "10%"}},
        )
    )

    @field_validator("gain")
    @classmethod
    def _gain_has_deadlines(cls, gain: Gain, info: ValidationInfo) -> Gain:
        slo = info.data.get("slo", _NO_PROMISES)
        if gain is not _NO_GAIN and (slo.ttft_s is None or slo.tpot_s is None):
            raise ValueError(
                "a tier's gain is that of tokens before their deadlines: give its `slo` a `ttft` and a `tpot`"
            )
        return gain

    @field_validator("limit")
    @classmethod
    def _limit_covers_reserve(cls, limit: Fraction, info: ValidationInfo) -> Fraction:
        _check_limit(limit, info.data.get("reserve"))
        return limit

    @field_validator("always_first")
    @classmethod
    def _always_first_is_limited(cls, always_first: bool, info: ValidationInfo) -> bool:
        _check_limit(info.data.get("limit"), always_first=always_first)
        return always_first

    @field_validator("hours")
    @classmethod
    def _hours_are_possible(cls, hours: ByHours[TierHours], info: ValidationInfo) -> ByHours[TierHours]:
        for text, entry in hours.items():
            then = {**info.data, **given(entry)}
            try:
                _check_limit(then.get("limit"), then.get("reserve"), always_first=then.get("always_first", False))
            except ValueError as mistake:
                raise ValueError(f"{text}: limit: {mistake}") from None
        return hours


def _check_limit(limit: Fraction | None, reserve: Fraction | None = None, *, always_first: bool = False) -> None:
    """Raises ValueError for a limit that a tier cannot have; None is one that cannot be read."""
    if limit == 0:
        raise ValueError('"0%" admits nothing, ever; write a larger share, or remove the tier')
    if limit is not None and reserve is not None and limit < reserve:
        raise ValueError(f'below the reserve of {of.percent(reserve)}; write "{of.percent(reserve)}" or more')
    if limit == 1 and always_first:
        raise ValueError('would let this tier take the whole pool; write a limit below 100%, such as limit: "50%"')


@dataclass(frozen=True, slots=True)
class Tier(TierBody):
    """One tier of a pool. `level` is its rank, 0 the most important; `timeouts` are its own, or else the pool's.

    Its shares as whole numbers are in `PoolRules.tiers[level]`.
    """

    name: str = ""
    level: int = 0
    timeouts: Timeouts = Timeouts()

    @property
    def hold(self) -> Fraction:
        """The share of its requests that must meet its `slo`; 0: no less important tier is bounded for it."""
        return self.slo.hold or Fraction(0)


def ladder(bodies: dict[str, TierBody]) -> tuple[Tier, ...]:
    """The tiers in their order, most important first."""
    return tuple(Tier(**values(body), name=name, level=level) for level, (name, body) in enumerate(bodies.items()))
