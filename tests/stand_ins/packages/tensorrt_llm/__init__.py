"""TensorRT-LLM as `sidecar trtllm-serve` meets it. See tests/stand_ins/README.md.

`STAND_IN_TRTLLM` chooses the build: `main` (the default); `before_field`, whose HTTP schemas have no priority (before
pull request 15329); `before_priority`, whose engine takes none either (before pull request 12362).
"""

from tensorrt_llm.llmapi.llm import LLM as LLM
