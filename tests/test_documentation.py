"""The built pages: public modules only, each heading once, and a search that needs no server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-q",
        "--strict",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(folder),
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_reference_page_is_of_a_public_module_and_has_each_heading_once(site: Path):
    seen: dict[str, str] = {}
    for path in (site / "reference").glob("*.html"):
        assert not any(part.startswith("_") for part in path.stem.split("."))
        body = path.read_text("utf-8").partition('role="main"')[2]
        assert len(re.findall("<h1", body)) == 1, path.name
        for heading in re.findall(r'<h[1-6] id="([^"]*)"', body):
            assert seen.setdefault(heading, path.name) == path.name, heading
            assert body.count(f'id="{heading}"') == 1
    assert "millpond.replay.ReplayBuffer.sample" in seen
    internal = ("millpond.replay.engine", "millpond.shm.futex", "millpond.train.trainer")
    assert not any((site / "reference" / f"{name}.html").exists() for name in internal)


def test_what_the_pages_import_is_in_the_reference(site: Path):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    modules = set(re.findall(r"^from (millpond[\w.]*) import", text, re.MULTILINE))
    assert len(modules) > 5
    for name in modules:
        assert (site / "reference" / f"{name}.html").exists(), name


def test_the_search_of_a_page_from_disk_fetches_nothing(site: Path):
    """A page from disk may load scripts, and may neither fetch nor start workers."""
    search = site / "search"
    loaded = set(re.findall(r'"([\w.]+\.js)"', (search / "main.js").read_text("utf-8")))
    assert loaded == {"lunr.js", "search_index.js"}
    for name in (*loaded, "main.js"):
        text = (search / name).read_text("utf-8")
        if name != "search_index.js":
            assert not re.search(r"XMLHttpRequest|fetch\(|new Worker|importScripts|\$\.get", text), name
    index = (search / "search_index.js").read_text("utf-8")
    found = json.loads(index.removeprefix("var search_index = ").rstrip(";\n"))["docs"]
    assert any(page["location"].startswith("replay.html") for page in found)
