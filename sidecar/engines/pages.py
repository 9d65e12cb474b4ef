"""Pages of an engine, read by GET wherever it runs, and the readers of their formats. No module here opens a socket."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_LONGEST_LINE = 4_096
"""Characters: about three times that of vLLM's `cache_config_info`, which has a label for each setting."""
_MOST_CHARACTERS = 2**17
"""Of the lines of one metric: 500 workers of Dynamo. Longer pages are read that far."""


REFUSED = "connection refused by"
"""Beginning of the message where nothing listens at the engine's address: its process is away."""


class Page(NamedTuple):
    """The response to a GET."""

    status: int
    text: str


class Unread(Exception):
    """A page could not be read, or does not say what it should. The message is one line, for people."""


class NoAnswer(Unread):
    """The engine does not answer: it has not started, or is away."""


class TooSlow(NoAnswer):
    """The engine took the request for the page, and did not answer in time: a busy engine may do so."""


class NotConnected(NoAnswer):
    """No connection to the engine can be made. The message says why, and where the engine should be."""


class Pages(Protocol):
    """An engine's pages. `host` is its app where it runs in this process, None where it is elsewhere."""

    @property
    def host(self) -> object | None:
        """The app that was asked to be served, with what it knows of its engine."""

    async def get(self, path: str) -> Page:
        """One page. Raises NoAnswer where the engine cannot be reached in time."""


@dataclass(frozen=True, slots=True)
class Health:
    """Probes of an engine: its page `path` every `every_s` seconds.

    After `fail` probes in a row that were slow or answered 502, 503 or 504 the engine is down; a refused connection
    counts at once. After `rise` probes in a row that passed it is up again.
    """

    path: str = "/health"
    every_s: float = 2.0
    fail: int = 3
    rise: int = 2


class AskedOnce:
    """Around other pages: keeps the answers to `paths` until the engine is away, for it may come back as another.

    For pages that cost the engine something and never change while it runs. A page that is missing is an answer, too.
    """

    def __init__(self, pages: Pages, paths: Collection[str]) -> None:
        self._pages = pages
        self._paths = frozenset(paths)
        self._answers: dict[str, Page] = {}

    @property
    def host(self) -> object | None:
        """See `Pages.host`."""
        return self._pages.host

    async def get(self, path: str) -> Page:
        """See `Pages.get`."""
        if path in self._answers:
            return self._answers[path]
        try:
            page = await self._pages.get(path)
        except Unread:
            self._answers.clear()
            raise
        if page.status >= 500:  # from a proxy before an engine that is away, or from an engine that is ending
            self._answers.clear()
        elif path in self._paths:
            self._answers[path] = page
        return page


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
    try:
        return mapping(msgspec.json.decode(await find_text(pages, path)))
    except (msgspec.MsgspecError, RecursionError):
        return {}


async def find_text(pages: Pages, path: str) -> str:
    """A page that may be missing; empty where it is. Raises Unread for no answer at all."""
    page = await pages.get(path)
    return page.text if page.status == 200 else ""


class Metrics:
    """The samples of a page in Prometheus' text format, read by prometheus_client.

    Its parser gets only the lines of the metrics that are asked for, each alone, and no long ones. It takes about 30 us
    a line, 30 ms for the page of one vLLM, which is read every second in the event loop that serves requests. Its time
    grows with the square of a line's length: 11 s for a label of 600 KB. And it ends a page at the first bad line.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def __contains__(self, name: str) -> bool:
        return any(True for _ in self._samples(name))

    def has_prefix(self, prefix: str) -> bool:
        """True if the name of any metric begins like this."""
        return any(line.startswith(prefix) for line in self._lines)

    def samples(self, name: str) -> Sequence[Sample]:
        """A metric's samples, none where the page lacks it. Bad lines and values that are not finite are left out."""
        return list(self._samples(name))

    def sum(self, name: str) -> float | None:
        """The sum of a metric's samples, None where there are none."""
        samples = self.samples(name)
        return sum(sample.value for sample in samples) if samples else None

    def count(self, name: str) -> int | None:
        """The value as a whole number that is not negative."""
        value = self.sum(name)
        return None if value is None or not 0 <= value < math.inf else round(value)

    def _samples(self, name: str) -> Iterator[Sample]:
        lines = [line for line in self._lines if line.startswith(name) and len(line) <= _LONGEST_LINE]
        read = bisect.bisect_right(list(accumulate(map(len, lines))), _MOST_CHARACTERS)
        parsed = (sample for line in lines[:read] for sample in _parse(line))
        return (sample for sample in parsed if sample.name == name and math.isfinite(sample.value))


def _parse(line: str) -> Sequence[Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return [sample for family in text_string_to_metric_families(line) for sample in family.samples]
    except (ValueError, IndexError):  # the second where a line is cut short
        return ()


def positive(value: object) -> int | None:
    """A whole number of at least 1, as a page has it; None for anything else: 0 means that it is not known yet."""
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
