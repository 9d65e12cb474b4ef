"""A replay from beginning to end: the server, its requests, and the runs, one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.engines import Engine, NoPriorityEngine
from sidecar.gain.token_deadlines import Objective
from sidecar.tools.loadgen import Progress, Seen, play
from sidecar.tools.replay.figures import RunFigures, door_wait, measure, request_id, starvation_by_request
from sidecar.tools.replay.plan import Asking, By, plan
from sidecar.tools.replay.prompts import Words, Writer, new_words
from sidecar.tools.replay.server import AskedServer, Control
from sidecar.tools.replay.trace import Trace, TraceRow


class UnknownEngine(ValueError):
    """The engine's own priority is asked for, and the engine is not known."""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The server that gets the requests. `engine` is `none` where it is not known, `context_tokens` None."""

    urls: Sequence[str]
    model: str
    context_tokens: int | None
    engine: type[Engine]
    words: Words


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """One replay: the rows of a trace, with their tiers, and how they are written and sent.

    `objectives` are those of the policy's tiers, by name.
    """

    trace: Trace
    rows: Sequence[TraceRow]
    row_tiers: Sequence[str]
    tiers: Sequence[str]
    writer: Writer
    upstream: ReplayTarget
    timeout_s: float
    objectives: Mapping[str, Objective] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run that is to be played: what it is, how its requests ask for a tier, and the servers that get them."""

    name: str
    title: str
    asking: Asking
    urls: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReplayedTrace:
    """One run: its figures, and what each client saw, in the order of the rows."""

    figures: RunFigures
    seen: Sequence[Seen] = field(repr=False)


async def find(
    urls: Sequence[str], *, api_key: str | None, model: str | None, engine: type[Engine] | None, tokenizer: str | None,
    chat: bool,
) -> ReplayTarget:  # fmt: skip
    """Asks the first server what it is. Given options override its answers. Raises NoAnswer, NoTokenizer."""
    async with AskedServer(urls[0], api_key) as server:
        identity = await server.identity()
        name = model or identity.model or ""
        words = await new_words(server, name, tokenizer, chat=chat)
    return ReplayTarget(urls, name, identity.context_tokens, engine or identity.engine or NoPriorityEngine, words)


def runs(asking: Asking, urls: Sequence[str], control: Control | None) -> Sequence[PlannedRun]:
    """The runs to play, in their order. Raises UnknownEngine."""
    if asking.by is By.PRIORITY and asking.engine is NoPriorityEngine:
        raise UnknownEngine("the server does not say which engine it is; add --engine, such as --engine vllm")
    titles = {
        By.PRIORITY: f"asked by the engine's own priority ({asking.engine.name})",
        By.TIER: f"asked by the header {asking.header}",
        By.KEY: "asked by API key",
    }
    found = [PlannedRun("replay", titles[asking.by], asking, urls)]
    if control is not None:
        alike = replace(asking, is_control=True, api_key=control.api_key)
        where = "" if control.urls == urls else f", at {', '.join(control.urls)} without admission control"
        found.append(PlannedRun("control", f"control: all requests alike{where}", alike, control.urls))
    return found


async def play_run(run: PlannedRun, replayed: TraceReplay, report: Callable[[float, Progress], None]) -> ReplayedTrace:
    """Plays all requests once."""
    writer = replace(replayed.writer, salt=run.name)
    client = Progress()
    requests = plan(replayed.rows, replayed.row_tiers, writer, run.asking)
    seen = await play(
        run.urls,
        requests,
        timeout_s=replayed.timeout_s,
        report=report,
        progress=client,
        pick=random.Random(replayed.writer.seed),
    )
    asked = [row.input_tokens if row.session is None else None for row in replayed.rows]
    stalled_s, objectives = client.stalled_s, replayed.objectives
    figures = measure(run.name, run.title, replayed.tiers, seen, asked, stalled_s=stalled_s, objectives=objectives)
    return ReplayedTrace(figures, seen)


def by_request(played: ReplayedTrace, rows: Sequence[TraceRow]) -> Iterator[Mapping[str, Any]]:
    """A record of every request, for other statistics."""
    starved_s = starvation_by_request(played.seen)
    for row, seen, starvation_s in zip(rows, played.seen, starved_s, strict=True):
        wait = door_wait(seen.headers)
        yield {
            "run": played.figures.name,
            "line": row.line,
            "session_id": row.session,
            "tier": seen.planned.label,
            "sent_s": seen.sent_s,
            "ttft_s": seen.ttft_s,
            "tpot_s": seen.tpot_s,
            "end_s": seen.end_s,
            "queue_wait_s": wait and wait.queue_wait_s,
            "starvation_s": starvation_s,
            "door_starvation_s": wait and wait.starvation_s,
            "sidecar_request_id": request_id(seen.headers),
            "door_request_id": request_id(seen.headers),  # the same under its old name
            "prompt_tokens_asked": row.input_tokens,
            "prompt_tokens": seen.prompt_tokens,
            "output_tokens": seen.output_tokens,
            "status": seen.status,
            "error": seen.error,
            "request_id": seen.request_id,
            "upstream": seen.url_index,
        }


def too_long(replayed: TraceReplay) -> int:
    """How many requests do not fit the model's context, as far as it is known."""
    most = replayed.upstream.context_tokens
    if most is None:
        return 0
    return sum((row.input_tokens or 0) + (row.output_tokens or 0) > most for row in replayed.rows)
