"""Fit of an engine model to a probe of a real engine, and how well it predicts what the probe saw.

    time per token         = step_us + step_us_per_sequence * running
    time to a first token  = outside + steps * (step_us + step_us_per_sequence) + step_us_per_prefill_token * prompt

The first is fitted to batches, by the sequences that ran on average while an answer was generated. The second is fitted
to prompts that were alone; `steps` is the prompt in chunks, rounded up. `outside` is the time of the network and of the
engine's API server, which no step has: it is reported, and not a part of the model.

Both lines are fitted as those of `engines.speed` are (`robust_line`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.engines.base import Gauges
from sidecar.engines.robust_line import Line, fitted
from sidecar.tools.doctor.speed_probe import FEWEST_TOKENS, SpeedProbe
from sidecar.tools.loadgen import Seen, most_at_once, quantile
from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import SimulatedEngines, VirtualLoop, play
from sidecar.tools.step_model.model import EngineModel

CHUNKS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
"""Tokens of prompts in a step, as engines are started with: powers of two."""
CLEARER = 0.5
"""Another chunk than the default counts where it leaves at most this part of the default's error."""
DEARER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Times of a step with a prompt, in steps without: engines launch other kernels for it. The model does not have that,
but a chunk is seen by it."""
QUEUED = 0.8
"""Of a batch: where fewer ran at once, the rest waited for a sequence to end."""
TOKENS_PER_SEQUENCE = 2_048
"""Of the KV cache, where the engine does not say its size: a prompt and an answer of usual traces fit."""
_PASSES = 4
"""The two fits use each other's result, for a few percent of their points. After so many it stands."""
_WRITE = "a default: write what the engine runs with"
_DEFAULT = EngineModel(name="", step_us=0.0, kv_tokens=TOKENS_PER_SEQUENCE)


class StepTimes(NamedTuple):
    """The fitted figures, in microseconds but for `chunk_tokens`; `is_chunk_seen` is false where that is the default.

    `outside_us` is in no step.
    """

    step_us: float
    step_us_per_sequence: float
    step_us_per_prefill_token: float
    outside_us: float
    chunk_tokens: int
    is_chunk_seen: bool


