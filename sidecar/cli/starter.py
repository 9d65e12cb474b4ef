"""Text of a starter policy: the files that `sidecar init` writes, with their comments."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import yaml

from sidecar.apis import infer_api
from sidecar.engines.base import Engine
from sidecar.policy.keys import hash_line
from sidecar.tools.doctor.examination import Recommendation

FEWEST_FOR_RESERVES = 4
"""Requests at once that three tiers can divide: each reserve is at least one of them, and one is left."""
FEWEST_FOR_FIVE = 20
"""Requests at once that five tiers can divide: the reserves, each rounded up, are about half of them."""

_TIERS = {
    "critical": "{reserve: 5%, limit: 30%, always_first: true}  # Incidents: always first, up to its limit.",
    "high": "{reserve: 20%, lend: 60%}      # A person watches the answer appear.",
    "normal": "{reserve: 10%}               # Everything that names no tier.",
    "low": "{reserve: 10%}                  # Work that can wait for minutes.",
    "batch": """                              # Work that can wait for hours, such as nightly runs.
    reserve: 10%
    limit: 60%                         # Keeps 40% of the pool for the other tiers. Raise it where only batch runs.
    queue: {max_requests: 10k, max_wait: 30m}""",
}
_WITHOUT_RESERVES = {
    "high": "{}                             # A person watches the answer appear.",
    "normal": "{}                           # Everything that names no tier.",
    "batch": "{queue: {max_requests: 10k, max_wait: 30m}}  # Work that can wait for hours, such as nightly runs.",
}
_KEYS_OF_A_TIER = """\
#   reserve   the share of the pool that the tier can always get back
#   lend      the share of an idle reserve that other tiers may use; the rest stays free for an instant start
#   limit     the largest share of the pool that the tier may hold
"""


@dataclass(frozen=True, slots=True)
class StarterTiers:
    """The tiers of a starter policy: YAML by name, the best tier that aging reaches, the reason for this choice."""

    bodies: Mapping[str, str]
    ceiling: str
    reason: str


def tiers_for(wanted: int | None, at_once: int | None) -> StarterTiers:
    """Three or five tiers: as many as wanted, or else what an engine that runs so many requests at once can divide."""
    known = "an unknown number of" if at_once is None else f"{at_once:,}"
    reason = f"the engine runs {known} requests at once, and five tiers need {FEWEST_FOR_FIVE} or more"
    if wanted is not None:
        reason = "as many as asked for"
    if (wanted or 5) == 5 and (wanted or (at_once or 0) >= FEWEST_FOR_FIVE):
        return StarterTiers(_TIERS, "normal", reason)
    if at_once is not None and at_once < FEWEST_FOR_RESERVES:
        return StarterTiers(_WITHOUT_RESERVES, "high", f"{reason}; {known} cannot be divided, so no tier has a reserve")
    return StarterTiers({name: _TIERS[name] for name in _WITHOUT_RESERVES}, "normal", reason)


def pool_file(origin: str, engine: type[Engine], capacity: Recommendation, tiers: StarterTiers) -> str:
    """The text of `policy.yaml`. `origin` is what it is written for, printable."""
    number = {3: "Three", 5: "Five"}[len(tiers.bodies)]
    lines = "\n".join(f"  {name}: {body}" for name, body in tiers.bodies.items())
    return f"""\
{_comment(f"Starter policy, written by `sidecar init` for {origin}.")}
# Check a change with `sidecar check`. A running sidecar applies it within a second, without a restart.
# `sidecar init --example --dir example/` writes a longer example.

# observe: every request passes at once, and `sidecar observed` reports what enforcing would have done.
# enforce: requests wait, and are refused, as this policy says.
mode: observe

engine: {engine.name}

{_comment(f"The size of the pool, in tokens and requests: {capacity.reason}.")}
{capacity.yaml}

# A request that has waited for 5 minutes counts as one tier more important, but never as better than {tiers.ceiling}.
aging: {{promote_after: 5m, ceiling: {tiers.ceiling}}}

{_comment(f"Most important first. {number} tiers: {tiers.reason}.")}
{"" if tiers.bodies is _WITHOUT_RESERVES else _KEYS_OF_A_TIER}tiers:
{lines}

default_tier: normal
anonymous: normal    # The tier of requests without an API key; `deny` refuses them. An unknown key is always refused.

# The paths on which requests are admitted. Other paths pass only if they read, or if they are known to be harmless.
endpoints:
{_endpoints(engine)}
tenants: tenants/*.yaml
"""


def tenant_file(name: str, tier: str, key: str) -> str:
    """The text of a tenant's file. Only the hash of `key` is in it."""
    plain = name if yaml.safe_load(name) == name else f'"{name}"'
    return f"""\
# A tenant: one client, or all that share its keys. Written by `sidecar init`.
tenant: {plain}

# Hashes of its API keys. `sidecar keys new` makes a key; two may stand here while clients change to a new one.
keys:
  - "{hash_line(key)}"

tier: {tier}
# max_tier: {tier}    # The best tier that it may ask for, with the header `x-priority`. Default: its own tier.
# limits: {{requests_per_minute: 600, concurrent_requests: 32}}
"""


def tier_by_tenant(tenants: Mapping[str, str | None], tiers: Collection[str]) -> dict[str, str]:
    """A tier for each tenant: the one it names, else `high` for the first, `batch` for the last, `normal` between."""
    last = len(tenants) - 1
    usual = ["high" if place == 0 else "batch" if place == last else "normal" for place in range(len(tenants))]
    found = {name: tier or usual[place] for place, (name, tier) in enumerate(tenants.items())}
    for name, tier in found.items():
        if tier not in tiers:
            raise ValueError(f"tenant {name}: there is no tier {tier}; the tiers are {', '.join(tiers)}")
    return found


def _comment(text: str) -> str:
    return textwrap.fill(text, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _endpoints(engine: type[Engine]) -> str:
    """The paths of the engine whose requests admission can size."""
    known = {path: api for path, api in engine.routes.generating.items() if api is not None}
    bodies = {path: "{}" if infer_api(path) else f"{{api: {api.value}}}" for path, api in known.items()}
    return "".join(f"  {path}: {body}\n" for path, body in bodies.items())
