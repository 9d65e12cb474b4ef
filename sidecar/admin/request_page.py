"""Page of one request for people: the story that `sidecar explain --request` prints, as HTML without a script.

Request ids, messages and the names of tiers, tenants and models come from clients and operators: everything is escaped,
and characters that turn the reading around or do not print are shown as their codes. The page's
Content-Security-Policy allows its own style, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from sidecar.admin.operations import routes_for
from sidecar.admin.page_files import headers, text_of
from sidecar.cluster.document import Overview, ReplicaView
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import Explanation, WaitDetails
from sidecar.explain.steps import (
    GROUP_HEADS,
    ONE_HEADS,
    Step,
    admitted_meanwhile,
    group_rows,
    one_row,
    steps,
    unknown_lines,
)
from sidecar.telemetry.logs.formats import one_line

LONGEST_ID = 128
"""A request id that is longer is not taken over from the client."""
MOST_LISTED = 20
"""Requests ahead that the page lists one by one; the table above them counts all."""

_STYLE = text_of("page.css") + text_of("request.css")
HEADERS = headers(_STYLE)
_PAGE = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<link rel="icon" href="data:,">\n'
    "<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
)


def request_routes(builder: ExplanationBuilder, overview: Callable[[], Overview]) -> Sequence[BaseRoute]:
    """`GET /request?id=...`: the id is a parameter, because in a path a browser takes `..` for the folder above."""

    async def page(request: Request) -> Response:
        wanted = request.query_params.get("id", "")[: LONGEST_ID + 1]
        story = builder.explain(wanted) if wanted else None
        text = unknown_page(builder, overview(), wanted) if story is None else story_page(story)
        return HTMLResponse(text.encode("utf-8", "replace"), 404 if story is None else 200, HEADERS)

    return routes_for({"requestPage": page})


def json_link(wanted: str) -> str:
    """The same as JSON, relative to the page."""
    return f"requests?id={quote(wanted, safe='')}"


def page_link(wanted: str) -> str:
    """The page of a request, relative to another page."""
    return f"request?id={quote(wanted, safe='')}"


def story_page(story: Explanation) -> str:
    """The page of a request that is known here."""
    facts = [f"{story.method} {story.path}", f"pool {story.pool}", f"as of {_calendar(story.told_at_s)}"]
    if story.others:
        facts.append(f"the newest of {story.others + 1} requests with this id")
    parts = [
        _header(story.request_id, facts),
        "<main>",
        f'<p id="headline" class="{_mood(story)}">{_sentence(story.conclusion)}</p>',
        _section("What happened", f'<dl class="steps">{"".join(map(_step, steps(story, _clock)))}</dl>'),
        *([] if story.wait is None else [_went_ahead(story, story.wait)]),
        _links(story.request_id),
        "</main>",
    ]
    return _page(story.request_id, parts)


def unknown_page(builder: ExplanationBuilder, overview: Overview, wanted: str) -> str:
    """The page of a request that is not known here: why that may be, and where to ask."""
    others = [one for one in overview.replicas if one.replica != overview.replica]
    title = wanted or "no id"
    facts = [f"pool {overview.pool}", f"as of {_calendar(overview.at_s)}"]
    said = (
        unknown_request(builder, wanted)
        if wanted
        else "the address names no request: write /request?id= and then the id"
    )
    parts = [_header(title, facts), "<main>", f'<p id="headline" class="plain">{_sentence(said)}</p>']
    if builder.is_shared and wanted:
        listed = "".join(f"<li>{_shown(_name(one))}</li>" for one in others)
        where = "Ask the admin port of each other replica for the same page"
        text = f'<p>{where}:</p><ul class="plainly">{listed}</ul>' if others else "<p>No other replica is seen.</p>"
        parts.append(_section("Other replicas", text))
    return _page(title, [*parts, _links(None), "</main>"])


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


def _went_ahead(story: Explanation, wait: WaitDetails) -> str:
    parts = [_table(GROUP_HEADS, group_rows(wait), "because")] if wait.groups else []
    unknown = "".join(f"<li>{_shown(line)}</li>" for line in unknown_lines(wait))
    parts += [f'<ul class="plainly">{unknown}</ul>'] if unknown else []
    if wait.first:
        listed = wait.first[:MOST_LISTED]
        all_of_them = sum(group.requests for group in wait.groups) <= len(listed)
        parts.append(f"<h3>{'One by one' if all_of_them else f'The first {len(listed)}'}</h3>")
        parts.append(_table(ONE_HEADS, [one_row(story, each, _clock) for each in listed], "request"))
    return _section(admitted_meanwhile(wait), "".join(parts))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], long: str) -> str:
    """`long` is the column that takes a line of its own on a phone; the column `request` has links."""
    kinds = ["number" if name in _FIGURES else "long" if name == long else "" for name in heads]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, heads, kinds, row))}</tr>" for row in rows)
    return f'<table class="plain cards"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


_FIGURES = frozenset(("tokens", "requests", "after"))


def _cell(head: str, kind: str, text: str) -> str:
    content = _link(text) if head == "request" else _shown(text)
    return f'<td class="{kind}" data-label="{escape(head)}">{content}</td>'


def _step(step: Step) -> str:
    link = "" if step.request_id is None else f" ({_link(step.request_id, 'its own story')})"
    return f"<dt>{_shown(step.label)}</dt><dd>{_shown(step.said)}{link}</dd>"


def _link(wanted: str, text: str | None = None) -> str:
    return f'<a class="id" href="{escape(page_link(wanted))}">{_shown(wanted if text is None else text)}</a>'


def _links(wanted: str | None) -> str:
    as_json = "" if wanted is None else f'<a href="{escape(json_link(wanted))}">the same as JSON</a>'
    return f'<p class="links"><a href="./">the whole pool</a>{as_json}</p>'


def _header(title: str, facts: Sequence[str]) -> str:
    shown = " \u00b7 ".join(map(_shown, facts))
    return f'<header><h1>Request <span class="id">{_shown(title)}</span></h1><p id="facts">{shown}</p></header>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_shown(title)}</h2>{content}</section>"


def _page(title: str, parts: Sequence[str]) -> str:
    return _PAGE.format(title=_shown(f"Request {title}"), style=_STYLE, body="\n".join(parts))


def _sentence(text: str) -> str:
    return _shown(f"{text[:1].upper()}{text[1:]}.")


def _shown(text: str) -> str:
    """Text as markup."""
    return escape(one_line(text))


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _calendar(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
