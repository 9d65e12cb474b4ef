"""Clients and frameworks that take a second to import: imported when a test uses them, as all processes collect all."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A module that is imported with its first attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest asks everything in a test's module whether it is a test, `__test__`
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


openai: Any = Late("openai")
anthropic: Any = Late("anthropic")
fastapi: Any = Late("fastapi")
