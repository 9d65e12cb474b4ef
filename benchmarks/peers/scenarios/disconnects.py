"""Disconnects: half of the clients leave in the middle of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.load import post
from benchmarks.peers.playing import Ground, ground
from benchmarks.peers.setting import DEFAULT, Figure, Peer, Setting

TITLE = "8 streams of 10 s, 4 of whose clients leave after 2 s; then 4 whole answers whose clients leave"
STREAMS, TOKENS, STEP_MS, LEAVE_AT_S = 8, 200, 50, 2.0
SETTING = Setting(reserves={})


class Client:
    """One client that can leave."""

    def __init__(self, found: Ground, *, stream: bool, tokens: int) -> None:
        planned = found.peer.request(DEFAULT, 0.0, tokens, stream=stream)
        headers = tuple((name, value) for name, value in planned.headers.items() if name != "content-type")
        self._request = post(planned.path, planned.body, headers)
        self._port = found.gateways[0].port
        self.answer = b""
        self.longest_gap_s = 0.0

    async def open(self) -> None:
        """Connects and sends the request."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(self._request)

    async def read(self) -> None:
        """Reads to the end of the answer."""
        last_s = None
        while b"0\r\n\r\n" not in self.answer[-16:]:
            read = await self._reader.read(65536)
            now_s = asyncio.get_running_loop().time()
            self.longest_gap_s = max(self.longest_gap_s, 0.0 if last_s is None else now_s - last_s)
            last_s = now_s
            if not read:
                return
            self.answer += read

    def leave(self) -> None:
        """Closes the connection."""
        self._writer.close()

    def words(self) -> int:
        """Chunks with text: an engine's first chunk has an empty one."""
        return self.answer.count(b'"content":"') - self.answer.count(b'"content":""')


def play(peer: Peer, is_quick: bool) -> Sequence[Figure]:
    """Plays it."""
    with ground(peer, SETTING, step_ms=STEP_MS // 5 if is_quick else STEP_MS) as found:
        return asyncio.run(_play(found, 0.5 if is_quick else LEAVE_AT_S))


async def _play(found: Ground, leave_at_s: float) -> list[Figure]:
    clients = [Client(found, stream=True, tokens=TOKENS) for _ in range(STREAMS)]
    await asyncio.gather(*(client.open() for client in clients))
    reading = [asyncio.ensure_future(client.read()) for client in clients]
    await asyncio.sleep(leave_at_s)
    half = STREAMS // 2
    for client, task in zip(clients[:half], reading[:half], strict=True):
        task.cancel()
        client.leave()
    stopped_s = await found.until(lambda running: running <= half, leave_at_s * 3)
    await asyncio.gather(*reading[half:])
    stayed = clients[half:]
    whole = [Client(found, stream=False, tokens=TOKENS) for _ in range(half)]
    await asyncio.gather(*(client.open() for client in whole))
    await asyncio.sleep(leave_at_s)
    if await asyncio.to_thread(found.running) != half:
        raise RuntimeError(f"the engine does not run the {half} whole answers that {found.peer.title} was sent")
    for client in [*whole, *stayed]:
        client.leave()
    whole_s = await found.until(lambda running: running == 0, leave_at_s * 3)
    return [
        Figure("engine stops the streams after", stopped_s),
        Figure("engine stops the whole answers after", whole_s),
        Figure("least tokens of the streams that stayed", min(client.words() for client in stayed), ""),
        Figure("longest gap in them", max(client.longest_gap_s for client in stayed)),
    ]
