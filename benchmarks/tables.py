"""Tables and plots of what is in docs/results."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
RECORDS = RESULTS / "runs.json"


def read_records():
    """Returns {name of a run: its record}."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
