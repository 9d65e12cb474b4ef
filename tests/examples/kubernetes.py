"""The manifests as `kubectl apply -k` would send them, and the folders that a kubelet makes of their ConfigMaps."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.command_lines import EXAMPLES

KUBERNETES = EXAMPLES / "kubernetes"
IN_POD = ("vllm", "trtllm")
"""The overlays that put a sidecar into the engine's pod."""
OVERLAYS = (*IN_POD, "shared-pool", "engines")

Manifest = Mapping[str, Any]


def kubectl() -> str:
    """The program. No package that could be installed here has it: without it the test is skipped, and says so."""
    if found := shutil.which("kubectl"):
        return found
    pytest.skip("no kubectl on the PATH, and nothing else renders a kustomization")


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Every manifest of an overlay."""
    command = [kubectl(), "kustomize", str(KUBERNETES / overlay)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return tuple(yaml.safe_load_all(ended.stdout))


def of_kind(overlay: str, kind: str) -> dict[str, Any]:
    """The overlay's manifests of a kind, by their names."""
    return {found["metadata"]["name"]: found for found in rendered(overlay) if found["kind"] == kind}


def pods(overlay: str) -> dict[str, Any]:
    """The pod templates of the overlay's Deployments, by the Deployments' names."""
    return {name: found["spec"]["template"] for name, found in of_kind(overlay, "Deployment").items()}


def pod_of_the_sidecar(overlay: str) -> Any:
    """The specification of the pod that the sidecar is in."""
    (pod,) = (pod["spec"] for pod in pods(overlay).values() if "sidecar" in containers(pod["spec"]))
    return pod


def containers(pod: Any) -> dict[str, Any]:
    """A pod's containers, by name."""
    return {container["name"]: container for container in pod["containers"]}


def sidecar(overlay: str) -> Any:
    """The container that runs `sidecar serve`."""
    return containers(pod_of_the_sidecar(overlay))["sidecar"]


def ports(container: Any) -> dict[str, int]:
    """A container's ports, by name."""
    return {port["name"]: port["containerPort"] for port in container.get("ports", ())}


def mounted_config_maps(overlay: str, container: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Where the sidecar's container sees a ConfigMap, and what is in it."""
    volumes = {volume["name"]: volume for volume in pod_of_the_sidecar(overlay)["volumes"]}
    for mount in container["volumeMounts"]:
        if source := volumes[mount["name"]].get("configMap"):
            yield mount["mountPath"], of_kind(overlay, "ConfigMap")[source["name"]]["data"]


def validate(manifest: Manifest, version: str) -> None:
    """Raises where a cluster of this version would not know the manifest, or a field of it."""
    import kubernetes_validate  # late: it takes as long as all the rest

    kubernetes_validate.validate(dict(manifest), version, strict=True)


class ConfigMapFolder:
    """A mounted ConfigMap: links to links, of which one is swapped when the ConfigMap changes."""

    def __init__(self, path: Path, data: Mapping[str, str]) -> None:
        self.path = path
        self._versions = 0
        self.update(data)

    def update(self, data: Mapping[str, str]) -> None:
        """What a kubelet does, in its order: the new folder, the swap, then the names that are new or gone."""
        self._versions += 1
        version = self.path / f"..{self._versions}"
        version.mkdir(parents=True)
        for name, text in data.items():
            (version / name).write_text(text)
        (self.path / "..next").symlink_to(version.name)
        (self.path / "..next").rename(self.path / "..data")
        for name in data:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        for link in self.path.iterdir():
            if not link.name.startswith("..") and link.name not in data:
                link.unlink()


def policy_folders(overlay: str, root: Path) -> dict[str, ConfigMapFolder]:
    """The sidecar's ConfigMaps below `root`, at the paths where the container sees them; by those paths."""
    found = mounted_config_maps(overlay, sidecar(overlay))
    return {path: ConfigMapFolder(root / path.lstrip("/"), data) for path, data in found}
