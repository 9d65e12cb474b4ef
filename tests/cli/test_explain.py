"""`sidecar explain`: what it prints is what the sidecar does."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from tests.support.each import each
from tests.support.in_process import complaint, output, ran

KEY = "sk-very-secret"
POOL = """\
engine: tensorrt-llm
capacity: {tokens: 1000, requests: 10}
tiers:
  high: {reserve: 20%, lend: 0%}
  normal: {}
  batch: {limit: 50%, queue: {max_requests: 5, max_wait: 30m}}
anonymous: batch
endpoints:
  /v1/chat/completions: {}
  /v1/messages: {}
  /v1/batch/completions: {tier: batch, forward_to: /v1/completions}
  /v1/completions: {}
  /v1/embeddings: {}
tenants: tenants/*.yaml
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POOL)
    (tmp_path / "tenants").mkdir()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    text = f'tenant: acme\nkeys: ["sha256:{digest}"]\ntier: batch\nmax_tier: normal\n'
    (tmp_path / "tenants" / "acme.yaml").write_text(text)
    return tmp_path


def explained(policy: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the figures, and the text."""
    target = policy / "result.json"
    ended = ran("explain", str(policy), "--json", str(target), *arguments)
    return ended.returncode, json.loads(target.read_text()), ended.stdout


def test_the_models_of_a_tenant_and_the_name_for_the_engine_are_explained(policy: Path) -> None:
    (policy / "policy.yaml").write_text(f"{POOL}aliases: {{gpt-4o: {{as: llama}}}}\n")
    file = policy / "tenants" / "acme.yaml"
    file.write_text(file.read_text() + 'models: ["gpt*", "o*"]\n')
    asked = ("--path", "/v1/chat/completions", "--key", KEY)
    code, found, _ = explained(policy, *asked)  # its small body names a model that the tenant may use
    assert (code, found["tenant"]["models"]) == (0, ["gpt*", "o*"])
    assert found["engine"]["member"] == {"priority": 0.0, "model": "llama"}
    (policy / "body.json").write_text('{"model": "llama", "messages": [{"role": "user", "content": "x"}]}')
    code, found, _ = explained(policy, *asked, "--body", str(policy / "body.json"))
    assert (code, found["error"]["code"]) == (1, "model_not_found")
    assert found["error"]["message"] == 'no pool serves the model "llama"; send one of gpt*, o*'
    printed = output("explain", policy, *asked)
    assert "   it may use the models gpt*, o*\n" in printed
    assert '   body member "model": "llama"\n' in printed


def test_a_deadline_is_explained_with_the_tier_to_which_it_rises(policy: Path) -> None:
    (policy / "policy.yaml").write_text(POOL.replace("max_wait: 30m", "max_wait: 30m, max_deadline: 24h"))
    header = ["--path", "/v1/chat/completions", "--header"]
    code, found, _ = explained(policy, *header, "X-Admission-Deadline: 6h", "--key", KEY)
    assert (code, found["longest_wait_s"]) == (0, None)
    assert found["deadline"] == {"wait_s": 6 * 3600, "rises_to": "normal"}
    printed = output("explain", policy, *header, "x-admission-deadline: 48h", "--key", KEY)
    assert "by its deadline it waits 24h at most; then 504 deadline" in printed
    assert "as that comes near it rises, to normal at most" in printed
    assert "ignored: x-admission-deadline" in printed
    code, found, _ = explained(policy, *header, "x-admission-deadline: 2026-01-31T06:00:00Z")
    assert (code, found["error"]["status"], found["error"]["code"]) == (1, 504, "deadline")
    code, found, _ = explained(
        policy, *header, "x-admission-deadline: 6h", "--header", "x-priority: high", "--key", KEY
    )
    assert (code, found["error"]["code"]) == (1, "invalid_header")


def test_every_step_is_explained_to_a_stranger(policy: Path) -> None:
    arguments = ["--path", "/v1/chat/completions", "--key", KEY, "--header", "X-Priority: high"]
    printed = ran("explain", str(policy), *arguments, "--header", "x-vllm-priority: -5")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert KEY not in printed.stdout
    assert (
        printed.stdout
        == f"""\
POST /v1/chat/completions, read as chat, with a small body

1. The tenant
   acme, by its API key: tier batch, may ask for up to normal

2. Which tier: the sources in the policy's order; the first that answers wins
   body      says nothing
   header    x-priority: high, which means high   <- wins
   endpoint  says nothing   (not asked: decided already)
   key       says batch   (not asked: decided already)
   high is more than this tenant may have: clamped to normal
   by {policy}/tenants/acme.yaml:4: max_tier: normal   (response: x-admission-clamped-from: high)
   ignored: x-vllm-priority   (response: x-admission-ignored)

3. How much it holds until it is answered
   26 tokens: 10 prompt + 16 output (the request)
   the prompt is counted by its size, 4 bytes a token, until the engine's usage says better
   a running sidecar holds less, once it has learned how long such answers are (capacity: {{learn: cautious}})
   1 of the pool's requests: one for each sequence
   tier normal accepts at most 800 tokens and 8 requests: the pool less what more important tiers keep free
   its answer pauses for 10m and takes 4h at most; then 504 engine_timeout

4. The priority sent to the engine (tensorrt-llm)
   body member "priority": 0.5

It gets tier normal and holds 26 tokens.
"""
    )


def test_a_source_behind_the_one_that_wins_cannot_refuse(policy: Path, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"prompt": [1, 2, 3], "n": 2, "max_tokens": 5, "priority": 0}')
    code, found, _ = explained(
        policy, "--path", "/v1/completions", "--key", KEY, "--body", str(body), "--header", "x-priority: nonsense"
    )
    assert code == 0
    assert (found["tier"], found["source"], found["ignored"]) == ("batch", "body", ["x-priority"])
    assert [source["wins"] for source in found["sources"]] == [True, False, False, False]
    assert [source["refused"] for source in found["sources"]] == [False, True, False, False]
    assert (found["holds"]["tokens"], found["holds"]["requests"], found["holds"]["prompt_tokens"]) == (16, 2, 3)
    assert found["largest"] == {"tokens": 500, "requests": 5}
    assert found["largest_by"] == {"tokens": "the tier's limit", "requests": "the tier's limit"}
    assert found["longest_wait_s"] == 1800
    assert found["timeouts"] == {"first_byte_s": 600, "between_bytes_s": 600, "total_s": 14400, "streams": False}
    assert found["engine"] == {"name": "tensorrt-llm", "priority": 0.0, "headers": {}, "member": {"priority": 0.0}}


@each(("inputs", "said"), [(5, "one for each sequence"), (6, "of the 6 sequences the others wait in the engine")])
def test_a_list_holds_a_request_for_each_item_up_to_what_its_tier_accepts(
    policy: Path, tmp_path: Path, inputs: int, said: str
) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"input": ["a"] * inputs}))
    code, found, out = explained(policy, "--path", "/v1/embeddings", "--body", str(body))
    assert (code, found["holds"]["requests"], found["largest"]["requests"]) == (0, 5, 5)
    assert f"5 of the pool's requests: {said}\n" in out


def test_an_endpoint_that_names_a_tier_and_a_path(policy: Path) -> None:
    code, found, out = explained(policy, "--path", "/v1/batch/completions")
    assert code == 0
    assert (found["tier"], found["source"], found["forward_to"]) == ("batch", "endpoint", "/v1/completions")
    assert "on the path /v1/completions" in out
    assert "its answer pauses for 10m and takes 4h at most; then 504 engine_timeout" in out


def test_a_request_without_a_key_is_clamped_by_anonymous(policy: Path) -> None:
    code, found, _ = explained(policy, "--path", "/v1/chat/completions", "--header", "x-priority: normal")
    assert code == 0
    assert (found["tenant"]["name"], found["tenant"]["by"]) == ("anonymous", "no API key")
    assert (found["tier"], found["clamped_from"]) == ("batch", "normal")
    assert found["clamped_by"] == f"{policy}/policy.yaml:7: anonymous: batch"


def test_where_the_engine_hears_nothing_it_says_so(policy: Path) -> None:
    code, found, out = explained(policy, "--path", "/v1/messages")
    assert code == 0
    assert found["engine"]["priority"] is None
    assert "no priority: it has no place for one here" in out


def test_a_refusal_is_the_one_that_the_client_would_get(policy: Path) -> None:
    returned, found, printed = explained(policy, "--path", "/v1/chat/completions", "--key", "wrong-key")
    error = found["error"]
    assert (returned, error["status"], error["code"]) == (1, 401, "invalid_api_key")
    assert f"Refused: 401 invalid_api_key\n   {error['message']}\n" in printed
    assert "wrong-key" not in printed


def test_a_path_that_is_refused_ends_the_command_with_1(policy: Path) -> None:
    assert main(["explain", str(policy), "--path", "/foo"]) == 0, "it passes, mounted in an app"
    (policy / "policy.yaml").write_text(POOL + "unguarded: deny\n")
    assert "POST is refused: 404 not_guarded" in output("explain", policy, "--path", "/foo", code=1)


def test_a_path_that_is_not_guarded_is_explained_by_where_the_middleware_stands(policy: Path) -> None:
    code, found, out = explained(policy, "--path", "/v1/models?limit=5")
    assert (code, found["guarded"]) == (0, False)
    assert out.startswith(
        "/v1/models is not guarded.\n"
        "   unguarded: deny, the default before an engine's server: GET passes untouched; "
        "POST is refused: 404 not_guarded\n"
        "   unguarded: generating, the default mounted in an app: GET passes untouched; POST passes untouched\n"
    )
    (policy / "policy.yaml").write_text(POOL + "unguarded: generating\n")
    _, found, _ = explained(policy, "--path", "/x/v1/messages/batches")
    assert found["unguarded"] == [{"mode": "generating", "reading": "passes", "sending": "refused"}]


def test_a_body_may_come_from_standard_input(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"messages": [1], "max_tokens": 1, "priority": "batch"}'))
    )
    assert 'priority: "batch", which means batch   <- wins' in output(
        "explain", policy, "--path", "/v1/chat/completions", "--body", "-"
    )


def test_the_tenants_own_limits_are_explained(policy: Path) -> None:
    (policy / "policy.yaml").write_text(POOL + "mode: observe\n")
    limits = "limits: {max_output_tokens: 100, tokens_per_minute: 100}\nover_limit: {downgrade: batch}\n"
    tenant = policy / "tenants" / "acme.yaml"
    tenant.write_text(tenant.read_text().replace("tier: batch", "tier: normal") + limits)
    (policy / "body.json").write_text('{"messages": ["hi"]}')
    arguments = ["--path", "/v1/chat/completions", "--key", KEY, "--body", str(policy / "body.json")]
    out = output("explain", policy, *arguments)
    assert "   the engine is told 100 as its maximum: the tenant's max_output_tokens\n" in out
    assert out.endswith(
        "Its tenant's limits allow no more: it is downgraded from normal.\n"
        "mode: observe: the request passes, and this is what enforcing would do.\n"
    )


def test_the_count_of_weighted_tokens_is_explained(policy: Path) -> None:
    (policy / "policy.yaml").write_text(POOL + "cost: {input: 2, output: 4}\n")
    code, found, out = explained(policy, "--path", "/v1/chat/completions", "--key", KEY)
    holds = found["holds"]
    counted = holds["prompt_tokens"] * 2 + holds["output_tokens"] * 4
    assert (code, holds["counts"]) == (0, {"tokens": counted, "cost": "input 2, cached 2, output 4"})
    assert holds["tokens"] == holds["prompt_tokens"] + holds["output_tokens"]
    line = (
        f"in its tenant's limits it counts for {counted:,} until its usage is known (cost: input 2, cached 2, output 4)"
    )
    assert line in out


def test_what_cannot_be_read_is_named(policy: Path) -> None:
    assert "there is no such file" in complaint("explain", policy / "none.yaml", "--path", "/x")
    assert "none.json: cannot be read" in complaint("explain", policy, "--path", "/x", "--body", policy / "none.json")
    assert "cannot be written" in complaint("explain", policy, "--path", "/x", "--json", policy / "no" / "where.json")


def test_a_header_without_a_colon_is_a_wrong_command_line(policy: Path) -> None:
    said = complaint("explain", policy, "--path", "/x", "--header", "x-priority", code=2)
    assert "write 'name: value'" in said


def test_with_a_tokenizer_the_prompt_is_counted_by_it(policy: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(policy / "tokenizer.json"))
    (policy / "policy.yaml").write_text("tokenizer: tokenizer.json\n" + POOL)
    (policy / "body.json").write_text('{"prompt": "one two three", "max_tokens": 5}')
    code, found, out = explained(policy, "--path", "/v1/completions", "--body", str(policy / "body.json"))
    assert (code, found["holds"]["tokens"], found["holds"]["counted_by"]) == (0, 8, "tokenizer")
    assert "counted by the policy's tokenizer" in out


def test_a_prompt_that_cannot_be_sized_holds_the_most_that_its_tier_allows(policy: Path, tmp_path: Path) -> None:
    (policy / "policy.yaml").write_text(POOL + "unsized: hold\n")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": ["hi"], "max_tokens": 1, "session_params": {"id": "s"}}))
    code, found, out = explained(policy, "--path", "/v1/chat/completions", "--body", str(body))
    assert (code, found["holds"]["tokens"]) == (0, found["largest"]["tokens"])
    assert "session_params cannot be sized" in out


FLEET = (
    POOL.replace("capacity: {tokens: 1000, requests: 10}\n", "")
    + """\
engines:
  static:
    - {name: a, url: http://a, capacity: {tokens: 600, requests: 6}}
    - {name: b, url: http://b, capacity: {tokens: 400, requests: 4}}
    - {name: c, url: http://c, capacity: {tokens: 100, requests: 4}}
  prefill: 200
"""
)
MODELS = "models: {llama: {engines: [a, b], aliases: [my-lora]}, qwen: {engines: [c]}}\n"


def test_the_engines_are_explained(policy: Path) -> None:
    (policy / "policy.yaml").write_text(FLEET)
    body = policy / "body.json"
    body.write_text('{"model": "x", "max_tokens": 400, "messages": [{"role": "user", "content": "Hello"}]}')
    printed = output("explain", policy, "--path", "/v1/chat/completions", "--body", body, "--key", KEY)
    assert "   and no more than one engine holds\n" in printed
    assert (
        """\

4. Which engine it enters
   one of its engines: a, b, c
   never b, c: too small for it
   the one with the least prompt tokens to prefill, less 3 times what its prefix cache is likely to have of the prompt
   when that has room: its 10 prompt tokens count until the first byte,
   and an engine may have 200 of such tokens, or one prompt that is larger

5. The priority sent to the engine (tensorrt-llm)
"""
        in printed
    )
    code, found, _ = explained(policy, "--path", "/v1/chat/completions", "--body", str(body), "--key", KEY)
    assert code == 0
    assert found["placement"] == {
        "model": None,
        "discovery": "static",
        "engines": ["a", "b", "c"],
        "too_small": ["b", "c"],
        "prompt_tokens": 10,
        "prefill": {"a": 200},
        "affinity": {"prefix": True, "weight": 3.0, "session": []},
    }
    assert found["largest"] == {"tokens": 550, "requests": 6}


def test_a_request_that_fits_the_pool_and_no_engine_waits_in_vain(policy: Path) -> None:
    engines = FLEET.replace("600, requests: 6", "600, requests: 4").replace("100, requests: 4", "100, requests: 9")
    (policy / "policy.yaml").write_text(engines)
    (policy / "body.json").write_text('{"messages": ["hi"], "max_tokens": 30, "n": 5}')
    arguments = ["--path", "/v1/chat/completions", "--body", str(policy / "body.json")]
    out = output("explain", policy, *arguments, code=1)
    assert "   never a, b, c: too small for it\n" in out
    said = "no room came free for tier batch within 1800 s; try again later"
    assert out.endswith(f"Refused: 503 queue_timeout\n   {said}\n")


@pytest.mark.parametrize(("model", "pool", "engines"), [("my-lora", "llama", ["a", "b"]), ("qwen", "qwen", ["c"])])
def test_the_model_decides_the_pool(policy: Path, model: str, pool: str, engines: list[str]) -> None:
    (policy / "policy.yaml").write_text(FLEET + MODELS)
    body = policy / "body.json"
    body.write_text(f'{{"model": "{model}", "max_tokens": 9, "messages": [{{"role": "user", "content": "Hello"}}]}}')
    code, found, _ = explained(policy, "--path", "/v1/chat/completions", "--body", str(body), "--key", KEY)
    assert (code, found["placement"]["model"], found["placement"]["engines"]) == (0, pool, engines)
    assert found["largest"]["tokens"] == {"llama": 500, "qwen": 50}[pool]


@pytest.mark.parametrize(("models", "reading"), [(MODELS, "lists the models"), ("", "passes")])
def test_the_list_of_models_is_answered_here_where_the_policy_has_models(
    policy: Path, models: str, reading: str
) -> None:
    (policy / "policy.yaml").write_text(FLEET + models)
    _, found, _ = explained(policy, "--path", "/v1/models/qwen", "--key", KEY)
    assert {way["reading"] for way in found["unguarded"]} == {reading}


def test_without_a_body_the_first_model_is_asked_for(policy: Path) -> None:
    (policy / "policy.yaml").write_text(FLEET + MODELS)
    code, found, _ = explained(policy, "--path", "/v1/chat/completions", "--key", KEY)
    assert (code, found["placement"]["model"]) == (0, "llama")


def test_a_mounted_engine_is_that_of_the_process(policy: Path) -> None:
    mounted = "engines: {mounted: true, capacity: {tokens: 500}, prefill: 200}\n"
    (policy / "policy.yaml").write_text(FLEET.partition("engines:")[0] + mounted)
    code, found, out = explained(policy, "--path", "/v1/chat/completions", "--key", KEY)
    assert (code, found["placement"]["engines"], found["placement"]["prefill"]) == (0, ["mounted"], {"mounted": 200})
    assert "4. Which engine it enters\n   that of the process which got the request: no other can run it\n" in out
    assert "   and an engine may have 200 of such tokens, or one prompt that is larger\n" in out


def test_engines_that_are_not_known_yet_are_named_by_their_source(policy: Path) -> None:
    (policy / "policy.yaml").write_text(FLEET.partition("engines:")[0] + "engines: {dns: {name: 'v:1'}}\n")
    code, found, out = explained(policy, "--path", "/v1/chat/completions", "--key", KEY)
    assert (code, found["placement"]["engines"], found["largest"]["tokens"]) == (0, [], None)
    assert "   one of its engines: those that dns names\n" in out


def test_without_engines_nothing_is_said_of_them(policy: Path) -> None:
    code, found, out = explained(policy, "--path", "/v1/chat/completions", "--key", KEY)
    assert (code, found["placement"]) == (0, None)
    assert "one engine" not in out
