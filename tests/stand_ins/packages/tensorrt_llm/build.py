"""Which build of TensorRT-LLM is stood in for."""

import os

BUILD = os.environ.get("STAND_IN_TRTLLM", "main")
assert BUILD in {"main", "before_field", "before_priority"}, BUILD
HAS_FIELD = BUILD == "main"
HAS_PRIORITY = BUILD != "before_priority"
