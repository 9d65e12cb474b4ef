"""Signed tokens as a client sends them: through real HTTP, with the keys of a real issuer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import socket
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from joserfc.jwk import RSAKey

from sidecar import AdmissionMiddleware
from sidecar.errors import InvalidToken, IssuerUnavailable
from sidecar.events import Classified, Verdict
from sidecar.identity import issuer_keys
from sidecar.identity.issuer_keys import IssuerKeys, KeysNeeded
from sidecar.identity.tokens import MOST_TOKEN_BYTES, TokenVerifier
from sidecar.policy.identity import ALGORITHMS, JwtPolicy
from tests.identity.issuer import AUDIENCE, ISSUER, Issuer, ec, ed, jwt_section, rsa, unsigned
from tests.support.dry_run import observing
from tests.support.each import each
from tests.support.middleware import App, Guarded, chat, guarding, key, policy, write_policy
from tests.support.serving import serving

pytestmark = pytest.mark.anyio


def bearer(token: str) -> str:
    return f"authorization: Bearer {token}"


@asynccontextmanager
async def trusting(issuer: Issuer, app: App | None = None, **more: str) -> AsyncIterator[Guarded]:
    """A controller that believes the issuer's tokens."""
    async with issuer.serving(), guarding(app or App(), policy(jwt_section(issuer.url, **more))) as guarded:
        yield guarded


@each(
    ("made", "algorithm"),
    [(ec, "ES256"), (rsa, "RS256"), (rsa, "PS512"), (ed, "Ed25519"), (ed, "EdDSA")],
)
async def test_a_token_names_the_tenant_whatever_its_algorithm_and_api_keys_go_on(made: Any, algorithm: str) -> None:
    issuer, app = Issuer(made()), App()
    async with trusting(issuer, app) as guarded:
        for _ in range(3):
            answer = await guarded.ask(None, bearer(issuer.token(algorithm=algorithm)))
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, "normal")
        assert (await guarded.ask(None, key("nightly"))).headers["x-admission-tier"] == "batch"
        tenants = [story.one(Classified).tenant for story in guarded.recorder.stories]
    assert tenants == ["acme", "acme", "acme", "nightly"]
    assert issuer.fetches == 1
    assert all(not seen.all(b"authorization") for seen in app.seen)  # no token reaches the engine


async def test_a_token_names_the_tier_up_to_the_best_of_its_tenant_and_the_request_goes_before() -> None:
    issuer = Issuer(ec())
    async with trusting(issuer, tier_claim="tier") as guarded:
        high, critical, none = (issuer.token(tier=tier) for tier in ("high", "critical", "urgent"))
        assert (await guarded.ask(None, bearer(high))).headers["x-admission-tier"] == "high"
        assert (await guarded.ask(None, bearer(high))).headers["x-admission-tier"] == "high"
        clamped = await guarded.ask(None, bearer(critical))
        assert (clamped.headers["x-admission-tier"], clamped.headers["x-admission-clamped-from"]) == (
            "high",
            "critical",
        )
        assert (await guarded.ask(chat(priority="batch"), bearer(high))).headers["x-admission-tier"] == "batch"
        assert (await guarded.ask(None, bearer(none))).is_error(401, "invalid_token", "tier")
        assert (await guarded.ask(None, bearer(issuer.token(tier=1)))).is_error(401, "invalid_token", "tier")


def _bad_tokens(issuer: Issuer) -> dict[str, str]:
    """Tokens that must be refused, by a part of the reason."""
    now = int(time.time())
    good = issuer.token()
    public = issuer.keys[0].as_pem(private=False)
    header, payload = good.split(".")[:2]
    endless = {**json.loads(_decoded(payload)), "exp": 10**400}
    hs = unsigned({"alg": "HS256", "kid": "one"}, json.loads(_decoded(payload)))
    signed = hmac.new(public, hs.rpartition(".")[0].encode(), hashlib.sha256).digest()
    confused = unsigned({"alg": "HS256", "kid": "one"}, json.loads(_decoded(payload)), signed)
    return {
        "expired": issuer.token(exp=now - 31),
        "not valid yet": issuer.token(nbf=now + 90, exp=now + 200),
        "another issuer": issuer.token(iss="https://evil.example"),
        "another audience": issuer.token(aud=["other", "more"]),
        "no time of expiry": issuer.token(exp=None),
        "exp is not a time": issuer.token(exp="soon"),
        "nbf is not a time": issuer.token(nbf=True),
        "exp is not": issuer.token(exp=-(10**400)),  # beyond a float
        "token's signature": unsigned({"alg": "ES256", "kid": "one"}, endless, b"x"),
        "signature is wrong": issuer.token(key=ec("one")),
        "signature is": f"{header}.{payload}.",
        "algorithm": confused,
        "signature algorithm": unsigned({"alg": "none", "kid": "one"}, json.loads(_decoded(payload))),
        "algorithm is not": unsigned({"alg": ["ES256"]}, {}),
        "extensions": unsigned({"alg": "ES256", "kid": "one", "crit": ["exp"]}, {}, b"x"),
        "no tenant claim": issuer.token(tenant=None),
        "tenant claim": issuer.token(tenant=["acme"]),
        "names a tenant that is not known": issuer.token(tenant="stranger"),
        "cannot be read": "a.b.c",
        "send a signed JWT": "..",
        "larger than": issuer.token(more="x" * MOST_TOKEN_BYTES),
    }


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


