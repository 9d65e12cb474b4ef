"""How a request fared at a running door, and who went ahead of it: asked on its admin port, told as text."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from sidecar.admin_token import HOW_TO_SET, token_header
from sidecar.cli.output import STANDARD_OUTPUT, write_json
from sidecar.cli.story_text import text
from sidecar.engines.reading import Unread
from sidecar.live.story import Story
from sidecar.load.pages import HttpPages


class _NoStory(Exception):
    """There is none; the message is one line that says why."""


def run(wanted: str, admins: Sequence[str], json_target: str | None) -> int:
    """Returns 0 where a door knows the request, else 1, with a line for each that does not."""
    story, refusals = asyncio.run(_ask(admins, wanted))
    if story is None:
        print("\n".join(f"sidecar: {refusal}" for refusal in refusals), file=sys.stderr)
        return 1
    if json_target != STANDARD_OUTPUT:
        print(text(story))
    return 0 if write_json(json_target, story) else 1


async def _ask(admins: Sequence[str], wanted: str) -> tuple[Story | None, list[str]]:
    """The first story that is found, one door after the other, and what was said instead before that."""
    refusals: list[str] = []
    async with aiohttp.ClientSession() as session:
        for admin in admins:
            try:
                return await _story(session, admin, wanted), refusals
            except (_NoStory, Unread) as refusal:  # noqa: PERF203  the next replica may have it
                refusals.append(str(refusal))
    return None, refusals


async def _story(session: aiohttp.ClientSession, admin: str, wanted: str) -> Story:
    if urlsplit(admin).scheme not in {"http", "https"} or not urlsplit(admin).netloc:
        raise _NoStory(f"--admin: {admin!r} is not a URL; write one such as http://127.0.0.1:9464")
    page = await HttpPages(session, admin, _headers()).get(f"/requests/{quote(wanted, safe='')}")
    if page.status == HTTPStatus.UNAUTHORIZED:
        raise _NoStory(f"{admin} needs its admin token; {HOW_TO_SET}")
    try:
        if page.status == 200:
            return msgspec.json.decode(page.text, type=Story)
        error = msgspec.json.decode(page.text, type=_Unknown).error
    except msgspec.MsgspecError:
        raise _NoStory(
            f"{admin} answered {page.status}, but not as a door's admin port does; "
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
