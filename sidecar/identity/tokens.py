"""Signed bearer tokens (JSON Web Tokens, RFC 7519): which of them are believed, and what they say.

A token is believed where its algorithm is one that the policy accepts, its issuer, audience and times are right, and
its signature is of one of the issuer's keys. It is kept, by its hash, until it expires: the next request with the same
token costs a look-up. A refusal says which check failed, and repeats nothing of the token.
"""

from __future__ import annotations

import base64
import binascii
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from sidecar.errors import InvalidToken
from sidecar.identity.issuer_keys import IssuerKeys
from sidecar.policy.identity import JwtPolicy

MOST_TOKEN_BYTES = 16 * 1024
MOST_KEPT = 10_000
"""Tokens that are kept: a few hundred bytes each."""
_LATEST_S = 1e12


class Claims(NamedTuple):
    """The claims that count. `tier` is None where the token names none; `expires_s` is a wall-clock time."""

    tenant: str
    tier: str | None
    expires_s: float


def is_token(key: bytes) -> bool:
    """True if a bearer token has the form of a JWT: three parts, with dots between."""
    return key.count(b".") == 2


class TokenVerifier:
    """Believes or refuses tokens by one policy. `clock` is the wall clock, in seconds."""

    def __init__(self, policy: JwtPolicy, keys: IssuerKeys, clock: Callable[[], float] = time.time) -> None:
        self._policy = policy
        self._keys = keys
        self._clock = clock
        self._kept: dict[bytes, Claims] = {}
        self._key_changes = keys.changes

    def claims(self, token: bytes, digest: bytes) -> Claims:
        """Claims of a token; `digest` is its hash. Raises InvalidToken, KeysNeeded or IssuerUnavailable."""
        if self._key_changes != self._keys.changes:  # a key that is gone must not speak through what it signed
            self._key_changes = self._keys.changes
            self._kept.clear()
        kept = self._kept.get(digest)
        if kept is not None:
            if self._clock() <= kept.expires_s:
                self._keys.refresh_if_due()
                return kept
            del self._kept[digest]
        claims = self._verify(token)
        if len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]  # the oldest
        self._kept[digest] = claims
        return claims

    def _verify(self, token: bytes) -> Claims:
        if len(token) > MOST_TOKEN_BYTES:
            raise InvalidToken(f"the token is larger than {MOST_TOKEN_BYTES} bytes; send a smaller one")
        header_part, payload_part, _ = token.split(b".")
        header, payload = _member(header_part), _member(payload_part)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._policy.algorithms:
            raise InvalidToken("the token's signature algorithm is not accepted here; ask the operator which are")
        if "crit" in header:
            raise InvalidToken("the token has extensions (crit) that are not known here; send one without")
        if key_id is not None and not isinstance(key_id, str):
            raise _unreadable()
        # Before the signature: a token that is refused anyway must not make the issuer's keys be fetched.
        expires_s = self._check_claims(payload)
        self._check_signature(token, str(algorithm), self._keys.key(key_id))
        tier_claim = self._policy.tier_claim
        tier = None if tier_claim is None else payload.get(tier_claim)
        if tier is not None and not isinstance(tier, str):
            raise InvalidToken("the token's tier claim is not a text; ask the operator which tiers there are")
        tenant = payload.get(self._policy.tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise InvalidToken(
                "the token has no tenant claim that is a text; ask the operator which claim names the tenant"
            )
        return Claims(tenant, tier, expires_s)

    def _check_claims(self, payload: dict[str, Any]) -> float:
        """Checks everything but the signature. Returns the time until which the token is believed."""
        policy, now_s, skew_s = self._policy, self._clock(), self._policy.clock_skew_s
        if payload.get("iss") != policy.issuer:
            raise InvalidToken("the token is of another issuer (iss) than the one that is trusted here")
        audience = payload.get("aud")
        if policy.audience not in (audience if isinstance(audience, list) else [audience]):
            raise InvalidToken("the token is for another audience (aud); ask the issuer for one for this service")
        expires_s, begins_s = _time(payload, "exp"), _time(payload, "nbf")
        if expires_s is None:
            raise InvalidToken("the token has no time of expiry (exp); ask the issuer for one that expires")
        if now_s > expires_s + skew_s:
            raise InvalidToken("the token has expired; get a new one")
        if begins_s is not None and now_s < begins_s - skew_s:
            raise InvalidToken("the token is not valid yet (nbf); wait, or set the clocks")
        return expires_s + skew_s

    def _check_signature(self, token: bytes, algorithm: str, key: Any) -> None:
        from joserfc import jws
        from joserfc.errors import JoseError

        if key is None:
            raise InvalidToken("the token is signed with a key that its issuer does not publish; get a new one")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the name EdDSA, which RFC 9864 replaced and issuers still write
                # Raises where the key is not one for the algorithm, too.
                jws.deserialize_compact(token, key, algorithms=[algorithm], registry=_registry(algorithm))
        except (JoseError, ValueError, TypeError):
            raise InvalidToken("the token's signature is wrong; get a new token") from None


def _unreadable() -> InvalidToken:
    return InvalidToken("the token cannot be read; send a signed JWT, or an API key that is known here")


def _member(part: bytes) -> dict[str, Any]:
    """The JSON object in one part of a token. Raises InvalidToken."""
    try:
        raw = base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
        found = msgspec.json.decode(raw)
    except (binascii.Error, ValueError, RecursionError):
        raise _unreadable() from None
    if not isinstance(found, dict):
        raise _unreadable()
    return found


def _time(payload: dict[str, Any], claim: str) -> float | None:
    """A time in seconds since 1970; None where the claim is not there. Raises InvalidToken for anything else."""
    value = payload.get(claim)
    if value is None:
        return None
    # JSON's numbers may have hundreds of digits, and a float may not.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < -_LATEST_S:
        raise InvalidToken(f"the token's {claim} is not a time in seconds; ask the issuer for another one")
    return float(min(value, _LATEST_S))


def _registry(algorithm: str) -> Any:
    """Bounds that are ours: joserfc's own would refuse what `MOST_TOKEN_BYTES` allows."""
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=[algorithm], strict_check_header=False)
    registry.max_header_length = registry.max_payload_length = registry.max_signature_length = MOST_TOKEN_BYTES
    return registry


# -- The identities of one process: its token verifier, and the issuer's keys, across changes of the policy.


class Identities:
    """Gives each policy its verifier. What was fetched stays, as long as the place of the keys is the same."""

    def __init__(self) -> None:
        self._policy: JwtPolicy | None = None
        self._verifier: TokenVerifier | None = None
        self.keys: IssuerKeys | None = None

    def verifier(self, policy: JwtPolicy | None) -> TokenVerifier | None:
        """The verifier of a policy's tokens; None where it accepts none."""
        if policy != self._policy:
            self._policy = policy
            if policy is None:
                self._verifier = self.keys = None
            else:
                if self.keys is None or self.keys.place != policy.key_set:
                    self.keys = IssuerKeys(policy.key_set)
                self._verifier = TokenVerifier(policy, self.keys)
        return self._verifier

    def notices(self) -> Sequence[str]:
        """A problem for the operator: an issuer whose keys could not be fetched."""
        problem = None if self.keys is None else self.keys.problem()
        return () if problem is None else (problem,)
