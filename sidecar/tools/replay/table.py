"""Replay result for people: a table by tier, totals, the meaning of the correlation, files for programs, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from sidecar.tools.loadgen import Correlation, Distribution
from sidecar.tools.replay.figures import RunFigures, TierFigures, TtftOfAll, door_wait
from sidecar.tools.replay.figures import lines as objective_lines
from sidecar.tools.replay.prompts import Words
from sidecar.tools.replay.run import ReplayedTrace, TraceReplay, by_request
from sidecar.tools.text import table as aligned

# -- Comparison of a replay with its control: which requests failed in which run, and waits over all of them.
#
# Percentiles of the answered requests alone flatter a run that refuses many: what it refuses does not wait. So here
# a failed request counts as one whose first token never comes.


@dataclass(frozen=True, slots=True)
class TierComparison:
    """One tier in both runs. The same arrival is one request. `replay_ttft_s`, `control_ttft_s` count failures."""

    requests: int
    failed_in_both: int
    failed_in_replay_alone: int
    failed_in_control_alone: int
    replay_ttft_s: TtftOfAll | None
    control_ttft_s: TtftOfAll | None

    @property
    def failed_in_replay(self) -> int:
        """All that failed in the replay."""
        return self.failed_in_both + self.failed_in_replay_alone

    @property
    def failed_in_control(self) -> int:
        """All that failed in the control."""
        return self.failed_in_both + self.failed_in_control_alone


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs. `control_under_admission` is how many of the control's answers admission control has delayed."""

    tiers: Mapping[str, TierComparison]
    control_under_admission: int

    def total(self, name: str) -> int:
        """The sum of a count over the tiers."""
        return sum(int(getattr(tier, name)) for tier in self.tiers.values())


def comparison(played: Sequence[ReplayedTrace]) -> Comparison | None:
    """The comparison of a replay with its control, which have the same arrivals in the same order. None for one run."""
    if len(played) < 2:
        return None
    replay, control = played
    tiers: dict[str, TierComparison] = {}
    for tier, figures in replay.figures.tiers.items():
        pairs = [
            (one.is_complete, other.is_complete)
            for one, other in zip(replay.seen, control.seen, strict=True)
            if one.planned.label == tier
        ]
        tiers[tier] = TierComparison(
            requests=len(pairs),
            failed_in_both=pairs.count((False, False)),
            failed_in_replay_alone=pairs.count((False, True)),
            failed_in_control_alone=pairs.count((True, False)),
            replay_ttft_s=figures.ttft_of_all_s,
            control_ttft_s=control.figures.tiers[tier].ttft_of_all_s,
        )
    return Comparison(tiers, sum(door_wait(one.headers) is not None for one in control.seen))


def verdict(found: Comparison) -> Sequence[str]:
    """Sentences on the failures of both runs, and on a control that was not neutral."""
    replay, control = found.total("failed_in_replay_alone"), found.total("failed_in_control_alone")
    both, requests = found.total("failed_in_both"), found.total("requests")
    lines = [
        f"Failed of {requests} requests: {replay} in the replay alone, {control} in the control alone, {both} in both."
    ]
    if found.control_under_admission:
        lines.append(
            f"This control was NOT neutral: {found.control_under_admission} of its requests went through admission "
            "control. Do not compare the two runs."
        )
    elif replay > control:
        lines.append(
            "The replay failed more requests than the control, and had less to serve: compare the waits over all "
            "requests, in which a failed one never has its first token."
        )
    elif control > replay:
        lines.append(
            "The control failed more requests than the replay, without admission control: the engine refused them, or "
            "they took too long. Its errors say which."
        )
    return lines


SHOWN_ERRORS = 5
GROUPS = (("", 3), ("TTFT, s", 3), ("TPOT, ms", 1), ("queue wait, s", 2), ("starvation, s", 2), ("", 1))
COLUMNS = ("", "requests", "failed", "p50", "p95", "p99", "p50", "p50", "p95", "p50", "p95", "tokens/s")
COMPARED_GROUPS = (("", 2), ("failed", 2), ("TTFT in the replay, s", 3), ("TTFT in the control, s", 3))
COMPARED_COLUMNS = ("", "requests", "replay", "control", "p50", "p95", "p99", "p50", "p95", "p99")


