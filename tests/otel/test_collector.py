"""The Collector's configuration, as far as it can be judged without a Collector: no package registry has one with these
components.

What is asserted of the keys was read from the documentation of core and contrib, v0.144 to v0.162.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from sidecar.telemetry import semconv
from tests.otel.files import OTEL
from tests.support.each import each

TEXT = (OTEL / "collector.yaml").read_text(encoding="utf-8")
COLLECTOR: dict[str, Any] = yaml.safe_load(TEXT)
PIPELINES: dict[str, dict[str, list[str]]] = COLLECTOR["service"]["pipelines"]
POLICIES: list[dict[str, Any]] = COLLECTOR["processors"]["tail_sampling"]["policies"]
KINDS = ("receivers", "processors", "exporters")

# The settings of a policy of each type, in the section that has the type's name.
SETTINGS = {
    "boolean_attribute": {"key", "value"},
    "string_attribute": {"key", "values"},
    "status_code": {"status_codes"},
    "probabilistic": {"sampling_percentage"},
}
SAMPLER_KEYS = {"decision_wait", "decision_wait_after_root_received", "num_traces", "decision_cache", "policies"}


@each("kind", KINDS)
def test_what_is_defined_is_used_and_what_is_used_is_defined(kind: str) -> None:
    used = {name for pipeline in PIPELINES.values() for name in pipeline[kind]}
    assert used == set(COLLECTOR[kind])
    assert set(COLLECTOR["service"]["extensions"]) == set(COLLECTOR["extensions"])


def test_every_pipeline_protects_its_memory_first_and_samples_nothing_but_traces() -> None:
    assert set(PIPELINES) == {"traces", "metrics"}
    for signal, pipeline in PIPELINES.items():
        assert pipeline["receivers"] == ["otlp"]
        assert pipeline["processors"][0] == "memory_limiter"
        assert ("tail_sampling" in pipeline["processors"]) == (signal == "traces")


def test_it_listens_for_both_protocols_where_other_hosts_can_reach_it() -> None:
    protocols = COLLECTOR["receivers"]["otlp"]["protocols"]
    assert {name: settings["endpoint"] for name, settings in protocols.items()} == {
        "grpc": "0.0.0.0:4317",
        "http": "0.0.0.0:4318",
    }


def test_names_that_the_collector_gave_up_are_not_used() -> None:
    used = [name.split("/")[0] for kind in KINDS for name in COLLECTOR[kind]]
    # since v0.144 otlp_grpc and otlp_http; Jaeger's and the logging exporter are gone; batching is the exporter's
    assert not {"otlphttp", "jaeger", "logging", "batch"} & set(used)
    assert "otlp" not in [name.split("/")[0] for name in COLLECTOR["exporters"]]


def test_the_sampler_has_only_settings_that_it_knows() -> None:
    sampler = COLLECTOR["processors"]["tail_sampling"]
    assert set(sampler) == SAMPLER_KEYS
    assert min(sampler["decision_cache"].values()) > sampler["num_traces"]
    for policy in POLICIES:
        assert set(policy) == {"name", "type", policy["type"]}
        assert set(policy[policy["type"]]) == SETTINGS[policy["type"]]


def test_the_sampler_asks_for_attributes_that_our_spans_have() -> None:
    of_spans = {value for value in vars(semconv).values() if isinstance(value, str)}
    asked = {policy[policy["type"]]["key"] for policy in POLICIES if "key" in policy[policy["type"]]}
    assert asked == {semconv.ADMISSION_STARVED_TOO_LONG, semconv.ADMISSION_IS_WAITING, semconv.ADMISSION_DECISION}
    assert asked <= of_spans


def test_starvation_long_waits_errors_and_refusals_are_always_kept_and_a_percentage_of_the_rest() -> None:
    by_type = {policy["type"]: policy[policy["type"]] for policy in POLICIES}
    marks = [policy["boolean_attribute"] for policy in POLICIES if policy["type"] == "boolean_attribute"]
    assert marks == [{"key": f"admission.{name}", "value": True} for name in ("starved_too_long", "is_waiting")]
    assert by_type["status_code"] == {"status_codes": ["ERROR"]}
    assert by_type["string_attribute"] == {"key": "admission.decision", "values": ["refused"]}
    assert re.fullmatch(r"\$\{env:KEEP_PERCENT:-\d+\}", by_type["probabilistic"]["sampling_percentage"])


def test_metrics_keep_their_exemplars_on_the_way_to_prometheus() -> None:
    assert COLLECTOR["exporters"]["prometheus"]["enable_open_metrics"] is True


def test_every_variable_has_a_default_and_is_described() -> None:
    used = set(re.findall(r"\$\{env:(\w+):-[^}]+\}", TEXT))
    assert len(re.findall(r"\$\{", TEXT)) == len(re.findall(r"\$\{env:\w+:-[^}]+\}", TEXT))
    reported = TEXT.split("receivers:")[0]
    assert used
    assert all(name in reported for name in used)
