from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from millpond.train.chart import Chart, Line, compact, ticks
from millpond.train.compose import settings_from_overrides
from millpond.train.loggers import MetricsFile
from millpond.train.report import write_report
from millpond.train.run_state import RunDirectory, write_json

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian package chromium)")

SUMMARY: dict[str, Any] = {
    "status": "completed",
    "algorithm": "sac",
    "env": "Pendulum-v1",
    "collected_frames": 2000,
    "eval_return_first": -1190.25,
    "eval_return_last": -163.5,
    "peak_rss_mb": 900.0,
    "wall_s": 75.0,
    "restarts": 0,
    "checks": {
        "frames_collected": {"ok": True, "detail": "2000 collected of total_frames=2000"},
        "policy_explores": {"ok": False, "detail": "the collection policy became deterministic"},
    },
    "command": "millpond train env=Pendulum-v1",
    "versions": {"torch": "2"},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run")
    metrics = MetricsFile(run.metrics)
    for step in range(1, 21):
        row = {"collect/episode_return": -1200.0 + 50 * step, "replay/samples_per_insert": 256 + 1 / step}
        if step > 2:
            row["loss/critic"] = 1 / step
        if step % 5 == 0:
            row |= {"eval/return_mean": -100.0 * (20 - step), "eval/return_min": -2000, "eval/return_max": 0}
            row["eval/frames"] = 100 * step - 50
        metrics.write(100 * step, row)
    metrics.close()
    write_json(run.summary, SUMMARY)
    return run


def write(run: RunDirectory, **summary: Any) -> str:
    write_json(run.summary, SUMMARY | summary)
    return write_report(run, settings_from_overrides([]).to_dict()).read_text()


class Page(HTMLParser):
    """Tags with their attributes, and whether all of them are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing_from_outside(run: RunDirectory):
    text = write(run)
    page = Page(text)
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe")
        assert not {"src", "href"} & set(attributes), (tag, attributes)
    assert "@import" not in text
    assert "url(" not in text
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/2000/svg", "", text)


def test_curves_checks_summary_and_configuration_are_there(run: RunDirectory):
    text = write(run)
    for part in (
        "Evaluation return: mean from −1500 to 0",
        "Training episodes: return",
        "Samples per item inserted",
        "loss/critic",
        "2000 collected of total_frames=2000",
        "✗ failed",
        "versions.torch",
        "replay.samples_per_insert",
        "−1,190",
    ):
        assert part in text, part
    assert text.count('class="target"') == 1


def test_a_run_that_failed_before_its_first_report_has_a_page_too(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    MetricsFile(run.metrics).close()
    text = write(run, status="failed", error_type="WorkerFailed", error="worker 0: <boom>", checks={})
    assert Page(text).open == []
    assert "WorkerFailed: worker 0: &lt;boom&gt;" in text
    assert "before it could check itself" in text


def test_what_users_wrote_is_text_and_never_markup(run: RunDirectory):
    evil = "</script><img src=x onerror=alert(1)>"
    text = write(run, command=evil, env=evil)
    assert "<img" not in text
    assert Page(text).open == []


def test_small_videos_travel_inside(run: RunDirectory):
    run.videos.mkdir()
    (run.videos / "frame-1000.mp4").write_bytes(b"\x00\x01\x02")
    assert 'src="data:video/mp4;base64,AAEC"' in write(run)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3, 5), (0.001, 0.0013), (-1500, 0), (0, 2e7), (9.99, 10.01), (1e-9, 2e-9)]
)
def test_ticks_are_round_and_inside(low: float, high: float):
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 12
    assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (20000, "20k"), (1.5e6, "1.5M"), (-120, "−120"), (0.25, "0.25"), (2e-7, "2.0e−07"), (9999, "9999")],
)
def test_numbers_on_an_axis(value: float, text: str):
    assert compact(value) == text


@pytest.mark.parametrize("points", [[], [3.0], [2.0, 2.0, 2.0], [0.0, 0.0], [-1e30, 1e30], list(range(5000))])
def test_any_line_can_be_drawn(points: list[float]):
    svg = Chart(title="any", lines=[Line("it", range(len(points)), points)]).svg()
    assert Page(svg).open == []
    assert not re.search(r"nan|inf", svg)
    assert len(svg) < 120_000


# ------------------------------------------------------------------ in a real browser


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    def open_page(page: Path, *options: str) -> str:
        done = subprocess.run(
            [
                str(CHROMIUM),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                f"--user-data-dir={tmp_path / 'profile'}",
                *options,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
        return done.stdout

    return open_page


PROBE = """<script>
const told = [];
const svg = [...document.querySelectorAll("svg.chart")].find((svg) => svg.getBoundingClientRect().width > 0);
const box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 20, clientY: box.top + 20 }));
told.push(`tip=${svg.parentNode.querySelector(".tip").innerText.replace("\\n", "; ")}`);
svg.dispatchEvent(new PointerEvent("pointerleave"));
told.push(`hidden=${svg.parentNode.querySelector(".tip").hidden}`);
told.push(`overflow=${document.documentElement.scrollWidth > innerWidth}`);
told.push(`paper=${getComputedStyle(document.body).backgroundColor}`);
told.push(`requests=${performance.getEntriesByType("resource").length}`);
document.title = told.join(" | ");
</script></body>"""


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_a_browser_shows_values_under_the_pointer_and_a_phone_need_not_scroll_sideways(
    run: RunDirectory, browse: Callable[..., str], width: int, dark: bool
):
    page = run.path / "probe.html"
    page.write_text(write(run).replace("</body>", PROBE))
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    text = browse(page, f"--window-size={width},900", "--dump-dom", *theme)
    told = dict(part.split("=", 1) for part in re.search(r"<title>(.*?)</title>", text)[1].split(" | "))  # type: ignore[index]
    assert told == {
        "tip": "1,950 frames; mean: 0",
        "hidden": "true",
        "overflow": "false",
        "paper": "rgb(20, 23, 26)" if dark else "rgb(251, 251, 249)",
        "requests": "0",
    }
