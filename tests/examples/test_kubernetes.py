"""The manifests of examples/kubernetes: valid for the cluster, and true of the command that they run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.admin.auth import read_access
from sidecar.policy.compiler import load
from tests.examples.command_lines import EXAMPLES, parsed, shell_lines, unknown_variables
from tests.examples.kubernetes import (
    IN_POD,
    KUBERNETES,
    OVERLAYS,
    containers,
    mounted_config_maps,
    of_kind,
    pod_of_the_sidecar,
    pods,
    policy_folders,
    ports,
    rendered,
    sidecar,
    validate,
)
from tests.support.each import each

pytestmark = pytest.mark.long

OLDEST, NEWEST = "1.29", "1.37"
"""Of Kubernetes: the oldest with all that we use, and the newest whose schemas are at hand."""
ENDS_WITHIN_S = 10
"""What a sidecar takes to end after its grace: it says good-bye to the store, and sends its last traces."""
ADAPTER = yaml.safe_load((KUBERNETES / "monitoring" / "adapter.yaml").read_text())
SCRAPE = yaml.safe_load((KUBERNETES / "monitoring" / "scrape.yaml").read_text())


@each("overlay", OVERLAYS)
@each("version", [OLDEST, NEWEST])
def test_every_manifest_is_what_the_cluster_knows(overlay: str, version: str) -> None:
    for manifest in rendered(overlay):
        validate(manifest, version)


@each("folder", ["base", "tenants", *OVERLAYS])
def test_every_file_is_part_of_its_kustomization(folder: str) -> None:
    (kustomization,) = (KUBERNETES / folder).glob("kustomization.y*ml")
    used = kustomization.read_text()
    files = {path.name for path in (KUBERNETES / folder).iterdir()} - {kustomization.name}
    assert {name for name in files if not re.search(rf"\b{re.escape(name)}\b", used)} == set()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_sidecar_is_started_with_flags_and_variables_that_exist(overlay: str) -> None:
    args = parsed(sidecar(overlay)["args"])
    assert ports(sidecar(overlay)) == {"http": args.port, "admin": args.admin_port}
    # the Service and the kubelet come from outside of the pod
    assert (args.host, args.admin_host) == ("0.0.0.0", "0.0.0.0")
    assert unknown_variables([variable["name"] for variable in sidecar(overlay).get("env", ())]) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_port_that_is_named_is_one_that_its_pods_have(overlay: str) -> None:
    by_app = {pod["metadata"]["labels"]["app.kubernetes.io/name"]: pod["spec"] for pod in pods(overlay).values()}
    available = {app: {name for each in pod["containers"] for name in ports(each)} for app, pod in by_app.items()}
    for service in of_kind(overlay, "Service").values():
        named = {port["targetPort"] for port in service["spec"]["ports"]}
        assert named <= available[service["spec"]["selector"]["app.kubernetes.io/name"]]
    opened: dict[str, set[str]] = {}
    for policy in of_kind(overlay, "NetworkPolicy").values():
        app = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        opened.setdefault(app, set()).update(
            port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]
        )
    assert opened == {app: available[app] for app in opened}
    for pod in by_app.values():
        for container in pod["containers"]:
            probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
            asked = [probe[way]["port"] for probe in probes for way in ("httpGet", "tcpSocket") if way in probe]
            assert set(asked) <= set(ports(container))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_selects_pods_selects_some(overlay: str) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(overlay).values()]
    selectors = [found["spec"]["selector"]["matchLabels"] for found in of_kind(overlay, "Deployment").values()]
    selectors += [
        found["spec"]["selector"]["matchLabels"] for found in of_kind(overlay, "PodDisruptionBudget").values()
    ]
    selectors += [found["spec"]["selector"] for found in of_kind(overlay, "Service").values()]
    for selector in selectors:
        assert sum(selector.items() <= found.items() for found in labels) == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_policy_in_the_config_maps_loads_where_the_sidecar_looks_for_it(overlay: str, tmp_path: Path) -> None:
    policy_folders(overlay, tmp_path)
    policy = load(tmp_path / parsed(sidecar(overlay)["args"]).policy.lstrip("/"))
    # and where it stands in the repository
    assert load(KUBERNETES / overlay / "policy.yaml").tenants.keys() == policy.tenants.keys()
    assert {tenant.name for tenant in policy.tenants.values()} == {"interactive", "standard", "research-batch"}
    assert policy.anonymous is None


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_tenant_in_the_folder_is_in_the_config_map_and_shows_a_hash_alone(overlay: str) -> None:
    data = of_kind(overlay, "ConfigMap")["admission-tenants"]["data"]
    assert set(data) == {path.name for path in (KUBERNETES / "tenants").glob("*.yaml")}
    for text in data.values():
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", key) for key in yaml.safe_load(text)["keys"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_changed_config_map_reaches_the_running_sidecar(overlay: str) -> None:
    assert {path for path, _ in mounted_config_maps(overlay, sidecar(overlay))} == {
        "/etc/admission/policy",
        "/etc/admission/tenants",
    }
    assert not any("subPath" in mount for mount in sidecar(overlay)["volumeMounts"])
    # a name with a hash of the content would be another ConfigMap, and its pods other pods
    assert {"admission-policy", "admission-tenants"} <= of_kind(overlay, "ConfigMap").keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_refers_to_is_there_or_is_made_by_the_page(overlay: str) -> None:
    maps, made = of_kind(overlay, "ConfigMap"), secrets_of_the_page()
    for pod in pods(overlay).values():
        for volume in pod["spec"].get("volumes", ()):
            assert "configMap" not in volume or volume["configMap"]["name"] in maps
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", ()):
                if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert source["key"] in made[source["name"]]


def secrets_of_the_page() -> dict[str, dict[str, str]]:
    """The Secrets that the README's commands make, with what is in them."""
    found = {}
    for line in shell_lines(KUBERNETES / "README.md"):
        if made := re.search(r"create secret generic (\S+)", line):
            literals = [word.partition("=")[2] for word in shlex.split(line) if word.startswith("--from-literal=")]
            found[made[1]] = dict(literal.split("=", 1) for literal in literals)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_sidecar_needs_no_rights(overlay: str) -> None:
    secured = sidecar(overlay)["securityContext"]
    assert secured["runAsNonRoot"]
    assert secured["readOnlyRootFilesystem"]
    assert secured["allowPrivilegeEscalation"] is False
    assert secured["capabilities"] == {"drop": ["ALL"]}
    pod = pod_of_the_sidecar(overlay)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    user = (EXAMPLES / "container" / "Containerfile").read_text().split("\nUSER ")[1].splitlines()[0]
    assert f"{secured['runAsUser']}:{secured['runAsGroup']}" == user


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_given_the_time_that_its_sidecar_takes_to_drain(overlay: str) -> None:
    pod = pod_of_the_sidecar(overlay)
    assert forgotten_s(sidecar(overlay)) >= 5
    takes_s = forgotten_s(sidecar(overlay)) + parsed(sidecar(overlay)["args"]).grace + ENDS_WITHIN_S
    assert pod["terminationGracePeriodSeconds"] >= takes_s


