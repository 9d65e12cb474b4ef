"""Policies with several engines that load and will surprise."""

from __future__ import annotations

from pathlib import Path

from sidecar.policy.compiler import load_files, read_engine_list
from sidecar.policy.warnings import warnings
from tests.policy.files import pool
from tests.support.each import each

POLICY = """\
engine: vllm
tiers: {high: {reserve: 20%}, normal: {reserve: 10%}}
sources: [header]
anonymous: normal
"""
AB = """\
engines:
  static:
    - {name: a, url: http://a, capacity: {tokens: 400k, requests: 160}}
    - {name: b, url: http://b, capacity: {tokens: 400k, requests: 160}}
"""


def said(folder: Path, text: str) -> list[str]:
    """The warnings, without the folder's name."""
    loaded = load_files(pool(folder, POLICY + text))
    return [str(warning).replace(f"{folder}/", "") for warning in warnings(loaded.policy, loaded.place)]


def test_engines_that_surprise_no_one_have_no_warnings(tmp_path: Path) -> None:
    assert said(tmp_path, AB) == []
    assert said(tmp_path, "engines: {static: [{name: a, url: http://a}]}\n") == []
    assert said(tmp_path, "engines: {file: e.yaml}\nmodels: {m: {engines: [a]}, n: {engines: [b]}}\n") == []
    assert said(tmp_path, "engines: {dns: {name: 'v:1'}}\n") == []


def test_an_engine_with_a_zero_too_few(tmp_path: Path) -> None:
    assert said(
        tmp_path, AB.replace("b, capacity: {tokens: 400k, requests: 160}", "b, capacity: {tokens: 39k, requests: 15}")
    ) == [
        "policy.yaml:8: engines.static[1].capacity: engine b holds 39,000 tokens, less than a tenth of a with 400,000: "
        "larger requests never enter it; see whether a zero is missing",
        "policy.yaml:8: engines.static[1].capacity: engine b holds 15 requests, less than a tenth of a with 160: "
        "larger requests never enter it; see whether a zero is missing",
    ]
    assert said(tmp_path, AB.replace("b, capacity: {tokens: 400k", "b, capacity: {tokens: 40k")) == []


def test_an_engine_that_alone_does_not_bound_a_dimension(tmp_path: Path) -> None:
    assert said(tmp_path, AB.replace("b, capacity: {tokens: 400k, ", "b, capacity: {")) == [
        "policy.yaml:8: engines.static[1].capacity: bounds no tokens of engine b, while other engines have a bound: "
        "the pool has then none, and no tier a reserve of tokens; write tokens for each engine, or for none"
    ]


def test_a_tier_that_allows_more_than_any_engine_holds(tmp_path: Path) -> None:
    tiers = POLICY.replace("{reserve: 10%}}", "{reserve: 10%, max_request_tokens: 500k}}")
    loaded = load_files(pool(tmp_path, tiers + AB))
    (warning,) = [one for one in warnings(loaded.policy) if one.path == "tiers.normal.max_request_tokens"]
    assert warning.message == (
        "500,000 is more than the largest engine's 400,000 tokens: a larger request gets a 400 at once; write 400000 "
        "or less, or leave this out"
    )


def test_a_drain_that_ends_before_long_answers(tmp_path: Path) -> None:
    longest = "an answer of 12,000 tokens takes 10m at 20 a second, and a drain waits 2m"
    text = POLICY.replace("{reserve: 20%}", "{reserve: 20%, default_output_tokens: 12k}") + AB
    loaded = load_files(pool(tmp_path, f"{text}  drain_timeout: 2m\n"))
    assert [str(one).replace(f"{tmp_path}/", "") for one in warnings(loaded.policy, loaded.place)] == [
        f"policy.yaml:9: engines.drain_timeout: {longest}: an engine that is stopped after it cuts such answers; write "
        "a longer time"
    ]
    assert warnings(load_files(pool(tmp_path, text)).policy) == ()


def test_a_tenant_that_may_ask_for_longer_answers_than_a_drain_waits(tmp_path: Path) -> None:
    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants" / "a.yaml").write_text(
        f"tenant: a\nkeys: ['sha256:{'0' * 64}']\ntier: normal\nlimits: {{max_output_tokens: 32k}}\n"
    )
    (found,) = said(tmp_path, f"{AB}tenants: tenants/*.yaml\n")
    assert found.startswith("policy.yaml:5: engines.drain_timeout: an answer of 32,000 tokens takes 1600s at 20 a sec")


def test_an_engine_that_hangs_for_long_before_it_is_taken_out(tmp_path: Path) -> None:
    assert said(tmp_path, f"{AB}  health: {{every: 30s}}\n") == [
        "policy.yaml:9: engines.health: an engine that hangs is taken out after 90s, and gets requests until then; "
        "probe more often, or write a smaller fail"
    ]
    assert said(tmp_path, f"{AB}  health: {{every: 20s}}\n") == []


