"""``millpond inspect [PATH]``: what a buffer holds, and who waits for what. Looking at it changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from millpond.core.errors import InvalidArgument, NotShareable
from millpond.remote.cluster import SCHEME, inspect_owner, spell_remote
from millpond.replay.inspection import Report, inspect, shared_buffers
from millpond.shm.directory import PREFIX, reap

REPLAY, LIVE = "replay.millpond", ".replay"  # as training names them; what trains is not needed to look
HELP = """\
PATH is the directory of a buffer in shared memory or on disk, a checkpoint file, a run or one of its checkpoints, or
ray://NAME for a buffer in the Ray cluster of $RAY_ADDRESS or of this machine. Of a run that goes on, it is the buffer
that it uses now; of another, the one in its newest checkpoint. Without PATH: the buffers in shared memory.
A buffer is looked at without its lock; its counters and its owner stay what they are.
"""


def main(words: Sequence[str]) -> int:
    """Run ``millpond inspect WORDS``."""
    parser = argparse.ArgumentParser(
        prog="millpond inspect", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", help="a buffer's directory, a checkpoint file, or ray://NAME")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="show the N youngest items (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON, one line for each look")
    parser.add_argument("--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="look again and again")
    parser.add_argument("--count", type=int, metavar="N", help="with --watch: stop after N looks")
    parser.add_argument("--reap", action="store_true", help="first remove what owners that were killed left behind")
    asked = parser.parse_args(words)
    if asked.watch is not None and not 0 <= asked.watch < float("inf"):
        raise InvalidArgument(f"--watch takes a number of seconds, 0 or more, not {asked.watch}")
    if asked.count is not None and (asked.count < 1 or asked.watch is None):
        raise InvalidArgument("--count takes a number of looks, at least 1, and needs --watch")
    if asked.watch is not None and asked.path is None:
        raise InvalidArgument("--watch needs the PATH of a buffer")
    if asked.reap:
        _reap(as_json=asked.json)
    if asked.path is not None:
        _show(asked)
    elif not asked.reap:
        _list(as_json=asked.json)
    return 0


def _look(path: str, rows: int) -> Report:
    if path.startswith(SCHEME):
        return inspect_owner(path, rows=rows)
    run = Path(path)
    live, saved = run / LIVE, sorted(run.glob(f"checkpoints/*/{REPLAY}"))
    if (run / REPLAY).exists():
        return inspect(run / REPLAY, rows=rows)
    if live.is_file() and (place := live.read_text(encoding="utf-8")):
        with contextlib.suppress(NotShareable, OSError):  # gone, with its run
            report = _look_at_live(place, rows)
            if report["owner"] and report["owner"]["alive"]:
                return {"shows": "the buffer that this run uses now", **report}
    if saved:
        return {
            "shows": "the newest checkpoint of this run, since no buffer of its is live",
            **inspect(saved[-1], rows=rows),
        }
    if (run / "config.yaml").is_file():
        raise NotShareable(f"{path}: this run has no live buffer that others may look at, and none in a checkpoint")
    return inspect(run, rows=rows)


def _look_at_live(place: str, rows: int) -> Report:
    return inspect_owner(place, rows=rows) if place.startswith(SCHEME) else inspect(place, rows=rows)


def _reap(*, as_json: bool) -> None:
    removed = [str(path) for path in reap()]
    if as_json:
        print(json.dumps({"removed": removed}))
        return
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print("nothing to remove")


def _list(*, as_json: bool) -> None:
    found = []
    for path in shared_buffers():
        try:
            found.append(inspect(path, rows=0))
        except (NotShareable, OSError):  # gone, or not finished, since it was listed
            continue
    if as_json:
        print(json.dumps({"buffers": found}, allow_nan=False))
        return
    for report in found:
        figures = report["counters"]
        print(f"{report['path']}   {figures['size']:,} of {figures['capacity']:,} items   {_owner(report)}")
    if not found:
        print("no buffer in shared memory")


def _show(asked: argparse.Namespace) -> None:
    if asked.watch is None:
        print(_spell(_look(asked.path, asked.rows), as_json=asked.json))
        return
    looks = _looks(asked)
    if asked.json:
        for report in looks:
            print(_spell(report, as_json=True), flush=True)
        return
    try:
        from rich.live import Live
        from rich.text import Text
    except ModuleNotFoundError:
        raise InvalidArgument("--watch needs the package 'rich', or --json") from None
    with Live(Text(""), auto_refresh=False) as screen:
        for report in looks:
            screen.update(Text(_spell(report, as_json=False)), refresh=True)


def _looks(asked: argparse.Namespace) -> Iterator[Report]:
    """A report now and one after each pause; ends when the buffer is removed."""
    first = _look(asked.path, asked.rows)
    yield first
    done = 1
    while asked.count is None or done < asked.count:
        time.sleep(asked.watch)
        try:
            report = _look(asked.path, asked.rows)
        except NotShareable:
            return
        if report.get("shows") != first.get("shows"):  # the run has ended
            return
        yield report
        done += 1


# ---------------------------------------------------------------------- words
def _spell(report: Report, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(report, allow_nan=False)
    parts = [_head(report), _counters(report["counters"])]
    if "lock" in report:
        parts += [_who_waits(report), _rules(report)]
    else:
        parts.append(f"sampler    {_sampler(report['sampler'])}")
    if "remote" in report:
        parts.insert(1, spell_remote(report["remote"]))
    parts += [_episodes(report["episodes"]), _rows(report["rows"])]
    return "\n".join(part for part in parts if part)


def _head(report: Report) -> str:
    figures, schema = report["counters"], report["schema"]
    size, capacity = figures["size"], figures["capacity"]
    lines = [
        report["path"],
        *([f"shows      {report['shows']}"] if "shows" in report else []),
        f"kind       {report['kind']}{', closed' if report.get('closed') else ''}",
    ]
    if "owner" in report:
        lines.append(f"owner      {_owner(report)}")
    lines.append(f"fill       {size:,} of {capacity:,} items ({size / capacity:.0%})")
    if schema is None:
        return "\n".join([*lines, "schema     nothing was written yet"])
    lines.append(f"schema     {schema['row_nbytes']} bytes an item")
    width = max(map(len, schema["fields"]))
    return "\n".join([*lines, *(f"           {name:<{width}}  {kind}" for name, kind in schema["fields"].items())])


def _owner(report: Report) -> str:
    owner = report["owner"]
    if owner is None:
        return "nobody; the next process that attaches becomes it"
    if owner["alive"]:
        return f"process {owner['pid']}"
    if report["path"].rpartition("/")[2].startswith(PREFIX):
        return f"process {owner['pid']}, which is gone: millpond inspect --reap removes this"
    return f"process {owner['pid']}, which is gone: the next process that attaches becomes it"


def _counters(figures: dict[str, Any]) -> str:
    width = max(map(len, figures))
    cells = [f"{name:<{width}}  {f'{v:,}' if type(v) is int else v!s:>14}" for name, v in figures.items()]
    half = -(-len(cells) // 2)
    left, right = cells[:half], [*cells[half:], ""]
    pairs = zip(left, right[:half], strict=True)
    return "counters\n" + "\n".join(f"           {a}    {b}".rstrip() for a, b in pairs)


def _who_waits(report: Report) -> str:
    lines = [
        f"           {w['role']} waits to {'extend' if w['role'] == 'producer' else 'sample'} {w['need']} for "
        f"{w['since_s']:.1f} s: process {w['pid']}, thread {w['thread']}{'' if w['alive'] else ' (dead)'}"
        for w in report["waiting"]
    ]
    lock = report["lock"]
    holder, writing = lock["holder"], lock["writing"]
    text = "free" if holder is None else f"held by thread {holder['thread']} of process {holder['pid'] or '(gone)'}"
    if writing is not None:
        text += f"; process {writing['pid']} has begun to change {writing['items']} items"
    return "\n".join([f"waiting    {len(lines) or 'nobody'}", *lines, f"lock       {lock['kind']}, {text}"])


def _rules(report: Report) -> str:
    flow = ", ".join(f"{name}={value}" for name, value in report["flow"].items() if value is not None)
    consumes = report["consume_after_n_samples"]
    lines = [
        f"flow       {flow}",
        f"sampler    {_sampler(report['sampler'])}, batch_size={report['batch_size']}, prefetch={report['prefetch']}"
        + (f", consume_after_n_samples={consumes}" if consumes else ""),
        *(f"{op:<10} {text}" for op, text in report["explain"].items()),
    ]
    return "\n".join(lines)


def _sampler(spelled: Any) -> str:
    if spelled is None:
        return "one of the user's"
    inner = (f"{k}={_sampler(v) if k == 'base' else v!r}" for k, v in spelled["config"].items())
    return f"{spelled['name']}({', '.join(inner)})"


def _episodes(found: Report | None) -> str:
    if found is None:
        return ""
    return (
        f"episodes   {found['episodes']:,}, of which {found['complete']:,} complete; "
        f"{found['shortest']} to {found['longest']} items, {found['mean']:.1f} on average"
    )


def _rows(rows: list[Report]) -> str:
    lines = []
    for row in rows:
        lines.append(f"item       number {row['number']:,}, slot {row['slot']:,}")
        width = max(map(len, row["values"]))
        lines += [f"           {name:<{width}}  {_short(value)}" for name, value in row["values"].items()]
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
