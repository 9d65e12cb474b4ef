"""Keys with a name, an end and a tier of their own, as clients and operators meet them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.errors import ExpiredApiKey
from sidecar.identity.classify import Classifier
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.stored_tenants import InvalidTenant, read_record
from sidecar.policy.warnings import warnings
from tests.support.dry_run import observing
from tests.support.each import each
from tests.support.late import anthropic, openai
from tests.support.middleware import App, chat, guarding, key, policy, write_policy
from tests.support.redis_servers import RedisServer
from tests.support.stored_sidecar import Sidecar, sidecar
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
CI = "sk-ci-0123456789abcdef"
NEVER, LONG_AGO = "2999-01-31", "2001-01-31"
STORED = "stored_tenants: true\n"


def hashed(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def with_key(folder: Path, **more: str) -> Policy:
    """The two tenants; `acme` has a second key, with more than its hash."""
    entry = {"hash": hashed(CI), **more}
    path = write_policy(folder, acme="")
    file = folder / "tenants" / "acme.yaml"
    file.write_text(file.read_text().replace('keys: ["', f'keys: [{json.dumps(entry)}, "'))
    return load(path)


class Clock:
    """A wall clock that is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


JANUARY_31_2027 = 1_801_353_600  # its first second, in UTC


@each(
    ("written", "end_s"),
    [
        ("2027-01-31", JANUARY_31_2027 + 24 * 3600),
        ("2027-01-31T18:00:00Z", JANUARY_31_2027 + 18 * 3600),
        ("2027-01-31 18:00+02:00", JANUARY_31_2027 + 16 * 3600),
        ("2024-02-29", 1_709_251_200),
    ],
)
def test_a_key_counts_up_to_its_end_however_the_clock_jumps(tmp_path: Path, written: str, end_s: int) -> None:
    found, clock = with_key(tmp_path, expires=written, name="ci"), Clock()
    classifier = Classifier(found, found.engine(found.carrier), clock=clock)
    for now_s, counts in ((0, True), (end_s - 0.001, True), (end_s, False), (end_s - 1, True), (end_s + 1e9, False)):
        clock.now_s = now_s
        if counts:
            assert classifier.tenant({b"authorization": f"Bearer {CI}".encode()}).name == "acme"
            continue
        with pytest.raises(ExpiredApiKey, match=r"^API key ci of tenant acme has expired, 20[0-9TZ:+-]+ was its end;"):
            classifier.tenant({b"x-api-key": CI.encode()})
    assert classifier.tenant({b"authorization": b"Bearer sk-acme"}).name == "acme"  # its other key has no end


@each(
    ("more", "asked", "tier"),
    [
        ({"tier": "batch"}, {}, "batch"),
        ({"tier": "high"}, {}, "high"),  # above the tenant's tier, and within its max_tier
        ({"tier": "batch"}, {"priority": "high"}, "high"),
        ({"tier": "batch"}, {"priority": "critical"}, "high"),
        ({"name": "ci"}, {}, "normal"),
    ],
)
async def test_the_tier_of_a_key_is_that_of_requests_that_name_none(
    tmp_path: Path, more: dict[str, str], asked: dict[str, str], tier: str
) -> None:
    async with guarding(App(), with_key(tmp_path, **more)) as guarded:
        for _ in range(2):  # the second time it is known by its header
            answer = await guarded.ask(chat(**asked), f"authorization: Bearer {CI}")
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, tier)
        assert (await guarded.ask(chat(), key("acme"))).headers["x-admission-tier"] == "normal"


async def test_an_expired_key_is_a_401_that_says_so_to_each_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sidecar.keys")
    found = with_key(tmp_path, expires=LONG_AGO, name="ci")
    async with guarding(App(), found) as guarded, observing(App(), found) as observed:
        refused = await guarded.ask(chat(), f"x-api-key: {CI}")
        assert refused.is_error(401, "expired_api_key", "API key ci of tenant acme has expired", "2001-01-31")
        base_url = f"http://127.0.0.1:{guarded.port}/v1"

        def ask() -> None:
            with openai.OpenAI(api_key=CI, base_url=base_url, max_retries=0) as client:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

        with pytest.raises(openai.AuthenticationError, match="API key ci of tenant acme has expired") as error:
            await asyncio.to_thread(ask)
        assert error.value.code == "expired_api_key"
        # It was found out, and so it is a reason in a dry run, too.
        assert (await observed.ask(chat(), f"authorization: Bearer {CI}")).status == 200
        await observed.until_found(1)
        assert [code for _, code in observed.verdicts()] == ["expired_api_key"]
        assert not caplog.records  # as of a key that stands in a wrong place


