"""`sidecar trtllm-serve`: the real command, here a stand-in's, with the sidecar in its app, and its engine's order."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.launchers.conftest import Refusal
from tests.launchers.launched import BODIES, PRIORITIES, Launched, ended, launched, many_at_once, ours, write_policy
from tests.support.each import each
from tests.support.ports import free_ports
from tests.support.redis_servers import free_port
from tests.support.shared_pools import begun_store
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PRIORITY_QUEUE = "scheduler_config: {waiting_queue_policy: priority}\n"
BATCHES = "/v1/messages/batches"


@asynccontextmanager
async def trtllm(
    folder: Path, *arguments: str, options: str = PRIORITY_QUEUE, build: str = "main", **variables: str
) -> AsyncIterator[Launched]:
    if not (folder / "policy.yaml").exists():
        write_policy(folder)
    (folder / "serve.yaml").write_text(options)
    given = ("--policy", str(folder), "--config", str(folder / "serve.yaml"), *arguments)
    async with launched(ours("trtllm-serve"), *given, variables={"STAND_IN_TRTLLM": build, **variables}) as server:
        yield server


def warned(server: Launched) -> list[str]:
    """What the launcher says of the engine; the policy's own warnings are another matter."""
    return [line for line in server.log.splitlines() if line.startswith("sidecar: ") and "warning:" not in line]


async def served(server: Launched) -> dict[str, float]:
    """The priority of every prompt that the engine has begun."""
    return {str(each["prompt"]): each["priority"] for each in (await server.get("/stand_in"))["served"]}


async def test_requests_carry_their_own_priority_and_are_left_as_they_are(tmp_path: Path) -> None:
    """A list of prompts, what a client writes itself, and the server's own strictness; the admin pages, and the end."""
    port = free_port()
    async with trtllm(tmp_path, SIDECAR_ADMIN_PORT=str(port)) as server:
        status, headers, _ = await server.post(
            "/v1/completions", "low", prompt=["one", "two"], max_tokens=2, priority=1.0
        )
        assert status == 200
        assert headers["x-admission-ignored"] == "priority"
        status, _, text = await server.post("/v1/completions", prompt="three", max_tokens=2, nonsense=1)
        assert status == 400
        assert "nonsense" in json.loads(text)["error"]
        for path in (BATCHES, "/update_weights"):
            status, _, text = await server.post(path, "batch", **BODIES["/v1/messages"]("unguarded"))
            assert (status, json.loads(text)["error"]["code"]) == (404, "not_guarded")
        assert await served(server) == {"one": 0.25, "two": 0.25}
        await as_the_servers_schemas_say(server)
        async with server.client.get(f"http://127.0.0.1:{port}/readyz") as page:
            assert await page.json() == {"status": "ready", "reasons": [], "notices": []}
        async with server.client.get(f"http://127.0.0.1:{port}/state") as page:
            assert (await page.json())["policy"]["engine"] == "tensorrt-llm"
        assert await server.end() == -15, "uvicorn raises the signal again when it has ended"
        assert f"sidecar: admin on http://127.0.0.1:{port}" in server.log
        assert "Application shutdown complete" in server.log
        with pytest.raises(aiohttp.ClientConnectorError):
            await server.client.get(f"http://127.0.0.1:{port}/readyz")


async def as_the_servers_schemas_say(server: Launched) -> None:
    """The maximum of chat has two names, the one the other's alias; and messages has errors of its own shape."""
    messages = [{"role": "user", "content": "any"}]
    for name in ("max_tokens", "max_completion_tokens"):
        status, _, text = await server.post("/v1/chat/completions", "low", messages=messages, **{name: 3})
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 3)
    status, _, text = await server.post(
        "/v1/chat/completions", "low", messages=messages, max_tokens=3, max_completion_tokens=3
    )
    assert status == 400
    assert "max_completion_tokens" in json.loads(text)["error"]
    body = BODIES["/v1/messages"]("any")
    status, _, text = await server.post("/v1/messages", "low", **{**body, "max_tokens": 0})
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.long
async def test_the_engines_queue_follows_the_priorities_that_it_gets(tmp_path: Path) -> None:
    """One at a time: the request that finds the engine free is first, the others follow by tier, not by arrival."""
    async with trtllm(tmp_path, "--max_batch_size", "1") as server:
        # It runs for three seconds, and the others come within a tenth of one.
        first = asyncio.ensure_future(server.post("/v1/responses", "batch", input="first", max_output_tokens=1500))
        await until(lambda: served(server))
        rest = []
        for tier in ("batch", "low", "normal", "high", "critical"):
            rest.append(asyncio.ensure_future(server.post("/v1/responses", tier, input=tier, max_output_tokens=2)))
            await asyncio.sleep(0.01)
        await asyncio.gather(first, *rest)
        assert list(await served(server)) == ["first", "critical", "high", "normal", "low", "batch"]


