"""Who asks and for which tier: keys, sources in their order, clamping, and nothing dropped in silence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.engines import ENGINES
from sidecar.engines.registry import client_headers
from sidecar.errors import InvalidApiKey, UnknownTier
from sidecar.identity.classify import MOST_KEPT, Asked, Classification, Classifier, Fallback, api_key
from sidecar.payload.decode import decode
from sidecar.policy.choices import TierSource
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import TenantKey, digest
from sidecar.policy.tier import Tier
from tests.support.each import each

TIERS = ("critical", "high", "normal", "low", "batch")
CRITICAL, HIGH, NORMAL, LOW, BATCH = range(5)
KEY = b"sk-very-secret"
ACME = Tenant(name="acme", keys=(TenantKey(digest(KEY)),), level=NORMAL, max_level=HIGH)
ROOT = Tenant(name="root", level=NORMAL, max_level=CRITICAL)
ANONYMOUS = Tenant(name="anonymous", level=LOW, max_level=LOW)
CHAT = Endpoint(path="/v1/chat/completions", api=Api.CHAT)
ALL_BUT_ENGINE = (TierSource.BODY, TierSource.HEADER, TierSource.ENDPOINT, TierSource.KEY)


def policy_of(
    *,
    tiers: tuple[str, ...] = TIERS,
    sources: tuple[TierSource, ...] = ALL_BUT_ENGINE,
    engine: str = "vllm",
    **changes: object,
) -> Policy:
    policy = Policy(
        rules=pool_rules(tokens=1000, requests=10, tiers=tuple(Shares(name, Fraction(0)) for name in tiers)),
        tiers=tuple(Tier(name=name, level=level) for level, name in enumerate(tiers)),
        endpoints={CHAT.path: CHAT},
        named={ACME.name: ACME},
        anonymous=ANONYMOUS,
        default_level=min(2, len(tiers) - 1),
        sources=sources,
        engine=ENGINES[engine],
        carrier=None,
        engine_levels=(),
        service_tiers=(),
        tier_header=b"x-priority",
        max_body_bytes=2**23,
        body_timeout_s=30,
        disconnect_grace_s=2,
        tokenizer=None,
        generation="test",
    )
    return replace(policy, **changes)  # type: ignore[arg-type]


def classifier_of(policy: Policy) -> Classifier:
    return Classifier(policy, policy.engine(policy.carrier))


def asked_with(
    *, headers: dict[bytes, bytes] | None = None, level: int | None = None, raw: bytes | None = None, **fields: object
) -> Asked:
    body = json.dumps({"messages": [1], **fields}).encode()
    if raw is not None:
        body = b'{"messages":[1],"priority":%b}' % raw
    headers = headers or {}
    return Asked(
        Endpoint(path=CHAT.path, api=Api.CHAT, level=level),
        decode(Api.CHAT, body),
        headers,
        client_headers(tuple(headers)),
    )


def classified(policy: Policy, asked: Asked, tenant: Tenant = ROOT) -> Classification:
    return classifier_of(policy).classify(asked, tenant)


# -- who asks


@each("scheme", [b"Bearer ", b"bearer ", b"BEARER ", b"bEaReR   "])
def test_the_key_is_found_behind_bearer_in_any_case(scheme: bytes) -> None:
    assert classifier_of(policy_of()).tenant({b"authorization": scheme + KEY}) is ACME


def test_a_tenant_that_is_kept_for_its_authorization_header_is_no_other_headers() -> None:
    classifier = classifier_of(policy_of())
    for _ in range(2):
        assert classifier.tenant({b"x-api-key": KEY}) is ACME
        assert classifier.tenant({b"authorization": b"Basic dTpw", b"x-api-key": KEY}) is ACME
        assert classifier.tenant({b"authorization": b"Bearer ", b"x-api-key": KEY}) is ACME
        assert classifier.tenant({b"authorization": b"Bearer " + KEY}) is ACME
        assert classifier.tenant({b"authorization": b"Bearer " + KEY, b"x-api-key": b"another"}) is ACME
        assert classifier.tenant({b"authorization": b"Basic dTpw"}) is ANONYMOUS
        assert classifier.tenant({b"authorization": b"Bearer "}) is ANONYMOUS
        for unknown in ({b"authorization": b"Bearer " + KEY + b"x"}, {b"x-api-key": b"Bearer " + KEY}):
            with pytest.raises(InvalidApiKey):
                classifier.tenant(unknown)


def test_a_key_that_is_written_in_many_ways_takes_little_memory() -> None:
    classifier, spaces = classifier_of(policy_of()), range(70)
    assert len(spaces) ** 2 > MOST_KEPT
    for before in spaces:
        for after in spaces:
            written = b"Bearer " + b" " * before + KEY + b" " * after
            assert classifier.tenant({b"authorization": written}) is ACME
    assert 0 < len(classifier._of_authorization) <= MOST_KEPT
    assert classifier.tenant({b"authorization": b"Bearer " + b" " * 10_000 + KEY}) is ACME
    assert len(classifier._of_authorization) == len(spaces) ** 2 - MOST_KEPT


def test_authorization_counts_before_x_api_key_and_that_before_azures_api_key() -> None:
    assert api_key({b"api-key": b"c", b"authorization": b"Bearer a", b"x-api-key": b"b"}) == b"a"
    assert api_key({b"api-key": b"c", b"x-api-key": b"b"}) == b"b"
    assert api_key({b"api-key": b"c", b"x-api-key": b""}) == b""
    assert api_key({b"api-key": b"c", b"authorization": b"Basic dTpw"}) == b"c"
    classifier = classifier_of(policy_of())
    for _ in range(2):
        assert classifier.tenant({b"authorization": b"Basic dTpw", b"api-key": KEY}) is ACME
        assert classifier.tenant({b"authorization": b"Basic dTpw"}) is ANONYMOUS


@each(
    "headers",
    [{b"authorization": b"Bearer wrong-key"}, {b"x-api-key": b"wrong-key"}, {b"x-api-key": b""}, {b"api-key": b"a"}],
)
def test_an_unknown_key_is_refused_and_not_repeated(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(InvalidApiKey) as refused:
        classifier_of(policy_of()).tenant(headers)
    assert refused.value.status == 401
    assert "wrong-key" not in str(refused.value) + repr(refused.value)
    assert refused.value.__cause__ is None


def test_without_a_key_a_request_is_refused_where_no_one_may_be_anonymous() -> None:
    with pytest.raises(InvalidApiKey, match="no API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`"):
        classifier_of(policy_of(anonymous=None)).tenant({})


def test_the_hash_of_a_key_is_no_key() -> None:
    with pytest.raises(InvalidApiKey):
        classifier_of(policy_of()).tenant({b"x-api-key": hashlib.sha256(KEY).hexdigest().encode()})


# -- which tier

SAID = {TierSource.BODY: HIGH, TierSource.HEADER: LOW, TierSource.ENDPOINT: BATCH, TierSource.KEY: NORMAL}


def saying(*sources: TierSource) -> Asked:
    return asked_with(
        headers={b"x-priority": b"low"} if TierSource.HEADER in sources else {},
        level=BATCH if TierSource.ENDPOINT in sources else None,
        **({"priority": "high"} if TierSource.BODY in sources else {}),
    )


@given(order=st.permutations(ALL_BUT_ENGINE), said=st.sets(st.sampled_from(ALL_BUT_ENGINE)), length=st.integers(0, 4))
def test_the_first_source_that_answers_wins(order: list[TierSource], said: set[TierSource], length: int) -> None:
    sources = tuple(order[:length])
    made = classified(policy_of(sources=sources), saying(*said))
    answering = [source for source in sources if source in said or source is TierSource.KEY]
    if answering:
        assert (made.source, made.level) == (answering[0], SAID[answering[0]])
    else:
        assert (made.source, made.level) == (Fallback.DEFAULT, NORMAL)


def test_where_no_source_answers_the_default_tier_does_and_is_clamped_too() -> None:
    policy = policy_of(sources=(TierSource.HEADER,), default_level=HIGH)
    assert classified(policy, asked_with()).level == HIGH
    made = classified(policy, asked_with(), ANONYMOUS)
    assert (made.level, made.clamped_from) == (LOW, HIGH)


@given(asked=st.sampled_from(TIERS), best=st.integers(0, 4))
def test_more_than_a_tenant_may_have_is_clamped_and_said(asked: str, best: int) -> None:
    made = classified(policy_of(), asked_with(priority=asked), Tenant(name="t", level=BATCH, max_level=best))
    wanted = TIERS.index(asked)
    assert made.level == max(wanted, best)
    assert made.clamped_from == (wanted if wanted < best else None)


LADDERS = st.integers(1, 12).map(lambda length: tuple(f"tier-{level}" for level in range(length)))
SHARES = st.floats(0, 1)


def level_of_number(tiers: tuple[str, ...], number: float) -> int:
    by_body = classified(policy_of(tiers=tiers), asked_with(priority=number))
    by_header = classified(policy_of(tiers=tiers), asked_with(headers={b"x-priority": repr(number).encode()}))
    assert by_body.level == by_header.level
    return by_body.level


@given(tiers=LADDERS, one=SHARES, other=SHARES)
def test_a_larger_number_never_means_a_less_important_tier(tiers: tuple[str, ...], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert level_of_number(tiers, high) <= level_of_number(tiers, low)


@given(tiers=LADDERS)
def test_every_rung_is_reached_by_its_own_number(tiers: tuple[str, ...]) -> None:
    last = len(tiers) - 1
    assert level_of_number(tiers, 1) == 0
    assert level_of_number(tiers, 0) == last
    for level in range(len(tiers)):
        assert level_of_number(tiers, 1 - level / last if last else 0.3) == level


@given(tiers=LADDERS, number=SHARES)
def test_a_number_means_the_nearest_rung(tiers: tuple[str, ...], number: float) -> None:
    last = len(tiers) - 1
    place = (1 - number) * last
    assert abs(level_of_number(tiers, number) - place) <= 0.5 + 1e-9


REFUSED = [
    *(b'"urgent"', b'""', b'"High"', b"true", b"false", b"1.5", b"-0.1", b"2", b"1e400", b"-1e400", b"[]", b"{}"),
    *(b'{"tier":"high"}', b'["high"]', b"9" * 5000, b'"' + b"x" * 5000 + b'"'),
]


@each("raw", REFUSED, ids=[raw.decode()[:12] for raw in REFUSED])
def test_a_body_that_names_no_tier_is_refused_with_the_tiers(raw: bytes) -> None:
    with pytest.raises(UnknownTier) as refused:
        classified(policy_of(), asked_with(raw=raw))
    assert refused.value.status == 400
    assert refused.value.message.startswith("priority: ")
    assert "send one of critical, high, normal, low, batch, or a number from 0 to 1" in refused.value.message
    assert len(refused.value.message) < 200


@each("value", ["urgent", "", "nan", "inf", "-inf", "1e400", "1.01", "-1", "High", "0x1", "é", "true"])
def test_a_header_that_names_no_tier_is_refused_with_the_tiers(value: str) -> None:
    with pytest.raises(UnknownTier, match=r"x-priority: .*send one of critical, high, normal, low, batch"):
        classified(policy_of(), asked_with(headers={b"x-priority": value.encode()}))


def test_a_tier_may_be_called_like_a_number() -> None:
    policy = policy_of(tiers=("inf", "nan", "1"))
    for level, name in enumerate(("inf", "nan", "1")):
        assert classified(policy, asked_with(headers={b"x-priority": name.encode()})).level == level


def test_a_null_priority_says_nothing_and_is_not_reported() -> None:
    made = classified(policy_of(), asked_with(raw=b"null"))
    assert (made.source, made.level, made.ignored) == (TierSource.KEY, NORMAL, ())


def test_a_source_behind_the_one_that_answers_is_not_asked_whatever_it_says() -> None:
    made = classified(policy_of(), asked_with(priority="high", headers={b"x-priority": b"nonsense"}))
    assert (made.level, made.ignored) == (HIGH, ("x-priority",))


def test_the_header_is_the_one_that_the_policy_names() -> None:
    policy = policy_of(tier_header=b"x-tier")
    made = classified(policy, asked_with(headers={b"x-tier": b" low ", b"x-priority": b"high"}))
    assert (made.level, made.ignored) == (LOW, ())


# -- nothing is dropped in silence


def test_what_did_not_count_is_named_as_a_client_writes_it() -> None:
    headers = {
        b"x-priority": b"low",
        b"x-vllm-priority": b"-5",
        b"x-override-rid": b"1",
        b"x-dynamo-request-priority": b"9",
        b"x-dynamo-meta-policy-class": b"gold",
        b"x-tenant-id": b"boss",
        b"accept": b"*/*",
    }
    hints = {"priority": 9, "strict_priority": 1, "latency_sensitivity": 2.0, "osl": 5}
    made = classified(policy_of(), asked_with(headers=headers, priority="high", nvext={"agent_hints": hints}))
    assert sorted(made.ignored) == [
        "nvext.agent_hints.latency_sensitivity",
        "nvext.agent_hints.priority",
        "nvext.agent_hints.strict_priority",
        "x-dynamo-meta-policy-class",
        "x-dynamo-request-priority",
        "x-override-rid",
        "x-priority",
        "x-tenant-id",
        "x-vllm-priority",
    ]


def test_a_source_that_the_policy_does_not_list_is_ignored_and_said() -> None:
    made = classified(
        policy_of(sources=(TierSource.KEY,)), asked_with(priority="high", headers={b"x-priority": b"low"})
    )
    assert (made.level, set(made.ignored)) == (NORMAL, {"priority", "x-priority"})


@each("nvext", [5, "x", [], {}, {"agent_hints": None}, {"agent_hints": 5}, {"agent_hints": {}}, None])
def test_an_nvext_without_a_priority_is_left_alone(nvext: object) -> None:
    assert classified(policy_of(), asked_with(nvext=nvext)).ignored == ()


# -- the engine's own priority as a source

THRESHOLDS = ((10.0, HIGH), (5.0, NORMAL), (0.0, LOW))
WITH_ENGINE = (TierSource.BODY, TierSource.ENGINE, TierSource.KEY)


def by_engine(engine: str, asked: Asked, thresholds: tuple[tuple[float, int], ...] = THRESHOLDS) -> Classification:
    return classified(policy_of(sources=WITH_ENGINE, engine=engine, engine_levels=thresholds), asked)


@each(("number", "level"), [(99, HIGH), (10, HIGH), (9, NORMAL), (5, NORMAL), (4, LOW), (0, LOW), (-1, BATCH)])
def test_where_higher_is_better_a_threshold_is_reached_from_below(number: int, level: int) -> None:
    made = by_engine("sglang", asked_with(priority=number))
    assert (made.source, made.level, made.ignored) == (TierSource.ENGINE, level, ())


@each(("number", "level"), [(-99, HIGH), (0, HIGH), (1, NORMAL), (5, NORMAL), (6, LOW), (10, LOW), (11, BATCH)])
def test_where_lower_is_better_a_threshold_is_reached_from_above(number: int, level: int) -> None:
    made = by_engine("vllm", asked_with(priority=number), ((0.0, HIGH), (5.0, NORMAL), (10.0, LOW)))
    assert (made.source, made.level, made.ignored) == (TierSource.ENGINE, level, ())


def test_with_engine_listed_a_number_is_the_engines_and_a_name_is_ours() -> None:
    assert by_engine("sglang", asked_with(priority=1)).level == LOW
    made = by_engine("sglang", asked_with(priority="critical"))
    assert (made.source, made.level) == (TierSource.BODY, CRITICAL)


def test_with_engine_listed_what_is_neither_is_still_refused() -> None:
    for raw in (b"true", b"[]", b"1e400", b'"urgent"'):
        with pytest.raises(UnknownTier):
            by_engine("sglang", asked_with(raw=raw))


@pytest.mark.parametrize(("engine", "header"), [("vllm", b"x-vllm-priority"), ("sglang", b"x-override-priority")])
def test_the_engines_header_beats_its_member(engine: str, header: bytes) -> None:
    made = by_engine(engine, asked_with(priority=10, headers={header: b"7"}), ((7.0, HIGH),))
    assert (made.source, made.level, made.ignored) == (TierSource.ENGINE, HIGH, ("priority",))


@each("value", [b"", b"abc", b"1.5", b"9" * 5000])
def test_a_header_that_the_engine_could_not_read_leaves_it_to_the_member(value: bytes) -> None:
    made = by_engine("sglang", asked_with(priority=5, headers={b"x-override-priority": value}))
    assert (made.level, made.ignored) == (NORMAL, ("x-override-priority",))


def test_dynamos_hint_and_header_are_read_in_its_order() -> None:
    nvext = {"agent_hints": {"priority": 10}}
    made = by_engine("dynamo", asked_with(nvext=nvext))
    assert (made.source, made.level, made.ignored) == (TierSource.ENGINE, HIGH, ())
    made = by_engine("dynamo", asked_with(nvext=nvext, headers={b"x-dynamo-request-priority": b"5"}))
    assert (made.level, made.ignored) == (NORMAL, ("nvext.agent_hints.priority",))


def test_a_member_that_dynamo_does_not_read_stays_ours() -> None:
    made = by_engine("dynamo", asked_with(priority=1))
    assert (made.source, made.level) == (TierSource.BODY, CRITICAL)


# -- what `sidecar explain` shows


def test_a_refusal_names_the_scale_on_which_a_number_counts() -> None:
    own = policy_of(
        sources=(TierSource.ENGINE, TierSource.BODY, TierSource.HEADER), engine="vllm", engine_levels=THRESHOLDS
    )
    with pytest.raises(UnknownTier, match=r"or a number as vLLM takes it \(lower is more important\)$"):
        classified(own, asked_with(priority="urgent"))
    with pytest.raises(UnknownTier, match=r"from 0 to 1 \(1 is the most important\)$"):
        classified(own, asked_with(headers={b"x-priority": b"urgent"}))
    with pytest.raises(UnknownTier, match=r"from 0 to 1 \(1 is the most important\)$"):
        classified(policy_of(), asked_with(priority="urgent"))


def test_a_long_value_is_quoted_to_its_end() -> None:
    with pytest.raises(UnknownTier, match='priority: "' + "a" * 39 + '…" is not a tier'):
        classified(policy_of(), asked_with(priority="a" * 60))


def test_an_empty_bearer_key_is_none() -> None:
    assert api_key({b"authorization": b"Bearer ", b"x-api-key": KEY}) == KEY
    assert api_key({b"authorization": b"Bearer"}) is None


def test_answers_tell_what_every_source_says_refusals_included() -> None:
    asked = asked_with(priority="high", headers={b"x-priority": b"nonsense"}, level=BATCH)
    answers = classifier_of(policy_of()).answers(asked, ACME)
    assert [(answer.source, answer.level) for answer in answers] == [
        (TierSource.BODY, HIGH),
        (TierSource.HEADER, None),
        (TierSource.ENDPOINT, BATCH),
        (TierSource.KEY, NORMAL),
    ]
    assert [answer.refusal is not None for answer in answers] == [False, True, False, False]


# -- the body's service_tier


@each(
    ("order", "value", "level", "source", "ignored"),
    [
        ("first", "priority", HIGH, TierSource.SERVICE_TIER, ("x-priority",)),
        ("last", "priority", BATCH, TierSource.HEADER, ("service_tier",)),
        ("last", "ultra", BATCH, TierSource.HEADER, ("service_tier",)),
        ("first", "ultra", BATCH, TierSource.HEADER, ("service_tier",)),
        ("first", "auto", BATCH, TierSource.HEADER, ()),
        ("first", None, BATCH, TierSource.HEADER, ()),
        ("named", "auto", LOW, TierSource.SERVICE_TIER, ("x-priority",)),
        ("none", "priority", BATCH, TierSource.HEADER, ()),
    ],
)
def test_service_tier_is_a_source_like_the_others(
    order: str, value: str | None, level: int, source: TierSource, ignored: tuple[str, ...]
) -> None:
    sources = {
        "last": (TierSource.HEADER, TierSource.SERVICE_TIER),
        "none": (TierSource.HEADER,),
    }.get(order, (TierSource.SERVICE_TIER, TierSource.HEADER))
    named = (("priority", HIGH), ("auto", LOW)) if order == "named" else (("priority", HIGH),)
    policy = policy_of(sources=sources, service_tiers=() if order == "none" else named)
    found = classified(policy, asked_with(headers={b"x-priority": b"batch"}, service_tier=value))
    assert (found.level, found.source, found.ignored, found.clamped_from) == (level, source, ignored, None)
