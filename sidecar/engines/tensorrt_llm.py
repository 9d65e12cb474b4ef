"""TensorRT-LLM: a float in [0, 1], higher is more important, in the body of chat and text completions alone.

Other schemas accept the member and drop it, and builds before the field answer 400 to it. It acts only with
`scheduler_config.waiting_queue_policy: priority`. A launcher in the server's own process can give the granted value to
`LLM.generate_async` instead, which serves responses and messages too (`sidecar.launchers.trtllm`).

Its Prometheus page exists with `return_perf_metrics: true` alone, and its gauges stand still between finished requests.
The JSON at `/metrics` is never read: reading takes it away from every other collector. No page reports the policy of
its waiting queue. None counts preemptions, either: `trtllm_num_paused_requests` is a gauge of one iteration
(`tensorrt_llm/metrics/collector.py`: `log_iteration_stats`). Only `capacity_scheduler_policy: MAX_UTILIZATION` pauses
requests at all; the default reserves prompt and output, so that a request which does not fit waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from sidecar.apis import Api
from sidecar.engines import base
from sidecar.engines.pages import Metrics, NoAnswer, Pages, Unread, find_json, find_text, positive, read_json

if TYPE_CHECKING:
    import asyncio

DEFAULT_PRIORITY = 0.5
"""The engine's own `DEFAULT_REQUEST_PRIORITY`, for a ladder of one tier."""
SERVER_INFO = "/server_info"
ASK_AGAIN_S = 60.0
"""An engine takes longer than this to be replaced and to load its weights."""
ASK_AFTER_FAILURE_S = 1.0

_log = logging.getLogger("sidecar.engine")


class PriorityRoute(Enum):
    """How a priority gets to the engine: in the request's body, by the app in the same process, or not at all."""

    BODY = "body"
    HANDED_OVER = "handed over"
    NONE = "none"


class TensorRtLlm(base.Engine):
    """The whole range is used: 1.0 for the most important tier, 0.0 for the last. Equal tiers stay exact ties: FIFO."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM"
    fingerprint = base.Fingerprint(
        owner="tensorrt_llm", server_info="tokens_per_block", metrics="trtllm_", packages=("tensorrt_llm",)
    )
    advice = base.Advice(
        scheduler="put `scheduler_config: {waiting_queue_policy: priority}` into the YAML file that trtllm-serve gets "
        "with --config (older builds: --extra_llm_api_options)",
        refused="this trtllm-serve has no `priority` in its HTTP schema (it came with TensorRT-LLM PR #15329): update "
        "it, or run it as `sidecar trtllm-serve`, or set `engine: none` in the policy and let admission order alone",
    )

    carriers = (base.Carrier.BODY,)
    priority_range = (0.0, 1.0)
    member_apis = frozenset((Api.CHAT, Api.COMPLETIONS))

    usage_options = base.USAGE_ONCE
    asks_usage_by_default = True

    abort_latency_s = 1.25
    """The server asks for a disconnect once a second (`openai_server.py`: `await_disconnected`); then the engine ends
    the step that it computes. A stream's call ends with the disconnect; another task aborts it up to a second later."""
    has_ignore_eos = True
    gauges_stand_still = True
    metrics_page = "/prometheus/metrics"
    asked_once = frozenset((SERVER_INFO,))
    """Answering it may stop the server's event loop for a moment (tensorrt_llm/serve/openai_server.py @ f996de06)."""

    routes = base.Routes(
        generating={
            **base.OPENAI,
            **base.unsized("/v1/messages/batches", "/v1/audio/transcriptions", "/v1/images/generations"),
            **base.unsized("/v1/images/edits", "/v1/videos", "/v1/videos/generations"),
        },
        harmless=base.COUNTING | {"/v1/responses/{id}", "/v1/messages/batches/{id}/cancel"},
    )
    """Read from trtllm-serve's `serve/openai_server.py`. `/v1/messages/batches` runs several requests of one body."""

    def __init__(self, carrier: base.Carrier | None = None, *, route: PriorityRoute = PriorityRoute.BODY) -> None:
        super().__init__(carrier)
        self._route = route

    @classmethod
    def connected(cls, carrier: base.Carrier | None, pages: Pages) -> base.Engine:  # noqa: ARG003  # there is one carrier
        """See `Engine.connected`. A build that is not known to have the field is sent none."""
        return ProbedTensorRtLlm(pages)

    def priority(self, level: int, levels: int) -> base.Priority:
        """See `Engine.priority`."""
        return DEFAULT_PRIORITY if levels < 2 else round(1 - level / (levels - 1), 3)

    def forward(self, api: Api, priority: base.Priority) -> base.Forward:
        """See `Engine.forward`."""
        if self._route is PriorityRoute.BODY:
            return super().forward(api, priority)
        return base.Forward(is_handed_over=self._route is PriorityRoute.HANDED_OVER)

    @classmethod
    async def gauges(cls, pages: Pages) -> base.Gauges:
        """See `Engine.gauges`."""
        metrics = Metrics(await find_text(pages, cls.metrics_page))
        blocks, size = metrics.count("trtllm_kv_cache_max_blocks"), metrics.count("trtllm_kv_cache_tokens_per_block")
        most = positive(metrics.count("trtllm_max_num_active_requests"))
        if most is None:
            most = positive((await find_json(pages, SERVER_INFO)).get("max_batch_size"))
        return base.Gauges(
            kv_tokens=positive((blocks or 0) * (size or 0)),
            max_running=most,
            running=metrics.count("trtllm_num_requests_running"),
            waiting=metrics.count("trtllm_num_requests_waiting"),
        )


