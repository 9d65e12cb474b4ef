"""Advice for each finding: the exact flag, field or header of each engine, in one sentence."""

from __future__ import annotations

from sidecar.engines import Engine
from sidecar.engines.base import Facts
from sidecar.tools.doctor.priority_fields import PriorityField


def dropped(engine: type[Engine], way: PriorityField, other: PriorityField, facts: Facts) -> str:
    """One way shows nothing, another works."""
    since = engine.header_since
    if way.is_header and since is not None and is_before(facts.version, since):
        return f"{engine.name} reads the {way.title} from {since} on, this is {facts.version}: {_instead(other)}"
    if way.is_header and engine.header_switch is not None:
        switch = f"set {engine.header_switch} for {engine.title}"
        return f"{switch} and let every proxy in between pass {way.path[0]}, or {_instead(other)}"
    what = f"the {way.title} unchanged"
    instead = f", or {_instead(other)}" if len(engine.carriers) > 1 else ""
    return f"let every proxy between here and the engine pass {what}{instead}"


def unread(engine: type[Engine], way: PriorityField) -> str:
    """A wrong value is accepted: the field is not read."""
    return (
        f"let every proxy between here and the engine pass the {way.title} unchanged, and see that the engine's "
        f"version has it ({engine.name})"
    )


def inverted(engine: type[Engine], facts: Facts) -> str:
    """The order is the wrong way round."""
    if engine.advice.inverted is not None and facts.is_inverted:
        return engine.advice.inverted
    return (
        f"{engine.name} itself serves {engine.direction()} numbers first, and that is what the sidecar sends: find the "
        "proxy, plugin or flag that turns them round, and take it out"
    )


def is_before(version: str | None, other: str) -> bool:
    """Whether a version is older than another; False where it cannot be read."""
    found = _numbers(version or "")
    return bool(found) and found < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version such as 0.32.0+cpu or 1.4.0rc1; empty where it does not start with one."""
    parts: list[int] = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _instead(other: PriorityField) -> str:
    return f"write `forward_priority: {'header' if other.is_header else 'body'}` into the policy"
