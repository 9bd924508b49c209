#!/usr/bin/env bash
# Runs a training command in an interactive allocation, one task a GPU. From the root of the
# repository:
#
#   salloc --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 --time=1:00:00
#   bash examples/slurm/interactive.sh pretrain_gpt.py --num-layers 4 ...
#   exit
#
# or at once: `salloc FLAGS bash examples/slurm/interactive.sh pretrain_gpt.py ...`. Variables are those
# of examples/slurm/common.sh. With --exit-signal-handler among the flags Ctrl-C saves and ends.
set -euo pipefail

if [[ ! -f examples/slurm/common.sh ]]; then
    echo "error: $PWD is not the root of the repository: start the script there" >&2
    exit 2
fi
# shellcheck source=examples/slurm/common.sh
source examples/slurm/common.sh
(($#)) || refuse "nothing to run: give pretrain_gpt.py or pretrain_bert.py, and its flags"

exec srun "${DISTRIBUTED_ARGS[@]}" "${WORKER[@]}" "$@"
