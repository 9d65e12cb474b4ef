"""examples/kubernetes/scaling: what the cluster, KEDA and Prometheus know of it, and that its two ways are one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sidecar.policy.compiler import load
from tests.examples.kubernetes import KUBERNETES, validate
from tests.support.prometheus import promtool

SCALING = KUBERNETES / "scaling"
KEDA, HPA, ADAPTER = (
    yaml.safe_load((SCALING / name).read_text(encoding="utf-8")) for name in ("keda.yaml", "hpa.yaml", "adapter.yaml")
)
(TRIGGER,) = KEDA["spec"]["triggers"]
(EXTERNAL,) = (metric["external"] for metric in HPA["spec"]["metrics"])
(RULE,) = ADAPTER["externalRules"]
WHOLE, TEXT = {"type": "integer"}, {"type": "string"}


def known(required: str = "", **properties: Any) -> Mapping[str, Any]:
    """The schema of an object without other members."""
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**closed, "required": required.split()}


WINDOW = known(
    stabilizationWindowSeconds={**WHOLE, "minimum": 0, "maximum": 3600}, selectPolicy=TEXT, policies={"type": "array"}
)
TRIGGERS = known(
    "type metadata", type=TEXT, name=TEXT, metadata={"type": "object", "additionalProperties": TEXT},
    metricType={"enum": ["AverageValue", "Value"]}, authenticationRef=known("name", name=TEXT, kind=TEXT),
)  # fmt: skip
SCALED_OBJECT = known(
    "apiVersion kind metadata spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata={"type": "object"},
    spec=known(
        "scaleTargetRef triggers",
        scaleTargetRef=known("name", apiVersion=TEXT, kind=TEXT, name=TEXT, envSourceContainerName=TEXT),
        minReplicaCount=WHOLE, maxReplicaCount=WHOLE, idleReplicaCount=WHOLE, pollingInterval=WHOLE,
        cooldownPeriod=WHOLE, fallback=known("failureThreshold replicas", failureThreshold=WHOLE, replicas=WHOLE),
        triggers={"type": "array", "items": TRIGGERS, "minItems": 1},
        advanced=known(
            restoreToOriginalReplicaCount={"type": "boolean"},
            horizontalPodAutoscalerConfig=known(behavior=known(scaleUp=WINDOW, scaleDown=WINDOW)),
        ),
    ),
)  # fmt: skip
"""The members that KEDA has, as its CRD says:
github.com/kedacore/keda/blob/756b2de75bd06e913ea34a9fdf7bcf3100a460ba/config/crd/bases/keda.sh_scaledobjects.yaml
"""
OF_PROMETHEUS = {
    "serverAddress", "query", "queryParameters", "threshold", "activationThreshold", "namespace", "customHeaders",
    "ignoreNullValues", "unsafeSsl", "timeout", "authModes",
}  # fmt: skip
"""Settings of KEDA's scaler by Prometheus:
github.com/kedacore/keda/blob/0805d72eb7d8e059e8575a1d46d68c0c6bde7d79/pkg/scalers/prometheus_scaler.go
"""


def test_keda_knows_every_member_and_every_setting() -> None:
    jsonschema.validate(KEDA, SCALED_OBJECT)
    assert TRIGGER["type"] == "prometheus"
    assert TRIGGER["metadata"].keys() <= OF_PROMETHEUS
    wrong = copy.deepcopy(KEDA)
    wrong["spec"]["cooldown"] = 900
    with pytest.raises(jsonschema.ValidationError, match="cooldown"):
        jsonschema.validate(wrong, SCALED_OBJECT)


@pytest.mark.long
def test_the_cluster_knows_every_field_of_its_own_autoscaler() -> None:
    for version in ("1.29", "1.37"):
        validate(HPA, version)


def test_both_ways_have_the_same_target_bounds_and_windows() -> None:
    keda, hpa = KEDA["spec"], HPA["spec"]
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert f"{float(TRIGGER['metadata']['threshold']) * 1000:.0f}m" == EXTERNAL["target"]["value"]
    assert TRIGGER["metricType"] == EXTERNAL["target"]["type"] == "Value"
    assert TRIGGER["metadata"]["ignoreNullValues"] == "false", "else no figure is 0, and all engines but one end"
    assert EXTERNAL["metric"]["name"] == RULE["name"]["as"]


def test_they_scale_the_engines_of_the_overlay_and_no_tiers_backlog_asks_for_all_of_them() -> None:
    policy = load(KUBERNETES / "engines" / "policy.yaml")
    (deployment, *_) = yaml.safe_load_all((KUBERNETES / "engines" / "engines.yaml").read_text(encoding="utf-8"))
    target = HPA["spec"]["scaleTargetRef"]
    assert (deployment["apiVersion"], deployment["kind"]) == (target["apiVersion"], target["kind"])
    assert deployment["metadata"]["name"] == target["name"]
    assert policy.pool == EXTERNAL["metric"]["selector"]["matchLabels"]["admission_pool"]
    (batch,) = (tier for tier in policy.tiers if tier.name == "batch")
    assert batch.limit < float(TRIGGER["metadata"]["threshold"])


@pytest.mark.long
def test_prometheus_answers_their_queries_with_one_figure_of_the_pool(tmp_path: Path) -> None:
    """Three replicas that report the pool, one of them late, and another pool; then none of them."""
    labels = 'namespace="llm", admission_pool="default"'
    filled_in = {"Series": RULE["seriesQuery"].partition("{")[0], "GroupBy": "namespace"}
    filled_in["LabelMatchers"] = labels.replace(" ", "")
    of_adapter = re.sub(r"<<\.(\w+)>>", lambda found: filled_in[found[1]], RULE["metricsQuery"])
    series = [
        {"series": f'admission_capacity_wanted{{{labels}, pod="{pod}"}}', "values": f"{value}x4 stale"}
        for pod, value in (("a", 1.5), ("b", 1.5), ("c", 1.4))
    ]
    series.append({"series": 'admission_capacity_wanted{namespace="llm", admission_pool="other"}', "values": "9x9"})
    expected = ((TRIGGER["metadata"]["query"], "{}"), (of_adapter, '{namespace="llm"}'))
    tests = [
        {"expr": query, "eval_time": at, "exp_samples": [{"labels": found, "value": 1.5}] if at == "2m" else []}
        for query, found in expected
        for at in ("2m", "8m")
    ]
    file = tmp_path / "test.yaml"  # which JSON is, too
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}))
    ended = promtool("test", "rules", file)
    assert ended.returncode == 0, ended.stdout + ended.stderr