@pytest.mark.parametrize("overlay", IN_POD)
def test_the_engine_outlives_the_sidecar_and_is_left_time_to_end(overlay: str) -> None:
    engine, pod = containers(pod_of_the_sidecar(overlay))["engine"], pod_of_the_sidecar(overlay)
    (waits_s,) = re.findall(r"monotonic\(\) \+ (\d+)", engine["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace_s = parsed(sidecar(overlay)["args"]).grace
    assert forgotten_s(sidecar(overlay)) + grace_s < int(waits_s) < pod["terminationGracePeriodSeconds"] - 10


def forgotten_s(container: Any) -> int:
    """How long a sidecar stays as it is, while the Service forgets its pod."""
    word, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    return int(seconds)


@pytest.mark.parametrize("overlay", IN_POD)
def test_no_one_reaches_the_engine_but_through_the_sidecar(overlay: str) -> None:
    engine = containers(pod_of_the_sidecar(overlay))["engine"]
    assert "ports" not in engine
    flags = dict(word.lstrip("-").split("=", 1) for word in engine["args"] if "=" in word)
    assert parsed(sidecar(overlay)["args"]).upstream == f"http://{flags['host']}:{flags['port']}"
    assert flags["host"] == "127.0.0.1"
    for kind in ("startup", "liveness", "readiness"):
        assert f"http://127.0.0.1:{flags['port']}/health'" in engine[f"{kind}Probe"]["exec"]["command"][-1]


def test_vllm_is_started_with_priorities_and_the_policy_knows_how_many_it_runs() -> None:
    args = containers(pod_of_the_sidecar("vllm"))["engine"]["args"]
    assert "--scheduling-policy=priority" in args
    (most,) = (int(word.partition("=")[2]) for word in args if word.startswith("--max-num-seqs="))
    policy = load(KUBERNETES / "vllm" / "policy.yaml")
    assert policy.engine_capacity.requests == most + policy.engine_capacity.waiting


def test_trtllm_serve_reads_the_options_of_the_other_example() -> None:
    own = KUBERNETES / "trtllm" / "serve.yaml"
    assert own.read_text() == (EXAMPLES / "tensorrt-llm" / "serve.yaml").read_text()
    options = yaml.safe_load(own.read_text())
    assert options["scheduler_config"]["waiting_queue_policy"] == "priority"
    assert options["return_perf_metrics"] is True
    engine = containers(pod_of_the_sidecar("trtllm"))["engine"]
    (mount,) = (mount for mount in engine["volumeMounts"] if mount["name"] == "options")
    assert f"--config={mount['mountPath']}/serve.yaml" in engine["args"]
    assert f"--tp_size={engine['resources']['limits']['nvidia.com/gpu']}" in engine["args"]


def test_the_sidecars_of_a_shared_pool_cannot_start_without_their_store() -> None:
    variables = {variable["name"]: variable for variable in sidecar("shared-pool")["env"]}
    assert "optional" not in variables["SIDECAR_STORE"]["valueFrom"]["secretKeyRef"]
    (service,) = (name for name in of_kind("shared-pool", "Service") if name.endswith("store"))
    secret = secrets_of_the_page()["admission-store"]
    assert secret["SIDECAR_STORE"] == f"redis://:$PASSWORD@{service}:6379/0"
    assert secret["STORE_PASSWORD"] == "$PASSWORD"


@pytest.mark.parametrize("overlay", IN_POD)
def test_the_scaler_follows_the_metric_that_the_adapter_makes(overlay: str) -> None:
    (scaler,) = (found["spec"] for found in of_kind(overlay, "HorizontalPodAutoscaler").values())
    deployment = of_kind(overlay, "Deployment")[scaler["scaleTargetRef"]["name"]]
    assert "replicas" not in deployment["spec"], "applying it again would undo what the scaler did"
    (metric,) = (metric["pods"] for metric in scaler["metrics"])
    (rule,) = ADAPTER["rules"]
    assert metric["metric"]["name"] == rule["name"]["as"]
    promised = load(KUBERNETES / overlay / "policy.yaml")
    (normal,) = (tier for tier in promised.tiers if tier.name == "normal")
    assert float(metric["target"]["averageValue"]) < normal.slo.queue_wait_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_admin_port_is_opened_by_a_token_that_prometheus_has(overlay: str) -> None:
    args = parsed(sidecar(overlay)["args"])
    given = {variable["name"] for variable in sidecar(overlay)["env"]}
    assert not read_access(dict.fromkeys(given, "of-the-length-of-a-token"), args.admin_host).is_open
    assert read_access({}, args.admin_host).is_open, "without it, this would show nothing"
    source = next(
        variable["valueFrom"]["secretKeyRef"] for variable in sidecar(overlay)["env"] if "TOKEN" in variable["name"]
    )
    assert "optional" not in source
    assert SCRAPE["scrape_configs"][0]["authorization"]["credentials_file"].endswith(
        f"/{source['name']}/{source['key']}"
    )


def test_prometheus_keeps_the_admin_ports_of_our_pods_alone() -> None:
    (job,) = SCRAPE["scrape_configs"]
    keep, *labels = job["relabel_configs"]
    named = {
        (pod["metadata"]["labels"]["app.kubernetes.io/name"], port)
        for overlay in OVERLAYS
        for pod in pods(overlay).values()
        for container in pod["spec"]["containers"]
        for port in ports(container)
    }
    kept = {pair for pair in named if re.fullmatch(keep["regex"], ";".join(pair))}
    assert kept == {("llm", "admin"), ("admission", "admin")}
    assert {label["target_label"] for label in labels} == set(ADAPTER["rules"][0]["resources"]["overrides"])
