"""One request on one connection, for clients that send the next when they have an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from sidecar.tools.loadgen.connection import ClientConnection, Target, connect

CHAT = "/v1/chat/completions"


async def ask(target: Target, body: bytes, headers: Mapping[str, str], within_s: float) -> ClientConnection | str:
    """Sends a chat and waits for the end of its answer. One line where no connection came.

    Canceling closes the connection, so that the server stops working on the request.
    """
    connection = await connect(target, within_s)
    if not isinstance(connection, ClientConnection):
        return connection
    connection.send(b"%bcontent-length: %d\r\n\r\n%b" % (target.head(CHAT, headers), len(body), body))
    ends = asyncio.get_running_loop().call_later(within_s, connection.end, "no complete answer in time")
    try:
        await connection.done
    finally:
        ends.cancel()
        connection.close()
    return connection
