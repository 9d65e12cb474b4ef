"""The choice of a request's model by its name."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import MappingProxyType

import msgspec
import pytest

from sidecar.admission.model_names import MOST_NAMED, ModelNames
from sidecar.apis import Api
from sidecar.errors import InvalidBody, ModelNotFound
from sidecar.payload.decode import decode
from sidecar.policy.fleet import ModelPolicy
from sidecar.policy.tenant import Tenant
from tests.support.middleware import policy


def names(**models: tuple[str, ...]) -> ModelNames:
    found = {name: ModelPolicy(None, aliases) for name, aliases in models.items()}
    return ModelNames(replace(policy(), models=MappingProxyType(found)))


def test_names_and_aliases_are_compared_as_they_are() -> None:
    found = names(m=("em", "Em"), n=())
    assert [found.model_for(name, b"{}") for name in ("m", "em", "Em", "n")] == ["m", "m", "m", "n"]
    for name in ("M", "m ", " m", "\uff4d", "m\u200b", "em\u0301", "EM"):
        with pytest.raises(ModelNotFound):
            found.model_for(name, b"{}")


def test_an_error_lists_the_first_models_only() -> None:
    found = names(**{f"m{number}": () for number in range(MOST_NAMED + 5)})
    with pytest.raises(ModelNotFound, match=rf"send one of m0, .*, m{MOST_NAMED - 1} and 5 more \(GET /v1/models"):
        found.model_for("x", b"{}")
    with pytest.raises(InvalidBody, match=r"missing; send one of m0, .* and 5 more"):
        found.model_for(None, b"{}")


def test_a_tenant_is_shown_the_names_that_it_may_use_alone() -> None:
    found, bounded = names(m=("em",), n=(), x=()), Tenant(name="t", level=0, models=("e*", "n", "gone"))
    refusals = []
    for name in ("x", "absent", "m"):
        with pytest.raises(ModelNotFound) as refused:
            found.refuse_others(bounded, name, b"{}")
        refusals.append(refused)
    found.refuse_others(bounded, "gone", b"{}")
    with pytest.raises(ModelNotFound) as refused:  # it is allowed, and no pool has it
        found.model_for("gone", b"{}", bounded)
    said = [each.value.message.partition("; ") for each in (*refusals, refused)]
    assert {each[2] for each in said} == {"send one of em, n"}
    assert [each[0] for each in said] == [f'no pool serves the model "{name}"' for name in ("x", "absent", "m", "gone")]
    with pytest.raises(InvalidBody, match=r"^model: missing; send one of em, n$"):
        found.refuse_others(bounded, None, b"{}")
    with pytest.raises(ModelNotFound, match=r"; GET /v1/models lists those there are$"):
        found.refuse_others(replace(bounded, models=("gone",)), "m", b"{}")
    names(n=()).refuse_others(bounded, None, b"{}")  # the only model there is, as without a bound
    with pytest.raises(InvalidBody, match="upload"):
        found.refuse_others(bounded, "n", None)


@pytest.mark.parametrize("name", ["x" * 2**20, "sk-" + "a" * 64, "line\nbreak\x1b[31m", "\u202eevil"])
def test_a_clients_name_is_shown_on_a_short_line(name: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        names(m=(), n=()).model_for(name, b"{}")
    with pytest.raises(ModelNotFound) as bounded:
        names().refuse_others(Tenant(name="t", level=0, models=("m*", "n")), name, b"{}")
    for refusal in (refused, bounded):
        assert len(refusal.value.message) < 130
        assert refusal.value.message.isprintable()


@pytest.mark.parametrize(
    ("body", "is_twice"),
    [
        ('{"model": "m", "model": "m"}', True),
        ('{"model": "n", "x": [1, {"y": "}"}], "model": "m"}', True),
        ('{"mod\\u0065l": "n", "model": "m"}', True),
        ('{"\\u006d\\u006f\\u0064\\u0065\\u006c": "n", "model" : "m"}', True),
        ('{"model": "m", "x": {"model": "n"}}', False),
        ('{"x": [{"model": "n"}], "model": "m"}', False),
        ('{"model": "m", "role": "model"}', False),
        ('{"model": "m", "text": "\\"model\\": \\"n\\", \\u0041"}', False),
        ('{"model": "m", "Model": "n"}', False),
        ('{"model": "m", "x": "a\\\\", "y": "model"}', False),
    ],
)
def test_a_body_names_its_model_once(body: str, is_twice: bool) -> None:
    members = json.loads(body, object_pairs_hook=list)
    assert (sum(key == "model" for key, _ in members) > 1) is is_twice  # what an engine's parser sees
    found = names(m=(), n=())
    if is_twice:
        with pytest.raises(InvalidBody, match="given twice"):
            found.model_for("m", body.encode())
    else:
        assert found.model_for("m", body.encode()) == "m"


def test_the_pool_is_chosen_by_the_model_that_was_decoded() -> None:
    body = msgspec.json.encode({"model": "em", "messages": [{"role": "user", "content": "x"}]})
    assert names(m=("em",), n=()).model_for(decode(Api.CHAT, body).model, body) == "m"


def test_a_long_body_is_looked_through_quickly() -> None:
    turn = '{"role": "model", "content": "say \\"model\\": \\u00e9"}, '
    body = ('{"model": "m", "messages": [' + turn * 100_000 + "{}]}").encode()
    began_s = time.process_time()
    assert names(m=(), n=()).model_for("m", body) == "m"
    assert time.process_time() - began_s < 1
