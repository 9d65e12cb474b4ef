"""`GET /openapi.json` of the admin port: an OpenAPI 3.1 description of its pages, for clients made from it.

It is the same on every port: of one pool, of several models, of several workers. The schemas are those of the classes
that the pages answer. A test sends what it allows to a real sidecar, and what it does not allow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from sidecar.admin.answers import Error, Liveness, Readiness
from sidecar.admin.engine_routes import Drained, Engines, Pools
from sidecar.admin.operations import OPERATIONS, TEXT, Operation, PageAnswer, Refusal, Schema, of_class
from sidecar.admin.tenant_routes import Removed, Tenants, Usage
from sidecar.cluster.document import Overview
from sidecar.cluster.dry_run import ObservedReport
from sidecar.errors import HeadTimeout, HeadTooLarge, InvalidHttp
from sidecar.explain.document import Explanation
from sidecar.policy.schema import schema_document
from sidecar.policy.secrets import TOKEN_VARIABLE
from sidecar.policy.tenant import Tenant
from sidecar.version import __version__

_SCHEMAS = "#/components/schemas/"
_DOCUMENTS = (
    *(Drained, Engines, Error, Explanation, Liveness, ObservedReport, Overview),
    *(Pools, Readiness, Removed, Tenants, Usage),
)
_ABOUT = (
    "The admin port of a sidecar: health, the pool as it stands, one request's explanation, engines, tenants and their "
    f"use. A port with an admin token ({TOKEN_VARIABLE}) wants it for everything but /healthz and /readyz. Durations "
    "are in seconds, sizes in tokens, and times in seconds since 1970."
)

_BEFORE_ANY_PAGE: Mapping[int, Refusal] = {
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
_STATE: Mapping[str, tuple[str, str]] = {
    "version": ("object", "What runs here, and the layout of what it keeps in a store."),
    "policy": ("object", "Its generation, the engine that it names, and what its hours say now."),
    "mode": ("string", "enforce, observe or pass."),
    "engine": ("object", "The engine as the last look found it."),
    "draining": ("boolean", "New requests are refused: the process ends."),
    "under_way": ("integer", "Guarded requests in this process."),
    "shadows": ("integer", "Requests that a dry run follows."),
    "aborting": ("object", "What is held until an engine has given up requests."),
    "background": ("integer", "Responses in the background that are polled."),
    "pool": ("object", "The pool; where models have pools, there is `models` instead."),
    "models": ("object", "By model: its engine and its pool."),
    "lease_sizes": ("object", "What was learned of the lengths of answers."),
    "gain": ("object", "Service gain by tier, and the engines' speed."),
    "generations": ("object", "The replicas by the generation that they run."),
    "workers": ("array", "With `serve --workers`: a row for each."),
}
"""The members of `/state`, which is for people and dashboards: members may come with a new version, and none goes."""


def document() -> dict[str, Any]:
    """The description, as JSON types."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = paths.setdefault(operation.path, {})
        path[operation.method.lower()] = _describe(operation)
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


def _describe(operation: Operation) -> dict[str, Any]:
    """One operation of OpenAPI."""
    of_page = operation.answers
    answers = {status: _response(answer) for status, answer in of_page.items()}
    for status, refusal in _BEFORE_ANY_PAGE.items():
        own = of_page.get(status)
        if isinstance(own, PageAnswer) or (operation.is_open and status in (401, 403, 503)):
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


def _response(answer: PageAnswer | Refusal) -> dict[str, Any]:
    if isinstance(answer, PageAnswer):
        return {"description": answer.says, **_content(answer.body)}
    codes = {"enum": sorted({line.partition(":")[0] for line in answer})}
    error = {"properties": {"error": {"properties": {"code": codes}}}}
    return {"description": "; ".join(answer), **_content({"allOf": [of_class("Error"), error]})}


def _content(body: Schema | str | None) -> dict[str, Any]:
    if body is None:
        return {}
    return {"content": {body: {"schema": TEXT}} if isinstance(body, str) else {"application/json": {"schema": body}}}


def _schemas() -> dict[str, Any]:
    """All schemas by name: of the answers' classes, of a tenant's file, and of `/state`."""
    _, found = msgspec.json.schema_components(_DOCUMENTS, ref_template=_SCHEMAS + "{name}")
    tenant = json.loads(json.dumps(schema_document(Tenant)).replace('"#/$defs/', f'"{_SCHEMAS}'))
    inner = tenant.pop("$defs", {})
    members = {name: {"type": kind, "description": says} for name, (kind, says) in _STATE.items()}
    state = {"type": "object", "properties": members}
    return dict(sorted({**found, **inner, "Tenant": tenant, "State": state}.items()))
