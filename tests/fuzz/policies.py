"""Policies as hypothesis makes them: the shipped files as trees with something wrong in them, and as damaged text."""

from __future__ import annotations

import copy
from typing import Any

import yaml
from hypothesis import strategies as st

from sidecar.policy.compiler import shipped_policies
from sidecar.policy.schema import SCHEMAS, schema_document

SHIPPED = shipped_policies()
POOL_TEXT = (SHIPPED / "policy.yaml").read_text()
TENANT_TEXT = (SHIPPED / "tenants" / "standard.yaml").read_text()
POOL, TENANT = yaml.safe_load(POOL_TEXT), yaml.safe_load(TENANT_TEXT)
MARK = "sk-marked-4f2a9c7d8e9f0011"
"""A key where only hashes belong: no sentence may repeat it."""

FLEET = {
    **{key: value for key, value in POOL.items() if key != "capacity"},
    "engines": {
        "static": [
            {"name": "a", "url": "http://a:8000"},
            {"name": "b", "url": "http://b:8000/v", "capacity": {"tokens": "100k", "requests": 40}, "speed": 0.5},
            {"name": "c", "url": "http://c:8000", "capacity": {"from": "engine", "waiting": 1}, "prefill": "unbounded"},
        ],
        "capacity": {"tokens": "400k", "requests": 160},
        "prefill": "8k",
        "affinity": {"prefix": True, "weight": 2, "session": ["x-session-id", "prompt_cache_key"]},
        "health": {"path": "/health", "every": "2s", "fail": 3, "rise": 2},
        "slow_start": "60s",
        "replay": {"before_first_byte": 1, "budget": "10%"},
        "drain_timeout": "10m",
    },
    "models": {"llama": {"engines": ["a", "b"], "aliases": ["x", "y"]}, "org/qwen:7b": {"engines": ["c"]}},
}
"""The shipped policy with several engines and models."""
FLEETS = [
    FLEET,
    {**FLEET, "engines": {"dns": {"name": "vllm.ns.svc:8000", "refresh": "5s"}}, "models": {"m": {"aliases": ["x"]}}},
    {**FLEET, "engines": {**FLEET["engines"], "static": None, "file": "engines.yaml"}},
]
LIST = {"engines": FLEET["engines"]["static"]}

_DOCUMENTS = [schema_document(kind) for kind in SCHEMAS.values()]
NAMES = sorted(
    {name for one in _DOCUMENTS for part in (one, *one.get("$defs", {}).values()) for name in part["properties"]}
)
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 10**17, 10**30, 0.5, 1e308, float("inf"), float("nan"), "", " ", "0%", "20%", "100%",
    "101%", "-1%", "1e9%", "0.0000000001%", "5m", "0s", "1ms", "-5m", "99999999d", "400k", "8MiB", "9999999999GiB",
    "normal", "high", "Normal", "nórmal", "tenants/*.yaml", "**/*", "[", "/", "/v1/chat/completions",
    "v1", "/a b", "redis://u:p@h/0", "redis://", "sha256:" + "0" * 64, "engine", "vllm", "none", "a" * 5000,
    "a", "b", "unbounded", "http://a:8000", "http://u:p@h:1", "//", "http://[::1", "http://a:99999", "v:0", "_a._tcp.b",
    "x-session-id", "1e3", "\u202e", "\ud800", "\x07", "deny", MARK,
]  # fmt: skip
SPLICES = [
    ": ", "{", "}", "[", "]", "- ", "\n", "  ", "\t", "&a ", "*a", "!!python/object:x ", "'", '"', "%", "\x00",
    "no", "010", "12:30", "null", "1e309", ".nan", "---\n", "? ", "| ", "<<: ", "#", "\\", "\u2028", "...\n", "=", "~",
    "%YAML 9.9\n", "@", "`", "\r", "\ufeff", "tiers", "reserve: ", "normal: {}\n",
]  # fmt: skip

_VALUES = st.recursive(
    st.sampled_from(SCALARS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for name, value in inner for place in _places(value, (*at, name)))]


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with up to three values replaced, removed, renamed or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in _places(tree) if place]
        if not places:
            return tree
        *around, name = draw(st.sampled_from(places))
        parent = tree
        for part in around:
            parent = parent[part]
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add"]))
        if what == "replace":
            parent[name] = draw(_VALUES)
        elif what == "remove":
            del parent[name]
        elif isinstance(parent, dict):
            other = draw(st.sampled_from(NAMES) | st.sampled_from([MARK, "", " ", "a.b", "x" * 300]))
            parent[other] = parent.pop(name) if what == "rename" else draw(_VALUES)
    return tree


def _written(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


@st.composite
def damaged(draw: st.DrawFn, text: st.SearchStrategy[str]) -> str:
    """The text with pieces cut out, moved, or thrown in."""
    made = draw(text)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(made)))
        until = min(len(made), at + draw(st.integers(0, 30)))
        piece = draw(st.sampled_from(SPLICES) | st.text(max_size=3) | st.just(made[at:until] * 2))
        made = made[:at] + piece + made[until:]
    return made


POOLS = st.one_of(
    changed(POOL).map(_written),
    damaged(st.just(POOL_TEXT)),
    damaged(changed(POOL).map(_written)),
    st.sampled_from(FLEETS).flatmap(changed).map(_written),
    damaged(st.sampled_from(FLEETS).flatmap(changed).map(_written)),
)
LISTS = st.one_of(changed(LIST).map(_written), damaged(changed(LIST).map(_written)))
"""Engine lists."""
TENANTS = st.one_of(
    st.just(TENANT_TEXT),
    changed(TENANT).map(_written),
    damaged(st.just(TENANT_TEXT)),
    damaged(changed(TENANT).map(_written)),
)
