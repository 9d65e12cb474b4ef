"""What vLLM says of itself.

Its pages tell the size of the KV cache and who runs and waits, but neither `max_num_seqs` nor the scheduling policy:
those are known to a middleware in its own process, or where `VLLM_SERVER_DEV_MODE=1` opens `/server_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.engines.reading.exposition import Metrics, Sample
from sidecar.engines.reading.facts import Facts, Gauges
from sidecar.engines.reading.pages import Pages, find_json, mapping, positive, read_text, total
from sidecar.engines.reading.schema import has_priority
from sidecar.policy.model import EngineName

METRICS = "/metrics"
SERVER_INFO = "/server_info?config_format=json"
IN_PROCESS = "the server's own configuration"


async def gauges(pages: Pages) -> Gauges:
    """See `read_gauges`."""
    metrics = Metrics(await read_text(pages, METRICS))
    settings, _ = await _settings(pages)
    ranks = positive(mapping(settings.get("parallel_config")).get("data_parallel_size")) or 1
    most = positive(mapping(settings.get("scheduler_config")).get("max_num_seqs"))
    running, waiting = metrics.count("vllm:num_requests_running"), metrics.count("vllm:num_requests_waiting")
    return Gauges(
        kv_tokens=total([_kv_tokens(sample) for sample in metrics.samples("vllm:cache_config_info")]),
        max_running=None if most is None else most * ranks,
        running=running,
        waiting=waiting,
        unfinished=total([running, waiting]),
    )


async def facts(pages: Pages) -> Facts:
    """See `read_facts`."""
    version = (await find_json(pages, "/version")).get("version")
    settings, place = await _settings(pages)
    scheduling = mapping(settings.get("scheduler_config")).get("policy")
    field = has_priority(await find_json(pages, "/openapi.json"))
    found = {
        "version": ("/version", version),
        "by_priority": (place, scheduling),
        "has_field": ("/openapi.json", field),
    }
    return Facts(
        engine=EngineName.VLLM,
        version=version if isinstance(version, str) else None,
        by_priority=None if scheduling is None else str(scheduling) == "priority",
        has_field=field,
        where=tuple((name, where) for name, (where, value) in found.items() if value is not None),
    )


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
