"""Run benchmarks, each in a process of its own: `python -m benchmarks [NAME…]`; `--list` shows the names."""

from __future__ import annotations

import argparse
import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """The modules beside this one that define `main()`, found without importing them."""
    found = []
    for module in pkgutil.iter_modules([str(HERE)]):
        tree = ast.parse((HERE / f"{module.name}.py").read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in functions and not module.name.startswith("_"):
            found.append(module.name)
    return sorted(found)


def main() -> int:
    """Run the benchmarks that are named, or all; the exit status is 1 when one of them fails."""
    known = names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(known) or 'none yet'} (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args()
    if unknown := sorted(set(options.name) - set(known)):
        parser.error(f"no benchmark called {', '.join(unknown)}; there are: {', '.join(known) or 'none yet'}")
    if options.list:
        print("\n".join(known))
        return 0
    failed = []
    for name in options.name or known:
        print(f"== {name}", flush=True)
        # A process each: no benchmark sees another's memory, threads or warmed caches.
        run = subprocess.run([sys.executable, "-c", f"from benchmarks.{name} import main; main()"], cwd=HERE.parent)
        if run.returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
