"""`GET /openapi.json` of the admin port: an OpenAPI 3.1 description of its pages, for clients made from it.

It is the same on every port: of one pool, of several models, of several workers. A test compares it with the routes,
and another sends what it allows to a real sidecar, and what it does not allow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from sidecar.admin.engine_routes import Drained, Engines
from sidecar.admin.model_routes import Pools
from sidecar.admin.tenant_routes import Removed, Tenants
from sidecar.admin.usage_routes import MOST_DAYS, Usage
from sidecar.cluster.document import Overview
from sidecar.cluster.dry_run import ObservedReport
from sidecar.errors import HeadTimeout, HeadTooLarge, InvalidHttp
from sidecar.explain.document import Explanation
from sidecar.policy.schema import schema_document
from sidecar.policy.tenant import Tenant
from sidecar.secrets import TOKEN_VARIABLE
from sidecar.version import __version__

PATH = "/openapi.json"
_SCHEMAS = "#/components/schemas/"
_DOCUMENTS = (Drained, Engines, Explanation, ObservedReport, Overview, Pools, Removed, Tenants, Usage)
_ABOUT = (
    "The admin port of a sidecar: health, the pool as it stands, one request's explanation, engines, tenants and their "
    f"use. A port with an admin token ({TOKEN_VARIABLE}) wants it for everything but /healthz and /readyz. Durations "
    "are in seconds, sizes in tokens, and times in seconds since 1970."
)

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer. `body` is a schema of JSON, or a media type, or None where there is no body to speak of."""

    says: str
    body: Schema | str | None


_Refusal = tuple[str, ...]
"""An answer with an error. Each text is a code and, after a colon, when it comes."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method on one path. `is_of_a_pool`: where models have pools, it stands below `/models/{model}`, too."""

    method: str
    path: str
    name: str
    summary: str
    answers: Mapping[int, _Answer | _Refusal]
    parameters: Sequence[Schema] = ()
    body: Schema | None = None
    is_open: bool = False
    is_of_a_pool: bool = False


def _of(name: str) -> Schema:
    return {"$ref": _SCHEMAS + name}


