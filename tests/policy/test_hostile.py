"""Whatever the bytes are, the answer is a policy or sentences; never a traceback, never the validator's own words."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from sidecar.policy.schema import SCHEMAS, schema_document
from tests.support.examples import examples

SHIPPED = Path(__file__).parents[2] / "policies"
POOL = (SHIPPED / "policy.yaml").read_bytes()
TENANT = (SHIPPED / "tenants" / "standard.yaml").read_bytes()
JARGON = re.compile(
    r"Input should|_forbidden|pydantic|https?://(?!a:8000|(?:id|app)\.example)|validation error|Traceback|<class"
    r"|object at 0x"
)
"""The only address in our sentences is the example's."""
SPLICES = [b": ", b"{", b"}", b"[", b"]", b"- ", b"\n", b"  ", b"\t", b"&a ", b"*a", b"!!x ", b"'", b'"', b"%", b"\x00"]
SPLICES += [
    b"\xff",
    b"no",
    b"010",
    b"12:30",
    b"null",
    b"-1",
    b"1e309",
    b".nan",
    b"---\n",
    b"? ",
    b"| ",
    b"<<: ",
    b"#",
    b"\\",
]


def _outcome(pool: bytes, tenant: bytes) -> Policy | str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tenants").mkdir()
        (folder / "policy.yaml").write_bytes(pool)
        (folder / "tenants" / "a.yaml").write_bytes(tenant)
        try:
            return load(folder)
        except PolicyError as refused:
            problems = refused.problems
        lines = [str(problem) for problem in problems]
        assert [line for line in lines if not re.fullmatch(rf"{re.escape(name)}/\S+?(:\d+)?: .+", line)] == []
        return "\n".join(lines)


def _mutated(text: bytes, seed: int, times: int) -> bytes:
    """The text with some bytes removed, some lines moved, and some of YAML's special words thrown in."""
    chance = random.Random(seed)
    for _ in range(times):
        at = chance.randrange(len(text) + 1)
        text = chance.choice(
            [
                text[:at] + chance.choice(SPLICES) + text[at:],
                text[:at] + text[at + chance.randrange(1, 30) :],
                text[at:] + text[:at],
            ]
        )
    return text


@given(st.integers(), st.integers(0, 6), st.integers(0, 6))
def test_a_mutated_policy_loads_or_says_what_is_wrong(seed: int, pool_times: int, tenant_times: int) -> None:
    outcome = _outcome(_mutated(POOL, seed, pool_times), _mutated(TENANT, seed + 1, tenant_times))
    assert isinstance(outcome, Policy) or not JARGON.search(outcome)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_say_what_is_wrong(pool: bytes, tenant: bytes) -> None:
    assert isinstance(_outcome(pool, tenant), str)


_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_KEYS = sorted({name for kind in SCHEMAS.values() for name in schema_document(kind)["properties"]})


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1), st.dictionaries(st.sampled_from(_KEYS), _VALUES))
def test_values_of_any_shape_say_what_is_wrong(pool: dict[str, object], tenant: dict[str, object]) -> None:
    pool = {"tiers": {"normal": pool}, **pool, "tenants": "tenants/*.yaml"}
    outcome = _outcome(
        yaml.safe_dump(pool).encode("utf-8", "replace"), yaml.safe_dump(tenant).encode("utf-8", "replace")
    )
    assert isinstance(outcome, str)
    assert not JARGON.search(outcome)
