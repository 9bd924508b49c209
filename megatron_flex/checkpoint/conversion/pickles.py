"""Reading PyTorch files of foreign programs without running or needing their code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_flex.checkpoint.errors import CheckpointError, describe

# Besides these, only types of tensors, storages and numbers of torch are created.
_ALLOWED = {
    ("argparse", "Namespace"),
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "frozenset"),
    ("builtins", "range"),
    ("builtins", "set"),
    ("builtins", "slice"),
    ("_codecs", "encode"),
    ("_io", "BytesIO"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.serialization", "_get_layout"),
}


# The metadata of torch.distributed.checkpoint.
_METADATA = {
    ("pathlib", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class Foreign:
    """Stands for an object whose class is not known here; it keeps nothing and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Part of an unpickled list."""

    def extend(self, items: Any) -> None:
        """Part of an unpickled list."""


class _Unpickler(pickle.Unpickler):
    """Creates plain values and tensors; any other class becomes :class:`Foreign`."""

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # as older protocols say
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and (
            name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        return Foreign


class _MetadataUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA:
            return pickle.Unpickler.find_class(self, module, name)
        return super().find_class(module, name)


def load_metadata(file: Any) -> Any:
    """The metadata of torch.distributed.checkpoint from its open file."""
    return _MetadataUnpickler(file).load()


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


_MODULE = SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__=__name__)


def read(path: Path) -> dict[str, Any]:
    """The dictionary in a file of ``torch.save``; tensors are mapped from the file when used.

    Raises :class:`CheckpointError` when the file cannot be read.
    """
    load: Callable[..., Any] = torch.load
    try:
        content = load(
            path, map_location="cpu", weights_only=False, pickle_module=_MODULE, mmap=True
        )
    except Exception as error:  # a damaged file may raise nearly anything
        raise CheckpointError(f"cannot read {path}: {describe(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dictionary")
    return content
