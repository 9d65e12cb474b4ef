from __future__ import annotations

import hashlib

from sidecar.policy.tenant_keys import digest, hash_line, new_key, read_hash


def test_a_new_key_is_long_and_never_the_same() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert new_key().startswith("sk-")
    assert len(new_key()) == len("sk-") + 43  # 256 bits, six to a character


def test_the_hash_line_of_a_key_reads_back_as_its_digest() -> None:
    assert digest(b"sk-x") == read_hash(hash_line("sk-x")) == hashlib.sha256(b"sk-x").hexdigest()


def test_an_upper_case_hash_is_the_same_hash() -> None:
    assert read_hash("sha256:" + "AB" * 32) == "ab" * 32
