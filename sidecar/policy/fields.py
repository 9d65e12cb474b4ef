"""Value types of the policy files: one reader for each type, and its JSON Schema for editors.

A reader gives the value that the running process uses, or raises ValueError with a sentence for the operator. Readers
are plain validators, so that pydantic never converts a value and never words a message itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sidecar.engines.base import MOST_SEGMENTS
from sidecar.policy import units
from sidecar.policy.choices import Learn, TierSource
from sidecar.policy.declared import ReadAs, context
from sidecar.policy.problems import printable, quoted, suggestion, unknown
from sidecar.policy.rules import UNLIMITED
from sidecar.policy.store import EXAMPLE, SCHEMES, StoreAddress, store_address

DENY = "deny"
REJECT = "reject"
ANONYMOUS = "anonymous"
UNBOUNDED = "unbounded"

_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")  # no digit first: a client may ask by number too; fits a metric label
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # no braces: it goes into a Redis hash tag
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_ASKED_HEADER = re.compile(rf"(?!\*$){_HEADER_NAME.pattern}")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_MEMBER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_RESERVED_HEADERS = frozenset(
    ("authorization", "x-api-key", "api-key", "host", "content-length", "transfer-encoding", "connection")
)
_BODY_PATH = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,3}", re.ASCII)
_URL_PATH = re.compile(r"/[!-~]*")

_ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # no #, / or colon: it goes into ids, paths and labels
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,199}")  # no braces: it goes into a Redis hash tag
_MODEL_PATTERN = re.compile(r"[A-Za-z0-9._/:@+*-]{1,200}")
_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?"
_SERVICE = re.compile(rf"(?P<host>{_HOST}):(?P<port>[0-9]{{1,5}})", re.ASCII)
_SRV = re.compile(rf"_[A-Za-z0-9-]{{1,62}}\._(tcp|udp)\.{_HOST}", re.ASCII)

MOST_USAGE_DAYS = 400
MOST_OF_AN_ENGINE = 10**12
"""Tokens, or requests, of one engine. Sums and scores over 64 engines then stay below 2**53, so exact in Lua."""
SHORTEST_PERIOD_S = Fraction(1, 10)
"""Shortest period of a repeated query. A shorter one costs an engine, or a name server, more than it is worth."""

N = TypeVar("N", int, Fraction)
V = TypeVar("V")


def tier_names(info: ValidationInfo) -> tuple[str, ...]:
    """The names of the pool's tiers, most important first; empty where they cannot be read."""
    return context(info).tiers


def _nothing_means_defaults(value: object) -> object:
    return {} if value is None else value


DEFAULTS = BeforeValidator(_nothing_means_defaults)
"""Marks a mapping of which nothing need be written: `batch:` alone has every default."""


def percent(part: Fraction) -> str:
    """A share as it is written in the file."""
    return f"{float(part * 100):g}%"


def _level(value: object, info: ValidationInfo) -> int:
    """The level of a tier by its name; that of the first tier where the tiers cannot be read."""
    name, tiers = units.text(value, "a tier", "normal"), tier_names(info)
    if tiers and name not in tiers:
        raise ValueError(unknown("tier", name, tiers))
    return tiers.index(name) if tiers else 0


def _anonymous(value: object, info: ValidationInfo) -> int | None:
    if value == DENY:
        return None
    name, tiers = units.text(value, "a tier, or deny", "normal"), tier_names(info)
    if tiers and name not in tiers:
        raise ValueError(f"{quoted(name)} is no tier; {suggestion(name, [*tiers, DENY], 'write one of')}")
    return tiers.index(name) if tiers else 0


def _match(what: str, pattern: re.Pattern[str], wanted: str, like: str) -> Callable[[object], str]:
    """The reader of a name in one form. `wanted` says what would be right, `like` is an example."""

    def read(value: object) -> str:
        name = units.text(value, what, like)
        if not pattern.fullmatch(name):
            raise ValueError(f"{quoted(name)} is not {what}; {wanted}")
        return name

    return read


def _at_most(reader: Callable[[object], N], most: float, message: str) -> Callable[[object], N]:
    """The reader of a number that has a bound. `message` is the refusal of a larger one."""

    def read(value: object) -> N:
        found = reader(value)
        if found > most:
            raise ValueError(message.format(found))
        return found

    return read


