"""The package's own shape: imports go one way, pure rooms stay pure, packages name what they need.

`make lint` checks the order of the rooms with import-linter; here is what it does not say: that
no two modules know each other, and that a planner or a simulator runs where there is no PyTorch.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_flex"
PURE_ROOMS = ("planner", "schedule", "cluster", "simulator")
VALUES = (
    "megatron_flex.data.microbatch",
    "megatron_flex.model.config",
    "megatron_flex.model.layers",
    "megatron_flex.planner.plan",
    "megatron_flex.schedule.instructions",
)
# Import name: name on the package index, where they differ and the package may be absent here.
OPTIONAL = {
    "apex": "apex",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn",
    "pyarrow": "pyarrow",
    "transformer_engine": "transformer-engine",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "wandb": "wandb",
}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _modules() -> dict[str, ast.Module]:
    return {_module_name(path): ast.parse(path.read_bytes()) for path in PACKAGE.rglob("*.py")}


def _imported(tree: ast.Module, known: frozenset[str]) -> set[str]:
    """Full names of what a module imports, wherever in it; a module where one is meant."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found


@cache
def _graph() -> dict[str, set[str]]:
    modules = _modules()
    known = frozenset(modules)
    return {name: _imported(tree, known) & known for name, tree in modules.items()}


def _third_party() -> dict[str, set[str]]:
    """Top-level names from outside the standard library, with the modules that import each."""
    found: dict[str, set[str]] = {}
    for module, tree in _modules().items():
        for name in _imported(tree, frozenset()):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("__future__", "megatron_flex"):
                found.setdefault(top, set()).add(module)
    return found


def test_no_two_modules_know_each_other() -> None:
    try:
        list(TopologicalSorter(_graph()).static_order())
    except CycleError as error:
        pytest.fail(f"these modules import one another: {' -> '.join(error.args[1])}")


def test_the_check_for_cycles_sees_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    from megatron_flex.planner import plan\n")
    assert _imported(tree, frozenset({"megatron_flex.planner.plan"})) == {
        "megatron_flex.planner.plan"
    }


def test_modules_of_values_know_only_modules_of_values() -> None:
    for module in VALUES:
        assert _graph()[module] <= set(VALUES), module


def test_packages_export_nothing_by_themselves() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_bytes()).body
        imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not imports, f"{path.relative_to(ROOT)} imports something"


def test_pure_rooms_run_without_pytorch_and_megatron() -> None:
    names = [n for n in _modules() if n.split(".")[1:2] and n.split(".")[1] in PURE_ROOMS]
    names += VALUES
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['megatron'] = None\n"
        f"for name in {sorted(names)!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_the_package_imports_is_declared_as_a_dependency() -> None:
    declared = set()
    for match in re.finditer(r'"([A-Za-z0-9_.-]+)(?:\[[a-z]+\])?(?:[<>=!~][^"]*)?"', _section()):
        declared.add(re.sub(r"[-_.]+", "-", match[1]).lower())
    providers = packages_distributions()
    for top, modules in _third_party().items():
        # One package of several may provide the name, as with namespace packages.
        names = {OPTIONAL[top]} if top in OPTIONAL else set(providers.get(top, [top]))
        names = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
        assert names & declared or top in ("apex", "wandb"), (
            f"{sorted(modules)} import {top}, but pyproject.toml does not name {sorted(names)}"
        )


def _section() -> str:
    """The dependency lists of pyproject.toml (tomllib is not in Python 3.10)."""
    text = (ROOT / "pyproject.toml").read_text()
    return text[text.index("\ndependencies") : text.index("[tool.setuptools")]


def test_every_direct_dependency_is_pinned_for_the_two_commands() -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    base = _section()
    lists = [base[: base.index("]")], base[base.index("dev =") :]]
    names = {
        re.sub(r"[-_.]+", "-", match[1]).lower()
        for text in lists
        for match in re.finditer(r'"([A-Za-z0-9_.-]+)', text)
    }
    assert names
    assert names <= pinned, f"constraints.txt lacks {sorted(names - pinned)}"
