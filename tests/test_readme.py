"""What README.md and docs/ show is run, and prints what they say it prints. Their links lead somewhere."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LINKING = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
END_OF_BLOCK = "\x1e"


class Block(NamedTuple):
    language: str
    line: int  # of its first line of code, from 0
    code: list[str]
    run: bool


def blocks(text):
    """The fenced blocks of a page. One is not run if the line before it, blank ones aside, says so with a reason."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        if lines[at].startswith("```"):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].rstrip() == "```")
            before = next((line for line in reversed(lines[:at]) if line.strip()), "")
            found.append(Block(lines[at][3:].strip(), at + 1, lines[at + 1 : end], not NOT_RUN.fullmatch(before)))
            at = end
        at += 1
    return found


def examples(text):
    """The python blocks that run, each with the output that the page promises for it, or None."""
    found, lines = blocks(text), text.splitlines()
    for block, following in zip(found, found[1:] + [None] * bool(found), strict=True):
        if block.language == "python" and block.run:
            between = lines[block.line + len(block.code) + 1 : following.line - 1] if following else []
            shown = following and following.language == "text" and not "".join(between).strip()
            yield block, "\n".join(following.code) + "\n" if shown else None


def script(found):
    """The blocks as one program in which each line has the number that it has on the page, for the traceback's sake."""
    lines = []
    for block, _ in found:
        lines += [""] * (block.line - len(lines)) + block.code + [f"print({END_OF_BLOCK!r}, flush=True)"]
    return "\n".join(lines) + "\n"


def check(text, folder):
    """Run the examples of a page in a process of their own, and return what differs from what the page says."""
    found = list(examples(text))
    program = folder / "page.py"
    program.write_text(script(found), encoding="utf-8")
    command = [sys.executable, "-W", "error", program.name]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    if result.returncode or result.stderr:
        return f"{result.stdout}\n{result.stderr}"
    printed = result.stdout.split(END_OF_BLOCK + "\n")
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    wrong = [
        f"line {block.line + 1} should print\n{expected}\nand printed\n{got}"
        for (block, expected), got in zip(found, printed, strict=False)
        if expected is not None and not checker.check_output(expected, got, flags)
    ]
    return "\n".join(wrong)


@pytest.mark.parametrize("page", [p for p in PAGES if list(examples(p.read_text("utf-8")))], ids=lambda p: p.name)
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, tmp_path):
    assert not (differs := check(page.read_text("utf-8"), tmp_path)), differs


def fenced(language, *code):
    return "\n".join([f"```{language}", *code, "```", ""])


@pytest.mark.parametrize(
    ("page", "differs"),
    [
        ("Text\n" + fenced("python", "print(1 + 1)") + "\n" + fenced("text", "2"), ""),
        (fenced("python", "x = 1") + "then\n" + fenced("python", "print(x)") + fenced("text", "1"), ""),
        (fenced("python", "print(0.123456)") + fenced("text", "0.12..."), ""),
        (fenced("python", "print(1)") + "Unrelated:\n" + fenced("text", "2"), ""),
        ("<!-- not run: shows a signature -->\n\n" + fenced("python", "nonsense("), ""),
        (fenced("sh", "make test"), ""),
        (fenced("python", "print(1 + 1)") + fenced("text", "3"), "line 2 should print\n3\n\nand printed\n2\n"),
        ("\n\n" + fenced("python", "1 / 0"), "line 4, in <module>\n    1 / 0"),
        (fenced("python", "import warnings", "warnings.warn('old')"), "UserWarning: old"),
        ("<!-- not run: -->\n" + fenced("python", "1 / 0"), "ZeroDivisionError"),
    ],
)
def test_the_check_of_examples_can_fail(page, differs, tmp_path):
    found = check(page, tmp_path)
    assert differs in found if differs else found == ""


@pytest.mark.parametrize("page", LINKING, ids=lambda p: p.name)
def test_links_between_files_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    made = {"reference"}  # written when the documentation is built, which checks these links itself
    missing = [t for t in targets if Path(t).parts[0] not in made and not (page.parent / t).exists()]
    assert not missing
