"""Tensors that several ranks share: written in chunks, read by any other number of ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.checkpoint.conversion.shapes import weight_shapes
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import StoredTensors, load, verify
from megatron_flex.checkpoint.manifest import Manifest, tensor_entry
from megatron_flex.checkpoint.parts import Part, Value, parts_of, written_by
from megatron_flex.checkpoint.save import save
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import Cut, Piece, cut_of, full_shape, local_shape, pieces

GPT = ModelConfig(
    num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=27, padded_vocab_size=32,
    max_position_embeddings=8, ffn_hidden_size=32, kv_channels=4, num_query_groups=4, swiglu=True,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
MODEL = {"vocab_size": 27, "padded_vocab_size": 32}


def by_all(full: torch.Tensor, cut: Cut | None, size: int) -> Part:
    """All ranks' parts of a tensor in one process: as many chunks as ranks have pieces."""
    found: list[Piece] = []
    for index in range(1 if cut is None else size):
        for p in pieces(full.shape, cut, index, size):
            found.append(Piece(p.offsets, p.sizes, p.offsets))
    return Part(full, tuple(full.shape), tuple(found))


def of_rank(full: torch.Tensor, cut: Cut | None, index: int, size: int) -> torch.Tensor:
    """What one rank has of a full tensor."""
    own = torch.empty(local_shape(full.shape, cut, size), dtype=full.dtype)
    part = Part(own, tuple(full.shape), pieces(full.shape, cut, index, size))
    for p in part.pieces:
        block = full
        for dim, (start, length) in enumerate(zip(p.offsets, p.sizes, strict=True)):
            block = block.narrow(dim, start, length)
        part.view(p).copy_(block)
    return own


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_cut_in_and_any_out(
    shape: list[int], dim: int, parts: int, saved: int, loaded: int, dtype: torch.dtype
) -> None:
    dim = min(dim, len(shape) - 1)
    shape[dim] *= 8
    full, cut = torch.randn(shape).to(dtype), Cut(dim, parts)
    with tempfile.TemporaryDirectory() as directory:
        save(directory, 1, {"a": by_all(full, cut, saved), "b": full}, {}, group=None)
        for index in range(loaded):
            own = torch.zeros(local_shape(shape, cut, loaded), dtype=dtype)
            part = Part(own, tuple(shape), pieces(shape, cut, index, loaded))
            load(directory, {"a": part}, group=None)
            assert torch.equal(own, of_rank(full, cut, index, loaded))
            own.zero_()
            load(directory, {"b": part}, group=None)
            assert torch.equal(own, of_rank(full, cut, index, loaded))


def model_state() -> dict[str, torch.Tensor]:
    """A model's weights and one moment of each."""
    weights = {name: torch.randn(shape) for name, shape in weight_shapes(GPT).items()}
    return {**weights, **{f"optimizer.state.exp_avg.{n}": torch.randn_like(t)
                          for n, t in weights.items()}}  # fmt: skip


def test_a_model_is_the_same_whatever_shares_its_layers(tmp_path: Path) -> None:
    state = model_state()
    both = {name: by_all(t, cut_of(GPT, name), 2) for name, t in state.items()}
    save(tmp_path, 1, both, {"model": MODEL}, group=None)
    whole = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(tmp_path, whole, group=None)
    for name, tensor in state.items():
        assert torch.equal(whole[name], tensor), name
    for index in range(4):
        own = {n: torch.zeros(local_shape(t.shape, cut_of(GPT, n), 4)) for n, t in state.items()}
        load(tmp_path, parts_of(GPT, own, index, 4), group=None)
        for name, tensor in state.items():
            assert torch.equal(own[name], of_rank(tensor, cut_of(GPT, name), index, 4)), name
    stored = StoredTensors(tmp_path / "iter_0000001", verify(tmp_path), without="optimizer.")
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(stored[name], state[name])


def test_the_first_rank_writes_what_all_have() -> None:
    own = {"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(16, 8),
           "decoder.layers.0.mlp.linear_fc2.bias": torch.zeros(16)}  # fmt: skip
    parts = parts_of(GPT, own, 1, 4)
    part = parts["decoder.layers.0.mlp.linear_fc2.weight"]
    assert isinstance(part, Part)
    assert part.shape == full_shape((16, 8), Cut(1), 4) == (16, 32)
    assert part.pieces[0].offsets == (0, 8)
    assert list(written_by(parts, 1)) == ["decoder.layers.0.mlp.linear_fc2.weight"]
    assert written_by(parts, 0) == parts
    assert parts_of(GPT, own, 0, 1) == own


