"""Hooks for mkdocs: one reference page for each public module, and a search that works from disk."""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# What users import from. A package's page shows what it exports, wherever that is written.
PUBLIC = (
    "millpond.algos.ddpg",
    "millpond.algos.dqn",
    "millpond.algos.sac",
    "millpond.algos.td3",
    "millpond.collect",
    "millpond.collect.policies",
    "millpond.core.errors",
    "millpond.core.roles",
    "millpond.core.schema",
    "millpond.core.spec",
    "millpond.envs",
    "millpond.envs.normalize",
    "millpond.flow.limiter",
    "millpond.learn.group",
    "millpond.learn.learner",
    "millpond.learn.stream",
    "millpond.remote",
    "millpond.replay",
    "millpond.replay.inspection",
    "millpond.train.compose",
    "millpond.train.policy",
    "millpond.train.run",
    "millpond.train.settings",
    "millpond.weights",
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add `reference/<module>.md` for every public module, and one that says what `millpond` itself exports."""
    for name in PUBLIC:
        files.append(File.generated(config, f"reference/{name}.md", content=f"---\ntitle: {name}\n---\n\n::: {name}\n"))
    exported = "\n".join(f"- [`{name}`][{home}.{name}]" for name, home in sorted(_homes(config).items()))
    top = f"---\ntitle: millpond\n---\n\n# millpond\n\n`from millpond import …` brings\n\n{exported}\n"
    files.append(File.generated(config, "reference/millpond.md", content=top))
    return files


def _homes(config: MkDocsConfig) -> dict[str, str]:
    source = (Path(config.config_file_path).parent / "src/millpond/__init__.py").read_text("utf-8")
    named = {node.targets[0].id: node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)}
    return ast.literal_eval(named["_HOMES"])


def on_post_build(*, config: MkDocsConfig) -> None:
    """Give the index as a script, which a page from disk may load, and search with `search.js` on the page itself."""
    search = Path(config.site_dir) / "search"
    index = search / "search_index.json"
    (search / "search_index.js").write_text(f"var search_index = {index.read_text('utf-8')};\n", "utf-8")
    (search / "main.js").write_text((Path(config.docs_dir) / "search.js").read_text("utf-8"), "utf-8")
    for unused in (index, search / "worker.js"):
        unused.unlink()
