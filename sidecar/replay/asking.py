"""How a request asks for its tier: by the door's header, by its tenant's key, or in the engine's own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from sidecar.engines import dialect_of
from sidecar.policy.policy import Api, EngineName

TIER_HEADER = "x-priority"


class By(str, Enum):
    """What tells the server a request's tier."""

    PRIORITY = "priority"
    TIER = "tier"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request of a run says. `header` is the door's tier header; `keys` are the tiers' API keys.

    `api_key` is sent for a tier without one. With `is_control` nobody says anything, and all send `api_key`.
    """

    by: By
    tiers: Sequence[str]
    engine: EngineName = EngineName.NONE
    header: str = TIER_HEADER
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    is_control: bool = False

    def of(self, tier: str, api: Api) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """The headers, and the members of the body, of a request of this tier."""
        headers = self._authorization(tier)
        if self.is_control or self.by is By.KEY:
            return headers, {}
        if self.by is By.TIER:
            return {**headers, self.header: tier}, {}
        dialect = dialect_of(self.engine, None)
        forward = dialect.forward(api, dialect.priority(self.tiers.index(tier), len(self.tiers)))
        own = {name.decode(): value.decode() for name, value in forward.headers}
        return {**headers, **own}, {} if forward.member is None else {"priority": msgspec.json.decode(forward.member)}

    def _authorization(self, tier: str) -> Mapping[str, str]:
        key = self.api_key if self.is_control else self.keys.get(tier, self.api_key)
        return {} if key is None else {"authorization": f"Bearer {key}"}
