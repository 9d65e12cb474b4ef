"""SGLang: a 64-bit integer, higher is more important. It acts only with `--enable-priority-scheduling`.

Its header is off unless `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1`, and then covers chat and messages alone; responses
accept the member and drop it (up to 0.5.23, `serving_responses.py` builds its request without it). A launcher in the
server's own process can give the granted value to its tokenizer manager instead, which serves every endpoint
(`sidecar.launchers.sglang_app`). Its settings are in `/server_info`, and its load is in `/v1/loads`, with or without
metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sidecar.apis import Api
from sidecar.engines import base
from sidecar.engines.pages import (
    Metrics,
    Pages,
    Unread,
    find_json,
    find_text,
    mapping,
    mappings,
    positive,
    read_json,
    total,
)

SERVER_INFO = "/server_info"
RETRACTED = "sglang:num_retracted_requests_total"


class Sglang(base.Engine):
    """0 for the last tier, 2 more for each above it."""

    name = "sglang"
    title = "SGLang"
    fingerprint = base.Fingerprint(
        owner="sglang", server_info="enable_priority_scheduling", metrics="sglang:", packages=("sglang",)
    )
    advice = base.Advice(
        scheduler="start SGLang with --enable-priority-scheduling --default-priority-value 0, "
        "and without --schedule-low-priority-values-first",
        inverted="start SGLang without --schedule-low-priority-values-first: the sidecar sends higher for more "
        "important",
        default_priority="--default-priority-value",
        threshold="--priority-scheduling-preemption-threshold",
        no_preemption="--disable-priority-preemption",
        cache_report="--enable-cache-report",
    )

    carriers = (base.Carrier.BODY, base.Carrier.HEADER)
    step = 2
    """Few values, because each becomes a metric label that the engine never drops."""
    widest = 10
    """The engine's preemption threshold: a wider ladder would preempt running requests."""
    header = b"x-override-priority"
    header_since = "0.5.16"
    header_switch = "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1"
    header_apis = frozenset((Api.CHAT, Api.MESSAGES))
    member_apis = frozenset((Api.CHAT, Api.COMPLETIONS, Api.EMBEDDINGS))
    untrusted_headers = (b"x-override-",)
    invalid_header = invalid_member = "x"

    usage_options = MappingProxyType({"include_usage": b"true"})
    """Its `continuous_usage_stats` are a question of their own (`utils.py`: `should_include_usage`): they stay."""

    abort_latency_s = 4.5
    """The server asks for a disconnect every SGLANG_REQUEST_STATE_WAIT_TIMEOUT seconds, 4 as shipped
    (`tokenizer_manager.py`: `_wait_one_response`); a stream's abort task waits for 2 s (`create_abort_task`). Then the
    engine ends the step that it computes. It is never done within the app's call: a stream's abort task is a background
    task, which some servers do not run after a disconnect."""
    default_completion_tokens = 16
    """As OpenAI's API has it (`CompletionRequest.max_tokens`)."""
    has_ignore_eos = True
    counts_preemptions = True
    """With `--enable-metrics`."""

    health_page = "/v1/models"
    """Not `/health`: by default (`SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION`) that generates a token."""

    routes = base.Routes(
        generating={
            **base.OPENAI,
            **base.SCORING,
            **base.MEDIA,
            "/invocations": Api.CHAT,
            **base.unsized("/generate", "/generate_from_file", "/encode", "/classify", "/vertex_generate"),
            **base.unsized("/v1/decisions", "/v1/systemone"),
            **base.unsized("/api/chat", "/api/generate"),
        },
        harmless=base.COUNTING
        | {base.CANCEL, "/v1/tokenize", "/v1/detokenize", "/parse_function_call", "/separate_reasoning", "/api/show"},
        changing_reads=frozenset(
            (
                *("/flush_cache", "/clear_hicache_storage_backend", "/freeze_gc", "/slow_down", "/configure_logging"),
                *("/start_profile", "/stop_profile", "/set_trace_level", "/get_weights_by_name"),
                *("/release_memory_occupation", "/resume_memory_occupation", "/open_session", "/close_session"),
                *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
                "/dump_expert_distribution_record",
            )
        ),
        pages=(
            *base.PAGES,
            *("/get_server_info", "/get_load", "/v1/loads", "/hicache/"),
            *("/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info"),
        ),
    )
    """Read from SGLang's `srt/entrypoints/http_server.py`. `/generate`, `/encode`, `/classify` and `/v1/rerank` answer
    to PUT as well; Vertex' path has another name where AIP_PREDICT_ROUTE says so."""

    @classmethod
    async def gauges(cls, pages: Pages) -> base.Gauges:
        """See `Engine.gauges`."""
        info = mapping(await read_json(pages, SERVER_INFO))
        ranks = mappings(info.get("internal_states"))
        loads = mappings((await find_json(pages, "/v1/loads")).get("loads"))
        running = total([_count(load.get("num_running_reqs")) for load in loads])
        waiting = total([_count(load.get("num_waiting_reqs")) for load in loads])
        return base.Gauges(
            kv_tokens=total([positive(mapping(rank.get("memory_usage")).get("token_capacity")) for rank in ranks]),
            max_running=total([positive(rank.get("effective_max_running_requests_per_dp")) for rank in ranks]),
            running=running,
            waiting=waiting,
            # A rank counts the prompt that it computes in chunks neither here nor there.
            unfinished=total([running, waiting, len(loads)]),
            preemptions=await _count_retracted(pages, cls.metrics_page),
        )

    @classmethod
    async def facts(cls, pages: Pages) -> base.Facts:
        """See `Engine.facts`."""
        info = mapping(await read_json(pages, SERVER_INFO))
        by_priority, default = info.get("enable_priority_scheduling"), info.get("default_priority_value")
        found = {
            "version": _typed(info.get("version"), str),
            "by_priority": _typed(by_priority, bool),
            "is_inverted": bool(info.get("schedule_low_priority_values_first")),
            "default_priority": _typed(default, int),
            "preempts_beyond": _threshold(info) if by_priority is True else None,
            "caches_prefixes": _not(_typed(info.get("disable_radix_cache"), bool)),
            "reports_cached_tokens": _typed(info.get("enable_cache_report"), bool),
        }
        field = base.has_priority(await find_json(pages, base.OPENAPI))
        return base.facts_from(
            **{name: (SERVER_INFO, value) for name, value in found.items()}, has_field=(base.OPENAPI, field)
        )


