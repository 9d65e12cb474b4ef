"""The interface of an engine: everything that the sidecar knows of one, as a class that its own file fills in.

A class describes an engine; an object of it is that engine with the carrier that a policy chose. Nothing here knows an
HTTP framework or changes bytes: an engine declares which headers and which body member to set, and the middleware does.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

import msgspec

from sidecar.apis import STANDARD_APIS, Api
from sidecar.engines.pages import AskedOnce, Pages, find_json, mapping
from sidecar.payload.decode import Payload

Priority = int | float


class Carrier(str, Enum):
    """How the granted priority travels to the engine."""

    HEADER = "header"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class Forward:
    """The priority that one request carries to the engine: header pairs, and the JSON of a top-level `priority` member.

    `is_handed_over` where the request carries nothing because the app, in the same process, gives its engine the grant.
    """

    headers: tuple[tuple[bytes, bytes], ...] = ()
    member: bytes | None = None
    is_handed_over: bool = False

    @property
    def is_sent(self) -> bool:
        """True if the engine gets a priority at all."""
        return bool(self.headers) or self.member is not None or self.is_handed_over


NOTHING = Forward()
USAGE_ONCE: Mapping[str, bytes] = {"include_usage": b"true", "continuous_usage_stats": b"false"}
"""`Engine.usage_options` of engines that would say it in every event, too, where the client wrote so."""


class Stated(NamedTuple):
    """An engine priority that a client sent: its value, and the field or header it came in."""

    value: float
    statement: str


# -- routes

_PLACEHOLDER = "{id}"
_SEGMENT = r"[A-Za-z0-9_-]{1,256}"
"""An identifier in a path: no dot, slash or percent sign, so that no server reads another path out of it."""
_DECODINGS = 4
"""No engine routes a path that is encoded more often than this."""
MOST_SEGMENTS = 32
"""Of a path that a policy names, and so of a prefix that may be meant before a path: a client's may have thousands."""
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*:(//[^/?#]*)?")
_QUERY = re.compile(r"[?#]")
_PARAMETERS = re.compile(r"[;?#]")
_UNMISTAKABLE = ("/v1/", "/v2/", "/inference/")
"""Beginnings of paths that no app uses for anything else. They are found below a mount's prefix, too."""


def unsized(*paths: str) -> Mapping[str, Api | None]:
    """Generating paths whose requests have a shape that admission cannot size."""
    return dict.fromkeys(paths)


OPENAI: Mapping[str, Api | None] = {f"/v1{suffix}": api for suffix, api in STANDARD_APIS.items()}
"""Paths that every engine generates on, with the shape of their requests."""
MEDIA = unsized(
    "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/videos"
)
"""Paths of OpenAI's API for sound and pictures."""
SCORING = unsized("/inference/v1/generate", "/v1/classify", "/v1/score", "/v1/rerank")
"""Paths that most engines have besides OpenAI's."""
COHERE = unsized("/v2/rerank", "/v2/embed", "/v2/chat")
"""Paths of Cohere's API."""
REALTIME = "/v1/realtime"
"""A WebSocket over which a model generates."""
COUNTING = frozenset(("/tokenize", "/detokenize", "/v1/messages/count_tokens"))
"""Paths that count tokens, and run no model."""
CANCEL = "/v1/responses/{id}/cancel"
"""Ends a background response. Its id is random: a client can only cancel a response whose id it received."""


PAGES = ("/metrics", "/docs", "/redoc", "/openapi.json", "/server_info")
"""The figures, documents and settings that most engines show to whoever asks."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The paths of an engine's server.

    `generating` maps each path that runs the model to the shape of its requests, None for a shape that admission
    cannot size. `harmless` are paths that may be called with other methods than GET and neither run the model nor
    change the engine; `{id}` in one stands for one segment. `changing_reads` change the engine even by GET.
    `websockets` generate over a WebSocket. `pages` are the operator's: they show all clients' requests, or the engine
    itself. A path in none of them is unknown: an engine adds routes with every release,
    and some of them change the engine itself (weights, adapters, caches, sleep).
    """

    generating: Mapping[str, Api | None]
    harmless: frozenset[str]
    changing_reads: frozenset[str] = frozenset()
    websockets: frozenset[str] = frozenset((REALTIME,))
    pages: tuple[str, ...] = PAGES
    _patterns: tuple[tuple[str, re.Pattern[str]], ...] = field(init=False, repr=False, compare=False)
    _endings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = [(path, _pattern(path)) for path in sorted(self.harmless) if _PLACEHOLDER in path]
        object.__setattr__(self, "_patterns", tuple(patterns))
        found = {*self.generating, *self.websockets}
        object.__setattr__(self, "_endings", tuple(path for path in sorted(found) if path.startswith(_UNMISTAKABLE)))

    def harmless_route(self, path: str) -> str | None:
        """The entry of `harmless` that a path is, exactly as written; None where it is none of them, or generates."""
        if path in self.harmless:
            return path if _PLACEHOLDER not in path else None
        if path in self.generating:  # `/v1/responses/compact` is no response's id
            return None
        return next((route for route, pattern in self._patterns if pattern.fullmatch(path)), None)

    def generating_route(self, path: str) -> str | None:
        """The generating path or WebSocket that some server may read `path` as; None where there is none.

        More spellings are found than any engine routes: other letter case, encoded characters, doubled slashes,
        dots, parameters, a mount's prefix. It is safe to find too much here, and not too little.
        """
        for plain in plain_paths(path):
            if plain in self.generating or plain in self.websockets:
                return plain
            for route in self._endings:
                if plain.endswith(route):
                    return route
        return None

    def operators_page(self, path: str) -> str | None:
        """The entry of `pages` that some server may read `path` as, in the same spellings; None where there is none.

        Also where it continues: Starlette's mounts, such as vLLM's `/metrics`, serve everything that begins like them.
        """
        plain = plain_paths(path)
        return next((page for page in self.pages if any(page in one for one in plain)), None)


def plain_path(path: str) -> str:
    """A path without its disguises: decoded, in lower case, without parameters, query, doubled slashes and dots."""
    return plain_paths(path)[-1]


def plain_paths(path: str) -> tuple[str, ...]:
    """The plain path with what comes after a `?` or `#`, and without it: one path, where it has neither.

    Before them, where it has dots, the path with them: Starlette's mounts resolve none, and serve `/metrics/..`. A
    server that decodes once reads an encoded `?` as a part of a segment, and one that decodes again ends the path
    there. A path that does not begin with `/` may be a whole address (RFC 9112, section 3.2.2): Quart takes its path.
    """
    for _ in range(_DECODINGS):
        decoded = unquote(path)
        if decoded == path:
            break
        path = decoded
    if not path.isprintable():
        path = "".join(character for character in path if character.isprintable())
    path = _ADDRESS.sub("", path.lower().lstrip().replace("\\", "/"))
    cut = _QUERY.split(path, maxsplit=1)[0]
    plain = (_normal(path),) if cut == path else (_normal(path), _normal(cut))
    return ("/" + path.lstrip("/"), *plain) if "/." in path else plain


def _normal(path: str) -> str:
    segments = [segment.strip() for segment in path.split("/")]
    if _PARAMETERS.search(path) is not None:
        segments = [_PARAMETERS.split(segment, maxsplit=1)[0].strip() for segment in segments]
    return posixpath.normpath("/" + "/".join(segments).lstrip("/"))


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(_SEGMENT.join(map(re.escape, path.split(_PLACEHOLDER))), re.ASCII)


# -- what an engine says of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Figures that change: `kv_tokens` and `max_running` are the engine's size, `running` and `waiting` its requests.

    All of one engine: the sum of its data-parallel ranks. `waiting` counts the requests that queue inside the engine.
    `unfinished` is the most requests that it may have now; None where its figures may stand still, or leave some out.
    `preemptions` counts the times that a running request lost its KV cache to others, and had to be computed again,
    since the engine started; None where it does not say.
    """

    kv_tokens: int | None = None
    max_running: int | None = None
    running: int | None = None
    waiting: int | None = None
    unfinished: int | None = None
    preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Settings that stay as long as the engine runs. None stands for a setting that the engine does not report.

    `by_priority` is whether its queue is ordered by priority, `is_inverted` whether a switch turned the direction of
    its numbers round, `has_field` whether its schema has the priority field of chat completions, `default_priority`
    the value of an untagged request. `preempts_beyond` is the difference of two priorities above which the more
    important request preempts a running one, None where none does or the engine does not say. `caches_prefixes` is
    whether it has a prefix cache, `reports_cached_tokens` whether its answers say what they found there. `where` names,
    for each fact that was found, the page or setting that it was read from.
    """

    version: str | None = None
    by_priority: bool | None = None
    is_inverted: bool | None = None
    has_field: bool | None = None
    default_priority: int | None = None
    preempts_beyond: int | None = None
    caches_prefixes: bool | None = None
    reports_cached_tokens: bool | None = None
    where: tuple[tuple[str, str], ...] = ()

    def source(self, name: str) -> str | None:
        """The page or setting of a fact."""
        return dict(self.where).get(name)


OPENAPI = "/openapi.json"


def has_priority(openapi: object) -> bool | None:
    """True if `ChatCompletionRequest` has a `priority`; None where the document does not describe that request."""
    schemas = mapping(mapping(mapping(openapi).get("components")).get("schemas"))
    request = mapping(schemas.get("ChatCompletionRequest"))
    return "priority" in mapping(request.get("properties")) if request else None


# -- the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The marks by which a server is recognized as this engine's. None for a mark that the engine does not have.

    `owner` is `owned_by` of a model card, `title` a word in the OpenAPI document's title, `server_info` a key of
    `/server_info` that no other engine has, `metrics` how the names of its metrics begin. `packages` are the top
    packages of the functions behind the routes of its own server.
    """

    owner: str | None = None
    title: str | None = None
    server_info: str | None = None
    metrics: str | None = None
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The exact flags, fields and files of one engine, as `sidecar doctor` prints them. One sentence each.

    `scheduler` orders the engine's queue by priority. `refused` helps where the engine answers a right value with an
    error. `inverted` names the switch that turns the direction round. `default_priority` is the option that gives
    untagged requests a priority, `threshold` the one for the difference from which running requests are preempted, and
    `no_preemption` the one that switches that off, `cache_report` the one by which answers say how much of their prompt
    was cached; None where the engine has none.
    """

    scheduler: str = "switch on the engine's priority scheduling"
    refused: str = "update the engine, or set `engine: none` in the policy and let admission order alone"
    inverted: str | None = None
    default_priority: str | None = None
    threshold: str | None = None
    no_preemption: str | None = None
    cache_report: str | None = None


class AbortLatency(NamedTuple):
    """How long an engine may compute on for a request whose connection is closed: until then its room is not free.

    `seconds` count from the disconnect where `is_from_disconnect` is True, and else from the end of the app's call. A
    reverse proxy closes its connection to the engine at the end of its call. An engine in this process gets the
    disconnect itself, and the app's call may end before or after the abort.
    """

    seconds: float
    is_from_disconnect: bool

    def due_us(self, now_us: int, disconnected_us: int | None) -> int:
        """When the engine has aborted a request whose call ends now. Without a disconnect the last argument is None."""
        since_us = disconnected_us if self.is_from_disconnect and disconnected_us is not None else now_us
        return since_us + round(self.seconds * 1e6)


class Engine:
    """One engine. A class of its own sets what differs from here; `name`, `title` and `routes` have no default.

    Only `name` and `title` are shown to people; a policy has `name` after `engine:`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    routes: ClassVar[Routes]
    fingerprint: ClassVar[Fingerprint] = Fingerprint()
    advice: ClassVar[Advice] = Advice()

    # How a priority travels.
    carriers: ClassVar[tuple[Carrier, ...]] = ()
    """The ways that a policy may choose, the engine's own default first; none for an engine without priorities."""
    more_important_is_higher: ClassVar[bool] = True
    priority_range: ClassVar[tuple[float, float] | None] = None
    """The least and the greatest value that the engine accepts; None for whole numbers of at least 32 bits."""
    step: ClassVar[int] = 1
    """The difference between the priorities of two neighboring tiers."""
    widest: ClassVar[int | None] = None
    """The greatest difference between the first tier's priority and the last one's; None for no bound."""
    header: ClassVar[bytes | None] = None
    """The header that the engine reads a priority from, in lower case; it begins with `x-`."""
    header_apis: ClassVar[frozenset[Api]] = frozenset(Api)
    member_apis: ClassVar[frozenset[Api]] = frozenset(Api)
    """The APIs whose requests may have a top-level `priority` member."""
    header_since: ClassVar[str | None] = None
    """The first version that reads the header; None where every version that is known does."""
    header_switch: ClassVar[str | None] = None
    """The setting without which the engine ignores its header. Such a header is sent only where a policy says so."""
    untrusted_headers: ClassVar[tuple[bytes, ...]] = ()
    """Headers, or with a `-` at the end beginnings of headers, that the engine trusts: clients may not send them.
    `header` is one without being named here."""
    untrusted_members: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Body members besides `priority` that the engine takes a priority from: clients may not send them."""
    reports_max_running: ClassVar[bool] = True
    """Whether a server of this engine, asked over a network, says how many requests it runs at once."""
    other_member: ClassVar[tuple[str, ...] | None] = None
    """The body member that `sidecar doctor` tries besides the carriers."""
    invalid_header: ClassVar[str | None] = None
    """A header's value that the engine refuses with a 400; None where it ignores a value that it cannot read."""
    invalid_member: ClassVar[Any] = 1.5
    """A body member's value that the engine refuses with a 400."""

    # How a stream says its usage.
    usage_options: ClassVar[Mapping[str, bytes]] = MappingProxyType({})
    """Members of `stream_options`, as JSON, by which a stream of chat or text completions says its usage once, in an
    event of its own before its end; none where no engine is known to have them."""
    asks_usage_by_default: ClassVar[bool] = False
    """Whether `stream_options` without `include_usage` ask for it."""

    # How the engine behaves.
    abort_latency_s: ClassVar[float] = 4.5
    """The longest that the engine computes on for a request after its connection is closed, in seconds. The default is
    that of the slowest engine that is known."""
    aborts_in_its_call: ClassVar[bool] = False
    """Whether the engine's own app, mounted in this process, ends its call for a request only after the abort."""
    default_completion_tokens: ClassVar[int | None] = None
    """Output tokens of a text completion without a maximum; None where the rest of the model's context is allowed."""
    has_ignore_eos: ClassVar[bool] = False
    """Whether the engine's schema has `ignore_eos`, for answers of a fixed length."""
    gauges_stand_still: ClassVar[bool] = False
    """Whether the gauges change only when a request finishes, or there are none."""
    gauge_leaves_some_out: ClassVar[bool] = False
    """Whether requests may wait where the gauge of waiting requests does not count them."""
    counts_preemptions: ClassVar[bool] = False
    """Whether a server of this engine says how often it preempted a running request because its KV cache was full."""
    overload_status: ClassVar[int | None] = None
    """The HTTP status of requests that an engine without a queue does not take; None where the engine has a queue."""
    metrics_page: ClassVar[str] = "/metrics"
    health_page: ClassVar[str] = "/health"
    """A page that costs the engine little, asked for every two seconds. Any answer but 502, 503 and 504 is life."""
    liveness_page: ClassVar[str] = "/health"
    """The page that clients may read without a key where the policy does not say otherwise (`public`)."""
    asked_once: ClassVar[frozenset[str]] = frozenset()
    """Pages that cost the engine something and never change while it runs."""

    def __init__(self, carrier: Carrier | None = None) -> None:
        """`carrier` is the policy's choice, None for the engine's own default."""
        chosen = carrier if carrier is not None else next(iter(self.carriers), None)
        self._carriers = {api: self._carrier_for(api, chosen) for api in Api}
        self._forwards: dict[tuple[Api, Priority], Forward] = {}

    def _carrier_for(self, api: Api, chosen: Carrier | None) -> Carrier | None:
        """The chosen carrier where this API has it, or else the other one."""
        has_member = api in self.member_apis and api is not Api.GENERIC  # whose bodies may be of any shape
        has = {Carrier.HEADER: api in self.header_apis, Carrier.BODY: has_member}
        if chosen is None or has[chosen]:
            return chosen
        other = Carrier.BODY if chosen is Carrier.HEADER else Carrier.HEADER
        is_off = other is Carrier.HEADER and self.header_switch is not None
        return other if other in self.carriers and has[other] and not is_off else None

    @classmethod
    def connected(cls, carrier: Carrier | None, pages: Pages) -> Engine:  # noqa: ARG003  # for engines that must be asked
        """The engine for a server that can ask it."""
        return cls(carrier)

    async def ask(self) -> None:
        """Asks the engine what must be known before its first request. It does not raise."""

    def priority(self, level: int, levels: int) -> Priority:
        """The engine's value for a level of a ladder of `levels` tiers; 0 is the most important level."""
        if not self.more_important_is_higher:
            return level * self.step
        if levels < 2:
            return 0
        step = self.step if self.widest is None else min(self.step, self.widest / (levels - 1))
        return round((levels - 1 - level) * step)

    def forward(self, api: Api, priority: Priority) -> Forward:
        """How that value travels with a request of this API; empty where the API's schema has no place for it."""
        found = self._forwards.get((api, priority))
        if found is None:  # once for each API and tier: this is on the path of every request
            found = self._forwards[api, priority] = self._forward(api, repr(priority).encode())
        return found

    def _forward(self, api: Api, value: bytes) -> Forward:
        carrier = self._carriers[api]
        if carrier is Carrier.HEADER:
            assert self.header is not None
            return Forward(headers=((self.header, value),))
        return Forward(member=value) if carrier is Carrier.BODY else NOTHING

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:
        """The engine's own priority as a client sent it, None where it sent none or none that the engine could read."""
        stated = None if self.header is None else stated_in_header(self.header, headers)
        if stated is None and Carrier.BODY in self.carriers:
            return stated_in_body(payload)
        return stated

    @classmethod
    def check_carrier(cls, carrier: Carrier) -> None:
        """Raises ValueError, for the operator, for a way of forwarding that the engine does not have."""
        if not cls.carriers:
            raise ValueError(f"the engine {cls.name} is sent no priority; remove this line")
        if carrier not in cls.carriers:
            raise ValueError(f"{cls.name} reads no priority from a {carrier.value}; write {cls.carriers[0].value}")

    @classmethod
    def check_thresholds(cls, thresholds: Mapping[str, float] | None, tiers: Sequence[str]) -> None:
        """Raises ValueError, for the operator, for thresholds of the source `engine` that do not fit the engine."""
        if not cls.carriers:
            raise ValueError(f"the engine {cls.name} has no priority of its own; remove engine from sources")
        if not thresholds:
            example = "engine_levels: {high: 10, normal: 5, batch: 0}"
            raise ValueError(f"missing; the source engine needs it, such as {example}")
        if cls.priority_range is not None:
            least, most = cls.priority_range
            if any(not least <= value <= most for value in thresholds.values()):
                span = f"from {least:g} to {most:g}; write thresholds from {least} to {most}"
                raise ValueError(f"{cls.name}'s priorities go {span}")
        named = [thresholds[name] for name in tiers if name in thresholds]
        if named != sorted(set(named), reverse=cls.more_important_is_higher):
            word = cls.direction()
            raise ValueError(f"{cls.name} serves {word} numbers first; give each more important tier a {word} number")

    @classmethod
    def is_recognizable(cls) -> bool:
        """True if the engine has any mark by which its pages show it."""
        return cls.fingerprint != Fingerprint()

    @classmethod
    def may_be(cls, found: type[Engine]) -> bool:
        """True if a server that was recognized as `found` may be this engine: it is, or one is a kind of the other."""
        return not cls.is_recognizable() or issubclass(cls, found) or issubclass(found, cls)

    @classmethod
    def direction(cls) -> str:
        """Which numbers are served first: `higher` or `lower`."""
        return "higher" if cls.more_important_is_higher else "lower"

    @classmethod
    def followed(cls, pages: Pages) -> Pages:
        """Pages for a reader that comes again and again: those in `asked_once` are read once."""
        return AskedOnce(pages, cls.asked_once) if cls.asked_once else pages

    @classmethod
    async def gauges(cls, pages: Pages) -> Gauges:  # noqa: ARG003  # an engine that says nothing
        """The engine's size and its requests, now. Raises Unread."""
        return Gauges()

    @classmethod
    async def facts(cls, pages: Pages) -> Facts:
        """Facts on the engine's own pages. Raises Unread."""
        version = (await find_json(pages, "/version")).get("version")
        return facts_from(
            version=("/version", version if isinstance(version, str) else None),
            has_field=(OPENAPI, has_priority(await find_json(pages, OPENAPI))),
        )


def facts_from(**found: tuple[str, Any]) -> Facts:
    """Facts, each with the page that it was read from and its value, None where the page does not say it."""
    known = {name: (where, value) for name, (where, value) in found.items() if value is not None}
    values: dict[str, Any] = {name: value for name, (_, value) in known.items()}
    return Facts(**values, where=tuple((name, where) for name, (where, _) in known.items()))


def abort_latency(engine: Engine, written_s: float | None, *, is_proxied: bool) -> AbortLatency:
    """The abort latency of an engine: as the policy has it (`written_s`), or else the engine's own."""
    if written_s is not None:
        return AbortLatency(written_s, not is_proxied)
    if not is_proxied and engine.aborts_in_its_call:
        return AbortLatency(0.0, is_from_disconnect=True)
    return AbortLatency(engine.abort_latency_s, not is_proxied)


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
