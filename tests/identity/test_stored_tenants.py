"""Tenants in the store, from the operator's command to the clients' requests: two sidecars, a real store, real HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as some

from sidecar import AdmissionMiddleware
from sidecar.admin.app import admin_app
from sidecar.admin.auth import Access
from sidecar.composition.stores import new_records
from sidecar.errors import TenantsUnavailable
from sidecar.policy.choices import StoredTenants
from sidecar.policy.compiler import load
from sidecar.policy.stored_tenants import InvalidTenant, read_record, with_stored
from sidecar.tenants import registry
from sidecar.tenants.registry import StoredTenantsRegistry
from tests.support.each import each
from tests.support.in_process import complaint
from tests.support.middleware import App, key, policy, write_policy
from tests.support.redis_servers import RedisServer
from tests.support.serving import serving
from tests.support.stored_sidecar import Sidecar, sidecar, write
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
BULK_KEY = "sk-bulk-0123456789abcdef"
INVALID = (400, "invalid_tenant")
STORED = "stored_tenants: true\n"


def hashed(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def bulk(**more: Any) -> dict[str, Any]:
    """A tenant's record."""
    return {"tenant": "bulk", "tier": "batch", "max_tier": "normal", "keys": [hashed(BULK_KEY)], **more}


@asynccontextmanager
async def two(folder: Path, store: RedisServer) -> AsyncIterator[tuple[Sidecar, Sidecar]]:
    for name in ("a", "b"):
        (folder / name).mkdir()
    async with sidecar(folder / "a", store.url, STORED) as one, sidecar(folder / "b", store.url, STORED) as other:
        yield one, other


async def test_a_tenant_is_in_force_on_all_replicas_at_the_next_look(tmp_path: Path, store: RedisServer) -> None:
    """The docs say within a second."""
    assert registry.READ_EVERY_S <= 0.5
    async with two(tmp_path, store) as (one, other):
        assert await one.status(BULK_KEY) == await other.status(BULK_KEY) == 401
        status, answer = await one.call("POST", "/tenants", bulk())
        assert (status, answer["change"]) == (201, 1)
        assert answer["tenants"][0] == {
            "tenant": "bulk",
            "source": "store",
            "keys": 1,
            "record": {"tier": "batch", "max_tier": "normal"},
            "unused": None,
        }
        assert await one.status(BULK_KEY) == 200  # here it is when the answer comes
        await until(lambda: other.gives(200, BULK_KEY))
        granted = await other.ask(f"authorization: Bearer {BULK_KEY}", "x-priority: high")
        assert granted.headers["x-admission-tier"] == "normal"
        assert granted.headers["x-admission-clamped-from"] == "high"
        assert (await one.ask(key("acme"))).status == 200  # those of the files as before

        assert (await other.call("DELETE", "/tenants/bulk"))[1] == {"removed": "bulk", "change": 2}
        assert await other.status(BULK_KEY) == 401
        await until(lambda: one.gives(401, BULK_KEY))
        assert await one.call("GET", "/tenants/bulk") == (404, await unknown(one))


async def unknown(one: Sidecar) -> Any:
    message = "no tenant is called 'bulk'; `sidecar tenants list` names them"
    return {"error": {"code": "unknown_tenant", "message": message}}


async def test_tenants_outlive_a_restart_of_all_sidecars_and_limits_count(tmp_path: Path, store: RedisServer) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        await one.call("POST", "/tenants", bulk(limits={"requests_per_minute": 1}))
        assert [await one.status(BULK_KEY), await one.status(BULK_KEY)] == [200, 429]
    async with sidecar(tmp_path, store.url, STORED) as another:
        assert await another.status(BULK_KEY) == 429  # known from the first request on, and so is what it has used
        status, _ = await another.call("POST", "/tenants?replace=true", bulk(limits={"requests_per_minute": 50}))
        assert (status, await another.status(BULK_KEY)) == (200, 200)


