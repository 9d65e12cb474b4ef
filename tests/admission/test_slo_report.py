"""What the pool is told of a guarded tier's requests, and what is no fault of less important work, in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from sidecar.admission.slo import SloReport
from sidecar.engines.watch import EngineState
from sidecar.events import Obstacle
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from tests.support.each import each
from tests.support.middleware import Caller, TestedMiddleware, answer, chunk, start, whole_body
from tests.support.virtual_time import run_virtually, virtual_now_us

POLICY = """\
engine: none
capacity: {{requests: 4}}
{more}
tiers:
  critical: {{preempt_after: 0s}}
  high: {{slo: {{ttft: 1s, tpot: 100ms{hold}}}, preemptible: true{high}}}
  batch: {{reserve: 100%, slo: {{ttft: 1s, tpot: 100ms}}, preemptible: true}}
default_tier: high
anonymous: critical
sources: [header]
disconnect_grace: 2s
tenants: acme.yaml
"""
ACME = 'tenant: acme\nkeys: ["sha256:{digest}"]\ntier: critical\nmax_tier: critical\n{more}'
KEY = "sk-acme"
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
MET, MISSED = False, True


class Script:
    """One answer: seconds until the first of so many tokens, and between two. `size` is that of an event."""

    def __init__(self, first_s: float, gap_s: float = 0.05, tokens: int = 11, **more: Any) -> None:
        self.first_s, self.gap_s, self.tokens = first_s, gap_s, tokens
        self.size: int = more.pop("size", len(EVENT))
        self.prompt: int = more.pop("prompt", 2)
        self.headers: dict[str, str] = more.pop("headers", {})
        self.status: int = more.pop("status", 200)
        self.counts: bool = more.pop("counts", True)
        self.members: dict[str, Any] = {"stream": True, **more}

    @property
    def body(self) -> bytes:
        prompt = "word " * self.prompt
        return json.dumps(
            {"model": "m", "max_tokens": self.tokens, "messages": [{"role": "user", "content": prompt}], **self.members}
        ).encode()


class NotingPool(Pool):
    """A pool that keeps what it is told of objectives, and when."""

    noted: list[tuple[float, int, str, bool]]

    def note_slo(self, tier: int, tenant: str, is_missed: bool) -> None:
        self.noted.append((virtual_now_us() / 1e6 - 1000, tier, tenant, is_missed))


class Health:
    """An engine's health that the test decides."""

    def __init__(self) -> None:
        self.on_change: list[Callable[[], None]] = []
        self.is_usable, self.reason, self.for_s, self.state = True, "it is away", 1.0, EngineState.DOWN

    def change(self, *, is_usable: bool) -> None:
        self.is_usable = is_usable
        for changed in self.on_change:
            changed()


