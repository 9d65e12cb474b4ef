"""One pool, many replicas: how an app and its server join it, take it over and leave it, by a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sidecar import AdmissionMiddleware
from sidecar.cli import main
from sidecar.policy.store import STORE_VARIABLE
from sidecar.pools import Ask
from sidecar.pools.calls import DEAD_US
from sidecar.pools.redis import connection
from sidecar.pools.redis.connection import ledger_key
from tests.support.middleware import recorded
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.serving import serving
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
MEMBERS = """
local state = redis.call('HGET', KEYS[1], 'state')
local found = 0
if state then
  local _, _, members = cmsgpack.unpack(state)
  for _ in pairs(members) do found = found + 1 end
end
return found
"""
"""Counts the replicas of a ledger in the store."""
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there
SLOTS = 4
POLICY = f"""\
engine: vllm
capacity: {{tokens: 10M, requests: {SLOTS}}}
tiers:
  high: {{}}
  low: {{reserve: 5%}}
default_tier: low
anonymous: low
endpoints:
  {CHAT}: {{}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(first_binary(), tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[RedisServer]:
    """A store of the test's own, to be emptied."""
    with RedisServer(first_binary(), tmp_path) as server:
        yield server


def named(pool: str, **more: str) -> str:
    """The policy of a pool with a name of its own."""
    return POLICY + "".join(f"{name}: {value}\n" for name, value in {"pool": pool, **more}.items())


# -- clients


@dataclass
class Answer:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    json: Any


def request(**members: Any) -> dict[str, Any]:
    return {"model": "emulated", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}], **members}


async def ask(url: str, **members: Any) -> Answer:
    """A small request, on a connection of its own; canceled, it hangs up."""
    limit = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url + CHAT, json=request(**members)) as response,
    ):
        return Answer(response.status, response.headers, await response.json())


@asynccontextmanager
async def streaming(url: str) -> AsyncIterator[None]:
    """A stream that has begun, and runs for as long as the block, or until it is cut off from the other side."""
    with contextlib.suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + CHAT, json=request(stream=True)) as response,
        ):
            assert response.status == 200
            assert await response.content.readline()
            yield
            response.close()


# -- where the store is


CANNOT_BE_READ = (
    "127.0.0.1:6379",
    "http://:s3cr3t@127.0.0.1:6379/0",
    "redis://:s3cr3t@127.0.0.1:port/0",
    "redis://:s3cr3t/@127.0.0.1:6379/0",
    "redis://127.0.0.1/0?password=s3cr3t",
    "redis+sentinel://:s3cr3t@127.0.0.1",
)


def test_an_address_that_cannot_be_read_is_one_line_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    wrong = []
    for written in CANNOT_BE_READ:
        monkeypatch.setenv(STORE_VARIABLE, written)
        status = main(["serve", "--upstream", NOBODY, "--policy", str(path)])
        out, errors = capsys.readouterr()
        said = [line for line in errors.splitlines() if "policy_warning" not in line]
        is_right = len(said) == 1 and said[0].startswith("sidecar: SIDECAR_STORE: ") and "s3cr3t" not in said[0]
        wrong += [] if (status, out, is_right) == (1, "", True) else [(written, status, out, errors)]
    assert wrong == []


# -- taking a pool over


NOTHING_TO_TAKE = "there is no shared pool to take over: the policy has no store"


