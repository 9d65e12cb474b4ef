"""The identities of one process: its token verifier, and the issuer's keys, across changes of the policy."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.identity.issuer_keys import IssuerKeys
from sidecar.identity.tokens import TokenVerifier
from sidecar.policy.identity import JwtPolicy


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
