"""What one admission costs inside the server in a pool of several engines, against a pool of one engine.

    python -m benchmarks.redis_engines [--quick] [--instructions]

Each admission is three calls of their own: a request enters, has its first byte, and ends; two in a pool without
engines. The time is the processor time of the server. `idle`: nothing else is held. `waiting`: 50 requests wait before
engines that are full in tokens. Rounds of all pools take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from benchmarks.redis_setup import chosen_binary, running_server, shipped_policy, version_of
from sidecar.policy.model import Order
from sidecar.pools.base import Ask
from sidecar.pools.engines import EngineOffer
from sidecar.pools.redis import protocol
from sidecar.pools.redis.script import source
from sidecar.scheduling.gain import GainFigures
from tests.support.redis_servers import free_port

ENGINES = (0, 1, 4, 16, 64)
WAITING = 50
CASES = [(engines, waiting) for waiting in (0, WAITING) for engines in ENGINES]
Figures = Mapping[tuple[int, int], float]
PROMPT, TOKENS = 300, 2_500
LEASES_PER_ENGINE = 16
TARGET = 1.3
"""With 16 engines, to a pool with one."""


TENANTS = 20
MOST_AT_ONCE = 100
"""Requests that enter by one call while a queue is filled."""


def figures_of(number: int) -> GainFigures:
    """The deadline is in two minutes: where many wait, nearly all are urgent, and densities fall."""
    tokens = Random(number).randrange(10, 1000)
    return GainFigures(2 ** (number % 3), tokens, 250 * tokens + 50_000, 120_000_000, 0, 30_000)


class Subject:
    """One pool with so many engines; none: a pool without engines, by the script of such pools."""

    def __init__(self, client: Any, engines: int, waiting: int, *, is_by_gain: bool = False) -> None:
        self.engines, self.waiting, self.is_by_gain = engines, waiting, is_by_gain
        order = Order.GAIN if is_by_gain else Order.LEVEL
        policy = shipped_policy(f"cost-{engines}-{waiting}-{order}").ordered_by(order)
        self._client = client
        kind = {"has_engines": engines > 0, "is_by_gain": is_by_gain}
        self._root = protocol.root_key(policy.pool, **kind)
        self._sha = client.script_load(source(**kind))
        self._ids = count(1)
        self._leases: deque[int] = deque()
        text = protocol.engines_rules_text(policy, 300) if engines else protocol.rules_text(policy, policy.rules)
        size = TOKENS * LEASES_PER_ENGINE + TOKENS // 2  # a full engine still has some room
        offers = [EngineOffer(f"engine-{number}#1", size, 160, 8_000) for number in range(engines)]
        stated = protocol.engines(offers, (), 0) if engines else ()
        self._call(protocol.SYNC, 1, 0, text, 1, 0, *stated)
        while waiting and self._waiting < waiting:
            self._enter(min(MOST_AT_ONCE, waiting - self._waiting))

    def _call(self, kind: bytes, *arguments: protocol.Argument) -> protocol.Reply:
        answer = self._client.evalsha(self._sha, 1, self._root, kind, "replica", *arguments)
        reply = protocol.read_reply(answer)
        self._waiting = reply.waiting
        self._leases += [lease_id for lease_id, _ in reply.grants]
        return reply

    def _enter(self, number: int = 1) -> None:
        self._call(protocol.CALL, 1, 0, *chain.from_iterable(self._entering() for _ in range(number)))

    def _entering(self) -> Sequence[protocol.Argument]:
        lease_id = next(self._ids)
        hits = ((f"engine-{lease_id % self.engines}#1", 100),) if self.engines else ()
        gain = figures_of(lease_id) if self.is_by_gain else None
        ask = Ask(2, f"tenant-{lease_id % TENANTS}", 1, TOKENS, 1, prompt=PROMPT, hits=hits, gain=gain)
        placing = protocol.placing(ask) if self.engines else ()
        return (*placing, *protocol.gain(lease_id, ask), *protocol.enter(lease_id, ask, None))

    def admissions(self, number: int) -> float:
        """The server's microseconds of one admission, the mean of so many."""
        before_s = self._processor_s()
        for _ in range(number):
            self._enter()
            if self.engines:
                self._call(protocol.CALL, 1, 0, protocol.PREFILLED, self._leases[-1])
            self._call(protocol.CALL, 1, 0, protocol.END, self._leases.popleft())
        return (self._processor_s() - before_s) * 1e6 / number

    def _processor_s(self) -> float:
        spent: dict[str, float] = self._client.info("cpu")
        return spent["used_cpu_user"] + spent["used_cpu_sys"]


def processor_time(rounds: int, admissions: int) -> Figures:
    """Microseconds of the server's processor time."""
    with running_server() as server, redis.Redis(host=server.host, port=server.port) as client:
        print(version_of(server))
        subjects = [Subject(client, *case) for case in CASES]
        seen: dict[Subject, list[float]] = {subject: [] for subject in subjects}
        for number in range(rounds + 1):
            for subject in subjects:
                spent = subject.admissions(admissions)
                if number:  # the first round warms up
                    seen[subject].append(spent)
    return {(it.engines, it.waiting): statistics.median(spent) for it, spent in seen.items()}


def instructions(admissions: int) -> Figures:
    """Instructions of the server under valgrind, which do not depend on what else the machine does."""
    found = {}
    for case in CASES:
        few, many = (_instructions(case, number) for number in (admissions, 3 * admissions))
        found[case] = (many - few) / (2 * admissions)
    return found


def _instructions(case: tuple[int, int], admissions: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        port, out = free_port(), Path(folder) / "out"
        arguments = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", str(chosen_binary().path)]
        arguments += ["--port", str(port), "--save", "", "--dir", folder]
        with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            with redis.Redis(port=port, retry=Retry(ConstantBackoff(0.2), 100)) as client:
                Subject(client, *case).admissions(admissions)
                client.shutdown(nosave=True)
            server.wait()
        totals = re.search(r"^(?:totals|summary): (\d+)", out.read_text(encoding="utf-8"), re.MULTILINE)
        assert totals
        return int(totals[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    wanted = parser.parse_args()
    if wanted.instructions:
        unit, figures = "instructions", instructions(20 if wanted.quick else 60)
    else:
        unit, figures = "us", processor_time(3 if wanted.quick else 15, 100 if wanted.quick else 300)
    is_met = True
    for (engines, waiting), spent in figures.items():
        ratio = spent / figures[1, waiting]
        is_missed = engines == 16 and ratio > TARGET
        is_met &= not is_missed
        missed = "   MISSED" if is_missed else ""
        print(f"{engines:3} engines, {waiting:3} waiting {spent:12,.0f} {unit} an admission   {ratio:.2f}{missed}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
