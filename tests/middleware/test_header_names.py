"""What the names of a request's headers say, and how many sets of names are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.engines.registry import client_headers
from sidecar.middleware.credentials import AUTHORIZATION, Credentials
from sidecar.middleware.header_names import LARGEST_KEPT, MAX_WAIT_HEADER, MOST_NAMES, MOST_READ, NamesRead
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.model import Source

POLICY = load(shipped_policies())
PLAIN = (b"host", b"content-type", b"content-length", AUTHORIZATION)
NAMES = st.sampled_from(
    (
        *(*PLAIN, b"x-api-key", b"x-tenant", b"via", b"content-encoding", b"transfer-encoding", MAX_WAIT_HEADER),
        *(b"x-vllm-priority", b"x-override-priority", b"x-tenant-id", POLICY.tier_header, b"x-slo-ttft-ms"),
    )
)


def test_the_names_that_most_clients_send_say_nothing_but_the_key() -> None:
    found = NamesRead(POLICY, Credentials())[PLAIN]
    assert (found.claims, found.taken) == ((), (AUTHORIZATION,))
    assert (found.may_state_tier, found.are_usual) == (False, True)


@pytest.mark.parametrize(
    "name", [b"via", b"content-encoding", b"transfer-encoding", b"x-admission-max-wait", b"x-llm-d-slo-tpot-ms"]
)
def test_a_header_that_the_intake_must_read_is_seen(name: bytes) -> None:
    assert not NamesRead(POLICY, Credentials())[(*PLAIN, name)].are_usual


@pytest.mark.parametrize("name", [POLICY.tier_header, b"x-vllm-priority", b"x-override-anything"])
def test_a_header_that_may_state_a_tier_is_seen(name: bytes) -> None:
    assert NamesRead(POLICY, Credentials())[(*PLAIN, name)].may_state_tier


def test_where_the_engines_priorities_count_any_request_may_state_one() -> None:
    policy = replace(POLICY, sources=(*POLICY.sources, Source.ENGINE))
    assert NamesRead(policy, Credentials())[PLAIN].may_state_tier


@given(
    names=st.lists(NAMES, unique=True).map(tuple),
    credentials=st.builds(
        Credentials, st.booleans(), st.none() | st.just(b"engine"), st.sampled_from([(), (b"x-tenant",)])
    ),
)
def test_what_is_taken_is_what_a_bearers_request_is_deprived_of(
    names: tuple[bytes, ...], credentials: Credentials
) -> None:
    headers = dict.fromkeys(names, b"Bearer key")
    found = NamesRead(POLICY, credentials)[names]
    assert found.claims == client_headers(names)
    assert found.taken == (*found.claims, *credentials.taken(headers))


def test_clients_that_send_ever_new_names_take_little_memory() -> None:
    read = NamesRead(POLICY, Credentials())
    for number in range(3 * MOST_READ):
        assert read[b"x-%d" % number,].taken == ()
        assert len(read) <= MOST_READ


@pytest.mark.parametrize(
    "names",
    [tuple(b"%d" % number for number in range(MOST_NAMES + 1)), (*PLAIN, b"x-" + b"a" * LARGEST_KEPT)],
    ids=["many", "long"],
)
def test_a_set_that_no_client_has_is_read_but_not_kept(names: tuple[bytes, ...]) -> None:
    # Anyone may send it, also without a key: 250 sets that each fill a request's head took 134 MB.
    read = NamesRead(POLICY, Credentials())
    assert read[(*names, b"x-vllm-priority")].claims == (b"x-vllm-priority",)
    assert not read


def test_the_largest_set_that_is_kept() -> None:
    longest = LARGEST_KEPT - 2 * (MOST_NAMES - 1)
    names = (*(b"%02d" % number for number in range(MOST_NAMES - 1)), b"a" * longest)
    read = NamesRead(POLICY, Credentials())
    assert read[names] is read[names]
