"""Charges of a request by its model: the weights of its tokens, and the accounts beside its tenant's own."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.admission.usage import UsageReader
from sidecar.policy.cost import TokenCost
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Account, Tenant


class ChargesByModel:
    """The weights of each model, by the names that clients call it; the name of the only one may be left out."""

    def __init__(self, policy: Policy) -> None:
        called = dict(policy.called_models) if policy.models else {}
        if len(policy.models) == 1:
            called[""] = next(iter(policy.models))
        self._called: Mapping[str, str] = called
        self._costs = {name: _weighted(policy.cost_for(name)) for name in policy.models}
        self._of_others = _weighted(policy.cost_for(None))

    def cost(self, model: str | None) -> TokenCost | None:
        """The weights of a model's tokens; None where each counts as one."""
        return self._costs.get(self._called.get(model or "", ""), self._of_others)

    def accounts(self, tenant: Tenant, model: str | None) -> tuple[Account, ...]:
        """The accounts of a request beside its tenant's own."""
        called = self._called.get(model or "")
        account = None if called is None else tenant.account_at(called)
        return () if account is None else (account,)


def charges_by_model(policy: Policy) -> ChargesByModel | None:
    """The charges of a policy; None where all tokens count as one, and in one account."""
    has_accounts = any(tenant.limits.models for tenant in policy.named.values())
    return ChargesByModel(policy) if has_accounts or policy.has_costs else None


def weighed(cost: TokenCost | None, usage: UsageReader, prompt_tokens: int, tokens: int) -> int:
    """The count for `tokens` of an answer's usage. `prompt_tokens` is the estimate of its prompts."""
    if cost is None:
        return tokens
    prompt = min(tokens, prompt_tokens if usage.input_tokens is None else usage.input_tokens)
    return cost.of(prompt, usage.cached_tokens or 0, tokens - prompt)


def _weighted(cost: TokenCost) -> TokenCost | None:
    return None if cost.is_plain else cost
