"""Requests of the generic API: sizes that the policy says, uploads that pass as they come, and their cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import AdmissionMiddleware
from sidecar.admission.answer import CostReader
from sidecar.admission.client import READ_AHEAD, UploadChannel
from sidecar.events import Admitted, Classified, Refused, Settled
from sidecar.policy.endpoint import CostPlace
from sidecar.proxy.proxy import ReverseProxy
from tests.admission.models import served_models
from tests.support.middleware import App, Caller, Recorder, recorded
from tests.support.redis_servers import free_port
from tests.support.serving import Served, serving
from tests.support.waiting import until
from tests.support.wire import connected, exchange, post

pytestmark = pytest.mark.anyio
UPLOAD = "/v1/audio/transcriptions"
POLICY = f"""\
engine: vllm
capacity: {{tokens: 10k, requests: 2}}
tiers:
  high: {{queue: {{max_wait: 60s}}}}
  low: {{queue: {{max_wait: 60s}}}}
default_tier: low
anonymous: high
max_body: 4MiB
endpoints:
  /v1/chat/completions: {{}}
  /v1/rerank: {{api: generic, tokens: {{base: 100, per_kilobyte: 250}}, cost: {{member: total_tokens}}}}
  {UPLOAD}: {{api: generic, tokens: {{base: 1000, per_kilobyte: 1}}, cost: {{header: x-cost}}}}
