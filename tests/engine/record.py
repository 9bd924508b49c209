"""What Transformer Engine's sources declare, of all that is used of it: the data of a test.

    git clone https://github.com/NVIDIA/TransformerEngine
    python -m tests.engine.record TransformerEngine v2.9 v2.11 > tests/engine/signatures.json

Nothing of it is imported or built: functions are read as text.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

MODULE = "transformer_engine/pytorch/"
FUNCTIONS = {
    f"{MODULE}module/linear.py": ("Linear.__init__", "Linear.forward"),
    f"{MODULE}module/layernorm_linear.py": ("LayerNormLinear.__init__", "LayerNormLinear.forward"),
    f"{MODULE}module/layernorm.py": ("LayerNorm.__init__",),
    f"{MODULE}module/rmsnorm.py": ("RMSNorm.__init__",),
    f"{MODULE}module/_common.py": (
        "WeightGradStore.delay_wgrad_compute",
        "WeightGradStore.put",
    ),
    f"{MODULE}quantization.py": (
        "fp8_autocast",
        "FP8GlobalStateManager.is_fp8_available",
        "FP8GlobalStateManager.is_mxfp8_available",
        "FP8GlobalStateManager.is_fp8_block_scaling_available",
    ),
}
RECIPES = "transformer_engine/common/recipe/__init__.py"
USED_RECIPES = ("Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")


def main() -> None:
    """Print what each tag declares."""
    repository, *tags = sys.argv[1:]
    found = {tag: _of(repository, tag) for tag in tags}
    versions = (
        f"{json.dumps(tag)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(names)}" for name, names in of.items())
        + "\n}"
        for tag, of in found.items()
    )
    print("{\n" + ",\n".join(versions) + "\n}")


def _of(repository: str, tag: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, names in FUNCTIONS.items():
        functions = dict(_functions(_read(repository, tag, path)))
        found |= {name: functions[name] for name in names}
    for node in _read(repository, tag, RECIPES).body:
        if isinstance(node, ast.ClassDef) and node.name in USED_RECIPES:
            found[node.name] = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
    for path in ("linear", "layernorm_linear"):
        text = _text(repository, tag, f"{MODULE}module/{path}.py")
        found[f"{path}: wgrad_store"] = sorted(
            {line.strip() for line in text.splitlines() if "wgrad_store.put(" in line}
        )
    return found


def _text(repository: str, tag: str, path: str) -> str:
    command = ["git", "-C", repository, "show", f"{tag}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read(repository: str, tag: str, path: str) -> ast.Module:
    return ast.parse(_text(repository, tag, path))


def _functions(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Name and parameters of every function and method."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, _parameters(node)
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    yield f"{node.name}.{item.name}", _parameters(item)


def _parameters(node: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return [*names, *([f"**{node.args.kwarg.arg}"] if node.args.kwarg else [])]


if __name__ == "__main__":
    main()