async def test_the_files_go_first(tmp_path: Path, store: RedisServer) -> None:
    async with two(tmp_path, store) as (one, other):
        status, answer = await one.call("POST", "/tenants", bulk(tenant="acme"))
        assert (status, answer["error"]["code"]) == (409, "tenant_in_files")
        status, answer = await one.call("POST", "/tenants", bulk(keys=[hashed("sk-acme")]))
        assert (status, answer["error"]["code"]) == (409, "tenant_in_files")
        assert (await one.call("DELETE", "/tenants/acme"))[1]["error"]["code"] == "tenant_in_files"
        # The files of one replica get a tenant that the store has. The other replica has it from the store.
        await one.call("POST", "/tenants", bulk())
        text = f'tenant: bulk\nkeys: ["{hashed("sk-of-the-file-0123456789")}"]\ntier: high\n'
        (tmp_path / "a" / "tenants" / "bulk.yaml").write_text(text)
        await until(lambda: one.gives(200, "sk-of-the-file-0123456789"))
        assert await one.status(BULK_KEY) == 401
        await until(lambda: other.gives(200, BULK_KEY))
        assert "tenant bulk in the store is not in force: the policy's files have a tenant" in one.notices()
        _, answer = await one.call("GET", "/tenants/bulk")
        assert [(row["source"], row["unused"] is None) for row in answer["tenants"]] == [
            ("file", True),
            ("store", False),
        ]
        (tmp_path / "a" / "tenants" / "bulk.yaml").unlink()
        await until(lambda: one.gives(200, BULK_KEY))
        assert "bulk" not in one.notices()


async def test_a_reload_of_the_files_keeps_the_tenants_of_the_store(tmp_path: Path, store: RedisServer) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        await one.call("POST", "/tenants", bulk())
        before = one.middleware.controller.policy.generation
        write(tmp_path, store.url, STORED + "max_choices: 3\n")

        async def is_new() -> bool:
            assert await one.status(BULK_KEY) == 200
            return one.middleware.controller.policy.generation != before

        await until(is_new)
        assert (one.middleware.controller.policy.max_choices, await one.status(BULK_KEY)) == (3, 200)


async def test_a_tenant_without_keys_counts_as_soon_as_the_files_let_one_name_it(
    tmp_path: Path, store: RedisServer
) -> None:
    """Replicas read a new policy one after the other, and the operator adds the tenant in between."""
    gateway = "gateway: {tenant_header: x-tenant, addresses: [127.0.0.1]}\n"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        sidecar(tmp_path / "a", store.url, STORED + gateway) as one,
        sidecar(tmp_path / "b", store.url, STORED) as late,
    ):
        assert (await one.call("POST", "/tenants", {"tenant": "keyless", "tier": "batch"}))[0] == 201
        await until(lambda: "tenant keyless in the store is not in force: keys: missing" in late.notices())
        write(tmp_path / "b", store.url, STORED + gateway)

        async def counts() -> bool:
            return (await late.ask("x-tenant: keyless")).status == 200

        await until(counts)
        assert "keyless" not in late.notices()


async def test_unknown_keys_get_a_503_until_the_store_was_read(tmp_path: Path, store: RedisServer) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        await one.call("POST", "/tenants", bulk())
    store.kill()
    async with sidecar(tmp_path, store.url, STORED) as anew:
        refused = await anew.ask(f"authorization: Bearer {BULK_KEY}")
        assert refused.is_error(503, "tenants_unavailable")
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(TenantsUnavailable):
            anew.middleware.admission.lease(tokens=1, tenant="bulk")
        assert "the tenants in the store cannot be read, none is known" in anew.notices()
        assert (await anew.call("POST", "/tenants", bulk()))[1]["error"]["code"] == "store_unavailable"
        assert (await anew.call("GET", "/tenants"))[1]["change"] == 0
        store.restart()  # empty
        await until(lambda: anew.gives(401, BULK_KEY))
        assert "cannot be read" not in anew.notices()
        with pytest.raises(ValueError, match="the policy has no 'bulk'"):
            anew.middleware.admission.lease(tokens=1, tenant="bulk")
        await anew.call("POST", "/tenants", bulk())
        assert anew.middleware.controller.policy.named is anew.middleware.controller.policy.named  # made once
        await until(lambda: anew.gives(200, BULK_KEY))
        async with anew.middleware.admission.lease(tokens=1, tenant="bulk") as lease:
            assert lease.tenant == "bulk"


