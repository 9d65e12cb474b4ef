"""Shows what admission does: an emulated TensorRT-LLM that holds 160 requests gets a third more than it can do.

The same arrivals are played three times, over real HTTP on loopback: at equal priority (the control), with the engine's
own priority, and behind admission. Tiers, tenants and keys are those of the example policies. Takes under a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.policy.loading import load
from sidecar.policy.policy import Policy
from sidecar.policy.shipped import shipped_policies

if TYPE_CHECKING:
    from sidecar.demo.arrivals import Arrival, Stream
    from sidecar.demo.client import Asking, Progress
    from sidecar.demo.measuring import RunFigures

EXAMPLE = "  sidecar demo --json demo.json"
RUNS = {"control": "alone", "engine": "alone", "admission": "door"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON, - for standard output")
    parser.add_argument("--keep", action="store_true", help="leave the last server running, to try requests on it")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long requests arrive (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Plays the three runs, prints the table. Returns 1 where requests failed."""
    from sidecar.demo.arrivals import arrivals
    from sidecar.demo.table import sentence, table

    policy_path = shipped_policies()
    policy = load(policy_path)
    requests = arrivals(args.seconds, args.seed)
    text = sys.stderr if args.json == "-" else sys.stdout
    print(
        f"an emulated TensorRT-LLM with {policy.rules.requests} slots; {len(requests)} requests in {args.seconds:g} s, "
        f"the same in each of three runs; policy {policy_path}",
        file=text,
        flush=True,
    )
    with _servers(policy_path) as ports:
        figures = [_play(name, ports[name], requests, policy) for name in RUNS]
        print(f"\n{table(figures)}\n\n{sentence(figures)}", file=text)
        if args.json is not None:
            _write(args.json, figures)
        if args.keep:
            _keep(ports["admission"])
    return 1 if any(one.failed for one in figures) else 0


def _play(name: str, port: int, requests: Sequence[Arrival], policy: Policy) -> RunFigures:
    import msgspec

    from sidecar.demo.client import play
    from sidecar.demo.measuring import measure
    from sidecar.demo.server import LOG_PATH
    from sidecar.emulator.generation import Served

    seen = asyncio.run(play(port, requests, _asking(name, policy), _reporter(name, len(requests))))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{LOG_PATH}") as response:
        log = msgspec.json.decode(response.read(), type=list[Served])
    print(file=sys.stderr)
    return measure(name, [tier.name for tier in policy.tiers], seen, log, policy.rules.requests)


def _asking(name: str, policy: Policy) -> Asking:
    """What a client sends besides its prompt: nothing, the engine's own field, or its key and perhaps a tier."""
    from sidecar.engines import dialect_of

    dialect = dialect_of(policy.engine, None)

    def control(_: Stream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        return {}, {}

    def engine(stream: Stream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        level = policy.level_of(stream.tier)
        assert level is not None
        return {}, {"priority": dialect.priority(level, len(policy.tiers))}

    def admission(stream: Stream) -> tuple[Mapping[str, str], Mapping[str, object]]:
        asked = {} if stream.header is None else {"x-priority": stream.header}
        return {"authorization": f"Bearer {stream.key}", **asked}, {}

    return {"control": control, "engine": engine, "admission": admission}[name]


def _reporter(name: str, total: int) -> Callable[[float, Progress], None]:
    from sidecar.demo.table import TITLES

    number = list(RUNS).index(name) + 1
    # A terminal gets one line that moves, a log a line now and then.
    is_terminal = sys.stderr.isatty()
    last_s = -2.0

    def report(elapsed_s: float, progress: Progress) -> None:
        nonlocal last_s
        if not is_terminal and elapsed_s - last_s < 2.0:
            return
        last_s = elapsed_s
        waiting = progress.sent - progress.answered - progress.failed
        line = f"[{number}/{len(RUNS)}] {TITLES[name]:24} {elapsed_s:5.1f} s  sent {progress.sent:5}/{total}  under way {waiting:4}"
        print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def _servers(policy_path: Path) -> Iterator[Mapping[str, int]]:
    """Starts one server for each run, all at once, and ends them. Gives their ports."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "sidecar.demo.server", kind, str(policy_path)], stdout=subprocess.PIPE, text=True
        )
        for name, kind in RUNS.items()
    }
    try:
        yield {name: _port_of(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(timeout=10)
            if process.stdout is not None:
                process.stdout.close()


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip().isdigit():
        raise RuntimeError("a demo server did not start; its error is above")
    return int(line)


def _write(path: str, figures: Sequence[RunFigures]) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode({"runs": figures}), indent=2) + b"\n"
    if path == "-":
        sys.stdout.buffer.write(text)
    else:
        Path(path).write_bytes(text)


def _keep(port: int) -> None:
    print(
        f"\nstill running, until you press Ctrl-C:\n  curl -i http://127.0.0.1:{port}/v1/chat/completions "
        "-H 'authorization: Bearer sk-demo-interactive' -H 'content-type: application/json' \\\n"
        '    -d \'{"model": "emulated", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}\'',
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        import threading

        threading.Event().wait()