async def test_each_bad_token_is_refused_for_its_own_reason_and_is_never_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    issuer, app = Issuer(ec()), App()
    async with trusting(issuer, app) as guarded:
        assert (await guarded.ask(None, bearer(issuer.token()))).status == 200
        bad = _bad_tokens(issuer)
        for reason, token in bad.items():
            answer = await guarded.ask(None, bearer(token))
            assert answer.is_error(401, "invalid_token", reason), (reason, answer)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert len(token) < 6 or token not in str(answer.body) + caplog.text
        assert (await guarded.ask(None, "authorization: Bearer sk-nobody")).is_error(401, "invalid_api_key")
        assert guarded.recorder.ends.count("invalid_token") == len(bad)
    assert len(app.seen) == 1
    assert issuer.fetches == 1


async def test_clocks_may_differ_by_the_skew_and_by_no_more() -> None:
    issuer = Issuer(ec())
    now = int(time.time())
    async with trusting(issuer, clock_skew="60s") as guarded:
        assert (await guarded.ask(None, bearer(issuer.token(exp=now - 40)))).status == 200
        assert (await guarded.ask(None, bearer(issuer.token(nbf=now + 40)))).status == 200
        assert (await guarded.ask(None, bearer(issuer.token(exp=now - 80)))).is_error(401, "invalid_token", "expired")


async def test_only_the_algorithms_of_the_policy_are_accepted() -> None:
    issuer = Issuer(ec())
    async with trusting(issuer, algorithms="[RS256]") as guarded:
        assert (await guarded.ask(None, bearer(issuer.token()))).is_error(401, "invalid_token", "algorithm")
    assert issuer.fetches == 0


async def test_a_token_that_was_believed_is_refused_when_it_has_expired() -> None:
    issuer, clock = Issuer(ec()), Clock()
    verifier, _ = await _verifier(issuer, clock)
    token = issuer.token(exp=clock.now_s + 10).encode()
    for passed_s in (0, 39):
        clock.now_s += passed_s
        assert verifier.claims(token, b"digest").tenant == "acme"
    clock.now_s += 2
    with pytest.raises(InvalidToken, match="expired"):
        verifier.claims(token, b"digest")


async def test_two_policies_that_use_the_same_keys_both_forget_what_an_old_one_signed() -> None:
    """A policy that could not replace another has a verifier, too, and the one in force goes on."""
    issuer = Issuer(ec("old"))
    in_force, keys = await _verifier(issuer)
    TokenVerifier(_policy_of("other"), keys)
    token = issuer.token().encode()
    assert in_force.claims(token, b"digest").tenant == "acme"
    issuer.keys = [ec("new")]
    async with issuer.serving():
        keys.place = issuer.url
        await keys.fetch()
    with pytest.raises((InvalidToken, KeysNeeded)):
        in_force.claims(token, b"digest")


# -- the issuer's keys


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _policy_of(place: str) -> JwtPolicy:
    return JwtPolicy(ISSUER, AUDIENCE, place, "tenant", None, 30.0, ALGORITHMS)


async def _verifier(issuer: Issuer, clock: Any = time.time) -> tuple[TokenVerifier, IssuerKeys]:
    """A verifier with the issuer's keys, which were fetched from a server that is gone."""
    async with issuer.serving():
        keys = IssuerKeys(issuer.url, Clock())
        await keys.fetch()
    assert keys.failure is None
    return TokenVerifier(_policy_of(issuer.url), keys, clock), keys


