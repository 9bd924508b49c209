"""What workers say that do not start alike."""

from __future__ import annotations

import pytest

from megatron_flex.runtime.agreement import View, check_alike, disagreement


def test_what_differs_is_named_with_who_has_what() -> None:
    facts = {"--lr": "0.1", "--flexpipe-cluster": "a100", "--seed": "1"}
    other = facts | {"--lr": "0.2", "--flexpipe-cluster": "a file with the digest 12"}
    views = [View("one", facts), View("one", facts), View("two", other), View("two", other)]
    assert disagreement(views) == (
        "the workers do not start from the same: --lr is 0.1 on worker 0 of one and 1 more, 0.2 on"
        " worker 2 of two and 1 more; --flexpipe-cluster is a100 on worker 0 of one and 1 more, a"
        " file with the digest 12 on worker 2 of two and 1 more: give all the same flags, and the"
        " same files on every server"
    )
    sizes = [View("m", {"--tensor-model-parallel-size": str(size)}) for size in (2, 4)]
    assert "auto of --tensor-model-parallel-size follows from them" in disagreement(sizes)


def test_what_one_lacks_is_absent_and_a_message_has_an_end() -> None:
    text = disagreement([View("m", {str(n): "x" for n in range(9)}), View("m", {})])
    assert "0 is x on worker 0, absent on worker 1; 1 is" in text
    assert "; and 3 more: give" in text
    many = disagreement([View("m", {"a": str(rank)}) for rank in range(9)])
    assert "a is 0 on worker 0, 1 on worker 1, 2 on worker 2: give" in many


def test_what_is_wrong_on_one_worker_is_said_by_all() -> None:
    assert disagreement([View("m", {}), View("n", {"a": "b"}, "no room")]) == "no room"


def test_one_worker_agrees_with_itself() -> None:
    check_alike(None, {"a": "b"})
    with pytest.raises(SystemExit, match="no room"):
        check_alike(None, {}, "no room")
