"""The benchmark of one GPU with PyTorch, on the processor and with a tiny model: the same code, another device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.gpu.playing import WAYS
from tests.real.lab import ROOT, installed_in

pytestmark = pytest.mark.engine

SAME = """
from benchmarks.gpu.decoder import TINY, Decoder
model, other = (Decoder(TINY, 3, 64, "cpu") for _ in range(2))
prompts = [[5, 6, 7, 8], [9, 1], [3, 3, 3]]
said = [[model.prefill(place, prompt)] for place, prompt in enumerate(prompts)]
for step in range(6):
    places = [0, 2] if step % 2 else [2, 1, 0]
    for place, token in zip(places, model.decode(places, [said[place][-1] for place in places])):
        said[place].append(token)
for prompt, tokens in zip(prompts, said):
    for end in range(len(tokens)):
        assert other.prefill(1, prompt + tokens[:end]) == tokens[end], (prompt, tokens, end)
print("same")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter of the engine lab that has PyTorch, with this checkout and its packages."""
    python = installed_in() / "vllm" / "bin" / "python"
    if not python.is_file():
        pytest.skip("no PyTorch here: run run_vllm.sh of the engine lab once, which installs it")
    version = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    if version.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("the engine lab has another version of Python, which cannot load this one's packages")
    paths = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [python, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_tokens_are_the_same_one_by_one_in_a_batch_and_as_a_prompt() -> None:
    ended = run("-c", SAME)
    assert (ended.returncode, ended.stdout) == (0, "same\n"), ended.stderr


def test_the_script_serves_all_requests_in_every_way(tmp_path: Path) -> None:
    written = tmp_path / "gpu.json"
    ended = run("-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--rounds", "2", "--json", str(written))
    assert ended.returncode == 0, ended.stderr
    assert "no figure of a GPU" in ended.stdout
    assert ended.stderr.count("tokens/s") == 2 * len(WAYS)
    found = json.loads(written.read_text())
    assert set(found["ways"]) == set(WAYS)
    assert found["ways"]["admission"]["most_in_engine_queue"] <= 32
    assert found["ways"]["equal priority"]["most_in_engine_queue"] == 160


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    ended = run("-m", "benchmarks.gpu", "--requests", "4")
    if ended.returncode == 0:
        pytest.skip("there is a GPU")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "CUDA" in ended.stderr or "GiB" in ended.stderr
