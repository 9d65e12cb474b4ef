"""The files of a policy are edited, half written, broken, mended, swapped and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.policy import reload
from sidecar.policy.compiler import Loaded, load, load_files
from sidecar.policy.followed_files import STILL_BROKEN_S, STILL_S
from sidecar.policy.reload import FilesReading, PolicyFiles
from tests.support.middleware import write_policy


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Watched:
    """Files, the time, and what is reported when they have been still for long enough."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.files = PolicyFiles(path, self.clock)

    def after(self, seconds: float) -> FilesReading | None:
        """What a look says so much later."""
        self.clock.s += seconds
        return self.files.look()

    def settled(self) -> FilesReading | None:
        """What is reported of the files as they are, looked at every 0.1 s for as long as it may take."""
        return next((look for look in (self.after(0.1) for _ in range(25)) if look is not None), None)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return write_policy(tmp_path)


@pytest.fixture
def watched(pool: Path) -> Watched:
    watched = Watched(pool.parent)
    assert generation(watched.settled()) == load(pool).generation
    return watched


def generation(look: FilesReading | None) -> str:
    assert look is not None, "nothing was reported"
    assert look.generation is not None, look.problem
    return look.generation


def problem(look: FilesReading | None) -> str:
    assert look is not None, "nothing was reported"
    assert look.problem is not None, look.generation
    return look.problem


def test_what_has_not_changed_is_not_reported_again(pool: Path, watched: Watched) -> None:
    assert watched.settled() is None
    pool.touch()
    assert watched.settled() is None, "the same contents"


def test_an_edited_file_is_another_policy_and_undone_it_is_the_one_before(pool: Path, watched: Watched) -> None:
    before, first = pool.read_text(), load(pool).generation
    pool.write_text(before + "# a comment counts: the generation is of the contents\n")
    assert generation(watched.settled()) == load(pool).generation != first
    pool.write_text(before)
    assert generation(watched.settled()) == first


def test_a_broken_file_is_reported_with_its_line(pool: Path, watched: Watched) -> None:
    before = pool.read_text()
    pool.write_text(before.replace("capacity:", "capacitty:"))
    assert f"{pool}:2: capacitty" in problem(watched.settled())
    pool.write_text(before)
    assert generation(watched.settled()) == load(pool).generation


def test_a_change_is_reported_when_it_has_been_still_for_a_moment(pool: Path, watched: Watched) -> None:
    pool.write_text(pool.read_text() + "# edited\n")
    assert watched.after(0) is None
    assert watched.files.pause_s(9) < 9
    assert watched.after(STILL_S / 2) is None
    assert generation(watched.after(STILL_S)) == load(pool).generation
    assert watched.files.pause_s(9) == 9


def test_a_file_that_is_truncated_and_then_written_is_one_change(pool: Path, watched: Watched) -> None:
    whole = pool.read_text()
    half = whole[: whole.index("anonymous:")]
    pool.write_text("")
    assert watched.after(0) is None
    assert watched.after(STILL_S) is None, "no policy, and not for long"
    pool.write_text(half)
    assert load(pool).anonymous is None, "half of it would lock everybody out"
    assert watched.after(0) is None
    assert watched.after(STILL_S / 2) is None
    pool.write_text(whole + "# longer\n")
    assert generation(watched.settled()) == load(pool).generation


def test_a_broken_file_is_reported_only_when_it_stays_so(pool: Path, watched: Watched) -> None:
    pool.write_text("")
    assert watched.after(0) is None
    assert watched.after(STILL_BROKEN_S * 0.9) is None
    assert "policy.yaml" in problem(watched.after(STILL_BROKEN_S * 0.2))


def test_a_change_that_is_undone_before_it_was_reported_is_none(pool: Path, watched: Watched) -> None:
    status, before = pool.stat(), pool.read_bytes()
    pool.write_bytes(b"")
    assert watched.after(0) is None
    pool.write_bytes(before)
    os.utime(pool, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert watched.after(0) is None
    assert watched.files.pause_s(9) == 9


def test_a_caller_is_answered_at_once(pool: Path, watched: Watched) -> None:
    pool.write_text(pool.read_text() + "# edited\n")
    assert generation(watched.files.look(at_once=True)) == load(pool).generation
    assert watched.settled() is None, "and nothing is reported twice"
    assert generation(watched.files.look(at_once=True)) == load(pool).generation, "but who asks again"
    pool.write_text("")
    assert "policy.yaml" in problem(watched.files.look(at_once=True))


def test_what_is_written_again_within_a_files_resolution_is_seen_all_the_same(pool: Path, watched: Watched) -> None:
    pool.write_text(pool.read_text() + "# 1\n")
    watched.files.look(at_once=True)
    status = pool.stat()
    pool.write_text(pool.read_text().replace("# 1", "# 2"))
    os.utime(pool, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert generation(watched.settled()) == load(pool).generation


def test_what_is_written_while_the_files_are_read_is_read_again(
    pool: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a ConfigMap that is swapped between the pool's file and a tenant's is never a mixture of both."""
    acme = pool.parent / "tenants" / "acme.yaml"
    read: list[str] = []

    def slowly(path: Path) -> Loaded:
        loaded = load_files(path)
        if not read:
            acme.write_text(acme.read_text() + "weight: 3\n")
        read.append(loaded.policy.generation)
        return loaded

    monkeypatch.setattr(reload, "load_files", slowly)
    pool.write_text(pool.read_text() + "# edited\n")
    assert generation(watched.settled()) == load(pool).generation
    assert len(read) == 2


def test_a_tenants_file_counts_too_also_a_new_and_a_removed_one(pool: Path, watched: Watched) -> None:
    acme = pool.parent / "tenants" / "acme.yaml"
    acme.write_text(acme.read_text() + "weight: 3\n")
    assert generation(watched.settled()) == load(pool).generation
    new = pool.parent / "tenants" / "new.yaml"
    new.write_text("tenant: new\nkeys: [oops]\n")
    assert "new.yaml:2: keys" in problem(watched.settled())
    new.unlink()
    assert generation(watched.settled()) == load(pool).generation
    acme.unlink()
    look = watched.settled() or pytest.fail("not reported")
    assert {tenant.name for tenant in look.loaded.policy.tenants.values()} == {"nightly"}


def test_a_pattern_that_changes_names_other_files(pool: Path, watched: Watched) -> None:
    (pool.parent / "tenants").rename(pool.parent / "customers")
    pool.write_text(pool.read_text().replace("tenants/*", "customers/*"))
    assert generation(watched.settled()) == load(pool).generation
    acme = pool.parent / "customers" / "acme.yaml"
    acme.write_text(acme.read_text() + "weight: 3\n")
    assert generation(watched.settled()) == load(pool).generation


def test_files_that_are_gone_are_reported(pool: Path, watched: Watched) -> None:
    pool.unlink()
    assert str(pool) in problem(watched.settled())


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
    watched = Watched(tmp_path)
    first = generation(watched.settled())
    swapped = tmp_path / "..swap"
    swapped.symlink_to(versions[1])
    swapped.replace(link)
    assert generation(watched.settled()) == load(tmp_path).generation != first
