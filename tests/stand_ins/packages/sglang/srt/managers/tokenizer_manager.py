"""From sglang/srt/managers/tokenizer_manager.py (0.5.23): `generate_request`, and the one place of the priority.

Kept: every endpoint's request goes through `_set_default_priority` before anything else reads its priority; a client's
departure is looked for between tokens. What happens is appended to STAND_IN_SGLANG_LOG.
"""

import asyncio
import json
import os
import time

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.server_args import ServerArgs


class TokenizerManager:
    def __init__(self, server_args: ServerArgs):
        self.enable_priority_scheduling = server_args.enable_priority_scheduling
        self.default_priority_value = server_args.default_priority_value
        self.aborted: set[str] = set()

    async def generate_request(self, obj: GenerateReqInput, request=None):
        obj.normalize_batch_and_arguments()
        self._set_default_priority(obj)
        _log("begun", obj)
        for index in range((obj.sampling_params or {}).get("max_new_tokens") or 1):
            if obj.rid in self.aborted or (request is not None and await request.is_disconnected()):
                _log("aborted", obj)
                break
            await asyncio.sleep(0.002)
            if obj.stream:
                yield f"t{index} "
        _log("ended", obj)
        if not obj.stream:
            yield "t"

    def abort_request(self, rid: str = "") -> None:
        self.aborted.add(rid)

    def _set_default_priority(self, obj: GenerateReqInput):
        if self.enable_priority_scheduling and obj.priority is None and self.default_priority_value is not None:
            obj.priority = self.default_priority_value
        if obj.priority is not None and not -(1 << 63) <= obj.priority < (1 << 63):
            raise ValueError(
                "priority must be a signed 64-bit integer between -9223372036854775808 and 9223372036854775807"
            )


def _log(what: str, obj: GenerateReqInput) -> None:
    line = {"what": what, "prompt": obj.text, "priority": obj.priority}
    with open(os.environ["STAND_IN_SGLANG_LOG"], "a") as log:
        log.write(json.dumps({**line, "pid": os.getpid(), "at_s": time.monotonic()}) + "\n")
