"""`users` of a tenant: what it says when nothing else is written, and what is wrong."""

from __future__ import annotations

from pathlib import Path

from sidecar.policy.compiler import load
from sidecar.policy.tenant import Users
from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

ACME = 'tenant: acme\nkeys: ["sha256:' + "0" * 64 + '"]\ntier: high\n'
POOL = f"{SMALL}tenants: tenants/*.yaml\n"
PLACE = 'is no place of a user\'s name; write "header NAME" or "body FIELD"'


def users(folder: Path, written: str) -> Users | None:
    tenant(folder, "acme", f"{ACME}{written}")
    return load(pool(folder, POOL)).named["acme"].users


def test_an_empty_mapping_tells_users_apart_by_the_fields_of_the_known_apis(tmp_path: Path) -> None:
    found = users(tmp_path, "users: {}\n")
    assert found.sources == ("header x-user-id", "body user", "body safety_identifier", "body metadata.user_id")
    assert (found.fair, found.limits.are_counted, found.most, found.shown.value) == (True, False, 10_000, "hashed")
    assert users(tmp_path, "") is None


@each(
    ("written", "said"),
    [
        ("from: []", 'users.from: not a list with something in it; write ["header x-user-id", "body user"]'),
        ("from: [x-user-id]", f'users.from[0]: "x-user-id" {PLACE}'),
        ("from: [header]", f'users.from[0]: "header" {PLACE}'),
        ("from: [query user]", f'users.from[0]: "query user" {PLACE}'),
        ("from: [body a..b]", f'users.from[0]: "body a..b" {PLACE}'),
        ("from: [body user, body user]", "users.from: body user is listed twice; keep its first place"),
        (
            "from: [header Authorization]",
            'users.from[0]: "Authorization" has a meaning of its own; write another name, such as x-priority',
        ),
        ("fair: perhaps", 'users.fair: "perhaps" is neither true nor false; write false'),
        ("max: 0", "users.max: 0 leaves room for nothing; write 1 or more"),
        ("shown: name", 'users.shown: "name" is no choice; the choices are hashed, plain'),
        ("limits: {tokens_per_day: 5}", 'users.limits.tokens_per_day: no such key; did you mean "tokens_per_minute"?'),
        (
            "fair: false",
            "users: with `fair: false` and without limits it does nothing; write one of them, or leave it out",
        ),
    ],
)
def test_a_mistake_says_what_would_be_right(tmp_path: Path, written: str, said: str) -> None:
    tenant(tmp_path, "acme", f"{ACME}users: {{{written}}}\n")
    assert [message.split(": ", 1)[1] for message in mistakes(pool(tmp_path, POOL))] == [said]
