"""What can replace a policy that runs, and what is kept out until the next start."""

from __future__ import annotations

from pathlib import Path

from sidecar.policy.compiler import load
from sidecar.policy.diff import needs_restart
from tests.support.each import each

BASE = """\
engine: vllm
forward_priority: body
capacity: {tokens: 100k, requests: 4}
tiers: {high: {reserve: 20%}, batch: {}}
default_tier: batch
anonymous: batch
"""


def keys(folder: Path, before: str, after: str) -> list[str]:
    assert before in BASE
    (folder / "policy.yaml").write_text(BASE)
    running = load(folder)
    (folder / "policy.yaml").write_text(BASE.replace(before, after))
    return needs_restart(running, load(folder))


@each(
    ("before", "after", "key"),
    [
        ("engine: vllm", "engine: sglang", "engine"),
        ("forward_priority: body\n", "", "forward_priority"),
        ("{tokens: 100k, requests: 4}", "{from: engine}", "capacity.from"),
        ("batch: {}}", "batch: {}, low: {}}", "tiers (their names and order)"),
        ("{high: {reserve: 20%}, batch: {}}", "{batch: {}, high: {reserve: 20%}}", "tiers (their names and order)"),
        ("engine: vllm", "engine: vllm\nstore: redis://127.0.0.1:6379/0", "store"),
        ("engine: vllm", "engine: vllm\npool: chat", "pool"),
        ("engine: vllm", "engine: vllm\norder: gain", "order"),
        ("engine: vllm", "engine: vllm\non_store_loss: closed", "on_store_loss"),
        ("engine: vllm", "engine: vllm\nreplicas: 3", "replicas"),
        ("engine: vllm", "engine: vllm\ntokenizer: policy.yaml", "tokenizer"),
    ],
)
def test_what_the_process_was_built_with_needs_a_restart(tmp_path: Path, before: str, after: str, key: str) -> None:
    assert keys(tmp_path, before, after) == [key]


@each(
    ("before", "after"),
    [
        ("reserve: 20%", "reserve: 60%"),
        ("batch: {}", "batch: {limit: 50%, queue: {max_requests: 3}, preemptible: true}"),
        ("{tokens: 100k, requests: 4}", "{requests: 40}"),
        ("{tokens: 100k, requests: 4}", "{tokens: 100k, requests: 4, learn: full}"),
        ("engine: vllm", "engine: vllm\naging: {promote_after: 1m, ceiling: high}"),
        (
            "engine: vllm",
            "engine: vllm\nmode: observe\nkeep_alive: 15s\nmax_body: 1MiB\nbody_timeout: 1s\nusage: as_sent",
        ),
        ("engine: vllm", "engine: vllm\ntimeouts: {total: 1m}\nusage_in_traces: never\ntrace_waits: 0s"),
        ("anonymous: batch", "anonymous: deny\nendpoints: {/v1/completions: {}}\nsources: [key]"),
    ],
)
def test_everything_else_can_be_replaced(tmp_path: Path, before: str, after: str) -> None:
    assert keys(tmp_path, before, after) == []


def test_every_key_is_named(tmp_path: Path) -> None:
    found = keys(
        tmp_path, BASE, BASE.replace("vllm", "sglang").replace("{high: {reserve: 20%}, batch: {}}", "{batch: {}}")
    )
    assert found == ["engine", "tiers (their names and order)"]


FLEET = """\
engine: vllm
tiers: {high: {reserve: 20%}, batch: {}}
default_tier: batch
engines: {static: [{name: a, url: http://a}, {name: b, url: http://b}]}
models: {m: {engines: [a], aliases: [x]}, n: {engines: [b]}}
"""
MODELS = "models: {m: {engines: [a], aliases: [x]}, n: {engines: [b]}}\n"
STATIC = "{static: [{name: a, url: http://a}, {name: b, url: http://b}]}"


def fleet_keys(folder: Path, before: str, after: str) -> list[str]:
    (folder / "policy.yaml").write_text(before)
    running = load(folder)
    (folder / "policy.yaml").write_text(after)
    return needs_restart(running, load(folder))


@each(
    ("before", "after", "key"),
    [
        (STATIC, "{file: e.yaml}", "engines (static, file, dns or mounted)"),
        ("{file: e.yaml}", "{dns: {name: 'v:1'}}", "engines (static, file, dns or mounted)"),
        ("{file: e.yaml}", "{file: f.yaml}", "engines.file"),
        ("{dns: {name: 'v:1'}}", "{dns: {name: 'v:2'}}", "engines.dns.name"),
    ],
)
def test_another_source_of_engines_needs_a_restart(tmp_path: Path, before: str, after: str, key: str) -> None:
    plain = FLEET.replace(MODELS, "")
    assert fleet_keys(tmp_path, plain.replace(STATIC, before), plain.replace(STATIC, after)) == [key]


def test_one_engine_and_several_are_no_policies_of_one_process(tmp_path: Path) -> None:
    one, several = BASE.replace("forward_priority: body\n", ""), FLEET.replace(MODELS, "")
    assert fleet_keys(tmp_path, one, several) == fleet_keys(tmp_path, several, one) == ["engines"]


def test_another_model_needs_a_restart(tmp_path: Path) -> None:
    assert fleet_keys(tmp_path, FLEET, FLEET.replace("n: {", "o: {")) == ["models (their names)"]
    assert fleet_keys(tmp_path, FLEET, FLEET.replace(MODELS, "")) == ["models (their names)"]


@each(
    ("before", "after"),
    [
        ("{name: b, url: http://b}", "{name: b, url: http://b:1, speed: 2, capacity: {tokens: 5}, prefill: 1k}"),
        ("{name: a, url: http://a}, ", "{name: c, url: http://c}, {name: a, url: http://a}, "),
        ("http://b}]", "http://b}], capacity: {tokens: 5}, prefill: unbounded, slow_start: 1s, drain_timeout: 1m"),
        ("http://b}]", "http://b}], affinity: {weight: 0}, health: {every: 1s}, replay: {budget: 1%}"),
        ("aliases: [x]", "aliases: [y]"),
        ("{engines: [a], aliases: [x]}, n: {engines: [b]}", "{engines: [b]}, n: {engines: [a]}"),
    ],
)
def test_the_engines_themselves_can_be_replaced(tmp_path: Path, before: str, after: str) -> None:
    assert before in FLEET
    assert fleet_keys(tmp_path, FLEET, FLEET.replace(before, after)) == []


def test_a_name_that_is_looked_up_more_often_can_be_replaced(tmp_path: Path) -> None:
    dns = FLEET.replace(MODELS, "").replace(STATIC, "{dns: {name: 'v:1'}}")
    assert fleet_keys(tmp_path, dns, dns.replace("'v:1'", "'v:1', refresh: 1s")) == []
