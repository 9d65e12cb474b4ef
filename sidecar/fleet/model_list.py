"""List of the models, as clients ask for it: `GET /v1/models`, and one of them at `/v1/models/{model}`.

With several pools it is the sidecar's own answer: an engine knows its own models only. It has the fields of OpenAI's
and of Anthropic's list. An alias stands beside its model, which is its `root`, as vLLM lists an adapter.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from functools import partial

import msgspec
from starlette.types import Scope, Send

from sidecar.admission.request_path import exact_paths
from sidecar.admission.responses import REQUEST_ID, request_id, send_error
from sidecar.admission.unguarded import is_public, with_engine_key
from sidecar.errors import AdmissionError
from sidecar.fleet.models import ModelsController
from sidecar.identity.issuer_keys import with_keys

PATH = "/v1/models"
_ANTHROPIC = b"anthropic-version"
"""Header that Anthropic's clients send with every request."""
_SINCE_S = int(time.time())
_SINCE = datetime.fromtimestamp(_SINCE_S, tz=timezone.utc).isoformat().replace("+00:00", "Z")


class ListedModel(msgspec.Struct, frozen=True):
    """One entry. `root` is the model that an alias stands for."""

    id: str
    root: str
    display_name: str
    object: str = "model"
    type: str = "model"
    created: int = _SINCE_S
    created_at: str = _SINCE
    owned_by: str = "admission-sidecar"


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/models`."""

    data: list[ListedModel]
    first_id: str
    last_id: str
    object: str = "list"
    has_more: bool = False


def is_model_list(path: str) -> bool:
    """True if the models are listed on this path, all or one."""
    return path == PATH or path.startswith(f"{PATH}/")


def asked_model(scope: Scope) -> str | None:
    """The model that a request asks about, empty for the list of all; None for another request."""
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return None
    path = next(filter(is_model_list, exact_paths(scope)), None)
    return None if path is None else path.removeprefix(PATH).removeprefix("/")


async def send_models(front: ModelsController, asked: str, scope: Scope, send: Send) -> None:
    """Answers with the models of all pools, or with the one that is `asked` for.

    No key is needed for a `public` path, nor where every request passes.
    """
    headers = dict(scope["headers"])
    named = request_id(headers)
    try:
        if not front.passes_all and not is_public(front.policy, scope):
            await with_keys(partial(with_engine_key, front, scope))
        body = msgspec.json.encode(_one(front, asked) if asked else _all(front))
    except AdmissionError as refusal:
        await send_error(send, refusal, anthropic=_ANTHROPIC in headers, request_id=named)
        return
    answered = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID, named.encode("ascii")),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": answered})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _all(front: ModelsController) -> ModelList:
    data = [ListedModel(name, model, name) for name, model in front.names.called.items()]
    return ModelList(data, data[0].id, data[-1].id)


def _one(front: ModelsController, asked: str) -> ListedModel:
    """Raises ModelNotFound."""
    model = front.names.called.get(asked)
    if model is None:
        raise front.names.not_found(asked)
    return ListedModel(asked, model, asked)
