"""What trtllm-serve says of itself.

Its Prometheus page exists with `return_perf_metrics: true` alone, and its gauges stand still between finished requests.
The JSON at `/metrics` is never read: reading takes it away from whoever else collects it. No page tells the policy of
its waiting queue.
"""

from __future__ import annotations

from sidecar.engines.reading.exposition import Metrics
from sidecar.engines.reading.facts import Facts, Gauges
from sidecar.engines.reading.pages import Pages, find_json, find_text, positive
from sidecar.engines.reading.schema import has_priority
from sidecar.policy.model import EngineName

METRICS = "/prometheus/metrics"
SERVER_INFO = "/server_info"
ASKED_ONCE = frozenset((SERVER_INFO,))
"""Answering it may stop the server's event loop for a moment (tensorrt_llm/serve/openai_server.py @ f996de06)."""


async def gauges(pages: Pages) -> Gauges:
    """See `read_gauges`."""
    metrics = Metrics(await find_text(pages, METRICS))
    blocks, size = metrics.count("trtllm_kv_cache_max_blocks"), metrics.count("trtllm_kv_cache_tokens_per_block")
    most = positive(metrics.count("trtllm_max_num_active_requests"))
    if most is None:
        most = positive((await find_json(pages, SERVER_INFO)).get("max_batch_size"))
    return Gauges(
        kv_tokens=positive((blocks or 0) * (size or 0)),
        max_running=most,
        running=metrics.count("trtllm_num_requests_running"),
        waiting=metrics.count("trtllm_num_requests_waiting"),
    )


async def facts(pages: Pages) -> Facts:
    """See `read_facts`."""
    version = (await find_json(pages, "/version")).get("version")
    field = has_priority(await find_json(pages, "/openapi.json"))
    found = {"version": ("/version", version), "has_field": ("/openapi.json", field)}
    return Facts(
        engine=EngineName.TENSORRT_LLM,
        version=version if isinstance(version, str) else None,
        has_field=field,
        where=tuple((name, where) for name, (where, value) in found.items() if value is not None),
    )
