"""Texts of a starter policy: its tiers, the pool's file and the tenants'."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import yaml

from sidecar.apis import infer_api
from sidecar.engines.base import Engine
from sidecar.policy.pool_file import DEFAULT_MAX_BODY, MAX_CHOICES
from sidecar.policy.tenant_keys import hash_line
from sidecar.policy.warnings import own_levels, takes_whole_numbers
from sidecar.tools.doctor.recommendation import Recommendation

FEWEST_FOR_RESERVES = 4
"""Requests at once that three tiers can divide: each reserve is at least one of them, and one is left."""
FEWEST_FOR_FIVE = 20
"""Requests at once that five tiers can divide: the reserves, each rounded up, are about half of them."""

_TIERS = {
    "critical": """                           # Incidents: always first, up to its limit.
    reserve: 5%
    limit: 30%
    always_first: true
    preempt_after: 250ms
    slo: {queue_wait: 2s, starvation: 10s}""",
    "high": """                               # A person watches the answer appear.
    reserve: 20%
    preempt_after: 500ms
    slo: {queue_wait: 2s, starvation: 1m}""",
    "normal": """                             # Everything that names no tier.
    reserve: 10%
    slo: {queue_wait: 1m, starvation: 5m}""",
    "low": """                                # Work that can wait for minutes.
    reserve: 10%
    preemptible: true
    slo: {starvation: 15m}""",
    "batch": """                              # Work that can wait for hours, such as nightly runs.
    reserve: 10%
    preemptible: true
    queue: {max_requests: 10k, max_wait: 30m}
    slo: {starvation: 30m}""",
}
_INTERACTIVE, _PROMISED = "high", "slo: {queue_wait: 2s, starvation: 1m"
_UNKNOWN_SPEED = (
    "# ttft: ?, tpot: ?, hold: 97%    in its slo keep it fast; `sidecar doctor --upstream URL` says the times"
)
_THREE = ("high", "normal", "batch")
_PREEMPTION, _RESERVE = "preempt", "reserve:"
_OF_AN_EMERGENCY = "    reserve: 5%\n"
"""So small that it is of use only to a tier that takes it back from others."""
_KEYS_OF_A_RESERVE = """\
#   reserve   the share of the pool that the tier can always get back
#   lend      the share of an idle reserve that other tiers may use. Default: all of it, so that nothing stays idle
#   limit     the largest share of the pool that the tier may hold
"""
_KEYS_OF_PREEMPTION = """\
#   preempt_after   the wait after which a request takes room back from less important tiers that are `preemptible`: of
#             requests that have sent nothing of their answer. They wait again, and none is lost
"""
_SLO = """\
#   slo       what the tier promises: the alerts compare with it. With `ttft`, `tpot` and `hold: 97%` less important
#             work fills the pool only so far that 97% of the tier's requests meet both; without `hold` it may fill it
"""


DENY = "deny"
_ANONYMOUS = "The tier of requests without an API key; `deny` refuses them. An unknown key is always refused."
_DENIED = "Requests without an API key get 401, as those with an unknown one; a tier here lets them in."
_PUBLIC = (
    " Before an engine, other paths need a key, too, but for its liveness page: `public: [/health, /metrics]` opens "
    "more."
)
_PATHS = (
    "The paths on which requests are admitted. Before an engine, other paths pass only if they read, or are known to "
    "be harmless. Mounted in an app of your own, they pass unless they may run the model."
)
_PATHS_OF_AN_APP = (
    "The paths of your app on which requests are admitted: those that call the engine. Its other routes pass, unless "
    "they may run the model. A path whose body is not OpenAI's: `/summarize: {api: generic, tokens: 4k}`."
)
_ENGINE_OF_AN_APP = """\
# none: your code calls the engine, and reads tier and priority from `sidecar.granted()`. With vllm, sglang, ... the
# request that your code gets carries that engine's priority, and your code passes it on.
"""


@dataclass(frozen=True, slots=True)
class StarterTiers:
    """The tiers of a starter policy: YAML by name, the best tier that aging reaches, the reason for this choice."""

    bodies: Mapping[str, str]
    ceiling: str
    reason: str

    def has(self, key: str) -> bool:
        """True if a tier has a key that begins so."""
        return any(f"\n    {key}" in body for body in self.bodies.values())


def tiers_for(wanted: int | None, at_once: int | None, who: str, *, preempts: bool) -> StarterTiers:
    """Three or five tiers: as many as wanted, or else what an engine that runs so many requests at once can divide."""
    left_out = () if preempts else (_PREEMPTION,)
    known = "an unknown number of" if at_once is None else f"{at_once:,}"
    reason = f"{who} {known} requests at once, and five tiers need {FEWEST_FOR_FIVE} or more"
    if wanted is not None:
        reason = "as many as asked for"
    if (wanted or 5) == 5 and (wanted or (at_once or 0) >= FEWEST_FOR_FIVE):
        return StarterTiers(_bodies(_TIERS, left_out), "normal", reason)
    if at_once is not None and at_once < FEWEST_FOR_RESERVES:
        bodies = _bodies(_THREE, (_PREEMPTION, _RESERVE))
        return StarterTiers(bodies, "high", f"{reason}; {known} cannot be divided, so no tier has a reserve")
    return StarterTiers(_bodies(_THREE, left_out), "normal", reason)


def with_promise(tiers: StarterTiers, promise: str | None, at_once: int | None) -> StarterTiers:
    """The tiers with a promise of the interactive one, or with a comment that says how to find it.

    Where the reserves of the others are half of an engine, nothing can be promised.
    """
    if at_once == FEWEST_FOR_RESERVES:
        return tiers
    body = tiers.bodies[_INTERACTIVE]
    commented = f"{body}\n    {_UNKNOWN_SPEED}"
    promised = commented if promise is None else body.replace(_PROMISED, f"{_PROMISED}, {promise}")
    return replace(tiers, bodies={**tiers.bodies, _INTERACTIVE: promised})


def _bodies(names: Collection[str], left_out: tuple[str, ...]) -> Mapping[str, str]:
    """The YAML of these tiers, without the lines that begin so."""
    dropped = _OF_AN_EMERGENCY if _PREEMPTION in left_out else ""
    return {
        name: "\n".join(line for line in body.split("\n") if not line.strip().startswith(left_out))
        for name, body in ((name, _TIERS[name].replace(dropped, "")) for name in names)
    }


def pool_file(
    origin: str,
    engine: type[Engine],
    capacity: Recommendation,
    tiers: StarterTiers,
    anonymous: str,
    *,
    is_mounted: bool = False,
) -> str:
    """The text of `policy.yaml`. `origin` is what it is written for, printable; an app of one's own if `is_mounted`."""
    runs = "app" if is_mounted else "sidecar"
    number = {3: "Three", 5: "Five"}[len(tiers.bodies)]
    lines = "\n".join(f"  {name}: {body}" for name, body in tiers.bodies.items())
    known = {path: api for path, api in engine.routes.generating.items() if api is not None}  # those that can be sized
    bodies = {path: "{}" if infer_api(path) else f"{{api: {api.value}}}" for path, api in known.items()}
    endpoints = "".join(f"  {path}: {body}\n" for path, body in bodies.items())
    return f"""\
{_comment(f"Starter policy, written by `sidecar init` for {origin}.")}
# Check a change with `sidecar check`. A running {runs} applies it within a second, without a restart.
# `sidecar init --example --dir example/` writes a longer example.

# observe: every request passes at once, and `sidecar observed` reports what enforcing would have done.
# enforce: requests wait, and are refused, as this policy says.
mode: observe

{_ENGINE_OF_AN_APP if is_mounted else ""}engine: {engine.name}

{_comment(f"The size of the pool, in tokens and requests: {capacity.reason}.")}
{capacity.yaml}

# A request that has waited for 5 minutes counts as one tier more important, but never as better than {tiers.ceiling}.
aging: {{promote_after: 5m, ceiling: {tiers.ceiling}}}

{_comment(f"Most important first. {number} tiers: {tiers.reason}.")}
{_KEYS_OF_A_RESERVE * tiers.has(_RESERVE)}{_KEYS_OF_PREEMPTION * tiers.has(_PREEMPTION)}{_SLO}tiers:
{lines}

default_tier: normal

{_comment(_ANONYMOUS if anonymous != DENY else _DENIED if is_mounted else _DENIED + _PUBLIC)}
anonymous: {anonymous}
{_sources(engine, tiers)}
{_comment(_PATHS_OF_AN_APP if is_mounted else _PATHS)}
endpoints:
{endpoints}
# The largest request body. Pictures come in it as base64, a third larger than their files: clients that send several
# photos need 32MiB. And the most choices (`n`, `best_of`) that one request may ask for.
max_body: {DEFAULT_MAX_BODY}
max_choices: {MAX_CHOICES}

tenants: tenants/*.yaml
"""


def _sources(engine: type[Engine], tiers: StarterTiers) -> str:
    """The sources of a tier, where the engine's own clients send whole numbers in the same member."""
    if not takes_whole_numbers(engine):
        return ""
    names = list(tiers.bodies)
    return f"""
# Where a request's tier comes from: the first that answers wins. With `engine`, a number in a body's `priority` is
# {engine.title}'s own, from each tier's number on, {engine.direction()} ones first. A name there is a tier's. In the
# header, and in the body without `engine`, a number goes from 0 to 1, and 1 is the most important.
sources: [engine, body, header, endpoint, key]
engine_levels: {own_levels(engine, names, names.index("normal"))}
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
