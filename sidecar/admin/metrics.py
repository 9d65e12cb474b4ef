"""`GET /metrics`: all metrics in Prometheus' format."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from sidecar.telemetry.metrics.endpoint import MetricsEndpoint, MetricsUnavailable


def metrics_routes(scrape: MetricsEndpoint) -> Sequence[BaseRoute]:
    """The page, for the admin port: 404 with a sentence where there are no metrics here."""

    def metrics(request: Request) -> Response:
        # No coroutine, so that it is run in a thread: the pool's figures come from this event loop.
        try:
            text, content_type = scrape.text(request.headers.get("accept"))
        except MetricsUnavailable as reason:
            return PlainTextResponse(f"{reason}\n", status_code=404)
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics)]
