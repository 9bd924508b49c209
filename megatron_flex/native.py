"""The native library: found and loaded once, with the C signatures in one table.

Functions take raw addresses (``tensor.data_ptr()``), sizes in bytes or elements as 64-bit
integers, and CUDA streams as integers. Calls release the interpreter lock.

Kernels use the newest instruction sets that the processor has. ``MEGATRON_FLEX_CPU`` in the
environment caps them, so that what other processors run can be tested on this one: ``baseline``
(SSE2), ``avx2`` (x86-64-v3) or ``avx512`` (x86-64-v4).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64] | NDArray[np.int64] | NDArray[np.uint64]

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
    # cross_entropy.cpp
    "mflex_log_normalizers": (None, [_POINTER, _LONG, _LONG, _POINTER, _INT]),
    "mflex_cross_entropy_gradients": (None, [*(_POINTER,) * 4, _LONG, _LONG, _INT]),
    # dropout.cpp
    "mflex_bias_dropout_add": (
        None,
        [*(_POINTER,) * 4, _ULONG, _LONG, _LONG, ctypes.c_uint32, _FLOAT, _INT, _POINTER, _INT],
    ),
    "mflex_bias_dropout_add_by_lanes": (
        None,
        [
            *(*(_POINTER,) * 4, _ULONG, _LONG, _LONG),
            *(ctypes.c_uint32, _FLOAT, _INT, _POINTER, _LONG, _LONG),
        ],
    ),
    # fixed_point.cpp
    "mflex_fixed_accumulate": (_INT, [_POINTER, _POINTER, _LONG, _INT, _INT]),
    "mflex_fixed_finish": (None, [_POINTER, _POINTER, _LONG, _INT, _INT]),
    # level.cpp
    "mflex_cap_level": (_INT, [_INT]),
    # build_info.cpp
    "mflex_built_with_cuda": (_INT, []),
    # copies.h: segment_copy.cpp, chunked_copy.cpp
    "mflex_segment_copy": (None, [*(_POINTER,) * 3, _LONG, _INT]),
    "mflex_segment_tiles": (_LONG, [_POINTER, _LONG, _LONG, _POINTER]),
    "mflex_chunked_write": (None, [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _ULONG, _INT]),
    "mflex_chunked_read": (
        _LONG,
        [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _ULONG, _LONG, _INT],
    ),
    "mflex_segment_copy_by_lanes": (None, [*(_POINTER,) * 4, *(_LONG,) * 3]),
    # memory_watch.cpp
    "mflex_memory_watch": (_INT, [ctypes.c_char_p]),
    "mflex_memory_current": (_LONG, []),
    "mflex_memory_peak": (_LONG, [_INT]),
    # planner_hbsa.cpp, planner_price.cpp, planner_search.cpp, planner_shares.cpp,
    # planner_switch.cpp
    "mflex_planner_switch": (
        None,
        [_LONG, *(_POINTER,) * 7, _LONG, _LONG, _LONG, *(_POINTER,) * 3],
    ),
    "mflex_planner_hbsa": (_DOUBLE, [_POINTER, _LONG, *(_POINTER,) * 3]),
    "mflex_planner_search": (_LONG, [_POINTER, _LONG, _POINTER, _POINTER]),
    "mflex_planner_feasible": (_LONG, [_POINTER, _DOUBLE]),
    "mflex_planner_price": (None, [_POINTER, _LONG, *(_POINTER,) * 7]),
    "mflex_planner_shares": (
        _LONG,
        [_POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER],
    ),
    # program_emit.cpp, program_footprint.cpp, program_validate.cpp
    "mflex_program_emit": (None, [_POINTER]),
    "mflex_program_footprint": (None, [_POINTER, _LONG, _LONG]),
    "mflex_program_validate": (_LONG, [_POINTER, _POINTER]),
    # swiglu.cpp
    "mflex_swiglu": (None, [_POINTER, _POINTER, _LONG, _LONG, _INT, _POINTER, _INT]),
    # schedule.cpp
    "mflex_schedule_place": (_LONG, [_POINTER]),
    "mflex_schedule_replay": (_LONG, [_POINTER]),
    # twin_arena.cpp
    "mflex_twin_checksum": (_ULONG, [_POINTER, _LONG, _LONG]),
    "mflex_twin_save": (_ULONG, [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _ULONG]),
    "mflex_twin_load": (_ULONG, [_POINTER]),
    "mflex_twin_store": (None, [_POINTER, _ULONG]),
    "mflex_twin_add": (None, [_POINTER, _ULONG]),
    "mflex_twin_raise": (None, [_POINTER, _ULONG]),
    "mflex_twin_wait": (_ULONG, [_POINTER, _ULONG, _LONG]),
    "mflex_twin_touch": (None, [_POINTER, _LONG]),
    # kernels/cuda, with CUDA only; results are CUDA's error codes, the last argument a stream
    "mflex_cuda_segment_copy": (_INT, [*(_POINTER,) * 4, *(_LONG,) * 4]),
    "mflex_cuda_chunked_write": (
        _INT,
        [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _ULONG, _LONG],
    ),
    "mflex_cuda_host_register": (_INT, [_POINTER, _LONG]),
    "mflex_cuda_host_unregister": (_INT, [_POINTER]),
    "mflex_cuda_host_address": (_INT, [_POINTER, _POINTER]),
    "mflex_cuda_bias_dropout_add": (
        _INT,
        [*(_POINTER,) * 4, _ULONG, _LONG, _LONG, ctypes.c_uint32, _FLOAT, _INT, _POINTER, _LONG],
    ),
    "mflex_cuda_error_text": (ctypes.c_char_p, [_INT]),
}


def structure(integers: str = "", doubles: str = "", arrays: str = "") -> type[ctypes.Structure]:
    """A structure of native code; names are separated by spaces, all fields are eight bytes."""
    fields: list[tuple[str, Any]] = [(name, _LONG) for name in integers.split()]
    fields += [(name, _DOUBLE) for name in doubles.split()]
    fields += [(name, _POINTER) for name in arrays.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})


def pointers(arrays: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Addresses of contiguous arrays, for a :func:`structure`: keep the arrays while it is used."""
    for name, array in arrays.items():
        if not array.flags.c_contiguous or array.itemsize != 8:
            raise ValueError(f"'{name}' must be a contiguous array of numbers of eight bytes")
    return {name: array.ctypes.data for name, array in arrays.items()}


