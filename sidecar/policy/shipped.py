"""Where the example policies are: beside the sources in a checkout, inside the package once it is installed."""

from __future__ import annotations

from pathlib import Path


def shipped_policies() -> Path:
    """The folder with `policy.yaml` and `tenants/`. Raises FileNotFoundError where a packager left it out."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "policies", package.parent / "policies"):
        if (folder / "policy.yaml").is_file():
            return folder
    raise FileNotFoundError("the example policies are missing from this installation; pass a policy of your own")
