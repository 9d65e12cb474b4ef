"""Which engine answers, told from its pages alone.

`/v1/models` comes first, and `/metrics` last, because trtllm-serve's must not be read: reading takes its figures away
from whoever collects them. A proxy in between may write its own name into the models; then the other pages tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.engines.reading.exposition import Metrics
from sidecar.engines.reading.pages import Pages, find_json, find_text, mapping, mappings
from sidecar.policy.model import EngineName

_OWNERS = {
    "vllm": EngineName.VLLM,
    "sglang": EngineName.SGLANG,
    "tensorrt_llm": EngineName.TENSORRT_LLM,
    "nvidia": EngineName.DYNAMO,
}
_PREFIXES = {
    "vllm:": EngineName.VLLM,
    "sglang:": EngineName.SGLANG,
    "trtllm_": EngineName.TENSORRT_LLM,
    "dynamo_frontend_": EngineName.DYNAMO,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers: `engine` is None where nothing told, `where` the page that did, `model` the first one served.

    `context_tokens` is the longest request that the model takes, prompt and output together.
    """

    engine: EngineName | None
    where: str
    model: str | None
    context_tokens: int | None = None


async def identify(pages: Pages) -> Identity:
    """Asks a server who it is. Raises Unread where nobody answers."""
    card = _first_model(await find_json(pages, "/v1/models"))
    model, context = card.get("id"), card.get("max_model_len")
    engine, where = _OWNERS.get(str(card.get("owned_by")).lower()), "/v1/models"
    if engine is None:
        engine, where = await _by_pages(pages)
    return Identity(
        engine,
        where,
        model if isinstance(model, str) else None,
        context if isinstance(context, int) and context > 0 else None,
    )


async def _by_pages(pages: Pages) -> tuple[EngineName | None, str]:
    title = mapping((await find_json(pages, "/openapi.json")).get("info")).get("title")
    if "dynamo" in str(title).lower():
        return EngineName.DYNAMO, "/openapi.json"
    info = await find_json(pages, "/server_info")
    if "tokens_per_block" in info:
        return EngineName.TENSORRT_LLM, "/server_info"
    if "enable_priority_scheduling" in info:
        return EngineName.SGLANG, "/server_info"
    for path in ("/prometheus/metrics", "/metrics"):
        names = Metrics(await find_text(pages, path)).names()
        for prefix, engine in _PREFIXES.items():
            if any(name.startswith(prefix) for name in names):
                return engine, path
    return None, "no page"


def _first_model(models: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(mappings(models.get("data"))), {})
