"""TensorRT-LLM as it must be treated from outside: its older builds answer 400 to every request with the field.

Nothing is sent until the engine's schema is known to have the field. That is asked when the server starts, and again
now and then, because an engine behind a network may be replaced by another build. An app whose schema does not describe
trtllm-serve's chat request at all is none: what it takes is its owner's business, and it is sent what the policy says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sidecar.engines.dialect import Forward, Priority
from sidecar.engines.reading import NoAnswer, Pages, Unread
from sidecar.engines.reading.pages import read_json
from sidecar.engines.reading.schema import has_priority
from sidecar.engines.tensorrt_llm import TensorRtLlm
from sidecar.policy.model import Api

SCHEMA = "/openapi.json"
ASK_AGAIN_S = 60.0
"""An engine takes longer than this to be replaced and to load its weights."""
ASK_AFTER_FAILURE_S = 1.0

_log = logging.getLogger("sidecar.engine")


class CautiousTensorRtLlm(TensorRtLlm):
    """Sends a priority only to a build that is known to take it. `clock` gives seconds."""

    def __init__(self, pages: Pages, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.has_field: bool | None = None
        self._pages = pages
        self._clock = clock
        self._ask_at_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._said: str | None = None

    def forward(self, api: Api, priority: Priority) -> Forward:
        """See `Dialect.forward`. Empty while it is not known whether the engine would refuse it."""
        if self._clock() >= self._ask_at_s and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self.ask())
        return super().forward(api, priority) if self.has_field else Forward()

    async def ask(self) -> None:
        """Finds out whether the engine has the field. What was known stays where the engine does not say."""
        try:
            document = await read_json(self._pages, SCHEMA)
        except Unread as error:
            self._ask_at_s = self._clock() + ASK_AFTER_FAILURE_S
            # Who is away may be anything when it comes; that it is away, its requests say.
            if self.has_field is None and not isinstance(error, NoAnswer):
                self._say(f"it is not known whether tensorrt-llm takes a priority, and none is sent: {error}")
            return
        self._ask_at_s = self._clock() + ASK_AGAIN_S
        self.has_field = has_priority(document) is not False
        if self.has_field:
            self._said = None
        else:
            self._say(
                "this build of tensorrt-llm has no priority field and refuses requests that carry one: they go "
                "without, and admission still orders them; upgrade the engine, or serve it with `sidecar trtllm-serve`"
            )

    def _say(self, warning: str) -> None:
        """Once, not once a minute."""
        if warning != self._said:
            self._said = warning
            _log.warning(warning, extra={"event": "engine_priority"})
