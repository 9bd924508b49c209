"""Two servers of two workers each: who sends the state of a switch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_flex.runtime.states import Pending, StateTransfers
from megatron_flex.schedule.instructions import SendState
from tests.close import assert_numbers_close
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

# Workers 0 and 2, of two servers, hold the first units. Next, worker 1 needs four of them and
# worker 3 the fifth.
PLANS = "0:5@0,2 | 5:8@1,3\n0:4@0,1,2 | 4:8@3\n"
Sent = tuple[int, int]


def sent(argv: Sequence[str], per_server: int) -> tuple[runs.Run, list[Sent]]:
    """Train with so many workers on a server; (unit, worker) that this worker sent state to."""
    found: list[Sent] = []
    send = StateTransfers.send

    def note(states: StateTransfers, op: SendState, state: torch.Tensor) -> Pending:
        found.append((op.slab, op.peer))
        return send(states, op, state)

    environment = patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_server))
    with environment, patch.object(StateTransfers, "send", note):
        return runs.train(argv), found


@pytest.mark.parametrize("way", ["live", "handover", "stall"])
def test_state_comes_from_a_worker_of_the_same_server(
    workers: WorkerPool, tmp_path: Path, way: str
) -> None:
    prefix = runs.write_documents(tmp_path / "documents")
    plans = tmp_path / "plans.txt"
    plans.write_text(PLANS)
    data = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", "3"]
    switch = ["--flexpipe-plans", str(plans), "--flexpipe-switch", way, "--flexpipe-no-twin"]
    argv = (*runs.MODEL, *runs.TRAINING, *data)
    one = runs.run(workers, 1, argv)

    def senders(per_server: int) -> list[list[Sent]]:
        accounts = workers.run(4, sent, (*argv, *switch), per_server)
        assert_numbers_close(accounts[0][0].losses, one.losses, 3e-7)
        return [pairs for _, pairs in accounts]

    assert senders(2) == [[(0, 1), (1, 1), (2, 1), (3, 1)], [], [(4, 3)], []]
    # On one server the holders take turns.
    assert senders(4) == [[(0, 1), (2, 1), (4, 3)], [], [(1, 1), (3, 1)], []]
