"""`sidecar keys` on tenants' files: what it writes, what it leaves alone, and who else writes at the same time."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.cli.keys import change_keys
from sidecar.policy.compiler import load, load_files
from tests.policy.files import SMALL, pool, tenant
from tests.support.each import each
from tests.support.in_process import complaint, output, ran

A, B, NEW = (f"sha256:{digit * 64}" for digit in "abc")
ENTRY = f'{{hash: "{NEW}", name: "ci"}}'
BLOCK = f"""\
# Of the chat product.
tenant: acme
keys:
  # The first one.
  - "{A}"   # until autumn
  - hash: {B}
    name: old  # of the laptop

tier: normal   # as all
"""


def acme(folder: Path, text: str) -> Path:
    """A policy with one tenant's file of this text."""
    pool(folder, f"{SMALL}tenants: tenants/*.yaml\n")
    tenant(folder, "acme", text)
    return folder / "tenants" / "acme.yaml"


def keys(folder: Path, *words: str, code: int = 0) -> str:
    """What it prints on the stream for that exit code."""
    said = complaint if code else output
    return said("keys", *words, "--policy", folder, code=code)


def add(folder: Path, **more: str) -> None:
    change_keys(load_files(folder), "acme", {"hash": NEW, **more})


@each(
    ("before", "after"),
    [
        (BLOCK, BLOCK.replace("laptop\n", f"laptop\n  - {ENTRY}\n")),
        (f"tenant: acme\ntier: normal\nkeys:\n- {A}", f"tenant: acme\ntier: normal\nkeys:\n- {A}\n- {ENTRY}\n"),
        (f"tenant: acme\nkeys: [{A}]  # a\ntier: normal\n", f"tenant: acme\nkeys: [{A}, {ENTRY}]  # a\ntier: normal\n"),
        ("tenant: acme\nkeys: []\ntier: normal\n", f"tenant: acme\nkeys: [{ENTRY}]\ntier: normal\n"),
        (
            f"tenant: acme\nkeys: [\n  {A},  # one\n  {B},\n]\ntier: normal\n",
            f"tenant: acme\nkeys: [\n  {A},  # one\n  {B}, {ENTRY},\n]\ntier: normal\n",
        ),
        (
            f"tenant: acme\r\nkeys:\r\n  - {A}\r\ntier: normal\r\n",
            f"tenant: acme\r\nkeys:\r\n  - {A}\r\n  - {ENTRY}\r\ntier: normal\r\n",
        ),
    ],
)
def test_a_key_is_added_and_every_other_character_stays(tmp_path: Path, before: str, after: str) -> None:
    file = acme(tmp_path, "")
    file.write_bytes(before.encode())
    add(tmp_path, name="ci")
    assert file.read_bytes().decode() == after
    keys(tmp_path, "revoke", "acme", "ci")
    restored = file.read_bytes().decode()
    assert restored in {before, before + "\n"}


def test_where_tokens_name_the_tenant_the_first_key_makes_the_list(tmp_path: Path) -> None:
    file = acme(tmp_path, "tenant: acme\ntier: normal\n")
    pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\ngateway: {{tenant_header: x-tenant, addresses: [10.0.0.0/8]}}\n")
    add(tmp_path)
    assert file.read_text() == f'tenant: acme\ntier: normal\nkeys:\n  - "{NEW}"\n'


@each(
    ("before", "called", "after"),
    [
        (BLOCK, "aaaaaaaa", BLOCK.replace(f'  - "{A}"   # until autumn\n', "")),
        (BLOCK, "old", BLOCK.replace(f"  - hash: {B}\n    name: old  # of the laptop\n", "")),
        (f"tenant: acme\nkeys: [{A}, {B}]\ntier: normal\n", B, f"tenant: acme\nkeys: [{A}]\ntier: normal\n"),
        (f"tenant: acme\nkeys: [{A}, {B}]\ntier: normal\n", A.upper(), f"tenant: acme\nkeys: [{B}]\ntier: normal\n"),
        (f"tenant: acme\nkeys: [{A}]\ntier: normal\n", A[:15], "tenant: acme\nkeys: []\ntier: normal\n"),
        (f"tenant: acme\nkeys:\n- {A}  # all\ntier: normal\n", A, "tenant: acme\nkeys:\n  []  # all\ntier: normal\n"),
        (f"tenant: acme\ntier: normal\nkeys:\n  - {A}\n  - {B}", B, f"tenant: acme\ntier: normal\nkeys:\n  - {A}\n"),
    ],
)
def test_a_key_is_revoked_by_its_name_or_its_hash(tmp_path: Path, before: str, called: str, after: str) -> None:
    file = acme(tmp_path, before)
    keys(tmp_path, "revoke", "acme", called)
    assert file.read_text() == after
    load(tmp_path)


@each(
    ("text", "said"),
    [
        (f"{{tenant: acme, tier: normal, keys: [{A}]}}\n", None),
        (f"tenant: acme\ntier: normal\nkeys:\n  -\n    {A}\n  -\n    {B}\n", "only an editor can change"),
        (f"---\ntenant: acme\ntier: normal\nkeys:\n  - {A}\n  - {B}\n...\n", None),
        (f"\ufefftenant: acme\ntier: normal\nkeys: [{A}, {B}]\n", "only an editor can change"),
        (
            f'tenant: acme\ntier: normal\n"keys":\n  - {{hash: "{A}"}}\n  - hash: >-\n      {B}\n',
            "only an editor can change",
        ),
    ],
)
def test_however_it_is_written_the_file_is_right_or_left_alone(tmp_path: Path, text: str, said: str | None) -> None:
    file = acme(tmp_path, text)
    for words in (("new", "acme"), ("revoke", "acme", "aaaaaaaa")):
        before, held = file.read_text(), load(tmp_path).tenants
        ended = ran("keys", *words, "--policy", str(tmp_path))
        if ended.returncode == 0:
            assert len(load(tmp_path).tenants) == len(held) + (1 if words[0] == "new" else -1)
        else:
            assert file.read_text() == before
            assert said is not None
            assert said in ended.stderr


