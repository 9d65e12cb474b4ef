"""The reverse proxy: an HTTP client of the engine, as an ASGI app."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

if TYPE_CHECKING:
    from sidecar.proxy.proxy import Traffic
    from sidecar.proxy.upstream import Upstream


class EngineProxy(ABC):
    """The `ReverseProxy` as the composition knows it. Apart, because the other one loads an HTTP client, which an app
    that is the engine itself does not need.
    """

    upstream: Upstream
    traffic: Traffic
    on_failure: Callable[[str | None], None]

    @abstractmethod
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