@pytest.mark.parametrize(
    ("variable", "more", "said"),
    [
        ("", ("--take-over-pool",), NOTHING_TO_TAKE),
        ("1", (), NOTHING_TO_TAKE),
        ("yes", (), "SIDECAR_TAKE_OVER_POOL: 'yes' is neither 1 nor 0"),
    ],
)
def test_taking_over_what_is_not_there_is_a_mistake(
    variable: str, more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(STORE_VARIABLE, raising=False)
        environment.setenv("SIDECAR_TAKE_OVER_POOL", variable)
        if not variable:
            environment.delenv("SIDECAR_TAKE_OVER_POOL")
        assert main(["serve", "--upstream", NOBODY, "--policy", str(path), *more]) == 1
    assert said in capsys.readouterr().err


# -- mounted into an app of the user's own


def app_with_its_pool(policy: Path, lifespan: Any = None) -> FastAPI:
    """What a user writes."""
    app = FastAPI(lifespan=lifespan)
    app.add_middleware(AdmissionMiddleware, policy=policy)

    @app.post(CHAT)
    async def chat(body: dict[str, Any]) -> Response:
        if body.get("stream"):
            return StreamingResponse(words(), media_type="text/event-stream")
        return JSONResponse({"ok": True})

    return app


async def words() -> AsyncIterator[str]:
    while True:
        yield "data: word\n\n"
        await asyncio.sleep(0.01)


def members(store: RedisServer, pool: str) -> int:
    """How many replicas a pool has, by what is in the store."""
    return int(store.command("EVAL", MEMBERS, "1", ledger_key(pool)))


def of_replicas(store: RedisServer, pool: str) -> list[str]:
    """The fields of a pool's ledger that belong to one replica each."""
    found: list[str] = store.command("HKEYS", ledger_key(pool))
    return [name for name in found if name.startswith("c:")]


@pytest.fixture
def mounted(tmp_path: Path, store: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes the policy of a pool whose store the environment names, and waits for that on a busy machine, too."""
    monkeypatch.setenv(STORE_VARIABLE, store.url)
    for module, bound in (
        (connection, "CONNECT_WITHIN_S"),
        (connection, "GREETING_WITHIN_S"),
        (connection, "ANSWER_WITHIN_S"),
    ):
        monkeypatch.setattr(module, bound, 60.0)

    def write(pool: str) -> Path:
        begun(store, pool)
        path = tmp_path / "policy.yaml"
        path.write_text(named(pool))
        return path

    return write


async def test_a_mounted_app_joins_at_its_servers_start_and_leaves_at_its_end(
    mounted: Callable[[str], Path], store: RedisServer
) -> None:
    seen = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        seen.append(members(store, "mounted"))
        yield
        seen.append(members(store, "mounted"))

    assert members(store, "mounted") == 0
    async with serving(app_with_its_pool(mounted("mounted"), lifespan)) as served:
        assert members(store, "mounted") == 1
        answer = await ask(served.url)
        assert (answer.status, answer.json) == (200, {"ok": True})
        assert (answer.headers["x-admission-tier"], answer.headers["x-admission-wait-ms"]) == ("low", "0")
    assert seen == [1, 0]  # the app starts in a pool that is open, and ends behind it
    assert of_replicas(store, "mounted") == []


async def test_without_a_lifespan_the_pool_opens_at_the_first_request(
    mounted: Callable[[str], Path], store: RedisServer
) -> None:
    sidecar = AdmissionMiddleware(app_without_admission(), policy=mounted("first"))
    async with serving(sidecar, lifespan="off") as served:
        assert members(store, "first") == 0
        answers = await asyncio.gather(*(ask(served.url) for _ in range(2 * SLOTS)))
        assert [answer.status for answer in answers] == [200] * 2 * SLOTS
        assert members(store, "first") == 1
        await sidecar.controller.pool.close()
    assert (members(store, "first"), of_replicas(store, "first")) == (0, [])


async def test_a_first_request_that_has_to_wait_for_the_store_is_reported_as_one_that_waited(
    mounted: Callable[[str], Path],
) -> None:
    sidecar = AdmissionMiddleware(app_without_admission(), policy=mounted("told"))
    recorder = recorded(sidecar.controller)
    async with serving(sidecar, lifespan="off") as served:
        for _ in range(2):
            assert (await ask(served.url)).status == 200
        await sidecar.controller.pool.close()
    recorder.check()  # also: who is said to have waited was said to be queued


async def test_a_client_in_the_same_process_needs_no_server(mounted: Callable[[str], Path], store: RedisServer) -> None:
    sidecar = AdmissionMiddleware(app_without_admission(), policy=mounted("in-process"))
    transport = httpx2.ASGITransport(sidecar)
    async with httpx2.AsyncClient(transport=transport, base_url="http://sidecar") as client:
        for _ in range(3):
            answer = await client.post(CHAT, json=request())
            assert (answer.status_code, answer.headers["x-admission-tier"]) == (200, "low")
        assert members(store, "in-process") == 1
    await sidecar.controller.pool.close()
    assert (members(store, "in-process"), of_replicas(store, "in-process")) == (0, [])


def test_a_test_client_that_has_a_loop_for_each_request(mounted: Callable[[str], Path], store: RedisServer) -> None:
    """Starlette's, used without `with`: neither a lifespan nor a loop that outlives a request."""
    client = starlettes_client(app_with_its_pool(mounted("loops")))
    for _ in range(2 * SLOTS):
        answer = client.post(CHAT, json=request())
        assert (answer.status_code, answer.headers["x-admission-tier"]) == (200, "low")
    assert members(store, "loops") == 1


def test_a_test_client_with_a_lifespan_leaves_nothing_behind(
    mounted: Callable[[str], Path], store: RedisServer
) -> None:
    with starlettes_client(app_with_its_pool(mounted("client"))) as client:
        assert client.post(CHAT, json=request()).status_code == 200
        assert members(store, "client") == 1
    assert (members(store, "client"), of_replicas(store, "client")) == (0, [])


def starlettes_client(app: Any) -> Any:
    """Starlette's test client, where the HTTP client that this version of it wants is installed."""
    try:
        from starlette.testclient import TestClient
    except RuntimeError as wanting:
        pytest.skip(str(wanting).splitlines()[0])
    return TestClient(app)


def app_without_admission() -> FastAPI:
    app = FastAPI()

    @app.post(CHAT)
    async def chat() -> dict[str, bool]:
        return {"ok": True}

    return app


@pytest.mark.parametrize("turns", range(6))
async def test_a_pool_that_is_closed_while_a_call_is_under_way_takes_its_leave(
    turns: int, mounted: Callable[[str], Path], store: RedisServer
) -> None:
    """A lease that ends just before the server does, so many turns of the event loop."""
    pool = AdmissionMiddleware(app_without_admission(), policy=mounted(f"closing-{turns}")).controller.pool
    await pool.open()
    ending, held = await pool.enter(Ask(1, "", 1, 10, 1)), await pool.enter(Ask(1, "", 1, 10, 1))
    assert ending.settle()
    for _ in range(turns):
        await asyncio.sleep(0)
    await pool.close()
    assert held.grant is not None
    assert (members(store, f"closing-{turns}"), of_replicas(store, f"closing-{turns}")) == (0, [])


@pytest.mark.parametrize("turns", range(5))
async def test_a_pool_that_is_closed_when_the_store_has_forgotten_it_does_not_come_back(
    turns: int, mounted: Callable[[str], Path], spare: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hear of it by its good-bye, or by a call that is under way, after which it states what it has."""
    policy = mounted("forgotten")
    monkeypatch.setenv(STORE_VARIABLE, begun(spare, "forgotten").url)
    pool = AdmissionMiddleware(app_without_admission(), policy=policy).controller.pool
    await pool.open()
    ending, held = await pool.enter(Ask(1, "", 1, 10, 1)), await pool.enter(Ask(1, "", 1, 10, 1))
    spare.command("FLUSHALL")
    assert ending.settle()
    for _ in range(turns):
        await asyncio.sleep(0)
    await pool.close()
    assert held.grant is not None
    assert (members(spare, "forgotten"), of_replicas(spare, "forgotten")) == (0, [])


@pytest.mark.parametrize("variable", [True, False])
async def test_a_policy_may_name_the_store_and_the_environment_goes_before_it(
    mounted: Callable[[str], Path], store: RedisServer, variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = mounted("named")
    monkeypatch.setenv(STORE_VARIABLE, store.url if variable else "")
    policy.write_text(named("named", store="redis://127.0.0.1:9/0" if variable else store.url))
    async with serving(app_with_its_pool(policy)) as served:
        assert (await ask(served.url)).status == 200
        assert members(store, "named") == 1


async def test_a_process_that_takes_the_pool_over_brings_its_own_tiers(
    mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounted("tiers")
    other = tmp_path / "other.yaml"
    other.write_text(named("tiers").replace("high: {}", "urgent: {}"))
    first = AdmissionMiddleware(app_without_admission(), policy=tmp_path / "policy.yaml")
    refused = AdmissionMiddleware(app_without_admission(), policy=other)
    async with serving(first) as old, serving(refused) as new:
        assert [(await ask(served.url)).status for served in (old, new)] == [200, 503]
        assert "has the tiers high, low, and the policy of " in refused.controller.readiness()[0]
    other.write_text(other.read_text() + "max_choices: 3\n")
    taking = AdmissionMiddleware(app_without_admission(), policy=other, takes_over_pool=True)
    async with serving(first) as old, serving(taking) as new:
        assert (await ask(new.url)).status == 200
        await until(first.controller.readiness)
        assert (await ask(old.url)).status == 503


async def test_a_server_that_stops_while_requests_run_and_wait_leaves_nothing_of_them(
    mounted: Callable[[str], Path], store: RedisServer, tmp_path: Path
) -> None:
    """A request that waits at another replica gets in at once, and not when the silence of this one is noticed."""
    other = tmp_path / "other.yaml"
    policy = mounted("stops")
    other.write_text(named("stops", max_choices="3"))
    remaining = AdmissionMiddleware(app_without_admission(), policy=other)
    pool: Any = remaining.controller.pool
    async with serving(remaining) as staying, AsyncExitStack() as clients:
        async with serving(app_with_its_pool(policy)) as served:
            for _ in range(SLOTS):
                await clients.enter_async_context(streaming(served.url))
            cut_off = asyncio.create_task(ask(served.url))
            await until(lambda: (pool.state()["leases"], pool.state()["waiting"]) == (SLOTS, 1))
            asked = asyncio.create_task(ask(staying.url))
            await until(lambda: pool.state()["waiting"] == 2)
        assert (await asyncio.wait_for(asked, DEAD_US / 2e6)).status == 200
        with pytest.raises(aiohttp.ClientError):
            await cut_off
        assert members(store, "stops") == 1
