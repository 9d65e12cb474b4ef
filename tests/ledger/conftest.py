"""One real server for the tests of the ledger in a store, by file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support.redis_servers import RedisServer, first_binary


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with RedisServer(first_binary(), tmp_path_factory.mktemp("server")) as running:
        yield redis.Redis(port=running.port)
