"""Names of models: the choice of a request's pool by its model, its charges, and the models that its tenant may use.

The engine reads `model` in the client's own body, so the choice must read the same one: a body that has it twice is
refused. Names are compared as they are. Another case, white space or a look-alike letter is another name, for an engine
as well.

What a tenant may use is judged by the name that its client sends, an alias as any other name. A model that it may not
use gets the answer of one that is not there, in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sidecar.errors import InvalidBody, ModelNotFound
from sidecar.payload.edit import count, insert, remove
from sidecar.policy.cost import TokenCost
from sidecar.policy.model import Policy
from sidecar.policy.problems import quoted
from sidecar.policy.tenant import Account, Tenant

MOST_NAMED = 20
"""Models that an error lists. `GET /v1/models` lists all."""
_SHOWN = 200
"""Characters of a client's text that are looked at before it is shown."""


ADAPTERS = ("lora_path", "lora_request")
"""Fields beside `model` in which SGLang and TensorRT-LLM take an adapter."""


class ModelNames:
    """The models of one policy by the names that clients may call them: `called`. `models` are in the file's order.

    `renamed` has the names of the engines by those of clients that no engine knows. `are_bounded`: there is a tenant
    that may use certain models only. `are_listed_here`: clients do not get the engine's own list. They `need_tenant`:
    what it shows depends on who asks. They `have_charges`: not all tokens count as one, in one account.
    """

    def __init__(self, policy: Policy) -> None:
        self.models: Sequence[str] = tuple(policy.models)
        self.called: Mapping[str, str] = policy.called_models
        self.renamed: Mapping[str | None, str] = {alias: one.model for alias, one in policy.aliases.items()}
        self.are_bounded = any(tenant.models is not None for tenant in policy.named.values())
        self.need_tenant = self.are_bounded or bool(self.models)
        self.are_listed_here = self.are_bounded or bool(self.called)
        self.have_charges = policy.has_costs or any(tenant.limits.models for tenant in policy.named.values())
        costs = {name: policy.cost_for(name) for name in (None, *policy.models)}
        self._costs = {name: None if cost.is_plain else cost for name, cost in costs.items()}

    def refuse_others(self, tenant: Tenant, named: str | None, body: bytes | None) -> None:
        """Raises ModelNotFound for a model that the tenant may not use, and InvalidBody where that is not certain.

        `body` is None where it is not read.
        """
        if body is None:
            raise InvalidBody("model: not read in an upload, and not every model is yours; send JSON", param="model")
        _refuse_two(body)
        if b"lora_" in body or b"\\u" in body:
            for field in ADAPTERS:
                if count(body, field):
                    raise InvalidBody(f"{field}: not allowed here; name the adapter as model", param=field)
        named = named or self.meant(None)
        if not named:
            raise self._missing(tenant)
        if not tenant.may_use(named):
            raise self.not_found(named, tenant)

    def usable(self, tenant: Tenant) -> Sequence[str]:
        """The names that a tenant may send, as far as they are known here."""
        return [name for name in self.called if tenant.may_use(name)]

    def model_for(self, named: str | None, body: bytes, tenant: Tenant | None = None) -> str:
        """The model whose pool serves a request with this `model`.

        A request that names none gets the only model there is, as engines do it. Raises InvalidBody where there are
        several, or where the body names two, and ModelNotFound for a name that no pool serves.
        """
        _refuse_two(body)
        model = self.meant(named)
        if model is not None:
            return model
        raise self.not_found(named, tenant) if named else self._missing(tenant)

    def meant(self, named: str | None) -> str | None:
        """The model that a request with this `model` is for; None where there is none."""
        if named:
            return self.called.get(named)
        return self.models[0] if len(self.models) == 1 else None

    def cost(self, named: str | None) -> TokenCost | None:
        """The weights of the tokens of a request with this `model`; None where each counts as one."""
        return self._costs.get(self.meant(named), self._costs[None])

    def accounts(self, tenant: Tenant, named: str | None) -> tuple[Account, ...]:
        """The accounts of such a request beside its tenant's own."""
        model = self.meant(named)
        account = None if model is None else tenant.account_at(model)
        return () if account is None else (account,)

    def not_found(self, named: str, tenant: Tenant | None) -> ModelNotFound:
        """The refusal of a name that no pool serves, or not for this tenant."""
        shown, others = quoted(named[:_SHOWN]), self._list(tenant)
        return ModelNotFound(f"no pool serves the model {shown}; {others}", param="model")

    def _missing(self, tenant: Tenant | None) -> InvalidBody:
        return InvalidBody(f"model: missing; {self._list(tenant)}", param="model")

    def _list(self, tenant: Tenant | None) -> str:
        """The names that would be right: those of the pools, of a bounded tenant its own."""
        names = self.models
        if tenant is not None and tenant.models is not None:
            names = self.usable(tenant) if self.models else tenant.models
        if not names:
            return "GET /v1/models lists those there are"
        listed = ", ".join(names[:MOST_NAMED])
        more = len(names) - MOST_NAMED
        return f"send one of {listed}" + (f" and {more} more (GET /v1/models lists them)" if more > 0 else "")


def with_model(body: bytes, name: str) -> bytes:
    """A request's body with another model. Every other byte stays."""
    return insert(remove(body, ("model",)), "model", msgspec.json.encode(name))


def _refuse_two(body: bytes) -> None:
    # The first look takes microseconds: keys may be written with escapes.
    if (body.count(b'"model"') > 1 or b"\\u" in body) and count(body, "model") > 1:
        raise InvalidBody("model: given twice; send it once", param="model")