@pytest.mark.long
async def test_every_endpoint_of_many_at_once_gets_its_own_priority(tmp_path: Path) -> None:
    """The requests of a batch have that of the batch; those whose clients leave are aborted at the engine."""
    write_policy(tmp_path, more=f"  {BATCHES}: {{api: generic, tokens: 1000}}\n")
    async with trtllm(tmp_path) as server:
        expected = await many_at_once(server, PRIORITIES)
        assert await served(server) == expected
        await a_batch(server, "one", "two")
        assert await served(server) == {**expected, "one": 0.25, "two": 0.25}
        assert warned(server) == []
        await clients_leave(server)


async def a_batch(server: Launched, *prompts: str) -> None:
    """They are begun in the request that brings them, and run on after it."""
    params = {"model": "m", "max_tokens": 3}
    requests = [
        {"custom_id": name, "params": {**params, "messages": [{"role": "user", "content": name}]}} for name in prompts
    ]
    status, headers, text = await server.post(BATCHES, "low", requests=requests)
    assert (status, headers["x-admission-tier"]) == (200, "low"), text

    async def is_over() -> bool:
        return bool((await server.get(f"{BATCHES}/{json.loads(text)['id']}"))["processing_status"] == "ended")

    await until(is_over)


async def clients_leave(server: Launched) -> None:
    for path, body_of in BODIES.items():
        body = {"model": "m", **body_of(path), "stream": True, "max_tokens": 2000}
        if path == "/v1/responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        async with server.client.post(server.url + path, json=body) as answer:
            await answer.content.readany()
            answer.close()

    async def are_aborted() -> bool:
        return sorted((await server.get("/stand_in"))["aborted"]) == sorted(BODIES)

    await until(are_aborted)


@pytest.mark.long
async def test_a_request_that_is_not_guarded_is_left_at_the_engines_default(tmp_path: Path) -> None:
    write_policy(tmp_path).write_text(
        (tmp_path / "policy.yaml").read_text().replace("  /v1/chat/completions: {}\n", "") + "unguarded: allow\n"
    )
    async with trtllm(tmp_path) as server:
        path = "/v1/chat/completions"
        assert "x-admission-tier" not in (await server.post(path, "batch", **BODIES[path]("unguarded")))[1]
        assert await served(server) == {"unguarded": 0.5}


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "options", "reported", "said"),
    [
        ("before_field", PRIORITY_QUEUE, {"/v1/completions": 0.0, "/v1/responses": 0.0}, []),
        (
            "before_priority",
            PRIORITY_QUEUE,
            {"/v1/completions": 0.5, "/v1/responses": 0.5},
            ["this TensorRT-LLM takes no priority"],
        ),
        (
            "main",
            "max_batch_size: 8\n",
            {"/v1/completions": 0.5, "/v1/responses": 0.5},
            ["set scheduler_config.waiting_queue_policy: priority"],
        ),
    ],
)
async def test_what_a_build_cannot_do_is_said_once_and_nothing_is_refused(
    tmp_path: Path, build: str, options: str, reported: dict[str, float], said: list[str]
) -> None:
    """Builds from before the field answer 400 to it, and an engine that serves as they come warns for each request."""
    async with trtllm(tmp_path, build=build, options=options) as server:
        for path in reported:
            for _ in range(2):
                status, headers, text = await server.post(path, "batch", **BODIES[path](path))
                assert (status, headers["x-admission-tier"]) == (200, "batch"), text
        assert await served(server) == reported
        lines = warned(server)
    assert len(lines) == len(said), lines
    assert all(phrase in line for phrase, line in zip(said, lines, strict=True))


@pytest.mark.long
async def test_a_policy_without_an_engine_hands_nothing_over(tmp_path: Path) -> None:
    write_policy(tmp_path, engine="none")
    async with trtllm(tmp_path) as server:
        assert (await server.post("/v1/responses", "batch", input="any"))[0] == 200
        assert await served(server) == {"any": 0.5}


