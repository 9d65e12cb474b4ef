"""The part of `sidecar doctor` that fits an engine model for `sidecar simulate` to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from sidecar.cli.output import STANDARD_OUTPUT, require_writable, say, write_json, write_text
from sidecar.tools.doctor.examination import Options
from sidecar.tools.doctor.probe import predicted, recommended_slo
from sidecar.tools.doctor.report import for_the_policy
from sidecar.tools.doctor.speed_probe import measure
from sidecar.tools.doctor.survey import CannotLook
from sidecar.tools.simulate.model_fit import as_yaml, figures, fit, report
from sidecar.tools.step_model.model import shipped


def write_model(options: Options, file: str, json_target: str | None, tell: Callable[[str], None]) -> bool:
    """Measures the engine, prints the fit, and writes the model to `file`. False where that cannot be written.

    Raises CannotLook where the engine cannot be measured, and CommandFailed, before anything is sent, where a file
    cannot be written.
    """
    if file in shipped():
        raise CannotLook(f"{file} is the name of a model that ships, which `simulate` would read: write ./{file}.yaml")
    is_new = file != STANDARD_OUTPUT and not Path(file).exists()
    require_writable(file)
    try:
        probe = asyncio.run(measure(options, tell))
        fitted = fit(probe)
    except BaseException:
        if is_new:
            Path(file).unlink(missing_ok=True)  # an empty file is no model
        raise
    text = as_yaml(fitted, probe, datetime.now(timezone.utc).date().isoformat())
    if not write_text(file, lambda: text):
        return False
    if STANDARD_OUTPUT not in (file, json_target):
        slo = for_the_policy("slo for an interactive tier", recommended_slo(predicted(fitted.model, fitted.outside_us)))
        uses = f"sidecar simulate TRACE POLICY --engine-model {file}, sidecar init --engine-model {file}"
        say(f"{report(fitted, probe)}\n\n{slo}\n\nwritten to {file}: {uses}")
    return write_json(json_target, figures(fitted, probe))
