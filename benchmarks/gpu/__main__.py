"""What admission costs and brings on one GPU, with a model of 8B parameters.

    python -m benchmarks.gpu [--device cuda|cpu] [--tiny] [--requests 160] [--places 32] [--rounds 3] [--json FILE]

It needs CUDA, PyTorch, this checkout and what the package itself needs (`pip install -e .`), and nothing else: no
weights are downloaded, and no server is started. A decoder with random weights and the sizes of Llama 3 8B is served
with continuous batching by an engine of this folder. 160 requests of three tiers come at once, to an engine that
computes 32 of them together, in three ways:

- equal priority: the engine serves them in order of arrival;
- the engine's priority: each request brings its tier as vLLM's `priority`;
- admission: the middleware is mounted around the engine, and its pool is as large as the engine.

It reports TTFT for each tier, tokens a second, and how much of the time the device had nothing to do: that is what
admission costs, since a place that is free waits for the next request to be admitted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.decoder import LARGE, TINY, CannotRun, Decoder, device_name
from benchmarks.gpu.plan import LONGEST, planned
from benchmarks.gpu.playing import play_all
from benchmarks.gpu.report import costs, figures, text

SHORT = 1 / 16
"""The part of all lengths that is left for the tiny model."""


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns 1 where it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="a tiny model and short requests, to try the script without a GPU")
    add("--layers", type=int, default=LARGE.layers, help="of the decoder: fewer need less memory (%(default)s)")
    add("--requests", type=int, default=160)
    add("--places", type=int, default=32, help="requests that the engine computes together (%(default)s)")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=1)
    add("--json", metavar="FILE", type=Path)
    args = parser.parse_args(arguments)
    if min(args.requests, args.places, args.rounds, args.layers) < 1:
        parser.error("--requests, --places, --rounds and --layers are 1 or more")
    sizes = TINY if args.tiny else replace(LARGE, layers=args.layers)
    part = SHORT if args.tiny else 1.0
    requests = planned(args.requests, args.seed, sizes.vocabulary, part)
    try:
        model = Decoder(sizes, args.places, LONGEST, args.device)
    except CannotRun as reason:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 1
    for _ in range(3):  # the first steps load kernels
        model.prefill(0, requests[0].prompt)
        model.decode([0], [1])
    about = (
        f"python -m benchmarks.gpu, {device_name(args.device)}, Python {platform.python_version()}: "
        f"{sizes.parameters / 1e9:.2f}B parameters, {args.requests} requests at once, {args.places} places, "
        f"medians of {args.rounds} rounds" + (", the tiny model: no figure of a GPU" if args.tiny else "")
    )
    found = figures(play_all(model, args.places, requests, args.rounds, lambda line: print(line, file=sys.stderr)))
    print(text(about, found), end="")
    if args.json is not None:
        args.json.write_text(json.dumps({"about": about, "ways": found, "cost": costs(found)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
