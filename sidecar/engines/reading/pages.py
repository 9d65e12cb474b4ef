"""How an engine is asked about itself: by GET, wherever it runs. Nothing here knows how a page travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec


class Page(NamedTuple):
    """What a GET brought."""

    status: int
    text: str


class Unread(Exception):
    """A page could not be read, or does not say what it should. The message is one line, for people."""


class NoAnswer(Unread):
    """Nobody answers: the engine has not started, or is away."""


class Pages(Protocol):
    """An engine's pages. `host` is its app where it runs in this process, None where it is elsewhere."""

    @property
    def host(self) -> object | None:
        """The app that was asked to be served, with what it knows of its engine."""

    async def get(self, path: str) -> Page:
        """One page. Raises NoAnswer where the engine cannot be reached in time."""


async def read_text(pages: Pages, path: str) -> str:
    """A page that must be there. Raises Unread."""
    page = await pages.get(path)
    if page.status != 200:
        raise Unread(f"GET {path} answered {page.status}")
    return page.text


async def read_json(pages: Pages, path: str) -> Any:
    """A page of JSON that must be there. Raises Unread."""
    text = await read_text(pages, path)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise Unread(f"GET {path} is not JSON") from None


async def find_json(pages: Pages, path: str) -> Mapping[str, Any]:
    """A page of JSON that may be missing; empty where it is, or is no object. Raises Unread for no answer at all."""
    page = await pages.get(path)
    if page.status != 200:
        return {}
    try:
        found = msgspec.json.decode(page.text)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


async def find_text(pages: Pages, path: str) -> str:
    """A page that may be missing; empty where it is. Raises Unread for no answer at all."""
    page = await pages.get(path)
    return page.text if page.status == 200 else ""


def positive(value: object) -> int | None:
    """A whole number of at least 1, as a page has it; None for anything else: 0 stands for what is not known yet."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < 2**53:
        return None
    return int(value)


def mapping(value: object) -> Mapping[str, Any]:
    """A JSON object, empty for anything else."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> Sequence[Mapping[str, Any]]:
    """The objects of a JSON list, none for anything else."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def total(values: Sequence[int | None]) -> int | None:
    """The sum, None where one is not known or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
