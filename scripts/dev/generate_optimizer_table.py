#!/usr/bin/env python3
"""Write src/simpletuner_gh200/model/optimizer_table.json from what `measure_optimizers.py` finds in each environment.

    .venv/bin/python scripts/dev/generate_optimizer_table.py .venv/bin/python .venv-3.1.6/bin/python

Each interpreter has a SimpleTuner; a folder after a colon is put on its path, for optimizers that are no dependency of
SimpleTuner's (`.venv/bin/python:/path/with/bitsandbytes`). Later ones fill in what earlier ones could not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "src" / "simpletuner_gh200" / "model" / "optimizer_table.json"
MEASURE = Path(__file__).with_name("measure_optimizers.py")


def measured(interpreter: str) -> tuple[str, dict[str, Any]]:
    """(SimpleTuner's version, rows)"""
    python, _, extra = interpreter.partition(":")
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), extra)))
    surroundings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ask = "import importlib.metadata as m; print(m.version('simpletuner'))"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    done = subprocess.run([python, str(MEASURE)], env=surroundings, check=True, stdout=subprocess.PIPE, text=True)
    return version, json.loads(done.stdout.strip().splitlines()[-1])


def row(found: dict[str, Any]) -> dict[str, Any]:
    """One row of the table, from one release's measurement. Raises where a promise does not hold."""
    if not found["same"] or found["unaccounted"] or not found["plain_dicts"] or found["resumes"] is False:
        raise SystemExit(f"not as promised: {found}")
    born = found["bf16"]["born"]
    why_not = None
    if found["across"]:
        why_not = f"counts {', '.join(found['across'])} over all parameters"
    elif not found["streams"]:
        why_not = "another result when parameters are stepped by turns"
    elif born == "none":
        why_not = "keeps no state"
    return {
        "bytes_bf16": found["bf16"]["bytes"],
        "bytes_fp32": found["fp32"]["bytes"] if found["fp32"] else None,
        "reads": found["bf16"]["passes"][0],
        "writes": found["bf16"]["passes"][1],
        "streamable": why_not is None,
        "why_not": why_not,
        "born": born,
    }


NOTHING = {
    "bytes_bf16": None,
    "bytes_fp32": None,
    "reads": 0.0,
    "writes": 0.0,
    "streamable": False,
    "why_not": "does not run",
    "born": "none",
}


def table(measurements: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for version, found in measurements:
        for name, facts in found.items():
            runs = "fails" not in facts
            if runs and rows.get(name, {}).get("bytes_bf16") is None:
                rows[name] = {**row(facts), "releases": [], "fails": None}
            elif not runs and name not in rows:
                rows[name] = {**NOTHING, "releases": [], "fails": facts["fails"]}
            if runs:
                row(facts)  # the promises hold on every release
                rows[name]["releases"].append(version)
    return {"releases": [version for version, _ in measurements], "optimizers": dict(sorted(rows.items()))}


def main() -> int:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    found = table([measured(interpreter) for interpreter in sys.argv[1:]])
    TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{TABLE.relative_to(ROOT)}: {len(found['optimizers'])} optimizers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
