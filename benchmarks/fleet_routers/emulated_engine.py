"""An emulated engine with the pages that routers ask for: KV events, and vLLM's rendered prompts.

python -m benchmarks.fleet_routers.emulated_engine ENGINE PORT
"""

from __future__ import annotations

import sys

from benchmarks.fleet_routers.kv_events import KvEvents
from benchmarks.fleet_routers.rendering import RENDERED, Rendering
from sidecar.engines import ENGINES, Vllm
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.tools.emulator.server import EngineServer, bind

MODEL = "emulated"
STEPS = StepModel(max_sequences=2, step_us=20_000, kv_tokens=40_000)


def add_routers_pages(emulator: Emulator) -> None:
    """Adds the pages: events where the engine caches prefixes, rendered prompts where it is a vLLM."""
    config = emulator.config
    if config.prefix_cache:
        emulator.app.add_route("/_emulator/kv_events", KvEvents(emulator.engine).respond)
    if config.engine is Vllm:
        for api, path in RENDERED.items():
            emulator.app.add_route(path, Rendering(api, emulator.dialect, config).respond, methods=["POST"])


def main() -> None:
    """See the module."""
    name, port = sys.argv[1:]
    emulator = Emulator(
        EmulatorConfig(
            engine=ENGINES[name],
            steps=STEPS,
            model=MODEL,
            prefix_cache=True,
            block_tokens=16,
            cache_report=name in ("vllm", "sglang"),
        )
    )
    add_routers_pages(emulator)
    with bind("127.0.0.1", int(port)) as listener:
        listener.listen()
        EngineServer(emulator).run(sockets=[listener])


if __name__ == "__main__":
    main()
