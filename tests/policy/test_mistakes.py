"""One line of a policy each, and exactly what its author reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

HASH, OTHER = (f"sha256:{digit * 64}" for digit in "01")


@each(
    ("line", "said"),
    [
        ("default_teir: high", 'default_teir: no such key; did you mean "default_tier"?'),
        ("default_tier: nromal", 'default_tier: "nromal" is no tier; did you mean "normal"?'),
        ("default_tier: gold", 'default_tier: "gold" is no tier; the tiers are high, normal, batch'),
        (
            "default_tier: no",
            "default_tier: no without quotes means false in YAML; write a tier such as normal, or put text in quotes",
        ),
        ("anonymous: denied", 'anonymous: "denied" is no tier; did you mean "deny"?'),
        ("anonymous: everyone", 'anonymous: "everyone" is no tier; write one of high, normal, batch, deny'),
        ("sources: [header, boddy]", 'sources[1]: "boddy" is no source; did you mean "body"?'),
        ("sources: [body, body]", "sources: body is listed twice; keep its first place"),
        ("cost: {output: 1001}", 'cost.output: "1001" is not a weight of tokens; write a number from 0 to 1000'),
        ("cost: {input: -1}", 'cost.input: "-1" is not a weight of tokens; write a number such as 0.1'),
        ("cost: {cached: 1e3}", 'cost.cached: "1e3" is not a weight of tokens; write a number such as 0.1'),
        ("cost: {cached: 0.1234}", 'cost.cached: "0.1234" has more than three decimals; write a number such as 0.125'),
        ("cost: {chached: 0.1}", 'cost.chached: no such key; did you mean "cached"?'),
        ("cost: 4", "cost: a single value where a mapping belongs; write a mapping with input, cached, output"),
        ("sources: []", "sources: not a list with something in it; write [body, header, endpoint, key]"),
        (
            "sources: [engine]",
            "engine_levels: missing; the source engine needs it, such as engine_levels: {high: 10, normal: 5, ",
        ),
        (
            "engine_levels: {high: 1}",
            "engine_levels: only read for the source engine; add engine to sources, or remove this",
        ),
        (
            "{sources: [engine], engine_levels: {high: 5, batch: 0}}",
            "engine_levels: vllm serves lower numbers first; give each more important tier a lower number",
        ),
        (
            "{sources: [engine], engine_levels: {high: 5, bach: 9}}",
            'engine_levels.bach: "bach" is no tier; did you mean "batch"?',
        ),
        (
            "sources: [service_tier]",
            "service_tiers: missing; the source service_tier needs it, such as service_tiers: {priority: high, flex: ",
        ),
        (
            "service_tiers: {priority: high}",
            "service_tiers: only read for the source service_tier; add service_tier to sources, or remove this",
        ),
        *(
            (f"{{sources: [service_tier], service_tiers: {written}}}", wrong)
            for written, wrong in (
                ("{flex: bach}", 'service_tiers.flex: "bach" is no tier; did you mean "batch"?'),
                ("{auto: high}", "service_tiers: no value but auto; the source service_tier needs it, such as "),
                ("{two words: high}", 'service_tiers.two words: "two words" is not a value of service_tier; '),
                ("{}", "service_tiers: not a mapping with something in it; write {priority: high, default: normal, "),
                ("{flex: high, flex: batch}", "service_tiers.flex: "),
            )
        ),
        ("aging: {promote_after: 0s, ceiling: high}", 'aging.promote_after: "0s" is no time at all; '),
        ("aging: {ceiling: high}", "aging.promote_after: missing; write promote_after: 5m"),
        ("aging: 5m", "aging: a single value where a mapping belongs; write a mapping with promote_after, ceiling"),
        ("max_body: 8MB", 'max_body: "8MB" is not a size; write "8MiB" (or KiB, GiB, or a number of bytes)'),
        ("body_timeout: 9999h", 'body_timeout: "9999h" is more than a year; write a shorter time such as "24h"'),
        ("tier_header: x priority", 'tier_header: "x priority" is not a header\'s name; '),
        ("tier_header: Authorization", 'tier_header: "Authorization" has a meaning of its own; '),
        ("public: /health", "public: not a list; write [/health, /metrics]"),
        ("public: [health]", 'public[0]: "health" is not a path; '),
        ("public: [/v1/completions]", 'public[0]: "/v1/completions" is guarded, and no page; remove it here'),
        ("{public: [/a, /b], endpoints: {/b: {api: chat}}}", 'public[1]: "/b" is guarded, and no page; remove it here'),
        ("cors: {}", 'cors.origins: missing; write origins: ["https://app.example"]'),
        *(
            (f"cors: {{origins: [{origin}]}}", f'cors.origins[0]: "{origin}" is not an origin as browsers send it; ')
            for origin in ("https://app.example/", "app.example", "https://App.example", "https://*.example")
        ),
        ('cors: {origins: ["*", "https://a.example"]}', 'cors.origins: "*" is every origin: write it alone, '),
        ('cors: {origins: ["*"], headers: ["*"]}', 'cors.headers[0]: "*" is not a header\'s name; leave `headers` out'),
        ('cors: {origins: ["*"], credentials: true}', "cors.credentials: no such key; "),
        ("endpoints: {}", "endpoints: not a mapping with something in it; write {/v1/chat/completions: {}}"),
        ("endpoints: {v1/completions: {}}", 'endpoints.v1/completions: "v1/completions" is not a path; '),
        (
            "endpoints: {/v1/x: {}}",
            "endpoints./v1/x: the path does not say the shape of its requests; write api: with",
        ),
        ("endpoints: {/v1/x: {api: chats}}", 'endpoints./v1/x.api: "chats" is no API; did you mean "chat"?'),
        (
            "tenants: nobody/*.yaml",
            "tenants: no file matches nobody/*.yaml: nobody: there is no such folder; ",
        ),
        ("tenants: 5", "tenants: 5 is not a pattern; put it in quotes, or write tenants/*.yaml"),
        ("forward_priority: query", 'forward_priority: "query" is no carrier; the carriers are header, body'),
        ('tenants: "a\\0b"', 'tenants: "a\\x00b" is not a pattern; write tenants/*.yaml'),
    ],
)
def test_a_wrong_line_says_what_would_be_right(tmp_path: Path, line: str, said: str) -> None:
    flow = line.removeprefix("{").removesuffix("}").replace("], ", "]\n") if line.startswith("{") else line
    found = mistakes(pool(tmp_path, f"{SMALL}{flow}\n"))
    assert [said] == [message.split(": ", 1)[1][: len(said)] for message in found]
    assert found[0].startswith("policy.yaml:") or found[0].startswith(f"{tmp_path}")


@each(
    ("tiers", "said"),
    [
        ("{}", "tiers: not a mapping with something in it; write {high: {reserve: 20%}, normal: {}}"),
        ("[high, low]", "tiers: not a mapping with something in it; write {high: {reserve: 20%}, normal: {}}"),
        ("{high: {reserve: 60%}, normal: {reserve: 50%}}", "tiers: the reserves add up to 110% of the pool; "),
        ("{normal: {reserve: 60%, limit: 50%}}", 'tiers.normal.limit: below the reserve of 60%; write "60%" or more'),
        ("{normal: {limit: 0%}}", 'tiers.normal.limit: "0%" admits nothing, ever; '),
        ("{normal: {always_first: true}}", "tiers.normal.always_first: would let this tier take the whole pool; "),
        (
            "{high: {}, normal: {limit: 50%, always_first: true}}",
            "tiers.normal.always_first: only the first tier, high, may be always first; remove this line",
        ),
        ("{normal: {}, High: {}}", 'tiers.High: "High" is not a tier\'s name; write up to 40 of a-z, 0-9, - and _'),
        ("{normal: {}, 1: {}}", 'tiers.1: "1" is not a tier\'s name; '),
        ("{normal: {}, deny: {}}", 'tiers.deny: "deny" has a meaning of its own in this file; write another name'),
        ("{normal: {slo: {tfft: 1s}}}", 'tiers.normal.slo.tfft: no such key; did you mean "ttft"?'),
        (
            "{normal: {slo: {ttft: 1s}, gain: {weight: 2}}}",
            "tiers.normal.gain: a tier's gain is that of tokens before their deadlines: give its `slo` a `ttft` and a ",
        ),
        (
            "{normal: {slo: {ttft: 1s, tpot: 60ms}, gain: {weight: 1001}}}",
            "tiers.normal.gain.weight: 1001 is too large; weights count beside each other: write 1 to 1000",
        ),
        (
            "{normal: {queue: {max_wait: 30m, max_deadline: 30m}}}",
            "tiers.normal.queue.max_deadline: not longer than `max_wait`, for which any request may wait; write ",
        ),
        ("{normal: {queue: {max_deadline: 24}}}", 'tiers.normal.queue.max_deadline: "24" is not a duration; write '),
        ("{normal: {queue: {max_deadline: 0s}}}", 'tiers.normal.queue.max_deadline: "0s" is no time at all; write a '),
        (
            "{normal: {slo: {ttft: 1s, hold: 97%}}, batch: {}}",
            "tiers.normal.slo.hold: a tier is held to its time to a first token and its time per token: write `ttft` ",
        ),
        (
            "{normal: {slo: {ttft: 1s, tpot: 60ms, hold: 100%}}, batch: {}}",
            'tiers.normal.slo.hold: "100%" lets one late request shut out less important work; write "99%" or less',
        ),
        (
            "{normal: {slo: {ttft: 1s, tpot: 60ms, hold: 0%}}, batch: {}}",
            'tiers.normal.slo.hold: "0%" holds no request to anything; write "97%", or leave it out',
        ),
        (
            "{normal: {slo: {ttft: 1s, tpot: 60ms, hold: 0.97}}, batch: {}}",
            'tiers.normal.slo.hold: "0.97" is not a share; write "97%"',
        ),
        (
            "{high: {}, normal: {slo: {ttft: 1s, tpot: 60ms, hold: 97%}}}",
            "tiers.normal.slo.hold: no tier is less important than normal, so nothing can make room for it; remove ",
        ),
        (
            "{normal: {queue: {max_wait: 12:30}}}",
            "tiers.normal.queue.max_wait: 12:30 without quotes means 750 in YAML;",
        ),
        ("{gold: {}}", "default_tier: missing, and no tier is called normal; write one such as default_tier: gold"),
    ],
)
def test_a_wrong_ladder_says_what_would_be_right(tmp_path: Path, tiers: str, said: str) -> None:
    found = mistakes(pool(tmp_path, f"engine: sglang\ncapacity: {{tokens: 10k}}\ntiers: {tiers}\n"))
    assert said in [message.split(": ", 1)[1][: len(said)] for message in found]


@each(
    ("line", "said"),
    [
        ("{}", "capacity: bounds nothing; write tokens, requests or both, such as {tokens: 400k, requests: 160}"),
        ("{tokens: 0}", "capacity.tokens: 0 leaves room for nothing; write 1 or more"),
        ("{tokens: 1e3}", 'capacity.tokens: "1e3" is not a count; write a whole number such as 160, 400k or 2M'),
        ("{tokens: 010}", "capacity.tokens: 010 without quotes means 8 in YAML; write a count such as 400k, or put "),
        ("{token: 5}", 'capacity.token: no such key; did you mean "tokens"?'),
        (
            "400k",
            "capacity: a single value where a mapping belongs; "
            "write a mapping with from, tokens, requests, fraction, waiting",
        ),
        ("{from: engin}", 'capacity.from: "engin" is no source of a capacity; did you mean "engine"?'),
        ("{from: engine, fraction: 0%}", 'capacity.fraction: "0%" leaves room for nothing; write a larger share'),
        ("{tokens: 5, learn: on}", 'capacity.learn: "on" is no way to learn; write off, cautious or full'),
        ("{tokens: 5, learn: 0.9}", 'capacity.learn: "0.9" is no way to learn; write off, cautious or full'),
        ("{tokens: 5, learn: {}}", "capacity.learn: a mapping is not a way to learn; write cautious"),
        ("{learn: full}", "capacity: bounds nothing; write tokens, requests or both, such as {tokens: 400k, "),
        ("{tokens: 5, waiting: 3}", "capacity: waiting is only read with from: engine; add that, or remove it"),
    ],
)
def test_a_wrong_capacity_says_what_would_be_right(tmp_path: Path, line: str, said: str) -> None:
    found = mistakes(pool(tmp_path, f"engine: vllm\ncapacity: {line}\ntiers: {{normal: {{}}}}\n"))
    assert [said] == [message.split(": ", 1)[1][: len(said)] for message in found]


@pytest.mark.parametrize(
    ("engine", "carrier", "said"),
    [
        ("tensorrt-llm", "header", "tensorrt-llm reads no priority from a header; write body"),
        ("none", "body", "the engine none is sent no priority; remove this line"),
    ],
)
def test_an_engine_is_not_asked_to_read_what_it_cannot(tmp_path: Path, engine: str, carrier: str, said: str) -> None:
    text = SMALL.replace("vllm", engine) + f"forward_priority: {carrier}\n"
    assert [f"policy.yaml:7: forward_priority: {said}"] == mistakes(pool(tmp_path, text))


@each(
    ("text", "said"),
    [
        ("tier: normal, max_tier: batch", "max_tier: less important than its tier normal; write normal or a more "),
        ("tier: normal, over_limit: {downgrade: high}", "over_limit: not less important than its tier normal; write a"),
        ("tier: normal, over_limit: refuse", 'over_limit: "refuse" is not what can be done; write reject or {downgrad'),
        (
            "tier: normal, limits: {models: {m: {max_output_tokens: 5}}}",
            "limits.models.m.max_output_tokens: no such key; ",
        ),
        (
            "tier: normal, limits: {models: {}}",
            "limits.models: not a mapping with something in it; write {llama-70b: {tokens_per_minute: 50k}}",
        ),
        ("tier: normal, limits: {requests_per_second: 5}", "limits.requests_per_second: no such key; did you mean "),
        ("", "tier: missing; write tier: normal"),
    ],
)
def test_a_wrong_tenant_says_what_would_be_right(tmp_path: Path, text: str, said: str) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(tmp_path, "a", f"{{tenant: a, keys: [{HASH}], {text}}}\n")
    assert [f"tenants/a.yaml:1: {said}"] == [message[: len(said) + 18] for message in mistakes(tmp_path)]


@each("keys", ["[sk-secret-123]", "sk-secret-123", "{sk-secret-123: 1}", "[[sk-secret-123]]", "[0777]"])
def test_a_key_in_plain_text_is_refused_and_never_repeated(tmp_path: Path, keys: str) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(tmp_path, "a", f"tenant: a\ntier: normal\nkeys: {keys}\n")
    (message,) = mistakes(tmp_path)
    assert message.startswith("tenants/a.yaml:3: keys")
    assert "`sidecar keys " in message
    assert "secret" not in message
    assert "777" not in message


def test_a_hash_that_was_cut_off_is_distinguished_from_a_key(tmp_path: Path) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(tmp_path, "a", "tenant: a\ntier: normal\nkeys:\n  - sha256:abc\n")
    (message,) = mistakes(tmp_path)
    assert message.startswith("tenants/a.yaml:4: keys[0]: not a whole hash; write sha256: and 64 hexadecimal digits")


def test_two_tenants_may_share_neither_a_name_nor_a_key(tmp_path: Path) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    for name in ("one", "two"):
        tenant(tmp_path, name, f"tenant: acme\ntier: normal\nkeys: [{HASH}]\n")
    first = f"{tmp_path}/tenants/one.yaml".removeprefix(f"{tmp_path}/")
    assert [
        f'tenants/two.yaml:1: tenant: "acme" is also the tenant of {first}; write another name',
        f"tenants/two.yaml:3: keys[0]: this key is also at {first}:3; give every tenant keys of its own",
    ] == mistakes(tmp_path)


@each(
    ("entries", "said"),
    [
        (
            f"[{{hash: {HASH}, name: ci}}, {{hash: {OTHER}, name: ci}}]",
            'keys: two keys are called "ci"; give each a name',
        ),
        (
            f"[{HASH}, {{hash: {HASH}, name: ci}}]",
            "keys[1]: this key is also at tenants/a.yaml:3; give every tenant keys",
        ),
        (f"[{{hash: {HASH}, tier: high}}]", "max_tier: less important than high, the tier of key sha256:"),
        (f"[{{hash: {HASH}, tier: hihg}}]", 'keys[0].tier: "hihg" is no tier; did you mean "high"?'),
        (
            f"[{{hash: {HASH}, expires: 2027-02-30}}]",
            'keys[0].expires: "2027-02-30" is no day, and no time with its zone',
        ),
        (
            f"[{{hash: {HASH}, expires: 2027-01-31T18:00:00}}]",
            'keys[0].expires: "2027-01-31T18:00:00" is no day, and no',
        ),
        (f"[{{hash: {HASH}, expires: 9999-12-31}}]", 'keys[0].expires: "9999-12-31" is no day, and no time'),
        (f'[{{hash: {HASH}, expires: "0001-01-01T00:00+14:00"}}]', "keys[0].expires: "),
        (f'[{{hash: {HASH}, expires: "9999-12-31T23:00-14:00"}}]', "keys[0].expires: "),
        (f"[{{hash: {HASH}, expires: 1800000000}}]", "keys[0].expires: 1800000000 is not a day; put it in quotes"),
        (f'[{{hash: {HASH}, name: "ci\\nx"}}]', "keys[0].name: "),
        (
            f"[{{hash: {HASH}, name: sk-secret-123456}}]",
            "keys[0].name: looks like a key, and logs show names; write one",
        ),
        ("[{hash: sk-secret-123}]", "keys[0].hash: not the hash of a key; run `sidecar keys hash`"),
        ("[{name: ci}]", 'keys[0].hash: missing; write hash: "sha256:..."'),
        (f"[{{hash: {HASH}, expire: 2027-01-31}}]", 'keys[0].expire: no such key; did you mean "expires"?'),
    ],
)
def test_a_wrong_key_says_what_would_be_right_and_shows_no_key(tmp_path: Path, entries: str, said: str) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(tmp_path, "a", f"tenant: a\ntier: normal\nkeys: {entries}\n")
    (message,) = mistakes(tmp_path)
    assert message.removeprefix("tenants/a.yaml:3: ").removeprefix("tenants/a.yaml:1: ").startswith(said)
    assert "secret" not in message


def test_no_tenant_may_be_called_anonymous(tmp_path: Path) -> None:
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(tmp_path, "a", f"tenant: anonymous\ntier: normal\nkeys: [{HASH}]\n")
    said = '"anonymous" stands for requests without a key; write another name'
    assert [f"tenants/a.yaml:1: tenant: {said}"] == mistakes(tmp_path)


def test_a_tokenizer_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    found = mistakes(pool(tmp_path, f"{SMALL}tokenizer: tok.json\n"))
    assert found == ["policy.yaml:7: tokenizer: there is no file tok.json; write where it is, relative to this file"]


def test_a_list_is_no_tier(tmp_path: Path) -> None:
    (message,) = mistakes(pool(tmp_path, SMALL.replace("batch: {}", "batch: []")))
    assert message.startswith(
        "policy.yaml:6: tiers.batch: a list where a mapping belongs; write a mapping with reserve,"
    )
