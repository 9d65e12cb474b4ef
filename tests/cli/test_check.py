from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.cli.check import ALERTS
from tests.otel.files import alerts
from tests.support.each import each
from tests.support.in_process import complaint, output
from tests.support.middleware import write_policy

POLICIES = Path(__file__).parents[2] / "policies"


def _broken(folder: Path) -> Path:
    path = folder / "policy.yaml"
    path.write_text("engine: vllm\ncapacity: {tokens: 5}\ntiers: {normal: {reserve: 20}}\n")
    return path


def test_a_good_policy_prints_a_table_and_its_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(POLICIES)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert (
        "in tokens  reserve  kept idle    limit  size limit  certain size  size limit set by\n"
        "critical    40,000          0  200,000     200,000       200,000  the tier's limit\n"
        "high        80,000          0  400,000     280,000       120,000  the pool less what the other tiers reserve\n"
    ) in printed.out
    assert "high              32          0    160         112            48  the pool less what" in printed.out
    assert "certain size: what finds room in a bounded time, even while critical holds its limit" in printed.out
    assert "standard: normal, may ask for high; 1 key, weight 1" in printed.out
    assert "tiers.low: accepts requests of many times its reserve: one of 220,000 tokens" in printed.out
    assert "unused" not in printed.out, "the shipped policy keeps room idle"


