"""A Python program in a process of its own, whose lines a test can wait for and which it can signal."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

WITHIN_S = 30.0
"""A start takes a second on an idle machine, and ten on a busy one."""


class Running:
    """The process while it runs; `exit_code` waits for its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self, pattern: str, within_s: float = WITHIN_S) -> re.Match[str]:
        """Reads its output up to a line that matches; fails after `within_s` or when the output ends."""
        return await asyncio.wait_for(self._line(pattern), within_s)

    async def _line(self, pattern: str) -> re.Match[str]:
        while line := (await self._process.stdout.readline()).decode():
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line like {pattern!r}; standard error: {await self.errors()}")

    async def errors(self) -> str:
        """Its standard error, to the end."""
        return (await asyncio.wait_for(self._process.stderr.read(), WITHIN_S)).decode()

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        """Waits for its end, at most `WITHIN_S`."""
        return await asyncio.wait_for(self._process.wait(), WITHIN_S)


@asynccontextmanager
async def python(*arguments: str) -> AsyncIterator[Running]:
    """Runs this Python with `arguments`; kills it at the end of the block if it is still there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
