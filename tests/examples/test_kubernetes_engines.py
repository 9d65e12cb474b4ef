"""examples/kubernetes/engines: its figures fit together, and no request is lost while all its engines are replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.compiler import load
from tests.examples.command_lines import parsed
from tests.examples.kubernetes import KUBERNETES, containers, kubectl, of_kind, pods, ports, sidecar
from tests.support.own_network import run_inside

pytestmark = pytest.mark.long

OVERLAY = "engines"
FLEET = load(KUBERNETES / OVERLAY / "policy.yaml").engines
ENDS_WITHIN_S = 20
"""What an engine takes to end when it serves nothing."""
HOOK_BEYOND_S = 5
"""What the hook waits beyond the sidecars' own timeout, to report its answer."""


def engine_pod() -> Any:
    return pods(OVERLAY)["llm-engine"]["spec"]


def engine() -> Any:
    return containers(engine_pod())["engine"]


def variables() -> Mapping[str, str]:
    return {each["name"]: each["value"] for each in engine()["env"] if "value" in each}


def test_the_policy_looks_up_the_headless_service_of_the_engines() -> None:
    service = of_kind(OVERLAY, "Service")[FLEET.dns.name]["spec"]
    assert service["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service, "an engine that loads its model is none yet"
    assert service["selector"].items() <= pods(OVERLAY)["llm-engine"]["metadata"]["labels"].items()
    assert set(ports(engine()).values()) == {FLEET.dns.port}
    assert f"--port={FLEET.dns.port}" in engine()["args"]


def test_the_hook_asks_every_sidecar_and_has_the_time_for_it() -> None:
    host, _, port = variables()["DRAIN_AT"].partition(":")
    service = of_kind(OVERLAY, "Service")[host]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert int(port) == ports(sidecar(OVERLAY))["admin"] == service["ports"][0]["port"]
    assert int(variables()["ENGINE_PORT"]) == ports(engine())["http"]
    within_s = int(variables()["DRAIN_WITHIN_S"])
    assert within_s >= FLEET.drain_timeout_s + HOOK_BEYOND_S
    assert engine_pod()["terminationGracePeriodSeconds"] >= within_s + ENDS_WITHIN_S
    assert FLEET.drain_timeout_s >= parsed(sidecar(OVERLAY)["args"]).grace


def test_a_roll_out_waits_for_the_slow_start_and_takes_one_engine_at_a_time() -> None:
    spec = of_kind(OVERLAY, "Deployment")["llm-engine"]["spec"]
    assert spec["replicas"] == 3
    assert spec["minReadySeconds"] == FLEET.slow_start_s
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert of_kind(OVERLAY, "PodDisruptionBudget")["llm-engine"]["spec"]["maxUnavailable"] == 1


def test_the_policy_knows_how_many_requests_an_engine_runs() -> None:
    assert FLEET.capacity.is_read
    (most,) = (int(word.partition("=")[2]) for word in engine()["args"] if word.startswith("--max-num-seqs="))
    assert FLEET.capacity.requests == most + FLEET.capacity.waiting
    assert {"--scheduling-policy=priority", "--enable-prompt-tokens-details"} <= set(engine()["args"])


def test_the_sidecars_are_those_of_the_shared_pool_without_an_engine_of_their_own() -> None:
    args, others = sidecar(OVERLAY)["args"], sidecar("shared-pool")["args"]
    assert [word for word in others if not word.startswith("--upstream=")] == args
    assert of_kind(OVERLAY, "Deployment")["admission"]["spec"]["replicas"] == 2


def test_only_the_sidecars_reach_the_engines_and_the_engines_the_admin_port() -> None:
    allowed = {
        (policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"], port["port"], json.dumps(rule["from"]))
        for policy in of_kind(OVERLAY, "NetworkPolicy").values()
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    to_engines = [who for app, _, who in allowed if app == "llm-engine"]
    assert len(to_engines) == 1
    assert re.search(r'"app.kubernetes.io/name": "admission"}', to_engines[0])
    to_admin = [who for app, port, who in allowed if (app, port) == ("admission", "admin")]
    assert any(re.search(r'"app.kubernetes.io/name": "llm-engine"}', who) for who in to_admin)


@pytest.mark.soak
def test_all_engines_are_replaced_and_no_stream_is_cut(tmp_path: Path) -> None:
    """Two sidecars with one pool in the store of the manifests."""
    kubectl()
    seen = json.loads(run_inside("tests.examples.kubernetes_cluster", str(tmp_path), timeout_s=240))
    found = seen["rolled out"]
    assert found["hooks"] == [[0, ""]] * 3
    assert all(found["open_before"]), "else a hook had nothing to wait for"
    assert found["open_after"] == [0, 0, 0]
    assert set(found["outcomes"]) == {"complete"}
    assert len(found["by_engine"]) == 6, "each of the old engines and of the new ones served some"
    # One asks when DNS has forgotten its engine already, and waits for the answers all the same.
    assert seen["late"]["open_before"] > 0
    assert (seen["late"]["hook"], seen["late"]["open_after"]) == ([0, ""], 0)
    assert set(seen["late"]["outcomes"]) == {"complete"}
    # A negative control: the emulated engine aborts what runs when it is told to end, as vLLM does.
    assert "cut" in seen["without the hook"]
    code, said = seen["wrong token"]
    assert (code, said.count(": 401 ")) == (1, 2)
    assert seen["unknown"] == [0, ""], "no sidecar has a request at an engine that it does not know"
    code, said = seen["no sidecar"]
    assert (code, said.startswith("drain: admission-nowhere: ")) == (0, True)
    # A drain is a field of the store: one sidecar is enough.
    assert seen["by one"] == {"hook": [0, ""], "state": "draining", "takes_new": False}
