"""Work in a thread that holds nothing when it is done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec

P = ParamSpec("P")


def submit(
    pool: Executor, run: Callable[P, None], *arguments: P.args, **keywords: P.kwargs
) -> Future[None]:
    """Have ``pool`` run ``run``.

    An executor's thread keeps the arguments for a moment after the result is there. Here it lets go
    of them before: the memory of tensors among them is free when the wait ends.
    """
    box = [(arguments, keywords)]

    def once() -> None:
        given, named = box.pop()
        run(*given, **named)

    return pool.submit(once)
