"""Emulated engines of a run: a process each, which can be killed and started again, and what they counted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fleet.setting import Setting
from benchmarks.processes import start

START_WITHIN_S = 60.0


@dataclass(slots=True)
class Engine:
    """One engine. `process` is its own, also where another process started it."""

    name: str
    url: str
    process: int
    flags: Sequence[str] = field(repr=False)
    _restarted: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def port(self) -> int:
        """Its port, which it keeps for life."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def answers(self) -> bool:
        """Whether its server answers now."""
        try:
            self.page()
        except OSError:
            return False
        return True

    def page(self, path: str = "/_emulator") -> Any:
        """A page of its own."""
        with urllib.request.urlopen(self.url + path, timeout=20) as response:
            return json.load(response)

    def set_faults(self, *faults: Mapping[str, Any]) -> None:
        """Replaces its faults."""
        body = json.dumps(faults).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/_emulator/faults", body), timeout=20):
            pass

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to its process, by default one that cannot be heard."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, sig)

    def start_again(self) -> None:
        """Starts a new process on the same port, empty; returns when it answers. Raises RuntimeError."""
        self._reap()
        process = start("emulate", "--port", str(self.port), *self.flags)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} did not start again on port {self.port}")
        self._restarted, self.process = process, process.pid
        _until_it_answers(self)

    def end(self) -> None:
        """Ends the process that was started again, where there is one."""
        if self._restarted is not None:
            self._restarted.kill()
            self._reap()

    def _reap(self) -> None:
        if self._restarted is not None:
            self._restarted.wait(20)
            if self._restarted.stdout is not None:
                self._restarted.stdout.close()
            self._restarted = None


def _until_it_answers(engine: Engine) -> None:
    end_s = time.monotonic() + START_WITHIN_S
    while not engine.answers:
        if time.monotonic() > end_s:
            raise RuntimeError(f"{engine.name} does not answer at {engine.url}")
        time.sleep(0.02)


@contextlib.contextmanager
def running(setting: Setting) -> Iterator[Sequence[Engine]]:
    """All engines of a setting while the block runs, `sidecar emulate --replicas`."""
    count, flags = setting.engines, setting.flags()
    speeds = ",".join(f"{speed:g}" for speed in setting.speeds)
    engines: list[Engine] = []
    process = start("emulate", "--replicas", str(count), "--port", "0", "--speed", speeds, *flags)
    try:
        assert process.stdout is not None
        for _ in range(count):
            line = process.stdout.readline()
            found = re.match(r"(engine-\d+): .* on (http://\S+:\d+), .*, process (\d+)$", line.rstrip())
            if found is None:
                raise RuntimeError(f"the engines did not start; they said {line!r}")
            engines.append(Engine(found[1], found[2], int(found[3]), flags))
        engines.sort(key=lambda engine: engine.name)
        for number, engine in enumerate(engines):
            _until_it_answers(engine)
            speed = setting.speeds[number] if len(setting.speeds) == count else setting.speeds[0]
            engine.flags = [*flags, "--speed", f"{speed:g}"]
        yield engines
    finally:
        for engine in engines:
            engine.end()
        process.kill()  # the engines end with it
        process.communicate()


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one engine counted since its start: the most at once, the hits, and the time it lost to the machine."""

    most_requests: int
    most_tokens: int
    most_unprefilled: int
    queried_tokens: int
    hit_tokens: int
    computed_s: float
    lost_s: float
    finished: int

    @staticmethod
    def of(engine: Engine) -> EngineFigures:
        """Reads its page."""
        page = engine.page()
        most, cache, steps = page["most"], page["prefix_cache"], page["steps"]
        return EngineFigures(
            most_requests=most["requests"],
            most_tokens=most["tokens"],
            most_unprefilled=most["unprefilled_tokens"],
            queried_tokens=cache["queried_tokens"],
            hit_tokens=cache["hit_tokens"],
            computed_s=steps["computed_s"],
            lost_s=steps["lost_s"],
            finished=page["counts"]["finished"],
        )