class Errors(NamedTuple):
    """Relative errors of predictions, in parts of what was measured: the median, and the one that 90% do not exceed."""

    p50: float
    p90: float
    samples: int


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model with the reasons for its sizes, and its errors on the probe's own requests.

    `ttft` is the simulation's time to the first token of prompts that were alone; `ttft_outside` is the same with the
    time added that is in no step. `ttft_batch` and `tpot` are of requests in batches.
    """

    model: EngineModel
    outside_us: float
    reasons: dict[str, str]
    ttft: Errors
    ttft_outside: Errors
    ttft_batch: Errors
    tpot: Errors


def fit(probe: SpeedProbe) -> FittedModel:
    """The model of a probe that has enough measurements, as `speed_probe.measure` returns it."""
    found = step_times(probe.lone, probe.batches)
    gauges = probe.survey.gauges
    sequences, by_sequences = max_sequences(gauges, probe.batches)
    kv_tokens, by_kv_tokens = sequences * TOKENS_PER_SEQUENCE, f"not reported: {TOKENS_PER_SEQUENCE:,} a sequence"
    if gauges.kv_tokens is not None:
        kv_tokens, by_kv_tokens = max(gauges.kv_tokens, _DEFAULT.block_tokens), "the engine says so"
    by_chunk = "seen in the times of long prompts"
    if not found.is_chunk_seen:
        is_default = found.chunk_tokens == _DEFAULT.chunk_tokens
        by_chunk = _WRITE if is_default else "no shorter one was seen; write what the engine runs with"
    model = EngineModel(
        name=probe.target.model,
        step_us=round(found.step_us, 3),
        step_us_per_sequence=round(found.step_us_per_sequence, 3),
        step_us_per_prefill_token=round(found.step_us_per_prefill_token, 3),
        kv_tokens=kv_tokens,
        max_sequences=sequences,
        chunk_tokens=found.chunk_tokens,
    )
    reasons = {
        "kv_tokens": by_kv_tokens,
        "block_tokens": "a default",
        "max_sequences": by_sequences,
        "chunk_tokens": by_chunk,
    }
    alone = [[one] for one in probe.lone]
    ttft_batch, tpot = errors(model, probe.batches)
    return FittedModel(
        model,
        found.outside_us,
        reasons,
        ttft=errors(model, alone)[0],
        ttft_outside=errors(model, alone, found.outside_us / 1e6)[0],
        ttft_batch=ttft_batch,
        tpot=tpot,
    )


# -- the two lines


def step_times(lone: Sequence[Seen], batches: Sequence[Sequence[Seen]]) -> StepTimes:
    """Fits both times. Raises statistics.StatisticsError without a prompt that was alone, or without a batch."""
    fits = {chunk: _with_chunk(lone, batches, chunk) for chunk in CHUNKS}
    longest = max(_computed(one) for one in lone)
    # All chunks that are longer than every prompt are alike: the shortest of them stands for them.
    known = {chunk: fit for chunk, fit in fits.items() if chunk // 2 < longest}
    standard, error = fits[_DEFAULT.chunk_tokens]
    best, least = min(known.values(), key=lambda fit: fit[1])
    if best.chunk_tokens == _DEFAULT.chunk_tokens:
        others = [other for chunk, (_, other) in known.items() if chunk != best.chunk_tokens]
        is_clear = bool(others) and best.chunk_tokens < longest and least <= CLEARER * min(others)
        return best._replace(is_chunk_seen=is_clear)
    if least <= CLEARER * error:
        return best._replace(is_chunk_seen=best.chunk_tokens < longest)
    return standard._replace(is_chunk_seen=False)


def _with_chunk(lone: Sequence[Seen], batches: Sequence[Sequence[Seen]], chunk: int) -> tuple[StepTimes, float]:
    """The fit with prompts in such chunks, and its error. The two lines use each other's result."""
    step, prompt = Line(0.0, 0.0), Line(0.0, 0.0)
    for _ in range(_PASSES):
        step = fitted([_decoding(batch, prompt.slope_us) for batch in batches if any(map(_has_tpot, batch))])
        prompt = _prompt_line(lone, step.at(1), chunk)
    found = StepTimes(step.base_us, step.slope_us, prompt.slope_us, prompt.base_us, chunk, is_chunk_seen=True)
    return found, min(_misfit(lone, step.at(1) * dearer, chunk) for dearer in DEARER)


def _decoding(batch: Sequence[Seen], per_prefill_us: float) -> tuple[float, float]:
    """The medians of a batch: the sequences that ran on average while an answer was generated, and its time per token.

    Without the time for the prompts that were computed meanwhile.
    """
    points = []
    for one in filter(_has_tpot, batch):
        began_s, took_s = one.first_token_s or 0.0, one.end_s - (one.first_token_s or 0.0)
        shared_s, prefilled = 0.0, 0
        for other in batch:
            first_s = other.first_token_s or 0.0
            shared_s += max(0.0, min(one.end_s, other.end_s) - max(began_s, first_s))
            prefilled += _computed(other) if began_s < first_s < one.end_s else 0
        token_us = (one.tpot_s or 0.0) * 1e6 - per_prefill_us * prefilled / (one.output_tokens - 1)
        points.append((shared_s / took_s, token_us))
    return statistics.median(x for x, _ in points), statistics.median(y for _, y in points)


def _prompt_line(lone: Sequence[Seen], step_us: float, chunk: int) -> Line:
    """The time of a prompt without its steps: its slope is that of a token, and its base the time in no step."""
    return fitted([(float(_computed(one)), (one.ttft_s or 0.0) * 1e6 - _steps(one, chunk) * step_us) for one in lone])