"""
FORM = {"content-type": "multipart/form-data; boundary=b"}


def written(policy: Path, more: str) -> None:
    """The file with these keys, too."""
    policy.write_text(POLICY + more)


class Stack:
    """A server with the middleware, its events, and the app."""

    def __init__(self, served: Served, app: Any, middleware: AdmissionMiddleware, recorder: Recorder) -> None:
        self.url, self.port, self.app, self.middleware, self.recorder = (
            served.url,
            served.port,
            app,
            middleware,
            recorder,
        )

    def held(self) -> tuple[int, int]:
        """Tokens and requests."""
        state: Any = self.middleware.controller.pool.state()
        return tuple(sum(tier["held"][name] for tier in state["tiers"]) for name in ("tokens", "requests"))  # type: ignore[return-value]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def bounded(policy: Path) -> Path:
    policy.write_text(POLICY.replace("max_body: 4MiB", "max_body: 1MiB\nmax_upload: 2MiB"))
    return policy


@pytest.fixture
def observing(policy: Path) -> Path:
    policy.write_text("mode: observe\n" + POLICY)
    return policy


@asynccontextmanager
async def stack(policy: Path, app: Any) -> AsyncIterator[Stack]:
    middleware = AdmissionMiddleware(app, policy)
    recorder = recorded(middleware.controller)
    async with serving(middleware) as served:
        yield Stack(served, app, middleware, recorder)
    if not middleware.controller.is_observing:
        recorder.check()


async def pieces(size: int, piece: bytes = b"x" * 1024) -> AsyncIterator[bytes]:
    for _ in range(size // len(piece)):
        yield piece
        await anyio.lowlevel.checkpoint()


class TestJson:
    async def test_it_holds_what_the_policy_says_and_settles_at_the_cost_of_its_answer(self, policy: Path) -> None:
        app = App(answer=b'{"results": [], "usage": {"prompt_tokens": 3, "total_tokens": 77}}')
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            body = b'{"model": "m", "query": "q", "documents": ["' + b"d" * 2000 + b'"]}'
            answer = await client.post("/v1/rerank", content=body, headers={"x-priority": "high"})
            assert answer.status_code == 200
            assert answer.headers["x-admission-tier"] == "high"
            (story,) = it.recorder.stories
            assert story.one(Classified).tokens == 100 + 2 * 250
            assert story.one(Classified).model == "m"
            assert story.one(Admitted).engine_priority is None  # the engine's own queue hears nothing of it
            assert story.one(Settled).tokens_used == 77
            assert app.seen[0].body == body
            assert it.held() == (0, 0)

    async def test_a_priority_for_the_engine_never_passes(self, policy: Path) -> None:
        app = App()
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            for body in (
                b'{"query": "q", "priority": 0.5}',
                b'{"priority": "high", "nvext": {"priority": 9}, "a": [1]}',
            ):
                assert (await client.post("/v1/rerank", content=body)).status_code == 200
            assert [sorted(seen.json) for seen in app.seen] == [["query"], ["a", "nvext"]]
            twice = await client.post("/v1/rerank", content=b'{"priority": 1, "priority": 0}')
            assert twice.status_code == 400
            assert len(app.seen) == 2

    @pytest.mark.parametrize("body", [b"", b"{", b'{"a": \xff}', b"[1, 2", b'{"model": 5}'])
    async def test_what_is_no_json_is_refused(self, policy: Path, body: bytes) -> None:
        async with stack(policy, App()) as it, httpx2.AsyncClient(base_url=it.url) as client:
            answer = await client.post("/v1/rerank", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_body"

    async def test_a_list_passes_as_it_is(self, policy: Path) -> None:
        app = App()
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            assert (await client.post("/v1/rerank", content=b' ["a", "b"]')).status_code == 200
            assert app.seen[0].body == b' ["a", "b"]'


class TestUploads:
    async def test_it_is_sized_by_its_length_and_passes_byte_by_byte(self, policy: Path) -> None:
        app = App()
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            body = bytes(range(256)) * 4 * 1024
            answer = await client.post(UPLOAD, content=body, headers=FORM)
            assert answer.status_code == 200
            (story,) = it.recorder.stories
            assert story.one(Classified).tokens == 1000 + 1024
            assert app.seen[0].body == body
            assert it.held() == (0, 0)

    async def test_the_app_has_its_beginning_before_the_client_has_sent_its_end(self, policy: Path) -> None:
        first, go_on = anyio.Event(), anyio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            assert (await receive())["body"]
            first.set()
            while (await receive()).get("more_body", False):
                pass
            await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Cost", b"4321")]})
            await send({"type": "http.response.body", "body": b"{}"})

        async def body() -> AsyncIterator[bytes]:
            yield b"x" * 1024
            await first.wait()
            yield b"y" * 1024

        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            headers = {**FORM, "content-length": "2048"}
            assert (await client.post(UPLOAD, content=body(), headers=headers, timeout=5)).status_code == 200
            go_on.set()
            assert it.recorder.stories[0].one(Settled).tokens_used == 4321

    async def test_one_without_a_length_and_one_that_is_too_large_are_refused(self, policy: Path) -> None:
        app = App()
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            chunked = await client.post(UPLOAD, content=pieces(2048), headers=FORM)
            assert chunked.status_code == 400
            assert "content-length" in chunked.json()["error"]["message"]
            too_large = await client.post(UPLOAD, content=b"x" * 5 * 2**20, headers=FORM)
            assert too_large.status_code == 413
            assert not app.seen

    async def test_uploads_have_a_bound_of_their_own_and_json_that_is_read_does_not_share_it(
        self, bounded: Path
    ) -> None:
        app = App()
        async with stack(bounded, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            assert (await client.post(UPLOAD, content=b"x" * 2 * 2**20, headers=FORM)).status_code == 200
            too_large = await client.post(UPLOAD, content=b"x" * (2 * 2**20 + 1), headers=FORM)
            assert too_large.status_code == 413
            assert "2097152 bytes allowed" in too_large.json()["error"]["message"]
            for path in (UPLOAD, "/v1/rerank"):
                body = b'{"a": "' + b"x" * 2**20 + b'"}'
                assert (await client.post(path, content=body)).status_code == 413
            assert len(app.seen) == 1

    async def test_while_it_waits_little_of_it_is_read(self, policy: Path) -> None:
        app = App(is_held=True)
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url, timeout=60) as client:
            holders = [asyncio.ensure_future(client.post("/v1/rerank", content=b"{}")) for _ in range(2)]
            await until(lambda: it.held()[1] == 2)
            body = b"z" * (3 * 2**20)
            waits = asyncio.ensure_future(client.post(UPLOAD, content=body, headers=FORM))
            await until(lambda: len(it.recorder.stories) == 3)
            await anyio.sleep(0.3)
            (handler,) = (one for one in it.middleware.controller.watchdog._watched if getattr(one, "_upload", None))
            assert 0 < handler._upload._ahead_bytes < READ_AHEAD + 128 * 1024  # type: ignore[attr-defined]
            app.release(3)
            assert (await waits).status_code == 200
            assert app.seen[-1].body == body
            await asyncio.gather(*holders)

    async def test_a_client_that_leaves_while_a_small_one_waits_is_noticed(self, policy: Path) -> None:
        app = App(is_held=True)
        async with stack(policy, app) as it, httpx2.AsyncClient(base_url=it.url, timeout=60) as client:
            holders = [asyncio.ensure_future(client.post("/v1/rerank", content=b"{}")) for _ in range(2)]
            await until(lambda: it.held()[1] == 2)
            async with connected(it.port) as (_, writer):
                writer.write(post(UPLOAD, b"x" * 100, "content-type: audio/wav", close=False))
                await until(lambda: it.middleware.controller.pool.state()["waiting"] == 1)
            await until(lambda: it.middleware.controller.pool.state()["waiting"] == 0)
            assert it.recorder.stories[-1].one(Refused).code == "client_left"
            app.release(2)
            await asyncio.gather(*holders)

    async def test_one_that_comes_too_slowly_gives_its_room_back(self, policy: Path) -> None:
        written(policy, "body_timeout: 1s\n")
        async with stack(policy, App()) as it, connected(it.port) as (reader, writer):
            writer.write(post(UPLOAD, b"x" * 1000, "content-type: audio/wav")[:-900])
            await until(lambda: it.held()[1] == 1)
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"did not arrive within 1 s" in answer
            assert it.held() == (0, 0)
            assert it.recorder.stories[0].one(Settled).error == "body_timeout"

    async def test_what_still_comes_of_one_that_is_too_late_is_read_before_the_answer_ends(self, policy: Path) -> None:
        """At its end the server closes the connection, and a client that still sends would lose the answer."""
        written(policy, "body_timeout: 1s\n")
        middleware = AdmissionMiddleware(App(), policy)
        headers = [(b"content-type", b"audio/wav"), (b"content-length", b"%d" % (READ_AHEAD + 2))]
        caller = Caller(middleware, path=UPLOAD, headers=headers)
        caller.incoming.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
        request = caller.begin()
        await until(lambda: len(caller.sent) == 2)
        assert (caller.status, caller.sent[-1]["more_body"]) == (408, True)
        caller.incoming.put_nowait({"type": "http.request", "body": b"x" * READ_AHEAD, "more_body": True})
        caller.incoming.put_nowait({"type": "http.request", "body": b"x", "more_body": False})
        await request
        assert caller.incoming.empty()
        assert caller.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    async def test_json_is_read_whatever_its_path_and_a_form_only_where_it_is_generic(self, policy: Path) -> None:
        app = App()
        async with stack(policy, app) as it:
            answer = await exchange(it.port, post("/v1/chat/completions", b"--b", "content-type: multipart/form-data"))
            assert answer.startswith(b"HTTP/1.1 400")
            answer = await exchange(it.port, post(UPLOAD, b'{"priority": 9}', "content-type: application/json"))
            assert answer.startswith(b"HTTP/1.1 400")  # 9 is no tier: so it was read
            assert not app.seen


class TestBeforeTheProxy:
    async def test_an_upload_reaches_the_engine_as_it_is(self, policy: Path) -> None:
        engine = App()
        body = bytes(range(256)) * 4 * 512
        async with (
            serving(engine) as there,
            stack(policy, ReverseProxy(there.url)) as it,
            httpx2.AsyncClient(base_url=it.url) as client,
        ):
            answer = await client.post(UPLOAD, content=body, headers=FORM)
            assert answer.status_code == 200
            assert body in [seen.body for seen in engine.seen]
            assert engine.seen[-1].all(b"content-length") == [b"%d" % len(body)]
            assert it.held() == (0, 0)

    async def test_an_engine_that_is_away_gets_it_whole_when_it_is_back(self, policy: Path) -> None:
        engine, port = App(), free_port()
        async with (
            stack(policy, ReverseProxy(f"http://127.0.0.1:{port}")) as it,
            httpx2.AsyncClient(base_url=it.url, timeout=60) as client,
        ):
            it.middleware.controller.pool.pause(None)  # admitted all the same
            body = b"s" * 100_000
            waits = asyncio.ensure_future(client.post(UPLOAD, content=body, headers=FORM))
            await until(lambda: it.recorder.stories and "Preempted" in it.recorder.stories[0].kinds)
            async with serving(engine, port=port):
                assert (await waits).status_code == 200
                assert body in [seen.body for seen in engine.seen]


class TestDryRun:
    async def test_an_upload_passes_unread(self, observing: Path) -> None:
        app = App()
        async with stack(observing, app) as it, httpx2.AsyncClient(base_url=it.url) as client:
            body = b"x" * 2**20
            answer = await client.post(UPLOAD, content=body, headers=FORM)
            assert answer.headers["x-admission-mode"] == "observe"
            assert answer.headers["x-admission-tier"] == "high"
            assert app.seen[0].body == body
            assert it.recorder.stories[0].one(Classified).tokens == 1000 + 1024

    async def test_with_models_it_passes_unread_too(self, tmp_path: Path) -> None:
        generic = f"{{{UPLOAD}: {{api: generic, tokens: 10}}}}"
        async with served_models(tmp_path, "{m: {}}", 1, mode="observe", endpoints=generic) as it:
            assert it.client._base_url is not None
            async with connected(it.client._base_url.port or 0) as (reader, writer):
                writer.write(post(UPLOAD, b"x" * 1000, "content-type: audio/wav")[:-900])
                answer = await asyncio.wait_for(
                    reader.readuntil(b"\r\n\r\n"), 5
                )  # of the engine, which has no such path
        assert b"x-admission-mode: observe" in answer
        assert b"x-admission-tier: normal" in answer


def parts(body: bytes, cuts: list[int]) -> Iterator[bytes]:
    at = 0
    for cut in sorted(min(cut, len(body)) for cut in cuts):
        yield body[at:cut]
        at = cut
    yield body[at:]


class TestCost:
    @given(
        st.integers(0, 10**12 - 1),
        st.binary(max_size=40),
        st.binary(max_size=40),
        st.lists(st.integers(0, 120), max_size=6),
    )
    def test_a_member_is_found_however_the_answer_is_cut(
        self, cost: int, before: bytes, after: bytes, cuts: list[int]
    ) -> None:
        body = before.replace(b'"', b"'") + b'"total_tokens" : %d}' % cost + after.replace(b'"', b"'")
        reader = CostReader(CostPlace(member=b"total_tokens"))
        chunks = list(parts(body, cuts))
        for place, chunk in enumerate(chunks):
            reader.feed({"type": "http.response.body", "body": chunk, "more_body": place < len(chunks) - 1})
        assert reader.tokens == cost

    @pytest.mark.parametrize(
        "body",
        [
            b'"total_tokens": -5',
            b'"total_tokens": 1.5',
            b'"total_tokens": 1e9',
            b'"total_tokens": 9999999999999',
            b'"total_tokens": 1234567890.5',
            b'"total_tokens": "12"',
            b"{}",
        ],
    )
    @pytest.mark.parametrize("after", [b"", b', "a": 1}', b', "id": "0123456789"}'])
    def test_what_is_no_whole_number_of_tokens_is_no_cost(self, body: bytes, after: bytes) -> None:
        """Wherever the answer is cut: half of a number is no number."""
        for cut in range(len(body + after) + 1):
            reader = CostReader(CostPlace(member=b"total_tokens"))
            reader.feed({"type": "http.response.body", "body": (body + after)[:cut], "more_body": True})
            reader.feed({"type": "http.response.body", "body": (body + after)[cut:]})
            assert reader.tokens is None

    def test_a_header_is_found_in_any_case(self) -> None:
        reader = CostReader(CostPlace(header=b"x-cost"))
        reader.feed({"type": "http.response.start", "headers": [(b"X-Cost", b"12"), (b"x-other", b"13")]})
        assert reader.tokens == 12


class TestChannel:
    async def test_a_rewound_upload_begins_anew_and_goes_on(self) -> None:
        chunks = [b"a" * 10, b"b" * 10, b"c" * 10]
        messages = iter({"type": "http.request", "body": chunk, "more_body": chunk != chunks[-1]} for chunk in chunks)

        async def receive() -> Any:
            found = next(messages, None)
            return found if found is not None else await anyio.sleep_forever()

        channel = UploadChannel(receive, _nothing, lambda: 0)
        assert [(await channel.receive())["body"] for _ in range(2)] == chunks[:2]
        assert channel.rewind()
        assert [(await channel.receive())["body"] for _ in range(3)] == chunks
        channel.close()

    async def test_a_large_one_cannot_be_rewound(self) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"x" * 65_536, "more_body": True}

        channel = UploadChannel(receive, _nothing, lambda: 0)
        for _ in range(5):
            await channel.receive()
        assert not channel.rewind()
        channel.close()


async def _nothing(message: Any) -> None:
    """No one is there."""
