"""Conventions that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import sidecar

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "sidecar").rglob("*.py"))
SHOWN = [str(path.relative_to(ROOT)) for path in MODULES]
LONGEST_MODULE, LONGEST_FUNCTION = 600, 60  # a file exists because a reader looks for it, not for its length


def undocumented(node: ast.Module | ast.ClassDef, inside: str = "") -> list[str]:
    """Public functions and classes without a docstring; what a base class documents need not be said again."""
    found = []
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
            continue
        if ast.get_docstring(child) is None and not (isinstance(node, ast.ClassDef) and node.bases):
            found.append(f"{inside}{child.name}")
        if isinstance(child, ast.ClassDef):
            found += undocumented(child, f"{inside}{child.name}.")
    return found


def test_imports_run_one_way() -> None:
    """The contracts are in pyproject.toml."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Contracts: 0 kept" not in ended.stdout


@pytest.mark.parametrize("path", MODULES, ids=SHOWN)
def test_a_module_is_short_and_says_what_its_public_parts_are_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= LONGEST_MODULE
    assert undocumented(tree) == []
    assert not text.strip() or ast.get_docstring(tree) is not None


@pytest.mark.parametrize("path", MODULES, ids=SHOWN)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST_FUNCTION]
    assert long == []


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
