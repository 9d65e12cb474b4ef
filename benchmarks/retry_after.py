"""Whether a `Retry-After` is worth obeying: how often a refused client that comes back when told gets in.

    python -m benchmarks.retry_after [--seconds 100] [--json FILE]

An emulated engine that does 8 requests a second behind `sidecar serve`, one tier whose queue has 16 places, one tenant
for all clients. An open loop sends 120% and 150% of that; no refused client gives up, so that what comes back comes
on top. A third of the clients is OpenAI's own (`openai.AsyncOpenAI`), a third obeys `retry-after-ms`, a third
`retry-after` in whole seconds, and of these two nothing tells a second attempt from a first one but its body.

Beside it, at the same time, the same load on a proxy with the old rule: it says when the queue will have been
worked off, and promises nothing. The command fails where less than 80% of those who came back when told got in
at once, where the old rule does not fall short of that (then the load was none), or where the promises cost the
engine more than 3% of its work.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import httpx2
import openai

from benchmarks.processes import command

SLOTS, STEP_MS, OUTPUT_TOKENS = 8, 50, 20
PER_S = SLOTS / (OUTPUT_TOKENS * STEP_MS / 1000)
PLACES = 16
LOADS = (1.2, 1.5)
PROXIES = {"promises": "sidecar.cli", "old rule": "benchmarks.retry_after_old"}
LEAST_IN = 0.8
MOST_LOST = 0.03
POLICY = f"""\
engine: vllm
capacity: {{requests: {SLOTS}}}
tiers:
  chat: {{queue: {{max_requests: {PLACES}}}}}
default_tier: chat
anonymous: deny
tenants: tenants.yaml
endpoints:
  /v1/chat/completions: {{}}
