"""From tensorrt_llm/executor/request.py (the version with DEFAULT_REQUEST_PRIORITY, after pull request 12362)."""

# Mirrors C++ executor.h Request::kDefaultPriority
DEFAULT_REQUEST_PRIORITY: float = 0.5
