"""Leases from Python in a pool of several engines: each says which engine it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

import sidecar
from benchmarks.processes import command
from tests.support.redis_servers import until
from tests.support.shared_pools import begun_store

pytestmark = pytest.mark.long
POLICY = """\
engine: vllm
store: {store}
engines:
  static: [{{name: a, url: {a}, capacity: {{requests: 2}}}}, {{name: b, url: {b}, capacity: {{requests: 2}}}}]
tiers:
  high: {{}}
  low: {{}}
default_tier: low
anonymous: low
endpoints:
  /v1/chat/completions: {{}}
"""


def test_leases_go_to_engines_that_have_room_and_to_none_that_is_down(tmp_path: Path) -> None:
    emulate = ("emulate", "--engine", "vllm", "--port", "0")
    with begun_store(tmp_path) as server, command(*emulate) as (a,):
        path = tmp_path / "policy.yaml"
        with command(*emulate) as (b,):
            path.write_text(POLICY.format(store=server.url, a=a, b=b))
            with sidecar.connect_threads(policy=path) as admission:
                blocks = [admission.lease(tokens=10, max_wait_s=10) for _ in range(4)]
                leases = [block.__enter__() for block in blocks]
                assert Counter(lease.engine for lease in leases) == {"a": 2, "b": 2}
                assert {lease.engine_url for lease in leases} == {a, b}
                with pytest.raises(sidecar.errors.QueueTimeout):
                    admission.lease(tokens=10, max_wait_s=0.2).__enter__()
                for block in blocks:
                    block.__exit__(None, None, None)
        with sidecar.connect_threads(policy=path) as admission:  # b is gone

            def is_left_out() -> bool:
                with admission.lease(tokens=10, max_wait_s=10) as first, admission.lease(tokens=10) as second:
                    return {first.engine, second.engine} == {"a"}

            until(is_left_out, "every lease is for the engine that is there")


@pytest.mark.anyio
async def test_a_prompt_is_counted_until_the_first_output(tmp_path: Path) -> None:
    emulate = ("emulate", "--engine", "vllm", "--port", "0")
    with begun_store(tmp_path) as server, command(*emulate) as (a,), command(*emulate) as (b,):
        path = tmp_path / "policy.yaml"
        await anyio.Path(path).write_text(POLICY.format(store=server.url, a=a, b=b))
        async with (
            sidecar.connect(policy=path) as admission,
            admission.lease(tokens=500, prompt_tokens=400, max_wait_s=10) as lease,
        ):

            def unprefilled() -> int:
                view = admission.controller.engines
                return sum(row.unprefilled_tokens for row in view.documents())

            await eventually(lambda: unprefilled() == 400)
            lease.keep()
            await eventually(lambda: unprefilled() == 0)


def test_no_lease_is_given_while_the_engine_is_down_and_the_pool_has_its_size(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with begun_store(tmp_path) as server:
        one = [line for line in POLICY.splitlines() if "static:" not in line and line != "engines:"]
        path.write_text("\n".join([*one, "capacity: {{from: engine, requests: 2}}"]).format(store=server.url))
        engine = ExitStack()
        (url,) = engine.enter_context(command("emulate", "--engine", "vllm", "--port", "0", "--kv-tokens", "4096"))
        with sidecar.connect_threads(policy=path, engine=url) as admission:
            with engine:
                with pytest.raises(sidecar.errors.RequestTooLarge):
                    admission.lease(tokens=4097).__enter__()
                with admission.lease(tokens=1000, max_wait_s=10):
                    pass

            def is_noticed() -> bool:
                try:
                    with admission.lease(tokens=1000, max_wait_s=0.2):
                        return False
                except sidecar.errors.NoEngine:
                    return True

            until(is_noticed, "no lease is given")


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110  # the figures come with a heartbeat, of which nothing tells
            await anyio.sleep(0.05)
