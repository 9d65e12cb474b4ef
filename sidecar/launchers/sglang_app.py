"""SGLang's app with the middleware, which its uvicorn workers import by name. The import mounts the middleware.

It also makes every endpoint's request carry the granted priority (`sglang_priority.py`).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from sidecar.app import AdmissionMiddleware
from sidecar.engines import NoPriorityEngine
from sidecar.engines.sglang import LaunchedSglang
from sidecar.launchers.sglang_priority import hand_over_in
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.compiler import load


def _mount() -> Any:
    app = importlib.import_module("sglang.srt.entrypoints.http_server").app
    if load(os.environ[POLICY_VARIABLE]).engine is NoPriorityEngine:
        app.add_middleware(AdmissionMiddleware, is_launched=True)
        return app
    hand_over_in(importlib.import_module("sglang.srt.managers.tokenizer_manager").TokenizerManager)
    app.add_middleware(AdmissionMiddleware, dialect=LaunchedSglang(), is_launched=True)
    return app


app = _mount()
