"""What an engine adapter is: how one engine hears a request's priority, and what must be taken from clients first.

A dialect is declarative. It knows nothing of HTTP frameworks and changes no bytes: it says which headers and which body
member to set, and the door does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from sidecar.payload.decode import Payload
from sidecar.payload.edit import remove
from sidecar.policy.model import Api, Carrier

Priority = int | float

CLIENT_HEADERS = frozenset((b"x-vllm-priority", b"x-tenant-id"))
CLIENT_HEADER_PREFIXES = (b"x-override-", b"x-dynamo-request-", b"x-dynamo-meta-")
"""Headers that some engine takes a priority or a trusted tenant from. None of them passes from a client."""

CLIENT_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("priority",),
    ("nvext", "agent_hints", "priority"),
    ("nvext", "agent_hints", "strict_priority"),
    ("nvext", "agent_hints", "latency_sensitivity"),
)
"""Body members that some engine takes a priority from. None of them passes from a client."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What one request carries to the engine: header pairs, and the JSON of a top-level `priority` member.

    `is_handed_over` where it carries nothing because the app, in the same process, gives its engine what was granted.
    """

    headers: tuple[tuple[bytes, bytes], ...] = ()
    member: bytes | None = None
    is_handed_over: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether the engine hears a priority at all."""
        return bool(self.headers) or self.member is not None or self.is_handed_over


class Stated(NamedTuple):
    """An engine priority that a client sent: its value, and the field or header it came in."""

    value: float
    statement: str


class Dialect(Protocol):
    """One engine's way of being told a priority."""

    more_important_is_higher: ClassVar[bool]

    abort_latency_s: ClassVar[float]
    """The longest that the engine computes on for a request after its connection is closed, in seconds."""
    aborts_in_its_call: ClassVar[bool]
    """Whether the engine's own app, mounted in this process, ends its call for a request after the abort only."""

    def priority(self, level: int, levels: int) -> Priority:
        """The engine's value for a level of a ladder of `levels` tiers; 0 is the most important level."""

    def forward(self, api: Api, priority: Priority) -> Forward:
        """How that value travels with a request of this API; empty where the API's schema has no place for it."""

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:
        """The engine's own priority as a client sent it, None where it sent none or none that the engine could read."""


def spread(level: int, levels: int, step: int, most: int) -> int:
    """A whole number per level, 0 for the last: `step` apart, or as evenly as `most` allows."""
    if levels < 2:
        return 0
    return round((levels - 1 - level) * min(step, most / (levels - 1)))


def stated_in_body(payload: Payload) -> Stated | None:
    """A number in the top-level `priority`, None for anything else."""
    if payload.priority is None:
        return None
    try:
        return Stated(msgspec.json.decode(payload.priority, type=float), "priority")
    except msgspec.MsgspecError:
        return None


def stated_in_header(name: bytes, headers: Mapping[bytes, bytes]) -> Stated | None:
    """A header's whole number, None for anything else: an engine that cannot read it ignores it too."""
    try:
        return Stated(float(int(headers[name])), name.decode())
    except (KeyError, ValueError, OverflowError):
        return None


class AgentHints(msgspec.Struct):
    """What Dynamo's clients write under `nvext.agent_hints`; anything else there is left alone."""

    priority: float | None = None
    strict_priority: float | None = None
    latency_sensitivity: float | None = None


class _Nvext(msgspec.Struct):
    agent_hints: AgentHints | None = None


def agent_hints(payload: Payload) -> AgentHints | None:
    """The hints of a request, None where it has none or none that can be read."""
    if payload.nvext is None:
        return None
    try:
        return msgspec.json.decode(payload.nvext, type=_Nvext).agent_hints
    except (msgspec.MsgspecError, RecursionError):
        return None


def client_members(payload: Payload) -> list[str]:
    """The body members of a request that some engine would take a priority from, as a client writes them."""
    found = [] if payload.priority in (None, b"null") else ["priority"]
    if payload.nvext is not None:
        text = payload.nvext
        found += [".".join(path) for path in CLIENT_MEMBERS if path[0] == "nvext" and remove(text, path[1:]) != text]
    return found


def client_headers(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """The headers of a request, by lower-case name, that some engine would take a priority or a tenant from."""
    # Every request passes here, and hardly any has one: the cheap test comes first.
    return [
        name
        for name in headers
        if name[:2] == b"x-" and (name in CLIENT_HEADERS or name.startswith(CLIENT_HEADER_PREFIXES))
    ]


def default_carrier(carrier: Carrier | None, default: Carrier) -> Carrier:
    """The policy's choice, or else the engine's own default."""
    return default if carrier is None else carrier


def member(priority: Priority) -> Forward:
    """A top-level body member."""
    return Forward(member=repr(priority).encode())


def header(name: bytes, priority: Priority) -> Forward:
    """One header."""
    return Forward(headers=((name, repr(priority).encode()),))
