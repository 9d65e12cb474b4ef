"""What replicas tell each other of learned output lengths: within their reports, and between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from sidecar.cluster.document import TenantView
from sidecar.cluster.learned_lengths import MOST_SUMMARY_BYTES, LengthExchange
from sidecar.cluster.lease_sizes import lease_size_rows
from sidecar.cluster.report import ReplicaReport, Unreadable, pack, unpack
from sidecar.lengths.buckets import LengthKey
from sidecar.lengths.estimator import LengthEstimator, Source
from sidecar.lengths.lease_size import EngineSizesDocument
from sidecar.pools.base import MOST_REPORT_BYTES
from tests.cluster.replicas import CHAT, Replica, replicas
from tests.support.shared_pools import begun_store

pytestmark = pytest.mark.anyio

KEY = LengthKey(CHAT, "m", "plain")


def report(replica: str = "one", **more: Any) -> ReplicaReport:
    plain: dict[str, Any] = {"host": "h", "at_s": 1.0, "leases": 0, "waiting": 0}
    return ReplicaReport(replica, **plain, tiers=[], tenants=[], refusals=[], **more)


def taught(*lengths: int, tenant: str = "acme") -> LengthEstimator:
    estimator = LengthEstimator()
    for length in lengths:
        estimator.learn(tenant, KEY, length, is_censored=False)
    return estimator


def told(estimator: LengthEstimator, replica: str = "one") -> ReplicaReport:
    """The report as another replica reads it."""
    return unpack(LengthExchange(estimator).packed(report(replica)))


def test_what_one_learned_sizes_the_others_requests_until_it_is_gone() -> None:
    other = LengthEstimator()
    exchange = LengthExchange(other)
    exchange.hear([told(taught(*[40] * 60))])
    found = other.estimate("acme", KEY, 0.95)
    assert found is not None
    assert (found.source, found.samples, found.tokens) == (Source.REPLICAS, 60, 48)
    exchange.hear([report("two")])
    assert other.estimate("acme", KEY, 0.95) is None


def test_a_replica_that_stops_learning_is_forgotten_although_it_is_there() -> None:
    other = LengthEstimator()
    exchange = LengthExchange(other)
    exchange.hear([told(taught(*[40] * 60))])
    exchange.hear([report()])
    assert other.estimate("acme", KEY, 0.95) is None


def test_news_of_a_replica_take_the_place_of_its_last() -> None:
    other, learning = LengthEstimator(), taught(*[40] * 60)
    exchange = LengthExchange(other)
    for _ in range(3):  # the same once more changes nothing
        exchange.hear([told(learning)])
    for _ in range(200):
        learning.learn("acme", KEY, 900, is_censored=False)
    exchange.hear([told(learning)])
    found = other.estimate("acme", KEY, 0.95)
    assert found is not None
    assert (found.samples, found.tokens) == (260, 912)


@pytest.mark.parametrize("lengths", [7, "x", [], [1], {"version": 2}, {"version": 1, "lengths": [[None] * 7]}, True])
def test_a_report_with_any_lengths_is_read_and_raises_nothing(lengths: object) -> None:
    other = LengthEstimator()
    read = unpack(pack(report(lengths=lengths)))
    LengthExchange(other).hear([read])
    assert read.replica == "one"
    assert other.estimate("acme", KEY, 0.95) is None


class ReportBefore(msgspec.Struct, frozen=True):
    """The first fields of a report, as a version before knows them."""

    replica: str
    host: str
    at_s: float


def test_an_older_and_a_newer_version_read_the_report() -> None:
    packed = msgspec.msgpack.encode(report(lengths={"version": 1, "lengths": []}))
    assert msgspec.msgpack.decode(packed, type=ReportBefore).replica == "one"
    older = {name: value for name, value in msgspec.structs.asdict(report()).items() if "le" not in name[:2]}
    assert "lengths" not in older
    assert "lease_sizes" not in older
    read = msgspec.msgpack.decode(msgspec.msgpack.encode({**older, "leases": 0, "newer": 1}), type=ReplicaReport)
    assert (read.lengths, read.lease_sizes) == (None, [])


def full_of(bytes_left: int) -> ReplicaReport:
    """A report that leaves so many bytes; random names cannot be packed."""
    chance = random.Random(1)
    name = "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(MOST_REPORT_BYTES))

    def of(length: int) -> ReplicaReport:
        return msgspec.structs.replace(report(), tenants=[TenantView(name[:length], 0, 0, 0)])

    least, most = 0, len(name)
    while most - least > 1:
        middle = (least + most) // 2
        fits = len(pack(of(middle))) <= MOST_REPORT_BYTES - bytes_left
        least, most = (middle, most) if fits else (least, middle)
    return of(least)


def many_tenants() -> LengthEstimator:
    chance, estimator = random.Random(7), LengthEstimator()
    for tenant in range(300):
        for _ in range(60):
            estimator.learn(
                f"tenant-{chance.random()}"[:9] + str(tenant), KEY, chance.randrange(4000), is_censored=False
            )
    return estimator


@pytest.mark.parametrize(
    ("left", "least", "most"), [(40_000, 8_000, MOST_SUMMARY_BYTES), (2_000, 200, 6_000), (50, 0, 0)]
)
def test_a_summary_takes_the_room_that_the_report_leaves(left: int, least: int, most: int) -> None:
    packed = LengthExchange(many_tenants()).packed(full_of(left))
    assert len(packed) <= MOST_REPORT_BYTES
    lengths = unpack(packed).lengths
    size = 0 if lengths is None else len(msgspec.json.encode(lengths))
    assert least <= size <= most


def test_what_is_no_report_is_unreadable() -> None:
    with pytest.raises(Unreadable):
        unpack(b"x")


def sizes(engine: str | None, **more: Any) -> EngineSizesDocument:
    plain: dict[str, Any] = {
        "quantile": 0.9,
        "overlap": 0.5,
        "reason": "base",
        "is_raised": False,
        "running": 2,
        "held_tokens": 100,
        "expected_tokens": 200,
        "used_tokens": 50,
    }
    return EngineSizesDocument(engine, **{**plain, **more})


def test_leases_of_all_replicas_add_up_by_engine() -> None:
    raised = sizes("a", quantile=0.95, overlap=1.0, reason="preempted", is_raised=True, expected_tokens=600)
    first, second = lease_size_rows(
        [[sizes("b"), sizes("a", growths=3, preemptions=4)], [msgspec.structs.replace(raised, preemptions=7)]]
    )
    assert (first.engine, first.quantile, first.reason, first.is_raised) == ("a", 0.95, "preempted", True)
    assert (first.running, first.held_tokens, first.expected_tokens, first.used_tokens) == (4, 200, 800, 100)
    assert (first.overlap, first.growths, first.preemptions) == (0.875, 3, 7)
    assert (second.engine, second.overlap, second.preemptions) == ("b", 0.5, None)
    assert lease_size_rows([[], []]) == []


# -- real processes

POLICY = f"""\
engine: vllm
capacity: {{tokens: 100k, requests: 8}}
tiers:
  high: {{default_output_tokens: 1k}}
