"""Behavior of real routers when engines fail, as their clients see it.

    python -m benchmarks.fleet_routers.behavior [--json FILE] [--only NAME ...]

Real processes on loopback: each router of `real.py` before four emulated engines, which run two requests at once. First
every engine has a tap before it, which records what reaches it and can answer 503. Then, without taps, one engine is
killed under load, all are killed, and all come back. Nothing here has a target: it says what was seen. "Then broken" is
an answer that began with 200 and had an error event, or ended before its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet_routers import real
from benchmarks.fleet_routers.emulated_engine import MODEL
from benchmarks.fleet_routers.engines import Engines, Received, Tap, free_ports
from sidecar.tools.loadgen.client import Planned, Seen, play
from sidecar.tools.replay.prompts import Words

ENGINES = 4
CHAT = "/v1/chat/completions"
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 100
ANSWER_WITHIN_S = 60.0
BACK_WITHIN_S = 100.0
"""The longest wait for a router to use an engine again. Its circuit breakers stay open for 60 s."""
LOAD = 32
"""Requests in flight when an engine is killed: eight for each engine, of which two run."""
KILL_AFTER_S = 1.2
POLLED_WITHIN_S = 11.0
"""SMG reads the engines' load every 10 s."""
AFTERWARDS = 40
PAUSE_S = 0.5
FIELDS: dict[str, Any] = {"priority": 7, "prompt_cache_key": "conversation", "a_field_of_ours": 1}
HEADERS = {"x-request-id": "our-id", "x-session-id": "our-session", "authorization": "Bearer our-key"}

Facts = dict[str, str]


