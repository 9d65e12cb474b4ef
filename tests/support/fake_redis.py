"""The Redis that lives in this process, with the library of Lua that every real server has and fakeredis has not."""

from __future__ import annotations

import os
from pathlib import Path

import fakeredis

LUA_MODULES = {"struct"}
"""The servers' own libraries that the scripts use, other than `cjson`: `tests/support/lua` has them."""

os.environ["LUA_PATH"] = f"{Path(__file__).parent / 'lua'}/?.lua;;"


def fake_server() -> fakeredis.FakeServer:
    """A server that is empty."""
    return fakeredis.FakeServer(version=(7,))


def fake_client() -> fakeredis.FakeRedis:
    """A synchronous client of a server of its own."""
    return fakeredis.FakeRedis(server=fake_server(), lua_modules=LUA_MODULES)
