"""One pool, many replicas, as an operator runs them: `sidecar serve` processes, a store, and an engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
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
from sidecar.pools.calls import DEAD_US, HEARTBEAT_US
from sidecar.pools.redis import connection
from sidecar.pools.redis.connection import ledger_key
from tests.support.middleware import recorded
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.serving import serving
from tests.support.shared_pools import begun

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
FOREVER = 100_000  # tokens: at 10 ms each, longer than any test
SILENCE_S = DEAD_US / 1e6
A_BEAT_S = HEARTBEAT_US / 1e6 + 1.5
"""Within a heartbeat, on a machine with other things to do."""
AT_LAST_S = 30.0
"""Ten heartbeats: longer than anything takes that comes at all."""
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


# -- processes


@contextmanager
def command(log: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`sidecar ...`, which writes its errors to `log`; killed at the end of the block if it is still there."""
    argv = [sys.executable, "-m", "sidecar.cli", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != STORE_VARIABLE}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, text=True, env={**inherited, **environment}
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@dataclass
class Replica:
    """A running `sidecar serve`."""

    process: subprocess.Popen[str]
    url: str
    admin_url: str
    log: Path

    async def get(self, path: str) -> tuple[int, Any]:
        """One of its admin pages."""
        async with aiohttp.ClientSession() as session, session.get(self.admin_url + path) as response:
            return response.status, await response.json()

    async def pool(self) -> Any:
        """The pool as it shows it."""
        _, state = await self.get("/state")
        return state["pool"]

    async def ready(self) -> tuple[int, list[str], list[str]]:
        """The status of the readiness page, its reasons and its notices."""
        status, page = await self.get("/readyz")
        return status, page["reasons"], page["notices"]

    async def shows(
        self,
        *,
        leases: int | None = None,
        waiting: int | None = None,
        replicas: int | None = None,
        state: str | None = None,
        within_s: float = AT_LAST_S,
    ) -> None:
        """Waits until its page says so."""
        wanted = {"leases": leases, "waiting": waiting, "replicas": replicas, "state": state}
        found: dict[str, Any] = {}

        async def does() -> bool:
            pool = await self.pool()
            found.update({**pool["store"], "leases": pool["leases"], "waiting": pool["waiting"]})
            return all(value is None or found[name] == value for name, value in wanted.items())

        await until(does, within_s, lambda: f"wanted {wanted}, got {found}")


async def until(condition: Callable[[], Awaitable[bool]], within_s: float, what: Callable[[], str]) -> None:
    end_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what()}"
        await asyncio.sleep(0.02)


def address(process: subprocess.Popen[str], log: Path) -> str:
    """The address in the next line that it prints."""
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found, log.read_text()
    return found[0]


@contextmanager
def replicas(
    folder: Path, count: int, engine: str, policy: str, *more: str, **environment: str
) -> Iterator[list[Replica]]:
    """So many at once; `environment` tells them the store."""
    folder.mkdir(exist_ok=True)
    path = folder / "policy.yaml"
    path.write_text(policy)
    served = ("serve", "--upstream", engine, "--policy", str(path), "--port", "0", "--admin-port", "0", *more)
    with ExitStack() as stack:
        logs = [folder / f"errors-{number}" for number in range(count)]
        started = [stack.enter_context(command(log, *served, **environment)) for log in logs]
        yield [
            Replica(process, address(process, log), address(process, log), log)
            for process, log in zip(started, logs, strict=True)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[RedisServer]:
    with RedisServer(first_binary(), folder) as server:
        yield server


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[RedisServer]:
    """A store of the test's own, to be killed."""
    with RedisServer(first_binary(), tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    """The address of an emulated engine with room for everybody: what has to wait waits at the sidecar."""
    log = folder / "engine"
    emulated = ("emulate", "--engine", "vllm", "--port", "0", "--step-ms", "10", "--max-num-seqs", "64")
    with command(log, *emulated) as process:
        yield address(process, log)


@pytest.fixture(scope="module")
def pair(folder: Path, engine: str, store: RedisServer) -> Iterator[tuple[Replica, Replica]]:
    """Two replicas that share one pool of `SLOTS` requests."""
    begun(store, "pair")
    with replicas(folder / "pair", 2, engine, named("pair"), SIDECAR_STORE=store.url) as (first, second):
        yield first, second


@pytest.fixture
async def quiet(pair: tuple[Replica, Replica]) -> AsyncIterator[tuple[Replica, Replica]]:
    """The pair, sharing a pool in which nothing is held, before and after the test."""
    for replica in pair:
        await nothing_left(replica)
    yield pair
    for replica in pair:
        await nothing_left(replica)


async def nothing_left(replica: Replica, replicas: int = 2) -> None:
    assert (await ask(replica.url)).status == 200  # sooner than its heartbeat, it hears how the pool is
    await replica.shows(leases=0, waiting=0, replicas=replicas, state="shared")
    pool = await replica.pool()
    assert pool["store"]["own"] == {"leases": 0, "waiting": 0}
    assert [tier["held"] for tier in pool["tiers"]] == [{"tokens": 0, "requests": 0}] * 2
    assert [tier["queued"] for tier in pool["tiers"]] == [{"tokens": 0, "requests": 0}] * 2


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
    limit = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url + CHAT, json=request(**members)) as response,
    ):
        return Answer(response.status, response.headers, await response.json())


