"""What is said of one policy that replaces another: every difference, in the words of the files, and no key."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from sidecar.engines import ENGINES
from sidecar.policy.choices import Learn
from sidecar.policy.compiler import load
from sidecar.policy.diff import MOST_NAMED, describe_changes, differences, needs_restart
from sidecar.policy.fleet import ModelAlias
from sidecar.policy.model import Policy
from tests.support.each import each
from tests.support.middleware import policy, write_policy

BASE = """\
engine: none
capacity: {tokens: 100k, requests: 4}
aging: {promote_after: 5m, ceiling: high}
tiers:
  high: {reserve: 20%}
  batch: {limit: 60%, queue: {max_requests: 100, max_wait: 30m}, slo: {starvation: 30m}}
default_tier: batch
anonymous: batch
tenants: tenants/*.yaml
"""
FLEET = (
    BASE.replace("capacity: {tokens: 100k, requests: 4}\n", "")
    + """\
engines:
  static:
    - {name: a, url: http://a:8000}
    - {name: b, url: http://b:8000, capacity: {tokens: 20k, requests: 2}, speed: 0.5}
  capacity: {tokens: 100k, requests: 4}
models: {llama: {engines: [a], aliases: [x]}, qwen: {engines: [b]}}
"""
)
ACME = "tenant: acme\nkeys: [{keys}]\ntier: batch\nmax_tier: high\n"


def key(number: int) -> str:
    return f'"sha256:{hashlib.sha256(b"%d" % number).hexdigest()}"'


def written(folder: Path, pool: str = BASE, **tenants: str) -> Policy:
    folder.mkdir()
    (folder / "tenants").mkdir()
    (folder / "policy.yaml").write_text(pool)
    for name, text in (tenants or {"acme": ACME.format(keys=key(1))}).items():
        (folder / "tenants" / f"{name}.yaml").write_text(text)
    return load(folder)


@each(
    ("before", "after", "said"),
    [
        ("limit: 60%", "limit: 40%", "tier batch limit 60% -> 40%"),
        ("{reserve: 20%}", "{reserve: 12.5%}", "tier high reserve 20% -> 12.5%"),
        ("{reserve: 20%}", "{reserve: 20%, preempt_after: 500ms}", "tier high preempt_after none -> 500ms"),
        ("{limit: 60%", "{limit: 60%, preemptible: true", "tier batch preemptible false -> true"),
        ("max_requests: 100", "max_requests: 10k", "tier batch queue max_requests 100 -> 10,000"),
        ("starvation: 30m", "starvation: 30m, tpot: 60ms", "tier batch slo tpot none -> 60ms"),
        ("tokens: 100k, ", "", "capacity tokens 100,000 -> unbounded"),
        ("requests: 4}", "requests: 8}", "capacity requests 4 -> 8"),
        ("requests: 4}", "requests: 4, learn: off}", "capacity learn cautious -> off"),
        ("promote_after: 5m", "promote_after: 1m", "aging 5m up to high -> 1m up to high"),
        ("aging: {promote_after: 5m, ceiling: high}\n", "", "aging 5m up to high -> none"),
        ("anonymous: batch", "anonymous: deny", "anonymous batch -> deny"),
        ("default_tier: batch", "default_tier: high", "default_tier batch -> high"),
        ("engine: none", "engine: none\npublic: [/health, /a]", "public none -> /health, /a"),
        ("engine: none", "engine: none\nmode: observe", "mode enforce -> observe"),
        ("engine: none", "engine: none\nabort_latency: 4s", "abort_latency none -> 4s"),
        ("engine: none", "engine: none\nmax_body: 1MiB", "max_body 8,388,608 -> 1,048,576"),
        ("engine: none", "engine: none\nsources: [key]", "sources body, header, endpoint, key -> key"),
        ("engine: none", "engine: none\ntier_header: x-tier", "tier_header x-priority -> x-tier"),
        ("{reserve: 20%}", "{reserve: 20%, timeouts: {total: 1h}}", "tier high timeouts total 4h -> 1h"),
        ("engine: none", 'engine: none\ncors: {origins: ["*"]}', "cors none -> *"),
        ("engine: none", "engine: none\ncost: {output: 4}", "cost none -> input 1, cached 1, output 4"),
    ],
)
def test_a_difference_of_the_pool_is_reported_as_it_is_written(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in BASE
    changed = written(tmp_path / "after", BASE.replace(before, after))
    assert differences(written(tmp_path / "before"), changed) == [said]


BETA = ACME.replace("acme", "beta").format(keys=f"{key(2)}, {key(3)}")


@each(
    ("after", "said"),
    [
        ({"beta": BETA}, ["tenant acme removed (1 key)", "tenant beta added (2 keys)"]),
        ({"acme": ACME.format(keys=f"{key(1)}, {key(2)}")}, ["tenant acme: 1 key added"]),
        ({"acme": ACME.format(keys=key(2))}, ["tenant acme: 1 key removed", "tenant acme: 1 key added"]),
        ({"acme": ACME.format(keys=key(1)) + "weight: 3\n"}, ["tenant acme weight 1 -> 3"]),
        ({"acme": ACME.format(keys=key(1)).replace("tier: batch", "tier: high")}, ["tenant acme tier batch -> high"]),
        (
            {"acme": ACME.format(keys=key(1)) + "limits: {tokens_per_minute: 200k, burst: 10s}\n"},
            ["tenant acme limits tokens_per_minute none -> 200,000", "tenant acme limits burst 1m -> 10s"],
        ),
        (
            {"acme": ACME.format(keys=key(1)) + "limits: {models: {llama: {tokens_per_minute: 5}}}\n"},
            ["tenant acme limits models llama added"],
        ),
        (
            {"acme": ACME.replace(": batch", ": high").format(keys=key(1)) + "over_limit: {downgrade: batch}\n"},
            ["tenant acme tier batch -> high", "tenant acme over_limit reject -> batch"],
        ),
    ],
)  # fmt: skip
def test_a_difference_of_a_tenant_names_it_and_no_key(tmp_path: Path, after: Any, said: list[str]) -> None:
    found = differences(written(tmp_path / "before"), written(tmp_path / "after", **after))
    assert found == said


def test_a_limit_at_a_model_changes_by_itself(tmp_path: Path) -> None:
    limits = "limits: {models: {llama: {tokens_per_minute: %d}}}\n"
    before, after = (
        written(tmp_path / str(most), acme=ACME.format(keys=key(1)) + limits % most) for most in (500, 6000)
    )
    assert differences(before, after) == ["tenant acme limits models llama tokens_per_minute 500 -> 6,000"]


def test_endpoints_that_came_went_and_changed() -> None:
    before = policy()
    endpoints = dict(before.endpoints)
    del endpoints["/v1/messages"]
    endpoints["/v2/chat"] = replace(endpoints["/v1/chat/completions"], path="/v2/chat")
    endpoints["/v1/batch/completions"] = replace(endpoints["/v1/batch/completions"], level=2)
    assert differences(before, replace(before, endpoints=endpoints)) == [
        "endpoint /v1/messages removed",
        "endpoint /v1/batch/completions tier batch -> normal",
        "endpoint /v2/chat added",
    ]


def test_a_size_that_the_engine_tells_is_reported_by_what_the_policy_adds(tmp_path: Path) -> None:
    pools = [
        BASE.replace("engine: none", "engine: vllm").replace("tokens: 100k, requests: 4", f"from: engine, {more}")
        for more in ("fraction: 95%, waiting: 2", "fraction: 80%, waiting: 4")
    ]
    before, after = (written(tmp_path / str(number), pool) for number, pool in enumerate(pools))
    assert differences(before, after) == ["capacity fraction 95% -> 80%", "capacity waiting 2 -> 4"]


def test_a_tier_that_is_guarded_from_now_on(tmp_path: Path) -> None:
    slo = "slo: {ttft: 1s, tpot: 50ms, hold: 97.5%}"
    before = written(tmp_path / "before", BASE.replace("20%}", f"20%, {slo.replace(', hold: 97.5%', '')}}}"))
    after = written(tmp_path / "after", BASE.replace("20%}", f"20%, {slo}}}"))
    assert differences(before, after) == ["tier high slo hold none -> 97.5%"]
    assert needs_restart(before, after) == []


def test_a_comment_is_no_difference(tmp_path: Path) -> None:
    before, after = written(tmp_path / "before"), written(tmp_path / "after", BASE + "# a comment\n")
    assert before.generation != after.generation
    assert describe_changes(before, after) == "nothing that counts is different"


def test_a_line_has_an_end(tmp_path: Path) -> None:
    tenants = {f"t{n}": ACME.replace("acme", f"t{n}").format(keys=key(n)) for n in range(MOST_NAMED + 30)}
    line = describe_changes(
        written(tmp_path / "before", **tenants), written(tmp_path / "after", acme=ACME.format(keys=key(999)))
    )
    assert line.endswith("; and 31 more differences")
    assert line.count(";") == MOST_NAMED


@each(
    ("before", "after", "said"),
    [
        ("speed: 0.5", "speed: 1", "engine b speed 0.5 -> 1"),
        ("http://b:8000", "http://b:9000", "engine b url http://b:8000 -> http://b:9000"),
        ("speed: 0.5", "speed: 0.5, prefill: unbounded", "engine b prefill 8,000 -> unbounded"),
        (
            "tokens: 20k, requests: 2",
            "tokens: 30k, requests: 2",
            "capacity tokens 120,000 -> 130,000; engine b capacity tokens 20,000 -> 30,000",
        ),
        (
            "capacity: {tokens: 20k, requests: 2}, ",
            "",
            "capacity tokens 120,000 -> 200,000; capacity requests 6 -> 8; engine b capacity tokens 20,000 -> 100,000; "
            "engine b capacity requests 2 -> 4",
        ),
        (
            "    - {name: b",
            "    - {name: c, url: http://c, capacity: {tokens: 1, requests: 1}}\n    - {name: b",
            "capacity tokens 120,000 -> 120,001; capacity requests 6 -> 7; engine c added",
        ),
        (
            "models:",
            "  prefill: 16k\nmodels:",
            "engines prefill 8,000 -> 16,000; engine a prefill 8,000 -> 16,000; eng",
        ),
        ("models:", "  affinity: {weight: 1.5}\nmodels:", "engines affinity weight 3 -> 1.5"),
        (
            "models:",
            "  affinity: {session: [x-a, prompt_cache_key]}\nmodels:",
            "engines affinity session none -> x-a, prompt_cache_key",
        ),
        (
            "models:",
            "  health: {every: 5s, fail: 2}\nmodels:",
            "engines health every 2s -> 5s; engines health fail 3 -> 2",
        ),
        ("models:", "  slow_start: 0s\nmodels:", "engines slow_start 1m -> 0s"),
        ("requests: 4}", "requests: 4, learn: full}", "engines capacity learn cautious -> full"),
        ("aliases: [x]", "aliases: [x, y]", "model llama aliases x -> x, y"),
        ("qwen: {", "gemma: {", "model qwen removed; model gemma added"),
    ],
)
def test_a_change_of_the_engines_is_said_in_the_words_of_the_file(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in FLEET
    running, changed = written(tmp_path / "one", FLEET), written(tmp_path / "two", FLEET.replace(before, after))
    line = describe_changes(running, changed)
    assert line[: len(said)] == said
    assert line == said or said.endswith("eng")


def test_engines_that_come_or_are_found_in_another_way_are_said(tmp_path: Path) -> None:
    one, several = written(tmp_path / "one"), written(tmp_path / "two", FLEET)
    assert "engines none -> static" in differences(one, several)
    text = FLEET.partition("engines:")[0] + "engines: {dns: {name: 'v:8000'}, capacity: {tokens: 5}}\n"
    dns = written(tmp_path / "three", text)
    said = "engines dns name v:8000 -> w:8000"
    assert said in differences(dns, written(tmp_path / "four", text.replace("v:8000", "w:8000")))
    assert "engine a removed" in differences(several, dns)
    read = written(
        tmp_path / "five",
        FLEET.replace("engine: none", "engine: vllm").replace("{tokens: 20k, requests: 2}", "{from: engine}"),
    )
    assert "engine b capacity 20,000 tokens and 2 requests -> from the engine" in differences(several, read)


def test_a_gateway_changes_key_by_key_and_what_was_only_remembered_is_no_change() -> None:
    written = "gateway: {{tenant_header: x-tenant, addresses: [{address}]{more}}}\n"
    before, again, after = (policy(written.format(address=f"10.0.0.{n}", more="")) for n in (1, 1, 2))
    assert before.named
    assert before.gateway.is_from(("10.0.0.1", 5))
    assert differences(before, again) == []
    assert differences(before, after) == ["gateway addresses 10.0.0.1/32 -> 10.0.0.2/32"]
    tiers = policy(written.format(address="10.0.0.1", more=", tier_header: x-tier"))
    assert differences(before, tiers) == ["gateway tier_header none -> x-tier"]


OTHERS = {int: 0, float: 7.5, str: "seven", bytes: b"seven", Fraction: Fraction(1, 7)}


NOT_TOLD = {"generation", "timeouts"}
"""The one is reported beside the differences; the other is that of each tier."""


@each("name", [one.name for one in fields(Policy) if one.compare and one.name not in NOT_TOLD])
def test_no_field_of_a_policy_changes_unsaid(tmp_path: Path, name: str) -> None:
    """Also of those that are yet to come: a field that is left out here would be a change that is not reported."""
    before = load(write_policy(tmp_path))
    assert differences(before, changed(before, name, tmp_path)), name


def changed(before: Policy, name: str, folder: Path) -> Policy:
    """The same, with something else in one field."""
    value = getattr(before, name)
    if name == "capacity":
        return replace(before, capacity=replace(value, learn=Learn.OFF))
    if name == "rules":
        return replace(before, rules=replace(value, tokens=value.tokens + 1))
    if name == "tiers":
        return replace(before, tiers=(replace(value[0], default_output_tokens=7), *value[1:]))
    if name in ("endpoints", "named"):
        return replace(before, **{name: dict(list(value.items())[1:])})
    levels = {"engine_levels": ((10.0, 0),), "service_tiers": (("priority", 0),)}
    if name == "sources" or name in levels:
        return replace(before, **{name: levels.get(name, value[:1])})
    if name in ("engines", "models"):
        return replace(before, **{name: getattr(written(folder / "fleet", FLEET), name)})
    if name == "aliases":
        return replace(before, aliases={"gpt-4o": ModelAlias("llama")})
    if is_dataclass(value):
        return replace(before, **{name: None})
    if hasattr(type(value), "__members__"):
        return replace(before, **{name: next(other for other in type(value) if other is not value)})
    if name == "engine":
        return replace(before, engine=next(other for other in ENGINES.values() if other is not value))
    if isinstance(value, bool):
        return replace(before, **{name: not value})
    return replace(before, **{name: OTHERS[type(value)] if value is not None else 7.5})
