"""The engines and sidecars of examples/kubernetes/engines with their own names, ports and commands, during a roll-out.

Run by `test_kubernetes_engines.py` in a network of its own, in which a DNS server stands for the cluster's, and each
address for a pod. Prints what clients and the preStop hooks saw, as JSON. Argument: a folder for the pods' files.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.examples.kubernetes import (
    ConfigMapFolder,
    containers,
    of_kind,
    pods,
    policy_folders,
    ports,
    sidecar,
)
from tests.examples.running import with_key
from tests.support.dns_server import ZONE, DnsServer
from tests.support.own_network import bring_loopback_up, use_own_resolver
from tests.support.redis_servers import RedisServer, first_binary

OVERLAY = "engines"
KEY, TOKEN = "sk-of-the-test", "a-token-of-the-test"
STORE = "SIDECAR_STORE"
SIDECARS = ("127.0.0.5", "127.0.0.6")
OLD, NEW = ("127.0.0.11", "127.0.0.12", "127.0.0.13"), ("127.0.0.21", "127.0.0.22", "127.0.0.23")
WITHIN_S = 60.0
CLIENTS, TOKENS = 9, 40


class Cluster:
    """The pods that run. `engines` are those that DNS names, by their addresses."""

    def __init__(self, folder: Path, dns: DnsServer) -> None:
        self.engine = containers(pods(OVERLAY)["llm-engine"]["spec"])["engine"]
        self.sidecar = sidecar(OVERLAY)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._dns = dns
        self._named: list[str] = []
        folders = policy_folders(OVERLAY, folder)
        for policies in folders.values():
            hurry(policies)
        tenants = dict(of_kind(OVERLAY, "ConfigMap")["admission-tenants"]["data"])
        folders["/etc/admission/tenants"].update({**tenants, "standard.yaml": with_key(tenants["standard.yaml"], KEY)})
        (drain,) = (m["mountPath"] for m in self.engine["volumeMounts"] if m["name"] == "drain")
        ConfigMapFolder(folder / drain.lstrip("/"), of_kind(OVERLAY, "ConfigMap")["engine-drain"]["data"])

    def start_engine(self, address: str) -> None:
        """An emulated engine in the place of the container's, on its port."""
        (port,) = ports(self.engine).values()
        self._start(address, "emulate", "--engine=vllm", f"--host={address}", f"--port={port}", "--kv-tokens=20000",
                    "--max-num-seqs=64", "--step-ms=20", "--enable-prefix-caching", "--cache-report")  # fmt: skip

    def start_sidecar(self, address: str, **variables: str) -> None:
        """By its own arguments; the policy is below the folder."""
        here = {"--host": address, "--admin-host": address}
        words = [f"{flag}={here[flag]}" if (flag := word.partition("=")[0]) in here else word for word in self._args()]
        self._start(address, *words, SIDECAR_ADMIN_TOKEN=TOKEN, **variables)

    def _args(self) -> Iterator[str]:
        for word in self.sidecar["args"]:
            flag, _, value = word.partition("=")
            yield f"{flag}={self._folder / value.lstrip('/')}" if flag == "--policy" else word

    def _start(self, address: str, *words: str, **variables: str) -> None:
        log = (self._folder / f"{address}.log").open("wb")
        inherited = {name: value for name, value in os.environ.items() if name != STORE}
        self.processes[address] = subprocess.Popen(
            [sys.executable, "-m", "sidecar.cli", *words], stdout=log, stderr=log, env={**inherited, **variables}
        )

    def name_engines(self, *addresses: str) -> None:
        """The ready pods of the headless Service are these."""
        self._dns.set(service_of("llm-engine"), "A", *addresses)

    def hook(self, address: str, **changed: str) -> subprocess.Popen[bytes]:
        """The preStop hook of the pod with this address, with the variables of its container."""
        command = self.engine["lifecycle"]["preStop"]["exec"]["command"]
        words = [str(self._folder / word.lstrip("/")) if word.startswith("/etc/") else word for word in command]
        assert words[0] == "python3"
        given = dict(variables_of(self.engine, address))
        environment = {"PATH": os.environ["PATH"], **given, **changed}
        return subprocess.Popen([sys.executable, "-I", *words[1:]], env=environment, stderr=subprocess.PIPE)

    def start_store(self) -> RedisServer:
        """By the arguments of the manifest."""
        (store,) = containers(pods(OVERLAY)["admission-store"]["spec"]).values()
        arguments = [word.replace("$(STORE_PASSWORD)", "of-the-test") for word in store["args"]]
        return RedisServer(first_binary(), self._folder, *arguments, password="of-the-test")

    def fail_if_one_ended(self) -> None:
        """Raises AssertionError with the log of a process that ended by itself."""
        for address, process in self.processes.items():
            if process.poll() not in (None, 0):
                raise AssertionError((self._folder / f"{address}.log").read_text())

    def end(self) -> None:
        """Kills what is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def hurry(folder: ConfigMapFolder) -> None:
    """DNS is asked ten times as often as the policy says: the test waits for it six times."""
    files = {path.name: path.read_text() for path in folder.path.iterdir() if path.suffix == ".yaml"}
    if "policy.yaml" in files:
        assert files["policy.yaml"].count("refresh: 5s") == 1
        folder.update({**files, "policy.yaml": files["policy.yaml"].replace("refresh: 5s", "refresh: 500ms")})


def service_of(name: str) -> str:
    """A headless Service of the overlay. A name that is none would resolve to nothing in a cluster either."""
    assert of_kind(OVERLAY, "Service")[name]["spec"]["clusterIP"] == "None"
    return name


def variables_of(container: Mapping[str, Any], address: str) -> Iterator[tuple[str, str]]:
    """A container's variables as a kubelet sets them."""
    secrets = {"SIDECAR_ADMIN_TOKEN": TOKEN}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            yield variable["name"], address
        elif "secretKeyRef" in source:
            yield variable["name"], secrets[source["secretKeyRef"]["key"]]
        else:
            yield variable["name"], variable["value"]


