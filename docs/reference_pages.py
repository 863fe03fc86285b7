"""A hook for mkdocs: one reference page for each module, made from its docstrings while the site is built."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add `reference/<module>.md` for every public module that contains anything."""
    source = Path(config.config_file_path).parent / "src"
    for path in sorted(source.glob("millpond/**/*.py")):
        parts = list(path.relative_to(source).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if any(part.startswith("_") for part in parts) or not path.read_text(encoding="utf-8").strip():
            continue
        name = ".".join(parts)
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    return files
