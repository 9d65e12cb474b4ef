"""A headless browser that a test drives over its DevTools protocol: pages that change, in any size, light or dark."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.browser import browser

WITHIN_S = 30.0


class Tab:
    """A page that is open. `console` has what it complained about, `requested` what it asked the network for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.ensure_future(self._read())
        self._loaded = asyncio.Event()
        self.console: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, WITHIN_S)

    async def open(self, url: str) -> None:
        """Goes to a page, and waits until the browser has read it."""
        self._loaded.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), WITHIN_S)

    async def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the window's size, and whether its user likes it dark."""
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def evaluate(self, expression: str) -> Any:
        """What an expression is in the page; a promise is waited for. Asks again where the page was left meanwhile."""
        end_s = time.monotonic() + WITHIN_S
        while True:
            reported = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
            if "error" not in reported:
                break
            assert time.monotonic() < end_s, reported["error"]
            await asyncio.sleep(0.05)
        assert "exceptionDetails" not in reported, reported["exceptionDetails"]
        return reported["result"].get("value")

    async def until(self, expression: str, within_s: float = 60.0) -> Any:
        """Waits until an expression is true in the page, and returns it."""
        end_s = time.monotonic() + within_s
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < end_s, f"not within {within_s:g} s: {expression}\n{await self.text()}"
            await asyncio.sleep(0.05)
        return value

    async def text(self) -> str:
        """All that can be read in the page."""
        return str(await self.evaluate("document.body.innerText"))

    async def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        reported = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(reported["data"])

    async def close(self) -> None:
        """Lets go of it."""
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    async def _read(self) -> None:
        async for message in self._socket:
            reported = json.loads(message.data)
            if "id" in reported:
                answer = self._answers.pop(reported["id"])
                if not answer.done():
                    answer.set_result(reported.get("result", reported))
            else:
                self._note(reported["method"], reported["params"])

    def _note(self, method: str, reported: Any) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requested.append(reported["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(reported["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str(reported["args"]))
        elif method == "Log.entryAdded":
            self.console.append(reported["entry"]["text"])


@contextmanager
def headless(folder: Path) -> Iterator[str]:
    """A browser without a window, ended with the block; its profile is in `folder`. Gives the address of its tools."""
    path = browser()
    profile = folder / "profile"
    command = [
        path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--disable-background-networking", "--no-first-run", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **quiet) as process:
        try:
            yield f"http://127.0.0.1:{_port(profile / 'DevToolsActivePort')}"
        finally:
            # Debian's program is a shell script around the browser: a signal to it alone leaves the browser behind.
            os.killpg(process.pid, signal.SIGKILL)


@asynccontextmanager
async def tab(tools: str) -> AsyncIterator[Tab]:
    """An empty page in a browser that runs; closed with the block."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{tools}/json/new?about:blank") as response:
            page = await response.json()
        async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            opened = Tab(socket)
            try:
                yield opened
            finally:
                await opened.close()
        async with session.get(f"{tools}/json/close/{page['id']}"):
            pass


def _port(file: Path) -> int:
    """Where it listens: it writes that to a file as soon as it does."""
    end_s = time.monotonic() + WITHIN_S
    while not file.exists() or not file.read_text():
        assert time.monotonic() < end_s, "the browser did not start"
        time.sleep(0.02)
    return int(file.read_text().splitlines()[0])
