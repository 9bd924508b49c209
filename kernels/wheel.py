"""What a wheel with the products may say of the systems that it runs on (PEP 600)."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

ANYWHERE = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
"""Libraries of every system with glibc; the loader's own name is that of the machine."""

OLDEST = (2, 17)
"""The oldest glibc that a tag is given for."""


def platform_tag(products: Iterable[Path], otherwise: str) -> str:
    """``manylinux_X_Y_MACHINE`` of the glibc that the products need; else ``otherwise``.

    Else: they need a library that not every system has (libstdc++, CUDA), there is no readelf to
    tell, or this is no Linux with glibc.
    """
    readelf, machine = shutil.which("readelf"), platform.machine()
    if readelf is None or otherwise != f"linux_{machine}":
        return otherwise
    newest = OLDEST
    for product in products:
        text = subprocess.run(
            [readelf, "--wide", "--dynamic", "--version-info", str(product)],
            capture_output=True, text=True, check=True, env={"LC_ALL": "C"},
        ).stdout  # fmt: skip
        needed = needs(text)
        if needed is None:
            return otherwise
        newest = max(newest, needed)
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


def needs(text: str) -> tuple[int, int] | None:
    """The glibc that a file needs, from readelf's words; ``None`` if it needs more than glibc."""
    libraries = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    if any(name not in ANYWHERE and not name.startswith("ld-linux") for name in libraries):
        return None
    versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", text)
    return max(((int(a), int(b)) for a, b in versions), default=OLDEST)