async def test_a_new_key_is_fetched_at_once_and_one_that_is_gone_no_longer_counts() -> None:
    issuer, clock = Issuer(ec("old")), Clock()
    async with trusting(issuer) as guarded:
        keys = guarded.sidecar.identities.keys
        keys._clock = clock
        old = issuer.token()
        assert (await guarded.ask(None, bearer(old))).status == 200
        issuer.keys = [ec("new")]
        clock.now_s += issuer_keys.LEAST_INTERVAL_S
        assert (await guarded.ask(None, bearer(issuer.token()))).status == 200
        assert issuer.fetches == 2
        clock.now_s += issuer_keys.LEAST_INTERVAL_S
        assert (await guarded.ask(None, bearer(old))).is_error(401, "invalid_token", "does not publish")


async def test_random_key_ids_cost_the_issuer_one_fetch_in_five_seconds() -> None:
    issuer, clock = Issuer(ec()), Clock()
    async with trusting(issuer) as guarded:
        keys = guarded.sidecar.identities.keys
        keys._clock = clock
        assert (await guarded.ask(None, bearer(issuer.token()))).status == 200
        flood = [issuer.token(header={"kid": f"random-{number}"}) for number in range(60)]
        for part in (flood[:30], flood[30:]):
            clock.now_s += issuer_keys.LEAST_INTERVAL_S
            answers = await asyncio.gather(*(guarded.ask(None, bearer(token)) for token in part))
            assert all(answer.is_error(401, "invalid_token", "does not publish") for answer in answers)
        assert issuer.fetches == 3
        assert (await guarded.ask(None, bearer(issuer.token()))).status == 200


async def test_while_the_issuer_is_down_old_keys_count_and_unknown_ones_are_not_the_clients_mistake() -> None:
    issuer, clock = Issuer(ec()), Clock()
    async with trusting(issuer) as guarded:
        keys = guarded.sidecar.identities.keys
        keys._clock = clock
        assert (await guarded.ask(None, bearer(issuer.token()))).status == 200
        issuer.status = 500
        clock.now_s += 10 * issuer_keys.REFRESH_S
        assert (await guarded.ask(None, bearer(issuer.token(jti="another")))).status == 200
        refused = await guarded.ask(None, bearer(issuer.token(header={"kid": "new"})))
        assert refused.is_error(503, "issuer_unavailable")
        assert refused.headers["retry-after"] == "5"
        (notice,) = guarded.sidecar.notices()
        assert notice.endswith(f"could not be fetched from {issuer.url}: answered 500; the old ones stay in use")
        issuer.status = 200
        clock.now_s += issuer_keys.LEAST_INTERVAL_S
        assert (await guarded.ask(None, bearer(issuer.token(header={"kid": "new"})))).status == 401
        assert guarded.sidecar.notices() == []


async def test_an_issuer_that_hangs_holds_only_tokens_and_only_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_keys, "FETCH_TIMEOUT_S", 600.0)
    monkeypatch.setattr(issuer_keys, "LONGEST_WAIT_S", 300.0)
    hanging = socket.create_server(("127.0.0.1", 0))
    hanging.setblocking(False)
    port = hanging.getsockname()[1]
    issuer = Issuer(ec())
    async with guarding(App(), policy(jwt_section(f"http://127.0.0.1:{port}/keys"))) as guarded:
        waiting = asyncio.ensure_future(guarded.ask(None, bearer(issuer.token())))
        fetching, _ = await asyncio.get_running_loop().sock_accept(hanging)
        assert (await guarded.ask(None, key("acme"))).status == 200
        assert not waiting.done()
        monkeypatch.setattr(issuer_keys, "LONGEST_WAIT_S", 0.05)
        assert (await guarded.ask(None, bearer(issuer.token()))).is_error(503, "issuer_unavailable")
        assert not waiting.done()
        waiting.cancel()
        task = guarded.sidecar.identities.keys._task  # type: ignore[union-attr]
        task.cancel()
    fetching.close()
    hanging.close()


