"""Saving and loading in one process: exactness, and what cannot be saved or loaded."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import load, read_common, verify
from megatron_flex.checkpoint.manifest import Manifest, tensor_entry
from megatron_flex.checkpoint.save import check_writable, save
from tests.unit import disk

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 200, shape).to(dtype)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with the checkpoints of iterations 1 and 2."""
    for iteration in (1, 2):
        tensors = {"a": torch.full((40, 8), float(iteration)), "b": torch.arange(5)}
        common = {"iteration": iteration, "model": {"hidden_size": 8, "num_layers": 2}}
        save(tmp_path, iteration, tensors, common, group=None)
    return tmp_path


@given(
    st.dictionaries(
        st.text("ab.", min_size=1, max_size=6),
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)),
        max_size=5,
    ),
    st.dictionaries(st.text(), JSON, max_size=3),
)
def test_tensors_and_common_state_come_back_bit_for_bit(
    shapes: dict[str, tuple[list[int], torch.dtype]], common: dict[str, Any]
) -> None:
    tensors = {name: _random(tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
    with tempfile.TemporaryDirectory() as directory:
        save(directory, 7, tensors, common, group=None)
        filled = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        assert load(directory, filled, group=None) == common
    assert {n: _bits(t) for n, t in filled.items()} == {n: _bits(t) for n, t in tensors.items()}


def test_views_of_a_slab_are_saved_alone_and_fill_views_of_another(tmp_path: Path) -> None:
    slab = torch.randn(1000)
    views = {"w": slab[:600].view(20, 30), "t": slab[600:650].view(5, 10).t(), "b": slab[700:701]}
    path = save(tmp_path, 1, views, {}, group=None)
    assert sum(f.stat().st_size for f in path.glob("*.distcp")) < 4 * 651 + 6000
    other = torch.zeros(2000)
    targets = {"w": other[1000:1600].view(20, 30), "t": other[:50].view(5, 10).t()}
    load(tmp_path, targets, group=None)
    assert torch.equal(other[1000:1600], slab[:600])
    assert torch.equal(other[:50], slab[600:650])
    assert not other[50:1000].any()
    assert not other[1600:].any()


def test_parameters_that_require_gradients_are_filled_in_place(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3))
    save(tmp_path, 1, {"w": weight}, {}, group=None)
    target = torch.nn.Parameter(torch.zeros(3, 3))
    pointer = target.data_ptr()
    load(tmp_path, {"w": target}, group=None)
    assert torch.equal(target, weight)
    assert target.data_ptr() == pointer
    assert target.requires_grad


def test_a_floating_point_tensor_may_be_loaded_in_another_precision(tmp_path: Path) -> None:
    weight = torch.randn(50)
    save(tmp_path, 1, {"w": weight}, {}, group=None)
    half = {"w": torch.zeros(50, dtype=torch.bfloat16)}
    load(tmp_path, half, group=None)
    assert torch.equal(half["w"], weight.bfloat16())


def test_an_earlier_iteration_can_be_loaded(saved: Path) -> None:
    tensors = {"a": torch.zeros(40, 8)}
    assert load(saved, tensors, iteration=1, group=None)["iteration"] == 1
    assert torch.equal(tensors["a"], torch.ones(40, 8))
    assert read_common(saved)["iteration"] == 2


def test_a_tuple_in_the_common_state_comes_back_as_a_list(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {"coefficients": (0.1, 1e-300, float("inf"))}, group=None)
    assert load(tmp_path, {}, group=None) == {"coefficients": [0.1, 1e-300, float("inf")]}


def test_stock_pytorch_reads_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    metadata = FileSystemReader(saved / "iter_0000002").read_metadata()
    assert set(metadata.state_dict_metadata) == {"a", "b"}
    dcp_to_torch_save(saved / "iter_0000002", tmp_path / "all.pt")
    tensors = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(tensors["a"], torch.full((40, 8), 2.0))


def test_the_manifest_describes_all_files_and_tensors(saved: Path) -> None:
    path = saved / "iter_0000002"
    manifest = verify(saved, 2)
    assert manifest.iteration == 2
    assert {*manifest.files, "manifest.json"} == set(os.listdir(path))
    assert manifest.tensors["a"] == tensor_entry(torch.full((40, 8), 2.0))
    assert manifest.tensors["a"].bytes == 40 * 8 * 4


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "empty"])
def test_a_damaged_file_is_named_and_the_earlier_checkpoint_loads(
    saved: Path, name: str, damage: str
) -> None:
    path = saved / "iter_0000002" / name
    size = path.stat().st_size
    if damage == "truncated":
        os.truncate(path, size - 1)
    elif damage == "flipped":
        _flip(path, size // 2)
    elif damage == "deleted":
        path.unlink()
    else:
        os.truncate(path, 0)
    tensors = {"a": torch.zeros(40, 8)}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(saved, tensors, group=None)
    assert not tensors["a"].any(), "nothing may be read from a damaged checkpoint"
    assert load(saved, tensors, iteration=1, group=None)["iteration"] == 1


@given(st.data())
def test_any_single_flipped_bit_is_detected(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = save(directory, 1, {"a": torch.randn(40)}, {"x": 1}, group=None)
        name = data.draw(st.sampled_from(sorted(os.listdir(path))))
        _flip(path / name, data.draw(st.integers(0, (path / name).stat().st_size - 1)))
        with pytest.raises(CheckpointError, match=r"corrupt|truncated"):
            load(directory, {"a": torch.zeros(40)}, group=None)


def test_a_manifest_of_another_version_is_refused(saved: Path) -> None:
    path = saved / "iter_0000002" / "manifest.json"
    manifest = Manifest.read(path.parent)
    body = json.loads(manifest.dumps())
    del body["digest"]
    body["version"] = 99
    from megatron_flex.checkpoint.manifest import _encode, digest_of

    path.write_bytes(_encode({**body, "digest": digest_of(_encode(body))}))
    with pytest.raises(CheckpointError, match="has version 99, this program reads up to 2"):
        load(saved, {}, group=None)


def test_a_checkpoint_of_another_model_names_all_fields_that_differ(saved: Path) -> None:
    model = {"hidden_size": 16, "num_layers": 2, "swiglu": True}
    with pytest.raises(CheckpointError) as caught:
        load(saved, {}, group=None, model=model)
    text = str(caught.value)
    assert "hidden_size is 8 in the checkpoint and 16 in this run" in text
    # Fields that the checkpoint lacks, as one of an earlier version does, have their defaults.
    assert "swiglu is false in the checkpoint and true in this run" in text
    assert "num_layers" not in text
    model |= {"hidden_size": 8, "swiglu": False, "openai_gelu": False}
    load(saved, {}, group=None, model=model)


def test_dropout_and_seed_may_differ_between_runs(saved: Path) -> None:
    model = {"hidden_size": 8, "num_layers": 2, "hidden_dropout": 0.3, "seed": 5}
    assert load(saved, {}, group=None, model=model)["iteration"] == 2


def test_missing_tensors_are_named_with_the_flag_that_helps(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="no c and 1 more wanted tensors"):
        load(saved, {"a": torch.zeros(40, 8), "c": torch.zeros(1), "d": torch.zeros(1)}, group=None)
    with pytest.raises(CheckpointError, match="saved without them: load with --no-load-optim"):
        load(saved, {"optimizer.state.master.a": torch.zeros(1)}, group=None)


def test_another_shape_or_kind_of_number_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a has shape \[40, 8\] .* \[8, 40\] in this run"):
        load(saved, {"a": torch.zeros(8, 40)}, group=None)
    with pytest.raises(CheckpointError, match="b is int64 in the checkpoint"):
        load(saved, {"b": torch.zeros(5)}, group=None)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1: 2}, "common has the key 1"),
        ({"a": {"b": [0, torch.zeros(1)]}}, r"common\['a'\]\['b'\]\[1\] is a Tensor"),
        ({"a": torch.float32}, r"common\['a'\] is a dtype"),
        ({"a": Path("x")}, r"common\['a'\] is a .*Path"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(
    tmp_path: Path, value: dict[str, Any], where: str
) -> None:
    with pytest.raises(CheckpointError, match=where):
        save(tmp_path / "new", 1, {}, value, group=None)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="File exists"):
        save(tmp_path / "file", 1, {}, {}, group=None)
    with pytest.raises(CheckpointError, match="checking that checkpoints can be saved"):
        check_writable(tmp_path / "file", group=None)


