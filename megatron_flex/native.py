"""The native library: found and loaded once, with the C signatures in one table.

Functions take raw addresses (``tensor.data_ptr()``), sizes in bytes or elements as 64-bit
integers, and CUDA streams as integers. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libmegatron_flex.so")

_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_ULONG = ctypes.c_uint64
_FLOAT = ctypes.c_float
_DOUBLE = ctypes.c_double
_POINTER = ctypes.c_void_p

# Name in C: (result, arguments). One line for each exported function of kernels/src and
# kernels/cuda, in the order of the files.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # attention.cpp
    "mflex_attention_run": (_INT, [_POINTER]),
    # dropout.cpp
    "mflex_bias_dropout_add": (
        None,
        [
            *(_POINTER,) * 4,
            _ULONG,
            _LONG,
            _LONG,
            ctypes.c_uint32,
            _FLOAT,
            _INT,
            _POINTER,
            _INT,
        ],
    ),
    # parallel.cpp
    "mflex_available_threads": (_INT, []),
    # planner_search.cpp, planner_shares.cpp
    "mflex_planner_search": (_LONG, [_POINTER, _LONG, _POINTER, _POINTER]),
    "mflex_planner_feasible": (_LONG, [_POINTER, _LONG, _DOUBLE]),
    "mflex_planner_group": (None, [_POINTER, _POINTER, _LONG, _POINTER]),
    "mflex_planner_shares": (
        _LONG,
        [_POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER],
    ),
}


class NativeError(RuntimeError):
    """The native library is missing or does not fit this package: build it again."""


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises :class:`NativeError` when it is missing or cannot be loaded."""
    if not LIBRARY.exists():
        raise NativeError(
            f"the native library {LIBRARY} is missing: run `make native` in the source tree, or"
            " install the package again with `pip install .` (needs g++; CMake is fetched)"
        )
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeError(
            f"the native library {LIBRARY} cannot be loaded ({error}): it was built for another"
            " machine; build it again with `make native` or `pip install .`"
        ) from error


@cache
def function(name: str) -> Callable[..., Any]:
    """The exported function ``name`` with its argument and result types set.

    Raises ``KeyError`` for a name that is not in :data:`SIGNATURES` and :class:`NativeError` for
    a library that is older than this file.
    """
    result, arguments = SIGNATURES[name]
    try:
        found = getattr(library(), name)
    except AttributeError:
        raise NativeError(
            f"the native library {LIBRARY} has no function {name}: it is older than this package;"
            " build it again with `make native` or `pip install .`"
        ) from None
    found.restype = result
    found.argtypes = arguments
    return found
