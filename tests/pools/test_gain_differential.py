"""The same random operations, by gain, against the pool of one process and against the Lua script: the same answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.policy.model import Policy
from sidecar.scheduling.gain import GainFigures
from tests.pools import test_differential
from tests.pools.test_differential import (
    FEW,
    OPERATIONS,
    PREEMPTING_OPERATIONS,
    compare,
    pools,
    preempting_pools,
)
from tests.support.examples import examples
from tests.support.redis_servers import RedisServer

steps_of = test_differential.steps_of


def figures(ticket: int) -> GainFigures | None:
    """Small numbers, so that tickets are often equal, late or worthless."""
    luck = random.Random(ticket)
    if luck.random() < 0.2:
        return None
    deadline_us = luck.choice([0, 5, 20, 60])
    return GainFigures(
        luck.choice([1, 2, 4]), luck.choice([1, 2, 5, 9]), luck.choice([1, 3, 10, 40]), deadline_us,
        max(0, deadline_us - luck.choice([0, 3, 10])), luck.choice([1, 2, 7]),
    )  # fmt: skip


def with_gain(program: Any, batch: int, tiers: int) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    for at_us, step in steps_of(program, batch, tiers):
        yield (
            at_us,
            [
                ("enter", it[1], msgspec.structs.replace(it[2], gain=figures(it[1]))) if it[0] == "enter" else it
                for it in step
            ],
        )


@pytest.fixture(autouse=True)
def by_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_differential, "steps_of", with_gain)


def ordered(policy: Policy, fair: Fraction) -> Policy:
    """The same by gain, with the floors of this part of the reserves."""
    rules = policy.rules
    tiers = tuple(
        replace(
            tier,
            reserve_tokens=-(-tier.reserve_tokens * fair.numerator // fair.denominator),
            reserve_requests=-(-tier.reserve_requests * fair.numerator // fair.denominator),
        )
        for tier in rules.tiers
    )
    return replace(policy, rules=replace(rules, tiers=tiers, is_by_gain=True))


FAIR = st.sampled_from([Fraction(1, 4), Fraction(1, 4), Fraction(1), Fraction(0)])


@given(policy=pools(), fair=FAIR, program=OPERATIONS, batch=st.sampled_from([1, 1, 4, 16]))
@settings(FEW, max_examples=examples(8))
def test_a_real_server_orders_by_gain_as_one_process_does(
    redis_server: RedisServer, policy: Policy, fair: Fraction, program: Any, batch: int
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, ordered(policy, fair), program, batch))


@given(policy=preempting_pools(), fair=FAIR, program=PREEMPTING_OPERATIONS)
@settings(FEW, max_examples=examples(4))
def test_a_real_server_preempts_by_gain_as_one_process_does(
    redis_server: RedisServer, policy: Policy, fair: Fraction, program: Any
) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        client.flushall()
        asyncio.run(compare(client, ordered(policy, fair), program, 1))
