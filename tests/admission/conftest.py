"""Client libraries, which only the tests that call them wait for: each takes a second or more to import."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    return import_module("openai")


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    return import_module("anthropic")
