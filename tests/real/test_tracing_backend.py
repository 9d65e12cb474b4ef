"""A real tracing backend stores what happened: Arize Phoenix, asked for the spans of an overload.

It is started by `benchmarks/phoenix.py`; `sh .ci/test --backend` installs it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.otlp_file import otlp_file
from benchmarks.phoenix import NotInstalled, Phoenix, phoenix, picture_of, program
from benchmarks.photograph import NoBrowser
from benchmarks.tracing_app import MODEL_CALL
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


def test_an_app_with_the_middleware_has_its_own_spans_in_the_trace_and_the_file_has_them_too(backend: Phoenix) -> None:
    with otlp_file(backend.url) as kept:
        run_overload(replace(backend, url=kept.url), "http/protobuf", is_mounted=True)
    spans = backend.settled_spans(kept.spans)
    worst = starved(by_trace(spans))
    lines = [json.loads(line) for line in kept.lines_of(worst["admission"].trace_id)]

    assert problems(spans) == [], table(worst)
    assert {"admission.starved", MODEL_CALL} < worst.keys()
    scopes = [scope for line in lines for resource in line["resourceSpans"] for scope in resource["scopeSpans"]]
    assert {span["spanId"]: span["name"] for scope in scopes for span in scope["spans"]} == {
        span.span_id: name for name, span in worst.items()
    }


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
        picture = asyncio.run(picture_of(page, "admission.starved", "went ahead"))
    except NoBrowser as missing:
        pytest.skip(str(missing))
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 250_000
