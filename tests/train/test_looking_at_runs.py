"""``millpond inspect RUN`` while the run goes on, and afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, Silent

from millpond.cli import main
from millpond.train.compose import settings_from_overrides
from millpond.train.progress import Moment
from millpond.train.run import train


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_shows_the_buffer_that_it_uses_now(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str):
    """A run in one process keeps its buffer to itself, and says so."""
    run, seen = tmp_path / "run", []

    def look() -> tuple[int, dict[str, Any], str]:
        code = main(["inspect", str(run), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out or "{}"), err

    class Looking(Silent):
        def show(self, moment: Moment) -> None:
            if moment.frames:
                seen.append((moment, *look()))

    words = [*SMALL, "collectors=1", f"run_dir={run}", f"execution.mode={mode}", "replay.capacity=321"]
    assert train(settings_from_overrides(words), progress=Looking()).status == "completed"
    assert seen
    for moment, code, report, err in seen:
        if mode == "async":
            assert report["shows"] == "the buffer that this run uses now"
            assert report["counters"]["capacity"] == 321
            assert report["counters"]["write_count"] >= moment.frames > 0
        elif code:
            assert "no live buffer" in err
    code, report, _ = look()
    assert report["shows"] == "the newest checkpoint of this run, since no buffer of its is live"
    assert report["counters"]["write_count"] == 120
