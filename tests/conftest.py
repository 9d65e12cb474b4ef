"""What every test may use, and how tests are spread over processes."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from opentelemetry.util._once import Once

from sidecar.pools import member
from sidecar.pools.redis import connection
from sidecar.server.open_files import raise_limit
from tests.support import stages
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.shared_pools import begun
from tests.support.signals import restore_for_children

TESTS = Path(__file__).parent
SECOND_STEP = re.compile(r"mark\.long|hypothesis")
"""`sh .ci/test --long` reads the files that have this, and no others."""
IS_CI = "CI" in os.environ
"""Properties try the same examples in every run of a commit. A developer's run looks for new ones."""
EXAMPLES = Path(os.environ.get("SIDECAR_EXAMPLES") or Path.home() / ".cache" / "admission-sidecar" / "examples")
"""Examples that once failed, tried first. All clones on a machine share them, CI's own as well."""

# A deadline for each example would measure the machine, which runs other tests beside this one.
_database = DirectoryBasedExampleDatabase(EXAMPLES)
settings.register_profile("few", deadline=None, database=_database, max_examples=50)
settings.register_profile("many", deadline=None, database=_database, max_examples=400)
settings.load_profile("few")
gc.disable()  # until all tests are read: a third of that time would go to looking through what stays
restore_for_children()
raise_limit()  # a `sidecar serve` that a test starts has nothing to say of it
# Engines of tests answer what a test is about, and count what comes. `tests/cli/test_serve_check.py` turns it on.
os.environ.setdefault("SIDECAR_SERVE_NO_CHECK", "1")
stages.check_every_step()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs a file in one process, so that what it starts is started once.

    First the files directly in `tests/`, which start the most and take longest, so that none of them is left at the end
    while the other processes have nothing to do; tests on real time last.
    """
    later = {item.path for item in items if item.get_closest_marker("long") or item.get_closest_marker("hypothesis")}
    assert [path for path in later if not SECOND_STEP.search(path.read_text("utf-8"))] == []
    items.sort(key=lambda item: (item.get_closest_marker("alone") is not None, item.path.parent != TESTS))
    for item in items:
        group = "alone" if item.get_closest_marker("alone") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
        # Not `derandomize`, which forbids a database of examples.
        if IS_CI and item.get_closest_marker("hypothesis") and isinstance(item, pytest.Function):
            seed(0)(getattr(item.obj, "_hypothesis_state_machine_class", item.function))


def pytest_collection_finish() -> None:
    """Collects garbage from now on, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def every_request_keeps_to_its_stages() -> Iterator[None]:
    """See `sidecar.admission.request.Stage`."""
    stages.entered.clear()
    yield
    assert not stages.wrong


@pytest.fixture(autouse=True)
def patient_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may take as long as a busy machine does, but where the test is about one that hangs (`hasty`)."""
    if request.node.get_closest_marker("hasty"):
        return
    for bound in ("CONNECT_WITHIN_S", "GREETING_WITHIN_S", "ANSWER_WITHIN_S"):
        monkeypatch.setattr(connection, bound, 60.0)
    for bound in ("ANSWER_WITHIN_US", "ASK_WITHIN_US"):
        monkeypatch.setattr(member, bound, 60_000_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    """A store of its own for each test, as some kill it, in which the pool called `default` has begun."""
    folder = tmp_path / "store"
    folder.mkdir()
    with RedisServer(first_binary(), folder) as server:
        yield begun(server)


@pytest.fixture
def no_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry as in a process in which no provider was installed: one can be, until the test ends."""
    for signal, name in (("trace", "TRACER"), ("metrics._internal", "METER")):
        monkeypatch.setattr(f"opentelemetry.{signal}._{name}_PROVIDER", None)
        monkeypatch.setattr(f"opentelemetry.{signal}._{name}_PROVIDER_SET_ONCE", Once())


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