@pytest.mark.hasty
async def test_the_command_says_that_the_store_hangs(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        await one.call("POST", "/tenants", bulk())
        store.pause()
        for words in (("add", "late", "--tier", "batch"), ("remove", "bulk")):
            assert await one.command("tenants", *words) == 1
            assert "the store does not answer; it may have the change all the same" in capsys.readouterr().err
        store.resume()


async def test_known_tenants_stay_while_the_store_is_away(tmp_path: Path, store: RedisServer) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        await one.call("POST", "/tenants", bulk())
        assert await one.status(BULK_KEY) == 200
        store.kill()
        answer = await one.ask(f"authorization: Bearer {BULK_KEY}")
        assert answer.status != 401
        assert (await one.ask("authorization: Bearer sk-wrong")).is_error(401, "invalid_api_key")
        store.restart()  # empty: this replica brings the tenant back
        await until(lambda: store.command("EXISTS", "admission:tenants:{default}") == 1)


@each(
    ("body", "refused", "said"),
    [
        (b"", INVALID, "not JSON"),
        (b"[]", INVALID, "not an object"),
        (b"[" * 30_000, INVALID, "not JSON"),
        (b'{"tenant": "\xff"}', INVALID, "not JSON"),
        (b"x" * 70_000, (413, "body_too_large"), "65536 bytes"),
        ({"tenant": "bulk", "keys": [hashed("k")]}, INVALID, "tier: missing; write tier: normal"),
        ({"tenant": "bulk", "tier": "gold", "keys": [hashed("k")]}, INVALID, '"gold" is no tier'),
        ({"tenant": "bulk", "tier": "batch"}, INVALID, "keys: missing"),
        ({"tenant": "bulk", "tier": "batch", "keys": ["sk-in-clear"]}, INVALID, "sidecar keys hash"),
        ({"tenant": "a/b", "tier": "batch", "keys": [hashed("k")]}, INVALID, "not a tenant's name"),
        ({"tenant": "anonymous", "tier": "batch", "keys": [hashed("k")]}, INVALID, "without a key"),
        (bulk(colour="blue"), INVALID, "colour: no such key"),
        (bulk(limits={"requests_per_minute": 0}), INVALID, "limits.requests_per_minute"),
    ],
)
async def test_bad_records_say_what_would_be_right(
    tmp_path: Path, store: RedisServer, body: Any, refused: tuple[int, str], said: str
) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        answered, answer = await one.call("POST", "/tenants", body)
        assert (answered, answer["error"]["code"]) == refused
        assert said in answer["error"]["message"]
        assert "sk-in-clear" not in answer["error"]["message"]
        assert (await one.call("GET", "/tenants"))[1]["change"] == 0


async def test_only_the_operator_changes_tenants(tmp_path: Path, store: RedisServer) -> None:
    token = {"authorization": "Bearer an-admin-token-of-some-length"}
    async with sidecar(tmp_path, store.url, STORED, access=Access("an-admin-token-of-some-length")) as one:
        for method, path in (("GET", "/tenants"), ("POST", "/tenants"), ("DELETE", "/tenants/bulk")):
            assert (await one.call(method, path, bulk() if method == "POST" else None))[0] == 401
        assert (await one.call("POST", "/tenants", bulk(), **token))[0] == 201
        crossed = await one.call("DELETE", "/tenants/bulk", None, **token, sec_fetch_site="cross-site")
        assert crossed[0] == 403
        # Nothing that is shown has a key, or its hash.
        async with one.session.get(one.admin + "/tenants", headers=token) as answer:
            shown = await answer.text()
        assert hashed(BULK_KEY).removeprefix("sha256:") not in shown
        assert await one.status("an-admin-token-of-some-length") == 401


async def test_records_that_others_wrote_are_not_in_force_and_keep_no_other_out(
    tmp_path: Path, store: RedisServer
) -> None:
    """A record of a newer version, one that is not JSON, and one with another tenant's name."""
    async with sidecar(tmp_path, store.url, STORED) as one:
        for name in ("newer", "broken", "other"):
            await one.call("POST", "/tenants", bulk(tenant=name, keys=[hashed(name)]))
        root = "admission:tenants:{default}"
        record = json.dumps(bulk(tenant="newer", keys=[hashed("newer")], shoe_size=43))
        store.command("HSET", f"{root}:records", "newer", record, "broken", "{", "other", json.dumps(bulk()))
        store.command("HINCRBY", root, "epoch", 1)
        await until(lambda: one.notices().count("is not in force") == 3)
        assert await one.status(BULK_KEY) == await one.status("newer") == 401
        for said in ("tenant newer in the store is not in force: shoe_size: no such key", "broken", "of bulk"):
            assert said in one.notices()
        _, answer = await one.call("GET", "/tenants")
        assert [row["tenant"] for row in answer["tenants"] if row["unused"]] == ["broken", "newer", "other"]
        for name in ("newer", "broken", "other"):
            assert (await one.call("DELETE", f"/tenants/{name}"))[0] == 200
        assert "in the store" not in one.notices()


async def test_a_name_that_is_none_is_looked_for_and_can_be_removed(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        for name in ("..", "a/b", "/", "%2f", "\u00fc", "a b", "'; DROP"):
            for what in ("show", "remove"):
                assert await one.command("tenants", what, name) == 1
                refused = capsys.readouterr().err
                assert "no tenant is called" in refused or "no tenant of this name" in refused, refused
        await one.call("POST", "/tenants", bulk())
        root = "admission:tenants:{default}"
        store.command("HSET", f"{root}:records", "a/b", json.dumps(bulk(tenant="a/b")))
        store.command("ZADD", f"{root}:changed", 1, "a/b")
        store.command("HINCRBY", root, "epoch", 1)
        await until(lambda: "tenant a/b in the store is not in force" in one.notices())
        assert await one.command("tenants", "remove", "a/b") == 0
        assert "in the store" not in one.notices()


async def test_pages_of_many_tenants(tmp_path: Path, store: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.admin.tenant_routes.MOST_ROWS", 3)
    async with sidecar(tmp_path, store.url, STORED) as one:
        for number in range(6):
            await one.call("POST", "/tenants", bulk(tenant=f"t{number}", keys=[hashed(f"t{number}")]))
        looked: list[object] = []
        reasons = StoredTenantsRegistry._reasons
        monkeypatch.setattr(StoredTenantsRegistry, "_reasons", lambda self: (looked.append(1), reasons(self))[1])
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            _, page = await one.call("GET", f"/tenants?after={after}")
            assert len(page["tenants"]) <= 3
            found += [row["tenant"] for row in page["tenants"]]
            after = page["next"]
        assert found == ["acme", "nightly", *(f"t{number}" for number in range(6))]
        assert len(looked) == 3  # once for a page: with 10,000 tenants each look takes a millisecond


async def test_the_command_from_nothing(tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    async with sidecar(tmp_path, store.url, STORED) as one:
        assert (
            await one.command("tenants", "add", "crawl", "--tier", "batch", "--max-tier", "normal", "--weight", "2")
            == 0
        )
        said = capsys.readouterr().out
        made = next(line.split()[1] for line in said.splitlines() if line.startswith("key "))
        assert await one.status(made) == 200
        assert await one.command("tenants", "add", "crawl", "--tier", "batch") == 1
        assert "the store has a tenant of this name; --replace" in capsys.readouterr().err
        file = tmp_path / "crawl.yaml"
        file.write_text(
            f'tenant: crawl\ntier: normal\nkeys: ["{hashed(BULK_KEY)}"]\nlimits: {{tokens_per_minute: 10k}}\n'
        )
        assert await one.command("tenants", "add", "--file", str(file), "--replace") == 0
        capsys.readouterr()
        assert [await one.status(made), await one.status(BULK_KEY)] == [401, 200]
        assert await one.command("tenants", "list") == 0
        assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
            "TENANT FROM TIER MAX TIER WEIGHT KEYS LIMITS",
            "acme file normal high 1 1 none",
            "crawl store normal normal 1 1 tokens_per_minute 10k",
            "nightly file batch batch 1 1 none",
        ]
        assert await one.command("tenants", "show", "crawl", "--json", "-") == 0
        assert json.loads(capsys.readouterr().out)["tenants"][0]["record"]["limits"] == {"tokens_per_minute": "10k"}
        assert await one.command("tenants", "remove", "crawl") == 0
        assert capsys.readouterr().out == "tenant crawl is removed: its keys stop on every replica within a second\n"
        assert await one.command("tenants", "remove", "crawl") == 1
        assert "the store has no tenant of this name" in capsys.readouterr().err
        file.write_text("tenant: [\n")
        assert await one.command("tenants", "add", "--file", str(file)) == 1
        assert "crawl.yaml:" in capsys.readouterr().err
        file.write_text("tenant: crawl\ntier: no\nkeys: []\n")
        assert await one.command("tenants", "add", "--file", str(file)) == 1
        assert '"no" is no tier' in capsys.readouterr().err


@each(
    ("words", "said"),
    [
        (["add"], "add needs a name and --tier, or --file with both"),
        (["add", "x", "--file", "f", "--tier", "t"], "--tier belongs into the file"),
        (["add", "x", "--tier", "t", "--no-key", "--key-hash", "h"], "exclude each other"),
        (["list", "x"], "list takes no name"),
        (["list", "--replace"], "--replace is for `add`"),
        (["remove"], "remove needs the tenant's name"),
    ],
)
def test_a_wrong_command_line(words: list[str], said: str) -> None:
    assert said in complaint("tenants", *words, code=2)


async def test_without_stored_tenants_the_pages_say_how_to_have_them(tmp_path: Path, store: RedisServer) -> None:
    write_policy(tmp_path, f"store: {store.url}\n")
    middleware = AdmissionMiddleware(App(), tmp_path, is_shown=True)
    pages = admin_app(state=dict, readiness=list, routes=middleware.observability.routes)
    async with (
        serving(pages, lifespan="off") as admin,
        aiohttp.ClientSession() as session,
        session.get(admin.url + "/tenants") as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "no_stored_tenants")


def test_without_a_store_the_start_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_policy(tmp_path, "stored_tenants: true\n")
    with pytest.raises(ValueError, match="there is none: write its address as `store`"):
        AdmissionMiddleware(App(), path)
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:1/0")
    assert AdmissionMiddleware(App(), path).controller.policy.stored_tenants is StoredTenants.UNREAD


def test_a_policy_without_them_asks_no_store() -> None:
    assert new_records(policy("store: redis://127.0.0.1:1/0\n"), {}) is None


@given(
    stored=some.lists(
        some.tuples(some.sampled_from(["acme", "a", "b", "c"]), some.sets(some.integers(0, 4), min_size=1)), max_size=5
    )
)
def test_no_key_ever_changes_its_tenant_by_the_store(stored: list[tuple[str, set[int]]]) -> None:
    """The files' keys keep their tenants, and each key of the store has one tenant, whatever the store holds."""
    given_policy = policy()
    keys = {0: "sk-acme", 1: "sk-nightly"}
    records = {}
    for name, numbers in stored:
        hashes = [hashed(keys.get(number, f"key-{number}")) for number in sorted(numbers)]
        text = json.dumps({"tenant": name, "tier": "normal", "keys": hashes}).encode()
        records[name] = read_record(text, given_policy)
    merged, unused = with_stored(given_policy, records)
    assert {digest: merged.tenants[digest] for digest in given_policy.tenants} == given_policy.tenants
    in_force = {tenant.name for tenant in merged.tenants.values()} - {"acme", "nightly"}
    assert in_force.isdisjoint(unused)
    assert in_force | set(unused) >= set(records) - {"acme"}
    for name in in_force:
        assert {digest for digest, tenant in merged.tenants.items() if tenant.name == name} == {*records[name].digests}


@given(some.binary(max_size=60) | some.text(max_size=40).map(lambda text: json.dumps({"tenant": text}).encode()))
def test_any_bytes_are_a_record_or_a_clear_mistake(text: bytes) -> None:
    with pytest.raises(InvalidTenant) as invalid:
        read_record(text, policy())
    assert str(invalid.value)


def test_a_change_of_the_key_needs_a_restart(tmp_path: Path) -> None:
    from sidecar.policy.diff import needs_restart

    path = write_policy(tmp_path)
    without = load(path)
    path.write_text(path.read_text() + "stored_tenants: true\n")
    assert needs_restart(without, load(path)) == ["stored_tenants"]
