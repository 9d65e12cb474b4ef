"""One line of `engines` or `models` each, and exactly what its author reads."""

from __future__ import annotations

from pathlib import Path

from tests.policy.files import mistakes, pool
from tests.support.each import each

TIERS = "engine: vllm\ntiers: {normal: {}}\n"
AB = "[{name: a, url: http://a:8000}, {name: b, url: http://b:8000}]"


def of(folder: Path, text: str, engine: str = "vllm") -> list[str]:
    """The mistakes, without file and line."""
    return [message.split(": ", 1)[1] for message in mistakes(pool(folder, TIERS.replace("vllm", engine) + text))]


@each(
    ("engines", "said"),
    [
        (
            "{}",
            "engines: does not say where the engines are; write static, file, dns or mounted, such as "
            "static: [{name: a, url: http://a:8000}]",
        ),
        (
            "{static: [{name: a, url: 'http://a:8000/v1/'}]}",
            'engines.static[0].url: "http://a:8000/v1" ends with /v1, with which every path begins; '
            "write http://a:8000",
        ),
        (f"{{static: {AB}, file: e.yaml}}", "engines: static and file are both here; keep one of them"),
        (
            f"{{static: {AB}, file: e.yaml, dns: {{name: 'v:1'}}}}",
            "engines: static and file and dns are both here; keep one of them",
        ),
        (
            AB,
            "engines: a list where a mapping belongs; write a mapping with static, file, dns, mounted, capacity, "
            "prefill, affinity, health, slow_start, replay, drain_timeout",
        ),
        (f"{{static: {AB}, mounted: true}}", "engines: static and mounted are both here; keep one of them"),
        ("{mounted: false}", "engines.mounted: false names no engines; write mounted: true, or leave it out"),
        (
            "{mounted: true, affinity: {prefix: true}}",
            "engines.affinity: chooses among engines, and a process sends its requests to its own engine; remove it",
        ),
        (
            "{mounted: true, health: {fail: 2}}",
            "engines.health: probes an engine by its port, and a mounted engine lives and ends with its process; "
            "remove it",
        ),
        (
            "{mounted: true, replay: {before_first_byte: 0}}",
            "engines.replay: sends a request to another engine, and a process sends its requests to its own engine; "
            "remove it",
        ),
        ("{static: []}", "engines.static: not a list with something in it; write [{name: a, url: http://a:8000}]"),
        (
            "{static: [a]}",
            "engines.static[0]: a single value where a mapping belongs; write a mapping with name, url, capacity, "
            "prefill, speed",
        ),
        ("{static: [{name: a}]}", 'engines.static[0].url: missing; write url: "http://a:8000"'),
        ("{static: [{url: http://a}]}", "engines.static[0].name: missing; write name: a"),
        (
            "{static: [{name: 'a#1', url: http://a}]}",
            'engines.static[0].name: "a#1" is not an engine\'s name; '
            "write up to 63 of A-Z, a-z, 0-9 and . _ -, a letter or a digit first",
        ),
        (
            "{static: [{name: a, url: 'a:8000'}]}",
            'engines.static[0].url: "a:8000" is not an engine\'s address; write it like http://a:8000',
        ),
        (
            "{static: [{name: a, url: 'http://a:port'}]}",
            'engines.static[0].url: "http://a:port" is not an engine\'s address: Port could not be cast to integer '
            "value as 'port'; write it like http://a:8000",
        ),
        (
            "{static: [{name: a, url: 'http://a/?x=1'}]}",
            'engines.static[0].url: "http://a/?x=1" has more after its path; write it like http://a:8000',
        ),
        (
            "{static: [{name: a, url: 'http://a b'}]}",
            'engines.static[0].url: "http://a b" has a space or a character beyond ASCII; write it like http://a:8000',
        ),
        (
            "{static: [{name: a, url: 'http://me:secret@a'}]}",
            "engines.static[0].url: has a user or a password; leave it out: SIDECAR_ENGINE_KEY has the key of the "
            "engines",
        ),
        (
            "{static: [{name: a, url: http://a, weight: 2}]}",
            "engines.static[0].weight: no such key; the keys here are name, url, capacity, prefill, speed",
        ),
        (
            "{static: [{name: a, url: http://a, speed: 0}]}",
            'engines.static[0].speed: "0" is not a speed; write a number from 0.01 to 100',
        ),
        (
            "{static: [{name: a, url: http://a, speed: fast}]}",
            'engines.static[0].speed: "fast" is not a speed; write a number such as 0.5',
        ),
        (
            "{static: [{name: a, url: http://a, capacity: {tokens: 5, learn: off}}]}",
            "engines.static[0].capacity.learn: a pool learns in one way, whichever engine serves a request; write it "
            "into the policy's engines: {capacity: ...}, which counts for all, and remove it here",
        ),
        (
            "{static: [{name: a, url: http://a, capacity: {tokens: 2000G}}]}",
            "engines.static[0].capacity.tokens: 2000000000000 is more than one engine holds; write 1000G or less",
        ),
        (
            "{static: [{name: a, url: http://a}, {name: a, url: http://b}]}",
            'engines.static[1].name: "a" is the name of another engine; write another name',
        ),
        (
            "{static: [{name: a, url: http://a:1/}, {name: b, url: HTTP://A:1}]}",
            'engines.static[1].url: "HTTP://A:1" is engine a, which would count twice; remove one of them',
        ),
        (
            f"{{static: {AB}, affinity: {{weight: 11}}}}",
            'engines.affinity.weight: "11" is not a weight; write a number from 0 to 10',
        ),
        (
            f"{{static: {AB}, affinity: {{session: x-session-id}}}}",
            "engines.affinity.session: not a list; write [x-session-id, prompt_cache_key]",
        ),
        (
            f"{{static: {AB}, affinity: {{session: [x-a, X-A]}}}}",
            "engines.affinity.session: x-a is listed twice; keep its first place",
        ),
        (
            f"{{static: {AB}, affinity: {{session: [authorization]}}}}",
            'engines.affinity.session[0]: "authorization" has a meaning of its own; write another name, such as '
            "x-priority",
        ),
        (
            f"{{static: {AB}, health: {{every: 1ms}}}}",
            'engines.health.every: "1ms" is too often; write "100ms" or more',
        ),
        (
            f"{{static: {AB}, replay: {{before_first_byte: 2}}}}",
            "engines.replay.before_first_byte: 2 is too many: a request that broke two engines must not break a third; "
            "write 1 or 0",
        ),
        (f"{{static: {AB}, slowstart: 1m}}", 'engines.slowstart: no such key; did you mean "slow_start"?'),
        ("{dns: v:8000}", "engines.dns: a single value where a mapping belongs; write a mapping with name, refresh"),
        (
            "{dns: {name: vllm.ns.svc}}",
            'engines.dns.name: "vllm.ns.svc" has no port; write vllm.ns.svc:8000, or the name of SRV records, such as '
            "_http._tcp.vllm.default.svc",
        ),
        (
            "{dns: {name: 'http://v:8000'}}",
            'engines.dns.name: "http://v:8000" is not a name that DNS knows; write it like vllm.default.svc:8000',
        ),
        (
            "{dns: {name: 'v:65536'}}",
            'engines.dns.name: "v:65536" is not a name that DNS knows; write it like vllm.default.svc:8000',
        ),
    ],
)
def test_a_wrong_line_of_engines_says_what_would_be_right(tmp_path: Path, engines: str, said: str) -> None:
    assert of(tmp_path, f"engines: {engines}\n") == [said]