def _in_path(name: str, description: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def _in_query(name: str, description: str, schema: Schema, *, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "description": description, "schema": schema}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean", "default": False}
_DATE: Schema = {"type": "string", "format": "date"}
_DURATION: Schema = {"type": "string", "pattern": "^[0-9.]+ ?(us|ms|s|m|h)$"}
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
_NO_PAGE = "unknown_page: the port has no such page; a name with a line end is no name"
_SWITCH = "bad_parameter: a switch that is neither true nor false"
_ONE_OF_MODELS = "unknown_model: models have pools of their own, and no model is called so, or none was named"
_HEALTHY = {"type": "object", "required": ["status"], "properties": {"status": {"const": "alive"}}}

_OPERATIONS = (
    _Operation(
        "get",
        "/healthz",
        "health",
        "Whether the process lives.",
        {200: _Answer("It lives.", _HEALTHY)},
        is_open=True,
    ),
    _Operation(
        "get",
        "/readyz",
        "readiness",
        "Whether requests should be sent here.",
        {200: _Answer("They should.", _of("Readiness")), 503: _Answer("They should not.", _of("Readiness"))},
        is_open=True,
    ),
    _Operation(
        "get",
        PATH,
        "description",
        "This document.",
        {200: _Answer("OpenAPI 3.1.", {"type": "object", "required": ["openapi", "info", "paths"]})},
    ),
    _Operation("get", "/state", "state", "The process and its pool.", {200: _Answer("At this moment.", _of("State"))}),
    _Operation(
        "get",
        "/metrics",
        "metrics",
        "All metrics, in Prometheus' text format.",
        {200: _Answer("The metrics.", "text/plain"), 404: _Answer("There are none here, and why.", "text/plain")},
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/",
        "livePage",
        "The live page; where models have pools of their own, the list of them.",
        {
            200: _Answer("A page.", "text/html"),
            303: _Answer("With `?token=TOKEN`: a cookie is set, and the page is at its own address.", None),
        },
        [_in_query("token", "The admin token, once, in a browser.", _TEXT)],
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/overview",
        "overview",
        "The pool as the live page shows it: of all replicas.",
        {200: _Answer("At most 2 s old.", _of("Overview")), 404: (_ONE_OF_MODELS,)},
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/overview/stream",
        "overviewStream",
        "The overview, each second, as server-sent events.",
        {
            200: _Answer("Until one side ends it. `data` is an Overview.", "text/event-stream"),
            404: (_ONE_OF_MODELS,),
            503: _Answer("As many look at it as may, or the server stops.", "text/plain"),
        },
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/observed",
        "observed",
        "The dry run's report (`mode: observe`).",
        {200: _Answer("What would have become of the requests.", _of("ObservedReport")), 404: (_ONE_OF_MODELS,)},
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/requests",
        "request",
        "What became of one request, and why. For an id with any characters.",
        {200: _Answer("Its explanation.", _of("Explanation")), 404: (_NO_REQUEST,)},
        [_in_query("id", _ID_SAYS, _TEXT, required=True)],
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/requests/{id}",
        "requestById",
        "What became of one request, and why.",
        {200: _Answer("Its explanation.", _of("Explanation")), 404: (_NO_REQUEST, _NO_PAGE)},
        [_in_path("id", _ID_SAYS)],
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/request",
        "requestPage",
        "The same as a page to read.",
        {200: _Answer("A page.", "text/html"), 404: _Answer("A page that says what is known.", "text/html")},
        [_in_query("id", _ID_SAYS, _TEXT)],
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/engines",
        "engines",
        "The engines of the pool; where models have pools of their own, of all.",
        {200: _Answer("Every incarnation that is still known.", _of("Engines")), 404: (_NO_ENGINES,)},
        is_of_a_pool=True,
    ),
    _Operation(
        "post",
        "/engines/{name}/drain",
        "drainEngine",
        "Sends an engine no new requests.",
        {
            200: _Answer("It drains; `drained` is true where it is empty.", _of("Drained")),
            400: (
                _SWITCH,
                "bad_parameter: a timeout that is no duration",
            ),
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
    _Operation(
        "post",
        "/engines/{name}/resume",
        "resumeEngine",
        "Ends the drain of an engine.",
        {
            200: _Answer("It gets requests again.", _of("Drained")),
            404: (_NO_ENGINES, _NO_ENGINE, _NO_PAGE),
        },
        [_ENGINE],
        is_of_a_pool=True,
    ),
    _Operation(
        "get",
        "/models",
        "models",
        "The models that have pools of their own.",
        {200: _Answer("Each model's pool.", _of("Pools")), 404: ("unknown_page: all models share one pool",)},
    ),
    _Operation(
        "get",
        "/tenants",
        "tenants",
        "The tenants of the policy's files and of the store, by name, 500 in an answer.",
        {200: _Answer("`next` is the `after` of the next page.", _of("Tenants")), 404: (_NO_STORED,)},
        [_in_query("after", "Only those that come after this name.", _TEXT)],
    ),
    _Operation(
        "post",
        "/tenants",
        "putTenant",
        "Writes a tenant to the store. It is in force here at once, and on all replicas within a second.",
        {
            200: _Answer("It is written (`replace=true`).", _of("Tenants")),
            201: _Answer("It is written.", _of("Tenants")),
            400: (
                "invalid_tenant: a line for each mistake",
                _SWITCH,
            ),
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
        _of("Tenant"),
    ),
    _Operation(
        "get",
        "/tenants/{name}",
        "tenant",
        "One tenant; two rows where the files and the store have it.",
        {
            200: _Answer("The tenant.", _of("Tenants")),
            404: (_NO_STORED, _NO_TENANT, _NO_PAGE),
        },
        [_TENANT],
    ),
    _Operation(
        "delete",
        "/tenants/{name}",
        "removeTenant",
        "Removes a tenant from the store.",
        {
            200: _Answer("It is removed.", _of("Removed")),
            404: (_NO_STORED, _NO_TENANT, _NO_PAGE),
            409: (_IN_FILES,),
            503: (_NO_STORE,),
        },
        [_TENANT],
    ),
    _Operation(
        "get",
        "/usage",
        "usage",
        "What tenants have used, by day (UTC), tier and model.",
        {
            200: _Answer("What all replicas have counted.", _of("Usage")),
            400: (f"bad_parameter: no date, or more than {MOST_DAYS} days",),
            404: ("no_usage: use is not counted here",),
            503: ("store_unavailable: the store does not answer",),
        },
        [
            _in_query("from", "The first day. Default: the last.", _DATE),
            _in_query("to", "The last day. Default: today, by the store's clock.", _DATE),
            _in_query("tenant", "One tenant's alone.", _TEXT),
        ],
    ),
)

_BEFORE_ANY_PAGE: Mapping[int, _Refusal] = {
    400: (f"{InvalidHttp.code}: no HTTP as RFC 9112 has it",),
    401: ("admin_token_required: the admin token is missing, or wrong",),
    403: (
        "cross_site: a page of another site asked",
        "unknown_host: the port was asked under a name that is not this machine's",
        "admin_token_required: a change, on a port that the network reaches without a token",
    ),
    408: (f"{HeadTimeout.code}: the headers did not come in time",),
    431: (f"{HeadTooLarge.code}: the headers are too large",),
    503: ("no_worker: no worker of `serve --workers` serves at this moment",),
}
_OWN_SCHEMAS: Mapping[str, Schema] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message"],
                "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            }
        },
    },
    "Readiness": {
        "type": "object",
        "required": ["status", "reasons", "notices"],
        "properties": {
            "status": {"enum": ["ready", "not ready"]},
            "reasons": {"type": "array", "items": _TEXT, "description": "Why it is not ready; none where it is."},
            "notices": {"type": "array", "items": _TEXT, "description": "What is out of order all the same."},
        },
    },
    "State": {
        "type": "object",
        "description": "For people and dashboards: members may come with a new version, and none goes.",
        "properties": {
            "version": {"type": "object", "description": "What runs here, and the layout of what it keeps in a store."},
            "policy": {"type": "object", "description": "Its generation, and the engine that it names."},
            "mode": {"enum": ["enforce", "observe", "pass"]},
            "engine": {"type": "object", "description": "The engine as the last look found it."},
            "draining": {"type": "boolean", "description": "New requests are refused: the process ends."},
            "under_way": {"type": "integer", "description": "Guarded requests in this process."},
            "shadows": {"type": "integer", "description": "Requests that a dry run follows."},
            "aborting": {"type": "object", "description": "What is held until an engine has given up requests."},
            "background": {"type": "integer", "description": "Responses in the background that are polled."},
            "pool": {"type": "object", "description": "The pool; where models have pools, there is `models` instead."},
            "models": {"type": "object", "description": "By model: its engine and its pool."},
            "lease_sizes": {"type": "object", "description": "What was learned of the lengths of answers."},
            "gain": {"type": "object", "description": "Service gain by tier, and the engines' speed."},
            "generations": {"type": "object", "description": "The replicas by the generation that they run."},
            "workers": {"type": "array", "description": "With `serve --workers`: a row for each."},
        },
    },
}


def document() -> dict[str, Any]:
    """The description, as JSON types."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        path = paths.setdefault(operation.path, {})
        path[operation.method] = _described(operation)
        if operation.is_of_a_pool:
            path["servers"] = [{"url": "/"}, _MODEL_SERVER]
    token = {"type": "http", "scheme": "bearer", "description": f"The admin token, {TOKEN_VARIABLE}."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "admission-sidecar: admin port", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"adminToken": []}, {}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": {str(status): _response(refusal) for status, refusal in _BEFORE_ANY_PAGE.items()},
            "securitySchemes": {"adminToken": token},
        },
    }


@cache
def text() -> bytes:
    """The description as it is served."""
    return msgspec.json.encode(document())


_MODEL_SERVER: Schema = {
    "url": "/models/{model}",
    "description": "The pages of one model's pool, where models have pools of their own.",
    "variables": {"model": {"default": "MODEL", "description": "As `GET /models` has it."}},
}


def _described(operation: _Operation) -> dict[str, Any]:
    """One operation of OpenAPI."""
    of_page = operation.answers
    answers = {status: _response(answer) for status, answer in of_page.items()}
    for status, refusal in _BEFORE_ANY_PAGE.items():
        own = of_page.get(status)
        if isinstance(own, _Answer) or (operation.is_open and status in (401, 403, 503)):
            continue
        answers[status] = {"$ref": f"#/components/responses/{status}"} if own is None else _response((*own, *refusal))
    return {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        **({} if operation.body is None else {"requestBody": {"required": True, **_content(operation.body)}}),
        "responses": {str(status): answers[status] for status in sorted(answers)},
        **({"security": []} if operation.is_open else {}),
    }


def _response(answer: _Answer | _Refusal) -> dict[str, Any]:
    if isinstance(answer, _Answer):
        return {"description": answer.says, **_content(answer.body)}
    codes = {"enum": sorted({said.partition(":")[0] for said in answer})}
    error = {"properties": {"error": {"properties": {"code": codes}}}}
    return {"description": "; ".join(answer), **_content({"allOf": [_of("Error"), error]})}


def _content(body: Schema | str | None) -> dict[str, Any]:
    if body is None:
        return {}
    return {"content": {body: {"schema": _TEXT}} if isinstance(body, str) else {"application/json": {"schema": body}}}


def _schemas() -> dict[str, Any]:
    """All schemas by name: of the answers' classes, of a tenant's file, and those above."""
    _, found = msgspec.json.schema_components(_DOCUMENTS, ref_template=_SCHEMAS + "{name}")
    tenant = json.loads(json.dumps(schema_document(Tenant)).replace('"#/$defs/', f'"{_SCHEMAS}'))
    inner = tenant.pop("$defs", {})
    return dict(sorted({**found, **inner, "Tenant": tenant, **_OWN_SCHEMAS}.items()))
