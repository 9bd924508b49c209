"""Data that a run needs and the flags leave nothing of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flex.arguments import parse
from megatron_flex.data.errors import DataError
from megatron_flex.loop.assemble import assemble
from tests.end_to_end import runs
from tests.unit.data.files import write_flat


def assembled(*words: str) -> int:
    """Documents for validation."""
    parts = assemble(
        parse([*runs.MODEL, *runs.TRAINING, "--train-iters", "2", *words], world_size=1)
    )
    return 0 if parts.valid is None else sum(s.selection.size for s in parts.valid.sets)


def data(tmp_path: Path, documents: int) -> str:
    return write_flat(tmp_path / f"d{documents}", [[1, 2, 3]] * documents)


def test_a_split_that_rounds_to_no_validation_document_is_an_error(tmp_path: Path) -> None:
    words = ("--data-path", data(tmp_path, 12), "--eval-interval", "1", "--split")
    assert assembled(*words, "95,5,0") == 1  # 11.4 is the border
    message = (
        "--eval-interval needs validation data, but --split 97,3,0 leaves none of the 12 documents"
        " for valid"
    )
    with pytest.raises(DataError, match=message):
        assembled(*words, "97,3,0")
    assert assembled(*words[:2], "--split", "97,3,0") == 0  # nobody asks for it


def test_a_split_that_rounds_to_no_training_document_is_an_error(tmp_path: Path) -> None:
    words = ("--data-path", data(tmp_path, 2), data(tmp_path, 3), "--split", "1,99,0")
    with pytest.raises(DataError, match=r"training needs documents, but .* of the 5 documents"):
        assembled(*words)


def test_a_file_of_paths_without_validation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "paths.json"
    path.write_text(json.dumps({"train": data(tmp_path, 4), "valid": None}))
    words = ("--per-split-data-args-path", str(path))
    assert assembled(*words) == 0
    with pytest.raises(DataError, match="validation data, but no data path is given for valid"):
        assembled(*words, "--eval-interval", "1")