class Reader(Caller):
    """A client that reads no more than so many bytes before `reads` is set."""

    def __init__(self, *arguments: Any, most_bytes: int | None = None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.left, self.reads = most_bytes, asyncio.Event()

    async def _send(self, message: Any) -> None:
        await super()._send(message)
        if self.left is not None and not self.reads.is_set():
            self.left -= len(message.get("body", b""))
            if self.left < 0:
                await self.reads.wait()


class World:
    """A middleware before an engine that answers by scripts. `noted` is what its pool is told."""

    def __init__(self, policy: Policy) -> None:
        self.scripts: list[Script] = []
        self.called = asyncio.Event()
        self.pool = NotingPool(policy, virtual_now_us)
        self.pool.noted = []
        self.health = Health()
        self.sidecar = TestedMiddleware(
            self._engine,
            policy=policy,
            pool=self.pool,
            engine_watch=self.health,
        )

    @property
    def noted(self) -> list[bool]:
        assert all(noted[1:3] == (1, "acme") for noted in self.pool.noted)
        return [is_missed for *_, is_missed in self.pool.noted]

    def caller(self, script: Script, tier: str = "high", most_bytes: int | None = None) -> Reader:
        named = {"authorization": f"Bearer {KEY}", "x-priority": tier, **script.headers}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        return Reader(self.sidecar, script.body, headers=headers, most_bytes=most_bytes)

    def begin(self, script: Script, tier: str = "high") -> asyncio.Task[None]:
        self.scripts.append(script)
        return self.caller(script, tier).begin()

    async def ask(self, script: Script, tier: str = "high") -> list[bool]:
        """One request. Returns what the pool was told of it."""
        before = len(self.noted)
        await self.begin(script, tier)
        return self.noted[before:]

    async def _engine(self, scope: Any, receive: Any, send: Any) -> None:
        body = await whole_body(receive)
        script = next(script for script in self.scripts if script.body == body)
        self.called.set()
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((gone,), timeout=script.first_s)
            if not gone.done():
                await (self._stream if script.members["stream"] and script.status == 200 else self._whole)(script, send)
        finally:
            gone.cancel()

    async def _stream(self, script: Script, send: Any) -> None:
        await start(send, content_type=b"text/event-stream")
        for number in range(script.tokens):
            if number:
                await asyncio.sleep(script.gap_s)
            await chunk(send, EVENT[:-2].ljust(script.size - 2) + b"\n\n")
        if script.counts:
            usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % script.tokens
            await chunk(send, usage)
        await chunk(send, b"data: [DONE]\n\n", more=False)

    async def _whole(self, script: Script, send: Any) -> None:
        await asyncio.sleep(script.gap_s * (script.tokens - 1))
        usage = {"usage": {"prompt_tokens": 9, "completion_tokens": script.tokens}} if script.counts else {}
        body = json.dumps({"choices": [], **usage}).encode() if script.status == 200 else b'data: {"error": {}}\n\n'
        await answer(send, body, script.status)


# Batch may always fill the pool: what the pool does with what it is told is not of this file.


def play(
    folder: Path,
    scene: Callable[[World], Awaitable[Any]],
    *,
    more: str = "",
    high: str = "",
    hold: str = ", hold: 97%",
    tenant: str = "",
) -> Any:
    """Plays a scene in a world with a policy of its own, to the end of every request."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "acme.yaml").write_text(ACME.format(digest=digest, more=tenant))
    (folder / "policy.yaml").write_text(POLICY.format(more=more, high=high, hold=hold))

    async def main() -> Any:
        world = World(load(folder))
        found = await scene(world)
        await world.sidecar.watchdog.emptied()
        await world.sidecar.pending_aborts.close(waits=False)
        return found

    return run_virtually(main())


def told(folder: Path, *scripts: Script, **settings: Any) -> list[bool]:
    """What the pool is told of requests that come one after another."""

    async def scene(world: World) -> list[bool]:
        for script in scripts:
            await world.ask(script)
        return world.noted

    found: list[bool] = play(folder, scene, **settings)
    return found


# -- what is counted


@each(
    ("script", "noted"),
    [
        (Script(0.5), [MET]),
        (Script(1.1), [MISSED]),
        (Script(0.5, 0.11), [MISSED]),
        (Script(1.5, 0.11), [MISSED]),
        (Script(0.5, tokens=1), [MET]),
        (Script(0.5, 0.11, counts=False), [MISSED]),
        (Script(0.5, 0.04, n=2), [MET]),  # eleven events of two sequences
        (Script(0.5, 0.06, n=2), [MISSED]),
        (Script(0.9, 0.12, stream=False, n=2), [MISSED]),
        (Script(0.9, 0.1, stream=False), [MET]),
        (Script(0.9, 0.12, stream=False), [MISSED]),
        (Script(9, 0.1, stream=False), [MISSED]),
        (Script(9, 0.1, stream=False, counts=False), []),  # of how many tokens?
    ],
)
def test_each_request_is_reported_once_by_its_first_token_and_its_pace(
    tmp_path: Path, script: Script, noted: list[bool]
) -> None:
    assert told(tmp_path, script) == noted


@each(
    ("hold", "more"),
    [("", ""), (", hold: 97%", "mode: pass")],
)
def test_nothing_is_reported_where_no_tier_is_guarded_or_every_request_passes(
    tmp_path: Path, hold: str, more: str
) -> None:
    assert told(tmp_path, Script(1.5, 0.2), hold=hold, more=more) == []


def test_of_other_tiers_nothing_is_reported(tmp_path: Path) -> None:
    assert play(tmp_path, lambda world: world.ask(Script(1.5, 0.2), "batch")) == []
    assert play(tmp_path, lambda world: world.ask(Script(1.5, 0.2), "critical")) == []


def test_a_guarded_tier_is_followed_in_either_order(tmp_path: Path) -> None:
    assert told(tmp_path, Script(1.5), more="order: gain") == [MISSED]


def test_an_overdue_first_token_is_reported_before_it_comes_and_once(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        asked = world.begin(Script(30.0))
        await asyncio.sleep(1)
        assert world.noted == []
        await asyncio.sleep(2.5)
        assert world.noted == [MISSED]
        await asked
        assert world.noted == [MISSED]

    play(tmp_path, scene)


def test_a_request_that_waits_behind_less_important_work_has_missed_while_it_waits(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        batch = [world.begin(Script(30.0, tokens=1, user=str(number)), "batch") for number in range(4)]
        await world.called.wait()
        asked = [world.begin(Script(0.5)), world.begin(Script(0.4, 0.01, stream=False))]
        await asyncio.sleep(3.5)
        assert world.noted == [MISSED, MISSED]
        await asyncio.gather(*asked, *batch)
        assert world.noted == [MISSED, MISSED]

    play(tmp_path, scene, more="max_preemptions: 0")


@each(("most", "noted"), [("900ms", []), ("1500ms", [MISSED]), ("30s", [MISSED])])
def test_a_request_that_is_refused_after_its_first_token_was_due_has_missed(
    tmp_path: Path, most: str, noted: list[bool]
) -> None:
    async def scene(world: World) -> list[bool]:
        batch = [world.begin(Script(60.0, tokens=1, user=str(number)), "batch") for number in range(4)]
        await world.called.wait()
        await asyncio.gather(world.begin(Script(0.5)), *batch)
        return world.noted

    assert play(tmp_path, scene, more="max_preemptions: 0", high=f", queue: {{max_wait: {most}}}") == noted


# -- what is not the fault of less important work


def lessons(us_per_token: float) -> Sequence[Script]:
    """Answers by which an engine's time for a token of a prompt is learned."""
    return [Script(size * us_per_token / 1e6, prompt=size, tokens=9) for size in (200, 900, 400, 1800) * 4]


def test_a_prompt_that_an_idle_engine_could_not_compute_in_time_is_no_miss(tmp_path: Path) -> None:
    long = Script(5000 * 0.0004, prompt=5000)
    assert told(tmp_path, long) == [MISSED]  # who knows how fast this engine is?
    assert (
        told(tmp_path, *lessons(400), Script(1.5, prompt=1500))[-1] is MISSED
    )  # the same engine, busy with something else
    assert told(tmp_path, *lessons(400), long) == [MET] * 16  # and it was not in time


def test_a_whole_answer_to_such_a_prompt_is_no_miss(tmp_path: Path) -> None:
    long = Script(5000 * 0.0004, 0.1, prompt=5000, stream=False)  # nor is it a good one
    assert told(tmp_path, *lessons(400), long) == [MET] * 16


def test_a_client_that_does_not_read_makes_no_miss(tmp_path: Path) -> None:
    async def scene(world: World) -> list[bool]:
        script = Script(0.5, tokens=400, size=250)
        world.scripts.append(script)
        caller = world.caller(script, most_bytes=64 * 1024)
        asked = caller.begin()
        await asyncio.sleep(100)
        caller.reads.set()
        await asked
        return world.noted

    assert play(tmp_path, scene) == [MET]


@each(("gap_s", "is_missed"), [(0.09, MET), (0.11, MISSED)])
def test_of_a_long_answer_the_beginning_says_how_fast_its_engine_is(
    tmp_path: Path, gap_s: float, is_missed: bool
) -> None:
    assert told(tmp_path, Script(0.5, gap_s, tokens=400, size=250)) == [is_missed]


@each(("first_s", "leaves_s", "noted"), [(30, 0.9, []), (30, 1.4, []), (0.5, 1.0, [])])
def test_what_its_client_has_left_is_no_miss(
    tmp_path: Path, first_s: float, leaves_s: float, noted: list[bool]
) -> None:
    async def scene(world: World) -> list[bool]:
        script = Script(first_s, 0.2, tokens=100)
        world.scripts.append(script)
        caller = world.caller(script)
        asked = caller.begin()
        await asyncio.sleep(leaves_s)
        caller.leave()
        await asked
        await asyncio.sleep(60)
        return world.noted

    assert play(tmp_path, scene) == noted


def test_an_app_that_does_not_listen_does_not_hide_that_the_client_has_left(tmp_path: Path) -> None:
    async def scene(world: World) -> list[bool]:
        async def deaf(scope: Any, receive: Any, send: Any) -> None:
            await whole_body(receive)
            await asyncio.sleep(30)
            await answer(send, b"{}")

        world.sidecar.use_app(deaf)
        caller = world.caller(Script(30))
        asked = caller.begin()
        caller.leave()
        await asked
        return world.noted

    assert play(tmp_path, scene) == []


def test_waiting_for_the_tiers_own_limit_is_no_miss(tmp_path: Path) -> None:
    async def scene(world: World) -> list[bool]:
        scripts = [Script(0.5, 0.09, tokens=21, user=str(number)) for number in range(4)]
        await asyncio.gather(*map(world.begin, scripts))
        return world.noted

    assert play(tmp_path, scene, high=", limit: 25%") == [MET]  # the three others were late by it


def test_which_obstacles_would_be_there_without_less_important_work() -> None:
    for obstacle in Obstacle:
        noted: list[bool] = []
        report = SloReport(noted.append, 100)
        report.queued(lambda: (obstacle, ""))  # noqa: B023
        assert not report.ends(99)
        assert report.ends(100)
        report.first_token(is_missed=True)
        excused = {Obstacle.ENGINE, Obstacle.STORE, Obstacle.LIMIT, Obstacle.GUARDED}
        assert noted == ([] if obstacle in excused else [MISSED]), obstacle


def test_waiting_that_began_before_the_tier_was_at_its_limit_is_no_miss(tmp_path: Path) -> None:
    async def scene(world: World) -> list[bool]:
        batch = [world.begin(Script(0.5, tokens=1, user="0"), "batch")]
        batch += [world.begin(Script(9.0, tokens=1, user=str(number)), "batch") for number in (1, 2)]
        high = [world.begin(Script(0.9, 0.05, user=str(number))) for number in range(3)]
        await asyncio.gather(*batch, *high)
        return world.noted

    noted = play(tmp_path, scene, high=", limit: 50%", more="max_preemptions: 0")
    assert sorted(noted) == [MET, MISSED]  # the second waited for batch alone, the third for the limit


def test_waiting_for_an_engine_that_is_away_is_no_miss(tmp_path: Path) -> None:
    async def before(world: World) -> list[bool]:
        world.health.change(is_usable=False)
        asked = world.begin(Script(0.5))
        await asyncio.sleep(20)
        assert world.noted == []
        world.health.change(is_usable=True)
        await asked
        return world.noted

    async def paused(world: World) -> list[bool]:
        world.pool.pause("all its engines drain")
        asked = world.begin(Script(0.5))
        await asyncio.sleep(20)
        world.pool.pause(None)
        await asked
        return world.noted

    async def meanwhile(world: World) -> list[bool]:
        batch = [world.begin(Script(0.8, tokens=1, user=str(number)), "batch") for number in range(4)]
        await world.called.wait()
        asked = world.begin(Script(0.5))
        await asyncio.sleep(0.1)
        world.health.change(is_usable=False)
        await asyncio.sleep(0.1)
        world.health.change(is_usable=True)
        await asyncio.gather(asked, *batch)
        return world.noted

    assert play(tmp_path, before) == []
    assert play(tmp_path, paused) == []
    assert play(tmp_path, meanwhile) == []


def test_an_error_of_the_engine_is_no_miss(tmp_path: Path) -> None:
    assert told(tmp_path, Script(1.5, 0, status=500), Script(1.5, status=500, stream=False)) == []


def test_what_more_important_work_took_the_room_of_is_no_miss(tmp_path: Path) -> None:
    async def scene(world: World) -> list[bool]:
        asked = world.begin(Script(0.6))
        await world.called.wait()
        scripts = [Script(2.0, tokens=1, user=str(number)) for number in range(4)]
        await asyncio.gather(*[world.begin(script, "critical") for script in scripts])
        await asked
        return world.noted

    assert play(tmp_path, scene, more="max_preemptions: 1") == []


def test_a_tenant_over_its_limits_says_nothing_of_the_tier_that_it_falls_to(tmp_path: Path) -> None:
    limits = "limits: {requests_per_minute: 1}\nover_limit: {downgrade: high}\n"

    async def scene(world: World) -> list[bool]:
        for number in range(3):
            await world.begin(Script(1.5, user=str(number)), "critical")
        return world.noted

    assert play(tmp_path, scene, tenant=limits) == []


def test_what_must_miss_hides_no_miss(tmp_path: Path) -> None:
    late = [Script(5000 * 0.0004, prompt=5000, user=str(number)) for number in range(9)]
    slow = Script(5000 * 0.0004, 0.11, prompt=5000)
    assert told(tmp_path, *lessons(400), *late, Script(1.5), slow) == [MET] * 16 + [MISSED] * 2


# -- headers


@each(
    ("headers", "noted"),
    [
        ({"x-slo-ttft-ms": "2000"}, [MISSED]),
        ({"x-slo-ttft-ms": "2000", "x-slo-tpot-ms": "200"}, [MET]),
        ({"x-slo-ttft-ms": "10"}, [MISSED]),
    ],
)
def test_a_header_loosens_the_objective(tmp_path: Path, headers: dict[str, str], noted: list[bool]) -> None:
    assert told(tmp_path, Script(1.5, 0.11, headers=headers)) == noted


def test_a_header_tightens_nothing(tmp_path: Path) -> None:
    assert told(tmp_path, Script(0.5, headers={"x-slo-ttft-ms": "10", "x-slo-tpot-ms": "1"})) == [MET]
