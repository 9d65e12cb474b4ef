"""Launcher of trtllm-serve with the middleware in its app, which also hands the granted priority to its engine.

trtllm-serve has no option for a middleware. So the server's class is changed before the real command runs: its
constructor mounts the middleware, and its `generate_async` gets the priority of the request that it is called for. That
holds for every endpoint, including responses and messages, whose schemas have no field for a priority; where a handler
passes a priority itself, the granted one replaces it.

Signatures and names are those of TensorRT-LLM main (tests/stand_ins/README.md says where each was read). Features that
an older build lacks are detected at the server itself, and logged once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from sidecar.app import AdmissionMiddleware
from sidecar.context import granted
from sidecar.engines import Engine, NoPriorityEngine
from sidecar.engines.tensorrt_llm import PriorityRoute, TensorRtLlm
from sidecar.launchers.checks import CannotLaunch, announce_processes, begin, count_given, imported
from sidecar.server.workers import PROCESSES_VARIABLE

INSTALL = (
    "install TensorRT-LLM as its documentation says (it needs an NVIDIA GPU), "
    "or run `sidecar serve` in front of a trtllm-serve elsewhere"
)
_SERVE = "serve"

logger = logging.getLogger(__name__)
_FIELDS = {"event": "engine_priority"}


def run(policy_path: str | None, arguments: Sequence[str]) -> None:
    """Runs the real command with `arguments`; ends as it ends, by SystemExit. Raises CannotLaunch or PolicyError."""
    policy = begin(policy_path, TensorRtLlm)
    announce_processes(count_given(arguments, "--num_serve_frontends"), policy)
    main = imported("tensorrt_llm.commands.serve", INSTALL).main
    _refuse_other_servers(arguments, main)
    mount_in(imported("tensorrt_llm.serve.openai_server", INSTALL).OpenAIServer, policy.engine)
    # sys.argv stays the launcher's: the real command runs it again for each further frontend process.
    main(args=list(arguments), prog_name="trtllm-serve")


def mount_in(server_class: type[Any], engine: type[Engine]) -> None:
    """Mounts the middleware in every server of this class; `engine` is the policy's."""
    construct = server_class.__init__

    @functools.wraps(construct)
    def construct_with_middleware(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _mount(self, engine)

    server_class.__init__ = construct_with_middleware


def _refuse_other_servers(arguments: Sequence[str], main: Any) -> None:
    first = next(iter(arguments), "")
    if first in main.commands and first != _SERVE:
        raise CannotLaunch(f"`trtllm-serve {first}` is another server; run `sidecar serve` in front of it")
    if "--grpc" in arguments:
        raise CannotLaunch("requests over gRPC would bypass admission; leave --grpc away")
    if count_given(arguments, "--num_http_workers") > 1:
        raise CannotLaunch("--num_http_workers starts processes without the middleware; run `sidecar serve` in front")


def _mount(server: Any, engine: type[Engine]) -> None:
    # `llm` is what the argument and the attribute were called before main renamed them.
    generator = server.generator if hasattr(server, "generator") else server.llm
    # From the YAML file, too, and in the frontends that the first one starts.
    frontends = getattr(_arguments(generator), "num_serve_frontends", 1)
    os.environ[PROCESSES_VARIABLE] = str(max(frontends, int(os.environ.get(PROCESSES_VARIABLE, "1"))))
    if engine is NoPriorityEngine:
        server.app.add_middleware(AdmissionMiddleware, is_launched=True)
        return
    route = _route(server.app, generator)
    if route is PriorityRoute.HANDED_OVER:
        generator.generate_async = _with_granted_priority(generator.generate_async)
    server.app.add_middleware(AdmissionMiddleware, dialect=TensorRtLlm(route=route), is_launched=True)


def _route(app: Any, generator: Any) -> PriorityRoute:
    """How this build's engine takes a priority. Logs a warning where it takes none, or ignores it."""
    if _ignores_priorities(generator):
        # It would log a warning for every request with a priority.
        logger.warning(
            "sidecar: the engine serves its waiting queue first come, first served, and is told no priorities; "
            "set scheduler_config.waiting_queue_policy: priority in the file given by --config",
            extra=_FIELDS,
        )
        return PriorityRoute.NONE
    if hasattr(generator, "generate_async") and "priority" in inspect.signature(generator.generate_async).parameters:
        return PriorityRoute.HANDED_OVER
    if "priority" in _members(app, "ChatCompletionRequest"):
        logger.warning(
            "sidecar: LLM.generate_async of this TensorRT-LLM takes no priority; chat and completions carry it in "
            "their body, responses and messages go without; upgrade tensorrt-llm",
            extra=_FIELDS,
        )
        return PriorityRoute.BODY
    logger.warning(
        "sidecar: this TensorRT-LLM takes no priority; the sidecar orders the requests, and the engine serves those "
        "admitted as they come; upgrade tensorrt-llm",
        extra=_FIELDS,
    )
    return PriorityRoute.NONE


def _ignores_priorities(generator: Any) -> bool:
    """True if the engine's queue is known to be another one than the queue by priority."""
    scheduler = getattr(_arguments(generator), "scheduler_config", None)
    queue = getattr(scheduler, "waiting_queue_policy", None)
    return queue is not None and str(getattr(queue, "value", queue)).lower() != "priority"


def _arguments(generator: Any) -> Any:
    """The engine's arguments; None for an engine that makes images, which has none."""
    return getattr(generator, "args", None)


def _members(app: Any, schema: str) -> Any:
    return app.openapi().get("components", {}).get("schemas", {}).get(schema, {}).get("properties", {})


def _with_granted_priority(generate_async: Callable[..., Any]) -> Callable[..., Any]:
    """`generate_async` with the granted priority: the server's handlers call it in the request's own task."""

    @functools.wraps(generate_async)
    def generate_as_granted(*args: Any, **kwargs: Any) -> Any:
        grant = granted()
        if grant is not None:
            kwargs["priority"] = float(grant.engine_priority)
        return generate_async(*args, **kwargs)

    return generate_as_granted