class Clients:
    """Clients that ask one streamed question after another, of both sidecars in turn. `outcomes` counts the ends."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.outcomes: Counter[str] = Counter()
        self.by_engine: Counter[str] = Counter()
        self._session = session
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Until `finish`."""
        self._tasks = [asyncio.create_task(self._repeat(number)) for number in range(CLIENTS)]

    async def finish(self) -> None:
        """Waits for the answers under way."""
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

    async def _repeat(self, number: int) -> None:
        me = asyncio.current_task()
        asked = 0
        while me in self._tasks:
            asked += 1
            outcome, engine = await self.ask(SIDECARS[(number + asked) % 2], f"client {number}, question {asked}")
            self.outcomes[outcome] += 1
            self.by_engine[engine] += 1

    async def ask(self, address: str, text: str, tokens: int = TOKENS) -> tuple[str, str]:
        """The end of one stream, `complete` where nothing is missing, and the engine that it was sent to."""
        body = {"model": "m", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
        url, headers = f"http://{address}:8080/v1/chat/completions", {"authorization": f"Bearer {KEY}"}
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                received = await response.text()
                engine = response.headers.get("x-admission-engine", "")
                if response.status != 200:
                    return f"{response.status} {received[:200]}", engine
                is_complete = '"finish_reason":"length"' in received and received.rstrip().endswith("data: [DONE]")
                return "complete" if is_complete else "cut", engine
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}: {error}", ""


