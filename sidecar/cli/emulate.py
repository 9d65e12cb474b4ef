"""Run an emulated OpenAI-compatible engine, or several, with the engine's contract and its errors. No GPU needed."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import socket
from collections.abc import Callable, Sequence
from functools import partial

from sidecar.cli.arguments import duration_s, port
from sidecar.cli.output import CommandFailed
from sidecar.engines import ENGINES
from sidecar.tools.emulator import EmulatorConfig, Scheduling, StepModel
from sidecar.tools.emulator.faults import Fault, read_fault
from sidecar.tools.emulator.replicas import Replica, run_replicas, say
from sidecar.tools.emulator.server import bind, serve
from sidecar.tools.step_model.model import MOST

EXAMPLE = """\
  sidecar emulate --engine vllm --port 8000 --scheduling priority --max-num-seqs 8 --step-ms 20
  sidecar emulate --engine vllm --replicas 4 --port 8000 --enable-prefix-caching --kv-tokens 400000 --speed 1,1,1,0.5"""

_ENGINES = ("tensorrt-llm", "vllm", "sglang", "dynamo")
_US = 1_000.0
_MOST_REPLICAS = 64
_MOST_PORT = 65_535


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add = parser.add_argument
    add("--engine", choices=_ENGINES, required=True, help="whose contract to keep")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="0 takes a free one and prints it (default: %(default)s)")
    add("--scheduling", choices=("priority", "fcfs"), default="priority", help="waiting queue (default: %(default)s)")
    add("--max-num-seqs", type=int, default=8, help="sequences that run at once (default: %(default)s)")
    add("--step-ms", type=float, default=20.0, help="time of an empty step (default: %(default)s)")
    add("--step-ms-per-seq", type=float, default=0.0, help="added per running sequence (default: %(default)s)")
    add("--step-ms-per-prefill-token", type=float, default=0.0, help="added per prompt token (default: %(default)s)")
    add("--prefill-tokens-per-step", type=int, default=512, help="prompt tokens a step takes (default: %(default)s)")
    add("--kv-tokens", type=int, help="KV cache, prompt and output reserved at once (default: unbounded)")
    add("--preempt", action="store_true", help="take KV when it is written; when it is full, preempt and recompute")
    add("--max-queued", type=int, help="refuse beyond, as the engine does (default: unbounded)")
    add("--output-tokens", type=int, default=64, help="for requests without a maximum (default: %(default)s)")
    add("--tokens-per-chunk", type=int, default=1, help="coalesce streams (default: %(default)s)")
    add("--context-tokens", type=int, default=131_072, help="longest prompt and output (default: %(default)s)")
    _time(add, "--abort-latency", 0.0, "how late it notices a disconnect, e.g. 4s")
    add("--model", default="emulated", help="name of the served model (default: %(default)s)")
    add("--no-priority-field", action="store_true", help="a TensorRT-LLM from before the field: answers it with 400")
    add("--response-store", action="store_true", help="vLLM, SGLang: keep and run background responses")
    add("--default-priority", type=int, help="SGLang: the priority of untagged requests (default: below all others)")
    _configure_prefix_cache(parser)
    _configure_replicas(parser)
    _configure_faults(parser)


def _configure_prefix_cache(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prefix cache").add_argument
    add(
        "--enable-prefix-caching",
        action="store_true",
        help="find the prefixes of prompts in the KV cache; real engines do by default",
    )
    add("--block-size", type=int, metavar="TOKENS", help="tokens of a block (default: the engine's own)")
    add(
        "--cache-report",
        "--enable-prompt-tokens-details",
        "--enable-cache-report",
        action="store_true",
        help="vLLM and SGLang: say in `usage` how many tokens were cached",
    )


def _configure_replicas(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several engines, their start and their end").add_argument
    add("--replicas", type=int, metavar="N", help="N engines, a process each, on --port and the ports after it")
    add(
        "--speed",
        type=_speeds,
        default=(1.0,),
        metavar="FACTOR[,FACTOR...]",
        help="0.25 is four times slower than --step-ms says; for all, or one for each replica (default: 1)",
    )
    _time(add, "--startup-delay", 0.0, "refuse connections for so long, as while a model loads")
    _time(add, "--shutdown-timeout", None, "let requests run on after SIGTERM (default: as the engine does)")


def _configure_faults(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("faults; POST /_emulator/faults changes them while it runs").add_argument
    add(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="KIND[,NAME=VALUE...]",
        help="refuse, reset, cut, silent or slow_headers, e.g. refuse,status=429,retry_after=2,every=10; repeatable",
    )


def _fault(text: str) -> Fault:
    try:
        return read_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _time(add: Callable[..., argparse.Action], flag: str, default: float | None, says: str) -> None:
    add(flag, type=duration_s, default=default, metavar="TIME", help=says)


def _speeds(text: str) -> tuple[float, ...]:
    """Factors, separated by commas. Raises ArgumentTypeError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no factor such as 0.25, and no list such as 1,1,0.25") from None


