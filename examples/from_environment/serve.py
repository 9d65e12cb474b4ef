"""A server that is given its middleware by name and constructs it with the app alone, as `vllm serve --middleware`.

The engine is an emulated vLLM, so that this runs without a GPU. See README.md for the real command line.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from typing import Any

import uvicorn

from sidecar.engines import Vllm
from sidecar.tools.emulator import Emulator, EmulatorConfig


def imported(name: str) -> Any:
    """What vLLM does with each `--middleware`: the module before the last dot, and in it a class."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(found):
        raise SystemExit(f"{name} is no class")
    return found


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--middleware", action="append", default=[], metavar="NAME", help="package.module.Class")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    app = Emulator(EmulatorConfig(engine=Vllm)).app
    for name in arguments.middleware:
        app.add_middleware(imported(name))
    # Starlette constructs middleware when the app starts; "on" makes a mistake in the policy end the server at once.
    uvicorn.run(app, port=arguments.port, lifespan="on")


if __name__ == "__main__":
    main()
