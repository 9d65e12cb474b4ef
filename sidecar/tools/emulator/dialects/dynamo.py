"""Dynamo: `nvext.agent_hints` or headers, higher first as seconds of head start; a top-level `priority` is a 400."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from sidecar.apis import Api
from sidecar.tools.emulator.config import Scheduling
from sidecar.tools.emulator.dialects.base import Dialect, EngineRefusal, header_integer
from sidecar.tools.emulator.request import Body, InvalidField
from sidecar.tools.step_model.queue import Rank

PRIORITY_HEADER = "x-dynamo-request-priority"
STRICT_HEADER = "x-dynamo-request-strict-priority"
OVERLOADED = 529  # Dynamo's default; no name in http.HTTPStatus
_I32, _U32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
_INTEGER_HINTS = {"priority": ("i32", _I32), "strict_priority": ("u32", _U32), "osl": ("u32", _U32)}
_HINT_FIELDS = frozenset({*_INTEGER_HINTS, "speculative_prefill", "latency_sensitivity"})
_NVEXT_FIELDS = frozenset(
    {
        "agent_context",
        "agent_hints",
        "annotations",
        "backend_instance_id",
        "cache_control",
        "decode_worker_id",
        "extra_fields",
        "greed_sampling",
        "max_thinking_tokens",
        "prefill_worker_id",
        "request_timestamp_ms",
        "router",
        "routing_constraints",
        "session_control",
        "token_data",
        "use_raw_prompt",
    }
)


class DynamoDialect(Dialect):
    """The Rust frontend's typed deserialization: a wrong type is a 400 that names the type it expected."""

    owned_by = "nvidia"
    overload = (OVERLOADED, "Service temporarily overloaded: all workers are busy, retry later")

    def check(self, api: Api, body: Body) -> None:
        if "priority" in body:
            raise self.refuse(api, HTTPStatus.BAD_REQUEST, "Validation: Unsupported parameter(s): `priority`")
        nvext = self._mapping(api, "nvext", body.get("nvext"))
        self._known(api, "nvext", nvext, _NVEXT_FIELDS)
        hints = self._mapping(api, "nvext.agent_hints", nvext.get("agent_hints"))
        self._known(api, "nvext.agent_hints", hints, _HINT_FIELDS)
        for field, (kind, (least, most)) in _INTEGER_HINTS.items():
            value = hints.get(field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise self._undecodable(api, f"nvext.agent_hints.{field}: invalid value {value!r}, expected {kind}")

    def rank(self, api: Api, body: Body, headers: Mapping[str, str]) -> Rank:
        del api
        hints = (body.get("nvext") or {}).get("agent_hints") or {}
        return Rank(
            _override(headers, PRIORITY_HEADER, _I32, hints.get("priority")),
            _override(headers, STRICT_HEADER, _U32, hints.get("strict_priority")) or 0,
        )

    def refuse(self, api: Api, status: int, message: str) -> EngineRefusal:
        del api
        kind = "Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase
        return EngineRefusal(status, {"message": message, "type": kind, "code": int(status)})

    def invalid(self, api: Api, mistake: InvalidField) -> EngineRefusal:
        return self._undecodable(api, f"{mistake.field}: {mistake.message}")

    def queue_length(self, api: Api, waiting: int, running: int) -> int | None:
        """With the router's queue off, 1.7 has a gate before its workers, which counts what runs, too."""
        del api
        is_gated = not self.config.lists_workers and self.config.scheduling is Scheduling.FCFS
        return waiting + running if is_gated else waiting

    def _undecodable(self, api: Api, reason: str) -> EngineRefusal:
        message = f"Failed to deserialize the JSON body into the target type: {reason}"
        return self.refuse(api, HTTPStatus.BAD_REQUEST, message)

    def _mapping(self, api: Api, path: str, value: object) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._undecodable(api, f"{path}: invalid type, expected a map")
        return value

    def _known(self, api: Api, path: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
        for field in given:
            if field not in known:
                raise self._undecodable(api, f"{path}: unknown field `{field}`")


def _override(headers: Mapping[str, str], name: str, bounds: tuple[int, int], fallback: int | None) -> int | None:
    value = header_integer(headers, name)
    return fallback if value is None or not bounds[0] <= value <= bounds[1] else value
