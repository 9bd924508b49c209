"""Names, the tracker, replacement and leftovers on the disk."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.async_save import AsyncSaver
from megatron_flex.checkpoint.conversion.hugging_face.files import read_json
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import verify
from megatron_flex.checkpoint.save import save
from tests.unit import disk


def _checkpoint(directory: Path, iteration: int, mark: str = "new") -> Path:
    temporary = layout.create_temporary(directory, iteration)
    (temporary / "mark").write_text(mark)
    return layout.publish(temporary, iteration)


def test_the_tracker_names_the_checkpoint_published_last(tmp_path: Path) -> None:
    assert layout.latest(tmp_path) is None
    for iteration in (5, 100, 12_345_678):
        path = _checkpoint(tmp_path, iteration)
        assert layout.latest(tmp_path) == iteration
        assert layout.locate(tmp_path) == path
    assert layout.iterations_in(tmp_path) == [5, 100, 12_345_678]
    assert (tmp_path / "iter_0000005").is_dir()
    assert (tmp_path / layout.TRACKER).read_text() == "12345678"


def test_a_published_checkpoint_leaves_no_temporary_names(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", layout.TRACKER]


def test_the_disk_has_everything_before_the_tracker_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = layout.create_temporary(tmp_path, 3)
    happened = disk.watch(monkeypatch)
    layout.write_synced(temporary / "manifest", b"x")
    final = layout.publish(temporary, 3)
    (tracker,) = {path for what, path in happened if what == "sync" and "/.latest" in path}
    assert happened == [
        ("sync", str(temporary / "manifest")),
        ("sync", str(temporary)),
        ("sync", tracker),
        ("name", str(final)),
        ("sync", str(tmp_path)),
        ("name", str(tmp_path / layout.TRACKER)),
        ("sync", str(tmp_path)),
    ]


@pytest.mark.parametrize("exchange", [True, False])
def test_an_iteration_saved_again_replaces_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:  # a file system that cannot exchange two names
        monkeypatch.setattr(layout, "_exchange", lambda first, second: False)
    _checkpoint(tmp_path, 3, "first")
    path = _checkpoint(tmp_path, 3, "second")
    assert (path / "mark").read_text() == "second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", layout.TRACKER]


def test_the_system_call_exchanges_two_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not layout._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 3, "first")
    path.rename(tmp_path / ".old-iter_0000003-0a1b")
    layout.remove_leftovers(tmp_path)
    assert (layout.locate(tmp_path) / "mark").read_text() == "first"
    _checkpoint(tmp_path, 3, "second")
    layout.remove_leftovers(tmp_path)
    assert (layout.locate(tmp_path) / "mark").read_text() == "second"
    assert not list(tmp_path.glob(".old*"))


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 1)
    layout.create_temporary(tmp_path, 2)
    (tmp_path / ".trash-iter_0000000-ff").mkdir()
    (tmp_path / f".{layout.TRACKER}.00ff").touch()
    (tmp_path / ".mine").touch()
    (tmp_path / ".tmp-iter_mine").mkdir()
    layout.remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "iter_0000001",
        layout.TRACKER,
        ".mine",
        ".tmp-iter_mine",
    }


def test_discarding_removes_a_checkpoint(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 1)
    layout.discard(path)
    assert layout.iterations_in(tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == [layout.TRACKER]


def test_a_missing_iteration_is_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    for iteration in (10, 20):
        _checkpoint(tmp_path, iteration)
    with pytest.raises(CheckpointError, match=r"iteration 15 in .*: there is 10, 20"):
        layout.locate(tmp_path, 15)


def test_a_directory_without_tracker_is_an_error_by_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*absent: there is no such dir"):
        layout.locate(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*latest_checkpointed_iteration"):
        layout.locate(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Hugging Face directory: those are for --load-hf"):
        layout.locate(tmp_path)
    (tmp_path / layout.TRACKER).write_text("10")
    (tmp_path / "iter_0000010").mkdir()
    with pytest.raises(CheckpointError, match="give that directory"):
        layout.locate(tmp_path / "iter_0000010")
    with pytest.raises(CheckpointError, match=r"has no model\.json: it has checkpoints of a run"):
        read_json(tmp_path / "model.json")


@pytest.mark.parametrize("text", ["abc", "", "-3", "1.5", "release", "²", "\x00"])
def test_a_damaged_tracker_is_an_error_that_says_what_it_holds(tmp_path: Path, text: str) -> None:
    _checkpoint(tmp_path, 10)
    (tmp_path / layout.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=r"instead of an iteration; write one of 10"):
        layout.latest(tmp_path)


def test_a_tracker_of_random_bytes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / layout.TRACKER).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot read"):
        layout.latest(tmp_path)


def _try_lock(directory: str) -> str:
    try:
        with layout.locked(Path(directory)):
            return "locked"
    except CheckpointError as error:
        return str(error)


def test_two_processes_cannot_save_into_one_directory(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        with layout.locked(tmp_path):
            message = pool.apply(_try_lock, (str(tmp_path),))
        assert "another process is saving into" in message
        assert pool.apply(_try_lock, (str(tmp_path),)) == "locked"


def test_what_another_run_has_saved_is_not_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    mine, its = layout.Foreign(directory), layout.Foreign(directory)
    for run, iteration in ((mine, 1), (mine, 2)):
        save(directory, iteration, {"a": torch.ones(1)}, {}, group=None, foreign=run)
    saver = AsyncSaver(directory, group=None, foreign=its)
    saver.start(1, {"a": torch.zeros(1)}, {})
    with pytest.raises(CheckpointError, match=r"has saved iteration 2 into .*its own --save"):
        saver.wait()
    save(directory, 3, {"a": torch.ones(1)}, {}, group=None, foreign=mine)
    verify(directory)
    assert layout.iterations_in(directory) == [1, 2, 3]
    shutil.rmtree(directory)  # whoever clears it wants what comes next
    save(directory, 4, {"a": torch.ones(1)}, {}, group=None, foreign=mine)
    assert layout.latest(directory) == 4


def test_checkpoints_that_no_tracker_names_are_listed_with_the_way_to_choose(
    tmp_path: Path,
) -> None:
    for iteration in range(10, 120, 10):
        _checkpoint(tmp_path, iteration)
    (tmp_path / layout.TRACKER).unlink()
    for way in (layout.latest, layout.locate):
        with pytest.raises(CheckpointError) as caught:
            way(tmp_path)
        assert "iterations 3 earlier ones, 40, 50, 60, 70, 80, 90, 100, 110" in str(caught.value)
        assert "--ckpt-step" in str(caught.value)
    assert layout.locate(tmp_path, 20) == tmp_path / "iter_0000020"


def test_a_kill_before_the_first_tracker_has_its_name_loses_nothing(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 7)
    pending = tmp_path / f".{layout.TRACKER}.0a1b2c3d"
    (tmp_path / layout.TRACKER).rename(pending)
    assert layout.latest(tmp_path) == 7
    layout.remove_leftovers(tmp_path)
    assert layout.latest(tmp_path) == 7
    _checkpoint(tmp_path, 8)
    layout.remove_leftovers(tmp_path)
    assert layout.latest(tmp_path) == 8
    assert not pending.exists()


@pytest.mark.parametrize("seen", ["nothing yet", "its hidden name"])
def test_a_tracker_that_gets_its_name_while_it_is_looked_for_is_found(
    seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iter_0000007").mkdir()
    hidden, tracker = tmp_path / f".{layout.TRACKER}.0a1b2c3d", tmp_path / layout.TRACKER
    hidden.write_text("7")
    glob = Path.glob

    def late(directory: Path, pattern: str) -> list[Path]:
        found = [] if seen == "nothing yet" else list(glob(directory, pattern))
        hidden.rename(tracker)
        return found

    monkeypatch.setattr(Path, "glob", late)
    assert layout.latest(tmp_path) == 7
