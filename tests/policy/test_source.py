from __future__ import annotations

from pathlib import Path

from sidecar.policy.source import read
from sidecar.policy.units import Ambiguous
from tests.support.each import each


def _read(folder: Path, content: bytes) -> tuple[object, list[str]]:
    path = folder / "p.yaml"
    path.write_bytes(content)
    document = read(path)
    return document.data, [str(problem).replace(f"{folder}/", "") for problem in document.problems]


@each(
    ("content", "line", "said"),
    [
        (b"", None, "the file is empty; `sidecar init` writes files to begin with"),
        (b"# only a comment\n", None, "the file is empty; `sidecar init` writes files to begin with"),
        (b"- a\n- b\n", 1, 'not a mapping; write "key: value" lines'),
        (b"# a number\n42\n", 2, 'not a mapping; write "key: value" lines'),
        (b"a: 1\nb: \x00\n", 2, "a character that cannot be printed; remove it, or save the file as plain text"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8 text; save the file as UTF-8"),
        (b"a: 1\n---\nb: 2\n", 2, "a second document begins here; write one document per file"),
        (b"a: &x 1\nb: *x\n", 1, "YAML anchors and aliases are not supported; write the value out"),
        (b"a: !!python/object:os.system 1\n", 1, "YAML tags (!...) are not supported; write the plain value"),
        (b"a: 1\n? [b]\n: 2\n", 2, "a key that is not a name; write a plain name before the colon"),
        (b"a: " + b"[" * 100_000, 1, "nested too deeply; a policy is at most five levels deep"),
        (b"\x7fELF\x02\x01\x01\0\0\n\xff", None, "not text; a policy is a small file of YAML"),
        ("engine: vllm".encode("utf-16"), 1, "not UTF-8 text; save the file as UTF-8"),
        (b"a" * (2**20 + 1), None, "larger than 1 MiB; a policy is a small file of YAML"),
    ],
)
def test_what_is_no_policy_at_all_gets_one_sentence(
    tmp_path: Path, content: bytes, line: int | None, said: str
) -> None:
    place = "p.yaml" if line is None else f"p.yaml:{line}"
    assert (None, [f"{place}: {said}"]) == _read(tmp_path, content)


def test_broken_yaml_says_the_line(tmp_path: Path) -> None:
    data, problems = _read(tmp_path, b"a: 1\nb: {c: 1\nd: 2\n")
    assert data is None
    assert problems[0].startswith("p.yaml:3: not YAML: ")


def test_a_colon_inside_a_value_is_reported_to_need_quotes(tmp_path: Path) -> None:
    _, problems = _read(tmp_path, b"over_limit: downgrade: batch\n")
    assert problems[0].endswith('; put quotes around a value that contains ": "')


def test_a_key_written_twice_is_refused_and_the_rest_is_still_read(tmp_path: Path) -> None:
    data, problems = _read(tmp_path, b"a: 1\nb: 2\na: 3\n")
    assert problems == ["p.yaml:3: a: written twice, first on line 1; keep one of them"]
    assert data == {"a": 3, "b": 2}


@each(
    ("written", "meaning"),
    [("no", "false"), ("ON", "true"), ("010", "8"), ("12:30", "750"), ("0x10", "16"), ("1_000", "1000")],
)
def test_words_that_yaml_reads_as_something_else_are_kept_apart(tmp_path: Path, written: str, meaning: str) -> None:
    assert ({"a": Ambiguous(written, meaning)}, []) == _read(tmp_path, f"a: {written}\n".encode())


@each("written", ["2024-01-01", "2024-99-99", ".inf", ".nan", "1.5e+3", "0b", "="])
def test_dates_and_strange_numbers_are_ambiguous_or_text_but_never_numbers(tmp_path: Path, written: str) -> None:
    data, problems = _read(tmp_path, f"a: {written}\n".encode())
    assert problems == []
    assert isinstance(data["a"], (Ambiguous, str))


def test_plain_values_are_what_they_look_like(tmp_path: Path) -> None:
    data, _ = _read(tmp_path, b'{a: 1, b: 1.5, c: true, d: null, e: 1e3, f: "no", g: }\n')
    assert data == {"a": 1, "b": 1.5, "c": True, "d": None, "e": "1e3", "f": "no", "g": None}


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert _read(tmp_path, b"\xef\xbb\xbfa: 1\n") == ({"a": 1}, [])


def test_a_name_that_yaml_reads_as_false_must_be_quoted(tmp_path: Path) -> None:
    _, problems = _read(tmp_path, b"a:\n  no: 1\n")
    assert problems == ['p.yaml:2: a.no: a name that means false in YAML; put it in quotes: "no"']


def test_a_missing_file_is_a_problem_and_not_an_exception(tmp_path: Path) -> None:
    document = read(tmp_path / "nothing.yaml")
    assert document.is_missing
    assert str(document.problems[0]) == f"{tmp_path}/nothing.yaml: there is no such file; make it, or name another"
