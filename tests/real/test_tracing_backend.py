"""A real tracing backend stores what happened: Arize Phoenix, asked for the spans of an overload.

It is started by `benchmarks/phoenix.py`; `sh .ci/test --backend` installs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.phoenix import NotInstalled, Phoenix, phoenix, picture_of, program
from benchmarks.photograph import NoBrowser
from benchmarks.tracing_backend import TIERS, by_trace, problems, run_overload, scenario, starved, table

pytestmark = pytest.mark.backend


@pytest.fixture
def backend() -> Iterator[Phoenix]:
    try:
        program()
    except NotInstalled as missing:
        pytest.skip(str(missing))
    with phoenix() as running:
        yield running


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_backend_has_every_span_as_it_happened(backend: Phoenix, protocol: str) -> None:
    run_overload(backend, protocol)
    spans = backend.settled_spans(3 * len(scenario()))

    assert problems(spans) == [], table(starved(by_trace(spans)))
    assert {span.name for span in spans} == {
        *TIERS, "admission", "admission.queued", "admission.starved", "engine",
    }  # fmt: skip


def test_a_problem_is_noticed(backend: Phoenix) -> None:
    run_overload(backend, "http/protobuf")
    spans = backend.settled_spans(3 * len(scenario()))

    assert problems([span for span in spans if span.name != "admission.starved"]) != []
    assert problems([span for span in spans if span.trace_id != spans[0].trace_id]) != []


def test_starvation_can_be_seen_on_the_backends_page(backend: Phoenix) -> None:
    run_overload(backend, "http/protobuf")
    worst = starved(by_trace(backend.settled_spans(3 * len(scenario()))))
    page = backend.page_of(worst["admission"].trace_id)
    try:
        picture = asyncio.run(picture_of(page, "admission.starved", "admission.served_ahead.high"))
    except NoBrowser as missing:
        pytest.skip(str(missing))
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 250_000