_tier_name = _match("a tier's name", _TIER_NAME, "write up to 40 of a-z, 0-9, - and _, a letter first", like="batch")
_tenant_name = _match("a tenant's name", _TENANT_NAME, "write up to 100 of A-Z, a-z, 0-9 and . _ @ -", like="acme")
_key_name = _match("a key's name", _TENANT_NAME, "write up to 100 of A-Z, a-z, 0-9 and . _ @ -", like="ci")
_header_name = _match(
    "a header's name", _HEADER_NAME, "write letters, digits and dashes, such as x-priority", like="x-priority"
)
_asked_header = _match(
    "a header's name", _ASKED_HEADER, "leave `headers` out to allow every header", like="authorization"
)
_origin = _match(
    "an origin as browsers send it",
    _ORIGIN,
    'write one such as "https://app.example" or "http://localhost:3000", without a path and in lower case, or "*" for '
    "every origin",
    like="https://app.example",
)
_member = _match(
    "a member's name", _MEMBER_NAME, "write letters, digits, _ and -, such as total_tokens", like="total_tokens"
)
_pool = _match(
    "a pool's name",
    _POOL_NAME,
    "write up to 100 of A-Z, a-z, 0-9 and . _ -, a letter or a digit first",
    like="chat-70b",
)
engine_name = _match(
    "an engine's name", _ENGINE_NAME, "write up to 63 of A-Z, a-z, 0-9 and . _ -, a letter or a digit first", like="a"
)
"""An engine's name as it was written. Raises ValueError where it is none."""
_model_name = _match(
    "a model's name",
    _MODEL_NAME,
    "write up to 200 of A-Z, a-z, 0-9 and . _ / : @ + -, a letter or a digit first",
    like="llama-70b",
)
_model_pattern = _match(
    "a model's name or a pattern of names",
    _MODEL_PATTERN,
    "write up to 200 of A-Z, a-z, 0-9 and . _ / : @ + -, and * for any characters",
    like="llama-70b",
)
_service_tier = _match(
    "a value of service_tier", _MEMBER_NAME, "write letters, digits, _ and -, such as priority", like="priority"
)
_engine_amount = _at_most(
    units.positive_count, MOST_OF_AN_ENGINE, "{} is more than one engine holds; write 1000G or less"
)
_rate = _at_most(
    units.positive_count,
    10**8,  # so that what a bucket holds stays a whole number that a double has exactly
    "{} is more than a limit can count; write 100M or less, or remove it for no limit",
)
_budget = _at_most(
    units.positive_count,
    10**13,  # so that sums of it stay whole numbers that a double has exactly
    "{} is more than a budget can count; write 10000G or less, or remove it for no budget",
)
_usage_days = _at_most(
    units.count, MOST_USAGE_DAYS, f"{{}} days are more than use can be kept for; write {MOST_USAGE_DAYS} or less"
)
_burst = _at_most(units.positive_duration_s, 60, "more than a minute's allowance at once; write 60s or less")
_replays = _at_most(
    units.count,
    1,
    "{} is too many: a request that broke two engines must not break a third; write 1 or 0",
)
_gain_weight = _at_most(
    units.positive_count,
    1000,  # products of it with tokens and microseconds stay whole numbers that every part can hold
    "{} is too large; weights count beside each other: write 1 to 1000",
)


def _new_tier(value: object) -> str:
    if value in (DENY, REJECT):
        raise ValueError(f'"{value}" has a meaning of its own in this file; write another name')
    return _tier_name(value)


def _tenant(value: object) -> str:
    if value == ANONYMOUS:
        raise ValueError('"anonymous" stands for requests without a key; write another name')
    return _tenant_name(value)


def _over_limit(value: object, info: ValidationInfo) -> int | None:
    """None for `reject`, else the level that what is over the limit falls to."""
    if isinstance(value, dict) and list(value) == ["downgrade"]:
        return _level(value["downgrade"], info)
    word = units.scalar(value, "what to do", "reject or {downgrade: batch}")
    if word.startswith("downgrade:"):
        return _level(word.removeprefix("downgrade:").strip(), info)
    if word != REJECT:
        raise ValueError(f"{quoted(word)} is not what can be done; write reject or {{downgrade: batch}}")
    return None