@each("other", ["HTTP://a", "http://A/", "http://a:80", "http://a:80//"])
def test_an_address_written_in_another_way_is_the_same_engine(tmp_path: Path, other: str) -> None:
    (said,) = of(tmp_path, f"engines: {{static: [{{name: a, url: http://a}}, {{name: b, url: '{other}'}}]}}\n")
    assert said.endswith(" is engine a, which would count twice; remove one of them")


@each("other", ["https://a", "http://a:81", "http://a/x", "http://b"])
def test_another_scheme_port_or_path_is_another_engine(tmp_path: Path, other: str) -> None:
    assert of(tmp_path, f"engines: {{static: [{{name: a, url: http://a}}, {{name: b, url: '{other}'}}]}}\n") == []


def test_a_mistake_among_the_engines_has_its_own_line(tmp_path: Path) -> None:
    text = f"{TIERS}engines:\n  static:\n  - name: a\n    url: http://a\n  - name: b\n    url: http://a\n"
    assert mistakes(pool(tmp_path, text)) == [
        'policy.yaml:8: engines.static[1].url: "http://a" is engine a, which would count twice; remove one of them'
    ]


def test_the_pools_capacity_is_that_of_its_engines(tmp_path: Path) -> None:
    assert of(tmp_path, f"capacity: {{tokens: 400k}}\nengines: {{static: {AB}}}\n") == [
        "capacity: the pool holds what its engines hold together; write this into engines, where it counts for each, "
        "and remove it here"
    ]
    assert of(tmp_path, "") == ["capacity: missing; write capacity: {tokens: 400k, requests: 160}"]


