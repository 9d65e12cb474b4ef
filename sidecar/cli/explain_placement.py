"""Explanation of the pool and the engines that a policy with `engines` has for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidecar.admission.intake import SizedRequest
from sidecar.admission.model_names import ModelNames
from sidecar.policy.fields import UNBOUNDED
from sidecar.policy.fleet import Affinity, Discovery, EngineAddress, FleetPolicy, offered
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED
from sidecar.pools import Pool
from sidecar.pools.engines import EngineOffer

Found = dict[str, Any]


def of_model(policy: Policy, request: SizedRequest) -> Policy:
    """The policy of the pool that serves a request. Raises InvalidBody or ModelNotFound where none does."""
    model, tenant = request.payload.model, request.classification.tenant
    return policy.of_model(ModelNames(policy).model_for(model, request.body, tenant)) if policy.models else policy


def empty_pool(policy: Policy) -> Pool:
    """The pool of a policy before its first request. Where no engine is known yet, it is one of no bound."""
    known = () if policy.engines is None else _find_engines(policy.engines)
    if policy.engines is None or not known:
        return Pool(policy)
    pool = Pool(policy, weight_percent=policy.engines.affinity.weight_percent)
    pool.set_engines([_offer(engine) for engine in known])
    return pool


def _offer(engine: EngineAddress) -> EngineOffer:
    tokens, requests = map(offered, engine.capacity.size(None, None))
    return EngineOffer(f"{engine.name}#1", tokens, requests, engine.prefill)


def _find_engines(engines: FleetPolicy) -> Sequence[EngineAddress]:
    """The engines that the policy names, or the one of the process that mounts the middleware."""
    if engines.mounted:
        return (EngineAddress(Discovery.MOUNTED.value, "", engines.capacity, engines.prefill),)
    return engines.static


def placement(policy: Policy, pool: Policy, holds: Found) -> Found | None:
    """The engines for a request that holds so much, as JSON types; None for a pool with one engine of no name."""
    if policy.engines is None or pool.engines is None:
        return None
    known = _find_engines(pool.engines)
    fits = [engine.name for engine in known if _holds(engine, holds)]
    return {
        "model": pool.pool.removeprefix(f"{policy.pool}/") if policy.models else None,
        "discovery": pool.engines.discovery.value,
        "engines": [engine.name for engine in known],
        "too_small": [engine.name for engine in known if engine.name not in fits],
        "prompt_tokens": holds["prompt_tokens"],
        "prefill": {
            engine.name: None if engine.prefill == UNLIMITED else engine.prefill
            for engine in known
            if engine.name in fits
        },
        "affinity": _affinity(pool.engines.affinity),
    }


def _holds(engine: EngineAddress, holds: Found) -> bool:
    """True if an engine that is empty has room, as far as the policy says it."""
    tokens, requests = engine.capacity.size(None, None)
    return (tokens is None or holds["tokens"] <= tokens) and (requests is None or holds["requests"] <= requests)


def _affinity(affinity: Affinity) -> Found:
    return {
        "prefix": affinity.prefix,
        "weight": affinity.weight_percent / 100,
        "session": [name.decode() for name in affinity.session],
    }


def placement_lines(found: Found) -> list[str]:
    """Lines for people on the placement."""
    if found["discovery"] == Discovery.MOUNTED.value:
        return ["   that of the process which got the request: no other can run it", *_bound(found)]
    lines = [] if found["model"] is None else [f"   the pool of model {found['model']}"]
    names = ", ".join(found["engines"]) or f"those that {found['discovery']} names"
    lines.append(f"   one of its engines: {names}")
    if found["too_small"]:
        lines.append(f"   never {', '.join(found['too_small'])}: too small for it")
    affinity = found["affinity"]
    caches = f", less {affinity['weight']:g} times what its prefix cache is likely to have of the prompt"
    is_drawn = affinity["weight"] and (affinity["prefix"] or affinity["session"])
    lines.append(f"   the one with the least prompt tokens to prefill{caches if is_drawn else ''}")
    return [*lines, *_bound(found)]


def _bound(found: Found) -> list[str]:
    lines = []
    bounds = {UNBOUNDED if most is None else f"{most:,}" for most in found["prefill"].values()}
    if bounds and bounds != {UNBOUNDED}:
        most = " or ".join(sorted(bounds))
        lines.append(f"   when that has room: its {found['prompt_tokens']:,} prompt tokens count until the first byte,")
        lines.append(f"   and an engine may have {most} of such tokens, or one prompt that is larger")
    return lines
