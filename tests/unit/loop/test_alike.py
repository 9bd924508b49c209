"""What of flags and files has to be the same on every server, and what need not."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.arguments import parse
from megatron_flex.cluster.cluster import DESCRIBED
from megatron_flex.loop.alike import of_the_files, of_the_flags
from megatron_flex.loop.assemble import assemble
from megatron_flex.runtime import launch
from megatron_flex.runtime.agreement import Facts
from tests.end_to_end import runs
from tests.unit.loop.test_tensor_size import FLAGS


def flags(*more: str) -> Facts:
    return of_the_flags(parse([*FLAGS, *more], world_size=4))


def differing(a: Facts, b: Facts) -> set[str]:
    return {name for name in {*a, *b} if a.get(name) != b.get(name)}


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("--seed 1", "--seed 2", {"--seed"}),
        ("", "--pipeline-model-parallel-size 2", {"--pipeline-model-parallel-size"}),
        ("--num-workers 0 --tensorboard-dir a --log-jsonl b", "--tensorboard-dir c", set()),
        ("--save a", "--save b", set()),
        ("--load a", "--load b", set()),
        ("--load a", "", {"--load"}),
        ("--flexpipe-plan 0:6@0-3", "--flexpipe-plan 0:6@3,2,1,0", {"--flexpipe-plan"}),
        ("--flexpipe-cluster a100", "--flexpipe-cluster h200", {"--flexpipe-cluster"}),
    ],
)
def test_flags(one: str, other: str, names: set[str]) -> None:
    assert differing(flags(*one.split()), flags(*other.split())) == names


def test_files_count_by_what_they_hold(tmp_path: Path) -> None:
    here, there, same = (tmp_path / name for name in ("here.yaml", "there.yaml", "same.yaml"))
    cluster = (DESCRIBED / "cpu.yaml").read_text()
    for path, speed in ((here, "60.0e+9"), (there, "70.0e+9"), (same, "60.0e+9")):
        path.write_text(cluster.replace("60.0e+9", speed))
    found = [flags("--flexpipe-cluster", str(path)) for path in (here, there, same)]
    assert differing(found[0], found[1]) == {"--flexpipe-cluster"}
    assert found[0] == found[2]
    (tmp_path / "words").mkdir()
    words = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{tmp_path}/words")
    plain = [word for word in FLAGS if word not in ("--tokenizer-type", "NullTokenizer")]
    plain = plain[: plain.index("--vocab-size")] + plain[plain.index("--vocab-size") + 2 :]
    found = []
    for text in ("{}", "{ }"):
        (tmp_path / "words" / "tokenizer.json").write_text(text)
        found.append(of_the_flags(parse([*plain, *words], world_size=4)))
    assert differing(*found) == {"--tokenizer-model"}


def test_data_counts_by_its_samples(tmp_path: Path) -> None:
    def facts(count: int, longest: int) -> Facts:
        prefix = runs.write_documents(tmp_path / f"{count}.{longest}", count, longest)
        words = [*runs.MODEL, *runs.TRAINING, "--train-iters", "4", "--data-path", prefix]
        config = parse(words, world_size=1)
        return of_the_files(config, assemble(config))

    first = facts(50, 60)
    assert first["the iteration to go on from"] == "0"
    assert differing(first, facts(50, 60)) == set()
    assert differing(first, facts(50, 50)) >= {"the train data's first lengths"}
    assert "the train data" in differing(first, facts(60, 60))


def test_servers_have_as_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = flags()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert differing(before, flags()) == {"the number of workers on a server"}
    assert "4 workers do not fill servers of 3" in launch._apart(0, 4, 1)
    assert launch._apart(0, 6, 1) == ""
