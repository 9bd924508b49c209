"""What a wheel says of the systems it runs on is what its files need."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kernels import wheel
from kernels.build import PRODUCTS
from megatron_flex import native

HEAD = " 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n"
NEEDS = "  000000: Version: 1  File: libc.so.6  Cnt: 2\n"


def version(name: str) -> str:
    return f"  0x0010:   Name: {name}  Flags: none  Version: 5\n"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["GLIBC_2.2.5"], (2, 2)),
        (["GLIBC_2.14", "GLIBC_2.34", "GLIBC_2.4"], (2, 34)),
        (["GLIBC_2.9", "GLIBC_2.32"], (2, 32)),
    ],
)
def test_the_newest_version_of_glibc_counts(names: list[str], expected: tuple[int, int]) -> None:
    assert wheel.needs(HEAD + NEEDS + "".join(map(version, names))) == expected


@pytest.mark.parametrize("library", ["libstdc++.so.6", "libcudart.so.13", "libgomp.so.1"])
def test_a_library_that_not_every_system_has_forbids_the_tag(library: str) -> None:
    assert wheel.needs(f"{HEAD} (NEEDED) Shared library: [{library}]\n{NEEDS}") is None
    assert wheel.needs(f"{HEAD} (NEEDED) Shared library: [ld-linux-x86-64.so.2]\n{NEEDS}")


def test_other_systems_keep_their_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel.platform_tag([], "macosx_14_0_arm64") == "macosx_14_0_arm64"
    here = f"linux_{platform.machine()}"
    monkeypatch.setattr(wheel.shutil, "which", lambda _: None)
    assert wheel.platform_tag([], here) == here


def test_the_products_of_this_tree_have_the_tag_that_they_deserve() -> None:
    here = f"linux_{platform.machine()}"
    package = Path(native.__file__).parent
    tag = wheel.platform_tag([package / name for name in PRODUCTS], here)
    assert tag == here or tag.startswith("manylinux_2_")
