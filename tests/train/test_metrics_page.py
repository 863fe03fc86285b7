"""docs/metrics.md names every metric, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from millpond.collect.rollout import RECENT
from millpond.train.loggers import INDEX_COLUMNS, METRIC_COLUMNS

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")


def test_every_metric_is_explained_once_with_its_unit_and_window():
    algorithms = "\n".join(path.read_text("utf-8") for path in (ROOT / "src" / "millpond" / "algos").glob("*.py"))
    reported = {*INDEX_COLUMNS, *METRIC_COLUMNS, *re.findall(r'"((?:loss|value|policy|optim)/\w+)"', algorithms)}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    names = [cells[0].strip("`") for cells in rows]
    assert sorted(names) == sorted(reported)
    for cells in rows:
        moments = cells[0] in ("`eval/frames`", "`eval/version`", "`eval/wall_s`")
        assert all(cells) or (moments and cells[2] == ""), cells
    assert f"the last {RECENT} episodes of each collector" in PAGE
