"""A wheel in an environment of its own, outside the source tree: trains, plans, reports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.build import PRODUCTS
from tests.end_to_end.processes import ROOT

OF_THE_TREE = {"flags.py", "gpu.py"}
RUN = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 128 --mock-data"
    " --vocab-size 90 --global-batch-size 4 --lr 1e-3 --distributed-backend gloo"
)


def build(kind: str, directory: Path) -> Path:
    """What the build backend makes of this tree: a ``wheel`` or an ``sdist``."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(directory)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = directory.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of an environment that has the wheel; what it prints.

    The other packages are those of the tests' environment, but not what is installed there for
    development: the source tree cannot be reached.
    """
    directory = tmp_path_factory.mktemp("outside")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    venv.create(directory / "venv", with_pip=False, symlinks=True)
    (site,) = (directory / "venv").glob("lib/python*/site-packages")
    (site / "present.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*words: str, status: int = 0) -> str:
        program = str(directory / "venv" / "bin" / words[0])
        done = subprocess.run(
            [program, *words[1:]], cwd=directory, env=environment, timeout=180, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == status, f"{shlex.join(words)}\n{done.stdout}"
        return done.stdout

    # Without an index: what the wheel depends on must be there in the versions that it names.
    run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
        "--ignore-installed", "--no-deps", str(wheel))  # fmt: skip
    run("python", "-c", CHECK)
    return run


CHECK = """
from importlib.metadata import distribution, version
from pathlib import Path
from packaging.requirements import Requirement
import megatron_flex
for text in distribution("megatron-flex").requires:
    wanted = Requirement(text)
    if wanted.marker is None:
        assert version(wanted.name) in wanted.specifier, text
assert Path(megatron_flex.__file__).is_relative_to(Path.cwd()), megatron_flex.__file__
"""


def test_the_wheel_holds_package_products_and_tools(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (tags,) = (n for n in names if n.endswith(".dist-info/WHEEL"))
        tag = re.search(r"^Tag: (.*)$", archive.read(tags).decode(), re.M)
    assert tag is not None
    assert re.fullmatch(r"py3-none-(many)?linux(_2_\d+)?_\w+", tag[1])
    package = [p for p in (ROOT / "megatron_flex").rglob("*") if p.is_file()]
    kept = {str(p.relative_to(ROOT)) for p in package if "__pycache__" not in p.parts}
    assert {n for n in names if n.startswith("megatron_flex/")} == kept
    assert {f"megatron_flex/{name}" for name in PRODUCTS} <= kept
    tools = {str(p.relative_to(ROOT / "tools")) for p in (ROOT / "tools").rglob("*.py")}
    found = {n.partition("/")[2] for n in names if n.startswith("megatron_flex_tools/")}
    assert found == tools - OF_THE_TREE
    assert (
        not {n.partition("/")[0] for n in names}
        - {"megatron_flex", "megatron_flex_tools"}
        - {tags.partition("/")[0]}
    )


def test_it_trains_plans_and_reports_outside_the_tree(command: Callable[..., str]) -> None:
    listed = command("megatron-flex", "--help")
    for name in ("pretrain-gpt", "pretrain-bert", "plan", "report", "status", "simulate",
                 "preprocess-data", "convert"):  # fmt: skip
        assert re.search(rf"^  {name} +\w", listed, re.M), listed
    more = "--flexpipe --train-iters 4 --log-jsonl run/log.jsonl --log-interval 1"
    text = command("megatron-flex", "pretrain-gpt", *RUN, *more.split(), "--save", "run/saved")
    assert "successfully saved checkpoint from iteration       4" in text
    text = command("python", "-m", "megatron_flex", "plan", "--workers", "2", *RUN,
                   "--micro-batch-tokens", "128", "--batches", "2")  # fmt: skip
    assert "batch" in text
    command("megatron-flex", "report", "run")
    text = command("megatron-flex", "status", "run", "--once")
    assert "4" in text
    assert "there is no command 'pla'" in command("megatron-flex", "pla", status=1)


def test_the_sdist_holds_what_git_does(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    path = build("sdist", tmp_path)
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {n for n in listed.stdout.split() if not n.startswith((".ci/", ".git"))}
    assert wanted <= names, sorted(wanted - names)
