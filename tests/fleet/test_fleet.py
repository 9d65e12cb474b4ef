"""A fleet before emulated engines over real sockets: states, incarnations, offers, discovery's changes."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import pytest

from sidecar.engines import TensorRtLlm, Vllm
from sidecar.engines import watch as engine_watch
from sidecar.engines.pages import Health
from sidecar.engines.watch import EngineCheck, OutageCause
from sidecar.fleet.fleet import Fleet
from sidecar.fleet.member import MemberState
from sidecar.policy.capacity import Capacity
from sidecar.policy.fields import MOST_OF_AN_ENGINE
from sidecar.policy.fleet import EngineAddress, FleetPolicy
from sidecar.policy.rules import UNLIMITED
from sidecar.pools.engine_reader import HELD_BACK_S
from sidecar.pools.engines import EngineOffer
from tests.fleet.engines import FAST, READ, WRITTEN, LocalEngine, RudeEngine, engines, fleet_of, listed, states
from tests.support.redis_servers import free_port
from tests.support.waiting import now_us, open_sockets, other_tasks, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "RETRY_EVERY_S", 0.05)
    monkeypatch.setattr(engine_watch, "ANSWER_WITHIN_S", 0.3)
    monkeypatch.setattr(engine_watch, "COMES_WITHIN_S", 0.5)


def offer(fleet: Fleet, name: str) -> EngineOffer:
    return next(offer for offer in reversed(fleet.offers()) if offer.id.startswith(f"{name}#"))


async def test_engines_that_answer_at_the_start_are_offered_whole_at_once() -> None:
    tasks, sockets = other_tasks(), open_sockets()
    async with engines(3) as (a, b, c):
        addresses = [
            b.address("b", READ, prefill=500, speed=250),
            a.address("a"),
            c.address("c", Capacity(requests=3)),
        ]
        async with fleet_of(addresses) as fleet:
            assert states(fleet) == {"a#1": "ready", "b#1": "ready", "c#1": "ready"}
            assert fleet.offers() == [
                EngineOffer("a#1", 1000, 8, UNLIMITED, 1000, True),
                EngineOffer("b#1", 20_000, UNLIMITED, 500, 250, True),
                EngineOffer("c#1", UNLIMITED, 3, UNLIMITED, 1000, True),
            ]
            assert (fleet.readiness(), fleet.notices()) == ((), [])
    await until(lambda: (other_tasks(), open_sockets()) == (tasks, sockets))


async def test_an_engine_that_comes_later_is_used_then_and_starts_slowly() -> None:
    engine = LocalEngine()
    changes: list[dict[str, str]] = []
    async with fleet_of([engine.address("a")], on_change=lambda fleet: changes.append(dict(states(fleet)))) as fleet:
        assert states(fleet) == {"a#1": "down"}
        assert fleet.readiness() == (f"no engine can be used: a: connection refused by http://127.0.0.1:{engine.port}",)
        assert fleet.notices() == [
            f"engine a gets no requests (down): connection refused by http://127.0.0.1:{engine.port}"
        ]
        await engine.start()
        await until(lambda: states(fleet) == {"a#1": "starting"})
        found = offer(fleet, "a")
        assert (found.takes_new, found.ramp_us) == (True, 30_000_000)
        assert 0 <= now_us() - found.since_us < 2_000_000
        assert fleet.notices() == []
        await until(lambda: changes[-1] == {"a#1": "starting"})
    await engine.stop()


async def test_a_refused_connection_and_then_up_is_a_new_incarnation() -> None:
    async with engines(2) as (a, b), fleet_of([a.address("a"), b.address("b")]) as fleet:
        restarted: list[str] = []
        fleet.on_restart = lambda member: restarted.append(member.id)
        fleet.drain("a")
        await a.stop()
        await until(lambda: states(fleet)["a#1"] == "down")
        assert offer(fleet, "a").takes_new is False
        assert offer(fleet, "b").takes_new is True
        await a.start()
        await until(lambda: states(fleet) == {"a#2": "starting", "b#1": "ready"})
        assert restarted == ["a#2"]
        assert [offer.id for offer in fleet.offers()] == ["a#2", "b#1"]
        assert (fleet.member("a#1"), fleet.member("a#2")) == (None, fleet.members()[0])


async def test_a_process_that_says_it_is_the_same_is_no_new_incarnation_and_a_later_one_is() -> None:
    engine, rude = LocalEngine(), RudeEngine(started_s=time.time() - 1000)
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        assert states(fleet) == {"a#1": "ready"}
        await engine.stop()
        await until(lambda: states(fleet) == {"a#1": "down"})
        await engine.start(rude)
        await until(lambda: states(fleet) == {"a#1": "ready"})
        rude.started_s = time.time()  # replaced between two probes
        await until(lambda: states(fleet) == {"a#2": "starting"})
        rude.started_s -= 500  # an older process at the same address is no restart
        await fleet.members()[0].looked_again(60)
        assert states(fleet) == {"a#2": "starting"}
    await engine.stop()


async def test_a_start_that_changes_again_and_again_is_no_start_and_makes_no_more_incarnations() -> None:
    engine, rude = LocalEngine(), RudeEngine(started_s=1e9)
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        (member,) = fleet.members()
        for _ in range(12):
            rude.started_s += 100
            await member.looked_again(1)
        assert states(fleet) == {"a#6": "starting"}
        assert "process_start_time_seconds again and again, which is ignored" in fleet.notices()[0]
        await engine.stop()
        await until(lambda: states(fleet) == {"a#6": "down"})
        await engine.start(rude)
        await until(lambda: states(fleet) == {"a#7": "starting"})
    await engine.stop()


async def test_an_infinite_start_hides_no_later_restart() -> None:
    engine, rude = LocalEngine(), RudeEngine(started_s=1e9)
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        (member,) = fleet.members()
        for written in ("1e999", "1e9", "1000000100"):
            rude.started_s = written  # type: ignore[assignment]  # as the page has it
            await member.looked_again(1)
        assert states(fleet) == {"a#2": "starting"}
    await engine.stop()


async def test_an_engine_that_started_shortly_before_this_process_starts_slowly_for_the_rest() -> None:
    engine, rude = LocalEngine(), RudeEngine(started_s=time.time() - 20)
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        found = offer(fleet, "a")
        assert states(fleet) == {"a#1": "starting"}
        assert found.ramp_us == 30_000_000
        assert 19_000_000 < now_us() - found.since_us < 29_000_000
    await engine.stop()


async def test_a_refused_request_makes_an_engine_suspect_until_one_probe_passes() -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")], Health("/health", 3600, 3, 50)) as fleet:
        (member,) = fleet.members()
        seen: list[tuple[str, bool]] = []
        fleet.on_change = lambda: seen.append((member.state.value, offer(fleet, "a").takes_new))
        member.proxy.on_failure("connection refused by this test")
        assert member.state is MemberState.SUSPECT
        assert fleet.notices() == ["engine a gets no requests (suspect): connection refused by this test"]
        await until(lambda: member.takes_new)
        await until(lambda: len(seen) == 2)
        assert seen[0] == ("suspect", False)
        assert member.id == "a#2"


async def test_a_connection_that_fails_otherwise_is_no_restart() -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")], Health("/health", 3600)) as fleet:
        (member,) = fleet.members()
        member.proxy.on_failure("the name in http://a:8000 cannot be resolved: Temporary failure in name resolution")
        assert member.state is MemberState.SUSPECT
        await until(lambda: member.takes_new)
        assert (member.id, member.state) == ("a#1", MemberState.READY)


async def test_a_suspect_engine_whose_probe_fails_is_down(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")], Health("/health", 3600)) as fleet:
        (member,) = fleet.members()
        await engine.stop()
        refused = f"connection refused by {engine.address('a').url}"  # as the probe will say it
        member.proxy.on_failure(refused)
        assert member.state is MemberState.SUSPECT
        await until(lambda: member.state is MemberState.DOWN)
    assert [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "engine_down"] == [
        f"engine a does not answer: {refused}"
    ]


async def test_a_reset_is_no_refused_connection() -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")]) as fleet:
        (member,) = fleet.members()
        member.proxy.on_failure(None)
        assert member.state is MemberState.READY
        await asyncio.sleep(0.2)
        assert member.id == "a#1"


# -- health


async def test_errors_count_to_fail_and_passes_to_rise() -> None:
    engine, rude = LocalEngine(), RudeEngine()
    await engine.start(rude)
    async with fleet_of([engine.address("a")], Health("/health", 0.1, fail=3, rise=4)) as fleet:
        began_s = time.monotonic()
        rude.status = 503
        await until(lambda: states(fleet) == {"a#1": "down"})
        assert time.monotonic() - began_s > 0.12
        assert fleet.notices() == ["engine a gets no requests (down): GET /health answered 503"]
        assert fleet.members()[0].ejections == {OutageCause.ERROR: 1}
        rude.status = 200
        began_s = time.monotonic()
        await until(lambda: states(fleet) == {"a#1": "ready"})
        assert time.monotonic() - began_s > 0.1
    await engine.stop()


async def test_slowness_ejects_at_most_half_of_the_engines_and_refused_connections_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "ANSWER_WITHIN_S", 5.0)  # none is slow before its time, on a busy machine
    rude = [RudeEngine() for _ in range(4)]
    async with engines(4) as found:
        for engine, app in zip(found, rude, strict=True):
            await engine.stop()
            await engine.start(app)
        addresses = [engine.address(name) for name, engine in zip("abcd", found, strict=True)]
        async with fleet_of(addresses) as fleet:
            for app in rude:
                app.delay_s = 30
            monkeypatch.setattr(engine_watch, "ANSWER_WITHIN_S", 1.0)
            slow: list[str] = []

            def used_all_the_same() -> int:
                slow[:] = [notice for notice in fleet.notices() if "and is used all the same" in notice]
                return len(slow)

            await until(lambda: used_all_the_same() == 2)
            assert sorted(states(fleet).values()) == ["down", "down", "ready", "ready"]
            assert "is slow (GET /health was not answered within 1 s), and is used all the same" in slow[0]
            logged = [it.getMessage() for it in caplog.records if getattr(it, "event", "") == "engine_slow"]
            assert sorted(logged) == sorted(slow)
            for engine in found:
                await engine.stop()
            await until(lambda: set(states(fleet).values()) == {"down"})
            assert fleet.readiness()[0].endswith("; and 1 more")
            causes = [list(member.document()["ejections"]) for member in fleet.members()]  # type: ignore[call-overload]
            assert sorted(causes) == [["refused"], ["refused"], ["slow"], ["slow"]]


async def test_a_single_slow_engine_is_down_as_it_is_without_a_fleet() -> None:
    engine, rude = LocalEngine(), RudeEngine()
    await engine.start(rude)
    async with fleet_of([engine.address("a")]) as fleet:
        rude.delay_s = 30
        await until(lambda: states(fleet) == {"a#1": "down"})
        rude.delay_s = 0
        await until(lambda: states(fleet) == {"a#1": "ready"})
    await engine.stop()


async def test_an_engine_of_another_kind_is_never_used_and_the_sentence_says_why() -> None:
    async with engines(1) as (a,), engines(1, kind=TensorRtLlm) as (b,):
        async with fleet_of([a.address("a"), b.address("b")]) as fleet:
            assert states(fleet) == {"a#1": "ready", "b#1": "down"}
            (notice,) = fleet.notices()
            where = f"http://127.0.0.1:{b.port}"
            assert notice == (
                f"engine b gets no requests (down): {where} is TensorRT-LLM (/v1/models says so), but the policy says "
                "engine: vllm; a pool has engines of one kind: remove this one, or name a vLLM"
            )
        async with fleet_of([b.address("b")], check=EngineCheck.ALIVE) as fleet:
            assert states(fleet) == {"b#1": "ready"}
        async with fleet_of(
            [EngineAddress("x", f"http://127.0.0.1:{free_port()}", WRITTEN, UNLIMITED)], check=EngineCheck.OFF
        ) as f:
            assert states(f) == {"x#1": "ready"}


async def test_a_port_that_accepts_and_never_answers_is_down_and_the_start_does_not_wait_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with engines(1) as (engine,):
            began_s = time.monotonic()
            async with fleet_of([engine.address("a"), EngineAddress("b", url, WRITTEN, UNLIMITED)]) as fleet:
                assert time.monotonic() - began_s < 30
                assert states(fleet) == {"a#1": "ready", "b#1": "down"}
                assert "GET /health was not answered within" in fleet.notices()[0]


async def test_an_engine_whose_size_is_not_known_is_not_offered() -> None:
    engine, rude = LocalEngine(), RudeEngine()
    rude.kv_tokens = 0
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        assert fleet.offers() == []
        assert states(fleet) == {"a#1": "down"}
        assert fleet.notices() == [
            "engine a gets no requests (down): it has not reported its capacity yet: no page of the engine says it; "
            "write capacity: tokens, requests or both"
        ]
        assert fleet.readiness() == (), "pages can be read all the same"
        (why,) = fleet.idleness()
        assert why.startswith("no engine takes new requests: a: it has not reported its capacity yet: no page of")
        rude.kv_tokens = 700
        await until(lambda: states(fleet) == {"a#1": "ready"})
        assert fleet.idleness() == ()
        assert offer(fleet, "a").tokens == 700
        fleet.drain("a")
        assert fleet.idleness() == ("no engine takes new requests: a: draining",)
    await engine.stop()


async def test_an_engine_that_says_more_than_any_can_have_is_offered_with_what_stays_exact() -> None:
    engine, rude = LocalEngine(), RudeEngine()
    rude.kv_tokens = 2**53 - 1
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        assert offer(fleet, "a").tokens == MOST_OF_AN_ENGINE
    await engine.stop()


async def test_an_engine_with_a_crowd_inside_is_capped() -> None:
    engine, rude = LocalEngine(), RudeEngine()
    await engine.start(rude)
    async with fleet_of([engine.address("a", READ)]) as fleet:
        crowded: list[tuple[str, float]] = []
        fleet.on_crowded = lambda engine_id, for_s: crowded.append((engine_id, for_s))
        rude.waiting = 50
        await until(lambda: crowded)
        assert crowded[0] == ("a#1", HELD_BACK_S)
        assert states(fleet) == {"a#1": "capped"}
        assert offer(fleet, "a").takes_new is True, "the pool bounds what it gets"
    await engine.stop()


async def test_the_preemptions_of_each_engine_are_a_total_that_only_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.fleet.member.READ_EVERY_S", 0.02)
    (first, one), (second, two) = pairs = [(LocalEngine(), RudeEngine()) for _ in range(2)]
    for engine, rude in pairs:
        rude.preemptions = 100
        await engine.start(rude)
    addresses = [first.address("a", READ), second.address("b", READ)]
    async with fleet_of(addresses) as fleet:
        totals: dict[str, list[int]] = {"a": [], "b": []}

        def read(name: str, total: int, now_us: int) -> None:
            assert now_us > 0
            totals[name].append(total)

        fleet.on_preemptions = read
        await until(lambda: all(totals.values()))
        one.preemptions, two.preemptions = 103, 105
        await until(lambda: (totals["a"][-1], totals["b"][-1]) == (3, 5))
        one.preemptions = 2  # a restart that no one saw
        await until(lambda: totals["a"][-1] == 5)
        listed(fleet, [addresses[0], replace(addresses[1], capacity=Capacity(tokens=10))])
        two.preemptions = 999  # no one reads it any more
        one.preemptions = 3
        await until(lambda: totals["a"][-1] == 6)
        listed(fleet, addresses)
        await asyncio.sleep(0.2)
        two.preemptions = 1_000  # read again: what was counted before is no concern
        await until(lambda: totals["b"][-1] == 6)
        assert all(found == sorted(found) for found in totals.values())
    for engine, _ in pairs:
        await engine.stop()


# -- operators and other replicas


async def test_drain_and_resume(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")]) as fleet:
        assert fleet.drain("nothing") is None
        assert fleet.resume("nothing") is None
        assert fleet.drain("a") is fleet.drain("a") is fleet.members()[0]
        assert (states(fleet), offer(fleet, "a").takes_new) == ({"a#1": "draining"}, False)
        fleet.resume("a")
        assert (states(fleet), offer(fleet, "a").takes_new) == ({"a#1": "ready"}, True)
        fleet.members()[0].cap(0.2)
        assert states(fleet) == {"a#1": "capped"}
        await until(lambda: states(fleet) == {"a#1": "ready"})
    logged = [
        it.getMessage() for it in caplog.records if getattr(it, "event", "") in ("engine_draining", "engine_resumed")
    ]
    assert logged == [
        "engine a#1 drains: it gets no new requests, and serves the 0 that it has from this process",
        "engine a#1 drains no more",
    ]


async def test_a_restart_that_another_replica_has_reported_is_not_counted_once_more() -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")]) as fleet:
        fleet.adopt("a", 5, is_restart=False)
        assert (states(fleet), offer(fleet, "a").ramp_us) == ({"a#5": "ready"}, 0)
        fleet.adopt("a", 4, is_restart=True)
        fleet.adopt("unknown", 7, is_restart=True)
        assert states(fleet) == {"a#5": "ready"}
        await engine.stop()
        await until(lambda: states(fleet) == {"a#5": "down"})
        await engine.start()
        fleet.adopt("a", 6, is_restart=True)
        await until(lambda: states(fleet) == {"a#6": "starting"})
        await engine.stop()
        await until(lambda: states(fleet) == {"a#6": "down"})
        fleet.set_reached_elsewhere(["a"])
        assert states(fleet) == {"a#6": "unreachable"}
        await engine.start()
        await until(lambda: states(fleet) == {"a#7": "starting"})


# -- discovery


async def test_engines_come_and_go_by_discovery_and_one_that_is_back_is_a_new_incarnation() -> None:
    async with engines(2) as (a, b), fleet_of([a.address("a")]) as fleet:
        restarted: list[str] = []
        fleet.on_restart = lambda member: restarted.append(member.id)
        listed(fleet, [a.address("a"), b.address("b")])
        await until(lambda: states(fleet) == {"a#1": "ready", "b#1": "starting"})
        listed(fleet, [b.address("b")])
        await until(lambda: states(fleet) == {"b#1": "starting"})
        listed(fleet, [a.address("a"), b.address("b")])
        await until(lambda: states(fleet) == {"a#2": "starting", "b#1": "starting"})
        assert restarted == ["a#2"]
        listed(fleet, [a.address("a", Capacity(tokens=7, requests=7), speed=500), b.address("b", READ)])
        await until(lambda: ("b#1", 20_000) in [found[:2] for found in fleet.offers()])
        assert offer(fleet, "a")[:2] == ("a#2", 7)
        assert offer(fleet, "a").speed == 500
        listed(fleet, [b.address("a"), a.address("b")])  # the same names at other addresses are other engines
        await until(lambda: states(fleet) == {"a#3": "starting", "b#2": "starting"})
        listed(fleet, [])
        await until(lambda: states(fleet) == {})
        assert fleet.readiness() == ("no engine is known",)


async def test_of_too_many_engines_those_that_are_there_stay_and_a_bad_address_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sidecar.fleet.fleet.MOST_ENGINES", 4)
    async with engines(1) as (engine,), fleet_of([engine.address("z")]) as fleet:
        port = free_port()
        more = [EngineAddress(f"e{number}", f"http://127.0.0.1:{port}", WRITTEN, UNLIMITED) for number in range(200)]
        listed(fleet, [*more, engine.address("z")])
        assert [member.name for member in fleet.members()] == ["e0", "e1", "e10", "z"]
        assert fleet.notices()[0] == "there are 201 engines, and a pool has 4 at most: 4 of them are used"
        listed(fleet, [EngineAddress("x", "ftp://nowhere", WRITTEN, UNLIMITED), engine.address("z")])
        await until(lambda: states(fleet) == {"z#1": "ready"})
        assert fleet.notices()[0].startswith(
            "engine x is left out: upstream 'ftp://nowhere' does not begin with http://"
        )


@pytest.mark.long
async def test_a_flapping_engine_ten_times_a_second_raises_nothing_and_leaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks, sockets = other_tasks(), open_sockets()
    async with engines(2) as (a, b), fleet_of([a.address("a", READ), b.address("b")], FAST) as fleet:
        changes = 0

        def changed() -> None:
            nonlocal changes
            changes += 1

        fleet.on_change = changed
        for _ in range(25):
            await a.stop()
            await asyncio.sleep(0.05)
            await a.start()
            await asyncio.sleep(0.05)
        await until(lambda: fleet.members()[0].takes_new)
        assert states(fleet)["b#1"] == "ready"
        assert changes < 200
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        await b.stop()
    await until(lambda: (other_tasks(), open_sockets()) == (tasks, sockets))


async def test_discovery_that_flaps_leaks_nothing_and_forgets_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.fleet.fleet.MOST_NAMES", 10)
    tasks, sockets = other_tasks(), open_sockets()
    async with engines(1) as (engine,), fleet_of([engine.address("a")]) as fleet:
        for number in range(100):
            listed(fleet, [engine.address("a"), *(engine.address(f"pod-{number}-{one}") for one in range(3))])
            await asyncio.sleep(0.01)
        listed(fleet, [engine.address("a")])
        await until(lambda: states(fleet) == {"a#1": "ready"})
        listed(fleet, [engine.address("a"), engine.address("pod-100-0")])  # old names go when a new one comes
        assert len(fleet._incarnations) <= 10 + 1  # "a" is listed, so it is kept besides
        assert fleet._incarnations["a"] == 1
    await until(lambda: (other_tasks(), open_sockets()) == (tasks, sockets))


def test_the_default_health_page_is_the_engines_own() -> None:
    assert Health().path == Vllm.health_page == "/health"


async def test_settings_change_at_once() -> None:
    async with engines(1) as (engine,), fleet_of([engine.address("a")], Health("/health", 3600)) as fleet:
        fleet.change(FleetPolicy(health=FAST, slow_start_s=0.0))
        await engine.stop()
        fleet.members()[0].proxy.on_failure("connection refused by this test")
        await until(lambda: states(fleet) == {"a#1": "down"})
        await engine.start()
        await until(lambda: states(fleet) == {"a#2": "ready"})
        assert offer(fleet, "a").ramp_us == 0
