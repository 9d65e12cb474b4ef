"""The golden programs on a real server: the script gives the answers that the scheduler of one process gave."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.pools.scripted_programs import InStore
from tests.support.redis_servers import RedisServer

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduling"))

from golden_programs import differences, read, report


def could_be_played(program: dict) -> bool:
    """The size of a pool without engines is a matter of its policy, which a call does not change."""
    return "engines" in program or all(step["do"] != "engines" for step in program["steps"])


PROGRAMS = [program for program in read() if could_be_played(program)]


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        yield client


def wrong_answers(client: Any, programs: list[dict]) -> list[str]:
    return differences(programs, lambda program: InStore(client, program))


def test_the_script_gives_the_recorded_answers(client: Any) -> None:
    found = wrong_answers(client, PROGRAMS[::4])
    assert not found, report(found)


@pytest.mark.long
def test_the_script_gives_all_recorded_answers(client: Any) -> None:
    assert len(PROGRAMS) > 200
    found = wrong_answers(client, PROGRAMS)
    assert not found, report(found)