class ProbedTensorRtLlm(TensorRtLlm):
    """TensorRT-LLM from outside. It sends a priority only to a build that is known to accept it.

    Older builds answer 400 to every request with the field. The engine's schema is read when the server starts, and
    again now and then, because an engine behind a network may be replaced by another build. An app whose schema does
    not describe trtllm-serve's chat request at all is another server: it is sent the priority as the policy says.
    `clock` gives seconds.
    """

    def __init__(self, pages: Pages, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.has_field: bool | None = None
        self._pages = pages
        self._clock = clock
        self._ask_at_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._last_warning: str | None = None

    def forward(self, api: Api, priority: base.Priority) -> base.Forward:
        """See `Engine.forward`. Empty while it is not known whether the engine would refuse it."""
        if self._clock() >= self._ask_at_s and (self._asking is None or self._asking.done()):
            from asyncio import ensure_future  # at most once a minute; a command that reads a policy needs none

            self._asking = ensure_future(self.ask())
        return super().forward(api, priority) if self.has_field else base.NOTHING

    async def ask(self) -> None:
        """Finds out whether the engine has the field. What was known stays where the engine does not say."""
        try:
            document = await read_json(self._pages, base.OPENAPI)
        except Unread as error:
            self._ask_at_s = self._clock() + ASK_AFTER_FAILURE_S
            # An engine that is away may be another build when it comes; its requests report that it is away.
            if self.has_field is None and not isinstance(error, NoAnswer):
                self._say(f"it is not known whether tensorrt-llm takes a priority, and none is sent: {error}")
            return
        self._ask_at_s = self._clock() + ASK_AGAIN_S
        self.has_field = base.has_priority(document) is not False
        if self.has_field:
            self._last_warning = None
        else:
            self._say(
                "this build of tensorrt-llm has no priority field and refuses requests that carry one: they go "
                "without, and admission still orders them; upgrade the engine, or serve it with `sidecar trtllm-serve`"
            )

    def _say(self, warning: str) -> None:
        """Once, not once a minute."""
        if warning != self._last_warning:
            self._last_warning = warning
            _log.warning(warning, extra={"event": "engine_priority"})
