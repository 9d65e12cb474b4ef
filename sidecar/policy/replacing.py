"""What of a policy can be replaced while a process runs, and what needs another start."""

from __future__ import annotations

from sidecar.policy.policy import Policy


def needs_restart(running: Policy, changed: Policy) -> list[str]:
    """The keys, as the operator writes them, in which `changed` cannot replace `running`; none where it can.

    A running process has its engine's dialect, its pool and its store, and everything that waits or is held stands in a
    tier by its level; who tells how large the pool is was decided when it was made.
    """
    keys = {
        "engine": running.engine is not changed.engine,
        "forward_priority": running.carrier is not changed.carrier,
        "capacity.from": (running.engine_capacity is None) != (changed.engine_capacity is None),
        "tiers (their names and order)": _names(running) != _names(changed),
        "tokenizer": running.tokenizer != changed.tokenizer,
        "store": running.store != changed.store,
        "pool": running.pool != changed.pool,
        "on_store_loss": running.on_store_loss is not changed.on_store_loss,
    }
    return [key for key, is_another in keys.items() if is_another]


def _names(policy: Policy) -> list[str]:
    return [tier.name for tier in policy.tiers]
