"""Advice for each finding: the exact flag, field or header of each engine, in one sentence."""

from __future__ import annotations

from sidecar.engines.reading import Facts
from sidecar.policy.model import EngineName
from sidecar.tools.doctor.priority_fields import PriorityField

DYNAMO_POLICY = (
    "{default_policy_family: standard, uncached_isl_buckets: [{min_tokens: 0, bucket: all}], policy_classes: "
    "[{name: standard, policy_family: standard, cache_bucket: all, queue_policy: fcfs, "
    "prefill_busy_threshold_frac: 0, quantum: 1}]}"
)
"""The router's queue for every request, with one class of requests. Started with 1.6.1 and with 1.7.0.dev20261026."""

SCHEDULER = {
    EngineName.VLLM: "start vLLM with --scheduling-policy priority",
    EngineName.TENSORRT_LLM: (
        "put `scheduler_config: {waiting_queue_policy: priority}` into the YAML file that trtllm-serve gets with "
        "--config (older builds: --extra_llm_api_options)"
    ),
    EngineName.SGLANG: (
        "start SGLang with --enable-priority-scheduling --default-priority-value 0, "
        "and without --schedule-low-priority-values-first"
    ),
    EngineName.DYNAMO: (
        "start dynamo.frontend with --router-mode kv and its queue on: --router-policy-config FILE, a YAML file that "
        f"holds `{DYNAMO_POLICY}`, or the deprecated --router-queue-threshold 0; 1.6 and 1.7 take both"
    ),
}
"""By engine, how its queue is made to use priority."""


def scheduler(engine: EngineName) -> str:
    """How an engine's queue is made to use priority."""
    return SCHEDULER.get(engine, "switch on the engine's priority scheduling")


def refused(engine: EngineName) -> str:
    """The engine answers a right value with an error."""
    if engine is EngineName.TENSORRT_LLM:
        return (
            "this trtllm-serve has no `priority` in its HTTP schema (it came with TensorRT-LLM PR #15329): update it, "
            "or run it as `sidecar trtllm-serve`, or set `engine: none` in the policy and let admission order alone"
        )
    return "update the engine, or set `engine: none` in the policy and let admission order alone"


def dropped(engine: EngineName, way: PriorityField, other: PriorityField, facts: Facts) -> str:
    """One way shows nothing, another works."""
    since = header_since(engine)
    if way.is_header and since is not None and is_before(facts.version, since):
        return f"{engine.value} reads the {way.title} from {since} on, this is {facts.version}: {_instead(other)}"
    if engine is EngineName.SGLANG and way.is_header:
        return (
            f"set SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1 for SGLang and let every proxy in between pass "
            f"{way.path[0]}, or {_instead(other)}"
        )
    what = f"the {way.title} unchanged"
    instead = f", or {_instead(other)}" if engine in (EngineName.VLLM, EngineName.SGLANG) else ""
    return f"let every proxy between here and the engine pass {what}{instead}"


def unread(engine: EngineName, way: PriorityField) -> str:
    """A wrong value is accepted: the field is not read."""
    return (
        f"let every proxy between here and the engine pass the {way.title} unchanged, and see that the engine's "
        f"version has it ({engine.value})"
    )


def inverted(engine: EngineName, facts: Facts) -> str:
    """The order is the wrong way round."""
    if engine is EngineName.SGLANG and facts.is_inverted:
        return "start SGLang without --schedule-low-priority-values-first: the sidecar sends higher for more important"
    direction = "lower" if engine is EngineName.VLLM else "higher"
    return (
        f"{engine.value} itself serves {direction} numbers first, and that is what the sidecar sends: find the proxy, "
        "plugin or flag that turns them round, and take it out"
    )


def header_since(engine: EngineName) -> str | None:
    """The first version that reads a priority from a header; None where all do that are known, or none."""
    return {EngineName.VLLM: "0.28.0", EngineName.SGLANG: "0.5.16"}.get(engine)


def is_before(version: str | None, other: str) -> bool:
    """Whether a version is older than another; False where it cannot be read."""
    found = _numbers(version or "")
    return bool(found) and found < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version such as 0.32.0+cpu or 1.4.0rc1; empty where it does not start with one."""
    parts: list[int] = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _instead(other: PriorityField) -> str:
    return f"write `forward_priority: {'header' if other.is_header else 'body'}` into the policy"
