"""Bytes at a sidecar on a real socket: answered, or refused in our shape; nothing logged, nothing left, nothing
hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.corpus import HTTP, names
from tests.fuzz.fuzzed_sidecar import OURS, FuzzedSidecar, fuzzed_sidecar
from tests.fuzz.requests import BODIES, WIRE, mutated, scopes
from tests.fuzz.scale import cases, tried
from tests.support.each import each
from tests.support.middleware import App, Caller, Guarded, policy

AT_ONCE = 20
"""Inputs of one example: each has a connection of its own."""
ENGINES = ("none", "vllm", "sglang", "tensorrt-llm", "dynamo")
POLICIES = {name: policy(engine=name, max_body="8KiB") for name in ENGINES}
SOME_WIRE = st.lists(WIRE, min_size=AT_ONCE, max_size=AT_ONCE)


@pytest.fixture(scope="module")
def sidecar() -> Iterator[FuzzedSidecar]:
    with fuzzed_sidecar() as fuzzed:
        yield fuzzed


@pytest.fixture(scope="module")
def patient_sidecar() -> Iterator[FuzzedSidecar]:
    """One of which an answer can be foretold, however busy the machine is."""
    with fuzzed_sidecar(quick_s=1.0) as fuzzed:
        yield fuzzed


@each("file", HTTP, ids=names(HTTP))
def test_what_was_found_once_stays_mended(patient_sidecar: FuzzedSidecar, file: Path) -> None:
    """The status of its last answer is the beginning of its name."""
    (answers,) = patient_sidecar.check([file.read_bytes()])
    assert answers[-1].status == int(file.stem[:3])


def test_the_check_sees_what_it_is_there_for() -> None:
    """A sidecar that leaks, fails or answers in another shape would be found: a check that cannot fail is none."""
    request = b"GET / HTTP/1.1\r\nhost: sidecar\r\nconnection: close\r\n\r\n"
    for mutant in (_raises, _is_html, _is_a_503_without_a_date):
        with fuzzed_sidecar(mutant) as fuzzed, pytest.raises((AssertionError, ValueError)):
            fuzzed.check([request])


async def _raises(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("a defect")


async def _is_html(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 400, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"<>"})


async def _is_a_503_without_a_date(scope: Any, receive: Any, send: Any) -> None:
    body = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.long
@cases(few=10, many=1000)
@given(inputs=SOME_WIRE)
def test_whatever_comes_on_the_wire(sidecar: FuzzedSidecar, inputs: list[bytes]) -> None:
    tried["on the wire"] += len(inputs)
    sidecar.check(inputs)


@pytest.mark.long
@cases(few=200, many=15_000)
@given(scopes(), BODIES | mutated(BODIES) | st.binary(max_size=60), st.sampled_from(ENGINES))
def test_whatever_a_lenient_server_hands_over(scope: dict[str, Any], body: bytes, engine: str) -> None:
    """Mounted, the sidecar is behind somebody else's parser."""
    tried["handed over by a lenient server"] += 1
    guarded = Guarded(App(), POLICIES[engine])
    caller = Caller(guarded.sidecar, body, raw_path=scope["path"].encode(), **scope)

    async def run() -> None:
        await asyncio.wait_for(caller.run(), 20)
        await guarded.nothing_left()

    asyncio.run(run())
    assert caller.status in {200, *OURS}
    if caller.status != 200:
        assert caller.json["error"]["message"]
        assert json.dumps(caller.json).isascii()
    for name, value in caller.sent[0]["headers"]:
        assert not {b"\r", b"\n", b"\0"} & {bytes([byte]) for byte in name + value}