def labels(groups: Sequence[tuple[str, int]], columns: Sequence[str], *, once: bool = False) -> Sequence[str]:
    """Each column with the name of its group; `once`: only the first of a group has it."""
    of_columns = ["" if once and place else group for group, number in groups for place in range(number)]
    return [f"{group} {column}".strip() for group, column in zip(of_columns, columns, strict=True)]


def table(runs: Sequence[RunFigures], compared: Comparison | None = None) -> str:
    """Every run and tier, a line each, and both runs side by side where there are two."""
    rows = [(f"  {tier}", *cells(figures)) for run in runs for tier, figures in run.tiers.items()]
    head, *lines_of_tiers = aligned([labels(GROUPS, COLUMNS, once=True), *rows])
    lines, tiers = [head], iter(lines_of_tiers)
    for run in runs:
        lines += ["", run.title, *islice(tiers, len(run.tiers)), *(f"  {line}" for line in sentences(run))]
    if compared is not None:
        lines += ["", SIDE_BY_SIDE, ""]
        rows = [(f"  {tier}", *compared_cells(found)) for tier, found in compared.tiers.items()]
        lines += aligned([labels(COMPARED_GROUPS, COMPARED_COLUMNS, once=True), *rows])
        lines += ["", *verdict(compared)]
    return "\n".join(lines)


SIDE_BY_SIDE = "Side by side, over all requests; a failed one never has its first token:"


def sentences(run: RunFigures) -> Sequence[str]:
    """A run as a whole: sums, failures, the effect of importance, and the objectives."""
    return [_totals(run), *_errors(run), *_basis(run), meaning(run), *objective_lines(run.objectives)]


def _basis(run: RunFigures) -> Sequence[str]:
    """The requests that the percentiles of a run are of, where some failed."""
    if not run.failed:
        return []
    answered = run.requests - run.failed
    return [
        f"Percentiles are of the {answered} of {run.requests} requests that were answered, and leave out the failed."
    ]


def _overall_cells(found: TtftOfAll | None) -> Sequence[str]:
    """Percentiles over all requests as they are shown."""
    if found is None:
        return ("-", "-", "-")
    return tuple("never" if value is None else _seconds(value) for value in (found.p50, found.p95, found.p99))


def compared_cells(found: TierComparison) -> Sequence[str]:
    """The figures of a tier in both runs, over all requests."""
    counts = map(str, (found.requests, found.failed_in_replay, found.failed_in_control))
    return (*counts, *_overall_cells(found.replay_ttft_s), *_overall_cells(found.control_ttft_s))


def meaning(run: RunFigures) -> str:
    """The relation of importance and time to first token, in a sentence."""
    found = run.correlation
    if len(run.tiers) < 2:
        return "One tier alone: there is nothing to put in order."
    if found is None:
        return "Too few answers for a correlation of importance and TTFT."
    figures = f"Spearman of importance and TTFT: {_interval(found)}"
    if found.high < 0:
        return f"{figures}: the more important a request, the sooner its first token."
    if found.low > 0:
        return f"{figures}: the wrong way round, the more important a request, the LATER its first token."
    return f"{figures}: importance made no difference that these requests can show."


def _interval(found: Correlation) -> str:
    """A correlation with its confidence interval and how many requests it is of."""
    return f"{found.value:+.2f} (95% between {found.low:+.2f} and {found.high:+.2f}, n={found.n})"


