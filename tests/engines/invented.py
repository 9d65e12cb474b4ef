"""An invented engine: everything that a new engine adds to the sidecar, in one file."""

from __future__ import annotations

from sidecar.apis import Api
from sidecar.engines.base import CANCEL, COUNTING, OPENAI, Advice, Carrier, Engine, Fingerprint, Gauges, Routes
from sidecar.engines.pages import Metrics, Pages, positive, read_text


class Invented(Engine):
    """Lower is more important, and a tier is 100 apart from the next. It runs four requests at once."""

    name = "invented"
    title = "Invented"
    fingerprint = Fingerprint(owner="invented-labs", metrics="invented_", packages=("invented_server",))
    advice = Advice(scheduler="start it with --order-by urgency")

    carriers = (Carrier.HEADER, Carrier.BODY)
    more_important_is_higher = False
    step = 100
    priority_range = (0.0, 10_000.0)
    header = b"x-invented-urgency"
    member_apis = frozenset((Api.CHAT,))
    untrusted_headers = (b"x-invented-admin-",)
    invalid_header = invalid_member = "x"

    abort_latency_s = 0.75
    default_completion_tokens = 32

    routes = Routes(generating={**OPENAI, "/v1/invent": None}, harmless=COUNTING | {CANCEL, "/v1/inspect"})

    @classmethod
    async def gauges(cls, pages: Pages) -> Gauges:
        """See `Engine.gauges`."""
        metrics = Metrics(await read_text(pages, cls.metrics_page))
        return Gauges(
            kv_tokens=positive(metrics.count("invented_kv_tokens")),
            max_running=positive(metrics.count("invented_slots")),
            running=metrics.count("invented_running"),
            waiting=metrics.count("invented_waiting"),
        )
