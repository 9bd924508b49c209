"""The scripts in examples/: what they start is complete and accepted, on any number of nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.arguments import parse
from megatron_flex.config.config import Architecture, Config
from tests.end_to_end.processes import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*/train_*.sh"))
SLURM = [script for script in SCRIPTS if "slurm" in script.name]
BY_TASKS = [script for script in SLURM if "torchrun" not in script.name]
(BY_TORCHRUN,) = set(SLURM) - set(BY_TASKS)

# Stands in for srun and torchrun: leaves out their own flags, and starts "task 3".
LAUNCHER = r"""#!/usr/bin/env bash
export LAUNCHED_WITH="$*"
while [[ $1 == --* ]]; do [[ $1 == --nproc-per-node ]] && shift; shift; done
export SLURM_PROCID=3 SLURM_LOCALID=3
[[ $1 == *.py ]] && set -- python "$@"
exec "$@"
"""
APPTAINER = """#!/usr/bin/env bash
while [[ $1 != *.sif ]]; do shift; done
exec "${@:2}"
"""
SCONTROL = r"""#!/usr/bin/env bash
case "$2" in
hostnames) printf 'node-a\nnode-b\n' ;;
node) printf '   NodeAddr=10.1.2.%s NodeHostName=%s Version=22\n' "${#3}" "$3" ;;
esac
"""
# Stands in for Python: writes what it was started with.
PYTHON = r"""#!/usr/bin/env bash
exec /usr/bin/env python3 -S -c '
import json, os, sys
json.dump({"argv": sys.argv[2:], "environment": dict(os.environ)}, open(sys.argv[1], "w"))
' "$RECORD" "$@"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with the stand-ins."""
    directory = tmp_path / "bin"
    directory.mkdir()
    contents = {
        "srun": LAUNCHER,
        "torchrun": LAUNCHER,
        "apptainer": APPTAINER,
        "python": PYTHON,
        "scontrol": SCONTROL,
        "squeue": '#!/usr/bin/env bash\nprintf "%s\\n" "${TIME_LEFT:-1-00:00:00}"\n',
        "getent": "#!/usr/bin/env bash\n[[ $2 != ${UNKNOWN:-} ]]\n",
    }
    for name, content in contents.items():
        (directory / name).write_text(content)
        (directory / name).chmod(0o755)
    return directory


