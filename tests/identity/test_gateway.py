"""A gateway that names the tenant in a header: only from its own addresses, through real HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from sidecar.admission.self_view import PATH as SELF
from sidecar.cli import main
from sidecar.engines.registry import NoPriorityEngine
from sidecar.errors import InvalidApiKey
from sidecar.events import Classified
from sidecar.identity.classify import Classifier
from sidecar.policy.compiler import load
from sidecar.policy.identity import GatewayPolicy, read_network
from sidecar.policy.problems import PolicyError
from tests.support.each import each
from tests.support.in_process import output
from tests.support.middleware import Answer, App, Guarded, guarding, key, policy, write_policy
from tests.support.wire import exchange

pytestmark = pytest.mark.anyio

HERE, ELSEWHERE = "127.0.0.1", "10.0.0.0/8"
TIER = "tier_header: x-tenant-tier"


def section(addresses: str = HERE, more: str = TIER) -> str:
    """The policy's section."""
    return f"gateway:\n  tenant_header: X-Tenant\n  addresses: [{addresses}]\n  {more}\n"


async def get(guarded: Guarded, path: str, *headers: str) -> Answer:
    """One GET."""
    lines = ["GET " + path + " HTTP/1.1", "host: h", "connection: close", *headers, "", ""]
    return Answer.parsed(await exchange(guarded.port, "\r\n".join(lines).encode()))


async def test_the_gateway_names_the_tenant_and_its_tier() -> None:
    app = App()
    async with guarding(app, policy(section())) as guarded:
        named = await guarded.ask(None, "x-tenant: nightly")
        asked = await guarded.ask(None, "x-tenant: acme", "x-tenant-tier: high")
        clamped = await guarded.ask(None, "x-tenant: acme", "x-tenant-tier: critical")
        tiers = [answer.headers["x-admission-tier"] for answer in (named, asked, clamped)]
        assert tiers == ["batch", "high", "high"]
        assert clamped.headers["x-admission-clamped-from"] == "critical"
        tenants = [story.one(Classified).tenant for story in guarded.recorder.stories]
        assert tenants == ["nightly", "acme", "acme"]
    for seen in app.seen:
        assert seen.all(b"x-tenant") == seen.all(b"x-tenant-tier") == []


async def test_from_elsewhere_the_headers_do_not_count_and_do_not_pass() -> None:
    app = App()
    async with guarding(app, policy(section(ELSEWHERE))) as guarded:
        free = await guarded.ask(None, "x-tenant: nightly", "x-tenant-tier: critical")
        own = await guarded.ask(None, "x-tenant: nightly", key("acme"))
        assert (free.headers["x-admission-tier"], own.headers["x-admission-tier"]) == ("normal", "normal")
        tenants = [story.one(Classified).tenant for story in guarded.recorder.stories]
        assert tenants == ["anonymous", "acme"]
        assert (await get(guarded, SELF, "x-tenant: nightly")).body != (await get(guarded, SELF, key("nightly"))).body
    for seen in app.seen:
        assert seen.all(b"x-tenant") == seen.all(b"x-tenant-tier") == []


@each("forwarder", ["*", "127.0.0.1"])
@each(
    "written",
    [
        ["10.1.2.3"],
        ["10.1.2.3:4567"],
        [" 10.1.2.3: +4_567 "],
        ["[10.1.2.3]:-1"],
        ["10.1.2.3:4567", "127.0.0.1"],
        ["127.0.0.1", "10.1.2.3:4567"],
        ["10.1.2.3:4567, 127.0.0.1:5"],
        ["[::ffff:10.1.2.3]:4567"],
    ],
)
async def test_an_address_that_a_client_has_written_is_never_the_gateways(written: list[str], forwarder: str) -> None:
    """uvicorn takes the address out of `X-Forwarded-For` where it is told to, from whoever it is told to."""
    from_client = [f"x-forwarded-for: {one}" for one in written]
    settings: dict[str, Any] = {"proxy_headers": True, "forwarded_allow_ips": forwarder}
    async with guarding(App(), policy(section(ELSEWHERE)), **settings) as guarded:
        assert (await guarded.ask(None, "x-tenant: nightly", *from_client)).headers["x-admission-tier"] == "normal"
    async with guarding(App(), policy(section(HERE)), **settings) as guarded:  # nor the gateway's own, rewritten
        assert (await guarded.ask(None, "x-tenant: nightly", *from_client)).headers["x-admission-tier"] == "normal"
        assert (await guarded.ask(None, "x-tenant: nightly")).headers["x-admission-tier"] == "batch"


async def test_what_the_gateway_says_of_its_own_client_does_not_matter() -> None:
    async with guarding(App(), policy(section()), proxy_headers=False) as guarded:
        for said in ("127.0.0.1", "127.0.0.1:5", "203.0.113.9:44444, 127.0.0.1", "x:y", ":", "::1"):
            answer = await guarded.ask(None, "x-tenant: nightly", f"x-forwarded-for: {said}")
            assert answer.headers["x-admission-tier"] == "batch"


async def test_a_client_that_is_taken_for_the_gateway_in_vain_learns_why() -> None:
    closed = replace(policy(section(ELSEWHERE)), anonymous=None)
    async with guarding(App(), closed) as guarded:
        refused = await guarded.ask(None, "x-tenant: acme")
        assert refused.is_error(401, "invalid_api_key", "x-tenant counts only from an address of the policy's gateway")
        assert "x-tenant" not in (await guarded.ask(None)).body.decode()