def run(args: argparse.Namespace) -> int:
    """Serves until stopped. Returns 2 for arguments that contradict each other, 1 where it cannot listen."""
    try:
        configs = _configs(args)
    except ValueError as error:
        raise CommandFailed(str(error), 2) from None
    listeners: list[socket.socket] = []
    for number in range(len(configs)):
        wanted = args.port + number if args.port else 0
        try:
            listeners.append(bind(args.host, wanted))
        except OSError as error:
            for listener in listeners:
                listener.close()
            problem = f"cannot listen on {args.host}:{wanted}: {error.strerror or error}"
            raise CommandFailed(f"{problem}; name another with --port, or 0 for any") from None
    if args.replicas is not None:
        return asyncio.run(run_replicas(_replicas(args, configs, listeners)))
    greeting = _summary(args, configs[0], _url(args.host, listeners[0]))
    serve(configs[0], listeners[0], partial(say, greeting), args.startup_delay)
    return 0


def _replicas(
    args: argparse.Namespace, configs: Sequence[EmulatorConfig], listeners: Sequence[socket.socket]
) -> Sequence[Replica]:
    replicas = []
    for config, listener in zip(configs, listeners, strict=True):
        url = _url(args.host, listener)
        greeting = f"{config.name}: {_summary(args, config, url)}"
        replicas.append(Replica(config, listener, url, greeting, args.startup_delay))
    return replicas


def _configs(args: argparse.Namespace) -> Sequence[EmulatorConfig]:
    """A configuration for each engine. Raises ValueError."""
    count = 1 if args.replicas is None else args.replicas
    if not 1 <= count <= _MOST_REPLICAS:
        raise ValueError(f"--replicas must be between 1 and {_MOST_REPLICAS}")
    if args.port and args.port + count - 1 > _MOST_PORT:
        raise ValueError(f"{count} replicas from port {args.port} on need ports above {_MOST_PORT}")
    if len(args.speed) not in (1, count):
        raise ValueError(f"--speed has {len(args.speed)} factors for {count} engines: give one, or one for each")
    config = _config(args)
    speeds = args.speed if len(args.speed) == count else args.speed * count
    return [dataclasses.replace(config, name=f"engine-{number}", speed=speed) for number, speed in enumerate(speeds, 1)]


def _config(args: argparse.Namespace) -> EmulatorConfig:
    """The arguments as a configuration. Raises ValueError."""
    if min(args.max_num_seqs, args.prefill_tokens_per_step) < 1:
        raise ValueError("max_num_seqs and prefill_tokens_per_step must be at least 1")
    if min(args.step_ms, args.step_ms_per_seq, args.step_ms_per_prefill_token) < 0:
        raise ValueError("step times must not be negative")
    return EmulatorConfig(
        engine=ENGINES[args.engine],
        scheduling=Scheduling(args.scheduling),
        steps=StepModel(
            max_sequences=args.max_num_seqs,
            chunk_tokens=args.prefill_tokens_per_step,
            kv_tokens=MOST if args.kv_tokens is None else args.kv_tokens,
            step_us=args.step_ms * _US,
            step_us_per_sequence=args.step_ms_per_seq * _US,
            step_us_per_prefill_token=args.step_ms_per_prefill_token * _US,
        ),
        max_queued=args.max_queued,
        output_tokens=args.output_tokens,
        context_tokens=args.context_tokens,
        tokens_per_chunk=args.tokens_per_chunk,
        model=args.model,
        priority_field=not args.no_priority_field,
        default_priority=args.default_priority,
        response_store=args.response_store,
        preempts=args.preempt,
        abort_latency_s=args.abort_latency,
        prefix_cache=args.enable_prefix_caching,
        block_tokens=args.block_size,
        cache_report=args.cache_report,
        shutdown_timeout_s=args.shutdown_timeout,
        faults=tuple(args.fault),
    )


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def _summary(args: argparse.Namespace, config: EmulatorConfig, url: str) -> str:
    summary = (
        f"emulated {args.engine} on {url}, model {args.model}, {args.scheduling} scheduling, "
        f"{args.max_num_seqs} sequences at once, {args.step_ms:g} ms per step"
    )
    if config.speed != 1:
        summary += f" at {config.speed:g} of its speed"
    if config.prefix_cache:
        summary += f", a prefix cache of {config.kv_capacity_tokens:,} tokens"
    return summary