def one_of(values: Mapping[str, V], noun: str) -> Callable[[object], V]:
    """The reader of a name that stands for one of the values."""

    def read(value: object) -> V:
        name = units.text(value, noun, next(iter(values)))
        if name not in values:
            raise ValueError(unknown(noun, name, list(values)))
        return values[name]

    return read


def _filled(kind: type[Any], noun: str, example: str, *, or_empty: bool = False) -> BeforeValidator:
    """Refuses what is no list or mapping, or an empty one, without repeating what stands there."""
    wanted = noun if or_empty else f"{noun} with something in it"

    def read(value: object) -> object:
        if not isinstance(value, kind) or not (value or or_empty):
            raise ValueError(f"not a {wanted}; write {example}")
        return value

    return BeforeValidator(read)


listed = partial(_filled, list, "list")
mapped = partial(_filled, dict, "mapping")


def distinct(values: tuple[V, ...]) -> tuple[V, ...]:
    """The values of a list, each of which may be there once. Raises ValueError."""
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        name = twice.decode() if isinstance(twice, bytes) else str(getattr(twice, "value", twice))
        raise ValueError(f"{printable(name)} is listed twice; keep its first place")
    return values


def _header(value: object) -> bytes:
    name = _header_name(value)
    if name.lower() in _RESERVED_HEADERS:
        raise ValueError(f"{quoted(name)} has a meaning of its own; write another name, such as x-priority")
    return name.lower().encode("ascii")


def _user_source(value: object) -> str:
    text = units.text(value, "a place", "header x-user-id")
    kind, _, name = text.partition(" ")
    if kind == "header" and name:
        return f"header {_header(name).decode()}"
    if kind == "body" and _BODY_PATH.fullmatch(name):
        return text
    raise ValueError(f'{quoted(text)} is no place of a user\'s name; write "header NAME" or "body FIELD"')


