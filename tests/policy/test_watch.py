"""The files of a policy that runs are edited, broken, mended, swapped and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.policy import watch
from sidecar.policy.loading import Loaded, load, load_files
from sidecar.policy.watch import Look, PolicyFiles, Standing
from tests.support.door import write_policy


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return write_policy(tmp_path)


@pytest.fixture
def files(pool: Path) -> PolicyFiles:
    running = PolicyFiles(pool.parent, load(pool).generation)
    assert running.look() == Look(Standing.CURRENT, load(pool).generation, None)
    return running


def test_what_has_not_changed_is_not_read_again(files: PolicyFiles) -> None:
    assert files.look() is None


def test_an_edited_file_is_another_policy_and_undone_it_is_the_same_again(pool: Path, files: PolicyFiles) -> None:
    before = pool.read_text()
    pool.write_text(before + "# a comment counts: the generation is of the contents\n")
    assert files.look() == Look(Standing.CHANGED, load(pool).generation, None)
    assert files.look() is None
    pool.write_text(before)
    assert files.look() == Look(Standing.CURRENT, load(pool).generation, None)


def test_a_broken_file_is_rejected_with_its_line_and_mended_it_is_not(pool: Path, files: PolicyFiles) -> None:
    before = pool.read_text()
    pool.write_text(before.replace("capacity:", "capacitty:"))
    standing, generation, problem = files.look() or pytest.fail("the change was not seen")
    assert (standing, generation) == (Standing.REJECTED, None)
    assert problem is not None
    assert f"{pool}:2: capacitty" in problem
    pool.write_text(before)
    assert files.look() == Look(Standing.CURRENT, load(pool).generation, None)


def test_what_is_written_while_the_files_are_read_is_seen_the_next_time(
    pool: Path, files: PolicyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pool.read_text()

    def slowly(path: Path) -> Loaded:
        loaded = load_files(path)
        pool.write_text("engine: [")
        return loaded

    with monkeypatch.context() as patched:
        patched.setattr(watch, "load_files", slowly)
        pool.write_text(before + "# edited\n")
        assert (files.look() or pytest.fail("not seen")).standing is Standing.CHANGED
    assert (files.look() or pytest.fail("not seen")).standing is Standing.REJECTED


def test_a_tenants_file_counts_too_also_a_new_one(pool: Path, files: PolicyFiles) -> None:
    acme = pool.parent / "tenants" / "acme.yaml"
    acme.write_text(acme.read_text() + "weight: 3\n")
    assert (files.look() or pytest.fail("not seen")).standing is Standing.CHANGED
    (pool.parent / "tenants" / "new.yaml").write_text("tenant: new\nkeys: [oops]\n")
    look = files.look() or pytest.fail("not seen")
    assert look.standing is Standing.REJECTED
    assert "new.yaml:2: keys" in str(look.problem)


def test_files_that_are_gone_are_rejected(pool: Path, files: PolicyFiles) -> None:
    pool.unlink()
    look = files.look() or pytest.fail("not seen")
    assert look.standing is Standing.REJECTED
    assert str(pool) in str(look.problem)


def test_a_config_maps_swapped_link_is_seen_though_size_and_date_are_the_same(tmp_path: Path) -> None:
    versions = [tmp_path / "..one", tmp_path / "..two"]
    for version, requests in zip(versions, ("4", "5"), strict=True):
        version.mkdir()
        file = write_policy(version, requests=requests)
        os.utime(file, (1_700_000_000, 1_700_000_000))
    link = tmp_path / "..data"
    link.symlink_to(versions[0])
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    (tmp_path / "tenants").symlink_to("..data/tenants")
    files = PolicyFiles(tmp_path, load(tmp_path).generation)
    assert (files.look() or pytest.fail("not read")).standing is Standing.CURRENT
    swapped = tmp_path / "..swap"
    swapped.symlink_to(versions[1])
    swapped.replace(link)
    assert (files.look() or pytest.fail("not seen")).standing is Standing.CHANGED
