"""examples/compose: its files fit together, and its sidecars, engine and store run with the very commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.policy.compiler import load
from sidecar.policy.units import duration_s
from tests.examples.command_lines import EXAMPLES, ROOT, parsed, replaced, unknown_variables
from tests.examples.running import TIMEOUT_S, asked, fetched, sidecars
from tests.support.commands import address, command
from tests.support.each import each
from tests.support.prometheus import program
from tests.support.redis_servers import RedisServer, first_binary, until

pytestmark = pytest.mark.long

COMPOSE = EXAMPLES / "compose"
FILES: dict[str, Any] = {
    name: yaml.safe_load((COMPOSE / name).read_text()) for name in ("compose.yaml", "compose.engines.yaml")
}
FILE = FILES["compose.yaml"]
SERVICES: dict[str, Any] = FILE["services"]
WITH_ENGINES: dict[str, Any] = FILES["compose.engines.yaml"]["services"]
EVERY = [(file, name) for file, read in FILES.items() for name in read["services"]]
SIDECARS = [name for name, service in SERVICES.items() if service.get("command", [""])[0] == "serve"]
KNOWN = {
    "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "ports", "profiles", "pull_policy",
    "read_only", "restart", "security_opt", "stop_grace_period", "user", "volumes",
}  # fmt: skip
"""What we say of a service: keys that the Compose specification has, so that a misspelt one is seen without Compose."""
BEYOND_GRACE_S = 5


class _Overriding(yaml.SafeLoader):
    """Reads Compose's `!reset`, which takes away what the other file says."""


_Overriding.add_constructor("!reset", lambda loader, node: None)