def test_a_key_with_nothing_after_it_is_one_that_is_not_there(tmp_path: Path) -> None:
    missing = ["capacity: missing; write capacity: {tokens: 400k, requests: 160}"]
    assert of(tmp_path, "capacity:\nengines:\n") == of(tmp_path, "capacity:\n") == of(tmp_path, "engines:\n") == missing
    assert of(tmp_path, f"capacity:\nengines: {{static: {AB}}}\nmodels:\n") == []
    assert of(tmp_path, "capacity: {tokens: 5}\nengines:\n") == []
    said = "models: each model has engines of its own, and the policy names none; write engines, or remove this"
    assert of(tmp_path, "capacity: {tokens: 5}\nengines:\nmodels: {m: {}}\n") == [said]


def test_a_tier_that_is_proposed_is_shown_on_one_line(tmp_path: Path) -> None:
    text = 'engine: vllm\ncapacity: {tokens: 5}\ntiers: {"a\\nb": {}}\n'
    said = "default_tier: missing, and no tier is called normal; write one such as default_tier: a\\nb"
    assert any(line.endswith(said) for line in mistakes(pool(tmp_path, text)))


NOTHING_TO_READ = "the engine none reports nothing; write tokens, requests or both"


@each(
    ("engines", "at"),
    [
        (f"{{static: {AB}}}", ["engines.capacity"]),
        (f"{{static: {AB}, capacity: {{from: engine}}}}", ["engines.capacity"]),
        ("{file: e.yaml}", ["engines.capacity"]),
        ("{dns: {name: 'v:1'}}", ["engines.capacity"]),
        (
            "{static: [{name: a, url: http://a, capacity: {from: engine}}], capacity: {tokens: 1k}}",
            ["engines.static[0].capacity"],
        ),
        ("{static: [{name: a, url: http://a, capacity: {tokens: 1k}}]}", []),
        (f"{{static: {AB}, capacity: {{tokens: 1k}}}}", []),
    ],
)
def test_an_engine_that_reports_nothing_has_a_written_capacity(tmp_path: Path, engines: str, at: list[str]) -> None:
    assert of(tmp_path, f"engines: {engines}\n", "none") == [f"{path}: {NOTHING_TO_READ}" for path in at]


def test_a_pool_has_a_bounded_number_of_engines(tmp_path: Path) -> None:
    many = ", ".join(f"{{name: e{i}, url: http://e{i}}}" for i in range(65))
    names = ", ".join(f"e{i}" for i in range(65))
    said = "65 engines in one pool; list 64 at most"
    assert of(tmp_path, f"engines: {{static: [{many}]}}\n") == [f"engines.static: {said}"]
    assert of(tmp_path, f"engines: {{static: [{many}]}}\nmodels: {{m: {{}}}}\n") == [f"models.m.engines: {said}"]
    models = f"models: {{m: {{engines: [{names}]}}, n: {{engines: [e0]}}}}"
    assert of(tmp_path, f"engines: {{static: [{many}]}}\n{models}\n")[0] == f"models.m.engines: {said}"
    halves = f"models: {{m: {{engines: [{names[:200]}]}}, n: {{engines: [{names[202:]}]}}}}".replace(", ]", "]")
    assert not [line for line in of(tmp_path, f"engines: {{static: [{many}]}}\n{halves}\n") if "in one pool" in line]


