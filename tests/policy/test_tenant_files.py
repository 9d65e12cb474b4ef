"""What keeps the `tenants` pattern from its files is said, and never passed over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.policy.tenant_files import obstacles, tenant_files
from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

ACME = f'tenant: acme\nkeys: ["sha256:{"0" * 64}"]\ntier: high\n'
LOOP = "a link that leads back to itself; mend the link, or remove it"
DANGLING = "a link to nowhere, which does not exist; mend the link, or remove it"


def _pool(folder: Path, pattern: str = "tenants/*.yaml") -> Path:
    return pool(folder, f"{SMALL}tenants: {pattern}\n")


@each(
    ("target", "said"),
    [
        ("a file", "a file, and not a folder; name a folder"),
        ("nothing", "there is no such folder; make it, or name another"),
        ("nowhere", DANGLING),
        ("tenants", LOOP),
    ],
)
def test_a_tenants_folder_that_is_none_is_said_to_be_none(tmp_path: Path, target: str, said: str) -> None:
    folder = tmp_path / "tenants"
    if target == "a file":
        folder.touch()
    elif target != "nothing":
        folder.symlink_to(target)
    assert mistakes(_pool(tmp_path)) == [f"policy.yaml:7: tenants: no file matches tenants/*.yaml: tenants: {said}"]


def test_an_empty_folder_has_no_file_that_matches(tmp_path: Path) -> None:
    (tmp_path / "tenants").mkdir()
    said = "no file matches tenants/*.yaml; add a tenant's file there, or remove this line"
    assert mistakes(_pool(tmp_path)) == [f"policy.yaml:7: tenants: {said}"]


@pytest.mark.parametrize(("target", "said"), [("nowhere", DANGLING), ("b.yaml", LOOP)])
def test_a_link_among_the_files_that_leads_nowhere_is_a_mistake_and_not_left_out(
    tmp_path: Path, target: str, said: str
) -> None:
    tenant(tmp_path, "acme", ACME)
    (tmp_path / "tenants" / "b.yaml").symlink_to(target)
    assert mistakes(_pool(tmp_path)) == [f"tenants/b.yaml: {said}"]


def test_folders_pipes_and_hidden_links_beside_the_files_are_none_of_them(tmp_path: Path) -> None:
    tenant(tmp_path, "acme", ACME)
    (tmp_path / "tenants" / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "tenants" / "pipe.yaml")
    (tmp_path / "tenants" / ".#acme.yaml").symlink_to("an.editor@host.1")
    assert mistakes(_pool(tmp_path)) == []


@each("pattern", ["tenants/*.yaml", "ten*/*.yaml", "*/*.yaml", "**/*.yaml", "tenants/**", "{}/tenants/*.yaml"])
def test_every_way_of_writing_the_pattern_finds_the_file_and_no_obstacle(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "a [folder]*"
    folder.mkdir()
    tenant(folder, "acme", ACME)
    (folder / "stray").touch()
    (folder / "broken").symlink_to("nowhere")  # matches `*` on the way, and is no mistake there
    absolute = str(folder).replace("[", "[[]").replace("*", "[*]")
    pattern = pattern.format(absolute)
    assert tenant_files(pattern, folder) == [str(folder / "tenants" / "acme.yaml")]
    assert obstacles(pattern, folder) == []


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users may enter: pytest's own is for one user alone."""
    folder = Path(tempfile.mkdtemp(prefix="sidecar-tenants-"))
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


CLOSED = [
    ("tenants", 0o000, "policy.yaml:7: tenants: no file matches tenants/*.yaml: tenants: cannot be read by user "),
    ("tenants", 0o600, "tenants/acme.yaml: cannot be read by user "),
    ("tenants", 0o444, "tenants/acme.yaml: cannot be read by user "),
    ("tenants/acme.yaml", 0o000, "tenants/acme.yaml: cannot be read by user "),
    ("policy.yaml", 0o000, "policy.yaml: cannot be read by user "),
    (".", 0o000, "policy.yaml: cannot be read by user "),
    (".", 0o444, "policy.yaml: cannot be read by user "),
]


def _checked_by_another_user(folders: list[Path]) -> list[str]:
    """What `sidecar check` says first of each. Permissions do not bind root, so root becomes another user first."""
    become = "os.setegid(65534); os.seteuid(65534)" if os.geteuid() == 0 else "pass"
    program = f"""
import contextlib, encodings.utf_8_sig, io, json, os, sys
from sidecar.cli import check, main  # while they may be read
{become}
said = []
for folder in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main(["check", folder]) == 1
    said.append(errors.getvalue())
print(json.dumps(said))
"""
    command = [sys.executable, "-c", program, *map(str, folders)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran
    said = json.loads(ran.stdout)
    return [text.splitlines()[0].replace(f"{folder}/", "") for folder, text in zip(folders, said, strict=True)]


def test_what_may_not_be_read_is_named_with_the_user_who_may_not(shared_folder: Path) -> None:
    folders = [shared_folder / str(number) for number in range(len(CLOSED))]
    for folder, (closed, mode, _) in zip(folders, CLOSED, strict=True):
        folder.mkdir(mode=0o755)
        tenant(folder, "acme", ACME)
        _pool(folder)
        (folder / closed).chmod(mode)
    try:
        lines = _checked_by_another_user(folders)
    finally:
        for folder, (closed, _, _) in zip(folders, CLOSED, strict=True):
            folder.chmod(0o755)
            (folder / closed).chmod(0o755)
    for (_, mode, said), line in zip(CLOSED, lines, strict=True):
        is_listed = mode != 0o600 or os.geteuid() != 0  # which needs a right that the other user has not
        assert line.startswith(said if is_listed else CLOSED[0][2])
        assert line.endswith("(Permission denied); let this user read it")
