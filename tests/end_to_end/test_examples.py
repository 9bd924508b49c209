"""The scripts in examples/: what they start is complete and accepted, on any number of nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_flex.arguments import parse
from megatron_flex.config.config import Architecture, Config
from tests.end_to_end.processes import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*/*.sh"))
SLURM = [script for script in SCRIPTS if "slurm" in script.name]

# Stands in for srun and torchrun: leaves out their own flags, and starts "task 3".
LAUNCHER = r"""#!/usr/bin/env bash
while [[ $1 == --* ]]; do [[ $1 == --nproc-per-node ]] && shift; shift; done
export SLURM_PROCID=3 SLURM_LOCALID=3
[[ $1 == *.py ]] && set -- python "$@"
exec "$@"
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
        "python": PYTHON,
        "scontrol": "#!/usr/bin/env bash\nprintf 'node-a\\nnode-b\\n'\n",
    }
    for name, content in contents.items():
        (directory / name).write_text(content)
        (directory / name).chmod(0o755)
    return directory


def started(script: Path, programs: Path, nodes: int = 1) -> tuple[Config, dict[str, str]]:
    """The configuration and the environment of a worker that the script starts."""
    record = programs / "record.json"
    stated = re.search(r"--ntasks-per-node=(\d+)", script.read_text())
    per_node = int(stated[1]) if stated else 8
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
    }
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(record.read_text())
    argv = [word for word in seen["argv"] if word != "-u"]
    architecture: Architecture = "bert" if "bert" in argv[0] else "gpt"
    assert (ROOT / argv[0]).is_file()
    size = int(seen["environment"].get("WORLD_SIZE", "8"))
    return parse(argv[1:], architecture=architecture, world_size=size), seen["environment"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_starts_a_run_that_is_accepted_and_can_be_stopped(
    script: Path, programs: Path
) -> None:
    config, _ = started(script, programs)
    assert config.training.exit_signal_handler
    assert config.checkpoint.save == config.checkpoint.load is not None
    assert config.logging.log_jsonl
    text = script.read_text()
    for array in ("DISTRIBUTED", "TRAINING", "MODEL_PARALLEL", "DATA", "EVAL_AND_LOGGING"):
        assert f"{array}_ARGS=(" in text
        assert f'"${{{array}_ARGS[@]}}"' in text


@pytest.mark.parametrize("script", SLURM, ids=lambda script: script.name)
def test_a_task_knows_its_place_and_where_to_meet(script: Path, programs: Path) -> None:
    _, environment = started(script, programs, nodes=2)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == "16"
    assert environment["LOCAL_WORLD_SIZE"] == "8"
    assert environment["MASTER_ADDR"] == "node-a"
    assert 1024 < int(environment["MASTER_PORT"]) < 65536


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_without_data_says_what_is_missing(script: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "DATA_PATH"}
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "DATA_PATH: prefix of the .bin and .idx files" in done.stderr
