"""Instructions of the affinity prediction per request: a prompt's bytes, its hashes, the hits, the tables' updates.

    python -m benchmarks.affinity_cost [--json FILE]

Each request is the next turn of one of six conversations that every engine knows up to the turn before. A request costs
`predict`, `sent` and `ended` of `sidecar.fleet.affinity`. Linux perf counts where it is permitted, else callgrind. No
target: the figures are for the budget of a request with several engines.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.instructions import marks
from benchmarks.instructions.__main__ import usable
from benchmarks.instructions.counters import call
from sidecar.apis import Api
from sidecar.fleet.affinity import PROMPT_CACHE_KEY, Affinity

TOKENS = (1_000, 8_000, 100_000)
ENGINES = (1, 4, 16, 64)
CONVERSATIONS = 6
REPETITIONS = 12
TURN_BYTES = 2_000
LINE = 80
"""Characters between line ends, which JSON escapes."""


def body_of(number: int, turns: int, size: int) -> bytes:
    """The body of a conversation's turn: `size` bytes of text in messages of `TURN_BYTES`, and one more per turn."""
    rng = random.Random(number)
    count = max(1, size // TURN_BYTES) + turns
    texts = ["\n".join(rng.randbytes(LINE // 2).hex() for _ in range(TURN_BYTES // LINE)) for _ in range(count)]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 100, "prompt_cache_key": f"{number}"}).encode()


def prepared(tokens: int, engines: int, bodies: Sequence[Sequence[bytes]]) -> Callable[[int], None]:
    """Serves so many requests. `bodies` are two turns of each conversation."""
    affinity = Affinity(session=(b"x-session-id", PROMPT_CACHE_KEY))
    names = [f"engine-{number}#1" for number in range(engines)]
    affinity.set_engines(dict.fromkeys(names, 4_000_000))
    for first, _ in bodies:
        known = affinity.predict("t", Api.CHAT, first, {}, tokens)
        for name in names:
            affinity.sent(known, name)

    def serve(count: int) -> None:
        for number in range(count):
            prediction = affinity.predict("t", Api.CHAT, bodies[number % CONVERSATIONS][1], {}, tokens)
            affinity.sent(prediction, names[number % engines])
            affinity.ended(prediction, prompt_tokens=tokens, cached_tokens=tokens * 9 // 10, output_tokens=100)

    serve(CONVERSATIONS)
    return serve


def count_parts(parts: Sequence[str]) -> None:
    """Counts each part between two marks. All are prepared before: between parts a counting tool may be slow."""
    sizes = {int(part.partition("x")[0]) for part in parts}
    bodies = {
        size: [[body_of(number, turns, size * 4) for turns in (0, 1)] for number in range(CONVERSATIONS)]
        for size in sizes
    }
    ready = []
    for part in parts:
        name, _, count = part.partition("=")
        size, engines = map(int, name.split("x"))
        ready.append((prepared(size, engines, bodies[size]), int(count)))
    for serve, repetitions in ready:
        marks.begin()
        serve(repetitions)
        marks.end()


def run(prefix: Sequence[str], environment: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, float]:
    """Runs this module under the command `prefix`: see `counters.Run`."""
    program = [sys.executable, "-m", "benchmarks.affinity_cost", "--parts"]
    call([*prefix, *program, *(f"{name}={count}" for name, count in parts.items())], environment)
    return {}


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.parts is not None:
        count_parts(args.parts)
        return 0
    counter = usable(None, for_check=False)
    vars(counter)["repetitions"] = REPETITIONS
    names = [f"{tokens}x{engines}" for tokens in TOKENS for engines in ENGINES]
    found = counter.measure(run, names)
    print(f"{counter.name}, instructions per request\n")
    print(f"{'prompt':>14}" + "".join(f"{f'{engines} engine' + 's' * (engines > 1):>14}" for engines in ENGINES))
    for tokens in TOKENS:
        print(f"{tokens:>7,} tokens" + "".join(f"{found[f'{tokens}x{engines}']:>14,.0f}" for engines in ENGINES))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
