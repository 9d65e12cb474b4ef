"""Models that a tenant may use, and aliases for the engine: before one engine, several, and mounted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.policy.compiler import load
from tests.fleet.named_engine import NamedEngine
from tests.support.in_process import serving_sidecar
from tests.support.late import anthropic, openai
from tests.support.middleware import answer
from tests.support.serving import serving

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hello"}]
ALL, LLAMA_ONLY, ALIAS_ONLY = "sk-all", "sk-llama", "sk-alias"
TENANTS = {ALL: '"*"', LLAMA_ONLY: 'llama-70b, "my-*", "gone*"', ALIAS_ONLY: "gpt-4o"}
POLICY = """\
engine: vllm
mode: {mode}
{engines}
aliases: {{gpt-4o: {{as: llama-70b}}, claude-x: {{as: my-lora}}{more}}}
tiers: {{normal: {{}}}}
sources: [header, endpoint, key, service_tier]
service_tiers: {{flex: normal}}
gateway: {{tenant_header: x-tenant, addresses: ["127.0.0.1"]}}
anonymous: deny
tenants: tenants/*.yaml
"""
GONE = ", gone-x: {as: gone}"
ONE, TWO, MODELS, MOUNTED = "one engine", "two engines", "a pool for each model", "mounted"
LONG = pytest.mark.long


class Stack:
    """The sidecar's address, and its engines: the last has the model qwen, each other one llama-70b and my-lora."""

    def __init__(self, url: str, engines: list[NamedEngine], admin_url: str = "") -> None:
        self.url, self.engines, self.admin_url = url, engines, admin_url

    def asked(self) -> list[str | None]:
        """The models of all requests that reached an engine since the last call."""
        found = [model for engine in self.engines for model in engine.asked]
        for engine in self.engines:
            engine.asked.clear()
        return found

    def client(self, key: str = ALL) -> Any:
        return openai.AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=60)

    async def send(self, method: str, path: str, key: str | None = ALL, body: bytes = b"", **more: str) -> Any:
        """Status, headers, and the body."""
        headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
        sent = io.BytesIO(body) if body else None
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, self.url + path, data=sent, headers={**headers, **more}) as response,
        ):
            return response.status, response.headers, await response.read()

    async def chat(self, model: Any, key: str, **more: Any) -> tuple[int, Any]:
        body = {"messages": HELLO, "max_tokens": 2, **more, **({} if model is ... else {"model": model})}
        status, _, answer = await self.send("POST", "/v1/chat/completions", key, json.dumps(body).encode())
        return status, json.loads(answer)


def write(folder: Path, engines: str, mode: str = "enforce") -> Path:
    """The policy."""
    (folder / "policy.yaml").write_text(
        POLICY.format(mode=mode, engines=engines, more="" if "models:" in engines else GONE)
    )
    (folder / "tenants").mkdir(exist_ok=True)
    for number, (key, models) in enumerate(TENANTS.items()):
        digest = hashlib.sha256(key.encode()).hexdigest()
        text = f'tenant: t{number}\nkeys: ["sha256:{digest}"]\ntier: normal\nmodels: [{models}]\n'
        (folder / "tenants" / f"{number}.yaml").write_text(text)
    return folder


@asynccontextmanager
async def stack(folder: Path, way: str, mode: str = "enforce") -> AsyncIterator[Stack]:
    llama = NamedEngine("llama-70b", adapters=("my-lora",))
    engines = {
        ONE: [NamedEngine("llama-70b", "qwen", adapters=("my-lora",))],
        TWO: [NamedEngine("llama-70b", "qwen", adapters=("my-lora",)) for _ in range(2)],
        MODELS: [llama, NamedEngine("qwen")],
        MOUNTED: [NamedEngine("llama-70b", "qwen", adapters=("my-lora",))],
    }[way]
    capacity = "capacity: {tokens: 20k, requests: 8}"
    async with AsyncExitStack() as served:
        if way == MOUNTED:
            app = AdmissionMiddleware(engines[0], str(write(folder, capacity, mode)))
            yield Stack((await served.enter_async_context(serving(app))).url, engines)
            return
        urls = [(await served.enter_async_context(serving(engine))).url for engine in engines]
        if way == ONE:
            path, upstream = write(folder, capacity, mode), urls[0]
        else:
            listed = ", ".join(f"{{name: e{place}, url: '{url}'}}" for place, url in enumerate(urls))
            models = "models: {llama-70b: {engines: [e0], aliases: [my-lora]}, qwen: {engines: [e1]}}"
            text = f"engines: {{static: [{listed}], {capacity}}}\n{models if way == MODELS else ''}"
            path, upstream = write(folder, text, mode), None
        sidecar = await served.enter_async_context(serving_sidecar(path, upstream))
        yield Stack(sidecar[0], engines, sidecar[1])


@pytest.fixture(params=[ONE, pytest.param(TWO, marks=LONG), MODELS, MOUNTED])
async def each_way(request: Any, tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path, request.param) as running:
        yield running


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path, ONE) as running:
        yield running


# -- models that a tenant may use


async def test_a_model_that_is_not_allowed_is_answered_as_one_that_is_not_there(each_way: Stack) -> None:
    for key, hidden in (
        (LLAMA_ONLY, ("qwen", "gpt-4o", "LLAMA-70B", "llama-70b ")),
        (ALIAS_ONLY, ("llama-70b", "qwen")),
    ):
        unknown = await each_way.chat("absent", key)
        assert unknown[0] == 404
        assert (unknown[1]["error"]["code"], unknown[1]["error"]["param"]) == ("model_not_found", "model")
        for name in hidden:
            status, refused = await each_way.chat(name, key)
            assert (status, json.dumps(refused).replace(name, "absent")) == (404, json.dumps(unknown[1])), name
    assert each_way.asked() == []


async def test_the_list_shows_what_works_and_nothing_else(each_way: Stack) -> None:
    everything = ["llama-70b", "my-lora", "qwen", "gpt-4o", "claude-x"]
    for key, names in ((ALL, everything), (LLAMA_ONLY, ["llama-70b", "my-lora"]), (ALIAS_ONLY, ["gpt-4o"])):
        async with each_way.client(key) as client:
            assert sorted([model.id async for model in client.models.list()]) == sorted(names)
            for name in everything:
                if name in names:
                    assert (await client.models.retrieve(name)).id == name
                    answer = await client.chat.completions.create(model=name, messages=HELLO, max_tokens=2)
                    assert answer.model == name
                else:
                    with pytest.raises(openai.NotFoundError):
                        await client.models.retrieve(name)
    _, _, body = await each_way.send("GET", "/v1/models", ALIAS_ONLY)
    assert b"llama" not in body
    assert b"lora" not in body
    head = await each_way.send("HEAD", "/v1/models", ALIAS_ONLY)
    assert (head[0], int(head[1]["content-length"]), head[2]) == (200, len(body), b"")
    assert (await each_way.send("GET", "/v1/models", None))[0] == 401
    for path in ("/v1/models/", "/v1//models", "/V1/models", "/v1/./models", "/v1/models/gpt-4o/.."):
        assert b"llama" not in (await each_way.send("GET", path, ALIAS_ONLY))[2]


async def test_what_only_counts_tokens_tells_no_more(each_way: Stack) -> None:
    for name, status in (("qwen", 404), ("absent", 404), ("llama-70b", 200), ("", 200)):
        body = json.dumps({"model": name, "prompt": "x"}).encode()
        found, _, answer = await each_way.send("POST", "/tokenize", LLAMA_ONLY, body)
        assert found == status, answer
    secret = json.dumps({"model": "qwen", "prompt": "x"})
    for body in (
        secret.encode("utf-16"),
        b'{"model": "llama-70b", ' + secret[1:].encode(),
        secret.encode() + b"x" * 2**23,
    ):
        assert (await each_way.send("POST", "/tokenize", LLAMA_ONLY, body))[0] == 400
    assert "qwen" not in each_way.asked()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, 'model: missing; send one of llama-70b, my-*, gone*'),
        ({"model": ""}, 'model: missing; send one of llama-70b, my-*, gone*'),
        ({"model": None}, 'model: missing; send one of llama-70b, my-*, gone*'),
        ({"model": "llama-70b", "lora_path": "x"}, "lora_path: not allowed here; name the adapter as model"),
        ({"model": "llama-70b", "lora_request": {}}, "lora_request: not allowed here; name the adapter as model"),
    ],
)  # fmt: skip
async def test_a_body_that_may_mean_another_model_is_a_400(one: Stack, more: Any, said: str) -> None:
    status, answer = await one.chat(more.pop("model", ...), LLAMA_ONLY, **more)
    assert (status, answer["error"]["message"]) == (400, said)
    assert one.asked() == []


async def test_a_model_given_twice_is_a_400(one: Stack) -> None:
    for twice in (b'"model": "qwen", "model": "llama-70b"', b'"mod\\u0065l": "qwen", "model": "llama-70b"'):
        body = b"{%b, %b" % (twice, json.dumps({"messages": HELLO})[1:].encode())
        status, _, answer = await one.send("POST", "/v1/chat/completions", LLAMA_ONLY, body)
        assert (status, json.loads(answer)["error"]["message"]) == (400, "model: given twice; send it once")


async def test_a_tenant_that_a_gateway_names_is_bound_alike(each_way: Stack) -> None:
    body = json.dumps({"model": "qwen", "messages": HELLO}).encode()
    named = {"x-tenant": "t1"}
    assert (await each_way.send("POST", "/v1/chat/completions", None, body, **named))[0] == 404
    assert (await each_way.send("POST", "/tokenize", None, body, **named))[0] == 404
    status, _, listed = await each_way.send("GET", "/v1/models", None, **named)
    assert (status, [one["id"] for one in json.loads(listed)["data"]]) == (200, ["llama-70b", "my-lora"])


async def test_a_tenant_that_the_app_names_is_bound_alike(tmp_path: Path) -> None:
    engine = NamedEngine("llama-70b", "qwen")
    policy = str(write(tmp_path, "capacity: {tokens: 20k, requests: 8}"))
    async with serving(AdmissionMiddleware(engine, policy, tenant=lambda _: "t1")) as served:
        running, body = Stack(served.url, [engine]), json.dumps({"model": "qwen", "messages": HELLO}).encode()
        assert (await running.send("POST", "/v1/chat/completions", None, body))[0] == 404
        assert (await running.send("POST", "/tokenize", None, body))[0] == 404
        assert [one["id"] for one in json.loads((await running.send("GET", "/v1/models", None))[2])["data"]] == [
            "llama-70b"
        ]
        assert running.asked() == []


async def test_its_own_page_names_no_pool_that_a_tenant_may_not_use(tmp_path: Path) -> None:
    async with stack(tmp_path, MODELS) as running:
        for key, models in ((ALL, ["llama-70b", "qwen"]), (LLAMA_ONLY, ["llama-70b"]), (ALIAS_ONLY, ["gpt-4o"])):
            page = json.loads((await running.send("GET", "/v1/admission/self", key))[2])
            assert list(page["models"]) == models


@pytest.mark.parametrize(
    ("answered", "status"),
    [
        ((200, b"<html>llama-70b"), 502),
        ((200, b'{"data": {"id": "qwen"}}'), 502),
        ((200, b'{"data": ["qwen"]}'), 502),
        ((200, b'{"data": [{"id": ["qwen"]}]}'), 502),
        ((200, b'["qwen"]'), 502),
        ((307, b"/v1/models"), 502),
        ((503, b'{"error": "it starts"}'), 503),
    ],
)
async def test_a_list_that_cannot_be_read_is_shown_to_no_tenant_with_models(
    tmp_path: Path, answered: tuple[int, bytes], status: int
) -> None:
    async def engine(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await NamedEngine("m")(scope, receive, send)
        else:
            await answer(send, answered[1], answered[0])

    app = AdmissionMiddleware(engine, str(write(tmp_path, "capacity: {tokens: 20k, requests: 8}")))
    async with serving(app) as served:
        running = Stack(served.url, [])
        for path in ("/v1/models", "/v1/models/qwen"):
            found, _, body = await running.send("GET", path, LLAMA_ONLY)
            assert (found, b"qwen" in body) == (status, False)
        if answered[0] != 307:  # the client would follow it
            found, _, body = await running.send("GET", "/v1/models", ALL)
            assert (found, body) == answered


# -- aliases


async def test_openais_client_sees_its_own_name(each_way: Stack) -> None:
    async with each_way.client(ALIAS_ONLY) as client:
        named: Any = {"model": "gpt-4o", "max_tokens": 3}
        assert (await client.chat.completions.create(messages=HELLO, **named)).model == "gpt-4o"
        assert (await client.completions.create(prompt="x", **named)).model == "gpt-4o"
        assert (await client.embeddings.create(model="gpt-4o", input="x")).model == "gpt-4o"
        for stream in (
            await client.chat.completions.create(messages=HELLO, stream=True, **named),
            await client.completions.create(prompt="x", stream=True, **named),
        ):
            models = [event.model async for event in stream]
            assert len(models) > 2
            assert set(models) == {"gpt-4o"}
        asked = {"model": "gpt-4o", "input": "x", "max_output_tokens": 3}
        assert (await client.responses.create(**asked)).model == "gpt-4o"
        events = [event async for event in await client.responses.create(stream=True, **asked)]
        assert {event.response.model for event in events if hasattr(event, "response")} == {"gpt-4o"}
    assert each_way.asked() == ["llama-70b"] * 7


@pytest.mark.long
async def test_anthropics_client_sees_its_own_name(each_way: Stack) -> None:
    async with anthropic.AsyncAnthropic(api_key=ALL, base_url=each_way.url, max_retries=0) as client:
        named: Any = {"model": "claude-x", "max_tokens": 3, "messages": HELLO}
        assert (await client.messages.create(**named)).model == "claude-x"
        events = [event async for event in await client.messages.create(stream=True, **named)]
        assert [event.message.model for event in events if event.type == "message_start"] == ["claude-x"]
        counted = await client.messages.count_tokens(model="claude-x", messages=HELLO)
        assert counted.input_tokens > 0
        assert "claude-x" in [model.id async for model in client.models.list()]
    assert each_way.asked() == ["my-lora"] * 3


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        (ONE, "observe"),
        (MOUNTED, "pass"),
        *(pytest.param(way, mode, marks=LONG) for way, mode in ((ONE, "pass"), (MODELS, "observe"), (TWO, "pass"))),
    ],
)
async def test_an_alias_works_in_every_mode_and_nothing_is_refused(tmp_path: Path, way: str, mode: str) -> None:
    async with stack(tmp_path, way, mode) as running, running.client(ALIAS_ONLY) as client:
        for name in ("gpt-4o", "llama-70b"):
            answer = await client.chat.completions.create(model=name, messages=HELLO, max_tokens=3)
            assert answer.model == name
        stream = await client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=3, stream=True)
        assert {event.model async for event in stream} == {"gpt-4o"}
        assert running.asked() == ["llama-70b"] * 3
        if mode == "observe" and way != MOUNTED:
            headers = {"x-request-id": "refused"}
            await client.chat.completions.create(model="qwen", messages=HELLO, max_tokens=3, extra_headers=headers)
            async with aiohttp.ClientSession() as admin, admin.get(f"{running.admin_url}/requests/refused") as page:
                verdict = (await page.json())["dry_run"]
            assert (verdict["verdict"], verdict["code"]) == ("refused", "model_not_found")
        assert len([model async for model in client.models.list()]) == 5


async def test_a_compressed_body_is_renamed(each_way: Stack) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "gpt-4o", "messages": HELLO, "max_tokens": 2}),
        ("/tokenize", {"model": "gpt-4o", "prompt": "x"}),
    ):
        packed = gzip.compress(json.dumps(body).encode())
        status, _, answer = await each_way.send("POST", path, ALIAS_ONLY, packed, **{"content-encoding": "gzip"})
        assert status == 200, answer
    assert each_way.asked() == ["llama-70b", "llama-70b"]


async def test_an_alias_of_a_model_that_is_not_there_is_the_engines_404_in_the_clients_words(one: Stack) -> None:
    status, answer = await one.chat("gone-x", LLAMA_ONLY)
    assert (status, answer["error"]["message"]) == (404, "The model `gone-x` does not exist.")
    assert one.asked() == ["gone"]
    status, _, body = await one.send("POST", "/tokenize", LLAMA_ONLY, b'{"model": "gone-x"}')
    assert (status, json.loads(body)["error"]["message"]) == (404, "The model `gone-x` does not exist.")
    assert b"gone" not in (await one.send("GET", "/v1/models", ALL))[2]


async def test_a_reload_changes_models_and_aliases(tmp_path: Path) -> None:
    engine = NamedEngine("llama-70b", "qwen")
    app = AdmissionMiddleware(engine, str(write(tmp_path, "capacity: {tokens: 20k, requests: 8}")))
    async with serving(app) as served:
        running = Stack(served.url, [engine])
        assert (await running.chat("gpt-4o", ALIAS_ONLY))[0] == 200
        policy, file = tmp_path / "policy.yaml", tmp_path / "tenants" / "2.yaml"
        policy.write_text("".join(line for line in policy.read_text().splitlines(True) if "aliases" not in line))
        file.write_text(file.read_text().replace("gpt-4o", "qwen"))
        app.controller.change_policy(load(policy))
        assert (await running.chat("gpt-4o", ALL))[1]["error"]["message"] == "The model `gpt-4o` does not exist."
        assert [(await running.chat(name, ALIAS_ONLY))[0] for name in ("gpt-4o", "qwen")] == [404, 200]
        listed = json.loads((await running.send("GET", "/v1/models", ALIAS_ONLY))[2])
        assert [one["id"] for one in listed["data"]] == ["qwen"]
        for each in (tmp_path / "tenants").iterdir():
            each.write_text("".join(line for line in each.read_text().splitlines(True) if "models" not in line))
        app.controller.change_policy(load(policy))
        listed = json.loads((await running.send("GET", "/v1/models", None))[2])
        assert [one["id"] for one in listed["data"]] == ["llama-70b", "qwen"]  # the engine's own answer, as before


async def test_a_body_in_chunks_is_renamed(each_way: Stack) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for part in (b'{"model": "gpt', b'-4o", "prompt": "x"', b"}"):
            yield part

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ALIAS_ONLY}"}) as client:
        for path in ("/v1/completions", "/tokenize"):
            async with client.post(each_way.url + path, data=parts()) as got:
                assert got.status == 200
    assert each_way.asked() == ["llama-70b", "llama-70b"]


async def test_an_alias_and_a_service_tier_are_both_in_the_answer(one: Stack) -> None:
    for streams in (False, True):
        body = {"model": "gpt-4o", "service_tier": "flex", "messages": HELLO, "max_tokens": 2, "stream": streams}
        _, _, answer = await one.send("POST", "/v1/chat/completions", ALIAS_ONLY, json.dumps(body).encode())
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        for found in events or [json.loads(answer)]:
            assert (found["model"], found["service_tier"]) == ("gpt-4o", "flex")


async def test_a_body_that_names_an_alias_twice_reaches_the_engine_with_one_name(one: Stack) -> None:
    body = b'{"model": "qwen", "model": "gpt-4o", %b' % json.dumps({"messages": HELLO, "max_tokens": 2})[1:].encode()
    status, _, answer = await one.send("POST", "/v1/chat/completions", ALL, body)
    assert (status, json.loads(answer)["model"], one.asked()) == (200, "gpt-4o", ["llama-70b"])
