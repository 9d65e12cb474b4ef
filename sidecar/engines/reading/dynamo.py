"""What Dynamo's frontend says of itself and of the workers behind it.

Each worker's figures come once, however many workers there are: they are multiplied by the workers. 1.7 says on
`/metrics` in which state the router has each of them; 1.6 lists them on `/health`. Whether the router orders its queue
by priority is on no page.
"""

from __future__ import annotations

from sidecar.engines.reading.exposition import Metrics
from sidecar.engines.reading.facts import Facts, Gauges
from sidecar.engines.reading.pages import Pages, find_json, mapping, mappings, positive, read_text
from sidecar.policy.model import EngineName

METRICS = "/metrics"
HEALTH = "/health"
QUEUE = "dynamo_frontend_router_queue_pending_requests"
WORKERS = "dynamo_frontend_router_worker_state"
"""A sample for each worker and the state that it is in, with the value 1 (lib/llm, worker metrics of the frontend)."""


async def gauges(pages: Pages) -> Gauges:
    """See `read_gauges`."""
    metrics = Metrics(await read_text(pages, METRICS))
    workers = _available(metrics) if WORKERS in metrics else await _listed(pages)
    blocks = metrics.count("dynamo_frontend_model_total_kv_blocks")
    size = metrics.count("dynamo_frontend_model_kv_cache_block_size")
    return Gauges(
        kv_tokens=positive((blocks or 0) * (size or 0) * workers),
        max_running=positive((metrics.count("dynamo_frontend_model_max_num_seqs") or 0) * workers),
        waiting=metrics.count(QUEUE),
    )


def _available(metrics: Metrics) -> int:
    """Workers that answers come from. One that only reads prompts holds no request while it is answered."""
    return len(
        {
            sample.labels.get("router_worker_id")
            for sample in metrics.samples(WORKERS)
            if sample.labels.get("state") == "available" and sample.labels.get("worker_type") != "prefill"
        }
    )


async def _listed(pages: Pages) -> int:
    instances = mappings((await find_json(pages, HEALTH)).get("instances"))
    return sum(instance.get("endpoint") == "generate" for instance in instances) or 1


async def facts(pages: Pages) -> Facts:
    """See `read_facts`."""
    version = mapping((await find_json(pages, "/openapi.json")).get("info")).get("version")
    is_known = isinstance(version, str)
    return Facts(
        engine=EngineName.DYNAMO,
        version=version if is_known else None,
        where=(("version", "/openapi.json"),) if is_known else (),
    )
