from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_flex.data.errors import DataError
from megatron_flex.data.masking import BertVocabulary
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.paths import Split
from megatron_flex.data.samples import Overlong
from megatron_flex.data.sources import DataConfig, DataSets
from tests.unit.data.files import counting, write_flat


def config(**fields: Any) -> DataConfig:
    return DataConfig(vocab_size=60_000, **fields)


def tokens_of(sets: DataSets, split: Split, count: int) -> list[list[int]]:
    """Input tokens of the first samples of a split."""
    source = sets.source(split)
    assert source is not None
    batch = source.batch(0, count)
    result = []
    for i, length in enumerate(batch.lengths.tolist()):
        packed = source.packed(MicroBatch((Slice.all_of(i, length),)), inputs=True, targets=False)
        assert packed.tokens is not None
        result.append(packed.tokens.tolist())
    return result


def test_one_data_path_is_split_by_documents(tmp_path: Path) -> None:
    documents = counting([4] * 100)
    prefix = write_flat(tmp_path / "d", documents)
    sets = DataSets(config(data_path=(prefix,), split="80,15,5"))
    expected = {Split.TRAIN: (0, 80), Split.VALID: (80, 95), Split.TEST: (95, 100)}
    for split, (start, stop) in expected.items():
        read = tokens_of(sets, split, stop - start)
        assert sorted(read) == sorted(d[:-1] for d in documents[start:stop])


def test_without_a_split_megatrons_default_holds(tmp_path: Path) -> None:
    sets = DataSets(config(data_path=(write_flat(tmp_path / "d", counting([4] * 1000)),)))
    sizes = [s.sets[0].selection.size for s in map(sets.source, Split) if s is not None]
    assert sizes == [969, 30, 1]


def test_a_split_of_nothing_gives_no_source(tmp_path: Path) -> None:
    sets = DataSets(config(data_path=(write_flat(tmp_path / "d", counting([4] * 9)),), split="1"))
    assert sets.source(Split.TRAIN) is not None
    assert sets.source(Split.VALID) is None


def test_paths_for_each_split_are_used_whole(tmp_path: Path) -> None:
    train = write_flat(tmp_path / "t", counting([3] * 6))
    valid = write_flat(tmp_path / "v", counting([3] * 4, 900))
    sets = DataSets(config(train_data_path=(train,), valid_data_path=(valid,)))
    assert sorted(tokens_of(sets, Split.TRAIN, 6)) == [d[:-1] for d in counting([3] * 6)]
    assert sorted(tokens_of(sets, Split.VALID, 4)) == [d[:-1] for d in counting([3] * 4, 900)]
    assert sets.source(Split.TEST) is None
    with pytest.raises(DataError, match="a test, but no data path is given for test"):
        raise sets.nothing_for(Split.TEST, "somebody wants a test")


def test_weights_decide_how_often_a_set_is_drawn(tmp_path: Path) -> None:
    a = write_flat(tmp_path / "a", counting([3] * 5, 100))
    b = write_flat(tmp_path / "b", counting([3] * 50, 5000))
    sets = DataSets(config(data_path=("0.75", a, "0.25", b), split="1"))
    drawn = [tokens[0] < 5000 for tokens in tokens_of(sets, Split.TRAIN, 80)]
    assert sum(drawn) == 60


