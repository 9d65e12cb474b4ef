"""Writes the files that a rendered chart mounts into the sidecar: `sidecar check` reads them without a cluster.

helm template llm examples/helm/admission-sidecar --values VALUES.yaml | python examples/helm/unpack.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml


def files_of(manifests: list[dict[str, Any]]) -> dict[str, str]:
    """The text of each file by its path in the container."""
    data = {
        (each["kind"], each["metadata"]["name"]): each.get("data") or each.get("stringData", {})
        for each in manifests
        if each["kind"] in ("ConfigMap", "Secret")
    }
    (pod,) = (each["spec"]["template"]["spec"] for each in manifests if each["kind"] == "Deployment")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    found = {}
    for mount in pod["containers"][0]["volumeMounts"]:
        volume = volumes[mount["name"]]
        is_secret = "secret" in volume
        name = volume["secret"]["secretName"] if is_secret else volume["configMap"]["name"]
        # A Secret of your own is in the cluster only.
        for file, text in data.get(("Secret" if is_secret else "ConfigMap", name), {}).items():
            found[f"{mount['mountPath']}/{file}"] = text
    return found


def main() -> None:
    """Reads the manifests from the standard input."""
    folder = Path(sys.argv[1])
    manifests = [each for each in yaml.safe_load_all(sys.stdin) if each]
    for path, text in files_of(manifests).items():
        written = folder / path.lstrip("/")
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text)
        print(written)


if __name__ == "__main__":
    main()
