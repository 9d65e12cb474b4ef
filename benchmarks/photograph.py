"""A picture of a web page, taken by a browser without a screen that is told what to do over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WITHIN_S = 60.0


class NoBrowser(RuntimeError):
    """There is none on the PATH."""


@dataclass
class Page:
    """A tab."""

    _socket: aiohttp.ClientWebSocketResponse[Any]
    _last_id: int = 0

    async def open(self, url: str) -> None:
        """Goes to a page; its scripts may still be at work afterwards."""
        await self._call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """A script's value, which must be JSON's."""
        answer = await self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until a script says true. Raises TimeoutError after `WITHIN_S`."""
        end_s = time.monotonic() + WITHIN_S
        while await self.run(script) is not True:
            if time.monotonic() > end_s:
                raise TimeoutError(f"not so within {WITHIN_S:g} s: {script}")
            await asyncio.sleep(0.1)

    async def photograph(self, selector: str) -> bytes:
        """What it shows of an element, as PNG."""
        box = await self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        clip = {**{name: box[name] for name in ("x", "y", "width", "height")}, "scale": 1}
        shot = await self._call("Page.captureScreenshot", format="png", clip=clip)
        return base64.b64decode(shot["data"])

    async def _call(self, method: str, **parameters: Any) -> Any:
        self._last_id += 1
        await self._socket.send_json({"id": self._last_id, "method": method, "params": parameters})
        while True:
            message = json.loads(await self._socket.receive_str(timeout=WITHIN_S))
            if message.get("id") == self._last_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]


@contextlib.asynccontextmanager
async def browser(width: int, height: int) -> AsyncIterator[Page]:
    """A browser with a profile of its own, one tab of that size, until the block ends. Raises NoBrowser."""
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        raise NoBrowser("no browser on the PATH; `sh .ci/browser` installs one")
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--disable-background-networking", "--no-first-run", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    (tab, *_) = await response.json()
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Page(socket)
                    await socket.send_json({"id": 0, "method": "Browser.close"})
        finally:
            _kill(process.pid)
            await asyncio.wait_for(process.wait(), WITHIN_S)


def _kill(group: int) -> None:
    # Debian's program is a shell script that waits for the browser: a signal to it alone leaves the browser behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


async def _port(says: Path) -> int:
    """The port that the browser has taken, from the file in which it says so."""
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        with contextlib.suppress(FileNotFoundError, IndexError):
            return int((await asyncio.to_thread(says.read_text)).splitlines()[0])
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the browser did not start within {WITHIN_S:g} s")