@each(
    ("models", "said"),
    [
        ("{}", "models: not a mapping with something in it; write {llama-70b: {engines: [a, b]}}"),
        ("[m]", "models: not a mapping with something in it; write {llama-70b: {engines: [a, b]}}"),
        ("{m: [a]}", "models.m: a list where a mapping belongs; write a mapping with engines, aliases, cost"),
        (
            "{'m m': {}}",
            'models.m m: "m m" is not a model\'s name; '
            "write up to 200 of A-Z, a-z, 0-9 and . _ / : @ + -, a letter or a digit first",
        ),
        ("{m: {engines: [d]}}", 'models.m.engines[0]: "d" is no engine; the engines are a, b'),
        ("{m: {engines: [aa]}}", 'models.m.engines[0]: "aa" is no engine; did you mean "a"?'),
        ("{m: {engines: []}}", "models.m.engines: not a list with something in it; write [a, b]"),
        ("{m: {engines: [a, a]}}", "models.m.engines: a is listed twice; keep its first place"),
        (
            "{m: {engines: [a]}, n: {}}",
            "models.n.engines: missing: where there are several models, each names its engines; write engines: [a, b]",
        ),
        (
            "{m: {engines: [a]}, n: {engines: [a, b]}}",
            "models.n.engines[0]: engine a serves m already, and an engine has one pool; give each model engines of "
            "its own, or make n an alias",
        ),
        ("{m: {aliases: x}}", "models.m.aliases: not a list; write [llama, my-lora]"),
        (
            "{m: {engines: [a], aliases: [x]}, n: {engines: [b], aliases: [x]}}",
            'models.n.aliases[0]: "x" is an alias of m, too; keep one of them',
        ),
        (
            "{m: {engines: [a], aliases: [n]}, n: {engines: [b]}}",
            'models.m.aliases[0]: "n" is the name of a model itself; remove it',
        ),
        ("{m: {aliases: [m]}}", 'models.m.aliases[0]: "m" is the name of a model itself; remove it'),
        ("{m: {alias: [x]}}", 'models.m.alias: no such key; did you mean "aliases"?'),
    ],
)
def test_a_wrong_line_of_models_says_what_would_be_right(tmp_path: Path, models: str, said: str) -> None:
    assert of(tmp_path, f"engines: {{static: {AB}}}\nmodels: {models}\n") == [said]


def test_models_need_engines(tmp_path: Path) -> None:
    said = "models: each model has engines of its own, and the policy names none; write engines, or remove this"
    assert of(tmp_path, "capacity: {tokens: 400k}\nmodels: {m: {}}\n") == [said]


def test_engines_found_by_dns_have_no_names(tmp_path: Path) -> None:
    dns = "engines: {dns: {name: 'v:8000'}}\n"
    assert of(tmp_path, f"{dns}models: {{m: {{engines: [a]}}}}\n") == [
        "models.m.engines: engines found by dns have no names; leave this out, or list them under static or in a file"
    ]
    assert of(tmp_path, f"{dns}models: {{m: {{aliases: [x]}}}}\n") == []


def test_an_engine_list_may_change_so_its_names_are_not_looked_for(tmp_path: Path) -> None:
    assert of(tmp_path, "engines: {file: e.yaml}\nmodels: {m: {engines: [a]}, n: {engines: [b]}}\n") == []


def test_a_password_in_an_address_is_never_shown(tmp_path: Path) -> None:
    for url in ("http://me:hunter2@a:8000", "me:hunter2@a:8000", "http://a:8000@b:hunter2", "http://me:hunter2@a b"):
        text = f"engines: {{static: [{{name: a, url: '{url}'}}, {{name: b, url: '{url}'}}]}}\n"
        assert "hunter2" not in "\n".join(of(tmp_path, text))
