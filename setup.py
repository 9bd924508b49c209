"""Builds the native library with CMake, puts the tools into wheels; the rest: pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from kernels.build import PRODUCTS, build_library, find_cmake
from kernels.wheel import platform_tag

TOOLS = "megatron_flex_tools"  # as megatron_flex/commands.py has it
OF_THE_TREE = ("flags.py", "gpu.py")


class BuildTools(build_py):
    """Copies ``tools/`` into a wheel, beside the package; an editable one has the tree's."""

    editable_mode: bool = False

    def _tools(self) -> dict[Path, Path]:
        if self.editable_mode:
            return {}
        sources = [p for p in sorted((ROOT / "tools").rglob("*.py")) if p.name not in OF_THE_TREE]
        target = Path(self.build_lib) / TOOLS
        return {target / path.relative_to(ROOT / "tools"): path for path in sources}

    def run(self) -> None:
        # What an earlier build left there would come along, files that are gone now, too.
        if not self.editable_mode:
            for name in ("megatron_flex", TOOLS):
                shutil.rmtree(Path(self.build_lib) / name, ignore_errors=True)
        super().run()
        for target, source in self._tools().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self._tools())]


class BuildNative(build_ext):
    """Puts library and manager beside ``megatron_flex/native.py``, in the tree or in the wheel."""

    editable_mode: bool = False

    def target(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return (ROOT if in_place else Path(self.build_lib)) / "megatron_flex"

    def run(self) -> None:
        # The folder of `make native`: what is compiled there need not be compiled again.
        try:
            build_library(ROOT / "build" / "native", self.target())
        except RuntimeError as error:
            sys.exit(str(error))

    def get_outputs(self) -> list[str]:
        return [str(self.target() / name) for name in PRODUCTS]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class NativeWheel(bdist_wheel):
    """The library does not depend on Python's version: one wheel fits all, on one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        products = [Path(name) for name in self.get_finalized_command("build_ext").get_outputs()]
        platform = super().get_tag()[2]
        if all(product.is_file() for product in products):
            platform = platform_tag(products, platform)
        return ("py3", "none", platform)


setup(
    # The extension only tells setuptools that the wheel is not pure Python.
    ext_modules=[Extension("megatron_flex.libmegatron_flex", sources=[])],
    cmdclass={"build_py": BuildTools, "build_ext": BuildNative, "bdist_wheel": NativeWheel},
    # A build requirement, and only where the machine has no CMake of its own.
    setup_requires=[] if find_cmake() else ["cmake>=3.22"],
)