@pytest.mark.long
async def test_anthropics_client_is_told_so_in_its_own_shape(tmp_path: Path) -> None:
    async with guarding(App(), with_key(tmp_path, expires=LONG_AGO)) as guarded:

        def ask() -> None:
            url = f"http://127.0.0.1:{guarded.port}"
            with anthropic.Anthropic(api_key=CI, base_url=url, max_retries=0) as client:
                client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])

        with pytest.raises(anthropic.AuthenticationError, match="has expired") as error:
            await asyncio.to_thread(ask)
        assert error.value.body["error"]["type"] == "authentication_error"


def test_check_warns_of_keys_that_end_soon_or_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.policy.warnings.time.time", lambda: float(JANUARY_31_2027))
    for expires, said in (
        ("2027-02-14T00:00:00Z", "about to expire: ci (2027-02-13); `sidecar keys new` makes another"),
        ("2027-02-14T00:00:01Z", None),
        ("2027-01-31", "about to expire: ci (2027-01-31); `sidecar keys new` makes another"),
        ("2027-01-30", "expired: ci (2027-01-30); such a key gets a 401; `sidecar keys revoke` removes it"),
    ):
        found = warnings(with_key(tmp_path, expires=expires, name="ci"))
        assert [one.message for one in found if one.path == "tenants.acme.keys"] == ([] if said is None else [said])


async def test_the_name_is_in_the_log_the_span_and_the_explanation_and_the_key_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: RedisServer
) -> None:
    monkeypatch.setenv("SIDECAR_ACCESS_LOG", "all")
    caplog.set_level(logging.INFO, "sidecar.requests")
    async with with_stored_key(tmp_path, store, name="ci", tier="normal") as one:
        served = await one.ask(f"authorization: Bearer {CI}", "x-request-id: served")
        assert served.status == 200
        refused = await one.ask(f"authorization: Bearer {CI}", "x-request-id: refused", "x-priority: nonsense")
        assert refused.status == 400
        told = [(await one.call("GET", f"/requests/{name}"))[1] for name in ("served", "refused")]
        _, overview = await one.call("GET", "/overview")
    assert [told[0]["asked"]["key"], told[1]["refused"]["key"]] == ["ci", "ci"]
    assert [row["key"] for row in overview["refusals"]] == ["ci"]
    assert [vars(line)["key"] for line in caplog.records if line.name == "sidecar.requests"] == ["ci", "ci"]
    assert CI not in repr((told, overview, [vars(line) for line in caplog.records]))


# Keys of tenants in the store


@asynccontextmanager
async def with_stored_key(folder: Path, store: RedisServer, **more: str) -> AsyncIterator[Sidecar]:
    """A replica, and in its store a tenant with one key."""
    record = {"tenant": "bulk", "tier": "batch", "max_tier": "normal", "keys": [{"hash": hashed(CI), **more}]}
    async with sidecar(folder, store.url, STORED) as one:
        assert (await one.call("POST", "/tenants", record))[0] == 201
        yield one


async def listed(one: Sidecar) -> list[dict[str, Any]]:
    _, answer = await one.call("GET", "/tenants/bulk")
    return answer["tenants"][0]["listed"]