def _misfit(lone: Sequence[Seen], step_us: float, chunk: int) -> float:
    """The mean difference of fitted and measured times to a first token, in microseconds. Of a length its median."""
    line = _prompt_line(lone, step_us, chunk)
    by_length: dict[str, list[float]] = {}
    for one in lone:
        fitted_us = line.base_us + _steps(one, chunk) * step_us + line.slope_us * _computed(one)
        by_length.setdefault(one.planned.label, []).append((one.ttft_s or 0.0) * 1e6 - fitted_us)
    return statistics.fmean(abs(statistics.median(errors)) for errors in by_length.values())


def _computed(one: Seen) -> int:
    """The tokens of a prompt that were not cached."""
    return max(1, (one.prompt_tokens or 0) - (one.cached_tokens or 0))


def _steps(one: Seen, chunk: int) -> int:
    return -(-_computed(one) // chunk)


def _has_tpot(one: Seen) -> bool:
    return one.output_tokens >= FEWEST_TOKENS and one.tpot_s is not None


def max_sequences(gauges: Gauges, batches: Sequence[Sequence[Seen]]) -> tuple[int, str]:
    """The sequences that run at once, and how that is known."""
    if gauges.max_running is not None:
        return gauges.max_running, "the engine says so"
    largest = max(batches, key=len, default=())
    ran = most_at_once(largest)
    if 0 < ran < QUEUED * len(largest):
        return ran, f"as many of {len(largest)} ran at once"
    return _DEFAULT.max_sequences, _WRITE


# -- predictions


class _SendsAtOnce:
    """See `play.SimulatedAdmission`: there is none, every request goes to the engine as it comes."""

    def __init__(self, stage: SimulatedEngines) -> None:
        self._stage = stage
        self._count = 0

    def arrives(self, request: Request) -> None:
        """See `Admission`."""
        self._count += 1
        request.place = (0.0,), self._count
        self._stage.send(request, 0)

    def _nothing(self, request: Request) -> None:
        """See `Admission`."""

    leaves = first_token = reached = finished = removed = _nothing


def predicted(model: EngineModel, seen: Sequence[Seen]) -> list[tuple[float | None, float | None]]:
    """The simulation's times to the first token and per token, in seconds, of requests that were sent like these.

    None where the model's engine cannot hold one, or for less than two tokens.
    """
    began_s = min(one.sent_s for one in seen)
    requests = [
        Request(TraceRow(0, one.sent_s - began_s, _computed(one), max(1, one.output_tokens)), 0, "", ()) for one in seen
    ]
    loop = VirtualLoop()
    stage = SimulatedEngines(model, 1, loop)
    with loop.running():
        play(sorted(requests, key=lambda one: one.at_us), stage, _SendsAtOnce(stage))
    return [_times(one) for one in requests]


def _times(request: Request) -> tuple[float | None, float | None]:
    if request.first_us is None or request.end_us is None:
        return None, None
    ttft_s, rest_s = (request.first_us - request.at_us) / 1e6, (request.end_us - request.first_us) / 1e6
    return ttft_s, rest_s / (request.output - 1) if request.output > 1 else None


def errors(model: EngineModel, groups: Sequence[Sequence[Seen]], outside_s: float = 0.0) -> tuple[Errors, Errors]:
    """Of times to first token, with `outside_s` added to each, and of times per token.

    Each group was sent to an idle engine.
    """
    firsts, tokens = [], []
    for group in groups:
        for one, (first_s, token_s) in zip(group, predicted(model, group), strict=True):
            if first_s is not None and one.ttft_s:
                firsts.append(abs((first_s + outside_s) / one.ttft_s - 1))
            if token_s is not None and one.tpot_s and _has_tpot(one):
                tokens.append(abs(token_s / one.tpot_s - 1))
    return _errors(firsts), _errors(tokens)


def _errors(values: Sequence[float]) -> Errors:
    if not values:
        return Errors(0.0, 0.0, 0)
    return Errors(quantile(values, 0.5), quantile(values, 0.9), len(values))


# -- text


def as_yaml(fitted: FittedModel, probe: SpeedProbe, date: str) -> str:
    """The file: the model, with its origin, its errors and the reasons for its sizes as comments."""
    model, ttft, tpot = fitted.model, fitted.ttft, fitted.tpot
    lines = [
        f"# Fitted by `sidecar doctor --engine-model` on {date} to {probe.survey.name},",
        f"# from {len(probe.lone)} prompts sent alone and {len(probe.batches)} batches of up to "
        f"{max(map(len, probe.batches))} requests.",
        f"# Its median errors on them: time to first token {ttft.p50:.0%}, time per token {tpot.p50:.0%}.",
        f"name: {json.dumps(model.name)}",
    ]
    if fitted.outside_us:
        note = f"# Not in it: {fitted.outside_us / 1e3:.1f} ms of network and API server before each first token."
        lines.insert(3, note)
    keys = ("step_us", "step_us_per_prefill_token", "step_us_per_sequence")
    lines += [f"{key}: {getattr(model, key):.3f}" for key in keys]
    lines += [f"{key}: {getattr(model, key)}  # {reason}" for key, reason in fitted.reasons.items()]
    return "\n".join(lines) + "\n"


def report(fitted: FittedModel, probe: SpeedProbe) -> str:
    """Report for people, without a line's end at its end."""
    model = fitted.model
    figures = {key: f"{getattr(model, key):,}" for key in fitted.reasons}
    rows: list[tuple[str, str, str]] = [
        ("a step", _ms(model.step_us), ""),
        ("each sequence in it", _ms(model.step_us_per_sequence), ""),
        ("each prompt token in it", _ms(model.step_us_per_prefill_token), ""),
        *((key, figures[key], reason) for key, reason in fitted.reasons.items()),
    ]
    lines = [f"engine model of {probe.survey.name}, {model.name}", ""]
    lines += [f"  {name:<25}{value:>12}   {why}".rstrip() for name, value, why in rows]
    lines += ["", f"how well it predicts the {probe.requests} requests of the probe (median error; 90% are below)"]
    errors = (
        ("first token, alone", fitted.ttft),
        ("first token, in batches", fitted.ttft_batch),
        ("time per token", fitted.tpot),
    )
    lines += [f"  {name:<25}{error.p50:>12.1%}{error.p90:>10.1%}" for name, error in errors]
    if fitted.outside_us:
        error = fitted.ttft_outside
        lines += [
            "",
            f"  not in the model: {_ms(fitted.outside_us)} before each first token, of the network and the API server;",
            f"  with them, the error of a first token alone is {error.p50:.1%} (90% are below {error.p90:.1%})",
        ]
    if probe.failed:
        lines += ["", f"  {len(probe.failed)} requests do not count: {probe.failed[-1]}"]
    return "\n".join(lines)


def figures(fitted: FittedModel, probe: SpeedProbe) -> dict[str, object]:
    """All of it in JSON types."""
    return {
        "upstream": probe.target.url,
        "engine": probe.survey.name,
        "model": {key: getattr(fitted.model, key) for key in fitted.model.__struct_fields__},
        "reasons": fitted.reasons,
        "outside_us": fitted.outside_us,
        "errors": {
            name: dict(getattr(fitted, name)._asdict()) for name in ("ttft", "ttft_outside", "ttft_batch", "tpot")
        },
        "prompts": [{"tokens": _computed(one), "ttft_s": one.ttft_s} for one in probe.lone],
        "batches": [
            [{"ttft_s": one.ttft_s, "tpot_s": one.tpot_s, "output_tokens": one.output_tokens} for one in batch]
            for batch in probe.batches
        ],
        "failed": probe.failed,
    }


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3f} ms"
