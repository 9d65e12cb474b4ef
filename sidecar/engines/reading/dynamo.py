"""What Dynamo's frontend says of itself and of the workers behind it.

Each worker's figures come once, however many workers there are: they are multiplied by the workers that `/health`
lists. Whether the router orders its queue by priority is on no page.
"""

from __future__ import annotations

from sidecar.engines.reading.exposition import Metrics
from sidecar.engines.reading.facts import Facts, Gauges
from sidecar.engines.reading.pages import Pages, find_json, mapping, mappings, positive, read_text
from sidecar.policy.policy import EngineName

METRICS = "/metrics"
HEALTH = "/health"
QUEUE = "dynamo_frontend_router_queue_pending_requests"


async def gauges(pages: Pages) -> Gauges:
    """See `read_gauges`."""
    metrics = Metrics(await read_text(pages, METRICS))
    instances = mappings((await find_json(pages, HEALTH)).get("instances"))
    workers = sum(instance.get("endpoint") == "generate" for instance in instances) or 1
    blocks = metrics.count("dynamo_frontend_model_total_kv_blocks")
    size = metrics.count("dynamo_frontend_model_kv_cache_block_size")
    return Gauges(
        kv_tokens=positive((blocks or 0) * (size or 0) * workers),
        max_running=positive((metrics.count("dynamo_frontend_model_max_num_seqs") or 0) * workers),
        waiting=metrics.count(QUEUE),
    )


async def facts(pages: Pages) -> Facts:
    """See `read_facts`."""
    version = mapping((await find_json(pages, "/openapi.json")).get("info")).get("version")
    is_known = isinstance(version, str)
    return Facts(
        engine=EngineName.DYNAMO,
        version=version if is_known else None,
        where=(("version", "/openapi.json"),) if is_known else (),
    )