def run(
    script: Path,
    programs: Path,
    *more: str,
    nodes: int = 1,
    directory: Path = ROOT,
    **variables: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm would (which runs a copy of it elsewhere), with further words."""
    record = programs / "record.json"
    record.unlink(missing_ok=True)
    stated = re.search(r"--ntasks-per-node=(\d+)", script.read_text())
    per_node = int(stated[1]) if stated else 8
    gpus = re.search(r"--gpus-per-node=(\d+)", script.read_text())
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VENV": str(programs.parent),
        "RECORD": str(record),
        "DATA_PATH": "/data/text_document",
        "TOKENIZER_MODEL": "/data/tokenizer.model",
        "VOCAB_FILE": "/data/vocab.txt",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_GPUS_ON_NODE": gpus[1] if gpus else "",
        **variables,
    }
    environment = {name: value for name, value in environment.items() if value}
    copy = programs / "slurm_script"
    shutil.copy(script, copy)
    return subprocess.run(
        ["bash", str(copy), *more], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


def started(
    script: Path, programs: Path, *more: str, nodes: int = 1, **variables: Any
) -> tuple[Config, dict[str, str]]:
    """The configuration and the environment of a worker that the script starts."""
    done = run(script, programs, *more, nodes=nodes, **variables)
    assert done.returncode == 0, done.stderr
    seen = json.loads((programs / "record.json").read_text())
    words = seen["argv"]
    place = next(i for i, word in enumerate(words) if word.startswith("pretrain_"))
    seen["environment"]["BEFORE"] = " ".join(words[:place])
    program, argv = words[place], words[place + 1 :]
    architecture: Architecture = "bert" if "bert" in program else "gpt"
    assert (ROOT / program).is_file()
    size = int(seen["environment"].get("WORLD_SIZE", "8"))
    return parse(argv, architecture=architecture, world_size=size), seen["environment"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_starts_a_run_that_is_accepted_and_can_be_stopped(
    script: Path, programs: Path
) -> None:
    config, _ = started(script, programs)
    assert config.training.exit_signal_handler
    assert config.checkpoint.save == config.checkpoint.load is not None
    assert config.logging.log_jsonl
    text = script.read_text() + (ROOT / "examples" / "slurm" / "common.sh").read_text()
    for array in ("DISTRIBUTED", "TRAINING", "MODEL_PARALLEL", "DATA", "EVAL_AND_LOGGING"):
        assert f"{array}_ARGS=(" in text
        assert f'"${{{array}_ARGS[@]}}"' in text


@pytest.mark.parametrize("script", BY_TASKS, ids=lambda script: script.name)
def test_a_task_knows_its_place_and_where_to_meet(script: Path, programs: Path) -> None:
    _, environment = started(script, programs, nodes=2)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == "16"
    assert environment["LOCAL_WORLD_SIZE"] == "8"
    assert environment["MASTER_ADDR"] == "node-a"
    assert 1024 < int(environment["MASTER_PORT"]) < 65536


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_sizes_come_from_variables_and_further_flags_from_the_command(
    script: Path, programs: Path
) -> None:
    sizes: dict[str, Any] = {
        "NUM_LAYERS": "6",
        "HIDDEN_SIZE": "96",
        "NUM_ATTENTION_HEADS": "3",
        "LR": "2e-4",
    }
    more = ["--seed", "7", "--train-iters", "12", "--log-file", "a name with blanks"]
    config, _ = started(script, programs, *more, BACKEND="gloo", **sizes)
    m = config.model
    assert (m.num_layers, m.hidden_size, m.num_attention_heads) == (6, 96, 3)
    assert (config.learning_rate.lr, config.parallel.distributed_backend) == (2e-4, "gloo")
    assert (config.training.seed, config.training.train_iters) == (7, 12)
    assert config.logging.log_file == "a name with blanks"


@pytest.mark.parametrize("script", BY_TASKS, ids=lambda script: script.name)
def test_nodes_and_gpus_come_from_the_job_or_from_variables(script: Path, programs: Path) -> None:
    config, environment = started(script, programs, nodes=2, NODES="1", GPUS_PER_NODE="4")
    assert config.world_size == 4
    assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "4")
    flags = environment["LAUNCHED_WITH"].split()
    assert {"--nodes=1", "--ntasks=4", "--ntasks-per-node=4"} <= set(flags)


def test_a_torchrun_on_each_node_meets_the_others_and_restarts(programs: Path) -> None:
    config, environment = started(BY_TORCHRUN, programs, nodes=2, SLURM_CPUS_PER_TASK="64")
    flags = environment["LAUNCHED_WITH"].split()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64"} <= set(flags)
    words = set(environment["BEFORE"].split())
    assert {"--nnodes=2", "--nproc-per-node=8", "--max-restarts=3"} <= words
    assert "--rdzv-endpoint=node-a:24711" in words
    assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
    assert config.flexpipe.flexpipe
    assert config.flexpipe.flexpipe_twin_snapshot == 20


def test_a_node_whose_name_nobody_knows_is_met_at_its_address(programs: Path) -> None:
    _, environment = started(BY_TASKS[0], programs, nodes=2, UNKNOWN="node-a")
    assert environment["MASTER_ADDR"] == "10.1.2.6"


def test_a_container_is_enroots_or_apptainers(programs: Path) -> None:
    inside: dict[str, Any] = {
        "CONTAINER_PYTHON": str(programs / "python"),
        "CONTAINER_MOUNTS": "/data:/data",
    }
    mounts = f"{ROOT}:{ROOT},/data:/data"
    _, environment = started(BY_TASKS[0], programs, CONTAINER="registry/image:1", **inside)
    flags = environment["LAUNCHED_WITH"].split()
    assert "--container-image=registry/image:1" in flags
    assert f"--container-mounts={mounts}" in flags
    for script in SLURM:
        _, environment = started(script, programs, CONTAINER="/images/a.sif", **inside)
        line = f"apptainer exec --bind {mounts} --pwd {ROOT} --nv /images/a.sif {programs}/python"
        assert line in environment["LAUNCHED_WITH"]


@pytest.mark.parametrize("script", BY_TASKS, ids=lambda script: script.name)
def test_a_plan_for_every_iteration_takes_the_place_of_stages(script: Path, programs: Path) -> None:
    config, _ = started(script, programs, "--flexpipe", "--flexpipe-lookahead", "4")
    assert config.flexpipe.flexpipe
    assert not {"micro_batch_tokens", "pipeline_model_parallel_size"} & config.given
    config, _ = started(script, programs, "--flexpipe-plan", "0:50@0-7", NUM_LAYERS="24")
    assert "micro_batch_tokens" in config.given
    assert "pipeline_model_parallel_size" not in config.given
    config, _ = started(script, programs, "--flexpipe-slice-tokens", "0")
    assert "pipeline_model_parallel_size" in config.given


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "short": ({"TIME_LEFT": "6:00"}, "the job ends in 360 s, and 300 s before that"),
    "shorter": ({"TIME_LEFT": "0:59"}, "the job ends in 59 s"),
    "not in Slurm": ({"SLURM_JOB_ID": ""}, "this is no Slurm job: start the script with sbatch"),
    "no environment": ({"VENV": ""}, ".venv/bin/python is not there: run `make demo`"),
    "too many nodes": ({"NODES": "3"}, "NODES is 3, but the job has 2: give --nodes=3 to sbatch"),
    "too many GPUs": ({"GPUS_PER_NODE": "9"}, "GPUS_PER_NODE is 9, but the job has 8 on a node"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("script", SLURM, ids=lambda script: script.name)
def test_what_is_wrong_with_a_job_is_said_before_anything_starts(
    script: Path, kind: str, programs: Path, tmp_path: Path
) -> None:
    variables, message = REFUSED[kind]
    root = tmp_path / "repository"  # without .venv
    root.mkdir()
    for name in ("examples", "pretrain_gpt.py", "pretrain_bert.py"):
        (root / name).symlink_to(ROOT / name)
    done = run(script, programs, nodes=2, directory=root, **variables)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (programs / "record.json").exists()


@pytest.mark.parametrize(
    ("left", "warning"),
    [("6:01", ""), ("2:01", "60"), ("01:00:00", ""), ("1-00:00:00", ""), ("UNLIMITED", "")],
)
def test_a_job_that_is_long_enough_starts(left: str, warning: str, programs: Path) -> None:
    started(SLURM[0], programs, TIME_LEFT=left, WARNING_SECONDS=warning)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_in_another_directory_says_so(
    script: Path, programs: Path, tmp_path: Path
) -> None:
    done = run(script, programs, directory=tmp_path)
    assert done.returncode == 2
    assert f"error: {tmp_path} is not the root of the repository" in done.stderr
    assert not (programs / "record.json").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_without_data_says_what_is_missing(script: Path, programs: Path) -> None:
    done = run(script, programs, DATA_PATH="")
    assert done.returncode != 0
    assert "DATA_PATH: prefix of the .bin and .idx files" in done.stderr


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = sorted((ROOT / "examples").rglob("*.sh"))
    assert len(scripts) >= 5
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
