"""What may import what, what `import millpond` loads, and that the versions agree."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import millpond

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OPTIONAL = ("gymnasium", "hydra", "imageio", "mujoco", "numba", "omegaconf", "ray", "tensorboard", "wandb")


def run(*code, **options):
    return subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=100, **options
    )


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower()


def lint(folder):
    """Check the import contracts on the tree in `folder`."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return run(f"import sys; sys.path.insert(0, {str(folder / 'src')!r})", code, cwd=folder)


def test_imports_keep_to_the_contracts():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


FORBIDDEN = [
    ("core", "millpond.replay", "Imports point down"),
    ("core", "millpond", "Imports point down"),  # by way of what `millpond` itself imports
    ("replay", "millpond.envs", "Imports point down"),
    ("flow", "millpond.shm", "Imports point down"),
    ("collect", "millpond.learn", "Imports point down"),
    ("algos", "millpond.weights", "Imports point down"),
    ("train", "millpond.testing", "Imports point down"),
    ("replay", "gymnasium", "gymnasium and mujoco only in envs"),
    ("collect", "mujoco", "gymnasium and mujoco only in envs"),
    ("learn", "hydra", "hydra only in train and above"),
    ("collect", "omegaconf", "hydra only in train and above"),
    ("replay", "ray", "ray only in remote, collect/ray.py and learn/group.py"),
    ("collect", "ray", "ray only in remote, collect/ray.py and learn/group.py"),
    ("train", "numba", "numba only in replay and envs"),
]
ALLOWED = [
    ("envs", "gymnasium"),
    ("train", "hydra"),
    ("conf", "omegaconf"),
    ("replay", "numba"),
    ("remote", "ray"),
    ("remote.transports", "ray"),
    ("collect", "millpond.envs"),
    ("replay", "millpond.shm"),
]


def tree_with(folder, imports):
    """A copy of the package in which each import stands, in a function, in a module of its own: `extra_<number>`."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for number, (package, imported) in enumerate(imports):
        path = folder / "src" / "millpond" / package.replace(".", "/") / f"extra_{number}.py"
        path.write_text(f"def lazily():\n    import {imported}\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the contracts say of every import in FORBIDDEN, by the name of the broken contract."""
    tree = tree_with(tmp_path_factory.mktemp("tree"), [(package, imported) for package, imported, _ in FORBIDDEN])
    result = lint(tree)
    assert result.returncode != 0
    _, found = result.stdout.split("Broken contracts\n")
    pieces = re.split(r"\n(.+)\n-+\n\n", found)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.parametrize("number", range(len(FORBIDDEN)), ids=lambda n: "-imports-".join(FORBIDDEN[n][:2]))
def test_a_forbidden_import_is_seen(number, report):
    package, imported, contract = FORBIDDEN[number]
    assert f"millpond.{package}.extra_{number} -> {imported} " in report[contract]


def test_an_allowed_import_is_not_seen(tmp_path):
    result = lint(tree_with(tmp_path, ALLOWED))
    assert result.returncode == 0, result.stdout


def test_a_package_without_a_place_is_seen(tmp_path):
    tree = tree_with(tmp_path, [])
    package = tree / "src" / "millpond" / "newcomer"
    package.mkdir()
    (package / "__init__.py").touch()
    result = lint(tree)
    assert result.returncode != 0
    assert "- millpond.newcomer\n" in result.stdout


def test_importing_millpond_loads_nothing_optional():
    result = run("import sys, millpond", f"print([name for name in {OPTIONAL} if name in sys.modules])")
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_millpond_works_where_nothing_optional_is_installed():
    result = run(
        "import sys",
        f"sys.modules.update(dict.fromkeys({OPTIONAL}))  # an import of these now raises ImportError",
        "import torch, millpond",
        "buffer = millpond.ReplayBuffer(8, batch_size=4, seed=0)",
        "buffer.extend({'observation': torch.arange(6)})",
        "print(len(buffer.sample()))",
    )
    assert (result.stdout, result.stderr) == ("4\n", "")


def test_the_versions_agree():
    headings = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    assert PROJECT["project"]["version"] == headings[0] == millpond.__version__


def test_every_import_is_a_declared_requirement():
    """Nothing works only because a requirement of a requirement happens to be there."""
    extras = PROJECT["project"]["optional-dependencies"]
    named = [extras[name] for name in ("train", "ray", "wandb", "envpool")]
    asked = PROJECT["project"]["dependencies"] + [requirement for extra in named for requirement in extra]
    declared = {name_of(requirement) for requirement in asked}
    providers = packages_distributions()
    imported = set()
    for path in (ROOT / "src").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - {"millpond"}
    undeclared = {m for m in foreign if declared.isdisjoint(d.lower() for d in providers.get(m, [m]))}
    assert not undeclared


def test_every_requirement_has_its_tested_version():
    """`make install` is reproducible: whatever it asks for by name is pinned, ray and wandb apart."""
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["train"], *extras["dev"], *extras["docs"]]
    names = {name_of(requirement) for requirement in asked}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").split() if "==" in line)
    assert names <= {name.lower() for name in pins}, "pin it in constraints.txt"
    assert "+" not in pins["torch"], "any build of that version"


def test_the_package_carries_its_data():
    package = Path(millpond.__file__).parent
    assert (package / "py.typed").is_file()
    assert list(package.glob("conf/**/*.yaml"))
