"""Tensors that are made when they are asked for: a model passes through, layer by layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each of which is read or received on access and not kept.

    ``forms`` has their shapes and types, as tensors on the meta device, in the order in which
    access is cheapest.
    """

    forms: Mapping[str, torch.Tensor]

    @abstractmethod
    def __getitem__(self, name: str) -> torch.Tensor: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)


def forms_of(tensors: Mapping[str, T]) -> Mapping[str, T | torch.Tensor]:
    """Tensors that have the shapes and types of ``tensors``, without reading any."""
    return tensors.forms if isinstance(tensors, LazyTensors) else tensors
