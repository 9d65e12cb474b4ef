"""Choices of the policy: the keys of which one of several words is the value."""

from __future__ import annotations

from enum import Enum


class TierSource(str, Enum):
    """Where a request's tier may come from.

    `engine` is the engine's own priority field or header, sent by a client, `service_tier` the body's field.
    """

    BODY = "body"
    HEADER = "header"
    ENDPOINT = "endpoint"
    KEY = "key"
    ENGINE = "engine"
    SERVICE_TIER = "service_tier"


class Mode(str, Enum):
    """How requests are treated: `observe` and `pass` pass all, and `observe` records what `enforce` would do."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    PASS = "pass"


class CapacitySource(str, Enum):
    """Source of the pool's size, other than the policy itself."""

    ENGINE = "engine"


class Unguarded(str, Enum):
    """Treatment of a request on a path that the policy does not guard. See `admission.unguarded`."""

    DENY = "deny"
    GENERATING = "generating"
    ALLOW = "allow"


class StreamUsage(str, Enum):
    """When the engine is asked for the usage of streams whose clients do not ask: see `admission.forwarding`."""

    ASK = "ask"
    AS_SENT = "as_sent"


class UsageInTraces(str, Enum):
    """When our `engine` span has what a request used: always, never, or unless the app has traced it itself."""

    ONCE = "once"
    ALWAYS = "always"
    NEVER = "never"


class Background(str, Enum):
    """Treatment of a response that runs on after its request is answered: refused, or followed with its lease."""

    REFUSE = "refuse"
    HOLD = "hold"


class ShownUsers(str, Enum):
    """How explain and the log show a tenant's users: by a hash of the name, or by the name."""

    HASHED = "hashed"
    PLAIN = "plain"


class Order(str, Enum):
    """Order of the requests beyond their tiers' floors: the aged level, or the service gain."""

    LEVEL = "level"
    GAIN = "gain"


class StoreLoss(str, Enum):
    """Behavior while the store cannot be reached: every replica uses its part of the pool, or refuses with 503."""

    DIVIDE = "divide"
    CLOSED = "closed"


class Unsized(str, Enum):
    """Treatment of a request whose body does not show the size of its prompt."""

    HOLD = "hold"
    REFUSE = "refuse"


class Learn(str, Enum):
    """How far a lease follows the output lengths that were learned; with `off` it holds prompt and `max_tokens`."""

    OFF = "off"
    CAUTIOUS = "cautious"
    FULL = "full"


class StoredTenants(str, Enum):
    """State of the tenants in the store: none, not read yet, or read, so that the policy has them."""

    NONE = "none"
    UNREAD = "unread"
    READ = "read"
