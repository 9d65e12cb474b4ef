"""Explanation of a request that was sent, read from a running sidecar's admin port, as text."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from http import HTTPStatus
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from sidecar.cli.output import STANDARD_OUTPUT, write_json
from sidecar.durations import exact_duration
from sidecar.engines.pages import Unread
from sidecar.explain.document import AdmittedAhead, Explanation, WaitDetails
from sidecar.explain.phrases import counted
from sidecar.secrets import HOW_TO_SET, token_header
from sidecar.telemetry.logs.formats import one_line
from sidecar.tools.loadgen.pages import HttpPages


class _NoStory(Exception):
    """There is none; the message is one line that says why."""


def run(wanted: str, admins: Sequence[str], json_target: str | None) -> int:
    """Returns 0 where a sidecar knows the request, else 1, with a line for each that does not."""
    story, refusals = asyncio.run(_ask(admins, wanted))
    if story is None:
        print("\n".join(f"sidecar: {refusal}" for refusal in refusals), file=sys.stderr)
        return 1
    if json_target != STANDARD_OUTPUT:
        print(text(story))
    return 0 if write_json(json_target, story) else 1


async def _ask(admins: Sequence[str], wanted: str) -> tuple[Explanation | None, list[str]]:
    """The first explanation found, sidecar by sidecar, and the other answers before it."""
    refusals: list[str] = []
    async with aiohttp.ClientSession() as session:
        for admin in admins:
            try:
                return await _story(session, admin, wanted), refusals
            except (_NoStory, Unread) as refusal:  # noqa: PERF203  the next replica may have it
                refusals.append(str(refusal))
    return None, refusals


async def _story(session: aiohttp.ClientSession, admin: str, wanted: str) -> Explanation:
    if urlsplit(admin).scheme not in {"http", "https"} or not urlsplit(admin).netloc:
        raise _NoStory(f"--admin: {admin!r} is not a URL; write one such as http://127.0.0.1:9464")
    page = await HttpPages(session, admin, _headers()).get(f"/requests/{quote(wanted, safe='')}")
    if page.status == HTTPStatus.UNAUTHORIZED:
        raise _NoStory(f"{admin} needs its admin token; {HOW_TO_SET}")
    try:
        if page.status == 200:
            return msgspec.json.decode(page.text, type=Explanation)
        error = msgspec.json.decode(page.text, type=_Unknown).error
    except msgspec.MsgspecError:
        raise _NoStory(
            f"{admin} answered {page.status}, but not as a sidecar's admin port does; "
            "give --admin the address that `sidecar serve` prints as `admin on`"
        ) from None
    raise _NoStory(f"{admin}: {error.message}")


def _headers() -> dict[str, str]:
    try:
        return token_header(os.environ)
    except ValueError as mistake:
        raise _NoStory(str(mistake)) from None


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Unknown(msgspec.Struct, frozen=True):
    error: _Error


MOST_LISTED = 10
"""Requests ahead that are listed one by one; the table above them counts all."""
_LABEL = 12


def text(story: Explanation) -> str:
    """The whole story, lines for a terminal."""
    lines = [f"request {story.request_id}   {story.method} {story.path}   pool {story.pool}", "", story.conclusion, ""]
    if story.others:
        lines.insert(1, f"the newest of {story.others + 1} requests with this id")
    lines += [f"{label:<{_LABEL}} {said}" for label, said in _steps(story)]
    if story.wait is not None:
        lines += _went_ahead(story, story.wait)
    return "\n".join(map(one_line, lines))


def clock(at_s: float) -> str:
    """A moment as local calendar time with milliseconds."""
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")


def _steps(story: Explanation) -> Iterator[tuple[str, str]]:
    yield from _who(story)
    if story.trace_id is not None:
        yield "trace", f"{story.trace_id}, span {story.span_id}"
    yield "arrived", clock(story.arrived_at_s)
    if story.in_the_way is not None:
        yield "had to wait", f"{_at(story, story.in_the_way.found_at_s)}: {story.in_the_way.explanation}"
    met: list[tuple[float, str, str]] = []
    for attempt in story.preempted:
        lost = f"{exact_duration(attempt.engine_s)} at the engine are lost"
        met.append((attempt.admitted_at_s, "admitted", ""))
        if attempt.is_unreached:
            met.append((attempt.preempted_at_s, "waited again", ": no connection to the engine could be made"))
        else:
            met.append((attempt.preempted_at_s, "preempted", f": {lost}; its room went to a more important request"))
    if story.wait is not None and story.wait.overtaken_at_s is not None:
        met.append((story.wait.overtaken_at_s, "overtaken", f" {_by(story.wait.overtaken_by)}"))
    for at_s, label, said in sorted(met):
        yield label, f"{_at(story, at_s)}{said}"
    yield from _how_it_ended(story)


def _who(story: Explanation) -> Iterator[tuple[str, str]]:
    asked = story.asked
    if asked is None:
        yield "asked by", "not known: refused before the key was read" if story.refused else "not known yet"
        return
    clamped = f"; {asked.clamped_from} was asked for, which is more than it may have" if asked.clamped_from else ""
    lowered = (
        f"; {asked.downgraded_from} within its tenant's limits, which it was over" if asked.downgraded_from else ""
    )
    yield "asked by", f"tenant {asked.tenant}"
    yield "tier", f"{asked.tier}, by {_SOURCES.get(asked.source, asked.source)}{clamped}{lowered}"
    model = "" if asked.model is None else f" of {asked.model}"
    kind = f"{asked.api}{model}, {'streamed' if asked.stream else 'not streamed'}"
    yield "holds", f"{counted(asked.tokens, 'token')} and {counted(asked.requests, 'sequence')} ({kind})"


_SOURCES = {
    "body": "its body",
    "header": "its header",
    "endpoint": "its endpoint",
    "key": "its tenant",
    "engine": "the engine's own priority field",
    "default": "the policy's default",
}


def _by(ahead: AdmittedAhead | None) -> str:
    if ahead is None:
        return "by a request that is not known here"
    return (
        f"by request {ahead.request_id} of tier {ahead.tier} (tenant {ahead.tenant}, {counted(ahead.tokens, 'token')}, "
        f"which arrived at {clock(ahead.arrived_at_s)}): {ahead.because}"
    )


def _how_it_ended(story: Explanation) -> Iterator[tuple[str, str]]:
    admitted, refused, ended = story.admitted, story.refused, story.ended
    if admitted is not None:
        told = "no priority" if admitted.engine_priority is None else f"priority {admitted.engine_priority:g}"
        aged = "" if admitted.aged_to is None else f", aged to the rank of {admitted.aged_to}"
        yield "admitted", f"{_at(story, admitted.admitted_at_s)} at level {admitted.level}{aged}; engine told {told}"
    elif refused is None:
        yield "now", f"{_at(story, story.told_at_s)}: {story.state}"
    if story.answered is not None:
        yield "first byte", f"{_at(story, story.answered.first_byte_at_s)}, status {story.answered.status}"
    if ended is not None and refused is None:
        status = "" if ended.status is None else f", status {ended.status}"
        error = "" if ended.error is None else f", {ended.error}"
        used = counted(ended.tokens_used, "token")
        yield "settled", f"{_at(story, ended.settled_at_s)}: {ended.outcome}{status}{error}, {used} used"
    elif admitted is not None:
        yield "now", f"{_at(story, story.told_at_s)}: still running"
    if refused is not None:
        what = refused.code if refused.status is None else f"{refused.status} {refused.code}"
        yield "refused" if refused.status else "left", f"{_at(story, refused.refused_at_s)}: {what}: {refused.message}"


def _at(story: Explanation, at_s: float) -> str:
    return f"{clock(at_s)}, after {exact_duration(at_s - story.arrived_at_s)}"


def _went_ahead(story: Explanation, wait: WaitDetails) -> list[str]:
    requests, tokens = sum(g.requests for g in wait.groups), sum(g.tokens for g in wait.groups)
    if not requests and not wait.unseen:
        return ["", "No request was admitted while it waited."]
    lines = ["", f"Admitted while it waited: {counted(requests, 'request')}, {counted(tokens, 'token')}"]
    if wait.groups:
        came = {True: "overtook", False: "came first"}
        rows = [[g.tier, came[g.came_later], g.because, f"{g.requests:,}", f"{g.tokens:,}"] for g in wait.groups]
        lines += _table(["tier", "", "because", "requests", "tokens"], rows)
    lines += [f"  and {counted(each.tokens, 'token')} of tier {each.tier}, {each.where}" for each in wait.unseen]
    if wait.first:
        some = "One by one" if requests <= MOST_LISTED else f"The first {MOST_LISTED}"
        heads = ["admitted", "after", "tier", "tenant", "tokens", "arrived", "request"]
        lines += ["", f"{some}:", *_table(heads, [_one(story, each) for each in wait.first[:MOST_LISTED]])]
    return lines


def _one(story: Explanation, ahead: AdmittedAhead) -> list[str]:
    since_s = ahead.arrived_at_s - story.arrived_at_s
    arrived = f"{exact_duration(abs(since_s))} {'later' if ahead.came_later else 'earlier'}"
    after = exact_duration(ahead.admitted_at_s - story.arrived_at_s)
    admitted, tokens = clock(ahead.admitted_at_s), f"{ahead.tokens:,}"
    return [admitted, after, ahead.tier, ahead.tenant, tokens, arrived, ahead.request_id]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as what is in them, figures to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    to_the_right = [column in {"requests", "tokens", "after"} for column in heads]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_the_right, strict=True)
        ).rstrip()
        for row in (heads, *rows)
    ]
