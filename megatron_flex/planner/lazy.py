"""A sequence whose items are made when they are asked for, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class Lazy(Sequence[T]):
    """``number`` items; ``make(i)`` is item ``i``."""

    def __init__(self, number: int, make: Callable[[int], T]) -> None:
        self._made: list[T | None] = [None] * number
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._made[index]
        if found is None:
            found = self._made[index] = self._make(index % len(self._made))
        return found
