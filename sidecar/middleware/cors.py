"""Cross-origin requests of browsers (CORS), where the policy names origins: Starlette's middleware around ours.

It answers a browser's preflight itself: that needs no key, and never waits. It adds its headers to every response,
refusals and streams that have begun while they waited included, in place of the app's own of the same names.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from sidecar.policy.model import Cors


def with_cors(app: ASGIApp, cors: Cors) -> ASGIApp:
    """The app for the browsers of these origins, too.

    Without credentials, which for a browser are cookies: keys are headers that the page sets itself. So `*` in what is
    exposed means every header, the engine's own as well.
    """
    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=("*",),
        allow_headers=("*",) if cors.headers is None else cors.headers,
        expose_headers=("*",),
    )