def test_checking_that_a_directory_is_writable_leaves_it_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", group=None)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_save_removes_what_a_killed_one_left(saved: Path) -> None:
    left = layout.create_temporary(saved, 3)
    (left / "__0_0.distcp").write_bytes(b"half")
    save(saved, 3, {}, {}, group=None)
    assert not left.exists()
    assert layout.latest(saved) == 3


def _padded(rows: int, filler: float) -> dict[str, torch.Tensor]:
    """Two tensors with 5 real rows and some that pad the vocabulary."""
    names = ("embedding.word_embeddings.weight", "optimizer.state.exp_avg.output_layer.weight")
    real = torch.arange(15.0).view(5, 3)
    return {name: torch.cat([real, torch.full((rows - 5, 3), filler)]) for name in names}


def _vocabulary(rows: int) -> dict[str, Any]:
    return {"model": {"vocab_size": 5, "padded_vocab_size": rows}}


def test_rows_that_pad_the_vocabulary_stay_out_of_the_checksum(tmp_path: Path) -> None:
    entries = []
    for filler in (1.0, 2.0):
        path = save(tmp_path, int(filler), _padded(8, filler), _vocabulary(8), group=None)
        entries.append(Manifest.read(path).tensors)
    assert entries[0] == entries[1]
    changed = _padded(8, 1.0)
    changed["embedding.word_embeddings.weight"][4, 2] += 1
    path = save(tmp_path, 3, changed, _vocabulary(8), group=None)
    assert Manifest.read(path).tensors != entries[0]


