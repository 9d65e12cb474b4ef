"""Replay a trace against a server, open loop, and say what each tier's requests went through.

TRACE is a file (mooncake_trace JSONL as AIPerf reads it, or Azure's LLM inference CSV; told from its content), or the
built-in burst: `burst`, `burst:N`, `burst:N:INPUT:OUTPUT` sends N requests of so many tokens at once. The exit code is
1 where requests failed, 2 for a command line or a trace that cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Sequence
from typing import TextIO

from sidecar.cli.output import reporter, unwritable, write_json
from sidecar.cli.replay_arguments import add_arguments
from sidecar.policy.loading import load
from sidecar.policy.policy import Api, EngineName, Policy
from sidecar.policy.problems import PolicyError
from sidecar.replay.asking import TIER_HEADER, Asking, By
from sidecar.replay.bodies import Writer
from sidecar.replay.engine import NoAnswer
from sidecar.replay.report import report
from sidecar.replay.row import Row
from sidecar.replay.running import (
    IGNORES_EOS,
    Played,
    Replay,
    UnknownEngine,
    Upstream,
    find,
    play_run,
    runs,
    too_long,
)
from sidecar.replay.schedule import Sizing, rounding_s, schedule
from sidecar.replay.table import table
from sidecar.replay.telling import advice, figures_as_json, kinds, requests_as_jsonl
from sidecar.replay.tiers import BadTier, assign, ladder
from sidecar.replay.trace import BadTrace, Trace, read_trace
from sidecar.tokens import NoTokenizer

EXAMPLE = """  sidecar replay burst --upstream http://127.0.0.1:8000 --by priority --control --report burst.html
  sidecar replay conversation.jsonl --upstream http://127.0.0.1:8080 --mix high=20,normal=50,batch=30 --speed 2
  sidecar replay azure_code.csv --upstream http://127.0.0.1:8080 --limit 200 --mix high=1,batch=1 \\
      --by key --key high=sk-demo-interactive --key batch=sk-demo-research"""
MOST_CONNECTIONS = 65_536
FILES = ("json", "requests", "report")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plays one run, or two with --control. Returns 1 where requests failed."""
    for name in FILES:
        if problem := unwritable(getattr(args, name)):
            return _said(problem, 1)
    _allow_many_connections()
    try:
        return asyncio.run(_Command(args).run())
    except (BadTrace, PolicyError) as error:
        return _said(str(error), 2, prefix="")
    except (BadTier, UnknownEngine, NoTokenizer, BadKeys) as error:
        return _said(str(error), 2)
    except NoAnswer as error:
        return _said(str(error), 1)


class BadKeys(ValueError):
    """A tier is in use for which there is no key."""


