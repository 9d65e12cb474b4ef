"""`sidecar init` as a user runs it: before emulated engines of every dialect, and before pages that lie."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.cli import main
from sidecar.cli.init import engine_names, free_port, write_files
from sidecar.engines.registry import ENGINES
from sidecar.policy.choices import Mode
from sidecar.policy.compiler import load_files, shipped_policies
from sidecar.policy.tenant_keys import hash_line
from sidecar.policy.warnings import warnings
from tests.support.commands import address, command
from tests.support.http import fetch
from tests.support.in_process import complaint, emulated_engine, output, ran, served_sidecar
from tests.support.pages import Pages, serving_pages
from tests.support.ports import free_ports
from tests.support.redis_servers import until

DIALECTS = ("vllm", "tensorrt-llm", "sglang", "dynamo")
FAST = ("--max-num-seqs", "32", "--step-ms", "1", "--kv-tokens", "50000")
NO_ONE = "http://127.0.0.1:9"  # the discard port: no one listens there
KEY = re.compile(r"sk-[\w-]{43}")


def init(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran("init", *arguments)


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(folder: Path) -> dict[str, Any]:
    """What `sidecar check` says, without a mistake, and without a warning but that of an engine that says no number."""
    checked: dict[str, Any] = json.loads(output("check", folder, "--json", "-"))
    assert [one for one in checked["warnings"] if "until it is seen to be full" not in one["message"]] == []
    return checked


def asked(url: str, key: str) -> tuple[int, Mapping[str, str]]:
    body = {"model": "emulated", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    answer = fetch(f"{url}/v1/chat/completions", body, key=key)
    return answer.status, answer.headers


@contextmanager
def pages(by_path: Pages) -> Iterator[str]:
    with serving_pages(by_path) as server:
        yield server.url


def owned_by(owner: str) -> tuple[int, str]:
    return 200, json.dumps({"data": [{"id": "m", "owned_by": owner}]})


def test_several_engines_make_one_pool(tmp_path: Path) -> None:
    folder, engine = tmp_path / "policies", ("--engine", "sglang", *FAST)
    with emulated_engine(*engine) as one, emulated_engine(*engine) as two:
        urls = [one, two]
        ended = init("--upstream", urls[0], "--upstream", urls[1], "--dir", str(folder), "--json", str(tmp_path / "j"))
        assert (ended.returncode, ended.stderr) == (0, "")
    policy = load_files(folder).policy
    assert [(engine.name, engine.url) for engine in policy.engines.static] == [
        ("engine-1", urls[0]),
        ("engine-2", urls[1]),
    ]
    assert all(engine.capacity.is_read for engine in policy.engines.static)
    assert dict(policy.models) == {}
    checked = check(folder)
    assert (checked["capacity"]["from"], len(checked["tiers"])) == ("engine", 5)  # 64 requests at once, together
    assert f"  sidecar serve --policy {folder}\n" in ended.stdout
    assert f"a policy for 2 engines, the first of them sglang 0.5.23 at {urls[0]}\n  engines:\n    static:\n" in (
        re.sub(r"sglang [0-9.]+ at", "sglang 0.5.23 at", ended.stdout)
    )
    figures = json.loads((tmp_path / "j").read_text())
    assert figures["engines"] == [{"name": "engine-1", "url": urls[0]}, {"name": "engine-2", "url": urls[1]}]


def shell(line: str, folder: Path, **variables: str) -> str:
    """A printed command line, with this Python's `sidecar`."""
    here = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), **variables}
    ended = subprocess.run(
        ["sh", "-c", line], cwd=folder, env=here, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, (line, ended.stderr)
    return ended.stdout


@pytest.mark.long
def test_the_printed_commands_for_several_engines_run_to_the_end(tmp_path: Path) -> None:
    first = free_ports(3)
    emulated = ("emulate", "--engine", "vllm", "--replicas", "3", "--port", str(first), "--max-num-seqs", "4")
    with command(*emulated, "--kv-tokens", "20000") as engines:
        urls = [address(engines) for _ in range(3)]
        upstreams = " ".join(f"--upstream {url}" for url in sorted(urls))
        text = shell(f"sidecar init {upstreams} --requests 4 --json init.json", tmp_path)
        key = next(iter(KEY.findall(text)))
        lines = [line.strip() for line in text.partition("\nnext\n")[2].splitlines() if not line.startswith("      ")]
        serve, observed, enforce, listed = lines
        _, *words = serve.partition(" --port")[0].split()
        with command(*words, "--port", "0", "--admin-port", "0", cwd=str(tmp_path)) as process:
            url, admin = address(process), address(process)
            assert asked(url, key)[0] == 200
            assert "1 request" in shell(f"{observed} --admin {admin}", tmp_path)
            shell(enforce, tmp_path)
            until(lambda: "x-admission-mode" not in asked(url, key)[1], "it enforces")
            assert asked(url, key)[1]["x-admission-engine"] in {"engine-1", "engine-2", "engine-3"}
            rows = shell(f"{listed} --admin {admin}", tmp_path)
            assert all(f"engine-{number}#1" in rows for number in (1, 2, 3))
        engines.terminate()
        engines.wait(20)


def test_engines_of_several_models_get_a_pool_for_each(tmp_path: Path) -> None:
    folder = tmp_path / "policies"

    def engine(model: str) -> Pages:
        return {"/v1/models": (200, json.dumps({"data": [{"id": model, "owned_by": "vllm"}]}))}

    with pages(engine("org/a")) as one, pages(engine("org/b")) as two, pages(engine("org/a")) as three:
        upstreams = [part for url in (one, two, three) for part in ("--upstream", url)]
        ended = init(*upstreams, "--dir", str(folder), "--requests", "40")
    assert (ended.returncode, ended.stderr) == (0, "")
    policy = load_files(folder).policy
    assert {name: model.engines for name, model in policy.models.items()} == {
        "org/a": ("engine-1", "engine-3"),
        "org/b": ("engine-2",),
    }
    assert (policy.rules.requests, policy.of_model("org/a").rules.requests) == (120, 80)
    for model in ("org/a", "org/b"):
        assert f"\n  sidecar observed --admin http://127.0.0.1:9464/models/{model}\n" in ended.stdout
    assert "\n  sidecar observed\n" not in ended.stdout
    check(folder)


def test_engines_that_fit_in_no_policy_together_are_refused(tmp_path: Path) -> None:
    with pages({"/v1/models": owned_by("vllm")}) as one, pages({"/v1/models": owned_by("sglang")}) as two:
        ended = init("--upstream", one, "--upstream", two, "--dir", str(tmp_path / "p"), "--requests", "4")
        assert ended.returncode == 1
        assert ended.stderr == (
            f"sidecar init: {two} is sglang, and {one} is vllm: the engines of one policy are of one kind; write a "
            "policy for each kind; nothing was written\n"
        )
        ended = init("--upstream", one, "--upstream", f"{one}/", "--dir", str(tmp_path / "p"), "--requests", "4")
        assert f"--upstream {one} is given twice; give each engine once" in ended.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["http://vllm-0.vllm.ns.svc:8000", "http://vllm-1.vllm.ns.svc:8000"], ["vllm-0", "vllm-1"]),
        (["http://vllm:8000", "http://vllm:8001"], ["engine-1", "engine-2"]),
        (["http://10.0.0.1:8000", "http://gpu:8000"], ["engine-1", "engine-2"]),
        (["http://[::1]:8000", "http://_x:8000"], ["engine-1", "engine-2"]),
    ],
)
def test_engines_are_named_by_their_hosts_where_that_tells_them_apart(urls: list[str], names: list[str]) -> None:
    assert engine_names(urls) == names


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_policy_for_each_engine_passes_check_and_serves_the_printed_key(dialect: str, tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    with emulated_engine("--engine", dialect, *FAST) as url:
        ended = init("--upstream", f"{url}/v1", "--dir", str(folder))
        left_out = (
            "sidecar: the /v1 at the end of the server's address is left out, because every path begins with it\n"
        )
        assert (ended.returncode, ended.stderr) == (0, left_out)
        policy = load_files(folder).policy
        assert (policy.engine, policy.mode) == (ENGINES[dialect], Mode.OBSERVE)
        assert policy.engine_capacity is not None
        checked = check(folder)
        tiers = 3 if dialect == "vllm" else 5  # vLLM behind a network does not say how many requests it runs at once
        assert (len(checked["tiers"]), checked["tenants"]) == (tiers, ["chat", "nightly"])
        chat, nightly = KEY.findall(ended.stdout)
        text = "".join(files_of(folder).values())
        assert not KEY.search(text)
        assert text.count(hash_line(chat)) == text.count(hash_line(nightly)) == 1

        with served_sidecar(folder, url) as (sidecar, _):
            status, headers = asked(sidecar, chat)
            assert (status, headers["x-admission-mode"], headers["x-admission-tier"]) == (200, "observe", "high")
            assert asked(sidecar, "sk-no-tenant-has-this-one")[0] == 200

            last = re.findall(r"^  (sed .*)$", ended.stdout, re.MULTILINE)[0]
            subprocess.run(last, shell=True, check=True)  # the command as it is printed
            until(lambda: asked(sidecar, "sk-no-tenant-has-this-one")[0] == 401, "it enforces")
            status, headers = asked(sidecar, nightly)
            assert (status, headers["x-admission-tier"]) == (200, "batch")
            assert "x-admission-mode" not in headers
        check(folder)


def test_a_sidecar_in_the_engines_place_is_named_and_the_printed_port_is_not_its_own(tmp_path: Path) -> None:
    folder = str(tmp_path / "more")
    with emulated_engine("--engine", "vllm", *FAST) as url:
        first = init("--upstream", url, "--dir", str(tmp_path / "first"), "--json", "-")
        assert json.loads(first.stdout)["is_sidecar"] is False
        with served_sidecar(tmp_path / "first", url) as (sidecar, _):
            ended = init("--upstream", sidecar, "--dir", folder)
            assert ended.returncode == 0, ended.stderr
            assert f"after an admission sidecar at {sidecar}\n  WARNING: a sidecar answers there." in ended.stdout


def test_the_printed_ports_are_free_and_not_the_upstreams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_ports(4)
    monkeypatch.setattr("sidecar.cli.init.CLIENTS_PORT", first)
    monkeypatch.setattr("sidecar.cli.init.ADMIN_PORT", first + 2)
    assert free_port(first) == first
    assert free_port(first, [f"http://127.0.0.1:{first}"]) == first + 1
    with socket.socket() as clients, socket.socket() as admin:
        for other, port in ((clients, first), (admin, first + 2)):
            other.bind(("127.0.0.1", port))
            other.listen()
        assert main(["init", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f" --policy {tmp_path} --port {first + 1} --admin-port {first + 3}\n" in printed
    assert f"send your traffic to port {first + 1}\n" in printed
    assert f"  sidecar observed --admin http://127.0.0.1:{first + 3}\n" in printed


def test_requests_without_a_key_are_refused_unless_a_tier_is_asked_for(tmp_path: Path) -> None:
    assert "  anonymous: deny\n    requests without a key get 401 once it is enforced" in output("init", tmp_path / "a")
    assert load_files(tmp_path / "a").policy.anonymous is None
    assert "  anonymous: batch\n    requests without a key get tier batch;" in output(
        "init", tmp_path / "b", "--anonymous", "batch"
    )
    policy = load_files(tmp_path / "b").policy
    assert policy.tiers[policy.anonymous.max_level].name == "batch"
    assert "there is no tier low; write deny, high or normal or batch; nothing" in complaint(
        "init", tmp_path / "c", "--anonymous", "low"
    )


def test_keys_are_written_to_files_and_not_printed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    printed = output("init", tmp_path / "p", "--keys-to", folder, "--json", "-")
    assert KEY.search(printed) is None
    named = {one["tenant"]: Path(one["key_file"]) for one in json.loads(printed)["tenants"]}
    assert named == {name: folder / f"{name}.key" for name in ("chat", "nightly")}
    policy = load_files(tmp_path / "p").policy
    for name, file in named.items():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert policy.tenants[hash_line(file.read_text().strip()).removeprefix("sha256:")].name == name
    printed = output("init", tmp_path / "q", "--keys-to", tmp_path / "k")
    assert KEY.search(printed) is None
    assert (
        f"keys for the clients, in files that you alone may read\n  chat     high   {tmp_path}/k/chat.key\n" in printed
    )


def test_a_key_that_is_there_is_not_overwritten_and_nothing_is_left(tmp_path: Path) -> None:
    mine = tmp_path / "keys" / "nightly.key"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert complaint("init", tmp_path / "p", "--keys-to", mine.parent) == (
        f"sidecar init: {mine} exists, and no file is overwritten; move it away, or name another folder; "
        "nothing was written\n"
    )
    assert main(["init", str(tmp_path / "p"), "--tiers", "5", "--requests", "2", "--keys-to", str(tmp_path / "k")]) == 1
    assert files_of(tmp_path) == {"keys/nightly.key": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_without_an_upstream_it_fits_an_emulated_engine_and_asks_no_one(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "policies"
    printed = output("init", "--dir", folder)
    assert "  sidecar emulate --engine vllm --max-num-seqs 8\n" in printed
    checked = check(folder)
    assert (checked["engine"], checked["capacity"]["requests"]) == ("vllm", 8)
    assert load_files(folder).policy.mode is Mode.OBSERVE


def test_an_engine_that_is_not_known_is_written_with_the_number_of_requests(tmp_path: Path) -> None:
    with pages({"/v1/models": owned_by("someone")}) as url:
        ask = ["init", "--upstream", url, "--dir", str(tmp_path / "p")]
        assert "no page there says which engine it is" in complaint(*ask)
        assert "none reports neither the tokens of its KV cache" in complaint(*ask, "--engine", "none")
        assert not (tmp_path / "p").exists()
        assert main([*ask, "--engine", "none", "--requests", "24"]) == 0
    checked = check(tmp_path / "p")
    assert (checked["engine"], checked["capacity"]["requests"], len(checked["tiers"])) == ("none", 24, 5)


def test_the_number_of_requests_bounds_a_pool_whose_tokens_are_read(tmp_path: Path) -> None:
    with emulated_engine("--engine", "vllm", *FAST) as url:
        assert main(["init", "--upstream", url, "--requests", "256", "--dir", str(tmp_path / "p")]) == 0
    checked = check(tmp_path / "p")
    assert checked["capacity"] == {"tokens": None, "requests": 258, "from": "engine"}
    assert len(checked["tiers"]) == 5


def test_tenants_get_the_tier_they_name_or_one_by_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "chat, on,1e3=batch,team@example.org,nightly"  # two of them mean something else in YAML
    assert main(["init", "--dir", str(tmp_path / "p"), "--tenants", names]) == 0
    tenants = {tenant.name: tenant.level for tenant in load_files(tmp_path / "p").policy.tenants.values()}
    assert tenants == {"chat": 0, "on": 1, "1e3": 2, "team@example.org": 1, "nightly": 2}
    assert len(set(KEY.findall(capsys.readouterr().out))) == 5
    check(tmp_path / "p")


@pytest.mark.parametrize("name", ["policy.yaml", "tenants/chat.yaml", "tenants/other.yaml"])
@pytest.mark.parametrize("more", [(), ("--example",), ("--upstream", NO_ONE)])
def test_no_file_is_overwritten_and_none_is_written_beside_it(
    name: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    assert main(["init", "--dir", str(tmp_path), *more]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("; nothing was written\n")
    if not more or name == "policy.yaml":
        assert f"{mine} exists, and no file is overwritten" in said.err
    assert files_of(tmp_path) == {name: "mine"}


def test_a_link_to_nothing_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").symlink_to(tmp_path / "elsewhere")
    assert main(["init", "--dir", str(tmp_path)]) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_with_other_files_takes_the_policy(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["init", "--dir", str(tmp_path)]) == 0
    assert sorted(files_of(tmp_path)) == ["README.md", "policy.yaml", "tenants/chat.yaml", "tenants/nightly.yaml"]
    check(tmp_path)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_run_that_fails_leaves_nothing(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, link = iter(range(3)), os.link

    def full(source: Path, target: Path) -> None:
        if next(links) == failing:
            raise OSError(28, "No space left on device", str(target))
        link(source, target)

    monkeypatch.setattr(os, "link", full)
    assert main(["init", "--dir", str(tmp_path / "a" / "b")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def meanwhile(_: Path) -> None:
        (tmp_path / "policy.yaml").write_text("mine")

    with pytest.raises(Exception, match=r"policy\.yaml exists, and no file is overwritten"):
        write_files(tmp_path, {"policy.yaml": "ours", "tenants/chat.yaml": "ours"}, meanwhile)
    assert files_of(tmp_path) == {"policy.yaml": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["policy.yaml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable to root")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "Permission denied; name another; nothing was written" in complaint("init", "--dir", tmp_path / "p")


def test_a_file_in_the_folders_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("mine")
    assert re.search(
        r"cannot write into \S+/p: (File exists|Not a directory);", complaint("init", "--dir", tmp_path / "p")
    )
    assert files_of(tmp_path) == {"p": "mine"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tenants", "chat,../x"], '"../x" is not a tenant\'s name; write up to 100 of A-Z'),
        (["--tenants", "chat,"], "a tenant's name"),
        (["--tenants", "anonymous"], '"anonymous" stands for requests without a key'),
        (["--tenants", "chat,Chat"], "the tenant Chat is named twice; write each name once"),
        (["--tenants", "chat="], "'chat=' names no tier; write NAME or NAME=TIER"),
        (["--tiers", "4"], "invalid choice: 4"),
        (["--requests", "0"], "'0' is no number of requests; write a number from 1 to 1,000,000"),
        (["--requests", "9" * 5000], "is no number of requests"),
        (["--upstream", "ftp://engine"], "is no server's address"),
        (["--upstream", NO_ONE, "--example"], "not allowed with argument"),
        (["--upstream", NO_ONE, "--mounted"], "not allowed with argument"),
        (["--example", "--keys-to", "k"], "--keys-to does not go with --example, whose keys everyone knows"),
    ],
)
def test_a_wrong_command_line_is_a_two(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in complaint("init", "--dir", tmp_path / "p", *arguments, code=2)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--upstream", NO_ONE], "cannot reach http://127.0.0.1:9"),
        (["--mounted"], "--mounted needs --requests N, the requests that the engine runs at once"),
        (["--tenants", "chat=critical"], "tenant chat: there is no tier critical; the tiers are high, normal, batch"),
        (
            ["--tiers", "5", "--requests", "2"],
            "these tiers do not fit this pool: tiers.critical.limit: 30% of 2 requests is less",
        ),
    ],
)
def test_what_cannot_be_written_is_a_one(arguments: list[str], said: str, tmp_path: Path) -> None:
    error = complaint("init", "--dir", tmp_path / "p", *arguments)
    assert said in error
    assert error.startswith("sidecar init: ")
    assert error.endswith("; nothing was written\n")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


HOSTILE = 'x\n  evil: {reserve: 100%}\nmode: enforce # "\\\u2028\u0085\x00\x1b[2J' + "y" * 10_000
NO_FIGURES: Pages = {"/v1/models": owned_by("vllm"), "/metrics": (200, "# nothing")}


@pytest.mark.parametrize(
    "found",
    [
        {"/v1/models": (200, "<html>It works!</html>")},
        {"/v1/models": (200, "[" * 100_000)},
        {"/v1/models": (200, json.dumps({"data": {"owned_by": "vllm"}}))},
        {"/v1/models": (500, "")},
        {"/v1/models": (401, "who are you"), "/metrics": (401, "")},
        NO_FIGURES,
        {**NO_FIGURES, "/metrics": (200, 'vllm:cache_config_info{num_gpu_blocks="0",block_size="16"} 1')},
        {**NO_FIGURES, "/metrics": (200, f'vllm:cache_config_info{{kv_cache_size_tokens="{"9" * 400}"}} 1')},
        {"/v1/models": owned_by("tensorrt_llm"), "/server_info": (200, json.dumps({"max_batch_size": 10**300}))},
    ],
)  # fmt: skip
def test_pages_that_say_nothing_of_use_end_in_one_line(
    found: Pages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pages(found) as url:
        assert main(["init", "--upstream", url, "--dir", str(tmp_path / "p")]) == 1
    error = capsys.readouterr().err
    assert re.search(r"no page there says which engine it is|reports neither the tokens of its KV cache", error)
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_no_version_changes_nothing_in_the_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = 'vllm:cache_config_info{num_gpu_blocks="1000",block_size="16"} 1'
    found = {**NO_FIGURES, "/metrics": (200, metrics), "/version": (200, json.dumps({"version": HOSTILE}))}
    with pages(found) as url:
        assert main(["init", "--upstream", url, "--dir", str(tmp_path / "p")]) == 0
    assert all(char.isprintable() or char == "\n" for char in capsys.readouterr().out)
    text = (tmp_path / "p" / "policy.yaml").read_text()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert [tier["tier"] for tier in check(tmp_path / "p")["tiers"]] == ["high", "normal", "batch"]
    assert load_files(tmp_path / "p").policy.mode is Mode.OBSERVE


def test_the_engines_key_is_sent_and_written_nowhere(tmp_path: Path) -> None:
    secret = "sk-the-engines-own-key-0123456789"
    upstream = "http://user:password@127.0.0.1:9"
    assert "password" not in complaint("init", "--upstream", upstream, "--key", secret, "--dir", tmp_path / "p")
    with emulated_engine("--engine", "sglang", *FAST) as url:
        assert main(["init", "--upstream", url, "--key", secret, "--dir", str(tmp_path / "p")]) == 0
        named = url.replace("//", "//user:password@")
        assert main(["init", "--upstream", named, "--dir", str(tmp_path / "q")]) == 0
    assert secret not in "".join(files_of(tmp_path / "p").values())
    assert "password" not in "".join(files_of(tmp_path / "q").values())


FIGURES = st.one_of(st.none(), st.integers(-1, 60), st.integers(0, 2**54), st.floats(allow_nan=True))
METRICS = {
    "trtllm_kv_cache_max_blocks": FIGURES,
    "trtllm_kv_cache_tokens_per_block": FIGURES,
    "trtllm_max_num_active_requests": FIGURES,
}


@settings(max_examples=40)
@given(figures=st.fixed_dictionaries(METRICS), tiers=st.sampled_from([(), ("--tiers", "3")]))
def test_whatever_figures_the_engine_reports_the_policy_passes_check(
    figures: dict[str, float | None], tiers: tuple[str, ...]
) -> None:
    metrics = "\n".join(f"{name} {value}" for name, value in figures.items() if value is not None)
    found: Pages = {"/v1/models": owned_by("tensorrt_llm"), "/prometheus/metrics": (200, metrics)}
    with pages(found) as url, TemporaryDirectory() as folder:
        code = main(["init", "--upstream", url, "--dir", folder, *tiers])
        if code == 0:
            loaded = load_files(folder)
            assert warnings(loaded.policy) == () or loaded.policy.rules.requests == 1
            assert loaded.policy.mode is Mode.OBSERVE
        else:
            assert code == 1
            assert os.listdir(folder) == []


def test_the_speed_of_the_engine_gives_its_interactive_tier_an_slo_to_hold(tmp_path: Path) -> None:
    for requests in (*range(1, 26), 160):
        folder = tmp_path / str(requests)
        speed = ("--engine-model", "llama-3.1-8b-h100", "--dir", str(folder))
        assert main(["init", "--requests", str(requests), *speed]) == 0
        policy = load_files(folder).policy
        assert (requests, requests == 1 or warnings(policy)) == (requests, requests == 1 or ())
        held = {tier.name: (tier.slo.ttft_s, tier.slo.tpot_s, tier.hold) for tier in policy.tiers if tier.hold}
        assert held == ({} if requests == 4 else {"high": (0.047, 0.012, Fraction(97, 100))}), requests


def test_without_it_a_comment_says_what_to_run(tmp_path: Path) -> None:
    assert main(["init", "--dir", str(tmp_path)]) == 0
    said = (tmp_path / "policy.yaml").read_text().split("\n  high:")[1].split("\n  normal:")[0]
    assert "    # ttft: ?, tpot: ?, hold: 97%    in its slo keep it fast; `sidecar doctor --upstream URL` says" in said
    assert "none.yaml: cannot be read" in complaint(
        "init", "--dir", tmp_path / "p", "--engine-model", tmp_path / "none.yaml"
    )


def test_the_tiers_fit_any_number_of_requests(tmp_path: Path) -> None:
    for requests in (*range(1, 26), 160, 1_000_000):
        folder = tmp_path / str(requests)
        assert main(["init", "--requests", str(requests), "--dir", str(folder)]) == 0
        policy = load_files(folder).policy
        assert (requests, requests == 1 or warnings(policy)) == (requests, requests == 1 or ())
        assert (requests, len(policy.tiers)) == (requests, 5 if requests >= 20 else 3)
        assert (requests, all(tier.reserve for tier in policy.tiers)) == (requests, requests >= 4)


def test_an_app_of_ones_own_gets_a_policy_and_steps_that_speak_of_it(tmp_path: Path) -> None:
    """No handler expects a request twice, so nothing is preempted."""
    for requests, engine in ((1, "none"), (4, "sglang"), (19, "none"), (20, "vllm"), (256, "none")):
        folder = tmp_path / str(requests)
        chosen = [] if engine == "none" else ["--engine", engine]
        printed = output("init", folder, "--mounted", "--requests", requests, *chosen)
        assert f"\n  app.add_middleware(AdmissionMiddleware, policy={str(folder)!r})\n" in printed
        assert re.search(r"\n  SIDECAR_ADMIN_PORT=\d+ uvicorn main:app --port \d+\n", printed)
        assert f"\n  sidecar check {folder}\n" in printed
        assert ("sidecar doctor" in printed, "sidecar serve" in printed) == (engine != "none", False)
        policy = load_files(folder).policy
        assert (policy.engine.name, policy.mode, policy.rules.requests) == (engine, Mode.OBSERVE, requests)
        assert not any(tier.preemptible or tier.preempt_after_us for tier in policy.rules.tiers)
        if requests > 1:
            check(folder)
        text = (folder / "policy.yaml").read_text()
        assert ("preempt" in text, "Before an engine" in text, "in an app of your own" in text) == (False, False, True)


def test_json_on_standard_output_has_the_keys_and_a_file_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = json.loads(output("init", "--dir", tmp_path / "a", "--json", "-"))
    assert sorted(printed) == sorted(
        ["anonymous", "capacity", "engine", "engines", "files", "is_sidecar", "models", "tenants", "tiers"]
    )
    assert [(one["tenant"], one["tier"]) for one in printed["tenants"]] == [("chat", "high"), ("nightly", "batch")]
    text = "".join(files_of(tmp_path / "a").values())
    assert all(hash_line(one["key"]) in text for one in printed["tenants"])

    assert main(["init", "--dir", str(tmp_path / "b"), "--json", str(tmp_path / "init.json")]) == 0
    assert [one["key"] for one in json.loads((tmp_path / "init.json").read_text())["tenants"]] == [None, None]
    assert len(KEY.findall(capsys.readouterr().out)) == 2


def test_the_example_is_the_shipped_policy_file_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--example", "--dir", str(tmp_path / "p")]) == 0
    assert files_of(tmp_path / "p") == files_of(shipped_policies())
    assert "everyone knows them" in capsys.readouterr().out
    assert main(["init", "--example", "--dir", str(tmp_path / "p")]) == 1


def test_without_any_engine_it_fits_the_one_that_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    printed = output("init", folder, "--engine", "sglang", "--requests", "256")
    assert printed.startswith("a policy for sglang with 256 requests at once; no engine was asked\n")
    assert "  sidecar emulate --engine sglang --max-num-seqs 256\n      or your own sglang, on port 8000\n" in printed
    assert "capacity: {requests: 256}\n" in (folder / "policy.yaml").read_text()
    assert "sidecar emulate" not in output("init", tmp_path / "none", "--engine", "none", "--requests", "4")
    assert "--engine none needs --requests N, the requests that the server runs at once" in complaint(
        "init", tmp_path / "no", "--engine", "none"
    )


def test_the_folder_is_given_once() -> None:
    assert "give the folder once: DIR one, or --dir two" in complaint("init", "one", "--dir", "two", code=2)
