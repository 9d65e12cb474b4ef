"""`sidecar check` on policies with several engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.policy.files import SMALL, pool
from tests.support.in_process import complaint, output

POLICY = """\
engine: sglang
tiers: {high: {reserve: 20%}, normal: {reserve: 10%}}
anonymous: normal
sources: [header]
"""
AB = """\
engines:
  static:
    - {name: a, url: http://a:8000}
    - {name: big, url: http://big:8000, capacity: {tokens: 400k, requests: 160}, speed: 1.5, prefill: unbounded}
  capacity: {tokens: 200k, requests: 80}
"""


def checked(folder: Path, text: str) -> str:
    return output("check", pool(folder, POLICY + text)).replace(f"{folder}/", "")


def figures(folder: Path, text: str) -> dict[str, Any]:
    return json.loads(output("check", pool(folder, POLICY + text), "--json", "-"))


def test_mounted_engines_have_no_addresses(tmp_path: Path) -> None:
    mounted = "engines: {mounted: true, capacity: {tokens: 200k}, slow_start: 10s}\n"
    out = checked(tmp_path, mounted)
    assert (
        "engines: each process that mounts the middleware is one, for its own requests\n"
        "  each: tokens 200,000, requests unbounded, prefill 8,000\n"
        "  slow start 10s; a drain waits 10m\n"
    ) in out
    assert figures(tmp_path, mounted)["engines"]["from"] == "mounted"


def test_the_pool_is_the_sum_and_a_request_fits_the_largest_engine(tmp_path: Path) -> None:
    out = checked(tmp_path, AB)
    assert (
        "policy.yaml: engine sglang, mode: enforce\n"
        "pool: 600,000 tokens; 240 requests; the sum of 2 engines\n"
        "learn: cautious; a lease holds prompt and expected output (its maximum, until such answers are known)\n"
        "\n"
        "in tokens  reserve  kept idle    limit  size limit  certain size  size limit set by\n"
        "high       120,000          0  600,000     400,000       400,000  the largest engine\n"
        "normal      60,000          0  600,000     400,000       400,000  the largest engine\n"
    ) in out
    assert (
        "engines: 2 listed\n"
        "                         tokens  requests    prefill  speed\n"
        "  a    http://a:8000    200,000        80      8,000      1\n"
        "  big  http://big:8000  400,000       160  unbounded    1.5\n"
    ) in out
    assert (
        "  probes: GET /v1/models every 2s; out after 3 failures, back after 2 answers, slow start 1m\n"
        "  affinity: by the prompt's prefix, weight 3\n"
        "  replay: once before the first byte, for at most 10% of the admissions; a drain waits 10m\n"
    ) in out
    assert "size limit: the largest request that a tier accepts; it must fit one engine, too; a larger one" in out
    assert "no warnings" in out


def test_an_emergency_leaves_room_on_other_engines(tmp_path: Path) -> None:
    first = POLICY.replace("{high", "{critical: {reserve: 10%, limit: 10%, always_first: true}, high")
    legend = output("check", pool(tmp_path, first + AB))
    assert "room in a bounded time, even while critical holds its limit on other engines;" in legend


def test_what_is_switched_off_is_said(tmp_path: Path) -> None:
    off = f"{AB}  affinity: {{prefix: false}}\n  replay: {{before_first_byte: 0}}\n  prefill: 16k\n"
    out = checked(tmp_path, off)
    assert "  affinity: none\n  replay: never; a drain waits 10m\n" in out
    out = checked(tmp_path, off.replace(", prefill: unbounded", ""))
    assert "the sum of 2 engines, with 32,000 un-prefilled tokens\n" in out


def test_each_model_has_tables_of_its_own(tmp_path: Path) -> None:
    models = "models: {llama: {engines: [a], aliases: [x, y]}, qwen: {engines: [big]}}\n"
    out = checked(tmp_path, AB + models)
    assert "pool of model llama: 200,000 tokens; 80 requests\n" in out
    assert "pool of model qwen: 400,000 tokens; 160 requests\n" in out
    assert "models: 2\n  llama (x, y): a\n  qwen: big\n" in out
    found = figures(tmp_path, AB + models)
    llama, qwen = found["models"]
    assert (llama["model"], llama["aliases"], llama["engines"]) == ("llama", ["x", "y"], ["a"])
    assert qwen["capacity"] == {"tokens": 400_000, "requests": 160, "from": None}
    assert qwen["tiers"][0]["reserve"] == {"tokens": 80_000, "requests": 32}
    assert found["capacity"]["tokens"] == 600_000


def test_the_figures_have_the_policys_keys(tmp_path: Path) -> None:
    found = figures(tmp_path, AB.replace("  capacity: {tokens: 200k, requests: 80}\n", ""))
    assert found["capacity"] == {"tokens": None, "requests": None, "from": "engine"}
    assert found["models"] == []
    assert found["engines"] == {
        "from": "static",
        "file": None,
        "dns": None,
        "engines": [
            {
                "name": "a",
                "url": "http://a:8000",
                "capacity": {"tokens": None, "requests": None, "from": "engine"},
                "prefill": 8000,
                "speed": 1.0,
            },
            {
                "name": "big",
                "url": "http://big:8000",
                "capacity": {"tokens": 400_000, "requests": 160, "from": None},
                "prefill": None,
                "speed": 1.5,
            },
        ],
        "capacity": {"tokens": None, "requests": None, "from": "engine"},
        "prefill": 8000,
        "affinity": {"prefix": True, "weight": 3.0, "session": []},
        "health": {"path": "/v1/models", "every": 2.0, "fail": 3, "rise": 2},
        "slow_start": 60.0,
        "replay": {"before_first_byte": 1, "budget": 0.1},
        "drain_timeout": 600.0,
    }


def test_a_policy_without_engines_has_none_in_its_figures(tmp_path: Path) -> None:
    found = json.loads(output("check", pool(tmp_path, SMALL), "--json", "-"))
    assert (found["engines"], found["models"]) == (None, [])


def test_an_engine_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("engines: [{name: a, url: http://a}, {name: b, url: http://b}]\n")
    out = checked(tmp_path, "engines: {file: e.yaml, capacity: {tokens: 100k}}\n")
    assert "pool: 200,000 tokens; requests are not bounded; the sum of 2 engines" in out
    assert "engines: 2 in e.yaml, which is followed\n" in out


def test_a_mistake_in_the_engine_list_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("engines: [{name: a, urle: http://a}]\n")
    err = complaint("check", pool(tmp_path, POLICY + "engines: {file: e.yaml}\n")).replace(f"{tmp_path}/", "")
    assert 'e.yaml:1: engines[0].urle: no such key; did you mean "url"?\n' in err
    assert err.endswith("2 mistakes; the policy cannot be used\n")


def test_an_engine_list_that_is_not_there_yet_is_a_warning(tmp_path: Path) -> None:
    out = checked(tmp_path, "engines: {file: e.yaml, capacity: {tokens: 100k}}\n")
    assert "pool: the tokens that its engines hold together; the requests that they run together\n" in out
    assert "engines: 0 in e.yaml, which is followed\n  each: tokens 100,000, requests unbounded, prefill 8,000" in out
    assert (
        "1 warning:\n  policy.yaml:5: engines.file: there is no such file yet; until there is, the pool has no engine, "
        "and every request waits"
    ) in out


def test_engines_found_by_dns(tmp_path: Path) -> None:
    out = checked(tmp_path, "engines: {dns: {name: 'vllm.ns.svc:8000', refresh: 30s}}\n")
    assert "engines: as DNS has them for vllm.ns.svc:8000, looked up every 30s\n" in out
    assert "  each: tokens read from it, requests read from it, prefill 8,000\n" in out
    assert "share of the pool  reserve" in out