def compose_command() -> list[str]:
    """Docker's own Compose. It needs no daemon to check a file; where there is none, the test is skipped."""
    for found in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(found[0])
            and subprocess.run([*found, "version"], capture_output=True, check=False).returncode == 0
        ):
            return found
    pytest.skip("no Docker Compose here; the other tests look at the same files without it")


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.vllm.yaml"], ["compose.engines.yaml"]])
def test_compose_itself_takes_the_files(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "a-model")
    given = [word for name in files for word in ("-f", str(COMPOSE / name))]
    checked = [*compose_command(), *given, "--profile", "*", "config", "--quiet"]
    ended = subprocess.run(checked, capture_output=True, text=True, check=False, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


def service_of(file: str, name: str) -> Any:
    return FILES[file]["services"][name]


@each(("file", "name"), EVERY)
def test_a_service_is_described_in_words_that_compose_has(file: str, name: str) -> None:
    service = service_of(file, name)
    assert set(service) <= KNOWN
    assert set(service.get("healthcheck", {})) <= {"test", "interval", "timeout", "start_period"}
    assert re.fullmatch(r"admission-sidecar|[\w./-]+:v?\d+\.\d+\.\d+(-alpine)?", service["image"]), "name a version"
    needed = service.get("depends_on", {})
    for other in needed:
        condition = needed[other]["condition"] if isinstance(needed, dict) else "service_started"
        assert condition in {"service_started", "service_healthy"}
        assert condition == "service_started" or "healthcheck" in service_of(file, other)
        assert (
            not service_of(file, other).get("profiles")
            or service.get("profiles") == service_of(file, other)["profiles"]
        )


@each(("file", "name"), EVERY)
def test_what_a_service_mounts_is_there_and_read_only(file: str, name: str) -> None:
    for volume in service_of(file, name).get("volumes", ()):
        source, _, target = volume.partition(":")
        if source.startswith("."):
            assert (COMPOSE / source).exists()
            assert target.endswith(":ro")
        else:
            assert source in FILES[file]["volumes"]


@each(("file", "name"), EVERY)
def test_our_commands_have_the_flags_and_variables(file: str, name: str) -> None:
    service = service_of(file, name)
    if service["image"] == "admission-sidecar":
        parsed(service["command"])
        assert unknown_variables(list(service.get("environment", {}))) == []


@pytest.mark.parametrize("file", FILES)
def test_ports_are_published_on_this_machine_alone_and_none_twice(file: str) -> None:
    services = FILES[file]["services"]
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    outside = [port.split(":")[1] for port in published]
    assert len(set(outside)) == len(outside)
    for name in SIDECARS:
        args = parsed(services[name]["command"])
        assert {int(port.split(":")[2]) for port in services[name]["ports"]} == {args.port, args.admin_port}


def test_every_name_that_is_asked_for_is_a_service_and_every_port_one_that_it_has() -> None:
    args = parsed(SERVICES[SIDECARS[0]]["command"])
    engine = parsed(SERVICES["engine"]["command"])
    listens = {
        "engine": {engine.port},
        "store": {6379},
        "collector": {4318},
        "tempo": {4317, 3200},
        "prometheus": {9090},
        **{name: {args.port, args.admin_port} for name in SIDECARS},
    }
    written = (COMPOSE / "compose.yaml").read_text() + (COMPOSE / "prometheus.yml").read_text()
    asked_for = set(re.findall(r'(?:[a-z]+://|")([a-z][\w-]*):(\d+)', written)) - {("localhost", "")}
    assert {name for name, _ in asked_for} >= {"engine", "store", "collector", "tempo", "prometheus", *SIDECARS}
    assert [f"{name}:{port}" for name, port in asked_for if int(port) not in listens.get(name, ())] == []
    tempo = yaml.safe_load((COMPOSE / "tempo.yaml").read_text())
    receives = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert {tempo["server"]["http_listen_port"], int(receives.rpartition(":")[2])} == listens["tempo"]


def test_the_provisioning_finds_its_variables_and_the_dashboard() -> None:
    asked_for = {
        name
        for path in (ROOT / "otel" / "grafana" / "provisioning").rglob("*.yaml")
        for name in re.findall(r"\$\{(\w+)\}", path.read_text())
    }
    grafana = SERVICES["grafana"]
    assert asked_for <= grafana["environment"].keys()
    folder = grafana["environment"]["ADMISSION_DASHBOARDS"]
    assert any(f":{folder}/admission.json:" in volume for volume in grafana["volumes"])


@pytest.mark.parametrize("file", FILES)
def test_a_sidecar_is_given_the_time_to_drain(file: str) -> None:
    for name in SIDECARS:
        service = service_of(file, name)
        assert duration_s(service["stop_grace_period"]) >= parsed(service["command"]).grace + BEYOND_GRACE_S


def test_the_pool_is_what_the_engine_holds() -> None:
    engine, policy = parsed(SERVICES["engine"]["command"]), load(COMPOSE / "policy")
    assert policy.rules.tokens == engine.kv_tokens
    assert policy.rules.requests == engine.max_num_seqs + 2


def test_the_pool_of_three_is_what_each_engine_holds_and_names_the_services() -> None:
    policy = load(COMPOSE / "engines")
    engines = {engine.url.removeprefix("http://"): engine for engine in policy.engines.static}
    commands = {f"{name}:8000": parsed(WITH_ENGINES[name]["command"]) for name in WITH_ENGINES if "engine" in name}
    assert engines.keys() == commands.keys()
    for place, args in commands.items():
        assert engines[place].capacity.size(None, None) == (args.kv_tokens, args.max_num_seqs + 2)
        assert place.endswith(f":{args.port}")
    for name in SIDECARS:
        path = parsed(WITH_ENGINES[name]["command"]).policy
        ((source, target, _),) = (volume.split(":") for volume in WITH_ENGINES[name]["volumes"])
        assert load(COMPOSE / source / Path(path).relative_to(target)).tenants == policy.tenants != {}


def test_a_real_engine_takes_the_place_of_the_emulated_one() -> None:
    override = yaml.load((COMPOSE / "compose.vllm.yaml").read_text(), _Overriding)["services"]
    assert set(override) == {"engine"}
    flags = dict(word.lstrip("-").split("=", 1) for word in override["engine"]["command"] if word.startswith("--"))
    assert flags["port"] == str(parsed(SERVICES["engine"]["command"]).port)
    assert flags["scheduling-policy"] == "priority"


def test_prometheus_takes_its_configuration_and_scrapes_every_sidecar() -> None:
    settings = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{name}:9464" for name in SIDECARS]
    mounted = [volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]]
    assert "/etc/prometheus/rules.yaml" in mounted
    assert settings["rule_files"] == ["rules.yaml"]
    checked = [program("promtool"), "check", "config", "--syntax-only", COMPOSE / "prometheus.yml"]
    ended = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The store, by its own command; gives its address."""
    server, *arguments = SERVICES["store"]["command"]
    assert server == "valkey-server"
    with RedisServer(first_binary(), tmp_path, *arguments) as running:
        yield running.url


@pytest.mark.soak
def test_two_sidecars_share_one_pool_before_the_engine(store: str) -> None:
    variables = {
        name: SERVICES[SIDECARS[0]]["environment"][name] for name in ("SIDECAR_STORE", "OTEL_METRICS_EXPORTER")
    }
    variables["SIDECAR_STORE"] = variables["SIDECAR_STORE"].replace("redis://store:6379/0", store)
    assert variables["SIDECAR_STORE"] == store
    emulated = replaced(SERVICES["engine"]["command"], {"--host": "127.0.0.1", "--port": 0})
    with command(*emulated) as process:
        engine = address(process)
        first, second = (
            sidecars(SERVICES[name]["command"], engine, COMPOSE / "policy", **variables) for name in SIDECARS
        )
        with first as one, second as other:
            until(lambda: other.page("/state")["pool"]["store"]["replicas"] == 2, "it knows of the first", TIMEOUT_S)
            assert asked(one.url, "sk-demo-interactive") == 200
            assert asked(other.url, "sk-demo-research") == 200
            assert asked(other.url, None) == 200
            assert "admission_queue_wait_seconds_bucket" in fetched(f"{one.admin}/metrics")[1]
            # The commands that say whether they are healthy, as they are but for the ports.
            is_healthy(SERVICES[SIDECARS[0]], {9464: one.admin_port})
            is_healthy(SERVICES["engine"], {8000: int(engine.rpartition(":")[2])})
            load_runs(SERVICES["load"]["command"], [one.url, other.url])


def is_healthy(service: Mapping[str, Any], ports: Mapping[int, int]) -> None:
    """Runs the service's health check, and sees it fail where no one listens."""
    kind, program_name, *words = service["healthcheck"]["test"]
    assert (kind, program_name) == ("CMD", "python3")
    for port, replacement in ports.items():
        assert f":{port}/" in words[-1]
        asks = [*words[:-1], words[-1].replace(f":{port}/", f":{replacement}/")]
        assert subprocess.run([sys.executable, *asks], check=False, timeout=20).returncode == 0
        no_server = [*words[:-1], words[-1].replace(f":{port}/", ":9/")]
        assert (
            subprocess.run([sys.executable, *no_server], check=False, timeout=20, capture_output=True).returncode == 1
        )


def load_runs(words: list[str], urls: list[str]) -> None:
    """The load of the example, with fewer and shorter requests."""
    for name, url in zip(SIDECARS, urls, strict=True):
        assert f"--upstream=http://{name}:8080" in words
        words = [word.replace(f"http://{name}:8080", url) for word in words]
    assert "burst:400:256:64" in words
    with command(*(word.replace("burst:400:256:64", "burst:20:16:2") for word in words)) as process:
        said, mistakes = process.communicate(timeout=60)
    assert process.returncode == 0, mistakes
    for tier in ("high", "normal", "batch"):
        assert re.search(rf"^\s*{tier}\s", said, re.MULTILINE), said
