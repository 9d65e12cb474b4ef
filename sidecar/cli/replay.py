"""Replay a trace against a server, open loop, and report each tier's latencies.

TRACE is a file (mooncake_trace JSONL as AIPerf reads it, or Azure's LLM inference CSV; recognized by its content), or
the built-in burst: `burst`, `burst:N`, `burst:N:INPUT:OUTPUT` sends N requests of so many tokens at once. The exit code
is 1 where requests failed, 2 for a command line or a trace that cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from sidecar.admission.policy_snapshot import objective_for
from sidecar.apis import Api
from sidecar.cli.arguments import add_key, key_given, number, server_url, whole_number
from sidecar.cli.output import CommandFailed, reporter, require_writable, say, write_json, write_text
from sidecar.engines import ENGINES, NoPriorityEngine
from sidecar.gain.token_deadlines import Objective
from sidecar.lengths.token_estimates import NoTokenizer
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from sidecar.policy.secrets import key_in_file
from sidecar.server.open_files import raise_limit
from sidecar.tools.replay.figures import RunFigures
from sidecar.tools.replay.plan import TIER_HEADER, Asking, BadTier, By, Sizing, assign, ladder, rounding_s, schedule
from sidecar.tools.replay.prompts import Writer
from sidecar.tools.replay.report import report
from sidecar.tools.replay.run import (
    ReplayedTrace,
    ReplayTarget,
    TraceReplay,
    UnknownEngine,
    find,
    play_run,
    runs,
    too_long,
)
from sidecar.tools.replay.server import Control, NotNeutral, ServerNoAnswer, require_neutral
from sidecar.tools.replay.table import advice, comparison, figures_as_json, kinds, requests_as_jsonl, table
from sidecar.tools.replay.trace import BadTrace, Trace, TraceRow, read_trace

EXAMPLE = """  sidecar replay burst --upstream http://127.0.0.1:8000 --by priority --control --report burst.html
  sidecar replay burst --upstream http://127.0.0.1:8080 --control-upstream http://127.0.0.1:8000
  sidecar replay conversation.jsonl --upstream http://127.0.0.1:8080 --mix high=20,normal=50,batch=30 --speed 2
  sidecar replay azure_code.csv --upstream http://127.0.0.1:8080 --limit 200 --mix high=1,batch=1 \\
      --by key --key-file high=interactive.key --key-file batch=research.key"""
FILES = ("json", "requests", "report")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace's file, or burst, burst:N, burst:N:INPUT:OUTPUT")
    add("--upstream", required=True, action="append", type=server_url, metavar="URL",
        help="the server, such as http://127.0.0.1:8000; several get the requests by chance")  # fmt: skip
    _add_asking(parser.add_argument_group("tiers"))
    _add_sizing(parser.add_argument_group("what is sent"))
    output = parser.add_argument_group("output").add_argument
    output("--json", metavar="FILE", help="also write all figures as JSON, - for standard output")
    output("--report", metavar="FILE.html", help="also write a page with plots, which needs no network")
    output("--requests", metavar="FILE.jsonl", help="also write a line of JSON for each request")


def run(args: argparse.Namespace) -> int:
    """Plays one run, or two with --control. Returns 1 where requests failed."""
    for name in FILES:
        require_writable(getattr(args, name))
    raise_limit()  # every request under way has a connection
    try:
        return asyncio.run(_Command(args).run())
    except (BadTrace, PolicyError, BadTier, UnknownEngine, NoTokenizer, NotNeutral) as error:
        raise CommandFailed(str(error), 2) from None
    except ServerNoAnswer as error:
        raise CommandFailed(str(error)) from None


class _Command:
    """One call of the command, step by step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: TextIO = sys.stderr if "-" in [getattr(args, name) for name in FILES] else sys.stdout
        self.keys = dict(args.key)
        self.policy: Policy | None = None if args.policy is None else load(args.policy)
        try:
            self.api_key, _ = key_given(args.api_key, args.api_key_file, "--api-key-file")
        except ValueError as mistake:
            raise CommandFailed(str(mistake), 2) from None

    async def run(self) -> int:
        args = self.args
        trace = read_trace(args.trace, args.limit)
        rows, jitter_s = self._schedule(trace)
        tiers = ladder(self.policy, args.mix, rows)
        row_tiers = assign(rows, tiers, args.mix, random.Random(f"{args.seed} tiers"))
        keyless = [tier for tier in tiers if tier in set(row_tiers) and tier not in self.keys]
        if args.by is By.KEY and keyless:
            raise CommandFailed(f"--by key: tier {keyless[0]} has no key; add --key {keyless[0]}=KEY", 2)
        upstream = await self._find()
        control = await self._control()
        planned = runs(self._asking(tiers, upstream), upstream.urls, control)
        writer, timeout_s, objectives = self._writer(upstream), args.timeout, self._objectives()
        replay = TraceReplay(trace, rows, row_tiers, tiers, writer, upstream, timeout_s, objectives)
        heading = _heading(replay, jitter_s)
        say("\n".join(heading), self.out)
        played = [await play_run(one, replay, reporter(one.name)) for one in planned]
        return self._report_runs(heading, replay, played)

    def _objectives(self) -> Mapping[str, Objective]:
        tiers = () if self.policy is None else self.policy.tiers
        return {tier.name: objective for tier in tiers if (objective := objective_for(tier)) is not None}

    async def _control(self) -> Control | None:
        """Where the control is played. A server that is not the upstream gets no tenant's key."""
        args = self.args
        if not args.control and args.control_upstream is None:
            return None
        if args.control_upstream is None:
            control = Control(args.upstream, self._shared_key(), is_named=False)
        else:
            control = Control(args.control_upstream, args.api_key, is_named=True)
        await require_neutral(control, Api.COMPLETIONS if args.completions else Api.CHAT)
        return control

    def _schedule(self, trace: Trace) -> tuple[Sequence[TraceRow], float]:
        args = self.args
        sizing = Sizing(args.speed, args.scale, args.max_input, args.max_output)
        jitter_s = rounding_s(trace.rows) if args.jitter is None else args.jitter
        return schedule(trace.rows, sizing, jitter_s, random.Random(f"{args.seed} jitter")), jitter_s

    async def _find(self) -> ReplayTarget:
        args = self.args
        tokenizer = args.tokenizer or (None if self.policy is None else self.policy.tokenizer)
        return await find(
            args.upstream,
            api_key=self._shared_key(),
            model=args.model,
            engine=None if args.engine is None else ENGINES[args.engine],
            tokenizer=tokenizer,
            chat=not args.completions,
        )

    def _shared_key(self) -> str | None:
        """The key for tiers without one: the server's own, or that of the tier in the middle."""
        keys = list(self.keys.values())
        return self.api_key or (keys[len(keys) // 2] if keys else None)

    def _asking(self, tiers: Sequence[str], upstream: ReplayTarget) -> Asking:
        engine = upstream.engine
        if engine is NoPriorityEngine and self.policy is not None:
            engine = self.policy.engine
        header = TIER_HEADER if self.policy is None else self.policy.tier_header.decode()
        return Asking(self.args.by, tiers, engine, header, self.keys, self._shared_key())

    def _writer(self, upstream: ReplayTarget) -> Writer:
        args = self.args
        return Writer(
            api=Api.COMPLETIONS if args.completions else Api.CHAT,
            model=upstream.model,
            words=upstream.words,
            seed=args.seed,
            block_tokens=Sizing(scale=args.scale).block_tokens,
            ignore_eos=upstream.engine.has_ignore_eos if args.ignore_eos is None else args.ignore_eos,
        )

    def _report_runs(self, heading: Sequence[str], replay: TraceReplay, played: Sequence[ReplayedTrace]) -> int:
        """Prints and writes what was found."""
        figures = [one.figures for one in played]
        compared = comparison(played)
        say(f"\n{table(figures, compared)}", self.out)
        for line in advice(figures, replay.upstream.words):
            say(f"\n{line}", self.out)
        written = write_json(self.args.json, figures_as_json(replay, self.args.by.value, figures, compared))
        written &= write_text(self.args.requests, lambda: requests_as_jsonl(played, replay))
        title = f"Replay of {replay.trace.name}"
        written &= write_text(self.args.report, lambda: report(title, heading, replay.tiers, played, compared))
        failed = sum(one.failed for one in figures)
        if failed:
            raise CommandFailed(_failures(figures))
        return 0 if written else 1


def _failures(figures: Sequence[RunFigures]) -> str:
    """The number of failed requests, by run where there are two, and the first error of each of them."""
    if len(figures) == 1:
        [one] = figures
        return f"{one.failed} of {one.requests} requests failed: {next(iter(one.errors))}"
    parts = [
        f"{one.failed} of {one.requests} in the {one.name}" + (f" ({next(iter(one.errors))})" if one.errors else "")
        for one in figures
    ]
    return f"requests failed: {', '.join(parts)}"


def _heading(replay: TraceReplay, jitter_s: float) -> list[str]:
    """The plan of the replay, in a few lines; also the head of the report."""
    upstream, trace = replay.upstream, replay.trace
    engine = "an engine that does not say what it is" if upstream.engine is NoPriorityEngine else upstream.engine.name
    last_s = max(row.at_s or 0.0 for row in replay.rows)
    when = f"within {last_s:.1f} s" if last_s else "at once"
    lines = [
        f"{trace.name} ({trace.format}): {len(replay.rows)} requests {when} to "
        f"{', '.join(upstream.urls)} ({engine}, model {upstream.model})",
        f"tiers: {kinds(replay.row_tiers, replay.tiers)}; prompt tokens by {upstream.words.source}; "
        f"seed {replay.writer.seed}",
    ]
    if jitter_s:
        lines.append(f"timestamps spread by chance over the {jitter_s:g} s that they are rounded to (--jitter 0: not)")
    if long := too_long(replay):
        lines.append(
            f"{long} requests do not fit the model's context of {upstream.context_tokens} tokens and will fail: "
            "cut them with --max-input and --max-output, or --scale"
        )
    return lines


_count = whole_number("number of rows or tokens", 1, 10**9)
_amount = number("time or factor", 1e9)


def _tier_key(text: str) -> tuple[str, str]:
    """A tier and its key. What is wrong is not shown: it may be a key."""
    tier, _, key = text.partition("=")
    if not tier or not key or not key.isprintable():
        raise argparse.ArgumentTypeError("write TIER=KEY, such as high=sk-demo")
    return tier, key


def _tier_key_file(text: str) -> tuple[str, str]:
    """A tier, and the key in its file."""
    tier, _, file = text.partition("=")
    if not tier or not file:
        raise argparse.ArgumentTypeError("write TIER=FILE, such as high=high.key")
    try:
        return tier, key_in_file(file, "--key-file")
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def _add_asking(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--by", type=By, choices=list(By), default=By.TIER, metavar="priority|tier|key",
        help="how it asks: in the engine's own way, by the tier header (default), by its tier's key")  # fmt: skip
    add("--mix", type=mix, metavar="high=20,normal=50,batch=30",
        help="tiers of rows without one (default: all of the policy alike, else high, normal, batch)")  # fmt: skip
    add("--control", action="store_true",
        help="play it again with all requests alike, and show both; not through a sidecar that enforces")  # fmt: skip
    add("--control-upstream", action="append", type=server_url, metavar="URL",
        help="play the control there: the engine without a sidecar; repeated, like --upstream")  # fmt: skip
    add("--policy", metavar="DIR", help="a policy file or folder: its tiers, tier header and tokenizer")
    add("--key", action="append", type=_tier_key, default=[], metavar="TIER=KEY",
        help="a tier's API key, for --by key; repeated; other users of this machine see it, so better:")  # fmt: skip
    add("--key-file", action="append", type=_tier_key_file, dest="key", metavar="TIER=FILE",
        help="a file that holds a tier's API key; repeated")  # fmt: skip
    add_key(group, "the key for tiers without one", prefix="--api-")
    add("--engine", choices=tuple(ENGINES), help="which engine it is (default: what the server says it is)")


def _add_sizing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--limit", type=_count, metavar="N", help="only the first N rows")
    add("--speed", type=_amount, default=1.0, metavar="X", help="times faster than the trace (default 1)")
    add("--scale", type=_amount, default=1.0, metavar="X", help="multiply all lengths, e.g. 0.1 for a small model")
    add("--max-input", type=_count, metavar="TOKENS", help="cut longer prompts")
    add("--max-output", type=_count, metavar="TOKENS", help="cut longer answers")
    add("--jitter", type=number("spread in seconds", may_be_zero=True), metavar="S",
        help="send each later by up to this, by chance (default: what rounded times are rounded to)")  # fmt: skip
    add("--seed", type=int, default=1, help="of prompts, tiers and jitter (default %(default)s)")
    add("--model", metavar="NAME", help="the model to ask for (default: the server's first)")
    add("--completions", action="store_true", help="ask /v1/completions, not /v1/chat/completions")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json that counts prompts (default: the engine's own)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="have every answer as long as its row says (default: where the engine knows the field)")  # fmt: skip
    add(
        "--timeout",
        type=number("time in seconds"),
        default=600.0,
        metavar="S",
        help="for one answer (default %(default)g)",
    )


MOST_WEIGHT = 1e9
"""Of a tier in a mix: the sum of all stays a number."""


def mix(text: str) -> Mapping[str, float]:
    """Weights by tier: `high=20,normal=50,batch=30`; percent signs are let by."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (piece.strip() for piece in part.partition("="))
        try:
            number = float(weight.removesuffix("%"))
        except ValueError:
            number = -1.0
        if not name or name in found or not 0 <= number <= MOST_WEIGHT:
            raise argparse.ArgumentTypeError(f"{part!r} is no part of a mix; write high=20,normal=50,batch=30")
        found[name] = number
    if sum(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} leaves nothing to send; write high=20,normal=50,batch=30")
    return {name: number for name, number in found.items() if number > 0}
