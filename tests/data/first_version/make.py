"""Makes the files of this directory; they were made at commit 13284d7, the first version.

    PYTHONPATH=. python tests/data/first_version/make.py OUT

A GPT on two workers that follows a file of plans, and a BERT that plans for itself and records it;
each has six iterations, and a checkpoint after the third. The losses of all six are written beside.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from megatron_flex.config.config import Architecture
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs
from tests.unit.data.files import write

MODEL = shlex.split(
    "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 64"
    " --make-vocab-size-divisible-by 32 --adam-eps 1e-6 --distributed-backend gloo --num-workers 0"
    " --split 1,0,0"
)
LAST, SAVED = 6, 3
PLANS = """\
0:2@0 | 2:4@1               # even
0:3@0 | 3:4@1 ; recompute 1 # one more unit, one that is recomputed
0:4@0,1 ; shard 0-3         # replicas
0:1@1 | 1:4@0,1 ; optimizer 2 ; activations 3
"""


def flags(directory: Path, architecture: Architecture) -> list[str]:
    """Flags of a run; its data and its words are written into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(runs.VOCABULARY)]
    if architecture == "gpt":
        data = runs.write_documents(directory / "text")
    else:
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        names += [f"w{i}" for i in range(runs.VOCABULARY - len(names))]
        (directory / "vocab.txt").write_text("\n".join(names) + "\n")
        words = ["--tokenizer-type", "BertWordPieceLowerCase"]
        words += ["--vocab-file", str(directory / "vocab.txt")]
        rng = np.random.default_rng(1)
        data = write(
            directory / "text",
            [
                [rng.integers(5, len(names), rng.integers(2, 20)).tolist() for _ in range(3)]
                for _ in range(40)
            ],
        )
    return [*MODEL, *words, *runs.TRAINING, "--data-path", data, "--train-iters", str(LAST)]


def main(out: Path) -> None:
    """Run both."""
    (out / "plans.txt").write_text(PLANS)
    both: tuple[tuple[Architecture, list[str]], ...] = (
        ("gpt", ["--flexpipe-plans", str(out / "plans.txt")]),
        ("bert", ["--flexpipe", "--flexpipe-record", str(out / "record.jsonl")]),
    )
    for name, more in both:
        more += ["--save", str(out / name), "--save-interval", str(SAVED)]
        with closing(WorkerPool()) as workers:
            found = runs.run(workers, 2, [*flags(out / "data", name), *more], name)
        (out / name / "losses.json").write_text(json.dumps(found.losses))
        shutil.rmtree(out / name / f"iter_{LAST:07d}")
        (out / name / ".checkpoint.lock").unlink()
        (out / name / "latest_checkpointed_iteration.txt").write_text(f"{SAVED}\n")
        shutil.rmtree(out / "data")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