@pytest.mark.parametrize("words", [("0.5", "0.5"), ("", "")])
def test_two_equal_sets_of_a_blend_have_orders_of_their_own(
    tmp_path: Path, words: tuple[str, str]
) -> None:
    a = write_flat(tmp_path / "a", counting([3] * 60, 100))
    b = write_flat(tmp_path / "b", counting([3] * 60, 5000))
    path = [word for pair in zip(words, (a, b), strict=True) for word in pair if word]
    read = tokens_of(DataSets(config(data_path=tuple(path), split="1")), Split.TRAIN, 120)
    first = [(tokens[0] - 100) // 3 for tokens in read if tokens[0] < 5000]
    second = [(tokens[0] - 5000) // 3 for tokens in read if tokens[0] >= 5000]
    assert sorted(first) == sorted(second) == list(range(60))
    assert np.count_nonzero(np.equal(first, second)) < 10  # orders drawn apart share one or so


def test_prefixes_without_weights_are_mixed_by_size_each_sample_once(tmp_path: Path) -> None:
    a, b = counting([3] * 5, 100), counting([3] * 20, 5000)
    paths = (
        write_flat(tmp_path / "a", a),
        write_flat(tmp_path / "b", b),
    )
    sets = DataSets(config(data_path=(*paths, paths[0]), split="1"))
    read = tokens_of(sets, Split.TRAIN, 30)
    assert sorted(read) == sorted(d[:-1] for d in a + b + a)


def test_a_source_that_does_not_repeat_has_each_sample_once_whatever_the_weights(
    tmp_path: Path,
) -> None:
    a = write_flat(tmp_path / "a", counting([3] * 5, 100))
    b = write_flat(tmp_path / "b", counting([3] * 2, 5000))
    sets = DataSets(config(valid_data_path=("0.9", a, "0.1", b)))
    source = sets.source(Split.VALID, repeat=False)
    assert source is not None
    assert source.num_samples == 7
    assert source.batch(0, 100).size == 7


def test_pairs_are_found_beside_their_prefix(tmp_path: Path) -> None:
    write_flat(tmp_path / "x_prompt_document", [[1, 2, 3]])
    write_flat(tmp_path / "x_completion_document", [[4, 5]])
    sets = DataSets(config(data_path=(str(tmp_path / "x"),), split="1", sample_format="pair"))
    source = sets.source(Split.TRAIN)
    assert source is not None
    batch = source.batch(0, 1)
    assert (batch.tokens, batch.denominators) == (4, (2,))


def test_limits_reach_the_samples(tmp_path: Path) -> None:
    prefix = write_flat(tmp_path / "d", counting([3, 30, 4]))
    fields = {"data_path": (prefix,), "split": "1", "max_sample_length": 10}
    source = DataSets(config(**fields)).source(Split.TRAIN)
    assert source is not None
    assert source.batch(0, 3).lengths.max() == 10
    source = DataSets(config(**fields, overlong=Overlong.DROP)).source(Split.TRAIN)
    assert source is not None
    assert source.sets[0].selection.size == 2


@pytest.mark.parametrize("head", [True, False])
def test_bert_has_a_denominator_for_each_loss(head: bool) -> None:
    vocabulary = BertVocabulary(60_000, 1, 2, 3)
    sets = DataSets(
        config(
            mock_data=True,
            sample_format="bert",
            bert=vocabulary,
            bert_binary_head=head,
            max_sample_length=128,
        )
    )
    source = sets.source(Split.TRAIN)
    assert source is not None
    batch = source.batch(0, 8)
    assert len(batch.denominators) == (2 if head else 1)
    assert batch.denominators[1:] == ((8,) if head else ())
    assert batch.denominators[0] == int(np.maximum(1, np.rint(batch.lengths * 0.15)).sum())


def test_splits_and_seeds_have_orders_of_their_own() -> None:
    def lengths(seed: int, split: Split) -> list[int]:
        source = DataSets(config(mock_data=True, seed=seed)).source(split)
        assert source is not None
        return source.batch(0, 50).lengths.tolist()

    assert lengths(1, Split.TRAIN) == lengths(1, Split.TRAIN)
    drawn = [lengths(1, Split.TRAIN), lengths(1, Split.VALID), lengths(2, Split.TRAIN)]
    assert len({tuple(d) for d in drawn}) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give one source of data"),
        ({"mock_data": True, "data_path": ("a",)}, "give one source of data"),
        ({"data_path": ("a",), "valid_data_path": ("b",)}, "give one source of data"),
        ({"valid_data_path": ("b",), "split": "1"}, "--split divides --data-path"),
        ({"mock_data": True, "sample_format": "bert"}, r"\[CLS\]"),
        ({"data_path": ("0.5", "a", "b", "c")}, "either each prefix has a weight"),
    ],
)
def test_contradictions_are_errors_before_any_file_is_opened(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        DataSets(config(**fields))


def test_a_blend_in_which_one_set_is_empty_is_an_error(tmp_path: Path) -> None:
    a = write_flat(tmp_path / "a", counting([3] * 50))
    b = write_flat(tmp_path / "b", counting([3]))
    sets = DataSets(config(data_path=("1", a, "1", b), split="90,10,0"))
    assert sets.source(Split.TRAIN) is not None
    with pytest.raises(DataError, match=r"leaves no document of .*b for valid"):
        sets.source(Split.VALID)