def _alone(origins: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in origins and len(origins) > 1:
        raise ValueError('"*" is every origin: write it alone, or leave it out')
    return origins


def _url_path(value: object) -> str:
    path = units.text(value, "a path", "/v1/completions")
    if not _URL_PATH.fullmatch(path) or "?" in path or "#" in path:
        raise ValueError(f"{quoted(path)} is not a path; begin it with / and leave out spaces, ? and #")
    if path.count("/") > MOST_SEGMENTS:
        raise ValueError(f"{quoted(path)} has more than {MOST_SEGMENTS} segments; name a shorter path")
    return path


def _existing_file(value: object, info: ValidationInfo) -> str:
    written = units.text(value, "a file", "tokenizer.json")
    found = context(info).folder / written
    if not found.is_file():
        raise ValueError(f"there is no file {printable(str(found), 200)}; write where it is, relative to this file")
    return str(found)


def _store(value: object) -> StoreAddress:
    """A refusal never repeats what is no text: it may hold a password."""
    if not isinstance(value, str):
        raise ValueError(f"not a store's address; write {EXAMPLE}")
    return store_address(value)


def _text(value: object) -> str:
    return units.text(value, "a pattern", "tenants/*.yaml")


def _mounted(value: object) -> bool:
    if not units.flag(value):
        raise ValueError("false names no engines; write mounted: true, or leave it out")
    return True


def engine_url(value: object) -> str:
    """An engine's address without its last slashes, also with a base path."""
    url, example = units.text(value, "an engine's address", "http://a:8000"), "write it like http://a:8000"
    if "@" in url:  # never repeated: what is before it may be a password
        raise ValueError("has a user or a password; leave it out: SIDECAR_ENGINE_KEY has the key of the engines")
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError(f"{quoted(url)} has a space or a character beyond ASCII; {example}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{quoted(url)} is not an engine's address: {error}; {example}") from None
    if parts.scheme not in {"http", "https"} or not host or port == 0:
        raise ValueError(f"{quoted(url)} is not an engine's address; {example}")
    if parts.query or parts.fragment or url[-1] in "?#":
        raise ValueError(f"{quoted(url)} has more after its path; {example}")
    url = url.rstrip("/")
    if url.endswith("/v1"):  # the base address of OpenAI's clients: every path would have it twice
        base = url.removesuffix("/v1").rstrip("/")
        raise ValueError(f"{quoted(url)} ends with /v1, with which every path begins; write {base}")
    return url


def _speed(value: object) -> int:
    """In thousandths."""
    return round(1000 * _decimal(value, "a speed", "0.5", (Fraction(1, 100), 100)))


def _token_weight(value: object) -> int:
    """In thousandths."""
    found = 1000 * _decimal(value, "a weight of tokens", "0.1", (Fraction(0), 1000))
    if found.denominator != 1:
        raise ValueError(f"{quoted(str(value))} has more than three decimals; write a number such as 0.125")
    return int(found)


def _weight(value: object) -> int:
    """As a percentage."""
    return round(100 * _decimal(value, "a weight", "2", (Fraction(0), 10)))


def _learn(value: object) -> Learn:
    """One of `Learn`. YAML reads an unquoted `off` as false, so each spelling of that counts."""
    written = value.text if isinstance(value, units.Ambiguous) else units.scalar(value, "a way to learn", "cautious")
    word = Learn.OFF.value if written.lower() in {"off", "false"} else written
    if word not in [way.value for way in Learn]:
        raise ValueError(f"{quoted(written)} is no way to learn; write off, cautious or full")
    return Learn(word)


def _decimal(value: object, what: str, example: str, span: tuple[Fraction, int]) -> Fraction:
    """A number in a span, exactly."""
    written = units.scalar(value, what, example)
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", written, re.ASCII):
        raise ValueError(f"{quoted(written)} is not {what}; write a number such as {example}")
    found, (least, most) = Fraction(written), span
    if not least <= found <= most:
        raise ValueError(f"{quoted(written)} is not {what}; write a number from {float(least):g} to {most}")
    return found


def _prefill(value: object) -> int:
    return UNLIMITED if value == UNBOUNDED else units.positive_count(value)


def _engine_list(value: object, info: ValidationInfo) -> str:
    """The file is there, or not yet: it is read when its engines are asked for."""
    return str(context(info).folder / units.text(value, "a file", "engines.yaml"))


class ServiceName(NamedTuple):
    """A host and its port, or the name of SRV records and None."""

    host: str
    port: int | None

    def __str__(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"


def _period(value: object) -> Fraction:
    duration_s = units.positive_duration_s(value)
    if duration_s < SHORTEST_PERIOD_S:
        raise ValueError(f'{quoted(str(value))} is too often; write "100ms" or more')
    return duration_s


def _service(value: object) -> ServiceName:
    written = units.text(value, "a name", "vllm.default.svc:8000")
    match = _SERVICE.fullmatch(written)
    if match and 0 < int(match["port"]) <= 65535:
        return ServiceName(match["host"], int(match["port"]))
    if _SRV.fullmatch(written):
        return ServiceName(written, None)
    if re.fullmatch(_HOST, written, re.ASCII):
        raise ValueError(
            f"{quoted(written)} has no port; write {written}:8000, or the name of SRV records, such as "
            "_http._tcp.vllm.default.svc"
        )
    raise ValueError(f"{quoted(written)} is not a name that DNS knows; write it like vllm.default.svc:8000")


KIND = "x-kind"
"""The keyword of a schema that says in words what kind of value it is. Files' schemas do not have it."""


def schema(description: str, *, numbers: bool = False, **keywords: Any) -> Mapping[str, Any]:
    """The JSON Schema of a text, perhaps also of a number."""
    kind = description.partition(":")[0].rstrip(".")
    form = ["string", "integer"] if numbers else "string"
    return {"type": form, "description": description, KIND: kind[:1].lower() + kind[1:], **keywords}


class Reads(ReadAs):
    """Marks a type whose values `reader` reads, and of which `make` makes the process's own."""

    def __init__(
        self,
        reader: Callable[..., object],
        schema: Mapping[str, Any] = MappingProxyType({"type": "string"}),
        make: Callable[[Any], object] | None = None,
    ) -> None:
        super().__init__(Annotated[Any, PlainValidator(reader), WithJsonSchema(dict(schema))], make)


class OrSchema:
    """Marks a mapping in whose place something of another schema may stand."""

    def __init__(self, other: Mapping[str, Any]) -> None:
        self._other = other

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [dict(self._other), handler(core)]}


class Choice(Reads):
    """Marks an enumeration, of which one value is written. `noun` is what the messages call it."""

    def __init__(self, kind: type[Enum], noun: str = "choice") -> None:
        values = {str(member.value): member for member in kind}
        super().__init__(one_of(values, noun), {"type": "string", "enum": list(values)})


def _microseconds(duration_s: Fraction) -> int:
    return round(duration_s * 1_000_000)


_DURATION = schema('A duration: "500ms", "2s", "5m", "1h".', pattern=r"^[0-9.]+ ?(us|ms|s|m|h)$")
_COUNT = schema("A count: 160, 10k, 2M.", numbers=True, pattern=r"^[0-9.]+ ?[kKMG]?$", minimum=0)
_NAME = schema("A header's name.")
_OVER_LIMIT = {
    "anyOf": [
        {"const": REJECT},
        {"type": "object", "required": ["downgrade"], "properties": {"downgrade": {"type": "string"}}},
    ]
}

Share = Annotated[Fraction, Reads(units.share, schema('A share: "20%".', pattern=r"^[0-9.]+ ?%$"))]
HeldShare = Annotated[Fraction, Reads(units.held_share, schema('A share: "97%".', pattern=r"^[0-9.]+ ?%$"))]
Seconds = Annotated[float, Reads(units.duration_s, _DURATION, float)]
PositiveSeconds = Annotated[float, Reads(units.positive_duration_s, _DURATION, float)]
Microseconds = Annotated[int, Reads(units.duration_s, _DURATION, _microseconds)]
PositiveMicroseconds = Annotated[int, Reads(units.positive_duration_s, _DURATION, _microseconds)]
Period = Annotated[float, Reads(_period, _DURATION, float)]
Burst = Annotated[int, Reads(_burst, _DURATION, _microseconds)]
Count = Annotated[int, Reads(units.count, _COUNT)]
PositiveCount = Annotated[int, Reads(units.positive_count, _COUNT)]
EngineAmount = Annotated[int, Reads(_engine_amount, _COUNT)]
RateCount = Annotated[int, Reads(_rate, _COUNT)]
BudgetCount = Annotated[int, Reads(_budget, _COUNT)]
UsageDays = Annotated[int, Reads(_usage_days, _COUNT)]
GainWeight = Annotated[int, Reads(_gain_weight, schema("A weight: 4.", numbers=True, pattern="^[0-9]+$", minimum=1))]
Bytes = Annotated[
    int,
    Reads(units.size_bytes, schema('A size: "8MiB".', numbers=True, pattern=r"^[0-9.]+ ?(B|KiB|MiB|GiB)?$")),
]
Speed = Annotated[int, Reads(_speed, {"type": "number", "minimum": 0.01, "maximum": 100})]
Weight = Annotated[int, Reads(_weight, {"type": "number", "minimum": 0, "maximum": 10})]
TokenWeight = Annotated[int, Reads(_token_weight, {"type": "number", "minimum": 0, "maximum": 1000})]
Prefill = Annotated[
    int,
    Reads(
        _prefill,
        schema("A count, or `unbounded`: 8k.", numbers=True, pattern=rf"^([0-9.]+ ?[kKMG]?|{UNBOUNDED})$", minimum=1),
    ),
]
Replays = Annotated[int, Reads(_replays, {"type": "integer", "minimum": 0, "maximum": 1})]
Flag = Annotated[bool, Reads(units.flag, {"type": "boolean"})]
Mounted = Annotated[bool, Reads(_mounted, {"const": True})]
Text = Annotated[str, Reads(_text)]
Level = Annotated[int, Reads(_level, schema("The name of a tier."))]
AnonymousLevel = Annotated[int | None, Reads(_anonymous, schema("The name of a tier, or `deny`."))]
NewTierName = Annotated[str, Reads(_new_tier, schema("A tier's name.", pattern=f"^{_TIER_NAME.pattern}$"))]
KeyName = Annotated[str, Reads(_key_name, schema("A name.", pattern=f"^{_TENANT_NAME.pattern}$"))]
TenantName = Annotated[str, Reads(_tenant, schema("A name.", pattern=f"^{_TENANT_NAME.pattern}$"))]
PoolName = Annotated[str, Reads(_pool, schema("A name.", pattern=f"^{_POOL_NAME.pattern}$"))]
EngineName = Annotated[str, Reads(engine_name, schema("A name.", pattern=f"^{_ENGINE_NAME.pattern}$"))]
ModelName = Annotated[str, Reads(_model_name, schema("A model's name.", pattern=f"^{_MODEL_NAME.pattern}$"))]
EngineModel = Annotated[str, Reads(partial(units.text, what="an engine's name of a model", example="llama-70b"))]
UrlPath = Annotated[str, Reads(_url_path, schema("A path on the server.", pattern="^/"))]
EngineUrl = Annotated[str, Reads(engine_url, schema("An address: http://a:8000.", pattern="^https?://"))]
Service = Annotated[ServiceName, Reads(_service, schema("A host and its port, or the name of SRV records."))]
HeaderName = Annotated[bytes, Reads(_header, _NAME)]
UserSources = Annotated[
    tuple[Annotated[str, Reads(_user_source, schema("A place."))], ...],
    listed('["header x-user-id", "body user"]'),
    AfterValidator(distinct),
]
MemberName = Annotated[bytes, Reads(_member, schema("A member's name."), str.encode)]
ExistingFile = Annotated[str, Reads(_existing_file, schema("A file, relative to this one."))]
EngineListAt = Annotated[str, Reads(_engine_list, schema("A file, relative to this one."))]
StoreAt = Annotated[
    StoreAddress,
    Reads(_store, schema("A store's address.", pattern=f"^({'|'.join(map(re.escape, SCHEMES))})://")),
]
LearnChoice = Annotated[
    Learn, Reads(_learn, {"anyOf": [{"type": "string", "enum": [way.value for way in Learn]}, {"const": False}]})
]
OverLimit = Annotated[int | None, Reads(_over_limit, _OVER_LIMIT)]
PathList = Annotated[tuple[UrlPath, ...], listed("[/health, /metrics]", or_empty=True), AfterValidator(distinct)]
AskedHeaders = Annotated[
    tuple[Annotated[str, Reads(_asked_header, _NAME, str.lower)], ...],
    listed("[authorization, content-type]"),
    AfterValidator(distinct),
]
Origins = Annotated[
    tuple[Annotated[str, Reads(_origin, schema("An origin, or `*`."))], ...],
    listed('["https://app.example"]'),
    AfterValidator(distinct),
    AfterValidator(_alone),
]
SourceList = Annotated[
    tuple[Annotated[TierSource, Choice(TierSource, "source")], ...],
    listed("[body, header, endpoint, key]"),
    AfterValidator(distinct),
]
Thresholds = Annotated[
    dict[Level, Annotated[float, Reads(units.number, {"type": "number"})]],
    mapped("{high: 10, normal: 5, batch: 0}"),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
ServiceTiers = Annotated[
    dict[Annotated[str, Reads(_service_tier, schema("A value of `service_tier`."))], Level],
    mapped("{priority: high, default: normal, flex: batch}"),
]
EngineNames = Annotated[tuple[EngineName, ...], listed("[a, b]"), AfterValidator(distinct)]
SessionSources = Annotated[
    tuple[Annotated[bytes, Reads(_header, schema("A header's name, or `prompt_cache_key`."))], ...],
    listed("[x-session-id, prompt_cache_key]", or_empty=True),
    AfterValidator(distinct),
]
ModelNames = Annotated[tuple[ModelName, ...], listed("[llama, my-lora]", or_empty=True), AfterValidator(distinct)]
ModelPatterns = Annotated[
    tuple[
        Annotated[str, Reads(_model_pattern, schema("A name, or a pattern.", pattern=f"^{_MODEL_PATTERN.pattern}$"))],
        ...,
    ],
    listed('[llama-70b, "qwen*"]'),
    AfterValidator(distinct),
    AfterValidator(lambda patterns: patterns if all(pattern.strip("*") for pattern in patterns) else None),
]
