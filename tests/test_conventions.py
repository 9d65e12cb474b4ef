"""Conventions that a machine can check."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
import xdist.remote

import sidecar

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "sidecar").rglob("*.py"))
LONGEST_MODULE, LONGEST_FUNCTION = 600, 60  # a file exists because a reader looks for it, not for its length


VAGUE_OPENING = re.compile(r"(What|Those|So|Whether|The same)\b")  # such a sentence names no subject


def undocumented(node: ast.Module | ast.ClassDef, inside: str = "") -> list[tuple[int, str]]:
    """Public functions and classes without a docstring, each with its line; what a base class documents need not be
    said again."""
    found = []
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
            continue
        if ast.get_docstring(child) is None and not (isinstance(node, ast.ClassDef) and node.bases):
            found.append((child.lineno, f"{inside}{child.name}"))
        if isinstance(child, ast.ClassDef):
            found += undocumented(child, f"{inside}{child.name}.")
    return found


def mistakes_in(text: str) -> list[str]:
    """What a module does otherwise, each with its line."""
    tree = ast.parse(text)
    found = [f"{line}: no docstring of {name}" for line, name in undocumented(tree)]
    if text.strip() and ast.get_docstring(tree) is None:
        found.append("1: no docstring of the module")
    if len(text.splitlines()) > LONGEST_MODULE:
        found.append(f"{LONGEST_MODULE + 1}: more than {LONGEST_MODULE} lines")
    return found + [
        f"{node.lineno}: {node.name} has {LONGEST_FUNCTION} lines or more"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]


def test_modules_and_functions_are_short_and_say_what_their_public_parts_are_for() -> None:
    """That imports run one way is checked by `lint-imports` in .ci/test."""
    assert len(MODULES) > 300
    wrong = [
        f"{path.relative_to(ROOT)}:{mistake}"
        for path in MODULES
        for mistake in mistakes_in(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_a_module_that_is_long_and_silent_is_found() -> None:
    """A negative control."""
    text = (
        "class Base:\n    def said(self): ...\n\n\ndef _own(): ...\n\n\ndef long():\n" + "    pass\n" * LONGEST_MODULE
    )
    assert mistakes_in(text) == [
        "1: no docstring of Base",
        "2: no docstring of Base.said",
        "8: no docstring of long",
        "1: no docstring of the module",
        "601: more than 600 lines",
        "8: long has 60 lines or more",
    ]


def vague_openings(text: str) -> list[int]:
    """Lines of docstrings that begin with a word that names no subject."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and VAGUE_OPENING.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_begin_with_their_subject() -> None:
    wrong = {str(path.relative_to(ROOT)): vague_openings(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_a_docstring_without_a_subject_is_found() -> None:
    """A negative control."""
    assert vague_openings('"""What it is."""\ndef one():\n    """Somewhat."""\ndef two():\n    """The same."""') == [
        1,
        5,
    ]


def nameless_makers(text: str) -> list[str]:
    """Functions whose name has no verb: `ticket_of` is `new_ticket`, `objective_of` is `objective_for`."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    names = [node.name.strip("_") for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [name for name in names if name.endswith("_of") and name != "one_of"]


def test_functions_say_what_they_do() -> None:
    found = {str(path.relative_to(ROOT)): nameless_makers(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_function_without_a_verb_is_found() -> None:
    """A negative control."""
    assert nameless_makers("def _ticket_of(): ...\ndef _one_of(): ...") == ["ticket_of"]


def shared_names(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Public classes that several of the modules define, each with its modules."""
    modules = defaultdict(list)
    for name, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(name)
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in MODULES}
    assert shared_names(texts) == {}


def test_a_name_of_two_classes_is_found() -> None:
    """A negative control."""
    assert shared_names({"a": "class One: ...\nclass _Own: ...", "b": "class One: ...\nclass _Own: ..."}) == {
        "One": ["a", "b"]
    }


def test_one_module_says_how_to_install_what_is_missing() -> None:
    """Everywhere else a message could name a package that anyone may register."""
    named = [path.name for path in MODULES if "pip install" in path.read_text(encoding="utf-8")]
    assert named == ["extras.py"]


def test_a_class_variable_has_a_type() -> None:
    """`get_type_hints`, which reads the records of a policy, takes no plain `ClassVar` in Python 3.10."""
    plain = [path.name for path in MODULES if ": ClassVar = " in path.read_text(encoding="utf-8")]
    assert plain == []


def test_the_installed_version_is_the_packages_own() -> None:
    assert version("admission-sidecar") == sidecar.__version__


def test_no_file_names_the_machine_it_was_written_on() -> None:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    places = [b"/" + name + b"/" for name in (b"work", b"root")]
    named = []
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if path.is_file() and any(place in path.read_bytes() for place in places):
            named.append(name)
    assert named == []


def test_a_file_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """With another pytest or pytest-xdist, groups may be without effect: no test of them would fail."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@tests/test_conventions.py")


def test_pytest_may_be_newer_once_xdist_writes_groups_where_it_reads_them() -> None:
    """Fails when pytest-xdist no longer writes `_nodeid`: take the bound of pytest out of pyproject.toml then."""
    assert "item._nodeid = " in inspect.getsource(xdist.remote)