async def test_the_commands_change_the_store_and_every_replica_follows(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        with_stored_key(tmp_path / "a", store, name="old") as one,
        sidecar(tmp_path / "b", store.url, STORED) as other,
    ):
        more = ("--name", "ci", "--expires", NEVER, "--tier", "normal")
        assert await one.command("keys", "new", "bulk", *more) == 0
        made = capsys.readouterr().out.split()[1]

        async def counts() -> bool:
            answer = await other.ask(f"authorization: Bearer {made}")
            return (answer.status, answer.headers.get("x-admission-tier")) == (200, "normal")

        await until(counts)
        assert await other.status(CI) == 200  # as before
        assert await one.command("keys", "list", "bulk") == 0
        assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
            "NAME HASH BEGINS TIER EXPIRES",
            f"old {hashed(CI)[:19]} batch never",
            f"ci {hashed(made)[:19]} normal {NEVER}",
        ]
        assert await other.command("keys", "revoke", "bulk", "ci") == 0
        assert await other.status(made) == 401
        assert await other.command("keys", "revoke", "bulk", hashed(CI)[:15]) == 0
        assert "none left" in capsys.readouterr().out
        await until(lambda: one.gives(401, CI))


@each(
    ("words", "said"),
    [
        (("new", "bulk", "--name", "ci"), 'keys: two keys are called "ci"; give each a name of its own'),
        (("new", "bulk", "--tier", "high"), "max_tier: less important than high, the tier of key sha256:"),
        (("new", "acme", "--name", "x"), "tenant acme is in the policy's files; its keys are changed there"),
        (("new", "none"), "the store has no tenant of this name"),
        (("revoke", "bulk", "x"), 'no key is called "x"'),
        (("revoke", "none", "ci"), "the store has no tenant of this name"),
        (("revoke", "acme", "ci"), "tenant acme is in the policy's files"),
    ],
)
async def test_what_the_store_refuses(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    async with with_stored_key(tmp_path, store, name="ci") as one:
        before = await listed(one)
        assert await one.command("keys", *words) == 1
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.out == ""
        assert await listed(one) == before
        await one.call("DELETE", "/tenants/bulk")


async def test_no_change_of_keys_is_lost_among_many_at_once(tmp_path: Path, store: RedisServer) -> None:
    async with (
        with_stored_key(tmp_path / "a", store, name="old") as one,
        sidecar(tmp_path / "b", store.url, STORED) as other,
    ):
        entries = [{"hash": hashed(f"key-{number}"), "name": f"key-{number}"} for number in range(20)]
        changes = [(one, other)[at % 2].call("POST", "/tenants/bulk/keys", entry) for at, entry in enumerate(entries)]
        revoked = other.call("DELETE", "/tenants/bulk/keys/old")
        statuses = {status for status, _ in await asyncio.gather(*changes, revoked)}
        assert statuses == {200, 201}
        wanted = sorted(entry["name"] for entry in entries)

        async def has_all() -> bool:
            return sorted(row["name"] for row in await listed(one)) == wanted

        await until(has_all)
        # Sent again, as a client does whose answer was lost: it is one key.
        assert (await one.call("POST", "/tenants/bulk/keys", entries[0]))[0] == 201
        assert len(await listed(one)) == 20


async def test_a_key_is_no_others_whatever_stands_beside_its_hash(tmp_path: Path, store: RedisServer) -> None:
    async with with_stored_key(tmp_path, store, name="ci") as one:
        thief = {"tenant": "thief", "tier": "high", "keys": [{"hash": hashed(CI).upper().replace("SHA", "sha")}]}
        status, answer = await one.call("POST", "/tenants", thief)
        assert (status, answer["error"]["code"]) == (409, "key_in_use")
        status, answer = await one.call("POST", "/tenants/bulk/keys", {"hash": hashed("sk-acme"), "name": "mine"})
        assert (status, answer["error"]["code"]) == (409, "tenant_in_files")
        status, answer = await one.call("POST", "/tenants/bulk/keys", {"hash": hashed(CI), "name": "ci-2"})
        assert (status, answer["error"]["code"]) == (400, "invalid_tenant")
        assert "one key stands there twice" in answer["error"]["message"]
        status, answer = await one.call("POST", "/tenants/bulk/keys", [1])
        assert (status, answer["error"]["code"]) == (400, "invalid_tenant")


@each("entries", [[{"hash": hashed(CI)}, {"hash": hashed(CI), "name": "x"}], [{"name": "x"}], [{}], [[]], {"hash": 1}])
def test_a_record_with_a_wrong_key_is_none(entries: Any) -> None:
    text = json.dumps({"tenant": "bulk", "tier": "batch", "keys": entries}).encode()
    with pytest.raises(InvalidTenant, match=r"^keys"):
        read_record(text, policy())
