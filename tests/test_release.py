"""The distribution that `sh .ci/release` builds: complete, small, and usable where nothing else is installed.

The second step builds it with the backend alone, and looks into it. The whole script, with its empty environments, is
a minute: `--soak`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import sidecar

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the last commit, where the script makes its dist/."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("release") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def released(clone: Path, *tag: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", ".ci/release", *tag]
    quick = {**os.environ, "PIP_COMPILE": "0"}  # of what is installed little is run
    return subprocess.run(command, cwd=clone, env=quick, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def dist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist and the wheel, without the script."""
    backend = tmp_path_factory.mktemp("backend")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--target"]
    requires = re.search(r"^requires = \[\"(.+)\"\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    subprocess.run([sys.executable, *install, str(backend), requires[1]], check=True, timeout=300)
    build = [sys.executable, "-m", "hatchling", "build", "--directory", "dist"]
    subprocess.run(build, cwd=clone, env={**os.environ, "PYTHONPATH": str(backend)}, check=True, timeout=300)
    return clone / "dist"


@pytest.mark.soak
def test_the_script_builds_checks_and_runs_what_it_built(clone: Path, tmp_path: Path) -> None:
    """It installs the wheel in an empty environment, and runs the command there."""
    other = tmp_path / "other"
    subprocess.run(["git", "clone", "--quiet", str(clone), str(other)], check=True)
    ended = released(other)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASSED") == 2, "twine checks the sdist and the wheel"
    assert "Built and checked. Nothing is published." in ended.stdout
    look_into(other / "dist")


def test_the_wheel_has_the_package_and_the_policies_alone_and_the_sdist_the_folders_of_the_tree(dist: Path) -> None:
    look_into(dist)


def look_into(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"admission_sidecar-{sidecar.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "sidecar",
        f"admission_sidecar-{sidecar.__version__}.dist-info",
    }
    assert {"sidecar/policies/policy.yaml", "sidecar/py.typed"} <= set(names)
    committed = {str(path.relative_to(ROOT)) for path in (ROOT / "sidecar").rglob("*.lua")}
    assert committed
    assert committed <= set(names)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        of_the_tree = {name.split("/")[1] for name in archive.getnames()}
    assert {"sidecar", "policies", "tests", "docs", "pyproject.toml", "LICENSE"} <= of_the_tree
    assert {name for name in of_the_tree if name.endswith(".whl")} == set()


def test_a_tag_that_is_not_the_version_builds_nothing(clone: Path) -> None:
    ended = released(clone, "v0.0.0")
    assert ended.returncode == 1
    assert f"the tag is v0.0.0, and sidecar/version.py says {sidecar.__version__}" in ended.stderr


@pytest.mark.soak
def test_a_policy_that_is_refused_fails_the_release(clone: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["git", "clone", "--quiet", str(clone), str(other)], check=True)
    policy = other / "policies" / "policy.yaml"
    policy.write_text(policy.read_text() + "\nno_such_key: 1\n")
    name = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *name, "commit", "--quiet", "--all", "--message", "a mistake"], cwd=other, check=True)
    ended = released(other)
    assert ended.returncode == 1
    assert "sidecar check refuses the shipped policies" in ended.stderr


def test_the_workflow_gives_each_job_the_rights_that_it_needs_and_uses_files_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".ci" / "release.yml").read_text())
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert all("permissions" in job for job in jobs.values())
    assert {name for name, job in jobs.items() if job["permissions"].get("contents") == "write"} == {"release"}
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = [word for line in ran for word in line.split() if word.startswith(".ci/")]
    assert scripts == [".ci/run", ".ci/release"]
    assert all((ROOT / script).exists() for script in scripts)


_HELM = """helm() {
    case "$*" in *--password-stdin) cat > /dev/null ;; esac  # else the pipe breaks, now and then
    echo helm "$@"
}
"""


def test_the_published_chart_names_the_published_image(tmp_path: Path) -> None:
    """The workflow's own lines, up to those that reach a registry, for an owner whose name has capitals."""
    jobs = yaml.safe_load((ROOT / ".ci" / "release.yml").read_text())["jobs"]
    (name,) = (step for step in jobs["image"]["steps"] if step.get("id") == "name")
    (publish,) = (step["run"] for step in jobs["chart"]["steps"] if "helm push" in step.get("run", ""))
    folder = tmp_path / "examples" / "helm" / "admission-sidecar"
    folder.mkdir(parents=True)
    (folder / "values.yaml").write_text((ROOT / folder.relative_to(tmp_path) / "values.yaml").read_text())
    output = tmp_path / "output"
    own = {
        "GITHUB_REPOSITORY": "Some-One/Admission",
        "GITHUB_REPOSITORY_OWNER": "Some-One",
        "GITHUB_OUTPUT": str(output),
    }
    for lines in (name["run"], _HELM + publish):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", lines],
            cwd=tmp_path,
            env={**os.environ, **own, "TOKEN": "t", "GITHUB_ACTOR": "a"},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    assert output.read_text() == "image=ghcr.io/some-one/admission\n"
    assert yaml.safe_load((folder / "values.yaml").read_text())["image"]["repository"] == "ghcr.io/some-one/admission"
    assert "oci://ghcr.io/some-one/charts" in done.stdout