class NativeError(RuntimeError):
    """The native library is missing or does not fit this package: build it again."""


CPU_CAP = "MEGATRON_FLEX_CPU"
LEVELS = {"baseline": 1, "avx2": 3, "avx512": 4}
"""What :data:`CPU_CAP` may be, and the numbers of ``kernels/src/level.h``."""


def cap_cpu(name: str = "") -> str:
    """Use instruction sets up to ``name`` of :data:`LEVELS` from now on, in the whole process.

    Returns the level in use: the processor's own may be lower. Without a name nothing changes.
    """
    used = function("mflex_cap_level")(LEVELS[name] if name else 0)
    return next(level for level, number in LEVELS.items() if number == used)


@cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises :class:`NativeError` when it is missing or cannot be loaded, or when
    ``MEGATRON_FLEX_CPU`` is no level.
    """
    cap = os.environ.get(CPU_CAP) or "avx512"
    if cap not in LEVELS:
        raise NativeError(f"{CPU_CAP} is '{cap}' in the environment: use {', '.join(LEVELS)}")
    if not LIBRARY.exists():
        raise NativeError(
            f"the native library {LIBRARY} is missing: run `make native` in the source tree, or"
            " install the package again with `pip install .` (needs g++; CMake is fetched)"
        )
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeError(
            f"the native library {LIBRARY} cannot be loaded ({error}): it was built for another"
            " machine; build it again with `make native` or `pip install .`"
        ) from error
    try:
        loaded.mflex_cap_level(LEVELS[cap])
    except AttributeError:
        pass  # an older library: the first function that is missing from it is named
    return loaded


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
        if name.startswith("mflex_cuda_") and not library().mflex_built_with_cuda():
            raise NativeError(
                "the native library was built without CUDA: put nvcc on PATH, then build it again"
                " with `make native` or `pip install .`"
            ) from None
        raise NativeError(
            f"the native library {LIBRARY} has no function {name}: it is older than this package;"
            " build it again with `make native` or `pip install .`"
        ) from None
    found.restype = result
    found.argtypes = arguments
    return found
