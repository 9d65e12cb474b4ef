"""The connection to the server that keeps the pool. No other module knows the Redis client.

The client's defaults do not fit: it needs ten retries and four seconds to report that the server is down, and it sends
a script that timed out again although that may have run. So nothing is retried here, every call has a short limit, and
every failure becomes one `StoreError`. The connection is then of no use: the pool makes another, and resyncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from errno import ECONNREFUSED
from functools import cache
from typing import Any, TypeVar

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sidecar.policy.store import StoreAddress, StoreKind
from sidecar.pools.base import StoreError
from sidecar.pools.redis.script import Library, Script
from sidecar.tasks import timeout

CONNECT_WITHIN_S = 0.5
"""A server in reach accepts within a millisecond; TLS and a look-up of its name take some more."""
ANSWER_WITHIN_S = 1.5
"""The longest silence of a connection that works. A server that forks, or runs another client's command, is silent for
less; it is not lost, although it looks like one that hangs. A connection that is closed or refused fails at once."""
GREETING_WITHIN_S = 0.25
"""The same for a new connection, after which the server is lost."""

Argument = str | bytes | int
_Answer = TypeVar("_Answer")

_FOREIGN_ERRORS = (RedisError, OSError, EOFError, asyncio.TimeoutError, ValueError)


def is_foreign(error: BaseException) -> bool:
    """True if an error comes from the client, its connection or the store, and not from a defect in this process.

    uvloop raises a plain RuntimeError for a connection that the server has reset, where asyncio's own loop has the
    connection's error or none (`UVHandle._ensure_alive` in uvloop/handles/handle.pyx).
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith("unable to perform operation on")
    return isinstance(error, _FOREIGN_ERRORS)


