"""``report.html``: what a run did, on one page that needs nothing but itself.

Written from the files of a run directory alone, so that it can be made again for any run, also for one that failed.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from millpond.train.chart import Chart, Line, compact
from millpond.train.loggers import read_metrics
from millpond.train.run_state import RunDirectory, read_json, write_text

_POLICY = (  # the browser itself refuses whatever would need the network
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " img-src data:; media-src data: file: 'self'"
)
_EMBED_BYTES = 4 << 20  # a video up to this size travels inside the page

# What stands on the page first; every other number that was reported follows under its namespace.
_TOGETHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Training episodes: return", ("collect/episode_return",)),
    ("Training episodes: length", ("collect/episode_length",)),
    ("Throughput: frames/s", ("throughput/frames_per_s",)),
    ("Throughput: updates/s", ("throughput/updates_per_s",)),
    ("Samples per item inserted", ("replay/samples_per_insert",)),
    ("Actions in replay", ("replay/action_std", "replay/action_absmax", "replay/action_saturation")),
    ("Lag of the sampled policy (versions)", ("lag/policy_version",)),
    ("Replay size (items)", ("replay/size",)),
)
_OWN_CHARTS = ("loss/", "value/", "policy/", "optim/")
_NO_CHART = ("optim/steps",)


def write_report(run: RunDirectory, config: Mapping[str, Any]) -> Path:
    """Write ``report.html`` from ``metrics.csv`` and ``summary.json``. ``config`` holds the settings of the run."""
    rows = _numbers(run.metrics)
    page = render(rows, summary=read_json(run.summary), config=config, videos=sorted(run.videos.glob("*.mp4")))
    write_text(run.report, page)
    return run.report


def render(
    rows: Sequence[Mapping[str, float]],
    *,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    videos: Sequence[Path] = (),
) -> str:
    """The page as text."""
    script = _asset("report.js")
    title = f"{summary.get('algorithm', '?')} on {summary.get('env', '?')}"
    parts = [
        _header(title, summary),
        '<h2>Curves</h2><div class="charts">',
        *_charts(rows, config),
        "</div>",
        *_videos(videos),
        "<h2>Checks</h2>",
        checks_table(summary.get("checks") or {}),
        "<h2>Summary</h2>",
        _table(_flat({name: value for name, value in summary.items() if name != "checks"})),
        "<details open><summary>Configuration</summary>",
        _table(_flat(config)),
        f"</details><script>{script}</script>",
    ]
    return page(title, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page that needs nothing but itself, from what stands in its body."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)} · millpond</title><style>{_asset('report.css')}</style></head><body>",
        *parts,
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def _asset(name: str) -> str:
    return resources.files("millpond.train").joinpath(name).read_text(encoding="utf-8")


def _header(title: str, summary: Mapping[str, Any]) -> str:
    status = str(summary.get("status", "?"))
    kind = "good" if status in ("completed", "stopped", "interrupted") else "bad"
    figures = (
        ("Return before", number(summary.get("eval_return_first"))),
        ("Return after", number(summary.get("eval_return_last"))),
        ("Frames", number(summary.get("collected_frames"))),
        ("Updates", number(summary.get("optimizer_steps"))),
        ("Wall time", duration(summary.get("wall_s"))),
        ("Frames/s", number(summary.get("frames_per_s"))),
        ("Updates/s", number(summary.get("updates_per_s"))),
        ("Peak memory", f"{number(summary.get('peak_rss_mb'))} MB"),
    )
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    error = summary.get("error")
    failure = f'<p class="failure">{escape(str(summary.get("error_type")))}: {escape(str(error))}</p>' if error else ""
    return (
        f'<header><h1>{escape(title)} <span class="status {kind}">{escape(status)}</span></h1>'
        f'<p>{escape(str(summary.get("command", "")))}</p>{failure}</header><dl class="figures">{cells}</dl>'
    )


def _charts(rows: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> Iterator[str]:
    x, y = _series(rows, "eval/return_mean", x="eval/frames")
    _, low = _series(rows, "eval/return_min", x="eval/frames")
    _, high = _series(rows, "eval/return_max", x="eval/frames")
    banded = len(low) == len(high) == len(y)
    line = Line("mean", x, y, low if banded else (), high if banded else ())
    yield _figure(
        Chart(title="Evaluation return", lines=[line], marks=True), main=True, note="band: minimum to maximum"
    )
    shown: set[str] = set()
    for title, names in _TOGETHER:
        lines = [Line(name.partition("/")[2], *series) for name in names if (series := _series(rows, name))[0]]
        shown.update(names)
        if lines:
            target = _target(config) if names[0] == "replay/samples_per_insert" else None
            yield _figure(Chart(title=title, lines=lines, target=target), note="dashed: as set" if target else "")
    columns = dict.fromkeys(name for row in rows for name in row)
    for name in columns:
        if name.startswith(_OWN_CHARTS) and name not in shown and name not in _NO_CHART:
            yield _figure(Chart(title=name, lines=[Line(name.partition("/")[2], *_series(rows, name))]))


def _figure(chart: Chart, *, main: bool = False, note: str = "") -> str:
    keys = []
    for number, line in enumerate(chart.lines):
        last = compact(line.y[-1]) if line.y else "no data"
        keys.append(f'<span><i class="c{number % 4}"></i>{escape(line.label)} {escape(last)}</span>')
    caption = (
        f"<figcaption>{escape(chart.title)}{''.join(keys)}{f'<span>{escape(note)}</span>' if note else ''}</figcaption>"
    )
    if not main:
        return f'<figure>{caption}<div class="plot">{chart.svg()}</div></figure>'
    wide, narrow = chart.svg(width=980, height=320), chart.svg()
    plots = f'<div class="plot wide">{wide}</div><div class="plot narrow">{narrow}</div>'
    return f'<figure class="main">{caption}{plots}</figure>'


def _videos(videos: Sequence[Path]) -> Iterator[str]:
    """The last video, inside the page where it is small enough and as a link beside it otherwise."""
    if not videos:
        return
    last = videos[-1]
    source = f"videos/{last.name}"
    if last.stat().st_size <= _EMBED_BYTES:
        source = "data:video/mp4;base64," + base64.b64encode(last.read_bytes()).decode("ascii")
    yield f"<h2>Video</h2><figure><figcaption>{escape(last.stem)}</figcaption>"
    yield f'<video controls loop muted playsinline src="{escape(source)}"></video></figure>'


def checks_table(checks: Mapping[str, Mapping[str, Any]]) -> str:
    """The checks of one run, as HTML."""
    if not checks:
        return "<p>The run ended before it could check itself.</p>"
    rows = (
        f'<tr><th>{escape(name)}</th><td class="mark-cell {"good" if check["ok"] else "bad"}">'
        f"{'✓ ok' if check['ok'] else '✗ failed'}</td><td>{escape(str(check['detail']))}</td></tr>"
        for name, check in checks.items()
    )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(_plain(value))}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table>{"".join(cells)}</table></div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _series(rows: Sequence[Mapping[str, float]], name: str, *, x: str = "frames") -> tuple[list[float], list[float]]:
    points = sorted({row[x]: row[name] for row in rows if name in row and x in row}.items())
    return [point[0] for point in points], [point[1] for point in points]


def _numbers(path: Path) -> list[dict[str, float]]:
    _, rows = read_metrics(path)
    return [{name: float(cell) for name, cell in row.items() if cell != ""} for row in rows]


def _target(config: Mapping[str, Any]) -> float | None:
    replay = config.get("replay", {})
    value = replay.get("samples_per_insert")
    if value is None and replay.get("consume_after_n_samples") is None:
        value = replay.get("batch_size")
    return float(value) if value is not None else None


def number(value: Any) -> str:
    """For people; a dash where there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"
    return text.replace("-", "−")


def duration(seconds: Any) -> str:
    """For people; a dash where there is none."""
    if not isinstance(seconds, int | float):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