@pytest.mark.parametrize("rows", [5, 6, 8, 16])
def test_a_vocabulary_padded_to_another_size_loads(tmp_path: Path, rows: int) -> None:
    save(tmp_path, 1, _padded(8, 1.0), _vocabulary(8), group=None)
    tensors = {name: torch.zeros(rows, 3) for name in _padded(8, 1.0)}
    load(tmp_path, tensors, group=None, model=_vocabulary(rows)["model"])
    expected = _padded(8, 1.0) if rows == 8 else _padded(rows, 0.0)
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, _padded(8, 1.0), _vocabulary(8), group=None)
    with pytest.raises(CheckpointError, match="vocab_size is 5 in the checkpoint and 6"):
        load(tmp_path, {}, group=None, model={"vocab_size": 6, "padded_vocab_size": 8})
    with pytest.raises(CheckpointError, match=r"has shape \[8, 3\] .* \[4, 3\] in this run"):
        load(tmp_path, {name: torch.zeros(4, 3) for name in _padded(8, 1.0)}, group=None)


def test_every_file_of_a_checkpoint_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = disk.watch(monkeypatch)
    save(tmp_path, 1, {"a": torch.ones(40, 8), "b": torch.arange(5)}, {"c": 1}, group=None)
    checkpoint = layout.locate(tmp_path, 1)
    named = happened.index(("name", str(checkpoint)))
    synced = {
        Path(path).name.removesuffix(".tmp") for what, path in happened[:named] if what == "sync"
    }
    files = {path.name for path in checkpoint.rglob("*") if path.is_file()}
    assert any(name.endswith(".distcp") for name in files)
    assert files <= synced