"""
KEY = "sk-shared"
TENANT = f'tenant: shared\nkeys: ["sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]\ntier: chat\n'


@dataclass(slots=True)
class Figures:
    """Of one proxy under one load.

    `came_back` counts tries after a refusal, `got_in` those of them that were let in.
    """

    sent: int = 0
    refused: int = 0
    came_back: int = 0
    got_in: int = 0
    done: int = 0
    told_s: float = 0.0
    most_told_s: float = 0.0

    @property
    def share_in(self) -> float:
        """Of those who came back."""
        return self.got_in / self.came_back if self.came_back else 0.0


class Clients:
    """All clients of one proxy. What happens behind `until_s` of the monotonic clock is not counted."""

    def __init__(self, proxy: str, until_s: float) -> None:
        self.by_kind = {"openai": Figures(), "milliseconds": Figures(), "whole seconds": Figures()}
        self._url = f"{proxy}/v1/chat/completions"
        self._until_s = until_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"authorization": f"Bearer {KEY}"}
        )
        self._openai = openai.AsyncOpenAI(
            api_key=KEY,
            base_url=f"{proxy}/v1",
            max_retries=50,
            http_client=httpx2.AsyncClient(
                event_hooks={"response": [self._on_openai_response]},
                timeout=600,
                limits=httpx2.Limits(max_connections=None),
            ),
        )

    async def ask(self, number: int) -> None:
        """One request, again and again until it is answered."""
        kind = tuple(self.by_kind)[number % 3]
        if kind == "openai":
            await self._openai.chat.completions.create(**_body(number))  # type: ignore[call-overload]
            self._count_done(kind)
            return
        attempt = 0
        while (wait_s := await self._try(kind, number, attempt)) is not None:
            await asyncio.sleep(wait_s)
            attempt += 1

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()
        await self._openai.close()

    async def _try(self, kind: str, number: int, attempt: int) -> float | None:
        async with self._session.post(self._url, json=_body(number)) as response:
            self._count(kind, attempt, response.status, response.headers)
            await response.read()
            if response.status == 200:
                self._count_done(kind)
                return None
            if kind == "milliseconds":
                return float(response.headers["retry-after-ms"]) / 1000
            return float(response.headers["retry-after"])

    async def _on_openai_response(self, response: httpx2.Response) -> None:
        attempt = int(response.request.headers["x-stainless-retry-count"])
        self._count("openai", attempt, response.status_code, response.headers)

    def _count(self, kind: str, attempt: int, status: int, headers: Mapping[str, str]) -> None:
        """A refusal is answered at once. Who is let in is answered later: its tries are counted when they end."""
        if status not in (200, 503):
            raise RuntimeError(f"the proxy answered {status}")
        figures, is_in = self.by_kind[kind], status == 200
        if time.monotonic() > self._until_s:
            return
        figures.sent += attempt == 0
        figures.came_back += attempt > 0
        figures.got_in += is_in and attempt > 0
        if not is_in:
            told_s = float(headers["retry-after-ms"]) / 1000
            figures.refused += 1
            figures.told_s += told_s
            figures.most_told_s = max(figures.most_told_s, told_s)

    def _count_done(self, kind: str) -> None:
        if time.monotonic() <= self._until_s:
            self.by_kind[kind].done += 1


def _body(number: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"What is {number} squared?"}]
    return {"model": "emulated", "messages": messages, "max_tokens": OUTPUT_TOKENS}


async def play(proxy: str, load: float, seconds: float) -> Mapping[str, Figures]:
    """The load on one proxy for so long; what its clients saw meanwhile, by their kind."""
    luck = random.Random(round(load * 10))
    began_s = time.monotonic()
    clients = Clients(proxy, began_s + seconds)
    tasks: list[asyncio.Task[None]] = []
    at_s = luck.expovariate(load * PER_S)
    while at_s < seconds:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        tasks.append(asyncio.create_task(clients.ask(len(tasks))))
        at_s += luck.expovariate(load * PER_S)
    await asyncio.sleep(began_s + seconds - time.monotonic())
    for failed in [task for task in tasks if task.done() and task.exception()]:
        failed.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await clients.close()
    return clients.by_kind


async def play_all(
    proxies: Mapping[tuple[str, float], str], seconds: float
) -> dict[tuple[str, float], dict[str, Figures]]:
    """All at the same time."""
    found = await asyncio.gather(*(play(address, load, seconds) for (_, load), address in proxies.items()))
    return {which: dict(figures) for which, figures in zip(proxies, found, strict=True)}


def measure(seconds: float) -> dict[tuple[str, float], dict[str, Figures]]:
    """Both rules under every load, side by side: an engine and a proxy for each."""
    emulated = ("emulate", "--engine", "vllm", "--max-num-seqs", str(SLOTS), "--step-ms", str(STEP_MS), "--port", "0")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        (Path(folder) / "policy.yaml").write_text(POLICY)
        (Path(folder) / "tenants.yaml").write_text(TENANT)
        proxies = {}
        for load in LOADS:
            for rule, module in PROXIES.items():
                (engine,) = running.enter_context(command(*emulated))
                serve = ("serve", "--upstream", engine, "--policy", folder, "--port", "0", "--admin-port", "0")
                proxies[rule, load], _ = running.enter_context(command(*serve, module=module))
        return asyncio.run(play_all(proxies, seconds))


def total(figures: Sequence[Figures]) -> Figures:
    """Of all kinds of clients."""
    names = ("sent", "refused", "came_back", "got_in", "done", "told_s")
    sums = {name: sum(getattr(one, name) for one in figures) for name in names}
    return Figures(**sums, most_told_s=max(one.most_told_s for one in figures))


def table(found: Mapping[tuple[str, float], Mapping[str, Figures]], seconds: float) -> str:
    """A line for each kind of client, a block for each proxy."""
    head = (
        f"{'':34}{'refusals':>10}{'told, mean':>12}{'most':>8}{'came back':>11}{'got in':>8}{'share':>8}{'done/s':>8}"
    )
    lines = [head]
    for (rule, load), by_kind in found.items():
        for kind, one in [*by_kind.items(), ("all", total([*by_kind.values()]))]:
            told = f"{one.told_s / one.refused if one.refused else 0:>10.1f} s{one.most_told_s:>6.1f} s"
            name = f"{load:.0%} load, {rule}, {kind}"
            shares = f"{one.came_back:>11}{one.got_in:>8}{one.share_in:>8.0%}{one.done / seconds:>8.2f}"
            lines.append(f"{name:34}{one.refused:>10}{told}{shares}")
        lines.append("")
    return "\n".join(lines)


def misses(found: Mapping[tuple[str, float], Mapping[str, Figures]]) -> list[str]:
    """What was not reached, a sentence each."""
    missed = []
    for load in LOADS:
        new, old = (total([*found[rule, load].values()]) for rule in PROXIES)
        if new.share_in < LEAST_IN:
            missed.append(f"at {load:.0%} {new.share_in:.0%} got in on the next try; at least {LEAST_IN:.0%} should")
        if old.share_in >= LEAST_IN:
            missed.append(f"at {load:.0%} the old rule lets in {old.share_in:.0%}: that was no overload")
        if new.done < (1 - MOST_LOST) * old.done:
            missed.append(f"at {load:.0%} the engine did {new.done} requests instead of {old.done}")
    return missed


def main() -> int:
    """Returns 1 where a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100.0, help="length of the overload (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    found = measure(arguments.seconds)
    print(f"{PER_S:g} requests a second is what the engine does; {arguments.seconds:g} s of overload\n")
    print(table(found, arguments.seconds))
    if arguments.json:
        figures = [
            {"rule": rule, "load": load, "client": kind, **asdict(one), "share_in": one.share_in}
            for (rule, load), by_kind in found.items()
            for kind, one in by_kind.items()
        ]
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")
    missed = misses(found)
    print("\n".join(missed) or "every target was reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
