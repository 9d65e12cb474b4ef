"""What is sent: bodies that say what the row says, and a tier asked for in each of the three ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sidecar.apis import Api
from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.loadgen import Planned
from sidecar.tools.replay.plan import Asking, By, plan
from sidecar.tools.replay.prompts import Words, Writer
from sidecar.tools.replay.trace import TraceRow

TIERS = ("high", "normal", "batch")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WRITER = Writer(Api.CHAT, "m", Words(), seed=1, block_tokens=512, ignore_eos=True)
SILENT = Asking(By.TIER, TIERS, is_control=True)


def planned(*rows: TraceRow, writer: Writer = WRITER, asking: Asking = SILENT, tier: str = "high") -> Sequence[Planned]:
    return plan(rows, [tier] * len(rows), writer, asking)


def body(request: Planned, answer: str = "") -> dict[str, Any]:
    return json.loads(request.write(answer))


def asked(asking: Asking, tier: str, api: Api = Api.CHAT) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    return asking.of(tier, api)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (TensorRtLlm, [({}, {"priority": 1.0}), ({}, {"priority": 0.5}), ({}, {"priority": 0.0})]),
        (Vllm, [({"x-vllm-priority": value}, {}) for value in ("0", "10", "20")]),
        (Sglang, [({}, {"priority": 4}), ({}, {"priority": 2}), ({}, {"priority": 0})]),
        (Dynamo, [({"x-dynamo-request-priority": value}, {}) for value in ("10", "5", "0")]),
    ],
)
def test_by_priority_says_what_the_sidecar_would_say(engine: type[Engine], said: list[Any]) -> None:
    asking = Asking(By.PRIORITY, TIERS, engine)
    assert [asked(asking, tier) for tier in TIERS] == said
    assert asked(replace(asking, is_control=True), "high") == ({}, {})


def test_by_tier_is_the_policy_s_header() -> None:
    assert asked(Asking(By.TIER, TIERS), "normal") == ({"x-priority": "normal"}, {})
    assert asked(Asking(By.TIER, TIERS, header="x-tier", api_key="sk"), "normal") == (
        {"authorization": "Bearer sk", "x-tier": "normal"},
        {},
    )


def test_a_row_s_deadline_is_the_header_of_deferred_work() -> None:
    rows = [TraceRow(1, 0.0, 10, 5, deadline_s=deadline_s) for deadline_s in (None, 1.5, 86_400.0)]
    found = [one.headers for one in planned(*rows, asking=Asking(By.TIER, TIERS))]
    assert [headers.get("x-admission-deadline") for headers in found] == [None, "1500ms", "86400000ms"]


def test_by_key_is_the_tier_s_key_and_nothing_else() -> None:
    asking = Asking(By.KEY, TIERS, keys={"high": "sk-1", "batch": "sk-2"}, api_key="sk-all")
    assert [asked(asking, tier)[0] for tier in TIERS] == [
        {"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-all", "sk-2")
    ]
    control = replace(asking, is_control=True)
    assert {json.dumps(asked(control, tier)) for tier in TIERS} == {'[{"authorization": "Bearer sk-all"}, {}]'}
    assert "sk-" not in repr(asking)


def test_a_made_up_prompt_has_its_length_streams_and_ignores_the_end() -> None:
    [request] = planned(TraceRow(1, 0.5, input_tokens=20, output_tokens=7))
    found = body(request)
    assert (request.at_s, request.path, request.label, request.after) == (0.5, CHAT, "high", None)
    assert len(found["messages"][0]["content"]) == 80
    assert {name: found[name] for name in ("model", "max_tokens", "ignore_eos", "stream", "stream_options")} == {
        "model": "m",
        "max_tokens": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_an_answer_of_any_length_is_not_asked_to_go_on_forever() -> None:
    [request] = planned(TraceRow(1, 0.0, input_tokens=20))
    assert {"max_tokens", "ignore_eos"} & body(request).keys() == set()
    [request] = planned(TraceRow(1, 0.0, input_tokens=20, output_tokens=7), writer=replace(WRITER, ignore_eos=False))
    assert "ignore_eos" not in body(request)


def test_a_row_s_extra_goes_before_what_is_usual_and_the_priority_before_that() -> None:
    row = TraceRow(1, 0.0, input_tokens=4, output_tokens=7, extra={"max_tokens": 3, "nvext": {"a": 1}, "priority": 99})
    [request] = planned(row, asking=Asking(By.PRIORITY, TIERS, Sglang))
    found = body(request)
    assert (found["max_tokens"], found["nvext"], found["priority"]) == (3, {"a": 1}, 4)


def test_a_payload_is_sent_as_it_is_to_where_it_belongs() -> None:
    chat, text = planned(TraceRow(1, 0.0, payload={"messages": [], "n": 2}), TraceRow(2, 0.0, payload={"prompt": "x"}))
    assert (chat.path, body(chat)) == (CHAT, {"messages": [], "n": 2})
    assert (text.path, body(text)) == (COMPLETIONS, {"prompt": "x"})


def test_completions_have_a_prompt_and_messages_go_to_chat_all_the_same() -> None:
    writer = replace(WRITER, api=Api.COMPLETIONS)
    history = TraceRow(2, 0.0, messages=[{"role": "user", "content": "x"}], is_delta=False)
    text, messages = planned(TraceRow(1, 0.0, text="hello"), history, writer=writer)
    assert (text.path, body(text)["prompt"]) == (COMPLETIONS, "hello")
    assert (messages.path, body(messages)["messages"]) == (CHAT, [{"role": "user", "content": "x"}])


def test_turns_follow_each_other_and_carry_what_was_said() -> None:
    first, second, other, third = planned(
        TraceRow(1, 0.0, text="one", session="a"),
        TraceRow(2, None, text="two", session="a", delay_s=1.5),
        TraceRow(3, 0.0, text="elsewhere", session="b"),
        TraceRow(4, 9.0, text="three", session="a", delay_s=7.0),
    )
    assert [request.after for request in (first, second, other, third)] == [None, 0, None, 1]
    assert (second.at_s, second.delay_s) == (0.0, 1.5)
    assert (third.at_s, third.delay_s) == (9.0, 0.0), "a time of its own goes before a delay, as in AIPerf"
    assert [body(request)["messages"][0]["content"] for request in (first, other)] == ["one", "elsewhere"]
    found = body(second, "fine")["messages"]
    said = [(message["role"], message["content"]) for message in found]
    assert said == [("user", "one"), ("assistant", "fine"), ("user", "two")]


def test_rows_that_are_whole_histories_carry_nothing_from_before() -> None:
    def history(line: int, *texts: str) -> TraceRow:
        return TraceRow(
            line, 0.0, messages=[{"role": "user", "content": t} for t in texts], session="a", is_delta=False
        )

    _, second = planned(history(1, "one"), history(2, "one", "two"))
    assert [message["content"] for message in body(second, "answer")["messages"]] == ["one", "two"]


def test_a_second_run_does_not_find_its_prompts_in_a_prefix_cache() -> None:
    row = TraceRow(1, 0.0, input_tokens=1500, hash_ids=(7, 8, 9))
    texts = [
        body(planned(row, writer=replace(WRITER, salt=salt))[0])["messages"][0]["content"]
        for salt in ("replay", "replay", "control")
    ]
    assert texts[0] == texts[1]
    assert texts[0][:32] != texts[2][:32]