default_tier: high
anonymous: high
endpoints:
  {CHAT}: {{}}
"""
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
ANSWERS = 60


async def ask(replica: Replica, client: aiohttp.ClientSession) -> Any:
    """One answer of the engine's own length; returns the request's story."""
    async with client.post(replica.url + CHAT, json=BODY) as response:
        assert response.status == 200
        await response.read()
        request_id = response.headers["x-request-id"]
    async with client.get(f"{replica.admin_url}/requests/{request_id}") as response:
        return await response.json()


async def until_source(replica: Replica, client: aiohttp.ClientSession, source: str) -> Any:
    end_s = time.monotonic() + 15
    while (story := await ask(replica, client))["size"]["source"] != source:
        assert time.monotonic() < end_s, story["size"]
        await asyncio.sleep(1.0)  # few answers of its own, so that what it knows is the other's
    return story


@contextlib.contextmanager
def two_replicas(folder: Path) -> Iterator[tuple[Replica, Replica]]:
    options = ("--output-tokens", "40", "--step-ms", "1")
    with (
        begun_store(folder) as store,
        replicas(folder, 2, POLICY, engine_options=options, SIDECAR_STORE=store.url) as (first, second),
    ):
        yield first, second


@pytest.mark.long
async def test_what_one_process_learns_sizes_the_next_request_of_another(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (first, second):
        async with aiohttp.ClientSession() as client:
            before = await ask(second, client)
            assert (before["size"]["source"], before["size"]["output_tokens"]) == ("maximum", 1000)
            assert before["asked"]["tokens"] == before["size"]["most_tokens"] > 1000
            for _ in range(ANSWERS):
                await ask(first, client)
            story = await until_source(second, client, "replicas")
            size = story["size"]
            assert size["output_tokens"] == 48  # 40 in a bin of 16
            assert size["samples"] >= 50  # its own, of the questions above, count with them
            assert story["asked"]["tokens"] == size["prompt_tokens"] + 48 < 100
            assert size["most_tokens"] == size["prompt_tokens"] + 1000
            assert (await ask(first, client))["size"]["source"] == "own"
            async with client.get(f"{first.admin_url}/state") as response:
                state = (await response.json())["lease_sizes"]
            (learned,) = state["learned"]
            assert (learned["tenant"], learned["endpoint"], learned["model"]) == ("anonymous", CHAT, "m")
            assert learned["samples"] > ANSWERS - 1
            assert (learned["median"], learned["estimate"], learned["quantile"]) == (48, 48, 0.95)
            assert state["engines"][0]["quantile"] == 0.95

            first.process.terminate()
            assert await asyncio.to_thread(first.process.wait, 10) == 0
            await until_source(second, client, "maximum")
