"""SGLang's app with the middleware, which its uvicorn workers import by name. The import mounts the middleware."""

from __future__ import annotations

import importlib

from sidecar.app import AdmissionMiddleware

app = importlib.import_module("sglang.srt.entrypoints.http_server").app
app.add_middleware(AdmissionMiddleware, is_launched=True)