async def rows(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    """`GET /engines` of a sidecar, by name."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with session.get(f"http://{address}:9464/engines", headers=headers) as response:
        return {row["name"]: row for row in (await response.json())["engines"]}


async def until_ready(cluster: Cluster, session: aiohttp.ClientSession, addresses: Sequence[str]) -> None:
    """Both sidecars can use these engines."""
    seen: object = None
    for _ in range(round(WITHIN_S / 0.1)):
        try:
            seen = [await rows(session, each) for each in SIDECARS]
            if all(found.get(f"{each}:8000", {}).get("takes_new") for found in seen for each in addresses):
                return
        except (aiohttp.ClientError, KeyError) as error:
            seen = error
        cluster.fail_if_one_ended()
        await asyncio.sleep(0.1)
    raise AssertionError(seen)


async def in_flight(session: aiohttp.ClientSession, engine: str) -> int:
    """Requests of both sidecars that an engine serves."""
    found = [await rows(session, each) for each in SIDECARS]
    return sum(each[engine]["in_flight"] for each in found if engine in each)


async def until_busy(session: aiohttp.ClientSession, engine: str) -> None:
    """It serves requests."""
    for _ in range(round(WITHIN_S / 0.05)):
        if await in_flight(session, engine):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(engine)


async def until_gone(session: aiohttp.ClientSession, engine: str) -> None:
    """Both sidecars know that DNS names it no more."""
    for _ in range(round(WITHIN_S / 0.1)):
        found = [await rows(session, each) for each in SIDECARS]
        if all(each.get(engine, {"state": "gone"})["state"] == "gone" for each in found):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(found)


async def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit code and standard error of a process, while the loop goes on."""
    _, said = await asyncio.wait_for(asyncio.to_thread(process.communicate), WITHIN_S)
    return process.returncode, (said or b"").decode()


async def roll_out(cluster: Cluster, session: aiohttp.ClientSession) -> dict[str, Any]:
    """Each engine is replaced by a new one under load: a new pod, then the old one's end, as `maxSurge: 1` says."""
    clients, before, hooks, left = Clients(session), [], [], []
    clients.begin()
    await asyncio.sleep(1)
    now = list(OLD)
    for old, new in zip(OLD, NEW, strict=True):
        cluster.start_engine(new)
        cluster.name_engines(*now, new)
        await until_ready(cluster, session, [new])
        now = [*(each for each in now if each != old), new]
        cluster.name_engines(*now)  # the pod is out of DNS when it is told to end
        before.append(await in_flight(session, f"{old}:8000"))
        hooks.append(await ended(cluster.hook(old)))
        left.append(await in_flight(session, f"{old}:8000"))
        cluster.processes[old].terminate()
        await asyncio.to_thread(cluster.processes[old].wait, 20)
    await asyncio.sleep(1)
    await clients.finish()
    return {
        "open_before": before,
        "hooks": hooks,
        "open_after": left,
        "outcomes": clients.outcomes,
        "by_engine": clients.by_engine,
    }


async def late(cluster: Cluster, session: aiohttp.ClientSession) -> dict[str, Any]:
    """A hook that asks when the sidecars have forgotten the engine's name: it waits for the answers all the same."""
    clients, first = Clients(session), NEW[0]
    engine = f"{first}:8000"
    streams = [asyncio.create_task(clients.ask(SIDECARS[number % 2], f"late {number}", 300)) for number in range(12)]
    await until_busy(session, engine)
    cluster.name_engines(*NEW[1:])
    await until_gone(session, engine)
    open_before = await in_flight(session, engine)
    hook = await ended(cluster.hook(first))
    return {
        "open_before": open_before,
        "open_after": await in_flight(session, engine),
        "hook": hook,
        "outcomes": Counter(outcome for outcome, _ in await asyncio.gather(*streams)),
    }


async def without_the_hook(cluster: Cluster, session: aiohttp.ClientSession) -> Counter[str]:
    """The ends of streams whose engine is told to end, and no one waits for them."""
    clients, last = Clients(session), NEW[2]
    streams = [asyncio.create_task(clients.ask(SIDECARS[number % 2], f"cut {number}", 200)) for number in range(12)]
    await until_busy(session, f"{last}:8000")
    await asyncio.sleep(0.5)  # each has its first token
    cluster.processes[last].terminate()
    return Counter(outcome.partition(":")[0] for outcome, _ in await asyncio.gather(*streams))


async def by_one(cluster: Cluster, session: aiohttp.ClientSession) -> dict[str, Any]:
    """A drain at one sidecar of a shared pool: what the other one then shows of the engine."""
    engine = f"{NEW[1]}:8000"
    hook = await ended(cluster.hook(NEW[1], DRAIN_AT=f"{SIDECARS[0]}:9464"))
    for _ in range(50):
        found = (await rows(session, SIDECARS[1]))[engine]
        if found["state"] == "draining":
            break
        await asyncio.sleep(0.1)
    return {"hook": hook, "state": found["state"], "takes_new": found["takes_new"]}


async def scenario(cluster: Cluster, store: str) -> dict[str, Any]:
    """All that is asked of the cluster, in order."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for address in OLD:
            cluster.start_engine(address)
        cluster.name_engines(*OLD)
        for address in SIDECARS:
            cluster.start_sidecar(address, **{STORE: store})
        await until_ready(cluster, session, OLD)
        found: dict[str, Any] = {"rolled out": await roll_out(cluster, session)}
        found["late"] = await late(cluster, session)
        found["wrong token"] = await ended(cluster.hook(NEW[1], SIDECAR_ADMIN_TOKEN="another-token-of-the-test"))
        found["unknown"] = await ended(cluster.hook("127.0.0.99"))
        found["without the hook"] = await without_the_hook(cluster, session)
        found["no sidecar"] = await ended(cluster.hook(NEW[1], DRAIN_AT="admission-nowhere:9464"))
        found["by one"] = await by_one(cluster, session)
        return found


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    """Its DNS has the sidecars' own addresses. All its processes are killed at the end."""
    with DnsServer(port=53) as dns:
        dns.ttl_s = 1
        dns.set(service_of("admission-admin"), "A", *SIDECARS)
        cluster = Cluster(folder, dns)
        try:
            yield cluster
        finally:
            cluster.end()


def main() -> None:
    """Prints the outcomes."""
    bring_loopback_up()
    use_own_resolver(search=ZONE.rstrip("."))
    with ExitStack() as opened:
        cluster = opened.enter_context(cluster_in(Path(sys.argv[1])))
        store = opened.enter_context(cluster.start_store()).url
        print(json.dumps(asyncio.run(scenario(cluster, store))))  # noqa: T201  # for the test


if __name__ == "__main__":
    main()
