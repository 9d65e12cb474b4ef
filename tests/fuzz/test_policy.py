"""Whatever the files hold, the answer is a policy that a sidecar can go by, or sentences with file and line, and
soon."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission.policy_snapshot import policy_snapshot
from sidecar.cli.check import figures, summary
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.compiler import Loaded, load_files, read_engine_list
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from sidecar.policy.warnings import warnings
from sidecar.pools import Pool
from tests.fuzz.corpus import POLICIES, names
from tests.fuzz.policies import LISTS, MARK, POOLS, TENANTS
from tests.fuzz.scale import cases, tried
from tests.support.each import each

WITHIN_S = 10.0
"""Hundreds of times what it takes: a busy machine is no reason, and a file that takes longer is a way to stop us."""
JARGON = re.compile(r"Input should|_forbidden|pydantic|validation error|Traceback|<class|object at 0x")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "tenants").mkdir()
        yield Path(name)


def outcome(folder: Path, pool: bytes, tenant: bytes) -> Policy | list[str]:
    """What loading gives. Fails for anything but a policy that works, or sentences in order."""
    (folder / "policy.yaml").write_bytes(pool)
    (folder / "tenants" / "a.yaml").write_bytes(tenant)
    began_s = time.monotonic()
    try:
        loaded = load_files(folder)
    except PolicyError as refused:
        return sentences(folder, refused)
    finally:
        assert time.monotonic() - began_s < WITHIN_S
    return working(loaded)


def sentences(folder: Path, refused: PolicyError) -> list[str]:
    """What the operator reads."""
    lines = [str(problem) for problem in refused.problems]
    assert lines
    assert [line for line in lines if not re.fullmatch(rf"{re.escape(str(folder))}/\S+(:\d+)?: .+", line)] == []
    assert [line for line in lines if JARGON.search(line) or MARK in line] == []
    return lines


def working(loaded: Loaded) -> Policy:
    """A policy that was loaded is one that everything else takes without a word."""
    policy = loaded.policy
    assert all(str(warning) for warning in warnings(policy, loaded.place))
    assert policy_snapshot(policy, policy.engine(policy.carrier), Estimator(), None).policy is policy
    assert Pool(policy).state()["waiting"] == 0
    for name in policy.models:
        assert Pool(policy.of_model(name)).state()["waiting"] == 0
    assert figures(loaded, ())["ok"]
    assert summary(loaded, ())
    return policy


def parts(file: Path) -> tuple[bytes, bytes]:
    """The two files of an entry of the corpus."""
    pool, _, tenant = file.read_bytes().partition(b"\n--- # the tenant\n")
    return pool, tenant


@each("file", POLICIES, ids=names(POLICIES))
def test_what_was_found_once_stays_mended(folder: Path, file: Path) -> None:
    outcome(folder, *parts(file))


@cases(few=50, many=14_000)
@given(pool=POOLS, tenant=TENANTS)
def test_the_shipped_policy_with_something_wrong_in_it(folder: Path, pool: str, tenant: str) -> None:
    tried["policies with something wrong"] += 1
    outcome(folder, pool.encode("utf-8", "surrogatepass"), tenant.encode("utf-8", "surrogatepass"))


@cases(few=50, many=4_000)
@given(text=LISTS)
def test_an_engine_list_with_something_wrong_in_it(folder: Path, text: str) -> None:
    tried["engine lists with something wrong"] += 1
    file = folder / "engines.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    (folder / "policy.yaml").write_text("engine: vllm\ntiers: {normal: {}}\nengines: {file: engines.yaml}\n")
    loaded = load_files(folder)
    try:
        working(replace(loaded, policy=loaded.policy.of_engines(read_engine_list(loaded.policy, file))))
    except PolicyError as refused:
        sentences(folder, refused)


@cases(few=50, many=2_000)
@given(pool=st.binary(max_size=300), tenant=st.binary(max_size=300))
def test_plain_bytes(folder: Path, pool: bytes, tenant: bytes) -> None:
    tried["policies of plain bytes"] += 1
    assert isinstance(outcome(folder, pool, tenant), list)
