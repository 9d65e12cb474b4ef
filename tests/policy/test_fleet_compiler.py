"""Policies with several engines: what they mean when they are loaded, and the engine list that one may name."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.engines.registry import ENGINES
from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import CapacitySource
from sidecar.policy.compiler import load, load_files, read_engine_list
from sidecar.policy.fields import ServiceName
from sidecar.policy.fleet import (
    MOST_ENGINES,
    Affinity,
    Discovery,
    DnsService,
    EngineAddress,
    Health,
    Replay,
    largest_size,
    pool_prefill,
    pool_size,
)
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from sidecar.policy.rules import UNLIMITED
from tests.policy.files import SMALL, pool
from tests.support.each import each

TIERS = "engine: vllm\ntiers: {high: {reserve: 20%}, normal: {limit: 60%}, batch: {}}\n"
SPECIFIED = f"""\
{TIERS}
engines:
  static:                          # or dns: {{name: vllm.ns.svc:8000, refresh: 5s}} (A/AAAA/SRV of a headless service)
    - {{name: a, url: http://a:8000}}                       # or file: engines.yaml, followed like the policy itself
    - {{name: b, url: http://b:8000, capacity: {{tokens: 400k, requests: 160}}, speed: 1.0}}
    - {{name: c, url: http://c:8000}}
  capacity: {{from: engine}}         # for each that writes none of its own
  prefill: 8k                      # un-prefilled prompt tokens an engine may have at once
  affinity: {{prefix: true, weight: 2, session: [x-session-id, prompt_cache_key]}}
  health: {{path: /health, every: 2s, fail: 3, rise: 2}}
  slow_start: 60s
  replay: {{before_first_byte: 1, budget: 10%}}
  drain_timeout: 10m
models:                            # optional: a pool of its own for each model, chosen by the body's `model`
  llama-70b: {{engines: [a, b], aliases: [llama, my-lora]}}
  qwen-7b:   {{engines: [c]}}
"""
"""As specified, but for engine `c`, which the specification's example leaves out."""
READ = Capacity(read_from=CapacitySource.ENGINE)
WRITTEN = """\
engines:
  static:
    - {name: a, url: http://a:8000}
    - {name: b, url: http://b:8000/base/, capacity: {tokens: 100k, requests: 40}, prefill: unbounded, speed: 0.25}
  capacity: {tokens: 400k, requests: 160}
"""


def loaded(folder: Path, engines: str, tiers: str = TIERS) -> Policy:
    return load(pool(folder, tiers + engines))


def listed(folder: Path, text: str, policy: str = "engines: {file: engines.yaml}\n") -> list[str]:
    """The names of an engine list, or its mistakes without the folder's name."""
    (folder / "engines.yaml").write_text(text)
    try:
        return [engine.name for engine in read_engine_list(loaded(folder, policy), folder / "engines.yaml")]
    except PolicyError as refused:
        return [str(problem).replace(f"{folder}/", "") for problem in refused.problems]


def test_the_specified_policy_loads(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, SPECIFIED))
    fleet = policy.engines
    assert fleet.static == (
        EngineAddress("a", "http://a:8000", READ, 8000, 1000),
        EngineAddress("b", "http://b:8000", Capacity(tokens=400_000, requests=160), 8000, 1000),
        EngineAddress("c", "http://c:8000", READ, 8000, 1000),
    )
    assert (fleet.discovery, fleet.file, fleet.dns) == (Discovery.STATIC, None, None)
    assert fleet.affinity == Affinity(True, 200, (b"x-session-id", b"prompt_cache_key"))
    assert fleet.health == Health("/health", 2.0, 3, 2)
    assert (fleet.slow_start_s, fleet.drain_timeout_s) == (60.0, 600.0)
    assert fleet.replay == Replay(1, Fraction(1, 10))
    assert [policy.models[name].engines for name in policy.models] == [("a", "b"), ("c",)]
    called = {name: policy.called_models.get(name) for name in ("llama-70b", "my-lora", "qwen-7b", "Llama", "gpt")}
    assert called == {
        "llama-70b": "llama-70b",
        "my-lora": "llama-70b",
        "qwen-7b": "qwen-7b",
        "Llama": None,
        "gpt": None,
    }


@each("key", ["affinity", "health", "replay"])
def test_a_mapping_with_nothing_in_it_has_its_defaults(tmp_path: Path, key: str) -> None:
    engines = "engines:\n  static: [{name: a, url: http://a:8000}]\n"
    assert loaded(tmp_path, f"{engines}  {key}:\n").engines == loaded(tmp_path, engines).engines


@each("name", [name for name in ENGINES if name != "none"])
def test_an_engine_is_probed_at_its_own_page(tmp_path: Path, name: str) -> None:
    fleet = loaded(tmp_path, WRITTEN, TIERS.replace("vllm", name)).engines
    assert fleet.health.path == ENGINES[name].health_page
    if name == "sglang":
        assert fleet.health.path == "/v1/models"  # its /health generates a token


def test_written_capacities_add_up(tmp_path: Path) -> None:
    policy = loaded(tmp_path, WRITTEN)
    assert (policy.rules.tokens, policy.rules.requests) == (500_000, 200)
    high, normal, _ = policy.rules.tiers
    assert (high.reserve[0], normal.limit[1]) == (100_000, 120)
    assert policy.largest_engine == (400_000, 160)
    assert not policy.reads_capacity
    assert policy.engine_capacity is None
    first, second = policy.engines.static
    assert (first.prefill, second.prefill, second.speed, second.url) == (8000, UNLIMITED, 250, "http://b:8000/base")


@pytest.mark.parametrize("engines", ["{file: engines.yaml}", "{dns: {name: vllm.ns.svc:8000}}"])
def test_how_many_engines_are_found_is_no_policys_to_know(tmp_path: Path, engines: str) -> None:
    text = f"engines: {engines[:-1]}, capacity: {{tokens: 400k, requests: 160}}}}\n"
    policy = loaded(tmp_path, text)
    assert (policy.rules.tokens, policy.rules.requests) == (UNLIMITED, UNLIMITED)
    assert policy.reads_capacity
    assert not policy.is_sized


def test_one_engine_that_is_read_leaves_the_sum_to_be_read(tmp_path: Path) -> None:
    text = WRITTEN.replace("  capacity: {tokens: 400k, requests: 160}\n", "")
    policy = loaded(tmp_path, text)
    assert (policy.rules.tokens, policy.largest_engine) == (UNLIMITED, (UNLIMITED, UNLIMITED))
    assert policy.reads_capacity


def test_a_dimension_that_one_engine_does_not_bound_is_unbounded() -> None:
    one = EngineAddress("a", "http://a", Capacity(tokens=10, requests=4), 8)
    other = EngineAddress("b", "http://b", Capacity(requests=8), UNLIMITED)
    assert pool_size([one, one]) == (20, 8)
    assert pool_size([one, other]) == (None, 12)
    assert pool_size([]) == (None, None)
    assert largest_size([one, other]) == (UNLIMITED, 8)
    assert (pool_prefill([one, one]), pool_prefill([one, other]), pool_prefill([])) == (16, None, None)


def test_a_models_pool_has_its_engines_their_sum_and_a_name_of_its_own(tmp_path: Path) -> None:
    policy = loaded(tmp_path, f"{WRITTEN}models: {{m/one: {{engines: [a]}}, two: {{engines: [b]}}}}\npool: chat\n")
    one, two = policy.of_model("m/one"), policy.of_model("two")
    assert (one.rules.tokens, two.rules.tokens, two.rules.requests) == (400_000, 100_000, 40)
    assert (one.pool, two.pool) == ("chat/m/one", "chat/two")
    assert [engine.name for engine in two.engines.static] == ["b"] if two.engines else False
    assert two.rules.tiers[0].reserve[0] == 20_000
    assert two.largest_engine == (100_000, 40)
    with pytest.raises(KeyError):
        policy.of_model("three")


def test_one_model_may_have_all_engines(tmp_path: Path) -> None:
    policy = loaded(tmp_path, f"{WRITTEN}models: {{m: }}\n")
    assert policy.models["m"].engines is None
    assert policy.of_model("m").rules == policy.rules


@each(
    ("name", "service"),
    [
        ("vllm.ns.svc:8000", DnsService(ServiceName("vllm.ns.svc", 8000), 5.0)),
        ("vllm:1", DnsService(ServiceName("vllm", 1), 5.0)),
        (
            "_http._tcp.vllm.ns.svc.cluster.local.",
            DnsService(ServiceName("_http._tcp.vllm.ns.svc.cluster.local.", None), 5.0),
        ),
    ],
)
def test_a_name_is_of_addresses_with_a_port_or_of_srv_records(tmp_path: Path, name: str, service: DnsService) -> None:
    policy = loaded(tmp_path, f"engines: {{dns: {{name: {name!r}}}}}\n")
    assert policy.engines.dns == service
    assert str(service) == name
    assert policy.engines.discovery is Discovery.DNS


def test_without_engines_a_policy_is_what_it_was(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, SMALL))
    assert (policy.engines, dict(policy.models)) == (None, {})
    assert policy.largest_engine == (UNLIMITED, UNLIMITED)
    assert not policy.reads_capacity
    read = load(pool(tmp_path, SMALL.replace("{tokens: 1000, requests: 10}", "{from: engine, waiting: 3}")))
    assert read.engine_capacity == Capacity(read_from=CapacitySource.ENGINE, waiting=3)
    assert read.reads_capacity


# -- the engine list


def test_an_engine_list_is_read_with_the_policys_defaults(tmp_path: Path) -> None:
    (tmp_path / "engines.yaml").write_text(
        "engines:\n- {name: a, url: http://a:8000}\n"
        "- {name: b, url: http://b:8000, capacity: {requests: 4}, speed: 2, prefill: 1k}\n"
    )
    policy = loaded(tmp_path, "engines: {file: engines.yaml, capacity: {tokens: 400k}, prefill: 16k}\n")
    assert policy.engines.file == str(tmp_path / "engines.yaml")
    engines = read_engine_list(policy, Path(policy.engines.file))
    assert engines == (
        EngineAddress("a", "http://a:8000", Capacity(tokens=400_000), 16_000, 1000),
        EngineAddress("b", "http://b:8000", Capacity(requests=4), 1000, 2000),
    )
    found = policy.of_engines(engines[:1])
    assert (found.rules.tokens, found.largest_engine[0], found.reads_capacity) == (400_000, 400_000, False)


def test_an_engine_list_may_be_empty(tmp_path: Path) -> None:
    assert listed(tmp_path, "engines: []\n") == []


def test_an_engine_list_that_is_not_there_yet_does_not_keep_the_policy_out(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "engines: {file: later/engines.yaml}\n")
    with pytest.raises(PolicyError, match=r"later/engines\.yaml: there is no such file; make it, or name another$"):
        read_engine_list(policy, tmp_path / "later" / "engines.yaml")


@each(
    ("text", "said"),
    [
        ("", "the file is empty; `sidecar init` writes files to begin with"),
        ("[{name: a}]\n", 'engines.yaml:1: not a mapping; write "key: value" lines'),
        ("engine: []\n", 'engines.yaml:1: engine: no such key; did you mean "engines"?'),
        ("engines: a\n", "engines.yaml:1: engines: not a list; write [{name: a, url: http://a:8000}]"),
        (
            "engines:\n- {name: a}\n",
            'engines.yaml:2: engines[0].url: missing; write url: "http://a:8000"',
        ),
        (
            "engines:\n- {name: a, url: http://a}\n- {name: a, url: http://b}\n",
            'engines.yaml:3: engines[1].name: "a" is the name of another engine; write another name',
        ),
        (
            "engines:\n- {name: a, url: http://a}\n- {name: b, url: http://A/}\n",
            'engines.yaml:3: engines[1].url: "http://A/" is engine a, which would count twice; remove one of them',
        ),
    ],
)
def test_a_mistake_in_an_engine_list_has_its_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    assert any(message.endswith(said) and "engines.yaml" in message for message in listed(tmp_path, text))


def test_an_engine_list_has_no_more_engines_than_a_pool(tmp_path: Path) -> None:
    text = "engines:\n" + "".join(f"- {{name: e{i}, url: http://e{i}}}\n" for i in range(MOST_ENGINES + 1))
    assert listed(tmp_path, text) == ["engines.yaml:1: engines: 65 engines in one pool; list 64 at most"]


def test_an_engine_list_is_no_file_of_the_policy(tmp_path: Path) -> None:
    """It is followed by itself: replicas with the same policy have one generation, whatever their lists hold."""
    (tmp_path / "engines.yaml").write_text("engines: []\n")
    before = load_files(pool(tmp_path, TIERS + "engines: {file: engines.yaml}\n"))
    (tmp_path / "engines.yaml").write_text("engines: [{name: a, url: http://a}]\n")
    after = load_files(tmp_path)
    assert before.policy.generation == after.policy.generation
    assert [Path(file).name for file in after.files] == ["policy.yaml"]
