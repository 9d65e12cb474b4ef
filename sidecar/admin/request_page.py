"""Page of one request for people: the story that `sidecar explain --request` prints, as HTML without a script.

Request ids, messages and the names of tiers, tenants and models come from clients and operators: the template
`request.html` escapes everything. The page's Content-Security-Policy allows its own style, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from sidecar.admin.answers import headers, read_text
from sidecar.admin.operations import routes_for
from sidecar.cluster.document import Overview, ReplicaView
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import Explanation, WaitDetails
from sidecar.explain.steps import (
    GROUP_HEADS,
    ONE_HEADS,
    admitted_meanwhile,
    group_rows,
    one_row,
    steps,
    unknown_lines,
)
from sidecar.templates import render

LONGEST_ID = 128
"""A request id that is longer is not taken over from the client."""
MOST_LISTED = 20
"""Requests ahead that the page lists one by one; the table above them counts all."""

_STYLE = read_text("page.css") + read_text("request.css")
HEADERS = headers(_STYLE)


def request_routes(builder: ExplanationBuilder, overview: Callable[[], Overview]) -> Sequence[BaseRoute]:
    """`GET /request?id=...`: the id is a parameter, because in a path a browser takes `..` for the folder above."""

    async def page(request: Request) -> Response:
        wanted = request.query_params.get("id", "")[: LONGEST_ID + 1]
        story = builder.explain(wanted) if wanted else None
        make = partial(unknown_page, builder, overview(), wanted) if story is None else partial(story_page, story)
        text = await run_in_threadpool(make)  # the first page imports Jinja2, which takes tens of milliseconds
        return HTMLResponse(text.encode("utf-8", "replace"), 404 if story is None else 200, HEADERS)

    return routes_for({"requestPage": page})


def json_link(wanted: str) -> str:
    """Link to the same document as JSON, relative to the page."""
    return f"requests?id={quote(wanted, safe='')}"


def page_link(wanted: str) -> str:
    """The page of a request, relative to another page."""
    return f"request?id={quote(wanted, safe='')}"


def story_page(story: Explanation) -> str:
    """The page of a request that is known here."""
    facts = [f"{story.method} {story.path}", f"pool {story.pool}", f"as of {_calendar(story.told_at_s)}"]
    if story.others:
        facts.append(f"the newest of {story.others + 1} requests with this id")
    return _page(
        story.request_id,
        facts,
        story.conclusion,
        mood=_mood(story),
        steps=list(steps(story, _clock)),
        wait=None if story.wait is None else _went_ahead(story, story.wait),
        as_json=json_link(story.request_id),
    )


def unknown_page(builder: ExplanationBuilder, overview: Overview, wanted: str) -> str:
    """The page of a request that is not known here: why that may be, and where to ask."""
    others = [one for one in overview.replicas if one.replica != overview.replica]
    title = wanted or "no id"
    facts = [f"pool {overview.pool}", f"as of {_calendar(overview.at_s)}"]
    explanation = (
        unknown_request(builder, wanted)
        if wanted
        else "the address names no request: write /request?id= and then the id"
    )
    is_elsewhere = builder.is_shared and bool(wanted)
    return _page(
        title,
        facts,
        explanation,
        others=[_name(one) for one in others] if is_elsewhere else None,
    )


def unknown_request(builder: ExplanationBuilder, wanted: str) -> str:
    """Why a request is not known in this process, in a sentence."""
    minutes = builder.journal.retention_s / 60
    sentence = (
        f"no request with the id or trace id {wanted!r} is known here: this process keeps what waits or runs, and "
        f"for at most {minutes:g} minutes the last that ended, since it started"
    )
    return f"{sentence}; the pool is shared, so ask the other replicas, too" if builder.is_shared else sentence


def _name(replica: ReplicaView) -> str:
    return f"{replica.host} {replica.replica[:8]}"


def _mood(story: Explanation) -> str:
    if story.state in ("waiting", "arriving"):
        return "waits"
    return "calm" if story.state in ("running", "completed") else "alarm"


def _went_ahead(story: Explanation, wait: WaitDetails) -> Mapping[str, object]:
    listed = wait.first[:MOST_LISTED]
    return {
        "title": admitted_meanwhile(wait),
        "groups": group_rows(wait) if wait.groups else [],
        "unknown": unknown_lines(wait),
        "first": [one_row(story, each, _clock) for each in listed],
        "is_all": sum(group.requests for group in wait.groups) <= len(listed),
    }


def _page(title: str, facts: Sequence[str], conclusion: str, **more: object) -> str:
    plain = {"mood": "plain", "steps": (), "wait": None, "others": None, "as_json": None}
    return render(
        "request.html",
        title=title,
        facts=facts,
        conclusion=conclusion,
        style=_STYLE,
        page_link=page_link,
        group_heads=GROUP_HEADS,
        one_heads=ONE_HEADS,
        **{**plain, **more},
    )


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _calendar(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
