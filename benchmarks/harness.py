"""Measure variants fairly, and write down on what.

    timings = compare({"bare gather": gather, "ReplayBuffer.sample": sample})
    report("sample", "Sampling 256 of 1 M items", rows(timings), notes="One thread.")

Variants take turns in every round, in a shuffled order, so that a slow minute of the machine hits all of them; the
ratio to the first variant is taken within each round, and the median of those is reported. Absolute times drift by a
third from day to day, ratios do not.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
PACKAGES = ("millpond", "torch", "tensordict", "numpy", "gymnasium", "mujoco", "numba", "ray")

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for one call of a variant, over rounds."""

    name: str
    median_s: float
    low_s: float  # first and last decile of the rounds
    high_s: float
    ratio: float  # to the first variant: the median of the ratios within a round
    rounds: int
    calls_per_round: int


def compare(
    variants: Mapping[str, Callable[[], object]], *, rounds: int = 40, round_s: float = 0.02, seed: int = 0
) -> list[Timing]:
    """Time each variant; the first is what the others are compared with.

    A round calls a variant as often as fills `round_s` seconds, at least once. Garbage is collected between rounds and
    not within them.

    Raises:
        ValueError: no variants, or fewer than one round.
    """
    if not variants or rounds < 1:
        raise ValueError(f"compare() needs a variant and a round, got {len(variants)} and {rounds}")
    calls = {name: _calls_that_fill(round_s, call) for name, call in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    order, shuffle = list(variants), random.Random(seed).shuffle
    enabled = gc.isenabled()
    try:
        for _ in range(rounds):
            shuffle(order)
            gc.collect()
            gc.disable()
            for name in order:
                times[name].append(_seconds(variants[name], calls[name]) / calls[name])
            if enabled:
                gc.enable()
    finally:
        if enabled:
            gc.enable()
    base = times[next(iter(variants))]
    return [_timing(name, times[name], base, calls[name]) for name in variants]


def _seconds(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def _calls_that_fill(round_s: float, call: Callable[[], object]) -> int:
    call()  # the first call pays for caches, lazy imports and compilation
    calls = 1
    while (taken := _seconds(call, calls)) < round_s / 2:
        calls *= 2
    return max(1, round(calls * round_s / taken))


def _timing(name: str, times: list[float], base: list[float], calls: int) -> Timing:
    ordered = sorted(times)
    decile = len(ordered) // 10
    ratios = [mine / theirs for mine, theirs in zip(times, base, strict=True)]
    return Timing(
        name=name,
        median_s=statistics.median(ordered),
        low_s=ordered[decile],
        high_s=ordered[-1 - decile],
        ratio=statistics.median(ratios),
        rounds=len(times),
        calls_per_round=calls,
    )


def rows(timings: Sequence[Timing], *, label: str = "variant", **columns: Cell) -> list[dict[str, Cell]]:
    """Timings as table rows in microseconds; `columns` are put in front of each, such as `items=256`."""
    return [
        {
            **columns,
            label: t.name,
            "µs": round(t.median_s * 1e6, 2),
            "10 %": round(t.low_s * 1e6, 2),
            "90 %": round(t.high_s * 1e6, 2),
            "ratio": round(t.ratio, 2),
        }
        for t in timings
    ]


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """A Markdown table; the columns are the keys of the first row."""
    header = list(rows[0])
    lines = [header, ["---:" if isinstance(rows[0][key], int | float) else "---" for key in header]]
    lines += [[str(row[key]) for key in header] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> dict[str, str]:
    """The processor, memory, system, versions and commit that figures belong to. Names no host and no folder."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, {' '.join(platform.libc_ver())}".strip(
            ", "
        ),
        "python": platform.python_version(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    if torch := sys.modules.get("torch"):
        facts["torch threads"] = str(torch.get_num_threads())
    for package in PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return facts


def commit() -> str:
    """The commit that is checked out, with `+changes` where the work tree differs; `unknown` outside a repository."""
    try:
        described = _git("rev-parse", "--short=12", "HEAD")
        return described + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def report(
    name: str, title: str, rows: Sequence[Mapping[str, Cell]], *, notes: str = "", folder: Path = RESULTS
) -> None:
    """Print the table, and write it as `<folder>/<name>.md` and `<name>.json` with the machine it was made on.

    `title` says what is measured, `notes` what a reader must know to judge it. All rows have the same keys.

    Raises:
        ValueError: no rows, or rows whose keys differ.
    """
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError(f"report({name!r}) needs rows, all with the same keys")
    facts = machine()
    parts = [f"# {title}", table(rows)]
    parts += [notes] if notes else []
    parts.append("; ".join(f"{key} {value}" for key, value in facts.items()))
    text = "\n\n".join(parts) + "\n"
    print(text, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    result = {"name": name, "title": title, "notes": notes, "machine": facts, "rows": [dict(row) for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
