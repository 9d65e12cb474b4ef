"""Writes the lists of docs/http.md and docs/telemetry.md from the declarations: `python docs/lists.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

from sidecar import errors
from sidecar.admin.operations import OPERATIONS
from sidecar.cluster.document import PoolFigures, TierShare, TierWaits
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import EngineDocument
from sidecar.figures import SECONDS, Figure, readings
from sidecar.lengths.estimator import EngineSizesDocument
from sidecar.telemetry.metrics.histograms import DURATIONS
from sidecar.telemetry.metrics.instruments import CHANGES, TENANT_TOKENS_HELD, Counters
from sidecar.telemetry.metrics.tenants import TenantCounts

DOCS = Path(__file__).parent
_LIST = re.compile(r"(<!-- list: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_UNIT = re.compile(r"^(Tokens|Requests) ")


def error_rows() -> Iterator[str]:
    """Every error: the first paragraph of its docstring says what happened."""
    for kind in sorted(_kinds(), key=lambda kind: (kind.status, kind.code)):
        happened = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        yield f"- {kind.status} `{kind.code}`: {' '.join(happened.split())}"


def _kinds(of: type[errors.AdmissionError] = errors.AdmissionError) -> Iterator[type[errors.AdmissionError]]:
    for kind in of.__subclasses__():
        yield from _kinds(kind)
        if "code" in vars(kind):
            yield kind


def route_rows() -> Iterator[str]:
    """Every route of the admin port."""
    for operation in OPERATIONS:
        mark = ("*" if operation.is_of_a_pool else "") + (" (open)" if operation.is_open else "")
        yield f"- `{operation.method} {operation.path}`{mark}: {operation.summary}"


OF_DOCUMENTS: Mapping[type, tuple[str, ...]] = {
    Counters: (),
    TenantCounts: ("admission.tenant",),
    TierWaits: ("admission.tier",),
    TierShare: ("admission.tier",),
    PoolFigures: (),
    EngineDocument: ("admission.engine",),
    EngineSizesDocument: ("admission.engine",),
    EngineSpeedDocument: ("admission.engine",),
}
"""Documents with figures, each with the labels that its series have beside those of the figures."""
TOPICS = {
    "sizes": re.compile(r"admission\.(lease|output|engine\.preemptions)"),
    "guard": re.compile(r"admission\.(guard|slo\.hold)"),
    "gain": re.compile(r"admission\.(gain|slo\.requests|engine\.(time|prediction_error))"),
    "engines": re.compile(r"admission\.(engine\.(?!up)|replays|prompt|prefix|no_engine_fits)"),
    "others": re.compile(r"admission\.(observed|unguarded)"),
    "metrics": re.compile(""),
}
"""Which list has a metric: the first that fits its name."""


def metric_rows(topic: str) -> Iterator[str]:
    """The metrics of one topic: name, kind unless it is a gauge, unit, labels and meaning.

    An amount's two metrics, its tokens and its requests, are one row.
    """
    of_topic = (row for row in _metrics() if next(one for one, names in TOPICS.items() if names.match(row[0])) == topic)
    for meaning, rows in groupby(of_topic, lambda row: _UNIT.sub("Tokens and requests ", row[2])):
        (_, traits, alone), *requests = same = list(rows)
        names = ", ".join(f"`{name}`" for name, _, _ in same)
        listed = f" ({', '.join(traits)})" if traits else ""
        yield f"- {names}{listed}: {meaning if requests else alone}"


def _metrics() -> Iterator[tuple[str, list[str], str]]:
    for duration in DURATIONS:
        yield duration.name, ["histogram", "s", *_quoted(duration.labels)], duration.description
    for document, labels in OF_DOCUMENTS.items():
        for reading in readings(document):
            yield _row(reading.figure, labels)
    for figure in (TENANT_TOKENS_HELD, CHANGES):
        yield _row(figure, ())


def _row(figure: Figure, labels: tuple[str, ...]) -> tuple[str, list[str], str]:
    traits = ["counter"] * figure.is_counter + ["s"] * (figure.unit == SECONDS)
    return figure.name, [*traits, *_quoted((*labels, *figure.labels))], figure.help


def _quoted(labels: Iterable[str]) -> list[str]:
    return [f"`{label}`" for label in labels]


LISTS: Mapping[str, Callable[[], Iterable[str]]] = {
    "errors": error_rows,
    "routes": route_rows,
    **{topic: partial(metric_rows, topic) for topic in TOPICS},
}
PAGES = (DOCS / "http.md", DOCS / "telemetry.md")


def current(page: Path) -> str:
    """The page with its lists as the declarations have them."""
    text = page.read_text(encoding="utf-8")
    return _LIST.sub(lambda found: found[1] + "\n".join([*LISTS[found[2]](), found[3]]), text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(current(page), encoding="utf-8")
