"""Every command in README.md and docs/ works as printed; the expensive ones at a small size."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.end_to_end.processes import ROOT, Job
from tests.unit.data.chats import template, write_tokenizer

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

# Appended to the README's training commands: argparse takes the last of a flag.
SHORT = shlex.split(
    "--train-iters 4 --lr-warmup-iters 1 --global-batch-size 4 --micro-batch-tokens 512"
    " --seq-length 128 --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1"
    " --exit-signal-handler"
)
SMALL = [
    *SHORT,
    *shlex.split(
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --max-position-embeddings 128"
    ),
]


# What the tests' own processes, which end with them, cannot.
STARTS_PROCESSES = (
    "tools/train_tokenizer.py",
    "tools/preprocess_data.py",
    "tools/profile_layers.py",
)


def commands(document: Path) -> list[str]:
    """The commands of a document's bash blocks, each on one line."""
    blocks = re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.M | re.S)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


ALL = [(document, command) for document in DOCUMENTS for command in commands(document)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that looks like the repository, with a JSONL file of the user's own."""
    directory = tmp_path_factory.mktemp("place")
    for entry in ROOT.iterdir():
        if entry.name in ("runs", ".git", "build") or entry.name.startswith("."):
            continue
        (directory / entry.name).symlink_to(entry)
    sources = sorted((ROOT / "megatron_flex").rglob("*.py")) * 2
    with (directory / "my.jsonl").open("w") as stream:
        for source in sources:
            stream.write(json.dumps({"text": source.read_text()[:20000]}) + "\n")
    write_llama(directory / "Llama-3.2-1B")
    write_llama(directory / "Llama-3.2-1B-Instruct")
    write_tokenizer(directory / "Llama-3.2-1B-Instruct", template("llama-3"))
    with (directory / "my_chats.jsonl").open("w") as stream:
        for i in range(60):
            words = (("user", "hi"), ("assistant", f"{i} " * (i % 20 + 1)))
            messages = [{"role": role, "content": content} for role, content in words]
            stream.write(json.dumps({"messages": messages}) + "\n")
    yield directory
    shutil.rmtree(directory)


def write_llama(directory: Path) -> None:
    """A small model that looks like the one that the documents name."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=420,
        max_position_embeddings=131072,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    shutil.copy(ROOT / "tests" / "data" / "tokenizer_with_truncation" / "tokenizer.json", directory)


def run(words: list[str], place: Path) -> str:
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def python(words: list[str], place: Path, number: int) -> None:
    """What ``python`` would run, in a process that has imported PyTorch already."""
    with Job(place / f"job{number}").start(words[0], words[1:], directory=place) as job:
        assert job.wait(120) == [0], f"python {shlex.join(words)}\n{job.output}"


def torchrun(words: list[str], place: Path, number: int) -> str:
    """What ``torchrun`` would start, from workers that have imported everything already."""
    assert words[0] == "--standalone", "a port of its own"
    assert words[1] == "--nproc-per-node"
    size, script, argv = int(words[2]), words[3], words[4:]
    if "--skip-train" not in argv:
        argv = [*argv, *(SHORT if "--load-hf" in argv else SMALL)]
    with Job(place / f"job{number}").start(script, argv, size=size, directory=place) as job:
        assert job.wait(120) == [0] * size, job.output
        return job.text(size - 1)


def test_the_documents_have_commands() -> None:
    found = [command for _, command in ALL]
    assert found[:2] == ["make demo", "make test"]
    assert sum(command.startswith("torchrun") for command in found) >= 2


def test_every_command_works_as_printed(place: Path) -> None:
    # In order: later commands use what earlier ones wrote, as for a reader.
    for number, (document, command) in enumerate(ALL):
        words = shlex.split(command)
        if words[0] == "make":
            # The demo and the suite themselves have tests, or are running: the target must exist.
            run(["make", "-n", *words[1:]], ROOT)
        elif words[0] == "python" and "chitchat.py" in words[1]:
            pytest.importorskip("chitchat_dataset")
            python([*words[1:], "--limit", "5"], place, number)
        elif words[0] == "megatron-flex" or words[:3] == ["python", "-m", "megatron_flex"]:
            start = 1 if words[0] == "megatron-flex" else 3
            run([sys.executable, "-m", "megatron_flex", *words[start:]], place)
        elif words[0] == "python":
            if words[1].startswith("benchmarks/"):
                words = [*words[:2], "--help"]
            if words[1] in STARTS_PROCESSES:
                run([sys.executable, *words[1:]], place)
            else:
                python(words[1:], place, number)
        elif words[0] == "torchrun":
            text = torchrun(words[1:], place, number)
            if "--skip-train" in words:
                assert "validation loss at iteration 4 on validation set" in text
            else:
                assert "successfully saved checkpoint from iteration       4" in text
        elif not re.search(r"(^| )(sbatch|salloc) ", command):  # of which test_slurm.py is
            # test_wheel.py makes a wheel.
            assert command in (
                "source .venv/bin/activate",
                "pip wheel . --no-deps --wheel-dir dist",
            ), f"{document.name}: the test does not know how to try '{command}'"


def test_the_same_training_command_again_resumes(place: Path) -> None:
    command = next(c for d, c in ALL if d.name == "README.md" and "--save " in c)
    assert (place / "runs" / "mine" / "checkpoints").is_dir(), "written by the test above"
    text = torchrun(shlex.split(command)[1:], place, len(ALL))
    assert "iteration 4 of runs/mine/checkpoints: starting at iteration 4" in text
    assert "nothing is left to train after iteration 4; a larger --train-iters trains on" in text


def test_the_plan_of_the_page_on_training_fits_its_command() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    plan = re.search(r'^--flexpipe-plan "(.*)"$', text, re.M)
    assert plan is not None
    from megatron_flex.arguments import parse

    command = next(c for d, c in ALL if d.name == "training.md" and "--save " in c)
    words = shlex.split(command.replace("--pipeline-model-parallel-size 2", ""))
    config = parse([*words[5:], "--flexpipe-plan", plan[1]], world_size=4)
    assert config.flexpipe.flexpipe_plan == plan[1]


def test_files_that_the_documents_name_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
        for name in re.findall(r"`((?:tests|examples|tools|benchmarks|docs)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), f"{document.name}: {name}"
        for name in re.findall(r"`((?:data|planner|schedule|runtime|loop|model)/\w*\.?\w*)`", text):
            assert (ROOT / "megatron_flex" / name).exists(), f"{document.name}: {name}"


def test_the_documents_name_no_flag_that_is_not_there() -> None:
    from megatron_flex.config.config import all_options

    known = {flag for option in all_options() for flag in option.flags}
    others = {"--help", "--standalone", "--nproc-per-node", "--master-port"}
    others |= {"--chdir", "--signal", "--time", "--build-arg"}  # of sbatch and docker
    for tool in (p for room in ("tools", "benchmarks") for p in (ROOT / room).rglob("*.py")):
        others |= set(re.findall(r'"(--[a-z][\w-]*)"', tool.read_text()))
    for document in DOCUMENTS:
        if document.name == "flags.md":
            continue  # generated from the parser, and checked against it
        prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
        for flag in re.findall(r"`(--[a-z][\w-]*)", prose):
            assert flag in known | others, f"{document.name}: {flag}"


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    sources = [*(ROOT / "megatron_flex").rglob("*.py"), *(ROOT / "examples").rglob("*.sh"),
               ROOT / "kernels" / "build.py", ROOT / "Makefile"]  # fmt: skip
    # A message may be written in several pieces, on several lines, and with values in between.
    text = "".join(re.sub(r'(?<![A-Za-z])f(?=")', "", path.read_text()) for path in sources)
    said = re.sub(r'["\s\\]+', " ", text)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (`.*?`(?:, `.*?`)*) \|", page, re.M)
    assert len(rows) > 30
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row):
            for piece in filter(None, map(str.strip, re.split(r"\.\.\.", message))):
                words = re.sub(r'["\s]+', " ", piece)
                assert words.strip(":, ") in said, f"nothing says '{piece}'"
