"""The intake alone: bodies in pieces, and the policy that a request came under."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission.intake import RequestIntake, SizedRequest
from sidecar.admission.policy_snapshot import PolicySnapshot, policy_snapshot
from sidecar.engines.base import Engine
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Tenant
from tests.support.middleware import CHAT

ANYONE = Tenant(name="anyone", level=1, max_level=0)
POLICY = replace(load(shipped_policies()), anonymous=ANYONE, max_body_bytes=1000)
BODY = '{"model": "a", "messages": [{"role": "user", "content": "né"}], "max_tokens": 5}'.encode()


def snapshot_of(policy: Policy) -> PolicySnapshot:
    dialect: Engine = policy.engine(policy.carrier)
    return policy_snapshot(policy, dialect, Estimator(), None)


SNAPSHOT = snapshot_of(POLICY)


def intake_of(*pairs: tuple[bytes, bytes], snapshot: PolicySnapshot = SNAPSHOT) -> RequestIntake:
    """An intake that has checked these headers."""
    headers = dict(pairs)
    intake = RequestIntake(snapshot, snapshot.endpoints[CHAT], headers, 0)
    intake.check_head(pairs, {})
    return intake


def fed(intake: RequestIntake, *pieces: bytes | bytearray) -> SizedRequest | None:
    """The request after these pieces of its body, of which the last is its end."""
    for piece in pieces[:-1]:
        assert intake.feed({"type": "http.request", "body": piece, "more_body": True}, 0) is None
    return intake.feed({"type": "http.request", "body": pieces[-1]}, 0)


@given(cuts=st.lists(st.integers(0, len(BODY)), max_size=6), kind=st.sampled_from([bytes, bytearray]))
def test_a_body_is_the_same_in_whatever_pieces_it_comes(cuts: list[int], kind: type[bytes] | type[bytearray]) -> None:
    whole = fed(intake_of(), BODY)
    places = [0, *sorted(cuts), len(BODY)]
    found = fed(intake_of(), *(kind(BODY[start:end]) for start, end in pairwise(places)))
    assert found is not None
    assert type(found.body) is bytes
    assert found == whole


def test_a_request_keeps_the_policy_that_it_came_under_while_another_comes() -> None:
    intake = intake_of((b"x-urgency", b"critical"))
    other = snapshot_of(replace(POLICY, tier_header=b"x-urgency"))
    old, new = fed(intake, BODY), fed(intake_of((b"x-urgency", b"critical"), snapshot=other), BODY)
    assert old is not None
    assert new is not None
    assert (old.classification.level, new.classification.level) == (ANYONE.level, 0)
