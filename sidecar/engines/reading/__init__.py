"""What can be read from an engine before, and while, it is sent requests: who it is, what it holds, who waits in it.

One module per engine; a page is fetched through `Pages`, so that it does not matter whether the engine is behind a
network or in this very process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from sidecar.engines.reading import dynamo, sglang, tensorrt_llm, vllm
from sidecar.engines.reading.asked_once import AskedOnce
from sidecar.engines.reading.facts import Facts, Gauges
from sidecar.engines.reading.identify import Identity, identify
from sidecar.engines.reading.pages import NoAnswer, Page, Pages, Unread
from sidecar.policy.model import EngineName

__all__ = [
    "Facts",
    "Gauges",
    "Identity",
    "NoAnswer",
    "Page",
    "Pages",
    "Unread",
    "followed",
    "identify",
    "read_facts",
    "read_gauges",
]

_GAUGES: Mapping[EngineName, Callable[[Pages], Awaitable[Gauges]]] = {
    EngineName.VLLM: vllm.gauges,
    EngineName.SGLANG: sglang.gauges,
    EngineName.TENSORRT_LLM: tensorrt_llm.gauges,
    EngineName.DYNAMO: dynamo.gauges,
}
_FACTS: Mapping[EngineName, Callable[[Pages], Awaitable[Facts]]] = {
    EngineName.VLLM: vllm.facts,
    EngineName.SGLANG: sglang.facts,
    EngineName.TENSORRT_LLM: tensorrt_llm.facts,
    EngineName.DYNAMO: dynamo.facts,
}
_ASKED_ONCE: Mapping[EngineName, frozenset[str]] = {EngineName.TENSORRT_LLM: tensorrt_llm.ASKED_ONCE}


def followed(engine: EngineName, pages: Pages) -> Pages:
    """The same pages for a reader that comes again and again: what the engine wants asked once is asked once."""
    return AskedOnce(pages, _ASKED_ONCE[engine]) if engine in _ASKED_ONCE else pages


async def read_gauges(engine: EngineName, pages: Pages) -> Gauges:
    """What the engine holds and who waits in it, now. Raises Unread."""
    read = _GAUGES.get(engine)
    return Gauges() if read is None else await read(pages)


async def read_facts(engine: EngineName, pages: Pages) -> Facts:
    """What the engine says of itself. Raises Unread."""
    read = _FACTS.get(engine)
    return Facts(engine=engine) if read is None else await read(pages)