def test_a_bad_policy_prints_every_mistake_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _broken(tmp_path)
    assert main(["check", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f'{path}:3: tiers.normal.reserve: "20" is not a share; write "20%"\n\n1 mistake; the policy cannot be used\n'
    )


def test_what_needs_a_store_is_a_warning_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDECAR_STORE", raising=False)
    path = write_policy(tmp_path, "stored_tenants: true\n", acme="limits: {tokens_per_day: 1M}\n")
    stored = len(path.read_text().splitlines())
    printed = output("check", tmp_path)
    assert f"policy.yaml:{stored}: stored_tenants: no sidecar starts with stored_tenants but with a store" in printed
    assert "tenants: no sidecar starts with tokens_per_day and tokens_per_month but with a store" in printed
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:1/0")
    assert "no sidecar starts" not in output("check", tmp_path)
    monkeypatch.delenv("SIDECAR_STORE")
    write_policy(tmp_path, "stored_tenants: true\nstore: redis://127.0.0.1:1/0\n")
    assert "no sidecar starts" not in output("check", tmp_path)


def test_json_on_standard_output_is_nothing_but_json() -> None:
    result = json.loads(output("check", POLICIES, "--json", "-"))
    assert result["ok"] is True
    assert result["tiers"][0] == {
        "tier": "critical",
        "reserve": {"tokens": 40_000, "requests": 16},
        "headroom": {"tokens": 0, "requests": 0},
        "limit": {"tokens": 200_000, "requests": 80},
        "largest_request": {"tokens": 200_000, "requests": 80},
        "largest_certain_request": {"tokens": 200_000, "requests": 80},
    }
    assert [warning["path"] for warning in result["warnings"]] == ["tiers.low", "tiers.batch"]
    assert [tier["headroom"] for tier in result["tiers"]] == [{"tokens": 0, "requests": 0}] * 5


def test_the_json_of_a_bad_policy_lists_its_mistakes(tmp_path: Path) -> None:
    path, result = _broken(tmp_path), tmp_path / "result.json"
    assert main(["check", str(path), "--json", str(result)]) == 1
    message = '"20" is not a share; write "20%"'
    error = {"file": str(path), "line": 3, "path": "tiers.normal.reserve", "message": message}
    assert json.loads(result.read_text()) == {"ok": False, "errors": [error]}


def test_a_path_with_nothing_there_says_what_to_give(tmp_path: Path) -> None:
    said = complaint("check", tmp_path / "nothing")
    how = "`sidecar init` writes a policy for an engine, or name another file or folder"
    assert said.startswith(f"{tmp_path}/nothing: there is no such file or folder; {how}\n")
    said = complaint("check", tmp_path)
    assert said.startswith(f"{tmp_path}/policy.yaml: there is no such file; {how}\n")
    (error,) = json.loads(output("check", tmp_path / "nothing", "--json", "-", code=1))["errors"]
    assert (error["file"], error["line"]) == (f"{tmp_path}/nothing", None)


def test_a_tenants_file_is_no_policy_and_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "acme.yaml"
    path.write_text('# A tenant\ntenant: acme\nkeys: ["sha256:00"]\ntier: high\n')
    said = complaint("check", path)
    assert said.startswith(f"{path}:2: tenant: this is a tenant's file; name the policy's own file, or the folder")
    assert "\n1 mistake;" in said


def test_a_dimension_without_a_bound_has_no_table(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("engine: none\ncapacity: {tokens: 5k}\ntiers: {normal: {}}\nanonymous: normal\n")
    printed = output("check", path)
    assert "pool: 5,000 tokens; requests are not bounded\n" in printed
    assert "in requests" not in printed
    assert "5,000       5,000             0  the whole pool\n" in printed  # without a reserve nothing is certain
    assert printed.endswith("no warnings\n")


def test_alerts_that_no_promise_of_the_policy_can_raise_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    text = "engine: none\ncapacity: {tokens: 5k}\nanonymous: normal\ntiers: {high: {slo: {SLO}}, normal: {}}\n"
    path.write_text(text.replace("SLO", "queue_wait: 1s, ttft: 2s"))
    assert main(["check", str(path)]) == 0
    silent = "AdmissionTierStarves (starvation), AdmissionTierStarved (starvation), AdmissionSloGuardInVain (hold)"
    assert f"\n3 alerts can never fire, as no tier promises it: {silent}\n" in capsys.readouterr().out
    path.write_text(text.replace("SLO", "queue_wait: 1s, ttft: 2s, starvation: 1m, tpot: 50ms, hold: 97%"))
    assert "can never fire" not in output("check", path)
    in_rules = {rule.name: rule.expression for rule in alerts() if "admission_slo_" in rule.expression}
    for key, names in ALERTS.items():
        metric = f"admission_slo_{key}" if key == "hold" else f"admission_slo_{key}_seconds"
        assert all(metric in in_rules.pop(name) for name in names)
    assert not in_rules


def test_a_pool_whose_size_the_engine_tells_is_shown_in_shares(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "engine: sglang\ncapacity: {from: engine, fraction: 90%}\nanonymous: normal\nsources: [header, key]\n"
        "tiers: {high: {reserve: 20%, lend: 50%}, normal: {reserve: 10%, limit: 60%}}\n"
    )
    printed = output("check", path)
    assert "pool: 90% of the tokens that the engine holds; the requests that the engine runs at once, and 2 " in printed
    assert "share of the pool  reserve" in printed
    assert "20%        10%   100%         90%           90%  the pool less what the other tiers reserve\n" in printed
    assert "10%         0%    60%         60%           60%  the tier's limit\n" in printed
    assert "no warnings" in printed
    assert json.loads(output("check", path, "--json", "-"))["capacity"] == {
        "tokens": None,
        "requests": None,
        "from": "engine",
    }
    path.write_text(path.read_text().replace("{from: engine", "{from: engine, tokens: 10k"))
    printed = output("check", path)
    assert "pool: 10,000 tokens; the requests that the engine runs at once, and 2 that wait in it\n" in printed
    assert "in tokens  reserve" in printed
    assert "share of requests  reserve" in printed


def test_max_request_tokens_is_named_where_it_sets_the_size_limit(tmp_path: Path) -> None:
    tiers = "tiers: {high: {reserve: 20%, max_request_tokens: 300}, normal: {reserve: 10%}}\nanonymous: normal\n"
    path = tmp_path / "policy.yaml"
    path.write_text(f"engine: vllm\ncapacity: {{tokens: 1k, requests: 8}}\n{tiers}")
    assert "        300           300  its max_request_tokens\n" in output("check", path)
    path.write_text(f"engine: vllm\ncapacity: {{from: engine, requests: 8}}\n{tiers}")
    printed = output("check", path)
    assert "the pool less what the other tiers reserve; 300 tokens at most, its max_request_tokens\n" in printed
    assert "in requests  reserve" in printed


def test_the_mode_and_the_tenants_limits_are_shown(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(
        "engine: vllm\ncapacity: {requests: 8}\nmode: observe\ntiers: {high: {reserve: 20%}, normal: {reserve: 10%}}\n"
        "anonymous: normal\ntenants: '*.tenant'\n"
    )
    rate = "{requests_per_minute: 600, tokens_per_minute: 200k, burst: 10s, concurrent_requests: 32}"
    for name, digit, rest in (
        ("acme", "0", f"limits: {rate}\nover_limit: {{downgrade: normal}}\n"),
        ("blue", "1", "limits: {max_output_tokens: 8192}\n"),
        ("cyan", "2", "limits: {tokens_per_day: 20M, tokens_per_month: 400M}\n"),
        ("dune", "3", "users: {from: [header x-user-id, body user], limits: {requests_per_minute: 20}}\n"),
    ):
        keys = f'keys: ["sha256:{digit * 64}"]'
        (tmp_path / f"{name}.tenant").write_text(f"tenant: {name}\n{keys}\ntier: high\n{rest}")
    printed = output("check", tmp_path)
    assert "mode: observe; every request passes, and `sidecar observed` reports what enforcing would do\n" in printed
    assert (
        "  acme: high; 1 key, weight 1\n"
        "    limits: 600 requests and 200,000 tokens a minute (10s of that at once); 32 requests waiting or running; "
        "over them tier normal\n"
        "  blue: high; 1 key, weight 1\n"
        "    limits: 8,192 tokens in one answer (a request for more gets a 400)\n"
        "  cyan: high; 1 key, weight 1\n"
        "    limits: 20,000,000 tokens a day; 400,000,000 tokens a month; over them 429\n"
        "  dune: high; 1 key, weight 1\n"
        "    users: by header x-user-id, body user; take turns; each 20 requests a minute (1m of that at once)\n"
        "  without a key: normal\n"
    ) in printed
    figures = json.loads(output("check", tmp_path, "--json", "-"))
    assert figures["mode"] == "observe"
    assert figures["limits"]["acme"] == {
        "requests_per_minute": 600,
        "tokens_per_minute": 200_000,
        "tokens_per_day": None,
        "tokens_per_month": None,
        "concurrent_requests": 32,
        "max_output_tokens": None,
        "burst": 10.0,
    }


def test_a_reader_that_stops_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "sidecar.cli", "check", str(POLICIES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(20)) == (b"", 128 + signal.SIGPIPE)


@pytest.mark.parametrize(
    ("engine", "capacity", "is_said"),
    [
        ("vllm", "{from: engine}", True),
        ("vllm", "{from: engine, requests: 8}", False),
        ("vllm", "{tokens: 10k}", False),
        ("sglang", "{from: engine}", False),
    ],
)
def test_an_engine_that_does_not_say_how_many_requests_it_runs_is_warned_of(
    engine: str, capacity: str, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        f"engine: {engine}\ncapacity: {capacity}\nanonymous: normal\ntiers: {{normal: {{}}, batch: {{}}}}\n"
    )
    assert main(["check", str(path)]) == 0
    said = f"{path}:2: capacity: vLLM does not tell `sidecar serve` how many requests it runs at once"
    assert (said in capsys.readouterr().out) is is_said


@pytest.mark.parametrize(
    ("learn", "said"),
    [
        ("", "learn: cautious; a lease holds prompt and expected output (its maximum, until such answers are known)\n"),
        (", learn: off", "learn: off; a lease holds prompt and maximum output\n"),
        (
            ", learn: full",
            "learn: full; a lease holds prompt and expected output (its maximum, until such answers are known), less "
            "what ends at different times\n",
        ),
    ],
)
def test_the_way_to_learn_is_said_below_the_capacity(learn: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"engine: vllm\ncapacity: {{tokens: 5k, requests: 8{learn}}}\ntiers: {{normal: {{}}}}\n")
    assert f"pool: 5,000 tokens; 8 requests\n{said}" in output("check", path)
    assert json.loads(output("check", path, "--json", "-"))["learn"] == (learn.rpartition(" ")[2] or "cautious")


@each(
    ("more", "said"),
    [
        ("anonymous: high", "public: all, its own pages too (/metrics, /docs, "),
        (
            "anonymous: deny",
            "public: /health; all else needs a key; closed to all: /metrics, /docs, ",
        ),
        (
            "anonymous: deny\npublic: [/metrics]",
            "public: /metrics; all else needs a key; closed to",
        ),
        ("anonymous: high\npublic: []", "public: nothing; closed to all: /metrics, /docs, "),
        ("anonymous: deny\nunguarded: generating", None),
    ],
)
def test_who_reads_an_engines_pages_is_said(more: str, said: str | None, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"engine: vllm\ncapacity: {{requests: 8}}\ntiers: {{high: {{}}}}\ndefault_tier: high\n{more}\n")
    _, *found = output("check", path).split("\non an engine's server ")
    assert [line[: len(said or "")] for line in found] == ([] if said is None else [said])