def test_new_prints_the_key_once_and_writes_its_hash_alone(tmp_path: Path) -> None:
    file = acme(tmp_path, BLOCK)
    more = ("--name", "ci", "--expires", "2999-01-31", "--tier", "batch")
    printed = keys(tmp_path, "new", "acme", *more)
    (key,) = re.findall(r"sk-\S+", printed)
    assert key not in file.read_text()
    assert str(file) in printed
    assert yaml.safe_load(file.read_text())["keys"][-1]["expires"] == "2999-01-31"
    lines = keys(tmp_path, "list", "acme").splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "HASH", "BEGINS", "TIER", "EXPIRES"],
        ["-", "sha256:aaaaaaaaaaaa", "normal", "never"],
        ["old", "sha256:bbbbbbbbbbbb", "normal", "never"],
        ["ci", lines[3].split()[1], "batch", "2999-01-31"],
    ]


@each(
    ("words", "code", "said"),
    [
        (("new", "acme", "--name", "old"), 1, 'two keys are called "old"'),
        (("new", "acme", "--name", "a\nb"), 2, "--name: "),
        (("new", "acme", "--name", "sk-mine-and-long-enough"), 2, "--name: looks like a key"),
        (("new", "acme", "--expires", "tomorrow"), 2, '--expires: "tomorrow" is no day'),
        (("new", "acme", "--expires", "2999-02-30"), 2, "--expires: "),
        (("new", "acme", "--expires", "2001-01-31"), 2, "--expires: 2001-01-31 is over"),
        (("new", "acme", "--tier", "hihg"), 2, '--tier: "hihg" is no tier; did you mean "high"?'),
        (("new", "acme", "--tier", "high"), 1, "max_tier: less important than high, the tier of key sha256:"),
        (("new", "bulk"), 1, "no file of this policy has tenant bulk"),
        (("new", "--name", "ci"), 2, "name the tenant, too"),
        (("list", "bulk"), 1, "no file of this policy has tenant bulk"),
        (("revoke", "acme", "ci"), 1, 'tenant acme: no key is called "ci", and no hash begins so'),
        (("revoke", "acme", "aaaaaaa"), 1, "no hash begins so"),
    ],
)
def test_what_cannot_be_done_changes_nothing(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    file = acme(tmp_path, BLOCK)
    printed = ran("keys", *words, "--policy", str(tmp_path))
    assert printed.returncode == code
    assert said in printed.stderr
    assert "sk-mine" not in printed.stderr
    assert printed.stdout == ""
    assert file.read_text() == BLOCK
    assert os.listdir(file.parent) == ["acme.yaml"]


def test_a_file_that_would_be_too_large_to_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    full = BLOCK + "#" + "x" * (2**20 - len(BLOCK) - 60) + "\n"
    file = acme(tmp_path, full)
    assert "would be larger than 1 MiB" in keys(tmp_path, "new", "acme", code=1)
    assert file.read_text() == full


def test_a_policy_with_mistakes_is_not_edited(tmp_path: Path) -> None:
    file = acme(tmp_path, BLOCK.replace("normal", "hihg"))
    assert 'acme.yaml:9: tier: "hihg" is no tier' in keys(tmp_path, "new", "acme", code=1)
    assert "hihg" in file.read_text()


def test_the_file_keeps_its_mode_its_owner_and_the_link_to_it(tmp_path: Path) -> None:
    link = acme(tmp_path, BLOCK)
    kept = tmp_path / "kept.yaml"
    link.rename(kept)
    link.symlink_to(kept)
    kept.chmod(0o640)
    owner = (1234, 1234) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(kept, *owner)
    add(tmp_path)
    status = kept.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, *owner)
    assert link.is_symlink()
    assert NEW in kept.read_text()


def test_a_file_of_another_user_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar's user could not read what this one leaves there."""
    file = acme(tmp_path, BLOCK)
    status = file.stat()
    monkeypatch.setattr(os, "geteuid", lambda: status.st_uid + 1)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    keys(tmp_path, "new", "acme", code=1)
    assert file.read_text() == BLOCK
    assert os.listdir(file.parent) == ["acme.yaml"]


def test_what_an_editor_saves_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = acme(tmp_path, BLOCK)
    monkeypatch.setattr(os, "fsync", lambda _: file.write_text(BLOCK + "weight: 2\n"))
    assert "has changed meanwhile, and was left as it is" in keys(tmp_path, "new", "acme", code=1)
    assert file.read_text() == BLOCK + "weight: 2\n"


def test_what_a_killed_command_left_is_no_tenant_and_in_no_ones_way(tmp_path: Path) -> None:
    file = acme(tmp_path, BLOCK)
    file.with_name(".acme.yaml.new").write_text("half a fi")
    assert len(load(tmp_path).tenants) == 2
    add(tmp_path)
    assert len(load(tmp_path).tenants) == 3
    assert os.listdir(file.parent) == ["acme.yaml"]


def test_many_at_once_lose_no_key(tmp_path: Path) -> None:
    acme(tmp_path, BLOCK)
    loaded = load_files(tmp_path)

    def add_one(number: int) -> None:
        digest = f"{number:064x}"
        change_keys(loaded, "acme", {"hash": f"sha256:{digest}"})

    with ThreadPoolExecutor(8) as pool_of_threads:
        list(pool_of_threads.map(add_one, range(24)))
    assert len(load(tmp_path).tenants) == 2 + 24
