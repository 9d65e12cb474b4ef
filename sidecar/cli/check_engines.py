"""Engines and models in the output of `sidecar check`: as text, and as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sidecar.durations import policy_duration
from sidecar.policy import fields as of
from sidecar.policy.capacity import Capacity
from sidecar.policy.compiler import Loaded, read_engine_list
from sidecar.policy.declared import figures
from sidecar.policy.fleet import Discovery, EngineAddress, FleetPolicy, pool_prefill
from sidecar.policy.model import Policy
from sidecar.policy.problems import Problem, dotted, printable
from sidecar.policy.rules import UNLIMITED
from sidecar.tools.text import table


def with_engine_list(loaded: Loaded) -> tuple[Loaded, tuple[Problem, ...]]:
    """The policy with the engines of its engine list, and a warning where there is no such file yet.

    Raises PolicyError with the mistakes of the list.
    """
    fleet = loaded.policy.engines
    if fleet is None or fleet.file is None:
        return loaded, ()
    if not Path(fleet.file).exists():
        path = ("engines", "file")
        message = "there is no such file yet; until there is, the pool has no engine, and every request waits"
        return loaded, (Problem(dotted(path), message, loaded.place(path)),)
    return replace(loaded, policy=loaded.policy.of_engines(read_engine_list(loaded.policy, Path(fleet.file)))), ()


def pools(policy: Policy) -> Sequence[tuple[str, Policy]]:
    """Each pool to print: a heading, and the policy of the pool."""
    if not policy.models:
        return [(f"pool: {capacity_text(policy)}", policy)]
    of_models = [(name, policy.of_model(name)) for name in policy.models]
    return [(f"pool of model {name}: {capacity_text(pool)}", pool) for name, pool in of_models]


def capacity_text(policy: Policy) -> str:
    """The pool's size, and where it comes from, in both dimensions."""
    tokens, requests, engine = policy.rules.tokens, policy.rules.requests, policy.engine_capacity
    of_tokens, of_requests = "tokens are not bounded", "requests are not bounded"
    if engine is not None:
        of_tokens = f"{of.percent(engine.fraction)} of the tokens that the engine holds"
        of_requests = f"the requests that the engine runs at once, and {engine.waiting} that wait in it"
    elif policy.reads_capacity:
        of_tokens, of_requests = "the tokens that its engines hold together", "the requests that they run together"
    if tokens < UNLIMITED:
        of_tokens = f"{tokens:,} tokens"
    if requests < UNLIMITED:
        of_requests = f"{requests:,} requests"
    return f"{of_tokens}; {of_requests}{_sum(() if policy.engines is None else policy.engines.static)}"


def _sum(engines: Sequence[EngineAddress]) -> str:
    """Terms of the sum, as the end of a sentence; empty for one engine."""
    prefill = pool_prefill(engines)
    besides = "" if prefill is None else f", with {prefill:,} un-prefilled tokens"
    return f"; the sum of {len(engines)} engines{besides}" if len(engines) > 1 else ""


def engines_text(policy: Policy) -> str:
    """The engines and how they are used, and the models; empty for a pool with one engine of no name."""
    fleet = policy.engines
    return "" if fleet is None else "\n".join([*_engines(fleet), *_use(fleet), *_models(policy)])


def _engines(fleet: FleetPolicy) -> Iterator[str]:
    found = {
        Discovery.MOUNTED: "each process that mounts the middleware is one, for its own requests",
        Discovery.STATIC: f"{len(fleet.static)} listed",
        Discovery.FILE: f"{len(fleet.static)} in {printable(str(fleet.file), 200)}, which is followed",
        Discovery.DNS: f"as DNS has them for {fleet.dns}, looked up every "
        f"{policy_duration(fleet.dns.refresh_s) if fleet.dns else ''}",
    }
    yield f"engines: {found[fleet.discovery]}"
    if fleet.static:
        width = max(len(engine.name) for engine in fleet.static)
        rows = [(f"{engine.name:<{width}}  {engine.url}", *_row(engine)) for engine in fleet.static]
        head = ("", "tokens", "requests", "prefill", "speed")
        yield from table([head, *rows], indent="  ")
    else:
        tokens, requests = _amounts(fleet.capacity)
        yield f"  each: tokens {tokens}, requests {requests}, prefill {_show(fleet.prefill)}"


def _row(engine: EngineAddress) -> tuple[str, str, str, str]:
    return (*_amounts(engine.capacity), _show(engine.prefill), f"{engine.speed / 1000:g}")


def _amounts(capacity: Capacity) -> tuple[str, str]:
    """Tokens and requests, or where they come from."""
    unknown = "read from it" if capacity.is_read else "unbounded"
    tokens, requests = (unknown if amount is None else f"{amount:,}" for amount in capacity.size(None, None))
    return tokens, requests


def _show(amount: int) -> str:
    return of.UNBOUNDED if amount == UNLIMITED else f"{amount:,}"


def _use(fleet: FleetPolicy) -> Iterator[str]:
    if fleet.mounted:
        start, drain = policy_duration(fleet.slow_start_s), policy_duration(fleet.drain_timeout_s)
        yield f"  slow start {start}; a drain waits {drain}"
        return
    health, affinity, replay = fleet.health, fleet.affinity, fleet.replay
    yield (
        f"  probes: GET {health.path} every {policy_duration(health.every_s)}; out after {health.fail} failures, back "
        f"after {health.rise} answers, slow start {policy_duration(fleet.slow_start_s)}"
    )
    ways = ["the prompt's prefix"] if affinity.prefix else []
    ways += [f"session ({', '.join(name.decode() for name in affinity.session)})"] if affinity.session else []
    yield (
        f"  affinity: by {' and '.join(ways)}, weight {affinity.weight_percent / 100:g}" if ways else "  affinity: none"
    )
    budget = f"once before the first byte, for at most {of.percent(replay.budget)} of the admissions"
    drain = f"a drain waits {policy_duration(fleet.drain_timeout_s)}"
    yield f"  replay: {budget if replay.before_first_byte else 'never'}; {drain}"


def _models(policy: Policy) -> Iterator[str]:
    if policy.models:
        yield f"models: {len(policy.models)}"
    for name, model in policy.models.items():
        also = f" ({', '.join(model.aliases)})" if model.aliases else ""
        yield f"  {name}{also}: {'all engines' if model.engines is None else ', '.join(model.engines)}"


def engines_figures(policy: Policy) -> dict[str, Any] | None:
    """The engines under the policy's own keys, durations in seconds; None for a pool with one engine of no name."""
    fleet = policy.engines
    if fleet is None:
        return None
    capacity = _capacity_figures(fleet.capacity)
    engines = [{**figures(engine), "capacity": _capacity_figures(engine.capacity)} for engine in fleet.static]
    dns = None if fleet.dns is None else {"name": str(fleet.dns), "refresh": fleet.dns.refresh_s}
    found = {**figures(fleet), "from": fleet.discovery.value, "dns": dns, "engines": engines, "capacity": capacity}
    return {key: figure for key, figure in found.items() if key not in ("static", "mounted")}


def _capacity_figures(capacity: Capacity) -> dict[str, Any]:
    return {key: figure for key, figure in figures(capacity).items() if key in ("tokens", "requests", "from")}
