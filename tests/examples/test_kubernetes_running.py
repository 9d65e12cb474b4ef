"""The sidecars and the store of examples/kubernetes with the arguments of their manifests, before an emulated
engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.command_lines import parsed
from tests.examples.kubernetes import (
    IN_POD,
    KUBERNETES,
    ConfigMapFolder,
    containers,
    of_kind,
    pod_of_the_sidecar,
    pods,
    policy_folders,
    ports,
    sidecar,
)
from tests.examples.running import TIMEOUT_S, Sidecar, asked, emulator, fetched, in_the_background, sidecars, with_key
from tests.support.prometheus import prometheus
from tests.support.redis_servers import RedisServer, first_binary, until

pytestmark = pytest.mark.long

KEY = "sk-of-the-test"
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there
GUARDED = {"SIDECAR_ADMIN_TOKEN": "a-token-of-the-test"}
UNWATCHED = {"SIDECAR_ENGINE_CHECK": "off"}
"""For a sidecar before no engine: it would hold its requests."""
ENGINES = {"vllm": "vllm", "trtllm": "tensorrt-llm"}
ADAPTER = yaml.safe_load((KUBERNETES / "monitoring" / "adapter.yaml").read_text())


@dataclass(frozen=True)
class Pod:
    """A sidecar in its pod, whose tenant `standard` has KEY."""

    sidecar: Sidecar
    container: Mapping[str, Any]
    tenants: ConfigMapFolder
    data: Mapping[str, str]


@contextmanager
def running(overlay: str, folder: Path, upstream: str, **variables: str) -> Iterator[Pod]:
    """The sidecar of an overlay as its manifest starts it, before an engine."""
    container = sidecar(overlay)
    folders = policy_folders(overlay, folder)
    data = dict(of_kind(overlay, "ConfigMap")["admission-tenants"]["data"])
    data["standard.yaml"] = with_key(data["standard.yaml"], KEY)
    folders["/etc/admission/tenants"].update(data)
    policy = folder / parsed(container["args"]).policy.lstrip("/")
    with sidecars(container["args"], upstream, policy, **variables) as started:
        yield Pod(started, container, folders["/etc/admission/tenants"], data)


def status(pod: Pod, probe: str) -> int:
    """What a probe of the container is answered, at the port that it names."""
    asks = pod.container[f"{probe}Probe"]["httpGet"]
    place = {"http": pod.sidecar.url, "admin": pod.sidecar.admin}[asks["port"]]
    assert asks["port"] in ports(pod.container)
    return fetched(place + asks["path"])[0]


@pytest.fixture(scope="module", params=IN_POD)
def pod(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """Each of the two, before an engine that is slow, and full with two requests of 600 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    with (
        emulator(ENGINES[request.param], "--kv-tokens=1000", "--step-ms=50") as upstream,
        running(request.param, folder, upstream) as started,
    ):
        until(lambda: status(started, "readiness") == 200, f"{request.param} is ready", TIMEOUT_S)
        yield started


def test_the_probes_are_answered_and_clients_are_served_by_their_keys(pod: Pod) -> None:
    assert [status(pod, probe) for probe in ("startup", "liveness", "readiness")] == [200, 200, 200]
    assert asked(pod.sidecar.url, KEY) == 200
    assert asked(pod.sidecar.url, "sk-nobody") == 401
    assert asked(pod.sidecar.url, None) == 401


def test_the_metric_that_the_adapter_asks_for_is_on_the_page(pod: Pod) -> None:
    (rule,) = ADAPTER["rules"]
    series, labels = re.fullmatch(r"(\w+)\{(.*)\}", rule["seriesQuery"]).groups()
    assert 'admission_tier="normal"' in labels
    assert re.search(
        rf'^{series}{{[^}}]*admission_tier="normal"}} ', fetched(f"{pod.sidecar.admin}/metrics")[1], re.MULTILINE
    )


