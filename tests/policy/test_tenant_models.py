"""The models that a tenant may use, and the pool's aliases: what is allowed, what is wrong, and what surprises."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sidecar.policy.compiler import load, load_files
from sidecar.policy.stored_tenants import InvalidTenant, read_record
from sidecar.policy.tenant import Tenant
from sidecar.policy.warnings import warnings
from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

MODELS = """\
engine: vllm
engines: {static: [{name: a, url: http://a:8000}, {name: b, url: http://b:8000}]}
tiers: {high: {}, normal: {}}
models: {llama-70b: {engines: [a], aliases: [llama]}, qwen-7b: {engines: [b]}}
"""
ACME = 'tenant: acme\nkeys: ["sha256:' + "0" * 64 + '"]\ntier: high\n'
FORM = "write up to 200 of A-Z, a-z, 0-9 and . _ / : @ + -, and * for any characters"
NO_NAME = "7 is not an engine's name of a model; put it in quotes, or write llama-70b"
KNOWN = "the engines of llama-70b know this name itself; remove one of the two"
KEYLESS = "requests without a key may use every model, also those that tenant acme may not; write deny"
SHOWN = "/v1/models shows every model to whoever asks without a key; remove it here"


def allowed(folder: Path, models: str) -> Tenant:
    tenant(folder, "acme", f"{ACME}models: {models}\n")
    return load(pool(folder, f"{SMALL}tenants: tenants/*.yaml\n")).named["acme"]


@each(
    ("models", "may", "may_not"),
    [
        ("[llama-70b]", ["llama-70b"], ["llama-70B", "llama", "llama-70b ", "", "llama-70b\n", "Llama-70b"]),
        ('["qwen*"]', ["qwen", "qwen-7b", "qwen/x:y", "qwen\nx"], ["aqwen", "Qwen", "qwe"]),
        ('["*-mini"]', ["-mini", "a-mini"], ["a-mini-b", "mini"]),
        ('["a*b*c", d]', ["abc", "axbxc", "d"], ["ab", "acb", "dd"]),
        ('["a.c", "a+"]', ["a.c", "a+"], ["abc", "aa"]),
        ('["*"]', ["anything", ""], []),
        ('[a, "**"]', ["anything"], []),
    ],
)
def test_names_are_compared_as_they_are(tmp_path: Path, models: str, may: list[str], may_not: list[str]) -> None:
    found = allowed(tmp_path, models)
    assert [name for name in (*may, *may_not) if found.may_use(name)] == may


def test_a_tenant_without_models_may_use_all(tmp_path: Path) -> None:
    tenant(tmp_path, "acme", ACME)
    found = load(pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")).named["acme"]
    assert (found.models, found.may_use("x")) == (None, True)


def test_a_long_name_is_compared_quickly(tmp_path: Path) -> None:
    found = allowed(tmp_path, '["a*a*a*a*a*a*a*a*b"]')
    began_s = time.process_time()
    assert not found.may_use("a" * 2**20)
    assert time.process_time() - began_s < 1


@each(
    ("models", "said"),
    [
        ("[]", 'models: not a list with something in it; write [llama-70b, "qwen*"]'),
        ("", 'models: not a list with something in it; write [llama-70b, "qwen*"]'),
        ("llama", 'models: not a list with something in it; write [llama-70b, "qwen*"]'),
        ("[a, a]", "models: a is listed twice; keep its first place"),
        ("[a b]", f'models[0]: "a b" is not a model\'s name or a pattern of names; {FORM}'),
        ('["qwen?"]', f'models[0]: "qwen?" is not a model\'s name or a pattern of names; {FORM}'),
        ("[7]", "models[0]: 7 is not a model's name or a pattern of names; put it in quotes, or write llama-70b"),
    ],
)
def test_a_wrong_list_of_models_says_what_would_be_right(tmp_path: Path, models: str, said: str) -> None:
    tenant(tmp_path, "acme", f"{ACME}models: {models}\n")
    found = mistakes(pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n"))
    assert [message.split(": ", 1)[1] for message in found] == [said]


def test_a_tenant_of_the_store_has_models_too(tmp_path: Path) -> None:
    record = {"tenant": "x", "tier": "high", "keys": ["sha256:" + "0" * 64], "models": ["llama*"]}
    policy = load(pool(tmp_path))
    stored = read_record(json.dumps(record).encode(), policy)
    assert stored.tenant.models == ("llama*",)
    assert json.loads(stored.text())["models"] == ["llama*"]
    with pytest.raises(InvalidTenant, match=r"^models: not a list with something in it"):
        read_record(json.dumps({**record, "models": []}).encode(), policy)


@each(
    ("aliases", "said"),
    [
        ("{}", ["aliases: not a mapping with something in it; write {gpt-4o: {as: llama-70b}}"]),
        ("{g: llama}", ["aliases.g: a single value where a mapping belongs; write a mapping with as"]),
        ("{g: {}}", ["aliases.g.as: missing; write as: llama-70b"]),
        (
            "{g: {to: m}}",
            ["aliases.g.as: missing; write as: llama-70b", "aliases.g.to: no such key; the keys here are as"],
        ),
        ("{g: {as: 7}}", [f"aliases.g.as: {NO_NAME}"]),
        ("{g: {as: g}}", ['aliases.g.as: "g" is an alias itself; write the name that the engine knows']),
        ("{g: {as: h}, h: {as: /m}}", ['aliases.g.as: "h" is an alias itself; write the name that the engine knows']),
        ("{g: {as: /models/m}, h: {as: /models/m}}", []),
    ],
)
def test_a_wrong_alias_says_what_would_be_right(tmp_path: Path, aliases: str, said: list[str]) -> None:
    found = mistakes(pool(tmp_path, f"{SMALL}aliases: {aliases}\n"))
    assert sorted(message.split(": ", 1)[1] for message in found) == said


@each(
    ("aliases", "said"),
    [
        ("{llama-70b: {as: qwen-7b}}", [f"llama-70b: {KNOWN}"]),
        ("{llama: {as: qwen-7b}}", [f"llama: {KNOWN}"]),
        ("{g: {as: lama-70b}}", ['g.as: "lama-70b" is no model; did you mean "llama-70b"?']),
        ("{g: {as: x}}", ['g.as: "x" is no model; the models are llama-70b, llama, qwen-7b']),
        ("{g: {as: llama}, h: {as: qwen-7b}}", []),
    ],
)
def test_an_alias_beside_models_stands_for_one_of_them(tmp_path: Path, aliases: str, said: list[str]) -> None:
    found = mistakes(pool(tmp_path, f"{MODELS}aliases: {aliases}\n"))
    assert [message.split(": aliases.", 1)[1] for message in found] == said


def test_an_alias_counts_as_its_model(tmp_path: Path) -> None:
    with_models = load(pool(tmp_path, f"{MODELS}aliases: {{g: {{as: llama}}}}\n"))
    llama = dict.fromkeys(("llama-70b", "llama", "g"), "llama-70b")
    assert with_models.called_models == {**llama, "qwen-7b": "qwen-7b"}
    assert load(pool(tmp_path, f"{SMALL}aliases: {{g: {{as: llama}}}}\n")).called_models == {"g": "llama"}


@each(
    ("models", "rest", "said"),
    [
        ('[llama, "qwen*"]', "anonymous: deny", []),
        ("[qwen]", "anonymous: deny", ['models[0]: "qwen" matches no model; did you mean "qwen-7b"?']),
        ('["Qwen*"]', "anonymous: deny", ['models[0]: "Qwen*" matches no model; did you mean "qwen-7b"?']),
        ("[gpt]", "anonymous: deny\naliases: {gpt: {as: llama}}", []),
        ("[llama]", "anonymous: normal", [f"anonymous: {KEYLESS}"]),
        ("[llama]", "anonymous: deny\npublic: [/v1/models]", [f"public: {SHOWN}"]),
    ],
)
def test_models_that_surprise(tmp_path: Path, models: str, rest: str, said: list[str]) -> None:
    tenant(tmp_path, "acme", f"{ACME}models: {models}\n")
    loaded = load_files(pool(tmp_path, f"{MODELS}tenants: tenants/*.yaml\n{rest}\n"))
    about = [warning for warning in warnings(loaded.policy, loaded.place) if "model" in warning.message]
    assert [f"{warning.path.removeprefix('tenants.acme.')}: {warning.message}" for warning in about] == said
    assert all(warning.place is not None and warning.place.line for warning in about)