class LaunchedSglang(Sglang):
    """SGLang whose own process gets the grant from `sidecar.launchers.sglang_app`: a request carries nothing."""

    def forward(self, api: Api, priority: base.Priority) -> base.Forward:  # noqa: ARG002  # every endpoint is the same
        """See `Engine.forward`."""
        return base.Forward(is_handed_over=True)


async def _count_retracted(pages: Pages, page: str) -> int | None:
    """Requests that were retracted from the running batch because the KV cache was full; None without that page.

    `sglang:num_retracted_reqs` is a gauge of one batch. The counter (`srt/observability/metrics_collector.py`:
    `increment_retracted_reqs`) has a sample for each data-parallel rank, and with
    `--enable-metrics-for-all-schedulers` one for each of the ranks that work in step, which all count the same.
    """
    try:
        samples = Metrics(await find_text(pages, page)).samples(RETRACTED)
    except Unread:  # a size that was read counts, whatever becomes of this page
        return None
    ranks: dict[str, float] = {}
    for sample in samples:
        rank = sample.labels.get("dp_rank", "")
        ranks[rank] = max(sample.value, ranks.get(rank, sample.value))
    counted = sum(ranks.values())
    return round(counted) if ranks and 0 <= counted < math.inf else None


def _threshold(info: Mapping[str, Any]) -> int | None:
    is_off = info.get("disable_priority_preemption") is True
    return None if is_off else _typed(info.get("priority_scheduling_preemption_threshold"), int)


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _typed(value: Any, kind: type) -> Any:
    return value if isinstance(value, kind) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
