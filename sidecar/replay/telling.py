"""What is told of a replay beside its table: files for programs, and advice where something looks wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sidecar.replay.figures import RunFigures
from sidecar.replay.running import Played, Replay, by_request
from sidecar.replay.words import Words

LATE_FROM_S = 0.1
"""From here on the client, not the server, may have made a difference to what was measured."""
ADDED_FIELDS = ("ignore_eos", "stream_options", "priority", "max_tokens")
"""What a strict engine may refuse of the body that a replay writes."""


def kinds(row_tiers: Sequence[str], tiers: Iterable[str]) -> str:
    """How many requests each tier has, in the order of the ladder."""
    counts = Counter(row_tiers)
    return ", ".join(f"{tier} {counts[tier]}" for tier in tiers if counts[tier])


def advice(figures: Sequence[RunFigures], words: Words) -> Sequence[str]:
    """What may be done about what went wrong, a line each."""
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
        return "The server wants a key: --api-key KEY, or --by key with --key TIER=KEY for every tier."
    if "Too many open files" in error:
        return "Raise the limit on open files (ulimit -n): every request under way has a connection."
    return None


def figures_as_json(replay: Replay, by: str, figures: Sequence[RunFigures]) -> Mapping[str, Any]:
    """All figures, and what they are of."""
    upstream, trace = replay.upstream, replay.trace
    return {
        "trace": {"name": trace.name, "format": trace.format, "requests": len(replay.rows)},
        "upstream": list(upstream.urls),
        "engine": upstream.engine.value,
        "model": upstream.model.name,
        "by": by,
        "tiers": list(replay.tiers),
        "prompts": {"source": upstream.words.source, "is_exact": upstream.words.is_exact},
        "ignore_eos": replay.writer.ignore_eos,
        "seed": replay.writer.seed,
        "runs": figures,
    }


def requests_as_jsonl(played: Sequence[Played], replay: Replay) -> str:
    """A line for every request of every run."""
    lines = (msgspec.json.encode(record) for run in played for record in by_request(run, replay.rows))
    return b"".join(line + b"\n" for line in lines).decode()