@each(("engine", "is_warned"), [("sglang", True), ("vllm", False), ("tensorrt-llm", False)])
def test_a_health_page_that_computes(tmp_path: Path, engine: str, is_warned: bool) -> None:
    text = POLICY.replace("vllm", engine) + f"{AB}  health: {{path: /health}}\n"
    found = [one.message for one in warnings(load_files(pool(tmp_path, text)).policy)]
    told = "SGLang may compute a token for each probe of /health; leave this out: /v1/models costs nothing"
    assert found == ([told] if is_warned else [])


def test_an_engine_without_a_model_gets_no_request(tmp_path: Path) -> None:
    assert said(tmp_path, f"{AB}models: {{m: {{engines: [a]}}}}\n") == [
        "policy.yaml:8: engines.static[1]: engine b serves no model, and gets no request; name it in a model, or "
        "remove it"
    ]
    assert said(tmp_path, f"{AB}models: {{m: {{}}}}\n") == []


def test_what_depends_on_the_pools_size_is_said_of_the_models_that_it_is_true_of(tmp_path: Path) -> None:
    text = POLICY.replace("reserve: 10%", "reserve: 10%, max_request_tokens: 100k") + AB.replace(
        "b, capacity: {tokens: 400k", "b, capacity: {tokens: 80k"
    )
    policy = load_files(pool(tmp_path, f"{text}models: {{m: {{engines: [a]}}, n: {{engines: [b]}}}}\n")).policy
    (found,) = [one.message for one in warnings(policy)]
    assert found == (
        "100,000 is more than the tier's size limit of 64,000 tokens: a larger request gets a 400 at once; write 64000 "
        "or less, or leave this out (model n)"
    )
    both = load_files(pool(tmp_path, f"{text}models: {{m: {{engines: [a, b]}}}}\n")).policy
    assert warnings(both) == ()


def test_a_limit_that_admits_nothing_in_a_models_pool(tmp_path: Path) -> None:
    text = POLICY.replace("normal: {reserve: 10%}", "normal: {reserve: 1%, limit: 50%}") + AB.replace(
        "b, capacity: {tokens: 400k, requests: 160}", "b, capacity: {requests: 1}"
    )
    policy = load_files(pool(tmp_path, f"{text}models: {{m: {{engines: [a]}}, n: {{engines: [b]}}}}\n")).policy
    (found,) = [one for one in warnings(policy) if one.path == "tiers.normal.limit"]
    assert found.message == (
        "50% of 1 requests is less than one, and admits nothing while the pool is not larger; write a larger share "
        "(model n)"
    )


def test_an_engine_list_is_judged_as_it_is_now(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        "engines:\n- {name: a, url: http://a, capacity: {tokens: 400k}}\n"
        "- {name: c, url: http://c, capacity: {tokens: 4k}}\n"
    )
    text = "engines: {file: e.yaml}\nmodels: {m: {engines: [a]}, n: {engines: [b]}}\n"
    loaded = load_files(pool(tmp_path, POLICY + text))
    found = loaded.policy.of_engines(read_engine_list(loaded.policy, tmp_path / "e.yaml"))
    assert [str(one).replace(f"{tmp_path}/", "") for one in warnings(found, loaded.place)] == [
        "policy.yaml:5: engines.file: engine c holds 4,000 tokens, less than a tenth of a with 400,000: larger "
        "requests never enter it; see whether a zero is missing",
        "policy.yaml:5: engines.file: engine c serves no model, and gets no request; name it in a model, or remove it",
        "policy.yaml:6: models.n.engines: the engine list has no b; write the names of the list, or add them there",
    ]


@each(
    ("engines", "what"),
    [
        ("{static: [{name: a, url: http://a}], capacity: {from: engine, learn: full}}", None),
        ("{static: [{name: a, url: http://a}], capacity: {tokens: 5k, learn: full}}", "the engines' preemptions"),
        ("{dns: {name: 'v:1'}, capacity: {tokens: 5k, learn: full}}", "the engines' preemptions"),
        ("{mounted: true, capacity: {from: engine, learn: full}}", None),
        (
            "{static: [{name: a, url: http://a}, {name: b, url: http://b, capacity: {tokens: 5k}}, "
            "{name: c, url: http://c, capacity: {tokens: 5k}}], capacity: {from: engine, learn: full}}",
            "the preemptions of engine b and c",
        ),
    ],
)
def test_full_trust_in_engines_that_no_one_reads(tmp_path: Path, engines: str, what: str | None) -> None:
    end = "so the quantile never rises; write from: engine, or learn: cautious"
    expected = [] if what is None else [f"policy.yaml:5: engines.capacity.learn: no one reads {what}, {end}"]
    assert [one for one in said(tmp_path, f"engines: {engines}\n") if "learn" in one] == expected
