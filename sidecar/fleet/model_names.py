"""Names of the models that have pools of their own, and the choice of a request's model.

The engine reads `model` in the client's own body, so the choice must read the same one: a body that has it twice is
refused. Names are compared as they are. Another case, white space or a look-alike letter is another name, for an engine
as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidecar.errors import InvalidBody, ModelNotFound
from sidecar.payload.edit import count
from sidecar.policy.model import Policy
from sidecar.policy.problems import quoted

MOST_NAMED = 20
"""Models that an error lists. `GET /v1/models` lists all."""
_SHOWN = 200
"""Characters of a client's text that are looked at before it is shown."""


class ModelNames:
    """The models of one policy by the names that clients may call them: `called`. `models` are in the file's order."""

    def __init__(self, policy: Policy) -> None:
        self.models: Sequence[str] = tuple(policy.models)
        self.called: Mapping[str, str] = policy.called_models

    def model_for(self, named: str | None, body: bytes) -> str:
        """The model whose pool serves a request with this `model`.

        A request that names none gets the only model there is, as engines do it. Raises InvalidBody where there are
        several, or where the body names two, and ModelNotFound for a name that no pool serves.
        """
        if _may_name_it_twice(body) and count(body, "model") > 1:
            raise InvalidBody("model: given twice; send it once", param="model")
        model = self.meant(named)
        if model is not None:
            return model
        if not named:
            raise InvalidBody(f"model: missing; send one of {self._list()}", param="model")
        raise self.not_found(named)

    def meant(self, named: str | None) -> str | None:
        """The model that a request with this `model` is for; None where there is none."""
        if named:
            return self.called.get(named)
        return self.models[0] if len(self.models) == 1 else None

    def not_found(self, named: str) -> ModelNotFound:
        """The refusal of a name that no pool serves."""
        return ModelNotFound(
            f"no pool serves the model {quoted(named[:_SHOWN])}; send one of {self._list()}", param="model"
        )

    def _list(self) -> str:
        listed = ", ".join(self.models[:MOST_NAMED])
        more = len(self.models) - MOST_NAMED
        return listed if more <= 0 else f"{listed} and {more} more (GET /v1/models lists them)"


def _may_name_it_twice(body: bytes) -> bool:
    """A first look, which takes microseconds: keys may be written with escapes."""
    return body.count(b'"model"') > 1 or b"\\u" in body
