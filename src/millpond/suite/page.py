"""``suite.html``: each check of each run, on one page that needs nothing but itself and links to the runs' own."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from millpond.suite.record import FAILED, PASSED, TIMEOUT, RunRecord, SuiteRecord
from millpond.train.report import checks_table, duration, number, page
from millpond.train.run_state import write_text

_BAD = (FAILED, TIMEOUT)


def write_page(record: SuiteRecord) -> None:
    """Write ``suite.html`` anew."""
    write_text(record.directory / "suite.html", render(record))


def render(record: SuiteRecord) -> str:
    """The page as text."""
    counts = record.counts()
    figures = {"Runs": len(record.runs), **{status.capitalize(): count for status, count in counts.items() if count}}
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{count}</dd></div>" for name, count in figures.items())
    title = f"Suite {record.mode}"
    parts = [
        f"<header><h1>{escape(title)} {_status(record.status)}</h1><p>{escape(record.command)}</p></header>",
        f'<dl class="figures">{cells}<div><dt>Wall time</dt><dd>{escape(duration(record.wall_s))}</dd></div></dl>',
        "<h2>Runs</h2>",
        _runs(record),
        "<h2>Checks</h2>",
        _matrix(record),
        *(part for run in record.runs for part in _details(run)),
    ]
    return page(title, parts)


def _status(status: str) -> str:
    kind = "good" if status == PASSED else "bad" if status in _BAD else ""
    return f'<span class="status {kind}">{escape(status)}</span>'


def _runs(record: SuiteRecord) -> str:
    heads = ("run", "status", "time", "frames", "updates", "return before", "return after", "peak memory", "problem")
    rows = []
    for run in record.runs:
        told = run.summary
        name = f'<a href="#{escape(run.name)}">{escape(run.name)}</a>'
        memory = told.get("peak_rss_mb")
        numbers = (
            duration(run.wall_s) if run.wall_s else "–",
            *(number(told.get(key)) for key in ("collected_frames", "optimizer_steps")),
            *(number(told.get(key)) for key in ("eval_return_first", "eval_return_last")),
            f"{number(memory)} MB" if memory else "–",
            run.problem or "",
        )
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in numbers)
        rows.append(f"<tr><th>{name}</th><td>{_status(run.status)}</td>{cells}</tr>")
    return _table(heads, rows)


def _matrix(record: SuiteRecord) -> str:
    """A row for each check, a column for each run."""
    checks = list(dict.fromkeys(name for run in record.runs for name in run.checks))
    if not checks:
        return "<p>No run has checked itself yet.</p>"
    rows = []
    for name in checks:
        cells = "".join(_mark(run.checks.get(name, {}).get("ok")) for run in record.runs)
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return _table(("check", *(run.name for run in record.runs)), rows)


def _mark(ok: bool | None) -> str:
    if ok is None:
        return "<td>–</td>"
    return f'<td class="mark-cell {"good" if ok else "bad"}">{"✓ ok" if ok else "✗ failed"}</td>'


def _details(run: RunRecord) -> Iterator[str]:
    yield f'<h2 id="{escape(run.name)}">{escape(run.name)} {_status(run.status)}</h2>'
    links = [f'<a href="{escape(run.name)}.log">output</a>'] if run.command else []
    if run.summary:
        links.insert(0, f'<a href="{escape(run.run_dir)}/report.html">report with the curves</a>')
    yield f"<p>{escape(run.command or 'not begun')} {' · '.join(links)}</p>"
    if run.problem:
        yield f'<p class="failure">{escape(run.problem)}</p>'
    if run.checks:
        yield checks_table(run.checks)


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