def cells(figures: TierFigures) -> Sequence[str]:
    """The figures of a tier."""

    def both(found: Distribution | None) -> Sequence[str]:
        return ("-", "-") if found is None else (_seconds(found.p50), _seconds(found.p95))

    ttft, tpot = figures.ttft_s, figures.tpot_s
    return (
        str(figures.requests),
        str(figures.failed),
        *both(ttft),
        "-" if ttft is None else _seconds(ttft.p99),
        "-" if tpot is None else f"{tpot.p50 * 1000:.1f}",
        *both(figures.queue_wait_s),
        *both(figures.starvation_s),
        f"{figures.output_tokens_per_s:.0f}",
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _totals(run: RunFigures) -> str:
    """A run as a whole, in a line."""
    return (
        f"{run.requests} requests in {run.duration_s:.1f} s, {run.requests_per_s:.1f} answered per second, "
        f"{run.output_tokens_per_s:.0f} output tokens per second, {run.failed} failed"
    )


def _errors(run: RunFigures) -> Sequence[str]:
    """Failures with their number, a line each, most frequent first."""
    shown = list(run.errors.items())[:SHOWN_ERRORS]
    more = len(run.errors) - len(shown)
    return [*(f"{count} x {error}" for error, count in shown), *([f"and {more} other errors"] if more > 0 else [])]


LATE_FROM_S = 0.1
"""From here on the client, not the server, may have made a difference to what was measured."""
ADDED_FIELDS = ("ignore_eos", "stream_options", "priority", "max_tokens")
"""Fields of a replay's body that a strict engine may refuse."""


def kinds(row_tiers: Sequence[str], tiers: Iterable[str]) -> str:
    """How many requests each tier has, in the order of the ladder."""
    counts = Counter(row_tiers)
    return ", ".join(f"{tier} {counts[tier]}" for tier in tiers if counts[tier])


def advice(figures: Sequence[RunFigures], words: Words) -> Sequence[str]:
    """Advice on the failures, a line each."""
    found = [line for run in figures for error in run.errors if (line := _about(error))]
    late_s = max(max(run.latest_s, run.stalled_s) for run in figures)
    if late_s > LATE_FROM_S:
        found.append(
            f"The client itself did not get to run for up to {late_s:.2f} s: this machine is busy, and no time is more "
            "exact than that; give it a core of its own, slow down with --speed, or run it elsewhere."
        )
    for run in figures[:1]:
        asked, counted = run.prompt_tokens_asked, run.prompt_tokens_counted
        if asked and counted and abs(counted - asked) > 0.02 * asked:
            found.append(
                f"The engine counted {counted:.0f} prompt tokens a request, {asked:.0f} were asked for "
                f"(prompts by {words.source})."
            )
    return list(dict.fromkeys(found))


def _about(error: str) -> str | None:
    if error.startswith("HTTP 400") and (field := next((name for name in ADDED_FIELDS if name in error), None)):
        what = {
            "ignore_eos": "add --no-ignore-eos: answers may then end early",
            "priority": "the engine is too old to take it (see `sidecar doctor`), or another one than --engine says",
        }.get(field, "it is written by this replay; the engine's schema has no such field, or not with this value")
        return f"The engine refused `{field}`: {what}."
    if error.startswith("HTTP 400") and ("context" in error or "max_model_len" in error or "maximum" in error):
        return "Requests are too long for the model: cut them with --max-input and --max-output, or --scale."
    if error.startswith(("HTTP 401", "HTTP 403")):
        return (
            "The server wants a key: set SIDECAR_API_KEY, or give --api-key-file FILE, or --by key with "
            "--key-file TIER=FILE for every tier."
        )
    if "Too many open files" in error:
        return "Raise the limit on open files (ulimit -n): every request under way has a connection."
    return None


def figures_as_json(
    replay: TraceReplay, by: str, figures: Sequence[RunFigures], compared: Comparison | None
) -> Mapping[str, Any]:
    """All figures, and what they are of."""
    upstream, trace = replay.upstream, replay.trace
    return {
        "trace": {"name": trace.name, "format": trace.format, "requests": len(replay.rows)},
        "upstream": list(upstream.urls),
        "engine": upstream.engine.name,
        "model": upstream.model,
        "by": by,
        "tiers": list(replay.tiers),
        "prompts": {"source": upstream.words.source, "is_exact": upstream.words.is_exact},
        "ignore_eos": replay.writer.ignore_eos,
        "seed": replay.writer.seed,
        "runs": figures,
        "comparison": compared,
    }


def requests_as_jsonl(played: Sequence[ReplayedTrace], replay: TraceReplay) -> str:
    """A line for every request of every run."""
    lines = (msgspec.json.encode(record) for run in played for record in by_request(run, replay.rows))
    return b"".join(line + b"\n" for line in lines).decode()
