"""Small policies on disk."""

from __future__ import annotations

from pathlib import Path

from sidecar.policy.compiler import load

from sidecar.policy.problems import PolicyError

SMALL = """\
engine: vllm
capacity: {tokens: 1000, requests: 10}
tiers:
  high: {}
  normal: {}
  batch: {}
"""


def pool(folder: Path, text: str = SMALL) -> Path:
    """Writes a pool's file."""
    path = folder / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def tenant(folder: Path, name: str, text: str) -> None:
    """Writes a tenant's file into `tenants/`."""
    (folder / "tenants").mkdir(exist_ok=True)
    (folder / "tenants" / f"{name}.yaml").write_text(text, encoding="utf-8")


def mistakes(path: Path) -> list[str]:
    """Every problem of a policy, without the folder's name."""
    try:
        load(path)
    except PolicyError as refused:
        folder = path if path.is_dir() else path.parent
        return [str(problem).replace(f"{folder}/", "") for problem in refused.problems]
    return []