async def test_keys_that_are_no_use_are_left_out_and_a_file_is_read_like_an_address(tmp_path: Path) -> None:
    issuer = Issuer(ec("good"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weak = RSAKey.generate_key(1024, {"kid": "weak"}).as_dict(private=False)
    entries = json.loads(issuer.key_set())["keys"]
    encrypting = {**ec("encrypting").as_dict(private=False), "use": "enc"}
    entries += [encrypting, weak, {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"}, {"kty": "EC", "kid": "half"}, 7]
    entries += [{**entries[0], "kty": ["EC"]}, {**entries[0], "kty": {}}, {**entries[0], "use": ["sig"]}]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    keys = IssuerKeys(str(tmp_path / "keys.json"))
    await keys.fetch()
    assert list(keys._keys) == ["good"]
    (tmp_path / "keys.json").write_text("{}")
    await keys.fetch()
    assert keys.failure is not None
    assert "keys" in keys.failure
    assert list(keys._keys) == ["good"]


async def test_believed_tokens_are_kept_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.identity.tokens.MOST_KEPT", 3)
    issuer = Issuer(ec())
    verifier, _ = await _verifier(issuer)
    tokens = [issuer.token(jti=str(number)).encode() for number in range(5)]
    for token in tokens:
        verifier.claims(token, hashlib.sha256(token).digest())
    assert len(verifier._kept) == 3
    monkeypatch.setattr(verifier, "_verify", lambda token: pytest.fail("checked again"))
    assert verifier.claims(tokens[4], hashlib.sha256(tokens[4]).digest()).tenant == "acme"


_PARTS = some.binary(max_size=60) | some.sampled_from(
    [b"eyJhbGciOiJFUzI1NiJ9", b"e30", b"W10", b"bnVsbA", b"eyJhbGciOiJFUzI1NiIsImtpZCI6MX0", b"MQ", b"\xff" * 9]
)


@given(some.lists(_PARTS, min_size=3, max_size=3))
def test_whatever_the_bytes_are_a_token_is_refused_and_nothing_else_happens(parts: list[bytes]) -> None:
    clock = Clock()
    keys = IssuerKeys("http://127.0.0.1:1/keys", clock)
    keys._due_s = keys._next_s = float("inf")  # nothing is fetched
    verifier = TokenVerifier(_policy_of("x"), keys)
    token = b".".join(part.replace(b".", b"") for part in parts)
    with pytest.raises((InvalidToken, KeysNeeded, IssuerUnavailable)):
        verifier.claims(token, b"digest")


# -- where it counts


async def test_observing_lets_every_token_pass_and_counts_those_that_enforcing_would_refuse() -> None:
    issuer, app = Issuer(ec()), App()
    async with issuer.serving(), observing(app, policy(jwt_section(issuer.url))) as sidecar:
        asked = bearer(issuer.token())
        assert (await sidecar.ask(None, asked)).status == 200
        first = (await sidecar.until_found(1))[-1]
        assert (first.verdict, first.code) == (Verdict.UNKNOWN, "issuer_unavailable")
        keys = sidecar.sidecar.identities.keys
        await keys.fetched()
        assert (await sidecar.ask(None, asked)).status == 200
        assert (await sidecar.until_found(2))[-1].tenant == "acme"
        assert (await sidecar.ask(None, bearer(issuer.token(tenant="nobody")))).status == 200
        last = (await sidecar.until_found(3))[-1]
        assert (last.verdict, last.code) == (Verdict.REFUSED, "invalid_token")
    assert len(app.seen) == 3


async def test_a_reload_brings_tokens_a_tenant_without_keys_and_takes_them_away(tmp_path: Path) -> None:
    from tests.test_reload import Reloading

    issuer = Issuer(ec())
    write_policy(tmp_path)
    sidecar = AdmissionMiddleware(App(), tmp_path, is_shown=True)
    async with issuer.serving(), serving(sidecar) as served:
        site = Reloading(sidecar, tmp_path, served.port)
        asked = bearer(issuer.token(tenant="keyless"))
        assert (await site.ask(None, asked)).is_error(401, "invalid_api_key")
        (tmp_path / "tenants" / "keyless.yaml").write_text("tenant: keyless\ntier: high\n")
        await site.write(jwt_section(issuer.url))
        assert (await site.ask(None, asked)).headers["x-admission-tier"] == "high"
        await site.write(jwt_section(issuer.url, audience="another"))
        assert (await site.ask(None, asked)).is_error(401, "invalid_token", "audience")
        assert issuer.fetches == 1
        (tmp_path / "tenants" / "keyless.yaml").unlink()
        await site.write()
        assert (await site.ask(None, asked)).is_error(401, "invalid_api_key")


async def test_an_engines_harmless_path_takes_a_token_too() -> None:
    issuer, app = Issuer(ec()), App()
    async with (
        issuer.serving(),
        guarding(app, policy(jwt_section(issuer.url) + "unguarded: deny\n", engine="vllm")) as guarded,
    ):
        assert (await guarded.ask(None, bearer(issuer.token()), path="/tokenize")).status == 200
        assert (await guarded.ask(None, bearer("a.b.c"), path="/tokenize")).status == 401
    assert [seen.all(b"authorization") for seen in app.seen] == [[]]