@asynccontextmanager
async def streaming(url: str, max_tokens: int = FOREVER) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream that has begun, and runs for as long as the block; then the client hangs up."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json=request(max_tokens=max_tokens, stream=True)) as response,
    ):
        assert response.status == 200
        assert await response.content.readline()
        yield response
        response.close()


@asynccontextmanager
async def holding(url: str, count: int) -> AsyncIterator[list[aiohttp.ClientResponse]]:
    """So many streams at once."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(streaming(url)) for _ in range(count)]


async def waits(replica: Replica, **members: Any) -> asyncio.Task[Answer]:
    """A request that has come to wait at `replica`."""
    asked = asyncio.create_task(ask(replica.url, **members))
    await replica.shows(waiting=1)
    assert not asked.done()
    return asked


async def hang_up(asked: asyncio.Task[Answer]) -> None:
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked


# -- one pool


@pytest.mark.long
async def test_what_one_replica_runs_the_other_shows_within_a_heartbeat(quiet: tuple[Replica, Replica]) -> None:
    first, second = quiet
    async with streaming(first.url):
        for replica in quiet:  # the first one may still know of what the second has just ended
            await replica.shows(leases=1, waiting=0, replicas=2, state="shared")
        pools = [await first.pool(), await second.pool()]
    assert pools[0]["tiers"] == pools[1]["tiers"]
    assert pools[0]["capacity"] == {"tokens": 10_000_000, "requests": SLOTS}
    low = next(tier for tier in pools[1]["tiers"] if tier["tier"] == "low")
    assert low["held"]["requests"] == 1
    assert low["held"]["tokens"] > FOREVER
    assert [pool["store"]["own"]["leases"] for pool in pools] == [1, 0]
    assert [pool["store"]["part"] for pool in pools] == [None, None]
    assert pools[0]["store"]["replica"] != pools[1]["store"]["replica"]
    assert {pool["store"]["pool"] for pool in pools} == {"pair"}


async def test_a_request_waits_for_what_the_other_replica_runs_and_gets_in_when_it_ends(
    quiet: tuple[Replica, Replica],
) -> None:
    first, second = quiet
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(holding(first.url, SLOTS - 1))
        last = await stack.enter_async_context(streaming(first.url, max_tokens=60))
        asked = asyncio.create_task(ask(second.url))
        await second.shows(waiting=1)
        await last.read()
        answer = await asyncio.wait_for(asked, AT_LAST_S)
        assert answer.status == 200
        assert answer.headers["x-admission-tier"] == "low"
        assert int(answer.headers["x-admission-wait-ms"]) > 0
        assert answer.json["usage"]["completion_tokens"] == 2


async def test_a_request_that_finds_room_does_not_wait(quiet: tuple[Replica, Replica]) -> None:
    """The negative control of the one before."""
    first, second = quiet
    async with holding(first.url, SLOTS - 1):
        answer = await ask(second.url)
        assert (answer.status, answer.headers["x-admission-wait-ms"]) == (200, "0")


@pytest.mark.long
async def test_a_client_that_hangs_up_while_it_waits_leaves_nothing_behind(quiet: tuple[Replica, Replica]) -> None:
    first, second = quiet
    async with holding(first.url, SLOTS):
        asked = await waits(second)
        await first.shows(leases=SLOTS, waiting=1)
        await hang_up(asked)
        for replica in quiet:
            await replica.shows(leases=SLOTS, waiting=0)


# -- a replica that ends


@pytest.mark.long
async def test_what_a_replica_held_is_free_at_once_when_it_is_asked_to_end(
    folder: Path, engine: str, store: RedisServer, quiet: tuple[Replica, Replica]
) -> None:
    """When its grace is over, streams are cut off, a waiting request is refused, and it takes leave of the store."""
    _, second = quiet
    leaving = replicas(folder / "leaving", 1, engine, named("pair"), "--grace", "200ms", SIDECAR_STORE=store.url)
    with leaving as (third,):
        async with AsyncExitStack() as stack:
            for _ in range(SLOTS):
                await stack.enter_async_context(suppressed(streaming(third.url)))
            cut_off = asyncio.create_task(ask(third.url))
            await third.shows(leases=SLOTS, waiting=1)
            asked = asyncio.create_task(ask(second.url))
            await second.shows(waiting=2, replicas=3)

            third.process.send_signal(signal.SIGTERM)
            assert (await asyncio.wait_for(asked, SILENCE_S / 2)).status == 200
            assert (await cut_off).status == 503
            assert await asyncio.to_thread(third.process.wait, 10) == 0
    for replica in quiet:
        await nothing_left(replica)
    assert "Traceback" not in third.log.read_text()


@pytest.mark.soak
async def test_what_a_killed_replica_held_is_back_as_soon_as_its_silence_is_noticed(
    folder: Path, engine: str, store: RedisServer, quiet: tuple[Replica, Replica]
) -> None:
    _, second = quiet
    with replicas(folder / "killed", 1, engine, named("pair"), SIDECAR_STORE=store.url) as (third,):
        async with AsyncExitStack() as stack:
            for _ in range(SLOTS):
                await stack.enter_async_context(suppressed(streaming(third.url)))
            asked = asyncio.create_task(ask(second.url))
            await second.shows(leases=SLOTS, waiting=1, replicas=3)
            third.process.kill()
            killed_s = time.monotonic()
            answer = await asyncio.wait_for(asked, SILENCE_S + A_BEAT_S)
            assert time.monotonic() - killed_s > SILENCE_S - A_BEAT_S  # its last heartbeat came before
    assert answer.status == 200
    assert int(answer.headers["x-admission-wait-ms"]) > 5_000


@asynccontextmanager
async def suppressed(stream: Any) -> AsyncIterator[None]:
    """A stream that is cut off from the other side."""
    with contextlib.suppress(aiohttp.ClientError):
        async with stream:
            yield


# -- a store that is lost


@pytest.mark.long
async def test_without_the_store_replicas_go_on_with_their_part_and_say_so(
    store: RedisServer, quiet: tuple[Replica, Replica]
) -> None:
    first, second = quiet
    async with streaming(first.url) as stream:
        await second.shows(leases=1)
        store.kill()
        answers = await asyncio.gather(*(ask(replica.url) for replica in quiet for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 8
        for replica in quiet:
            await replica.shows(state="divided")
            status, reasons, (notice,) = await replica.ready()
            assert (status, reasons) == (200, [])
            assert notice.startswith("the store has not answered for ")
            assert "only this replica's requests are shown, its part of the pool is" in notice
            assert (await replica.pool())["store"]["replicas"] == 2
        parts = [(await replica.pool())["store"]["part"] for replica in quiet]
        assert [part["requests"] for part in parts] == [2, 1]  # of 4, 1 is held: 1 + 3 // 2, 3 // 2

        store.restart()
        for replica in quiet:
            await replica.shows(leases=1, waiting=0, replicas=2, state="shared")
            assert await replica.ready() == (200, [], [])
        assert await stream.content.readline()
    for replica in quiet:
        await nothing_left(replica)
        assert "store lost, pool pair is divided" in replica.log.read_text()
        assert "store is back" in replica.log.read_text()


async def test_closed_answers_503_until_the_store_is_back(folder: Path, engine: str, spare: RedisServer) -> None:
    closed = named("closed", on_store_loss="closed")
    with replicas(folder / "closed", 1, engine, closed, SIDECAR_STORE=spare.url) as (replica,):
        assert (await ask(replica.url)).status == 200
        async with streaming(replica.url) as running:
            spare.kill()
            is_refused(await ask(replica.url))
            await replica.shows(state="closed")
            status, (reason,), notices = await replica.ready()
            assert (status, notices) == (503, [])
            assert reason.startswith("the store has not answered for ")
            assert "new requests are refused" in reason
            assert (await replica.get("/healthz"))[0] == 200
            is_refused(await ask(replica.url, stream=True))
            assert await running.content.readline()  # what runs, runs on

            spare.restart()
            await replica.shows(leases=1, state="shared")
            assert await replica.ready() == (200, [], [])
            assert (await ask(replica.url)).status == 200


def is_refused(answer: Answer, why: str = "cannot be reached") -> None:
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "store_unavailable")
    assert why in error["message"]


async def test_a_store_that_comes_later_is_found(folder: Path, engine: str, spare: RedisServer) -> None:
    url = spare.url
    spare.kill()
    closed = named("early", on_store_loss="closed")
    with replicas(folder / "early", 1, engine, closed, SIDECAR_STORE=url) as (replica,):
        status, (reason,), _ = await replica.ready()
        assert status == 503
        assert reason == f"the store has not been reached yet: connection refused by {url}"
        assert (await replica.get("/healthz"))[0] == 200
        is_refused(await ask(replica.url), "the store of this pool has not been reached yet")
        logged = replica.log.read_text()
        assert f"the store of pool early has not been reached yet: connection refused by {url}" in logged
        assert "store lost" not in logged
        pool = await replica.pool()
        assert (pool["store"]["replicas"], pool["store"]["part"]) == (None, {"tokens": 0, "requests": 0})
        assert (pool["store"]["reached"], pool["capacity"]) == (False, {"tokens": 0, "requests": 0})

        spare.restart()
        await replica.shows(replicas=1, state="shared")
        assert await replica.ready() == (200, [], [])
        assert (await ask(replica.url)).status == 200


# -- where the store is


@pytest.mark.long
async def test_a_policy_may_name_the_store_and_the_environment_goes_before_it(
    folder: Path, engine: str, store: RedisServer, spare: RedisServer
) -> None:
    url = spare.url
    with ExitStack() as stack:
        nowhere = named("named", store="redis://127.0.0.1:9/0")
        before = replicas(folder / "variable", 1, engine, nowhere, SIDECAR_STORE=url)
        named_only = replicas(folder / "policy", 1, engine, named("named", store=url), SIDECAR_STORE="")
        both = [*stack.enter_context(before), *stack.enter_context(named_only)]
        for replica in both:
            await replica.shows(replicas=2, state="shared")
        async with streaming(both[0].url):
            await both[1].shows(leases=1)


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


# -- a pool with other tiers


OTHER_TIERS = POLICY.replace("high: {}", "urgent: {}") + "pool: tiers\n"


@pytest.mark.long
async def test_a_process_with_other_tiers_is_refused_and_says_so_until_it_takes_the_pool_over(
    folder: Path, engine: str, spare: RedisServer
) -> None:
    with ExitStack() as stack:
        start = lambda name, policy, *more: stack.enter_context(  # noqa: E731
            replicas(folder / name, 1, engine, policy, *more, SIDECAR_STORE=spare.url)
        )[0]
        first, second = start("first-tiers", named("tiers")), start("second-tiers", OTHER_TIERS)
        status, (reason,), _ = await second.ready()
        assert status == 503
        assert reason.startswith(
            "the pool refuses this process: pool tiers has the tiers high, low, and the policy of "
        )
        assert "has urgent, low; " in reason
        assert "the pool refuses" not in reason.removeprefix("the pool refuses")
        assert "pool tiers refuses this process: " in second.log.read_text()
        refused = await ask(second.url)
        assert (refused.status, refused.json["error"]["code"]) == (503, "store_unavailable")
        assert (await ask(first.url)).status == 200
        assert (await first.ready())[0] == 200

        third = start("third-tiers", OTHER_TIERS, "--take-over-pool")
        assert (await third.ready())[0] == 200
        assert (await ask(third.url)).status == 200
        await second.shows(state="shared")
        await first.shows(state="closed")
        assert (
            "has the tiers urgent, low, and the policy of this process has high, low; " in (await first.ready())[1][0]
        )
        assert (await ask(first.url)).status == 503


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


async def test_a_server_that_stops_while_requests_run_and_wait_leaves_nothing_of_them(
    mounted: Callable[[str], Path], quiet: tuple[Replica, Replica]
) -> None:
    first, second = quiet
    async with AsyncExitStack() as clients:
        async with serving(app_with_its_pool(mounted("pair"))) as served:
            for _ in range(SLOTS):
                await clients.enter_async_context(suppressed(streaming(served.url)))
            cut_off = asyncio.create_task(ask(served.url))
            await first.shows(leases=SLOTS, waiting=1, replicas=3)
            asked = asyncio.create_task(ask(second.url))
            await second.shows(waiting=2)
        assert (await asyncio.wait_for(asked, SILENCE_S / 2)).status == 200
        with pytest.raises(aiohttp.ClientError):
            await cut_off