async def replica(server: Launched, admin_port: int) -> str:
    """The name of the process behind these admin pages; nothing while it is on its way."""
    with suppress(aiohttp.ClientConnectionError):
        async with server.client.get(f"http://127.0.0.1:{admin_port}/state") as page:
            return str((await page.json())["pool"]["store"]["replica"])
    return ""


@pytest.mark.long
async def test_several_frontends_share_a_pool_in_the_store(tmp_path: Path) -> None:
    """Each is the same command line, run again by the first."""
    admin = free_ports(2)
    with begun_store(tmp_path) as store:
        variables = {"SIDECAR_STORE": store.url, "SIDECAR_ADMIN_PORT": str(admin)}
        async with trtllm(tmp_path, "--num_serve_frontends", "2", **variables) as server:
            for port in (admin, admin + 1):
                await until(lambda port=port: replica(server, port))
            assert len({await replica(server, port) for port in (admin, admin + 1)}) == 2


@pytest.mark.long
async def test_too_many_frontends_in_the_options_file_fail_the_start(tmp_path: Path) -> None:
    """The file is read by the real command alone: it is found out when the server starts."""
    with pytest.raises(AssertionError, match="2 server processes share this engine"):
        async with trtllm(tmp_path, options=f"num_serve_frontends: 2\n{PRIORITY_QUEUE}"):
            pass


@each(
    ("arguments", "said"),
    [
        (["m"], "no policy: give --policy PATH or set SIDECAR_POLICY"),
        (["m", "--policy", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["disaggregated", "--policy", "{policy}"], "`trtllm-serve disaggregated` is another server"),
        (["m", "--policy", "{policy}", "--grpc"], "leave --grpc away"),
        (
            ["m", "--policy={policy}", "--num_http_workers", "2"],
            "--num_http_workers starts processes without the middleware",
        ),
        (["m", "--policy", "{policy}", "--num_serve_frontends=2"], "2 server processes share this engine"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_model_is_loaded(
    tmp_path: Path, refusal: Refusal, arguments: list[str], said: str
) -> None:
    policy = str(write_policy(tmp_path))
    assert said in refusal("trtllm-serve", *(argument.format(policy=policy) for argument in arguments))


def test_a_policy_for_another_engine_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    said = refusal("trtllm-serve", "m", "--policy", str(write_policy(tmp_path, engine="vllm")))
    assert "the policy is for vllm; write `engine: tensorrt-llm`" in said


def test_without_the_engine_it_says_how_to_get_it(tmp_path: Path, refusal: Refusal) -> None:
    said = refusal("trtllm-serve", "m", "--policy", str(write_policy(tmp_path)), installed=False)
    assert "tensorrt_llm is not installed in this environment" in said
    assert "install TensorRT-LLM as its documentation says" in said


@pytest.mark.long
def test_arguments_that_are_wrong_are_refused_by_the_real_command(tmp_path: Path) -> None:
    gone = ended("trtllm-serve", "m", "--policy", str(write_policy(tmp_path)), "--nix")
    assert gone.returncode == 2
    assert "No such option" in gone.stderr


@pytest.mark.long
async def test_what_the_servers_own_options_set_counts(tmp_path: Path) -> None:
    """--set overrides the file: with it the queue is first come, first served, and the start says so."""
    async with trtllm(tmp_path, "--set", "scheduler_config.waiting_queue_policy=fcfs") as server:
        assert warned(server)[0].startswith("sidecar: the engine serves its waiting queue first come, first served")


@pytest.mark.long
async def test_mounted_by_the_servers_own_option_chat_carries_its_priority(tmp_path: Path) -> None:
    """Without the launcher, as docs/tutorial-fastapi.md says: chat and completions in their body, others without."""
    write_policy(tmp_path)
    (tmp_path / "serve.yaml").write_text(PRIORITY_QUEUE)
    command = [sys.executable, "-c", "from tensorrt_llm.commands.serve import main; main()", "m"]
    given = ("--config", str(tmp_path / "serve.yaml"), "--middleware", "sidecar.AdmissionMiddleware")
    async with launched(command, *given, variables={"SIDECAR_POLICY": str(tmp_path)}) as server:
        for path in ("/v1/chat/completions", "/v1/responses"):
            status, headers, text = await server.post(path, "low", **BODIES[path](path))
            assert (status, headers["x-admission-tier"]) == (200, "low"), text
        assert await served(server) == {"/v1/chat/completions": 0.25, "/v1/responses": 0.5}
