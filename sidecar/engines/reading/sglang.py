"""What SGLang says of itself: everything, in `/server_info`, and its load in `/v1/loads`, with or without metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.engines.reading.facts import Facts, Gauges
from sidecar.engines.reading.pages import Pages, find_json, mapping, mappings, positive, read_json, total
from sidecar.engines.reading.schema import has_priority
from sidecar.policy.model import EngineName

SERVER_INFO = "/server_info"
LOADS = "/v1/loads"


async def gauges(pages: Pages) -> Gauges:
    """See `read_gauges`."""
    info = mapping(await read_json(pages, SERVER_INFO))
    ranks = mappings(info.get("internal_states"))
    loads = mappings((await find_json(pages, LOADS)).get("loads"))
    running = total([_count(load.get("num_running_reqs")) for load in loads])
    waiting = total([_count(load.get("num_waiting_reqs")) for load in loads])
    return Gauges(
        kv_tokens=total([positive(mapping(rank.get("memory_usage")).get("token_capacity")) for rank in ranks]),
        max_running=total([positive(rank.get("effective_max_running_requests_per_dp")) for rank in ranks]),
        running=running,
        waiting=waiting,
        # A rank counts the prompt that it computes in chunks neither here nor there.
        unfinished=total([running, waiting, len(loads)]),
    )


async def facts(pages: Pages) -> Facts:
    """See `read_facts`."""
    info = mapping(await read_json(pages, SERVER_INFO))
    version, by_priority = info.get("version"), info.get("enable_priority_scheduling")
    default = info.get("default_priority_value")
    field = has_priority(await find_json(pages, "/openapi.json"))
    places = {"version": SERVER_INFO, "by_priority": SERVER_INFO, "is_inverted": SERVER_INFO}
    return Facts(
        engine=EngineName.SGLANG,
        version=version if isinstance(version, str) else None,
        by_priority=by_priority if isinstance(by_priority, bool) else None,
        is_inverted=bool(info.get("schedule_low_priority_values_first")),
        has_field=field,
        default_priority=default if isinstance(default, int) else None,
        preempts_beyond=_threshold(info) if by_priority is True else None,
        where=tuple(({**places, "has_field": "/openapi.json"} if field is not None else places).items()),
    )


def _threshold(info: Mapping[str, Any]) -> int | None:
    threshold = info.get("priority_scheduling_preemption_threshold")
    return None if info.get("disable_priority_preemption") is True or not isinstance(threshold, int) else threshold


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
