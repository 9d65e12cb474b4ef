"""Table of the admin port's routes: each path and method once, with what it answers and when it refuses.

The modules with the handlers make their routes of it (`routes_for`), and `openapi` the description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from sidecar.admin.answers import Handler, RefusedByPage

Schema = Mapping[str, Any]
PATH = "/openapi.json"
MOST_DAYS = 31
"""Of one answer of `/usage`."""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """One answer. `body` is a schema of JSON, or a media type, or None where there is no body to speak of."""

    says: str
    body: Schema | str | None


Refusal = tuple[str, ...]
"""An answer with an error. Each text is a code and, after a colon, when it comes."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path, with the name of its handler.

    `is_open`: it needs no token. `is_of_a_pool`: where models have pools, it stands below `/models/{model}`, too.
    """

    method: str
    path: str
    name: str
    summary: str
    answers: Mapping[int, PageAnswer | Refusal]
    parameters: Sequence[Schema] = ()
    body: Schema | None = None
    is_open: bool = False
    is_of_a_pool: bool = False


def of_class(name: str) -> Schema:
    """The schema of a class."""
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str, says: str) -> PageAnswer:
    return PageAnswer(says, of_class(name))


def _page(says: str, media_type: str = "text/html") -> PageAnswer:
    return PageAnswer(says, media_type)


def _in_path(name: str, description: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def _in_query(name: str, description: str, schema: Schema, *, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "description": description, "schema": schema}


TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean", "default": False}
_DATE: Schema = {"type": "string", "format": "date"}
_DURATION: Schema = {"type": "string", "pattern": "^[0-9.]+ ?(us|ms|s|m|h)$"}
_DESCRIPTION: Schema = {"type": "object", "required": ["openapi", "info", "paths"]}
_ENGINE = _in_path("name", "The engine's name, as `GET /engines` has it. It may have slashes.")
_TENANT = _in_path("name", "The tenant's name.")
_ID_SAYS = "The request's id: the answer's `x-request-id`, or a trace id."
_NO_REQUEST = "unknown_request: no request with this id is known here (any more)"
_NO_ENGINES = "no_engines: the pool has one engine, without `engines` in its policy"
_NO_ENGINE = "unknown_engine: no engine is called so"
_NO_STORED = "no_stored_tenants: the policy has no `stored_tenants: true`"
_NO_TENANT = "unknown_tenant: no tenant is called so"
_NO_STORE = "store_unavailable: the store does not answer; it may have the change all the same"
_IN_FILES = "tenant_in_files: the policy's files have it, and go first"
_NO_KEY = "unknown_key: it has no key of this name, and none, or several, whose hash begins so"
_NO_PAGE = "unknown_page: the port has no such page; a name with a line end is no name"
_SWITCH = "bad_parameter: a switch that is neither true nor false"
_ONE_OF_MODELS: Refusal = (
    "unknown_model: models have pools of their own, and no model is called so, or none was named",
)

OPERATIONS = (
    Operation(
        "GET", "/healthz", "health", "Whether the process lives.", {200: _json("Liveness", "It lives.")}, is_open=True
    ),
    Operation(
        "GET",
        "/readyz",
        "readiness",
        "Whether requests should be sent here.",
        {200: _json("Readiness", "They should."), 503: _json("Readiness", "They should not.")},
        is_open=True,
    ),
    Operation(
        "GET",
        PATH,
        "description",
        "The description of this port: every field and error.",
        {200: PageAnswer("OpenAPI 3.1.", _DESCRIPTION)},
    ),
    Operation("GET", "/state", "state", "The process and its pool.", {200: _json("State", "At this moment.")}),
    Operation(
        "GET",
        "/metrics",
        "metrics",
        "All metrics, in Prometheus' text format.",
        {200: _page("The metrics.", "text/plain"), 404: _page("There are none here, and why.", "text/plain")},
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/",
        "livePage",
        "The live page; where models have pools of their own, the list of them.",
        {
            200: _page("A page."),
            303: PageAnswer("With `?token=TOKEN`: a cookie is set, and the page is at its own address.", None),
        },
        [_in_query("token", "The admin token, once, in a browser.", TEXT)],
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/overview",
        "overview",
        "The pool as the live page shows it.",
        {200: _json("Overview", "At most 2 s old."), 404: _ONE_OF_MODELS},
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/overview/stream",
        "overviewStream",
        "The overview, each second, as server-sent events.",
        {
            200: _page("Until one side ends it. `data` is an Overview.", "text/event-stream"),
            404: _ONE_OF_MODELS,
            503: _page("As many look at it as may, or the server stops.", "text/plain"),
        },
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/observed",
        "observed",
        "The dry run's report (`mode: observe`).",
        {200: _json("ObservedReport", "What would have become of the requests."), 404: _ONE_OF_MODELS},
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/requests",
        "request",
        "One request: its end, and why, for an id with any characters.",
        {200: _json("Explanation", "Its explanation."), 404: (_NO_REQUEST,)},
        [_in_query("id", _ID_SAYS, TEXT, required=True)],
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/requests/{id}",
        "requestById",
        "The same.",
        {200: _json("Explanation", "Its explanation."), 404: (_NO_REQUEST, _NO_PAGE)},
        [_in_path("id", _ID_SAYS)],
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/request",
        "requestPage",
        "The same, as a page to read.",
        {200: _page("A page."), 404: _page("A page that says what is known.")},
        [_in_query("id", _ID_SAYS, TEXT)],
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/engines",
        "engines",
        "The engines of the pool; where models have pools of their own, of all.",
        {200: _json("Engines", "Every incarnation that is still known."), 404: (_NO_ENGINES,)},
        is_of_a_pool=True,
    ),
    Operation(
        "POST",
        "/engines/{name}/drain",
        "drainEngine",
        "Sends an engine no new requests.",
        {
            200: _json("Drained", "It drains; `drained` is true where it is empty."),
            400: (_SWITCH, "bad_parameter: a timeout that is no duration"),
            404: (_NO_ENGINES, _NO_ENGINE, _NO_PAGE),
            409: ("resumed: it was resumed before it was empty",),
            503: ("stopping: this sidecar stops, and the engine drains on",),
            504: ("drain_timeout: it is not empty yet, and drains on",),
        },
        [
            _ENGINE,
            _in_query("wait", "Answers when the engine is empty.", _FLAG),
            _in_query("timeout", "The longest wait. Default: the policy's.", _DURATION),
        ],
        is_of_a_pool=True,
    ),
    Operation(
        "POST",
        "/engines/{name}/resume",
        "resumeEngine",
        "Ends the drain of an engine.",
        {200: _json("Drained", "It gets requests again."), 404: (_NO_ENGINES, _NO_ENGINE, _NO_PAGE)},
        [_ENGINE],
        is_of_a_pool=True,
    ),
    Operation(
        "GET",
        "/models",
        "models",
        "The models that have pools of their own.",
        {200: _json("Pools", "Each model's pool."), 404: ("unknown_page: all models share one pool",)},
    ),
    Operation(
        "GET",
        "/tenants",
        "tenants",
        "The tenants of the policy's files and of the store, by name, 500 in an answer.",
        {200: _json("Tenants", "`next` is the `after` of the next page."), 404: (_NO_STORED,)},
        [_in_query("after", "Only those that come after this name.", TEXT)],
    ),
    Operation(
        "POST",
        "/tenants",
        "putTenant",
        "Writes a tenant to the store: in force here at once, on all replicas within a second.",
        {
            200: _json("Tenants", "It is written (`replace=true`)."),
            201: _json("Tenants", "It is written."),
            400: ("invalid_tenant: a line for each mistake", _SWITCH),
            404: (_NO_STORED,),
            409: (
                _IN_FILES,
                "tenant_exists: the store has it, and nothing said to replace it",
                "key_in_use: one of the keys is another tenant's",
                "too_many_tenants: the store has as many as it may",
            ),
            413: ("body_too_large: larger than a tenant in the store may be",),
            503: (_NO_STORE,),
        },
        [_in_query("replace", "Writes over a tenant of this name.", _FLAG)],
        of_class("Tenant"),
    ),
    Operation(
        "POST",
        "/tenants/{name}/keys",
        "addKey",
        "Adds a key to a tenant in the store.",
        {
            201: _json("Tenants", "The tenant, with its keys."),
            400: ("invalid_tenant: a line for each mistake",),
            404: (_NO_STORED, _NO_TENANT, _NO_PAGE),
            409: (_IN_FILES, "key_in_use: it is another tenant's"),
            413: ("body_too_large: larger than a tenant in the store may be",),
            503: (_NO_STORE,),
        },
        [_TENANT],
        of_class("TenantKey"),
    ),
    Operation(
        "DELETE",
        "/tenants/{name}/keys/{key}",
        "revokeKey",
        "Takes a key from a tenant in the store.",
        {
            200: _json("Tenants", "The tenant, with the keys that are left."),
            400: ("invalid_tenant: the store's record is none",),
            404: (_NO_STORED, _NO_TENANT, _NO_KEY, _NO_PAGE),
            409: (_IN_FILES,),
            503: (_NO_STORE,),
        },
        [_TENANT, _in_path("key", "Its name, or at least 8 digits with which its hash begins.")],
    ),
    Operation(
        "GET",
        "/tenants/{name}",
        "tenant",
        "One tenant, with its keys; two rows where the files and the store have it.",
        {200: _json("Tenants", "The tenant."), 404: (_NO_STORED, _NO_TENANT, _NO_PAGE)},
        [_TENANT],
    ),
    Operation(
        "DELETE",
        "/tenants/{name}",
        "removeTenant",
        "Removes a tenant from the store.",
        {
            200: _json("Removed", "It is removed."),
            404: (_NO_STORED, _NO_TENANT, _NO_PAGE),
            409: (_IN_FILES,),
            503: (_NO_STORE,),
        },
        [_TENANT],
    ),
    Operation(
        "GET",
        "/usage",
        "usage",
        "The use of tenants, by day (UTC), tier and model.",
        {
            200: _json("Usage", "What all replicas have counted."),
            400: (f"bad_parameter: no date, or more than {MOST_DAYS} days",),
            404: ("no_usage: use is not counted here",),
            503: ("store_unavailable: the store does not answer",),
        },
        [
            _in_query("from", "The first day. Default: the last.", _DATE),
            _in_query("to", "The last day. Default: today, by the store's clock.", _DATE),
            _in_query("tenant", "One tenant's alone.", TEXT),
        ],
    ),
)


def routes_for(handlers: Mapping[str, Handler]) -> list[Route]:
    """The routes of the operations of these names. What a handler raises as `RefusedByPage` is answered.

    All methods of a path have one route, so that the refusal of any other method names every one of them.
    """
    by_path: dict[str, dict[str, Handler]] = {}
    for operation in OPERATIONS:
        if operation.name in handlers:
            by_path.setdefault(operation.path, {})[operation.method] = handlers[operation.name]
    return [_route(path, of_path) for path, of_path in by_path.items()]


def _route(path: str, handlers: Mapping[str, Handler]) -> Route:
    async def answered(request: Request) -> ASGIApp:
        try:
            return await handlers["GET" if request.method == "HEAD" else request.method](request)
        except RefusedByPage as refusal:
            return refusal.response

    # A name or an id may have slashes: clients and other programs write them.
    return Route(path.replace("}", ":path}"), answered, methods=list(handlers))