@pytest.mark.parametrize("pod", ["vllm"], indirect=True)
def test_a_config_map_that_changes_gives_keys_and_takes_them(pod: Pod) -> None:
    another = "sk-another-of-the-test"
    added = with_key(pod.data["standard.yaml"], another).replace("tenant: standard", "tenant: another")
    pod.tenants.update({**pod.data, "another.yaml": added})
    until(lambda: asked(pod.sidecar.url, another) == 200, "the new tenant is let in", TIMEOUT_S)
    pod.tenants.update(pod.data)
    until(lambda: asked(pod.sidecar.url, another) == 401, "its key is worth nothing", TIMEOUT_S)
    assert asked(pod.sidecar.url, KEY) == 200


@pytest.mark.parametrize("pod", ["vllm"], indirect=True)
def test_a_request_that_waits_moves_what_the_scaler_follows(pod: Pod, tmp_path: Path) -> None:
    (rule,) = ADAPTER["rules"]
    target = pod.sidecar.admin.removeprefix("http://")
    # As the adapter fills it in, with labels that a Prometheus has without a cluster.
    filled_in = {"Series": series_of(rule), "LabelMatchers": f'instance="{target}"', "GroupBy": "instance"}
    query = re.sub(r"<<\.(\w+)>>", lambda found: filled_in[found[1]], rule["metricsQuery"])
    with prometheus(tmp_path, [target]) as server:
        until(lambda: [sample.value for sample in server.query(query)] == [0.0], "none waits", TIMEOUT_S)
        # 600 of 950 tokens each: the second waits until the first has ended, in half a minute.
        in_the_background(pod.sidecar.url, KEY, 600)
        in_the_background(pod.sidecar.url, KEY, 600)
        until(lambda: any(sample.value > 0 for sample in server.query(query)), "somebody waits", TIMEOUT_S)
        (sample,) = server.query(query)
        assert sample.labels == {"instance": target}


def replicas(pod: Pod) -> object:
    """How many sidecars share the pool, as this one knows."""
    return pod.sidecar.page("/state")["pool"]["store"]["replicas"]


def series_of(rule: Mapping[str, Any]) -> str:
    """The series that a rule of the adapter begins with."""
    return rule["seriesQuery"].partition("{")[0]


def test_the_hook_of_the_engine_ends_when_the_sidecar_has_closed(tmp_path: Path) -> None:
    hook = containers(pod_of_the_sidecar("vllm"))["engine"]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["python3", "-c"]
    assert hook[2].count("8080") == 1
    with running("vllm", tmp_path, NOBODY) as started:
        mine = hook[2].replace("8080", str(started.sidecar.port))
        with subprocess.Popen([sys.executable, "-c", mine]) as waiting:
            try:
                # It has a second to look at a sidecar that is there: a hook that did not wait would be over.
                with pytest.raises(subprocess.TimeoutExpired):
                    waiting.wait(1)
                started.sidecar.process.send_signal(signal.SIGTERM)
                assert started.sidecar.process.wait(20) == 0
                assert waiting.wait(20) == 0
            finally:
                waiting.kill()


def test_the_sidecars_of_a_shared_pool_meet_in_the_store(tmp_path: Path) -> None:
    (store,) = (
        containers(pod["spec"])["valkey"] for pod in pods("shared-pool").values() if "valkey" in containers(pod["spec"])
    )
    # The Secret's two entries are one password.
    arguments = [word.replace("$(STORE_PASSWORD)", "of-the-test") for word in store["args"]]
    assert arguments != store["args"]
    with RedisServer(first_binary(), tmp_path, *arguments, password="of-the-test") as server:
        assert server.command("CONFIG", "GET", "maxmemory-policy")[1] == "noeviction"
        assert server.command("CONFIG", "GET", "save")[1] == ""
        with (
            running("shared-pool", tmp_path / "a", NOBODY, SIDECAR_STORE=server.url, **UNWATCHED) as first,
            running("shared-pool", tmp_path / "b", NOBODY, SIDECAR_STORE=server.url, **GUARDED, **UNWATCHED) as second,
        ):
            for each in (first, second):
                assert each.sidecar.page("/readyz")["notices"] == []
            assert fetched(f"{second.sidecar.admin}/metrics")[0] == 401
            until(lambda: replicas(first) == 2, "it knows of the other", TIMEOUT_S)
            # admitted by the store, and then there is no engine
            assert asked(second.sidecar.url, KEY) == 502
