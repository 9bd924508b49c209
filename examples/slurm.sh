# shellcheck shell=bash
# What the Slurm scripts share: it is sourced, looks at job and environment before anything starts,
# and says where the workers meet.
#
# Variables that it reads:
#   VENV             environment with the package (default .venv, which `make demo` makes)
#   NODES            nodes to use (default: all of the job; `sbatch --nodes=4` asks for more)
#   GPUS_PER_NODE    workers on each node, one a GPU (default: the job's tasks a node;
#                    `sbatch --gpus-per-node=4 --ntasks-per-node=4` asks for others)
#   WARNING_SECONDS  seconds before the end of the job at which SIGTERM comes (default 300, as in
#                    the scripts' `#SBATCH --signal`)

refuse() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# "1-02:03:04", "02:03:04" or "03:04", as squeue writes it, in seconds; nothing for UNLIMITED.
seconds_of() {
    local days=0 hours=0 minutes seconds
    [[ $1 =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return 0
    days=${BASH_REMATCH[2]:-0} hours=${BASH_REMATCH[4]:-0}
    minutes=${BASH_REMATCH[5]} seconds=${BASH_REMATCH[6]}
    echo $((((10#$days * 24 + 10#$hours) * 60 + 10#$minutes) * 60 + 10#$seconds))
}

PYTHON=${VENV:-.venv}/bin/python
WARNING_SECONDS=${WARNING_SECONDS:-300}

[[ -n ${SLURM_JOB_ID:-} ]] || refuse "this is no Slurm job: start the script with sbatch"
[[ -x $PYTHON ]] || refuse "$PYTHON is not there: run \`make demo\` in $PWD, or set VENV to the" \
    "environment in which the package is installed"

# Slurm may send the signal a minute early.
LEFT=$(seconds_of "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %L 2>/dev/null || true)")
if [[ -n $LEFT ]] && ((LEFT <= WARNING_SECONDS + 60)); then
    refuse "the job ends in $LEFT s, and $WARNING_SECONDS s before that (or up to a minute earlier)" \
        "SIGTERM comes: it would save and stop at once. Give a longer --time to sbatch, or a shorter" \
        "warning: WARNING_SECONDS=60 sbatch --signal=TERM@60"
fi

NODES=${NODES:-$SLURM_NNODES}
GPUS_PER_NODE=${GPUS_PER_NODE:-$((SLURM_NTASKS / SLURM_NNODES))}
((NODES <= SLURM_NNODES)) || refuse "NODES is $NODES, but the job has $SLURM_NNODES: give" \
    "--nodes=$NODES to sbatch"
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]] && ((GPUS_PER_NODE > SLURM_GPUS_ON_NODE)); then
    refuse "GPUS_PER_NODE is $GPUS_PER_NODE, but the job has $SLURM_GPUS_ON_NODE on a node: give" \
        "--gpus-per-node=$GPUS_PER_NODE --ntasks-per-node=$GPUS_PER_NODE to sbatch"
fi

# Where the workers meet. The port depends on the job, so that jobs on one node do not collide.
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${HOSTS[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$((NODES * GPUS_PER_NODE))
export LOCAL_WORLD_SIZE=$GPUS_PER_NODE

# For srun.
# shellcheck disable=SC2034 # the scripts use it
DISTRIBUTED_ARGS=(
    --kill-on-bad-exit=1
    --cpu-bind=cores
    --relative=0
    --nodes="$NODES"
    --ntasks="$WORLD_SIZE"
    --ntasks-per-node="$GPUS_PER_NODE"
)
