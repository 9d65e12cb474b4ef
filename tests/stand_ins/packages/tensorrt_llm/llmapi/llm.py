"""From tensorrt_llm/llmapi/llm.py: `LLM.generate_async`, its argument names in order, and its range check.

The queue behind it is that of _torch/pyexecutor/scheduler/waiting_queue.py: a heap of (-priority, counter), or FCFS.
"""

import asyncio
import functools
import heapq
import itertools
from typing import Any

from tensorrt_llm.build import HAS_PRIORITY
from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs, WaitingQueuePolicy


def nvtx_range_debug(function):
    """The real one is decorated as well: a signature check has to see through it."""

    @functools.wraps(function)
    def ranged(*args, **kwargs):
        return function(*args, **kwargs)

    return ranged


class RequestOutput:
    """A generation: awaited by `aresult`, or iterated for its tokens."""

    def __init__(self, llm: "LLM", prompt: Any, tokens: int, priority: float) -> None:
        self.prompt, self.tokens, self.priority = prompt, tokens, priority
        self.prompt_token_ids = list(range(len(prompt) if isinstance(prompt, list) else max(1, len(str(prompt)) // 4)))
        self.made = asyncio.Queue()
        self.finished = False
        self.is_aborted = False
        self._llm = llm

    async def aresult(self) -> "RequestOutput":
        async for _ in self:
            pass
        return self

    def __aiter__(self):
        return self

    async def __anext__(self) -> str:
        token = await self.made.get()
        if token is None:
            self.finished = True
            raise StopAsyncIteration
        return token

    def abort(self) -> None:
        self.is_aborted = True
        self._llm.aborted.append(self.prompt)


class LLM:
    def __init__(self, model: str, **llm_args: Any) -> None:
        self.args = TorchLlmArgs(model=model, **llm_args)
        self.served: list[dict] = []
        self.aborted: list[Any] = []
        self._waiting: list[tuple] = []
        self._counter = itertools.count()
        self._running = 0

    @nvtx_range_debug
    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any | None = None,
        lora_request: Any | None = None,
        prompt_adapter_request: Any | None = None,
        streaming: bool = False,
        kv_cache_retention_config: Any | None = None,
        disaggregated_params: Any | None = None,
        trace_headers: Any | None = None,
        _postproc_params: Any | None = None,
        scheduling_params: Any | None = None,
        conversation_params: Any | None = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be in [0.0, 1.0], got {priority}")
        output = RequestOutput(self, inputs, sampling_params["max_tokens"], priority)
        by_priority = self.args.scheduler_config.waiting_queue_policy is WaitingQueuePolicy.PRIORITY
        heapq.heappush(self._waiting, (-priority if by_priority else 0, next(self._counter), output))
        self._admit()
        return output

    def shutdown(self) -> None:
        """The real one ends its worker processes."""

    def _admit(self) -> None:
        while self._waiting and self._running < self.args.max_batch_size:
            output = heapq.heappop(self._waiting)[2]
            self._running += 1
            self.served.append({"prompt": output.prompt, "priority": output.priority})
            asyncio.ensure_future(self._run(output))

    async def _run(self, output: RequestOutput) -> None:
        for index in range(output.tokens):
            await asyncio.sleep(self.args.stand_in_step_s)
            if output.is_aborted:
                break
            output.made.put_nowait(f"t{index} ")
        output.made.put_nowait(None)
        self._running -= 1
        self._admit()


if not HAS_PRIORITY:

    def generate_async(self, inputs, sampling_params=None, lora_request=None, prompt_adapter_request=None,
                       streaming=False, kv_cache_retention_config=None, disaggregated_params=None, trace_headers=None,
                       _postproc_params=None, scheduling_params=None, cache_salt=None):  # fmt: skip
        """As it was before: an argument more is a TypeError."""
        return with_priority(self, inputs, sampling_params)

    with_priority, LLM.generate_async = LLM.generate_async, nvtx_range_debug(generate_async)
