"""From tensorrt_llm/commands/serve.py @ 7af5c6c2: a click group whose default command is `serve`, and `launch_server`.

With `num_serve_frontends` above 1 the launcher runs its own command line again for each further frontend, and every one
of them listens on the same port (`_spawn_attached_frontends`, later in serve/_frontend_processes.py). `--set` is as in
commands/_config_overrides.py @ 0ad591fc: PATH=YAML, the last one counts, and some paths are refused. `--middleware` is
an import name, as vLLM's: it was reported from a newer build, and is not in the source that could be read.
"""

import importlib
import os
import socket
import subprocess
import sys

import click
import yaml

from tensorrt_llm import LLM
from tensorrt_llm.serve import OpenAIServer

_RESERVED = {"model": "use the MODEL positional argument", "backend": "use --backend"}


def apply_config_overrides(llm_args: dict, assignments: tuple[str, ...]) -> None:
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise click.BadParameter("Each override must use PATH=YAML_VALUE syntax.")
        first, *rest = path.split(".")
        if first in _RESERVED:
            raise click.BadParameter(f"Configuration path '{path}' is not supported by --set; {_RESERVED[first]}.")
        target, last = llm_args, first
        for component in rest:
            target, last = target.setdefault(last, {}), component
        target[last] = yaml.safe_load(value)


def launch_server(host: str, port: int, llm_args: dict, middleware: tuple[str, ...] = ()):
    frontends = llm_args.get("num_serve_frontends", 1)
    is_attached = os.getenv("TLLM_EXECUTOR_ATTACH_INFO") is not None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if frontends > 1:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise RuntimeError(f"Failed to bind socket to {host}:{port}: {e}") from e
        llm = LLM(**llm_args)
        children = []
        try:
            if frontends > 1 and not is_attached:
                children = [
                    subprocess.Popen(
                        [sys.executable, *sys.argv],
                        env={**os.environ, "TLLM_EXECUTOR_ATTACH_INFO": "{}", "TLLM_EXECUTOR_FRONTEND_ID": str(number)},
                    )
                    for number in range(1, frontends)
                ]
            server = OpenAIServer(
                generator=llm,
                model=llm_args["model"],
                tool_parser=None,
                server_role=None,
                metadata_server_cfg=None,
            )
            for name in middleware:
                module, _, attribute = name.rpartition(".")
                server.app.add_middleware(getattr(importlib.import_module(module), attribute))
            # The real one runs uvloop.run(server(...)).
            _run(server(host, port, sockets=[s]))
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(10)


def _run(serving) -> None:
    import uvloop

    uvloop.run(serving)


@click.command("serve")
@click.argument("model", type=str)
@click.option("--host", type=str, default="localhost", help="Hostname of the server.")
@click.option("--port", type=int, default=8000, help="Port of the server.")
@click.option("--backend", type=click.Choice(["pytorch", "_autodeploy"]), default="pytorch")
@click.option("--max_batch_size", type=int, default=2048)
@click.option("--tensor_parallel_size", "--tp_size", type=int, default=1)
@click.option("--num_serve_frontends", type=int, default=1)
@click.option("--grpc", is_flag=True, default=False)
@click.option("--set", "overrides", type=str, multiple=True)
@click.option("--middleware", type=str, multiple=True)
@click.option("--config", "--extra_llm_api_options", "extra_llm_api_options", type=str, default=None)
def serve(model, host, port, backend, max_batch_size, tensor_parallel_size, num_serve_frontends, grpc,
          overrides, middleware, extra_llm_api_options):  # fmt: skip
    """Running an OpenAI API compatible server

    MODEL: model name | HF checkpoint path | TensorRT engine path
    """
    llm_args = {
        "model": model,
        "backend": backend,
        "max_batch_size": max_batch_size,
        "tensor_parallel_size": tensor_parallel_size,
        "num_serve_frontends": num_serve_frontends,
    }
    if extra_llm_api_options is not None:
        with open(extra_llm_api_options) as f:
            llm_args.update(yaml.safe_load(f))
    apply_config_overrides(llm_args, overrides)
    launch_server(host, port, llm_args, middleware)


@click.command("disaggregated")
def disaggregated():
    """Running server in disaggregated mode"""


class DefaultGroup(click.Group):
    """Custom Click group to allow default command behavior"""

    def resolve_command(self, ctx, args):
        # If the first argument is not a recognized subcommand, assume "serve"
        if args and args[0] not in self.commands:
            return "serve", self.commands["serve"], args
        return super().resolve_command(ctx, args)


main = DefaultGroup(commands={"serve": serve, "disaggregated": disaggregated})