def planned(number: int, at_s: float = 0.0, output_tokens: int = OUTPUT_TOKENS, **fields: Any) -> Planned:
    """A streaming chat request; each `number` has a prompt of its own."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": Words().text(PROMPT_TOKENS, random.Random(number))}],
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return Planned(at_s, CHAT, {"content-type": "application/json"}, json.dumps(body).encode())


async def ask(url: str, *requests: Planned) -> list[Seen]:
    """Sends them and waits for all."""
    return await play([url], requests, timeout_s=ANSWER_WITHIN_S)


def answers(seen: Sequence[Seen]) -> str:
    """How they ended, counted: `38 x 200, 2 x 502`."""
    kinds = Counter(_kind(one) for one in seen)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items(), key=lambda pair: -pair[1]))


def _kind(one: Seen) -> str:
    if one.is_complete:
        return str(one.status)
    if one.status is None:
        return "no answer"
    return str(one.status) if one.status != 200 else "200, then broken"


# -- with taps


async def passing(url: str, taps: Sequence[Tap]) -> Facts:
    """What passes through to an engine and back: the stream, usage, fields and headers."""
    first, again = (await ask(url, planned(1)))[0], (await ask(url, planned(1)))[0]
    lost = []
    for name, value in FIELDS.items():
        [one], received = await _received(url, taps, planned(2, **{name: value}))
        if received is None or received.body.get(name) != value:
            lost.append(name if one.is_complete else f"{name} ({answers([one])})")
    request = planned(2)
    _, received = await _received(url, taps, Planned(0.0, CHAT, {**request.headers, **HEADERS}, request.body))
    assert received is not None, "the router refuses a plain request"
    lasted_s = again.end_s - (again.first_token_s or again.end_s)
    kept = [name for name, value in HEADERS.items() if received.headers.get(name) == value]
    return {
        "streams": f"{again.output_tokens} tokens over {lasted_s:.1f} s" if again.is_complete else str(again.error),
        "usage.cached_tokens, first and again": f"{first.cached_tokens}, {again.cached_tokens}",
        "engine's path": received.path,
        "body fields lost": ", ".join(lost) or "none",
        "body fields added": ", ".join(sorted(set(received.body) - set(json.loads(request.body)))) or "none",
        "headers kept": ", ".join(kept) or "none",
    }


async def _received(url: str, taps: Sequence[Tap], request: Planned) -> tuple[list[Seen], Received | None]:
    """Sends a request, and returns what its client saw and what reached an engine."""
    for tap in taps:
        tap.requests.clear()
    seen = await ask(url, request)
    return seen, next((one for tap in taps for one in tap.generating), None)


async def one_overloaded(url: str, taps: Sequence[Tap]) -> Facts:
    """One engine answers 503 with Retry-After to everything, and then no longer."""
    taps[0].overloaded = True
    seen = [one for number in range(AFTERWARDS // 8) for one in await ask(url, *_few(100 + 8 * number, 8))]
    taps[0].overloaded = False
    facts = {
        f"one of {ENGINES} engines says 503: clients see": answers(seen),
        "  requests that it got meanwhile": str(taps[0].refused),
    }
    taps[0].requests.clear()
    facts["  it is used again after"] = await _until(url, 10_000, lambda _: bool(taps[0].generating), at_once=8)
    return facts


async def all_overloaded(url: str, taps: Sequence[Tap]) -> Facts:
    """Every engine answers 503 with Retry-After: 1, and then no longer."""
    for tap in taps:
        tap.overloaded, tap.refused = True, 0
    began_s = time.monotonic()
    seen = await ask(url, *_few(400, 1))
    took_s = time.monotonic() - began_s
    tries = sum(tap.refused for tap in taps)
    seen += await ask(url, *_few(401, 19))
    statuses, retry_after = answers(seen), seen[0].headers.get("retry-after", "none")
    for tap in taps:
        tap.overloaded = False
    back = await _until(url, 500, lambda one: one.is_complete)
    return {
        "all engines say 503: clients see": statuses,
        "  tries for the first request": f"{tries} in {took_s:.1f} s",
        "  its Retry-After (the engines' is 1)": retry_after,
        "  the next success after": back,
    }


def _few(first: int, count: int) -> list[Planned]:
    return [planned(number, output_tokens=10) for number in range(first, first + count)]


async def _until(url: str, first: int, is_back: Callable[[Seen], bool], at_once: int = 1) -> str:
    """How long requests have to be sent, so many each half second, until `is_back` for one of them."""
    began_s, failed = time.monotonic(), 0
    while (took_s := time.monotonic() - began_s) < BACK_WITHIN_S:
        seen = await ask(url, *_few(first, at_once))
        failed += sum(not one.is_complete for one in seen)
        if any(map(is_back, seen)):
            return f"{took_s:.1f} s ({failed} failed meanwhile)"
        first += at_once
        await asyncio.sleep(PAUSE_S)
    return f"not within {BACK_WITHIN_S:.0f} s ({failed} failed meanwhile)"


# -- without taps


async def one_killed(url: str, engines: Engines) -> Facts:
    """Kill -9 of one engine under load. Before it, every engine serves for a while, and the router reads its load."""
    await ask(url, *(planned(number) for number in range(LOAD)))
    await asyncio.sleep(POLLED_WITHIN_S)
    load = asyncio.ensure_future(ask(url, *(planned(1_000 + number) for number in range(LOAD))))
    await asyncio.sleep(KILL_AFTER_S)
    states = await engines.states()
    victim = max(range(ENGINES), key=lambda number: states[number]["now"]["requests"])
    had = states[victim]["now"]
    engines.kill(victim)
    broken = [one for one in await load if not one.is_complete]
    begun = [one for one in broken if one.first_token_s is not None]
    unseen = [one for one in broken if one.first_token_s is None]
    began_s = time.monotonic()
    later = [one for turn in range(AFTERWARDS // 4) for one in await ask(url, *_few(2_000 + 4 * turn, 4))]
    took_s = time.monotonic() - began_s
    return {
        "kill -9 of an engine: requests it had": f"{had['requests']}, of which {had['running']} running",
        "  broken after their first token": str(len(begun)),
        "  broken before it": f"{len(unseen)}" + (f" ({answers(unseen)})" if unseen else ""),
        f"  the next {AFTERWARDS} requests": f"{answers(later)} in {took_s:.1f} s",
    }


async def all_killed(url: str, engines: Engines) -> Facts:
    """Every engine killed, then all started again."""
    for number in range(ENGINES):
        engines.kill(number)
    began_s = time.monotonic()
    seen = await ask(url, *_few(3_000, 1))
    took_s = time.monotonic() - began_s
    seen += await ask(url, *_few(3_001, 19))
    facts = {
        "all engines down: clients see": answers(seen),
        "  the first answer after": f"{took_s:.1f} s",
        "  its Retry-After": seen[0].headers.get("retry-after", "none"),
        "  its error": str(seen[0].error)[:160],
    }
    await engines.start_all()
    facts["all engines back: the next success after"] = await _until(url, 4_000, lambda one: one.is_complete)
    began_s = time.monotonic()
    while (used := await engines.used()) < ENGINES and time.monotonic() - began_s < BACK_WITHIN_S:
        await ask(url, *_few(random.randrange(10_000, 10**9), 4))
        await asyncio.sleep(PAUSE_S)
    facts["  engines in use"] = f"{used} of {ENGINES} after {time.monotonic() - began_s:.1f} s more"
    return facts


async def examine(name: str) -> Facts:
    """All facts of one router. Raises NotInstalled, NotReady."""
    router = real.ROUTERS[name]
    line = [str(part) for part in router.command(Path("."), ["WORKER_URL"] * 1, 30_000)]
    facts = {"version": f"{router.package} {router.version}", "engines": router.engine}
    facts["command"] = " ".join([Path(line[0]).name, *line[1:]])
    if router.note:
        facts["note"] = router.note
    async with Engines(router.engine, ENGINES) as engines:
        taps = [Tap(url) for url in engines.urls]
        for tap in taps:
            await tap.open()
        [port] = free_ports(1)
        process = await asyncio.to_thread(real.start, name, [tap.url for tap in taps], port)
        try:
            url = f"http://127.0.0.1:{port}"
            for part in (passing, one_overloaded, all_overloaded):
                facts |= await part(url, taps)
        finally:
            await asyncio.to_thread(real.stop, process)
            for tap in taps:
                await tap.close()
        [port] = free_ports(1)
        process = await asyncio.to_thread(real.start, name, engines.urls, port)
        try:
            url = f"http://127.0.0.1:{port}"
            facts |= await one_killed(url, engines)
            facts |= await all_killed(url, engines)
        finally:
            await asyncio.to_thread(real.stop, process)
    return facts


def table(found: Mapping[str, Facts]) -> str:
    """One block for each router: the facts differ in length, so no grid."""
    width = max(len(fact) for facts in found.values() for fact in facts)
    blocks = [
        "\n".join([name, *(f"  {fact:<{width}}  {value}" for fact, value in facts.items())])
        for name, facts in found.items()
    ]
    return "\n\n".join(blocks)


def main() -> int:
    """Examines the routers one after the other. Returns 1 where one could not be started."""
    parser = argparse.ArgumentParser(description="behavior of real routers when engines fail")
    parser.add_argument("--json", type=Path, help="write the facts here, too")
    parser.add_argument("--only", nargs="+", choices=[*real.ROUTERS], default=[*real.ROUTERS])
    args = parser.parse_args()
    logging.getLogger("aiohttp.server").disabled = True  # routers try gRPC on every engine first
    found: dict[str, Facts] = {}
    failed = False
    for name in args.only:
        try:
            found[name] = asyncio.run(examine(name))
        except (real.NotInstalled, real.NotReady) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        print(table({name: found[name]}), end="\n\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"python": platform.python_version(), "routers": found}, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
