"""vLLM: a 64-bit integer, lower is more important. It acts only with `--scheduling-policy priority`.

The header (from 0.28 on) overrides the body, needs no rewriting and covers messages; embeddings read the body only.
Its pages report the size of the KV cache and the requests that run and wait, but neither `max_num_seqs` nor the
scheduling policy. A middleware in its own process knows those, and `VLLM_SERVER_DEV_MODE=1` opens `/server_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sidecar.apis import Api
from sidecar.engines import base
from sidecar.engines.pages import Metrics, Pages, Unread, find_json, mapping, positive, read_text, total

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

SERVER_INFO = "/server_info?config_format=json"
IN_PROCESS = "the server's own configuration"


class Vllm(base.Engine):
    """Level times ten: the most important tier is 0, the engine's own default."""

    name = "vllm"
    title = "vLLM"
    fingerprint = base.Fingerprint(owner="vllm", metrics="vllm:", packages=("vllm", "vllm_omni"))
    advice = base.Advice(
        scheduler="start vLLM with --scheduling-policy priority", cache_report="--enable-prompt-tokens-details"
    )

    carriers = (base.Carrier.HEADER, base.Carrier.BODY)
    more_important_is_higher = False
    step = 10
    """At least 2, because the engine serves a tool's follow-up turn at its priority minus 1."""
    header = b"x-vllm-priority"
    header_since = "0.28.0"
    header_apis = frozenset(Api) - {Api.EMBEDDINGS, Api.GENERIC}
    member_apis = frozenset(Api) - {Api.MESSAGES}

    usage_options = base.USAGE_ONCE

    abort_latency_s = 0.25
    """The server gets the disconnect at once (`with_cancellation`, `StreamingResponse`); the engine ends the step that
    it computes. About 0.1 s was seen; twice that, and a margin for the way there."""
    aborts_in_its_call = True
    """The call is canceled, and `AsyncLLM.generate` aborts the request before it passes the cancellation on."""
    default_completion_tokens = 16
    """As OpenAI's API has it (`CompletionRequest.max_tokens`)."""
    has_ignore_eos = True
    counts_preemptions = True

    reports_max_running = False  # its settings are shown to a middleware mounted in it, or in its development mode
    routes = base.Routes(
        generating={
            **base.OPENAI,
            **base.SCORING,
            **base.MEDIA,
            **base.COHERE,
            "/invocations": Api.CHAT,
            **base.unsized("/v1/chat/completions/batch", "/generate", "/pooling", "/classify", "/score", "/rerank"),
            **base.unsized("/generative_scoring", "/v1/decisions", "/v1/audio/translations"),
        },
        harmless=base.COUNTING | {base.CANCEL, "/v1/chat/completions/render", "/v1/completions/render", "/ping"},
        pages=(
            *base.PAGES,
            *("/load", "/kv_event_sources", "/fault_tolerance/status"),
            *("/is_sleeping", "/is_paused", "/weight_info", "/get_world_size"),
        ),
    )
    """Read from vLLM 0.33 (`entrypoints/`), and vLLM-Omni for images, videos and speech. `/invocations` takes chat,
    text completions, embeddings and more: as chat it is guarded for chat alone."""

    @classmethod
    async def gauges(cls, pages: Pages) -> base.Gauges:
        """See `Engine.gauges`."""
        metrics = Metrics(await read_text(pages, cls.metrics_page))
        settings, _ = await _settings(pages)
        ranks = positive(mapping(settings.get("parallel_config")).get("data_parallel_size")) or 1
        most = positive(mapping(settings.get("scheduler_config")).get("max_num_seqs"))
        running, waiting = metrics.count("vllm:num_requests_running"), metrics.count("vllm:num_requests_waiting")
        return base.Gauges(
            kv_tokens=total([_kv_tokens(sample) for sample in metrics.samples("vllm:cache_config_info")]),
            max_running=None if most is None else most * ranks,
            running=running,
            waiting=waiting,
            unfinished=total([running, waiting]),
            # One for each preemption (`v1/metrics/stats.py`: `num_preempted_reqs`), a sample for each rank.
            preemptions=metrics.count("vllm:num_preemptions_total"),
        )

    @classmethod
    async def facts(cls, pages: Pages) -> base.Facts:
        """See `Engine.facts`."""
        settings, place = await _settings(pages)
        scheduling = mapping(settings.get("scheduler_config")).get("policy")
        version = (await find_json(pages, "/version")).get("version")
        return base.facts_from(
            version=("/version", version if isinstance(version, str) else None),
            by_priority=(place, None if scheduling is None else str(scheduling) == "priority"),
            has_field=(base.OPENAPI, base.has_priority(await find_json(pages, base.OPENAPI))),
            caches_prefixes=(cls.metrics_page, await _caches_prefixes(pages, cls.metrics_page)),
        )


async def _caches_prefixes(pages: Pages, page: str) -> bool | None:
    """A label of the KV cache's description has it; None without that page."""
    try:
        samples = Metrics(await read_text(pages, page)).samples("vllm:cache_config_info")
    except Unread:
        return None
    values = {sample.labels.get("enable_prefix_caching") for sample in samples}
    return None if not values <= {"True", "False"} or not values else "True" in values


async def _settings(pages: Pages) -> tuple[Mapping[str, Any], str]:
    """The two configurations that matter, as far as they can be had, and from where."""
    config = getattr(getattr(pages.host, "state", None), "vllm_config", None)
    if config is None:
        return mapping((await find_json(pages, SERVER_INFO)).get("vllm_config")), SERVER_INFO
    scheduler, parallel = getattr(config, "scheduler_config", None), getattr(config, "parallel_config", None)
    settings = {
        "scheduler_config": {name: getattr(scheduler, name, None) for name in ("policy", "max_num_seqs")},
        "parallel_config": {"data_parallel_size": getattr(parallel, "data_parallel_size", None)},
    }
    return settings, IN_PROCESS


def _kv_tokens(info: Sample) -> int | None:
    """One rank's. New releases say it outright; blocks times their size is wrong for models that mix cache layouts."""
    outright = _number(info.labels.get("kv_cache_size_tokens"))
    if outright is not None:
        return outright
    blocks, size = _number(info.labels.get("num_gpu_blocks")), _number(info.labels.get("block_size"))
    return None if blocks is None or size is None else blocks * size


def _number(text: str | None) -> int | None:
    return positive(int(text)) if text is not None and text.isdecimal() and len(text) < 20 else None
