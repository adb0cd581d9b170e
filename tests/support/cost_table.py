"""Writes settings/costs.json: the costs of each shipped model.

This command writes the table, or the rows of some models (a second each):

    PYTHONPATH=.:tests python tests/support/cost_table.py [NAME ...]

golden/costs.json has fvcore's counts of timm's models beside them, and golden/published.json the
accuracy of timm's weights. The site shows all of these (tools/package/docs_tables.py).
"""

import json
import sys
from pathlib import Path

from config import model_files
from models import list_models
from tools.list_models import TABLE, cost_row

TESTS = Path(__file__).resolve().parents[1]
PUBLISHED = json.loads((TESTS / "golden" / "published.json").read_text(encoding="utf-8"))
REFERENCE = json.loads((TESTS / "golden" / "costs.json").read_text(encoding="utf-8"))


def difference(macs: int, name: str) -> float:
    """Returns how far our multiply-adds are from the reference's, as a share of these."""
    return macs / REFERENCE[name]["flops"] - 1


if __name__ == "__main__":
    stored = json.loads(TABLE.read_text(encoding="utf-8")) | {
        file.stem: cost_row(file)
        for file in model_files()
        if file.stem in (sys.argv[1:] or list_models())
    }
    lines = [f'"{name}": {json.dumps(stored[name])}' for name in list_models()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
