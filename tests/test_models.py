"""Models with pools of their own, as users run them: real processes, and the clients' own libraries."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.models_stack import BY_MODEL, KEY, LIMITED, LLAMA, LORA, QWEN, ModelsStack, models_stack
from tests.support.http import fetch
from tests.support.late import anthropic, openai
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsStack]:
    with models_stack(tmp_path_factory.mktemp("models")) as stack:
        yield stack


@pytest.fixture
async def stack(shared: ModelsStack) -> AsyncIterator[ModelsStack]:
    """One stack for all tests that leave it as they found it."""
    yield shared
    await until(lambda: [shared.counts(model) for model in (LLAMA, QWEN)] == [(0, 0), (0, 0)])


async def asked(stack: ModelsStack, model: str, key: str = KEY, **more: Any) -> tuple[str, Any]:
    """The engine that answered, and the answer."""
    async with stack.client(key) as client:
        answer = await client.chat.completions.with_raw_response.create(
            model=model, messages=HELLO, max_tokens=3, **more
        )
        return answer.headers["x-admission-engine"], answer.parse()


@asynccontextmanager
async def streams(stack: ModelsStack, model: str, count: int, key: str = KEY) -> AsyncIterator[None]:
    """So many streams of a model run, or wait; all end with the block."""

    async def one() -> None:
        async with stack.client(key) as client:
            stream = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=5000, stream=True)
            async for _ in stream:
                pass

    before = sum(stack.counts(model))
    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        await until(lambda: sum(stack.counts(model)) == before + count)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def posted(stack: ModelsStack, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(stack.url + path, data=io.BytesIO(body), headers=headers) as response,
    ):
        return response.status, await response.json()


# -- which pool


@pytest.mark.long
async def test_the_models_name_and_its_aliases_choose_the_pool(stack: ModelsStack) -> None:
    for model in (LLAMA, "llama", LORA):
        engine, answer = await asked(stack, model)
        assert engine in ("a", "b")
        assert answer.model == model  # the engine gets the name as it was sent
    engine, answer = await asked(stack, QWEN)
    assert (engine, answer.model) == ("c", QWEN)


async def test_a_name_that_no_pool_has_is_a_404_with_the_names_there_are(stack: ModelsStack) -> None:
    for name in ("gpt-4", "Qwen-7b", " qwen-7b", "qwen-7b ", "qwen\u20117b", "qwen-7b\u0000", "qwen-7b\n", "meta"):
        async with stack.client() as client:
            with pytest.raises(openai.NotFoundError) as refused:
                await client.chat.completions.create(model=name, messages=HELLO)
        error: Any = refused.value.body
        assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")
        assert error["message"].endswith(f"; send one of {LLAMA}, {QWEN}")
        assert "\n" not in error["message"]
        assert "\0" not in error["message"]
        assert refused.value.response.headers["x-should-retry"] == "false"


async def test_anthropics_client_gets_its_own_shape(stack: ModelsStack) -> None:
    async with anthropic.AsyncAnthropic(api_key=KEY, base_url=stack.url, max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as refused:
            await client.messages.create(model="claude", messages=HELLO, max_tokens=3)
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        assert [model.id async for model in client.models.list()] == [LLAMA, "llama", LORA, QWEN]
        assert (await client.models.retrieve(QWEN)).display_name == QWEN


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ('"messages": []', "model: missing; send one of meta/llama-70b, qwen-7b"),
        ('"model": ""', "model: missing; send one of meta/llama-70b, qwen-7b"),
        ('"model": 7', "model: expected a string, got a whole number"),
        ('"model": "qwen-7b", "\\u006dodel": "llama"', "model: given twice; send it once"),
        ('"model": "\\ud800"', None),
    ],
)
async def test_a_body_that_does_not_name_one_model_is_a_400(stack: ModelsStack, members: str, said: str | None) -> None:
    more = "" if "messages" in members else ', "messages": [{"role": "user", "content": "x"}]'
    status, answer = await posted(stack, f"{{{members.replace('[]', json.dumps(HELLO))}{more}}}".encode())
    assert (status, answer["error"]["code"]) == (400, "invalid_body")
    assert said is None or (answer["error"]["message"], answer["error"]["param"]) == (said, "model")


# -- the list of models


async def test_the_models_are_listed_with_their_aliases(stack: ModelsStack) -> None:
    async with stack.client() as client:
        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == [LLAMA, "llama", LORA, QWEN]
        assert {model.object for model in listed} == {"model"}
        assert [model.root for model in listed] == [LLAMA, LLAMA, LLAMA, QWEN]  # type: ignore[attr-defined]
        one = await client.models.retrieve(LORA)
        assert (one.id, one.root) == (LORA, LLAMA)  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="no pool serves the model"):
            await client.models.retrieve("gpt-4")


async def test_a_model_whose_name_has_a_slash_is_found(stack: ModelsStack) -> None:
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as client:
        for path in ("meta/llama-70b", "meta%2Fllama-70b"):
            async with client.get(f"{stack.url}/v1/models/{path}") as response:
                assert (await response.json())["id"] == LLAMA


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/qwen-7b", "/v1/models/gpt-4"])
@pytest.mark.parametrize("key", [None, "sk-unknown"])
async def test_the_list_needs_a_key_that_is_known(stack: ModelsStack, path: str, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as client, client.get(stack.url + path) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_the_head_of_the_list_has_no_body(stack: ModelsStack) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as client, client.head(f"{stack.url}/v1/models") as response:
        assert response.status == 200
        assert int(response.headers["content-length"]) > 100
        assert await response.read() == b""


# -- what the pools share, and what they do not


async def test_a_full_pool_keeps_no_request_of_the_other_waiting(stack: ModelsStack) -> None:
    async with streams(stack, QWEN, 3):
        assert stack.counts(QWEN) == (2, 1)
        engine, _ = await asked(stack, LLAMA)
        assert engine in ("a", "b")
        waiting = stack.admin("/models/qwen-7b/overview")
        assert [tier["queued"]["requests"] for tier in waiting["tiers"]] == [1, 0]
        assert waiting["pool"] == "default/qwen-7b"
        others = stack.admin(f"/models/{LLAMA}/overview")
        assert (others["pool"], others["headline"]) == (f"default/{LLAMA}", "No request waits.")


async def test_a_tenants_limits_count_in_all_pools(stack: ModelsStack) -> None:
    async with streams(stack, QWEN, 1, LIMITED):
        for model in (QWEN, LLAMA, LORA):
            with pytest.raises(openai.RateLimitError) as refused:
                await asked(stack, model, LIMITED)
            assert refused.value.code == "tenant_limit"
        await asked(stack, LLAMA)
    await until(lambda: stack.counts(QWEN) == (0, 0))
    await asked(stack, LLAMA, LIMITED)


async def test_limits_of_a_model_count_beside_the_tenants_own_under_each_of_its_names(stack: ModelsStack) -> None:
    async def refusal(model: str, most: int = 3) -> str:
        async with stack.client(BY_MODEL) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model=model, messages=HELLO, max_tokens=most)
        assert refused.value.code == "tenant_limit"
        return str(refused.value)

    async with streams(stack, QWEN, 1, BY_MODEL):
        for _ in range(3):
            assert "tenant by-model (model qwen-7b) has 1 request waiting or running" in await refusal(QWEN)
        for model in (LLAMA, "llama", LORA):  # each token of an answer counts for four
            weighed = await refusal(model, 16_000)
            assert "the limit of tenant by-model (model meta/llama-70b), 60,000 tokens per minute" in weighed
            assert "this request counts for 64,0" in weighed
        async with streams(stack, LLAMA, 1, BY_MODEL):
            assert "tenant by-model has 2 requests waiting or running" in await refusal(LLAMA)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {BY_MODEL}"}) as client:
            own = await (await client.get(f"{stack.url}/v1/admission/self")).json()
        assert own["limits"]["models"][QWEN] == {"concurrent_requests": 1}
        assert own["limits"]["models"][LLAMA]["tokens"]["per_minute"] == 60_000
        assert own["cost"][LLAMA] == {"input": 1.0, "cached": 1.0, "output": 4.0}
    await until(lambda: stack.counts(QWEN) == (0, 0))
    await asked(stack, QWEN, BY_MODEL)


@pytest.mark.long
async def test_a_background_response_is_followed_at_its_models_engine(stack: ModelsStack) -> None:
    async with stack.client() as client:
        begun = await client.responses.create(model=QWEN, input="Hello", max_output_tokens=300, background=True)
        assert begun.status in ("queued", "in_progress")
        assert stack.counts(QWEN)[0] == 1
        assert stack.admin("/state")["background"] == 1
    await until(lambda: stack.counts(QWEN) == (0, 0))


# -- what people see


async def test_each_request_is_explained_by_its_own_pool(stack: ModelsStack) -> None:
    for model, pool in ((QWEN, "default/qwen-7b"), (LORA, f"default/{LLAMA}")):
        async with stack.client() as client:
            answer = await client.chat.completions.with_raw_response.create(model=model, messages=HELLO, max_tokens=3)
        story = stack.admin(f"/requests/{answer.headers['x-request-id']}")
        assert (story["pool"], story["asked"]["model"], story["state"]) == (pool, model, "completed")
    async with stack.client() as client:
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model="gpt-4", messages=HELLO)
    story = stack.admin(f"/requests/{refused.value.response.headers['x-request-id']}")
    assert (story["pool"], story["refused"]["code"], story["refused"]["tenant"]) == (
        "default",
        "model_not_found",
        "alpha",
    )
    assert stack.admin("/requests/none")["error"]["code"] == "unknown_request"


async def test_metrics_have_each_request_in_one_pool(stack: ModelsStack) -> None:
    def admitted() -> dict[str, float]:
        found: dict[str, float] = {}
        for line in stack.text("/metrics").splitlines():
            if line.startswith("admission_admitted_total"):
                pool = line.partition('pool="')[2].partition('"')[0]
                found[pool] = found.get(pool, 0) + float(line.split()[-1])
        return found

    before = admitted()
    await asked(stack, QWEN)
    await asked(stack, LLAMA)
    await asked(stack, LORA)
    after = admitted()
    grown = {pool: after[pool] - before.get(pool, 0) for pool in after}
    assert grown == {"default": 0, "default/qwen-7b": 1, f"default/{LLAMA}": 2}
    assert not [
        line
        for line in stack.text("/metrics").splitlines()
        if line.startswith(("admission_capacity", "admission_reserve"))
        and 'pool="default"' in line
        and "} 0" not in line
    ]


# -- tests that change the stack: each has one of its own


@pytest.mark.long
async def test_a_reload_changes_aliases_and_moves_engines_but_no_models(tmp_path: Path) -> None:
    with models_stack(tmp_path) as stack:
        async with streams(stack, LLAMA, 1):
            changed = stack.policy().replace("aliases: [llama, my-lora]", "aliases: [big]")
            await stack.write(
                changed.replace("engines: [a, b]", "engines: [a]").replace("engines: [c]", "engines: [c, b]")
            )
            with pytest.raises(openai.NotFoundError):
                await asked(stack, LORA)
            assert (await asked(stack, "big"))[0] == "a"
            await until(lambda: stack.pool(QWEN)["capacity"] == {"tokens": 40000, "requests": 4})
            await until(lambda: stack.pool(LLAMA)["capacity"]["requests"] in (2, 3))  # b may still hold the stream
            assert stack.counts(LLAMA) == (1, 0)
            async with streams(stack, QWEN, 4):
                used = {engine["engine"]: engine["held"]["requests"] for engine in stack.pool(QWEN)["engines"]}
                assert used == {"b#1": 2, "c#1": 2}
        await until(lambda: stack.pool(LLAMA)["capacity"] == {"tokens": 20000, "requests": 2})
        async with stack.client() as client:
            assert [model.id async for model in client.models.list()] == [LLAMA, "big", QWEN]
        (stack.folder / "policy.yaml").write_text(stack.policy().replace("qwen-7b:", "qwen-8b:"))
        await until(lambda: any("models (their names)" in notice for notice in stack.admin("/readyz")["notices"]))
        assert (await asked(stack, QWEN))[0] in ("b", "c")


@pytest.mark.long
async def test_a_drain_serves_what_runs_in_every_pool(tmp_path: Path) -> None:
    with models_stack(tmp_path) as stack:
        async with stack.client() as client:
            running = [
                asyncio.create_task(client.chat.completions.create(model=model, messages=HELLO, max_tokens=100))
                for model in (LLAMA, QWEN)
            ]
            await until(lambda: [stack.counts(model)[0] for model in (LLAMA, QWEN)] == [1, 1])
            stack.sidecar.send_signal(signal.SIGTERM)
            assert [len(str(answer.choices[0].message.content)) > 0 for answer in await asyncio.gather(*running)]
        assert stack.sidecar.wait(60) == 0


async def test_the_dry_run_passes_everything_to_an_engine_of_its_model(tmp_path: Path) -> None:
    with models_stack(tmp_path, mode="observe") as stack:
        async with stack.client("sk-unknown") as client:
            assert [model.id async for model in client.models.list()] == [LLAMA, "llama", LORA, QWEN]
            for model in (LLAMA, QWEN):
                answer = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=3)
                assert answer.model == model
        async with stack.client() as client:
            create = client.chat.completions.with_raw_response.create
            unknown = await create(model="gpt-4", messages=HELLO, max_tokens=3)
            assert unknown.headers["x-admission-mode"] == "observe"
            await create(model=QWEN, messages=HELLO, max_tokens=3)
        story = stack.admin(f"/requests/{unknown.headers['x-request-id']}")
        found = story["pool"], story["dry_run"]["verdict"], story["dry_run"]["code"]
        assert found == ("default", "refused", "model_not_found")
        observed = stack.admin("/models/qwen-7b/observed")
        total = observed["total"]
        assert (observed["mode"], total["admitted"], total["refused"]) == ("observe", 1, {"invalid_api_key": 1})
        served = {name: requests_of(stack, name) for name in "abc"}
        assert served["c"] == 2
        assert served["a"] + served["b"] == 2  # the unknown model's, too
        assert stack.admin("/readyz")["notices"][0].startswith("mode: observe")


def requests_of(stack: ModelsStack, engine: str) -> int:
    """The requests that an engine has ended."""
    return round(fetch(f"http://127.0.0.1:{stack.ports[engine]}/metrics").total("vllm:request_success_total"))


@pytest.mark.long
async def test_in_a_store_each_model_has_a_pool_and_limits_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    with RedisServer(first_binary(), tmp_path) as store, models_stack(folder, SIDECAR_STORE=store.url) as stack:
        await until(lambda: stack.admin("/readyz")["status"] == "ready")
        assert {model: stack.pool(model)["store"]["pool"] for model in (LLAMA, QWEN)} == {
            LLAMA: f"default/{LLAMA}",
            QWEN: "default/qwen-7b",
        }
        async with streams(stack, QWEN, 1, LIMITED):
            assert (await asked(stack, LLAMA, LIMITED))[0] in ("a", "b")
            with pytest.raises(openai.RateLimitError):
                await asked(stack, QWEN, LIMITED)
        stack.sidecar.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stack.sidecar.wait, 60) == 0
        assert "the tenants' limits count for each model apart" in stack.sidecar.stderr.read()
