"""Run an emulated OpenAI-compatible engine, with the engine's contract and its errors. No GPU needed."""

from __future__ import annotations

import argparse
import socket
import sys

import uvicorn

from sidecar.cli.arguments import duration_s, port
from sidecar.engines import ENGINES
from sidecar.tools.emulator import Emulator, EmulatorConfig, Scheduling, StepModel

EXAMPLE = "  sidecar emulate --engine vllm --port 8000 --scheduling priority --max-num-seqs 8 --step-ms 20"

_ENGINES = ("tensorrt-llm", "vllm", "sglang", "dynamo")
_MS = 1_000.0
_BACKLOG = 2048  # uvicorn's own default


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
    add("--max-queued", type=int, help="refuse beyond, as the engine does (default: unbounded)")
    add("--output-tokens", type=int, default=64, help="for requests without a maximum (default: %(default)s)")
    add("--tokens-per-chunk", type=int, default=1, help="coalesce streams (default: %(default)s)")
    add("--context-tokens", type=int, default=131_072, help="longest prompt and output (default: %(default)s)")
    add(
        "--abort-latency",
        type=duration_s,
        default=0.0,
        metavar="TIME",
        help="how late it notices a disconnect, e.g. 4s",
    )
    add("--model", default="emulated", help="name of the served model (default: %(default)s)")
    add("--no-priority-field", action="store_true", help="a TensorRT-LLM from before the field: answers it with 400")
    add("--header-overrides", action="store_true", help="SGLang: honor x-override-priority")
    add("--low-values-first", action="store_true", help="SGLang: --schedule-low-priority-values-first")
    add("--response-store", action="store_true", help="vLLM, SGLang: keep and run background responses")
    add("--default-priority", type=int, help="SGLang: the priority of untagged requests (default: below all others)")


def run(args: argparse.Namespace) -> int:
    """Serves until stopped. Returns 2 for arguments that contradict each other, 1 where it cannot listen."""
    try:
        emulator = Emulator(_config(args))
    except ValueError as error:
        print(f"sidecar emulate: {error}", file=sys.stderr)
        return 2
    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        said = f"cannot listen on {args.host}:{args.port}: {error.strerror or error}"
        print(f"sidecar emulate: {said}; name another with --port, or 0 for any", file=sys.stderr)
        return 1
    with listener:
        print(_summary(args, listener.getsockname()[1]), flush=True)
        config = uvicorn.Config(emulator.app, access_log=False, log_level="warning", server_header=False, lifespan="on")
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _config(args: argparse.Namespace) -> EmulatorConfig:
    """The arguments as a configuration. Raises ValueError."""
    return EmulatorConfig(
        engine=ENGINES[args.engine],
        scheduling=Scheduling(args.scheduling),
        steps=StepModel(
            max_num_seqs=args.max_num_seqs,
            prefill_tokens_per_step=args.prefill_tokens_per_step,
            kv_tokens=args.kv_tokens,
            step_s=args.step_ms / _MS,
            step_s_per_seq=args.step_ms_per_seq / _MS,
            step_s_per_prefill_token=args.step_ms_per_prefill_token / _MS,
        ),
        max_queued=args.max_queued,
        output_tokens=args.output_tokens,
        context_tokens=args.context_tokens,
        tokens_per_chunk=args.tokens_per_chunk,
        model=args.model,
        priority_field=not args.no_priority_field,
        header_overrides=args.header_overrides,
        default_priority=args.default_priority,
        response_store=args.response_store,
        low_values_first=args.low_values_first,
        abort_latency_s=args.abort_latency,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that what is printed is true: the port is known, and a client may connect. Raises OSError.

    It names its protocol: asyncio turns Nagle's algorithm off for no other.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _summary(args: argparse.Namespace, port: int) -> str:
    host = f"[{args.host}]" if ":" in args.host else args.host
    return (
        f"emulated {args.engine} on http://{host}:{port}, model {args.model}, {args.scheduling} scheduling, "
        f"{args.max_num_seqs} sequences at once, {args.step_ms:g} ms per step"
    )
