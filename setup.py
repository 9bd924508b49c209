"""Builds the native library with CMake; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from kernels.build import PRODUCTS, build_library, find_cmake


class BuildNative(build_ext):
    """Puts library and manager beside ``megatron_flex/native.py``, in the tree or in the wheel."""

    editable_mode: bool = False

    def _package(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return (ROOT if in_place else Path(self.build_lib)) / "megatron_flex"

    def run(self) -> None:
        build_dir = ROOT / "build" / "native" if self.editable_mode else Path(self.build_temp)
        try:
            build_library(build_dir.resolve(), self._package())
        except RuntimeError as error:
            sys.exit(str(error))

    def get_outputs(self) -> list[str]:
        return [str(self._package() / name) for name in PRODUCTS]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class NativeWheel(bdist_wheel):
    """The library does not depend on Python's version: one wheel fits all, on one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    # The extension only tells setuptools that the wheel is not pure Python.
    ext_modules=[Extension("megatron_flex.libmegatron_flex", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
    # A build requirement, and only where the machine has no CMake of its own.
    setup_requires=[] if find_cmake() else ["cmake>=3.22"],
)
