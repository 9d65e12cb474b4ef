"""Pools in the Redis that lives in this process, with the library of Lua that every real server has and it has not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fakeredis

from tests.pools.redis_harness import SharedHarness

LUA_MODULES = {"struct"}
"""The servers' own libraries that the scripts use, other than `cjson`: `tests/support/lua` has them."""

os.environ["LUA_PATH"] = f"{Path(__file__).parents[1] / 'support' / 'lua'}/?.lua;;"


class FakeHarness(SharedHarness):
    """The Redis of many unit tests: the shared pool does what the contract says there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.server = fakeredis.FakeServer(version=(7,))

    async def client(self) -> Any:
        client = fakeredis.FakeAsyncRedis(server=self.server, single_connection_client=True, lua_modules=LUA_MODULES)
        return await client.initialize()
