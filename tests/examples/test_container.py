"""examples/container: what its file names is there, and its steps do what they say. check.sh builds the image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples.command_lines import EXAMPLES, ROOT, parsed
from tests.support.commands import address, command

pytestmark = pytest.mark.long

FOLDER = EXAMPLES / "container"
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


class Step(NamedTuple):
    """One instruction of the file."""

    name: str
    text: str


def steps() -> list[list[Step]]:
    """The instructions of each stage, behind those that stand before all stages."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[Step]] = [[]]
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, _, rest = line.partition(" ")
        stages += [[]] if name == "FROM" else []
        stages[-1].append(Step(name, " ".join(rest.split())))
    return stages


ABOVE, BUILD, FINAL = steps()


def texts(stage: list[Step], name: str) -> list[str]:
    """What the stage says in its instructions of one name."""
    return [step.text for step in stage if step.name == name]


def health_check() -> list[str]:
    """The health check's command."""
    (text,) = texts(FINAL, "HEALTHCHECK")
    return list(re.findall(r'"([^"]*)"', text.partition("CMD ")[2]))


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("no hadolint for this kind of machine")
    ended = subprocess.run([linter, FOLDER / "Containerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_what_it_copies_is_there_and_is_what_the_package_is_built_from() -> None:
    copied = [path for text in texts(BUILD, "COPY") for path in text.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    written = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'^readme = "(.+)"', written, re.MULTILINE)) | {
        "LICENSE",
        "pyproject.toml",
        "sidecar",
        "policies",
    }
    assert set(copied) == named


def test_it_installs_extras_that_the_package_has() -> None:
    (run,) = texts(BUILD, "RUN")
    (extras,) = re.findall(r'"\.\[(.+)\]"', run)
    assert set(extras.split(",")) <= set(metadata("admission-sidecar").get_all("Provides-Extra") or ())
    assert {"otlp", "otlp-grpc"} <= set(extras.split(","))


def test_both_stages_have_one_python_and_the_final_one_keeps_no_tools() -> None:
    assert texts(ABOVE, "ARG")[0].startswith("BASE=")
    assert [stage[0].text for stage in (BUILD, FINAL)] == ["${BASE} AS build", "${BASE}"]
    assert texts(FINAL, "RUN") == []
    (copied,) = texts(FINAL, "COPY")
    flag, source, target = copied.split()
    assert (flag, source) == ("--from=build", target)
    assert f"venv --without-pip {target}" in texts(BUILD, "RUN")[0]
    assert texts(FINAL, "ENV")[0].startswith(f"PATH={target}/bin:")


def test_it_is_the_command_and_runs_as_nobody() -> None:
    (entry,) = texts(FINAL, "ENTRYPOINT")
    assert shlex.split(entry.strip("[]")) == [
        found.name for found in entry_points(group="console_scripts", name="sidecar")
    ]
    (user,) = texts(FINAL, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, which runAsNonRoot can judge"


def test_it_tells_of_the_ports_that_serve_has() -> None:
    args = parsed(["serve", f"--upstream={NOBODY}", "--policy=policies"])
    (exposed,) = texts(FINAL, "EXPOSE")
    assert exposed.split() == [str(args.port), str(args.admin_port)]
    assert f"http://127.0.0.1:{args.admin_port}/" in health_check()[-1]


def test_the_health_check_says_whether_somebody_answers() -> None:
    program, *words = health_check()
    assert program == "python3"
    with command("serve", f"--upstream={NOBODY}", "--policy=policies", "--port=0", "--admin-port=0") as process:
        _, port = address(process), address(process).rpartition(":")[2]
        for asked, code in ((port, 0), ("9", 1)):
            asks = [sys.executable, *words[:-1], words[-1].replace(":9464/", f":{asked}/")]
            assert subprocess.run(asks, check=False, timeout=20, capture_output=True).returncode == code


@pytest.mark.soak
def test_its_steps_make_an_environment_that_runs(tmp_path: Path) -> None:
    """Each RUN as it is written, but for the places: what pip then installs comes from the registry."""
    source, target = tmp_path / "src", tmp_path / "environment"
    source.mkdir()
    for path in (path for text in texts(BUILD, "COPY") for path in text.split()[:-1]):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, source / path)
    for run in texts(BUILD, "RUN"):
        here = run.replace("/opt/sidecar", str(target)).replace("python3 -m", f"{shlex.quote(sys.executable)} -m")
        subprocess.run(["sh", "-euc", here], cwd=source, check=True, timeout=600)
    asked = [target / "bin" / "sidecar", "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(asked, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"admission-sidecar {metadata('admission-sidecar')['Version']} (")
    assert not (target / "bin" / "pip").exists()


def test_the_script_is_for_any_shell() -> None:
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell
    subprocess.run([shell, "-n", FOLDER / "check.sh"], check=True)
