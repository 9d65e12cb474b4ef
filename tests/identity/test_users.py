"""The user of a request: where it is named, what is a name, and what stands for it."""

from __future__ import annotations

from typing import Any

from sidecar.identity.users import UNKNOWN_USER, RequestUser, find_user
from sidecar.policy.choices import ShownUsers
from sidecar.policy.tenant import Tenant, Users
from tests.support.each import each


def tenant(name: str = "acme", **users: Any) -> Tenant:
    return Tenant(name=name, level=0, max_level=0, users=Users(**users))


def user(body: str = "{}", of: Tenant | None = None, **headers: str) -> RequestUser:
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    found = find_user(of or tenant(), sent, body.encode("utf-8", "surrogatepass"))
    assert found is not None
    return found


BOB = user('{"user": "bob"}')


@each(
    ("body", "headers"),
    [
        ('{"user": "bob"}', {}),
        ('{"user": "b\\u006fb"}', {}),
        ('{"user": " bob "}', {}),
        ('{"user": "eve", "user": "bob"}', {}),
        ('{"safety_identifier": "bob"}', {}),
        ('{"metadata": {"user_id": "bob"}}', {}),
        ('{"user": null, "safety_identifier": "", "metadata": {"user_id": "bob"}}', {}),
        ('{"user": ["eve"], "metadata": {"user_id": "bob"}}', {}),
        ('{"user": "eve"}', {"x_user_id": "bob"}),
        ('{"user": "bob"}', {"x_user_id": " "}),
    ],
)
def test_one_name_is_one_user_wherever_it_stands_first(body: str, headers: dict[str, str]) -> None:
    assert user(body, **headers) == BOB


@each(
    "body",
    [
        "{}",
        "",
        "[]",
        "7",
        '{"user": null}',
        '{"user": true}',
        '{"user": {}}',
        '{"user": []}',
        '{"user": "  "}',
        '{"user": "\\ud800"}',
        '{"user": 1e999}',
        '{"metadata": "user_id"}',
        '{"metadata": {"user_id": {"user_id": "bob"}}}',
        '{"metadata": ' + "[" * 5_000 + "]" * 5_000 + "}",
    ],
)
def test_what_is_no_name_names_nobody(body: str) -> None:
    assert user(body) == UNKNOWN_USER


def test_numbers_are_names_as_they_are_written_and_no_name_is_long() -> None:
    assert user('{"user": 5}') == user('{"user": "5"}') != user('{"user": 5.0}')
    assert user('{"user": -12345678901234567890123}') == user('{"user": "-12345678901234567890123"}')
    for name in ("x" * 10**6, "é\\u0000\\n", "unknown", "\\ud83d\\ude00", '\\"'):
        found = user(f'{{"user": "{name}"}}')
        assert found.key == found.shown
        assert len(found.key) == 16
        assert found not in (BOB, UNKNOWN_USER)


def test_a_user_of_another_tenant_is_another_and_plain_shows_the_name() -> None:
    assert user('{"user": "bob"}', tenant("other")).key != BOB.key
    plain = user('{"user": "bob"}', tenant(shown=ShownUsers.PLAIN))
    assert plain == RequestUser(BOB.key, "bob")
    assert len(user('{"user": "%s"}' % ("x" * 1_000), tenant(shown=ShownUsers.PLAIN)).shown) == 100
    assert user('{"user": "b\\n\\u001b[2J"}', tenant(shown=ShownUsers.PLAIN)).shown == "b??[2J"
    assert find_user(Tenant(name="acme", level=0, max_level=0), {b"x-user-id": b"bob"}, b"{}") is None