class _Command:
    """One call of the command, step by step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: TextIO = sys.stderr if "-" in [getattr(args, name) for name in FILES] else sys.stdout
        self.policy = _policy(args.policy)

    async def run(self) -> int:
        args = self.args
        trace = read_trace(args.trace, args.limit)
        rows, jitter_s = self._schedule(trace)
        tiers = ladder(self.policy, args.mix, rows)
        row_tiers = assign(rows, tiers, args.mix, random.Random(f"{args.seed} tiers"))
        keyless = [tier for tier in tiers if tier in set(row_tiers) and tier not in args.key]
        if args.by is By.KEY and keyless:
            raise BadKeys(f"--by key: tier {keyless[0]} has no key; add --key {keyless[0]}=KEY")
        upstream = await self._find()
        planned = runs(self._asking(tiers, upstream), control=args.control)
        replay = Replay(trace, rows, row_tiers, tiers, self._writer(upstream), upstream, args.timeout)
        heading = _heading(replay, jitter_s)
        print("\n".join(heading), file=self.out, flush=True)
        played = [await play_run(*one, replay, reporter(one[0])) for one in planned]
        return self._told(heading, replay, played)

    def _schedule(self, trace: Trace) -> tuple[Sequence[Row], float]:
        args = self.args
        sizing = Sizing(args.speed, args.scale, args.max_input, args.max_output, args.duration)
        jitter_s = rounding_s(trace.rows) if args.jitter is None else args.jitter
        rows = schedule(trace.rows, sizing, jitter_s, random.Random(f"{args.seed} jitter"))
        if not rows:
            raise BadTrace(f"{trace.name}: no request is sent within {args.duration:g} s")
        return rows, jitter_s

    async def _find(self) -> Upstream:
        args = self.args
        tokenizer = args.tokenizer or (None if self.policy is None else self.policy.tokenizer)
        return await find(
            args.upstream,
            api_key=self._shared_key(),
            model=args.model,
            engine=args.engine,
            tokenizer=tokenizer,
            chat=not args.completions,
        )

    def _shared_key(self) -> str | None:
        """Who has no key of its own says this one: the server's own, or that of the tier in the middle."""
        keys = list(self.args.key.values())
        return self.args.api_key or (keys[len(keys) // 2] if keys else None)

    def _asking(self, tiers: Sequence[str], upstream: Upstream) -> Asking:
        engine = upstream.engine
        if engine is EngineName.NONE and self.policy is not None:
            engine = self.policy.engine
        header = TIER_HEADER if self.policy is None else self.policy.tier_header.decode()
        return Asking(self.args.by, tiers, engine, header, self.args.key, self._shared_key())

    def _writer(self, upstream: Upstream) -> Writer:
        args = self.args
        return Writer(
            api=Api.COMPLETIONS if args.completions else Api.CHAT,
            model=upstream.model.name,
            words=upstream.words,
            seed=args.seed,
            block_tokens=Sizing(scale=args.scale).block_tokens,
            ignore_eos=upstream.engine in IGNORES_EOS if args.ignore_eos is None else args.ignore_eos,
        )

    def _told(self, heading: Sequence[str], replay: Replay, played: Sequence[Played]) -> int:
        """Prints and writes what was found."""
        figures = [one.figures for one in played]
        print(f"\n{table(figures)}", file=self.out)
        for line in advice(figures, replay.upstream.words):
            print(f"\n{line}", file=self.out)
        written = write_json(self.args.json, figures_as_json(replay, self.args.by.value, figures))
        written &= _write(self.args.requests, requests_as_jsonl(played, replay))
        written &= self._reported(heading, replay, played)
        failed = sum(one.failed for one in figures)
        if failed:
            total = sum(one.requests for one in figures)
            first = next(error for one in figures for error in one.errors)
            print(f"sidecar: {failed} of {total} requests failed: {first}", file=sys.stderr)
        return 1 if failed or not written else 0

    def _reported(self, heading: Sequence[str], replay: Replay, played: Sequence[Played]) -> bool:
        if self.args.report is None:
            return True
        return _write(self.args.report, report(f"Replay of {replay.trace.name}", heading, replay.tiers, played))


def _allow_many_connections() -> None:
    """Every request under way has a connection, and many systems allow 1024 files unless one asks for more."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(most, MOST_CONNECTIONS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _policy(path: str | None) -> Policy | None:
    return None if path is None else load(path)


def _heading(replay: Replay, jitter_s: float) -> list[str]:
    """What is about to happen, in a few lines; also the head of the report."""
    upstream, trace = replay.upstream, replay.trace
    engine = "an engine that does not say what it is" if upstream.engine is EngineName.NONE else upstream.engine.value
    last_s = max(row.at_s or 0.0 for row in replay.rows)
    when = f"within {last_s:.1f} s" if last_s else "at once"
    lines = [
        f"{trace.name} ({trace.format}): {len(replay.rows)} requests {when} to "
        f"{', '.join(upstream.urls)} ({engine}, model {upstream.model.name})",
        f"tiers: {kinds(replay.row_tiers, replay.tiers)}; prompt tokens by {upstream.words.source}; "
        f"seed {replay.writer.seed}",
    ]
    if jitter_s:
        lines.append(f"timestamps spread by chance over the {jitter_s:g} s that they are rounded to (--jitter 0: not)")
    if long := too_long(replay):
        lines.append(
            f"{long} requests do not fit the model's context of {upstream.model.context_tokens} tokens and will fail: "
            "cut them with --max-input and --max-output, or --scale"
        )
    return lines


def _write(target: str | None, text: str) -> bool:
    if target is None:
        return True
    if target == "-":
        sys.stdout.write(text)
        return True
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"{target}: cannot be written ({error.strerror})", file=sys.stderr)
        return False
    return True


def _said(problem: str, code: int, prefix: str = "sidecar: ") -> int:
    print(f"{prefix}{problem}", file=sys.stderr)
    return code
