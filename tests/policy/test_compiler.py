from __future__ import annotations

import hashlib
import time
from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.apis import Api
from sidecar.engines import Vllm
from sidecar.engines.base import Carrier
from sidecar.policy.choices import Learn
from sidecar.policy.compiler import load, load_files
from sidecar.policy.problems import PolicyError
from sidecar.policy.rules import Shares, pool_rules
from sidecar.policy.tenant import Limits, Tenant
from sidecar.policy.tier import Queue, Timeouts
from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

SHIPPED = Path(__file__).parents[2] / "policies"
HASH = "sha256:" + "0" * 64


def test_the_shipped_policy_is_the_ladder_of_the_design() -> None:
    expected = pool_rules(
        tokens=400_000,
        requests=160,
        tiers=(
            Shares(
                "critical", Fraction(1, 10), Fraction(1), Fraction(1, 2), always_first=True, preempt_after_us=250_000
            ),
            Shares("high", Fraction(1, 5), Fraction(1), preempt_after_us=500_000),
            Shares("normal", Fraction(1, 10), Fraction(1)),
            Shares("low", Fraction(1, 20), Fraction(1), preemptible=True),
            Shares("batch", Fraction(1, 20), Fraction(1), Fraction(3, 5), preemptible=True),
        ),
        promote_after_us=300_000_000,
        ceiling=2,
        max_preemptions=2,
    )
    policy = load(SHIPPED)
    assert expected == policy.rules
    assert policy.tiers[4].queue == Queue(10_000, 1800.0)
    assert Tenant(name="anonymous", level=3, max_level=3) == policy.anonymous


@each(
    ("key", "name"),
    [("sk-demo-interactive", "interactive"), ("sk-demo-standard", "standard"), ("sk-demo-research", "research-batch")],
)
def test_the_documented_demo_keys_open_the_shipped_tenants(key: str, name: str) -> None:
    assert name == load(SHIPPED).tenants[hashlib.sha256(key.encode()).hexdigest()].name


def test_a_folder_and_its_file_are_the_same_policy() -> None:
    assert load(SHIPPED) == load(SHIPPED / "policy.yaml")


def test_a_tiers_own_timeouts_count_before_the_pools(tmp_path: Path) -> None:
    text = SMALL.replace("batch: {}", "batch: {timeouts: {first_byte: 1h}}")
    policy = load(pool(tmp_path, text + "timeouts: {first_byte: 1m, total: 2h}\n"))
    assert [tier.timeouts for tier in policy.tiers] == [
        *[Timeouts(60, 600, 7200)] * (len(policy.tiers) - 1),
        Timeouts(3600, 600, 7200),
    ]
    plain = load(pool(tmp_path, SMALL + "timeouts:\n"))
    assert {tier.timeouts for tier in plain.tiers} == {Timeouts()}


def test_a_tier_may_be_written_with_nothing_behind_it(tmp_path: Path) -> None:
    assert load(pool(tmp_path, SMALL.replace("batch: {}", "batch:"))) is not None


def test_a_tenant_becomes_levels(tmp_path: Path) -> None:
    path = pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(
        tmp_path,
        "acme",
        f"{{tenant: acme, keys: [{HASH.upper().replace('SHA', 'sha')}], tier: normal, max_tier: high, weight: 3, "
        "limits: {tokens_per_minute: 200k}, over_limit: {downgrade: batch}}",
    )
    expected = Tenant(
        name="acme", level=1, max_level=0, weight=3, limits=Limits(tokens_per_minute=200_000), downgrade_level=2
    )
    assert {"0" * 64: expected} == dict(load(path).tenants)


def test_engine_levels_are_pairs_most_important_first(tmp_path: Path) -> None:
    text = f"{SMALL}sources: [engine, key]\nengine_levels: {{batch: 10, high: -5, normal: 0}}\n"
    assert load(pool(tmp_path, text)).engine_levels == ((-5.0, 0), (0.0, 1), (10.0, 2))


def test_an_endpoint_is_understood_by_the_path_it_is_forwarded_to(tmp_path: Path) -> None:
    text = f"{SMALL}endpoints: {{/night: {{tier: batch, forward_to: /v1/chat/completions}}, /x: {{api: messages}}}}\n"
    endpoints = load(pool(tmp_path, text)).endpoints
    assert (endpoints["/night"].api, endpoints["/night"].level) == (Api.CHAT, 2)
    assert Api.MESSAGES is endpoints["/x"].api


def test_an_engine_may_get_its_other_carrier(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, f"{SMALL}forward_priority: body\n"))
    assert (policy.engine, policy.carrier) == (Vllm, Carrier.BODY)


