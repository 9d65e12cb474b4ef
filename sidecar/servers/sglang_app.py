"""SGLang's app with the door in it, for its uvicorn workers to import by name. Importing it is what mounts the door."""

from __future__ import annotations

import importlib

from sidecar.app import AdmissionMiddleware

app = importlib.import_module("sglang.srt.entrypoints.http_server").app
app.add_middleware(AdmissionMiddleware, is_launched=True)
