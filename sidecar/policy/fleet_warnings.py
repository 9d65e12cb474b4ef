"""Warnings about the engines and models of a valid policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import chain

from sidecar.apis import MODELS_PATH
from sidecar.durations import policy_duration
from sidecar.policy.capacity import Capacity
from sidecar.policy.fleet import Discovery, EngineAddress, FleetPolicy
from sidecar.policy.model import Policy
from sidecar.policy.problems import Found, Path, printable, quoted, suggestion

FAR_SMALLER = 10
"""An engine so many times smaller than the largest is more often a missing zero than a smaller machine."""
SLOW_ANSWER_TOKENS_S = 20
"""Output tokens a second that one answer gets from a busy engine: a slow one, faster than people read."""
SLOWEST_EJECTION_S = 60.0
"""An engine that hangs for longer than this before it is taken out has as many requests as it can hold."""


def fleet_warnings(policy: Policy) -> Found:
    """The warnings about the engines as far as they are known: those of `Policy.of_engines`, or of the policy."""
    fleet = policy.engines
    if fleet is None:
        return
    yield from _far_smaller(fleet)
    yield from _bounds_that_differ(fleet)
    yield from _without_a_model(policy, fleet)
    yield from _without_an_engine(policy, fleet)
    yield from _health(policy, fleet)
    yield from _drain(policy, fleet)


def _at(fleet: FleetPolicy, place: int, *key: str) -> Path:
    """Where an engine stands; the engine list's own key where it stands in that."""
    return ("engines", "static", place, *key) if fleet.discovery is Discovery.STATIC else ("engines", "file")


_DIMENSIONS: tuple[tuple[str, Callable[[Capacity], int | None]], ...] = (
    ("tokens", lambda capacity: capacity.tokens),
    ("requests", lambda capacity: capacity.requests),
)


def _list(fleet: FleetPolicy) -> Iterator[tuple[int, EngineAddress, Capacity]]:
    for place, engine in enumerate(fleet.static):
        if not engine.capacity.is_read:
            yield place, engine, engine.capacity


def _far_smaller(fleet: FleetPolicy) -> Found:
    for kind, amount in _DIMENSIONS:
        sizes = [(size, place, engine) for place, engine, one in _list(fleet) if (size := amount(one)) is not None]
        most, _, largest = max(sizes, key=lambda one: one[0], default=(0, 0, None))
        for size, place, engine in sizes:
            if largest is not None and size * FAR_SMALLER < most:
                yield (
                    _at(fleet, place, "capacity"),
                    f"engine {engine.name} holds {size:,} {kind}, less than a tenth of {largest.name} with {most:,}: "
                    "larger requests never enter it; see whether a zero is missing",
                )


def _bounds_that_differ(fleet: FleetPolicy) -> Found:
    for kind, amount in _DIMENSIONS:
        bounds = [(amount(one) is not None, place, engine) for place, engine, one in _list(fleet)]
        if any(is_bound for is_bound, _, _ in bounds):
            for is_bound, place, engine in bounds:
                if not is_bound:
                    yield (
                        _at(fleet, place, "capacity"),
                        f"bounds no {kind} of engine {engine.name}, while other engines have a bound: the pool has "
                        f"then none, and no tier a reserve of {kind}; write {kind} for each engine, or for none",
                    )


def _without_a_model(policy: Policy, fleet: FleetPolicy) -> Found:
    served = [model.engines for model in policy.models.values()]
    if not served or None in served:
        return
    named = set(chain.from_iterable(names or () for names in served))
    for place, engine in enumerate(fleet.static):
        if engine.name not in named:
            yield (
                _at(fleet, place),
                f"engine {engine.name} serves no model, and gets no request; name it in a model, or remove it",
            )


def _without_an_engine(policy: Policy, fleet: FleetPolicy) -> Found:
    """Of an engine list that was read: a name that the policy has, and the list has not."""
    listed = {engine.name for engine in fleet.static}
    for name, model in policy.models.items():
        missing = [engine for engine in model.engines or () if listed and engine not in listed]
        if missing:
            yield (
                ("models", name, "engines"),
                f"the engine list has no {', '.join(map(printable, missing))}; write the names of the list, or add "
                "them there",
            )


def model_warnings(policy: Policy) -> Found:
    """Tenants that may use certain models only: names that no model has, and ways around them."""
    called = list(policy.called_models) if policy.models else []
    bounded = [tenant for tenant in policy.named.values() if tenant.models is not None]
    for tenant in bounded:
        for place, pattern in enumerate(tenant.models or ()):
            if called and not any(fnmatchcase(name, pattern) for name in called):
                near = suggestion(pattern, called, "the models are")
                yield ("tenants", tenant.name, "models", place), f"{quoted(pattern)} matches no model; {near}"
    if bounded and policy.anonymous is not None:
        yield (
            ("anonymous",),
            f"requests without a key may use every model, also those that tenant {bounded[0].name} may not; write deny",
        )
    if bounded and MODELS_PATH in (policy.public or ()):
        yield ("public",), f"{MODELS_PATH} shows every model to whoever asks without a key; remove it here"


def _health(policy: Policy, fleet: FleetPolicy) -> Found:
    health, own = fleet.health, policy.engine.health_page
    if health.path == "/health" != own:
        yield (
            ("engines", "health", "path"),
            f"{policy.engine.title} may compute a token for each probe of /health; leave this out: {own} costs nothing",
        )
    if health.every_s * health.fail > SLOWEST_EJECTION_S:
        yield (
            ("engines", "health"),
            f"an engine that hangs is taken out after {policy_duration(health.every_s * health.fail)}, and gets "
            "requests until then; probe more often, or write a smaller fail",
        )


def _drain(policy: Policy, fleet: FleetPolicy) -> Found:
    """A drain that ends before a long answer that is expected, by the tiers' defaults and the tenants' limits."""
    limits = [tenant.limits.max_output_tokens for tenant in policy.named.values()]
    longest = max(*(tier.default_output_tokens for tier in policy.tiers), 0, *(limit or 0 for limit in limits))
    needed_s = longest / SLOW_ANSWER_TOKENS_S
    if fleet.drain_timeout_s < needed_s:
        yield (
            ("engines", "drain_timeout"),
            f"an answer of {longest:,} tokens takes {policy_duration(float(round(needed_s)))} at "
            f"{SLOW_ANSWER_TOKENS_S} a second, and a drain waits {policy_duration(fleet.drain_timeout_s)}: an engine "
            "that is stopped after it cuts such answers; write a longer time",
        )