def test_a_tokenizer_is_found_beside_the_policy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    policy = load(pool(tmp_path, f"{SMALL}tokenizer: tokenizer.json\n"))
    assert str(tmp_path / "tokenizer.json") == policy.tokenizer


def test_every_mistake_of_every_file_is_reported_at_once_in_order(tmp_path: Path) -> None:
    pool(
        tmp_path,
        "engine: vlm\n"
        "capacity: {tokens: 400k}\n"
        "tiers:\n"
        "  high: {reserve: 20}\n"
        "  low: {resreve: 5%, reserve: 101%}\n"
        "default_tier: lo\n"
        "tenants: tenants/*.yaml\n",
    )
    tenant(tmp_path, "a", f"tenant: a\nkeys: [{HASH}]\ntier: hihg\n")
    tenant(tmp_path, "b", "tenant: b\nkeys: [\n")
    assert mistakes(tmp_path)[:-1] == [
        'policy.yaml:1: engine: "vlm" is no engine; did you mean "vllm"?',
        'policy.yaml:4: tiers.high.reserve: "20" is not a share; write "20%"',
        'policy.yaml:5: tiers.low.reserve: "101%" is more than the whole pool; write "100%" or less',
        'policy.yaml:5: tiers.low.resreve: no such key; did you mean "reserve"?',
        'policy.yaml:6: default_tier: "lo" is no tier; did you mean "low"?',
        'tenants/a.yaml:3: tier: "hihg" is no tier; did you mean "high"?',
    ]
    assert mistakes(tmp_path)[-1].startswith("tenants/b.yaml:3: not YAML: ")


def test_the_errors_text_is_one_line_for_each_mistake(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as refused:
        load(pool(tmp_path, "engine: vllm\n"))
    assert [
        f"{tmp_path}/policy.yaml:1: tiers: missing; write tiers: {{high: {{reserve: 20%}}, normal: {{}}}}",
        f"{tmp_path}/policy.yaml:1: capacity: missing; write capacity: {{tokens: 400k, requests: 160}}",
    ] == str(refused.value).splitlines()


def test_the_generation_changes_with_a_tenant_and_not_with_the_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pool(tmp_path / name, f"{SMALL}tenants: tenants/*.yaml\n")
        tenant(tmp_path / name, "a", f"{{tenant: a, keys: [{HASH}], tier: high}}")
    before = load(tmp_path / "one").generation
    assert before == load(tmp_path / "two").generation
    tenant(tmp_path / "two", "a", f"{{tenant: a, keys: [{HASH}], tier: batch}}")
    assert before != load(tmp_path / "two").generation


def test_what_was_read_knows_where_everything_stands() -> None:
    loaded = load_files(SHIPPED)
    assert [Path(file).name for file in loaded.files] == [
        "policy.yaml",
        "interactive.yaml",
        "research-batch.yaml",
        "standard.yaml",
    ]
    place = loaded.place(("tenants", "standard", "max_tier"))
    assert f"{Path(place.file).name}:{place.line}" == "standard.yaml:13"


def test_two_thousand_tenants_load_in_about_a_second(tmp_path: Path) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    for number in range(2000):
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        tenant(tmp_path, f"t{number}", f'tenant: t{number}\nkeys: ["sha256:{digest}"]\ntier: normal\nweight: 2\n')
    began = time.process_time()
    assert len(load(tmp_path).tenants) == 2000
    assert time.process_time() - began < 3  # measured 0.5; a loaded machine is no failure, a slow parser is


@each("written", ["off", '"off"', "'off'", "Off", "OFF", "false", '"false"', "False"])
def test_every_spelling_of_off_is_off_although_yaml_reads_a_boolean(tmp_path: Path, written: str) -> None:
    text = f"engine: vllm\ncapacity: {{tokens: 10, learn: {written}}}\ntiers: {{normal: {{}}}}\n"
    assert load(pool(tmp_path, text)).learn is Learn.OFF


def test_a_pool_learns_cautiously_unless_its_capacity_says_otherwise(tmp_path: Path) -> None:
    assert load(pool(tmp_path)).learn is Learn.CAUTIOUS
    engines = "engine: vllm\ntiers: {{normal: {{}}}}\nengines: {{static: [{{name: a, url: http://a}}]{0}}}\n"
    assert load(pool(tmp_path, engines.format(""))).learn is Learn.CAUTIOUS
    assert load(pool(tmp_path, engines.format(", capacity: {from: engine, learn: full}"))).learn is Learn.FULL
    models = engines.format(", capacity: {tokens: 5, learn: off}") + "models: {m: {}}\n"
    assert load(pool(tmp_path, models)).of_model("m").learn is Learn.OFF