@pytest.mark.parametrize(("saved", "loaded"), [(32, 36), (36, 28), (32, 32)])
def test_words_are_found_wherever_padding_falls(tmp_path: Path, saved: int, loaded: int) -> None:
    name, words = "embedding.word_embeddings.weight", torch.randn(27, 3)
    full = torch.cat([words, torch.randn(saved - 27, 3)])
    model = {"vocab_size": 27, "padded_vocab_size": saved}
    save(tmp_path, 1, {name: by_all(full, Cut(0), 4)}, {"model": model}, group=None)
    found = []
    for index in range(4):
        own = torch.full((loaded // 4, 3), 7.0)
        load(tmp_path, parts_of(GPT, {name: own}, index, 4), group=None)
        found.append(own)
    rows = torch.cat(found)
    assert torch.equal(rows[:27], words)
    if saved != loaded:
        assert (rows[27:] == 7.0).all()
    whole = torch.full((loaded, 3), 7.0)
    load(tmp_path, {name: whole}, group=None)
    assert torch.equal(whole[:27], words)


def test_checksums_are_of_chunks_and_rows_of_padding_have_none(tmp_path: Path) -> None:
    name, full = "output_layer.weight", torch.randn(32, 3)
    for iteration, padding in ((1, 1.0), (2, 2.0)):
        full[27:] = padding
        parts: dict[str, Value] = {name: by_all(full, Cut(0), 4), "a": torch.ones(2)}
        save(tmp_path, iteration, parts, {"model": MODEL}, group=None)
    first, second = (Manifest.read(tmp_path / f"iter_000000{i}") for i in (1, 2))
    assert first.tensors == second.tensors
    entry = first.tensors[name]
    assert [chunk.offsets for chunk in entry.chunks] == [(0, 0), (8, 0), (16, 0), (24, 0)]
    assert entry.chunks[1].digest == tensor_entry(full[8:16]).digest
    assert entry.chunks[3].digest == tensor_entry(full[24:27]).digest
    assert not first.tensors["a"].chunks
    full[8, 0] += 1.0
    save(tmp_path, 3, {name: by_all(full, Cut(0), 4)}, {"model": MODEL}, group=None)
    changed = Manifest.read(tmp_path / "iter_0000003").tensors[name]
    assert changed.digest != entry.digest
    assert changed.chunks[0] == entry.chunks[0]


def test_whole_tensors_make_the_manifest_that_they_always_made(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": torch.ones(2)}, {}, group=None)
    body = json.loads((path / "manifest.json").read_bytes())
    assert body["version"] == 1
    assert set(body["tensors"]["a"]) == {"shape", "dtype", "digest", "rows"}
    path = save(tmp_path, 2, {"a": by_all(torch.ones(2), Cut(0), 2)}, {}, group=None)
    assert json.loads((path / "manifest.json").read_bytes())["version"] == 2


def test_parts_that_are_not_the_whole_are_refused(tmp_path: Path) -> None:
    full = torch.ones(4, 2)
    part = by_all(full, Cut(0), 2)
    half = Part(full, part.shape, part.pieces[:1])
    with pytest.raises(CheckpointError, match="parts of a are not the whole of it"):
        save(tmp_path, 1, {"a": half}, {}, group=None)
    twice = Part(full, part.shape, (part.pieces[0], part.pieces[0]))
    with pytest.raises(CheckpointError, match="the same part of a is given twice"):
        save(tmp_path, 1, {"a": twice}, {}, group=None)
    assert not list(tmp_path.glob("iter_*"))


def test_a_part_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(4, 2)}, {}, group=None)
    shape = (8, 2)
    part = Part(torch.zeros(4, 2), shape, pieces(shape, Cut(0), 0, 2))
    with pytest.raises(
        CheckpointError, match=r"a has shape \[4, 2\] in the checkpoint and \[8, 2\]"
    ):
        load(tmp_path, {"a": part}, group=None)
