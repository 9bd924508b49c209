"""Fine-tuning on real conversations: --flexpipe against static layouts, conversations a second.

    python benchmarks/finetune.py                      about 8 minutes on two idle cores
    python benchmarks/finetune.py --workers 4 --iterations 60 --repeats 3

Give no more workers than there are idle cores: where they share them nothing waits, and no layout
can gain anything.

Data: the dialogues of chitchat-dataset that have an answer (pip install chitchat-dataset), as
ChatML, the loss on the answers; made once, in --directory. All runs train the same model from the
same weights on the same batches. Even: --pipeline-model-parallel-size, whole conversations packed
to --micro-batch-tokens; replicas: the same without stages; flexpipe: costs are measured, and the
planner chooses layout and slices of every iteration. Runs alternate; what is printed is the median
over the runs of conversations divided by seconds, without the first --warmup iterations of each,
and the largest relative difference between their losses, which must be at most 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.products import make
from megatron_flex.data.bar import progress_bar
from megatron_flex.telemetry import jsonl

MARKS = ("<|im_start|>", "<|im_end|>")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Data:
    """Conversations, a tokenizer that was trained on them, and their tokens, in ``directory``."""

    directory: Path

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's model."""
        return self.directory / "tokenizer.model"

    @property
    def prefix(self) -> Path:
        """Of .bin and .idx."""
        return self.directory / "data_chat_document"

    def write(self) -> None:
        """Make what is missing."""
        chats, texts = self.directory / "chitchat.jsonl", self.directory / "texts.jsonl"
        make(chats, "examples/finetune/chitchat.py", "--output", chats)
        if not self.tokenizer.exists():
            with chats.open() as lines, texts.open("w") as stream:
                for line in lines:
                    for message in json.loads(line)["messages"]:
                        stream.write(json.dumps({"text": message["content"]}) + "\n")
        make(self.tokenizer, "tools/train_tokenizer.py", "--input", texts, "--vocab-size",
             4096, "--special-tokens", *MARKS, "--output", self.tokenizer)  # fmt: skip
        make(
            self.prefix.with_suffix(".idx"), "tools/preprocess_data.py", "--input", chats,
            "--output-prefix", self.directory / "data", "--sample-format", "chat", "--workers", 2,
            "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", self.tokenizer,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Losses of a run, and conversations a second after the warm-up."""

    losses: tuple[float, ...]
    rate: float


def train(name: str, layout: Sequence[str], data: Data, flags: argparse.Namespace) -> Outcome:
    """One run of pretrain_gpt.py.

    Raises:
        SystemExit: it failed; its output has been said.
    """
    log = data.directory / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    words = (
        f"--num-layers {flags.layers} --hidden-size {flags.hidden_size} --num-attention-heads"
        f" {flags.hidden_size // 64} --seq-length {flags.seq_length}"
        " --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"
        f" --data-path {data.prefix} --sample-format chat --split 1,0,0"
        f" --tokenizer-type SentencePieceTokenizer --tokenizer-model {data.tokenizer}"
        f" --global-batch-size {flags.global_batch_size} --train-iters {flags.iterations}"
        f" --lr 1e-4 --distributed-backend gloo --log-interval 10 --log-jsonl {log}"
    ).split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(flags.workers), "pretrain_gpt.py", *words, *layout]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
    records = [r for r in jsonl.read(log) if r["event"] == "iteration"]
    later = records[flags.warmup :]
    rate = flags.global_batch_size * len(later) / sum(r["elapsed"] for r in later)
    return Outcome(tuple(r["lm loss"] for r in records), rate)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "benchmarks" / "finetune")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10, help="iterations that are not timed")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=2048, help="of the static layouts"
    )
    flags = parser.parse_args()
    if not 0 <= flags.warmup < flags.iterations:
        parser.error("--warmup must be below --iterations")
    flags.directory.mkdir(parents=True, exist_ok=True)
    data = Data(flags.directory)
    data.write()
    layouts = {
        "even": ["--pipeline-model-parallel-size", str(flags.workers),
                 "--micro-batch-tokens", str(flags.micro_batch_tokens)],
        "replicas": ["--micro-batch-tokens", str(flags.micro_batch_tokens)],
        "flexpipe": ["--flexpipe", "--flexpipe-profile", "measure"],
    }  # fmt: skip
    found: dict[str, list[Outcome]] = {name: [] for name in layouts}
    with progress_bar(flags.repeats * len(layouts), "train", unit=" runs") as bar:
        for _ in range(flags.repeats):
            for name, layout in layouts.items():
                found[name].append(train(name, layout, data, flags))
                bar.update(1)
    rates = {name: statistics.median(o.rate for o in found[name]) for name in layouts}
    for name, rate in rates.items():
        spread = ", ".join(f"{o.rate:.2f}" for o in found[name])
        print(f"{name:9s} {rate:7.2f} conversations/s   (runs: {spread})")
    for name in ("even", "replicas"):
        print(f"flexpipe / {name}: {rates['flexpipe'] / rates[name]:.2f}")
    expected = found["even"][0].losses
    worst = max(
        abs(a - b) / abs(b)
        for outcomes in found.values()
        for outcome in outcomes
        for a, b in zip(outcome.losses, expected, strict=True)
    )
    print(f"losses: {expected[0]:.6f} to {expected[-1]:.6f}, differ by at most {worst:.1e}")
    if worst > TOLERANCE:
        sys.exit(f"that is more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
