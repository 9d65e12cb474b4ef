"""Dynamo: a 32-bit integer, higher is more important, worth that many seconds of head start in the router's queue.

A top-level `priority` is a 400 there, and so is an unknown key inside `nvext`. The header overrides the body and needs
no rewriting. It acts only in `--router-mode kv` with queueing on. The value is never negated for the backend: Dynamo
does that itself.

The frontend reports each worker's figures once, however many workers there are: they are multiplied by the workers. 1.7
reports on `/metrics` in which state the router has each of them; 1.6 lists them on `/health`. No page says whether the
router orders its queue by priority.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sidecar.engines import base
from sidecar.engines.pages import Metrics, Pages, find_json, mapping, mappings, positive, read_text
from sidecar.payload.decode import Payload

POLICY = (
    "{default_policy_family: standard, uncached_isl_buckets: [{min_tokens: 0, bucket: all}], policy_classes: "
    "[{name: standard, policy_family: standard, cache_bucket: all, queue_policy: fcfs, "
    "prefill_busy_threshold_frac: 0, quantum: 1}]}"
)
"""The router's queue for every request, with one class of requests. Started with 1.6.1 and with 1.7.0.dev20261026."""
WORKERS = "dynamo_frontend_router_worker_state"
"""A sample for each worker and the state that it is in, with the value 1 (lib/llm, worker metrics of the frontend)."""
_HINTS = ("nvext", "agent_hints")


class Dynamo(base.Engine):
    """0 for the last tier (the router takes negative values as 0), 5 seconds more for each above it."""

    name = "dynamo"
    title = "Dynamo"
    fingerprint = base.Fingerprint(owner="nvidia", title="dynamo", metrics="dynamo_frontend_")
    advice = base.Advice(
        scheduler="start dynamo.frontend with --router-mode kv and its queue on: --router-policy-config FILE, a YAML "
        f"file that holds `{POLICY}`, or the deprecated --router-queue-threshold 0; 1.6 and 1.7 take both"
    )

    carriers = (base.Carrier.HEADER,)
    step = 5
    """Seconds of head start between tiers."""
    widest = 30
    """Over the whole ladder: a few dozen seconds outrank any sensible queue."""
    header = b"x-dynamo-request-priority"
    untrusted_headers = (b"x-dynamo-request-", b"x-dynamo-meta-", b"x-tenant-id")
    untrusted_members = tuple((*_HINTS, hint) for hint in ("priority", "strict_priority", "latency_sensitivity"))
    other_member = (*_HINTS, "priority")

    usage_options = base.USAGE_ONCE

    abort_latency_s = 0.25
    """The frontend cancels the request's context when the connection closes, and the worker aborts. Not for a request
    that a disaggregated worker decodes: it aborts with the first token. The frontend is not Python: it is never
    mounted."""
    default_completion_tokens = None
    """The frontend (`lib/llm/src/preprocessor.rs`), or else its vLLM worker, allows the rest of the model's context."""
    has_ignore_eos = True
    gauge_leaves_some_out = True
    """The gauge is of the router's queue; while that is off, requests wait in the workers."""
    overload_status = 529
    """For requests that the workers do not take, unless DYN_HTTP_OVERLOAD_STATUS_CODE says another."""

    liveness_page = "/live"
    """Not `/health`, which lists the workers and where they are."""

    routes = base.Routes(
        generating={
            **base.OPENAI,
            **base.SCORING,
            **base.MEDIA,
            **base.unsized("/generate", "/v1/batches", "/v1/videos/generations"),
        },
        harmless=base.COUNTING | {base.CANCEL, "/v1/tokenize", "/v1/detokenize"},
        pages=(*base.PAGES, "/busy_threshold"),
    )
    """Read from the frontend's `lib/llm/src/http/service/`."""

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> base.Stated | None:
        """See `Engine.asked`."""
        stated = super().asked(payload, headers)
        if stated is not None or payload.nvext is None:
            return stated
        try:
            hints = msgspec.json.decode(payload.nvext, type=_Nvext).agent_hints
        except (msgspec.MsgspecError, RecursionError):
            return None
        if hints is None or hints.priority is None:
            return None
        return base.Stated(hints.priority, ".".join(self.other_member))

    @classmethod
    async def gauges(cls, pages: Pages) -> base.Gauges:
        """See `Engine.gauges`."""
        metrics = Metrics(await read_text(pages, cls.metrics_page))
        workers = _available(metrics) if WORKERS in metrics else await _count_listed(pages)
        blocks = metrics.count("dynamo_frontend_model_total_kv_blocks")
        size = metrics.count("dynamo_frontend_model_kv_cache_block_size")
        return base.Gauges(
            kv_tokens=positive((blocks or 0) * (size or 0) * workers),
            max_running=positive((metrics.count("dynamo_frontend_model_max_num_seqs") or 0) * workers),
            waiting=metrics.count("dynamo_frontend_router_queue_pending_requests"),
        )

    @classmethod
    async def facts(cls, pages: Pages) -> base.Facts:
        """See `Engine.facts`."""
        version = mapping((await find_json(pages, base.OPENAPI)).get("info")).get("version")
        return base.facts_from(version=(base.OPENAPI, version if isinstance(version, str) else None))


class _Hints(msgspec.Struct):
    """The priorities that clients write under `nvext.agent_hints`, each checked as the frontend does."""

    priority: float | None = None
    strict_priority: float | None = None
    latency_sensitivity: float | None = None


class _Nvext(msgspec.Struct):
    agent_hints: _Hints | None = None


def _available(metrics: Metrics) -> int:
    """Workers that answers come from. One that only reads prompts holds no request while it is answered."""
    return len(
        {
            sample.labels.get("router_worker_id")
            for sample in metrics.samples(WORKERS)
            if sample.labels.get("state") == "available" and sample.labels.get("worker_type") != "prefill"
        }
    )


async def _count_listed(pages: Pages) -> int:
    instances = mappings((await find_json(pages, "/health")).get("instances"))
    return sum(instance.get("endpoint") == "generate" for instance in instances) or 1