class StoreConnection:
    """One connection to one server."""

    def __init__(self, client: Redis, root: str) -> None:
        self._client: Any = client  # redis-py's commands are half typed
        self._root = root
        self._is_in_use = asyncio.Lock()
        self._has_functions = True
        self.is_closed = False

    async def run(self, script: Script, arguments: Sequence[Argument]) -> list[Any]:
        """Runs a script, and returns its answer. Raises StoreError; then it may have run, or may run later."""
        with _as_store_errors():
            async with timeout(ANSWER_WITHIN_S):
                answer = await self._evaluate(script, 1, self._root, *arguments)
        if not isinstance(answer, list):
            raise StoreError(f"an answer that is none of the script's: {answer!r}")
        return answer

    async def commands(self, *commands: Sequence[Argument]) -> list[Any]:
        """The answers to plain commands, which are sent together. Raises StoreError."""
        with _as_store_errors():
            async with timeout(ANSWER_WITHIN_S), self._is_in_use:
                await self._client.connection.send_packed_command([pack_command(words) for words in commands])  # type: ignore[arg-type]
                return [await self._client.connection.read_response() for _ in commands]

    async def ask(self, library: Library, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Runs the library, and returns its answer. Raises StoreError; then it may have run, or may run later."""
        words = (len(keys), *keys, *arguments)
        with _as_store_errors():
            if self._has_functions:
                try:
                    return await self._command("FCALL", library.function, *words)
                except ResponseError as error:  # it did not run
                    await self._load(library, error)
                if self._has_functions:
                    return await self._command("FCALL", library.function, *words)
            return await self._evaluate(library.script, *words)

    async def _evaluate(self, script: Script, *words: Argument) -> Any:
        try:
            return await self._command("EVALSHA", script.sha, *words)
        except NoScriptError:  # a new server, or SCRIPT FLUSH: it did not run
            await self._command("SCRIPT", "LOAD", script.source)
            return await self._command("EVALSHA", script.sha, *words)

    async def _load(self, library: Library, error: ResponseError) -> None:
        """Loads the function that the server does not know. Raises any other error again."""
        try:
            if "Function not found" in str(error):
                await self._command("FUNCTION", "LOAD", library.source)
            else:
                raise error
        except ResponseError as refusal:
            if "already exists" in str(refusal):  # another replica was faster
                return
            if not isinstance(refusal, NoPermissionError) and not str(refusal).lower().startswith("unknown "):
                raise
            self._has_functions = False

    async def _command(self, *words: Argument) -> Any:
        """Sends a command and reads its answer, past the client: that does more for a call than the call itself does.

        hiredis writes the command, too: the client's own loop over the arguments takes as long as all of the rest.
        """
        async with self._is_in_use:
            await self._client.connection.send_packed_command(pack_command(words))  # type: ignore[arg-type] # its stub has one
            return await self._client.connection.read_response()

    async def listen(self, channels: Sequence[str], on_message: Callable[[bytes], None], silence_s: float) -> None:
        """Passes on what is published, on a connection of its own. Raises StoreError when that ends or is silent."""
        with _as_store_errors():
            async with self._client.pubsub() as subscription:
                async with timeout(CONNECT_WITHIN_S + GREETING_WITHIN_S):
                    await subscription.subscribe(*channels)
                is_asked = False
                while (message := await subscription.get_message(timeout=silence_s)) or not is_asked:
                    is_asked = message is None
                    if is_asked:
                        await subscription.ping()
                    elif message["type"] == "message":
                        on_message(message["data"])
        raise StoreError(f"nothing was heard for {silence_s:g} s")

    async def close(self) -> None:
        """Closes the connection, in any state."""
        self.is_closed = True
        try:
            async with timeout(GREETING_WITHIN_S):
                await self._client.aclose()
        except (*_FOREIGN_ERRORS, RuntimeError) as error:
            if not is_foreign(error):
                raise


class StoreReach:
    """Tells if the pool's own calls reach a store now. While they do not, nothing else in the process connects to
    it.
    """

    lost_because: str | None = None


@cache
def reach_for(address: StoreAddress) -> StoreReach:  # noqa: ARG001 - the cache's key
    """That of a store, for this process."""
    return StoreReach()


Connect = Callable[[], Awaitable[StoreConnection]]
"""Makes a connection to the server that keeps the pool now. Raises StoreError."""


class SideConnection:
    """A connection for what no admission waits for: opened when it is first needed, and made anew once when it fails.

    Make calls in a `turn`.
    """

    def __init__(self, connect: Connect, reach: StoreReach | None = None) -> None:
        self._connect, self._reach = connect, reach or StoreReach()
        self.open: StoreConnection | None = None
        self._in_turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One caller at a time. A turn that raises or is canceled closes the connection: a late answer must not be
        taken for the next.
        """
        async with self._in_turn:
            try:
                yield
            except BaseException:
                await self._disconnect()
                raise

    async def run(self, script: Script, arguments: Sequence[Argument]) -> list[Any]:
        """See `StoreConnection.run`."""
        return await self._call(lambda connection: connection.run(script, arguments))

    async def commands(self, *commands: Sequence[Argument]) -> list[Any]:
        """See `StoreConnection.commands`."""
        return await self._call(lambda connection: connection.commands(*commands))

    async def close(self) -> None:
        """Closes the connection, where there is one."""
        async with self._in_turn:
            await self._disconnect()

    async def _call(self, call: Callable[[StoreConnection], Awaitable[_Answer]]) -> _Answer:
        if self.open is not None:
            try:
                return await call(self.open)
            except StoreError:  # the server may have been away in between
                await self._disconnect()
        if self._reach.lost_because is not None:
            raise StoreError(self._reach.lost_because)
        self.open = await self._connect()
        return await call(self.open)

    async def _disconnect(self) -> None:
        connection, self.open = self.open, None
        if connection is not None:
            await connection.close()


def ledger_key(pool: str) -> str:
    """The root of a pool's ledger, with which all of its keys begin; the braces keep them on one node of a cluster."""
    return f"ledger:{{{pool}}}"


def ledger_connector(address: StoreAddress, pool: str) -> Connect:
    """Makes connections to the server at `address` that keeps the ledger of the pool called `pool`."""
    return connector_to(address, pool, ledger_key(pool))


def connector_to(address: StoreAddress, pool: str, root: str) -> Connect:
    """Makes connections to the server at `address` that keeps what begins with `root`, beside the pool of that name."""
    locate = {
        StoreKind.SERVER: _stated,
        StoreKind.SOCKET: _stated,
        StoreKind.SENTINEL: _known_to_sentinels,
        StoreKind.CLUSTER: _owner_in_cluster,
    }[address.kind]

    async def connect() -> StoreConnection:
        with _as_store_errors(str(address)):
            place = await locate(address, pool)
            client = Redis(
                **place,
                **_settings(address),
                db=address.db,
                socket_timeout=None,  # who calls has a limit for each call
                single_connection_client=True,
            )
            connection = StoreConnection(client, root)
            try:
                async with timeout(CONNECT_WITHIN_S + GREETING_WITHIN_S):
                    await client.initialize()
            except BaseException:
                await connection.close()
                raise
        return connection

    return connect


def _settings(address: StoreAddress) -> dict[str, Any]:
    """The settings of every client of the address."""
    tls = {"ssl": True} if address.tls else {}
    options = {name: value for name, value in address.options if not name.startswith("sentinel_")}
    return {
        "username": address.username,
        "password": address.password,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_WITHIN_S,
        "health_check_interval": 0,
        "protocol": 2,
        **tls,
        **options,
    }


async def _stated(address: StoreAddress, _: str) -> dict[str, Any]:
    if address.path is not None:
        return {"unix_socket_path": address.path}
    host, port = address.nodes[0]
    return {"host": host, "port": port}


async def _known_to_sentinels(address: StoreAddress, _: str) -> dict[str, Any]:
    """Asks the sentinels in turn for the server that is the master now."""
    own = {name.removeprefix("sentinel_"): value for name, value in address.options if name.startswith("sentinel_")}
    settings = {**_settings(address), "username": None, "password": None, **own, "socket_timeout": GREETING_WITHIN_S}
    sentinels: Any = Sentinel(list(address.nodes), sentinel_kwargs=settings)  # type: ignore[no-untyped-call]
    try:
        host, port = await sentinels.discover_master(str(address.master_name))
    finally:
        for client in sentinels.sentinels:
            await client.aclose()
    return {"host": host, "port": port}


async def _close_cluster(cluster: RedisCluster) -> None:
    await cluster.aclose()
    await cluster.nodes_manager.aclose("startup_nodes")  # which it leaves open where it was canceled


async def _owner_in_cluster(address: StoreAddress, pool: str) -> dict[str, Any]:
    """Asks the cluster for the node that owns the pool's slot: all its keys have one hash tag."""
    nodes = [ClusterNode(host, port) for host, port in address.nodes]
    cluster = RedisCluster(startup_nodes=nodes, **_settings(address), socket_timeout=GREETING_WITHIN_S)
    try:
        await cluster.initialize()
        owner = cluster.get_node_from_key(ledger_key(pool))
    finally:
        closing = asyncio.ensure_future(_close_cluster(cluster))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:  # a pool that closes cancels this, and its nodes would stay open
            await closing
            raise
    if owner is None:
        raise StoreError("no node of the cluster owns the pool's slot")
    return {"host": owner.host, "port": owner.port}


class _as_store_errors(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads like the function it stands for
    """Maps the client's errors, once. `address` is the store's, without secrets, where it was not reached at all."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and is_foreign(error):
            raise StoreError(_words(error, self._address)) from error


def _words(error: BaseException, address: str | None) -> str:
    cause = error.__context__ if isinstance(error.__context__, ssl.SSLError) else error  # older clients hide it
    if address is not None and _is_refusal(error):
        return f"connection refused by {address}"
    first_line = (str(cause).splitlines() or [""])[0]
    words = f"{type(cause).__name__}: {first_line}" if first_line else type(cause).__name__
    if isinstance(cause, (asyncio.TimeoutError, RedisTimeoutError)):
        words = "no answer in time"
    return words if address is None else f"{words}, from {address}"


def _is_refusal(error: BaseException | None) -> bool:
    """True if no server listens there. For a host with several addresses, asyncio only says so in words."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError) or f"[Errno {ECONNREFUSED}]" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