async def test_the_gateway_goes_before_keys_and_without_its_header_they_count() -> None:
    async with guarding(App(), policy(section())) as guarded:
        both = await guarded.ask(None, "x-tenant: nightly", key("acme"))
        unknown = await guarded.ask(None, "x-tenant: nightly", "authorization: Bearer the-gateways-own-token")
        without = await guarded.ask(None, key("acme"))
        tiers = [answer.headers["x-admission-tier"] for answer in (both, unknown, without)]
        assert tiers == ["batch", "batch", "normal"]


@each(
    ("headers", "status", "code"),
    [
        (["x-tenant: nobody"], 401, "unknown_tenant"),
        (["x-tenant:"], 401, "unknown_tenant"),
        (["x-tenant: acme, nightly"], 401, "unknown_tenant"),
        (["x-tenant: ACME"], 401, "unknown_tenant"),
        (["x-tenant: acme", "x-tenant-tier: gold"], 401, "unknown_tenant"),
        (["x-tenant: acme", "x-tenant: nightly"], 400, "invalid_header"),
        (["x-tenant: acme", "X-Tenant: acme"], 400, "invalid_header"),
        (["x-tenant: acme", "x-tenant-tier: high", "x-tenant-tier: batch"], 400, "invalid_header"),
    ],
)
async def test_what_the_gateway_says_must_be_clear(headers: list[str], status: int, code: str) -> None:
    app = App()
    async with guarding(app, policy(section())) as guarded:
        answer = await guarded.ask(None, *headers)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code)
        assert "nobody" not in answer.body.decode()
        seen = await get(guarded, SELF, *headers)
        assert (seen.status, json.loads(seen.body)["error"]["code"]) == (status, code)
    assert app.seen == []


async def test_the_gateways_tenant_sees_where_it_stands() -> None:
    async with guarding(App(), policy(section())) as guarded:
        seen = json.loads((await get(guarded, SELF, "x-tenant: nightly")).body)
        assert seen["tenant"] == "nightly"


async def test_a_page_that_needs_a_key_needs_none_of_the_gateways_tenants() -> None:
    app = App()
    closed = replace(policy(section() + "unguarded: deny\n", engine="vllm"), anonymous=None)
    async with guarding(app, closed) as guarded:
        assert (await guarded.ask(None, path="/tokenize")).status == 401
        assert (await guarded.ask(None, "x-tenant: nightly", path="/tokenize")).status == 200
    (seen,) = app.seen
    assert seen.all(b"x-tenant") == []


ADDRESSES = some.one_of(
    some.ip_addresses(v=4).map(str),
    some.ip_addresses(v=6).map(str),
    some.ip_addresses(v=4).map(lambda address: f"::ffff:{address}"),
    some.text(max_size=20),
)


@given(host=ADDRESSES, port=some.integers(0, 65535))
def test_no_address_outside_the_gateways_networks_is_believed(host: str, port: int) -> None:
    gateway = GatewayPolicy(b"x-tenant", (read_network("10.0.0.0/8"), read_network("fd00::/8")))
    inside = host.removeprefix("::ffff:").startswith("10.") or host.lower().startswith("fd")
    if gateway.is_from((host, port)):
        assert inside
        assert port


@each("host", ["10.0.0.1", "::ffff:10.0.0.1", "fd00::1", "fd00::1%eth0"])
def test_every_form_of_its_addresses_is_the_gateways(host: str) -> None:
    gateway = GatewayPolicy(b"x-tenant", (read_network("10.0.0.0/8"), read_network("fd00::/8")))
    assert gateway.is_from((host, 40_000))
    assert not gateway.is_from((host, 0))
    assert not gateway.is_from(None)


@given(headers=some.dictionaries(some.sampled_from([b"x-tenant", b"x-tenant-tier", b"x-api-key"]), some.binary()))
def test_whatever_is_written_a_stranger_gets_no_tenant(headers: dict[bytes, bytes]) -> None:
    classifier = Classifier(policy(section(ELSEWHERE)), NoPriorityEngine(None))
    try:
        assert classifier.tenant(headers, {"client": ("192.0.2.1", 5)}).name == "anonymous"
    except InvalidApiKey:
        assert b"x-api-key" in headers


@each(
    ("text", "words"),
    [
        (section("0.0.0.0/0"), "every address"),
        (section('"::/0"'), "every address"),
        (section("10.0.0.1/8"), "10.0.0.0/8"),
        (section("gateway.example"), "no address and no network"),
        (section('"::ffff:10.0.0.1"'), "write the IPv4 address"),
        (section(""), "something in it"),
        (section("10.0.0.1, 10.0.0.1"), "twice"),
        (section(more="tier_header: x-tenant"), "another name"),
        (section().replace("X-Tenant", "authorization"), "meaning of its own"),
        ("gateway: {tenant_header: x-tenant}\n", "addresses"),
        (section() + "tier_header: x-tenant\n", "another name"),
    ],
)
def test_each_mistake_is_reported(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PolicyError) as refused:
        load(write_policy(tmp_path, text))
    assert words in str(refused.value)


def test_a_tenant_of_the_gateway_needs_no_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_policy(tmp_path, section(ELSEWHERE))
    (path.parent / "tenants" / "keyless.yaml").write_text("tenant: keyless\ntier: normal\n")
    load(path)
    main(["check", str(path)])
    assert "with x-tenant from 10.0.0.0/8: as it says" in capsys.readouterr().out
    asked = ["explain", str(path), "--path", "/v1/chat/completions", "--header", "x-tenant: keyless"]
    assert "keyless, by the gateway's x-tenant: tier normal" in output(*asked, "--client", "10.1.2.3")
    assert "anonymous, by no API key" in output(*asked, "--client", "192.0.2.1")
