# shellcheck shell=bash
# What the Slurm scripts share: it is sourced, looks at job and environment before anything starts,
# says where the workers meet, and brings a job back into the queue when its time is up.
#
# Variables that it reads:
#   VENV              environment with the package (default .venv, which `make demo` makes)
#   NODES             nodes to use (default: all of the job; `sbatch --nodes=4` asks for more)
#   GPUS_PER_NODE     workers on each node, one a GPU (default: the job's tasks a node;
#                     `sbatch --gpus-per-node=4 --ntasks-per-node=4` asks for others)
#   WARNING_SECONDS   seconds before the end of the job at which it is warned (default 300, as in
#                     the scripts' `#SBATCH --signal`)
#   CLUSTER           the GPUs and links, for planning (--flexpipe-cluster: a100, h200, or a file;
#                     default: what the GPUs' name says, if it is one of these)
#   CONTAINER         an image to run in: one of apptainer (NAME.sif), or one for pyxis, which is
#                     enroot's in Slurm (a registry's name, or NAME.sqsh). VENV is not used then.
#   CONTAINER_MOUNTS  directories to have there beside the repository, such as /data:/data,/scratch:/scratch
#   CONTAINER_PYTHON  the image's Python with the package (default python3)

refuse() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

say() {
    printf 'job %s: %s\n' "$SLURM_JOB_ID" "$*"
}

# "1-02:03:04", "02:03:04" or "03:04", as squeue writes it, in seconds; nothing for UNLIMITED.
seconds_of() {
    local days=0 hours=0 minutes seconds
    [[ $1 =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return 0
    days=${BASH_REMATCH[2]:-0} hours=${BASH_REMATCH[4]:-0}
    minutes=${BASH_REMATCH[5]} seconds=${BASH_REMATCH[6]}
    echo $((((10#$days * 24 + 10#$hours) * 60 + 10#$minutes) * 60 + 10#$seconds))
}

# A warning before the run begins: it does not begin, and the job goes back into the queue.
warned=''
trap 'warned=1' USR1

# The job as squeue sees it: %L is the time that is left, %T its state.
job_has() {
    squeue --noheader --jobs "$SLURM_JOB_ID" --format "$1" 2>/dev/null || true
}

# A node's name where the workers can look it up, else the address that Slurm has of it.
address_of() {
    if getent ahosts "$1" >/dev/null; then
        echo "$1"
    else
        scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
    fi
}

# Iteration of the newest checkpoint; nothing if there is none.
saved_iteration() {
    cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" 2>/dev/null || true
}

# Asks all workers to save and end.
warn() {
    warned=1 interrupted=1
    scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
}

# Slurm may send the signal a minute early.
check_time() {
    local left
    left=$(seconds_of "$(job_has %L)")
    if [[ -n $left ]] && ((left <= WARNING_SECONDS + 60)); then
        refuse "the job ends in $left s, and $WARNING_SECONDS s before that (or up to a minute earlier)" \
            "it is warned: it would save and stop at once. Give a longer --time to sbatch, or a shorter" \
            "warning: WARNING_SECONDS=60 sbatch --signal=B:USR1@60"
    fi
}

# Whether the run was warned, perhaps while it started and had nothing to save: once at an iteration,
# since one that cannot save would be warned for ever.
warned_early() {
    local mark="$SLURM_JOB_ID $1" file=$CHECKPOINT_PATH/.warned
    [[ -n $warned && $(cat "$file" 2>/dev/null) != "$mark" ]] || return 1
    mkdir -p "$CHECKPOINT_PATH" && echo "$mark" >"$file"
}

# Runs srun with what is given. The job goes back into the queue if its time is up, and if it failed
# (a worker was killed, a node is gone) but has saved something since it started: so a job that fails
# at the same place each time ends.
run_or_requeue() {
    local before after step status=143 # of a run that SIGTERM has ended
    check_time
    before=$(saved_iteration)
    trap warn USR1 TERM
    if [[ -z $warned ]]; then
        "$@" &
        step=$!
        while :; do
            interrupted='' status=0
            wait "$step" || status=$?
            [[ -n $interrupted ]] || break # else it was the trap that ended the wait
        done
    fi
    trap '' USR1 TERM # a second warning must not end what follows
    after=$(saved_iteration)
    if [[ -z $warned ]] && ((status == 0)); then
        return 0
    fi
    # A job that somebody cancels or Slurm itself brings back is no longer running.
    [[ $(job_has %T) == RUNNING ]] || return "$status"
    if [[ $after == "$before" ]] && ((status != 0)) && ! warned_early "${before:-0}"; then
        say "ended with status $status, and nothing was saved since it started: it is not started again" >&2
        return "$status"
    fi
    if [[ -n $warned ]]; then
        say "its time is up; it goes on from iteration ${after:-0} when it is started again"
    else
        say "ended with status $status; it is started again, from iteration $after"
    fi
    scontrol requeue "$SLURM_JOB_ID" || refuse "the job cannot be queued again: submit it once more"
}

PYTHON=${VENV:-.venv}/bin/python
WARNING_SECONDS=${WARNING_SECONDS:-300}

[[ -n ${SLURM_JOB_ID:-} ]] || refuse "this is no Slurm job: start the script with sbatch"

# Where the workers run: on the node, or in a container.
CONTAINER_ARGS=() # for srun
INSIDE=()         # between srun and Python
MOUNTS=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
case ${CONTAINER:-} in
'')
    [[ -x $PYTHON ]] || refuse "$PYTHON is not there: run \`make demo\` in $PWD, or set VENV to the" \
        "environment in which the package is installed"
    ;;
*.sif)
    PYTHON=${CONTAINER_PYTHON:-python3}
    INSIDE=(apptainer exec --bind "$MOUNTS" --pwd "$PWD")
    [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || INSIDE+=(--nv)
    INSIDE+=("$CONTAINER")
    ;;
*)
    PYTHON=${CONTAINER_PYTHON:-python3}
    CONTAINER_ARGS=(
        --container-image="$CONTAINER"
        --container-mounts="$MOUNTS"
        --container-workdir="$PWD"
    )
    ;;
esac

NODES=${NODES:-$SLURM_NNODES}
TASKS_PER_NODE=$((${SLURM_NTASKS:-$SLURM_NNODES} / SLURM_NNODES))
GPUS_PER_NODE=${GPUS_PER_NODE:-$TASKS_PER_NODE}
((NODES <= SLURM_NNODES)) || refuse "NODES is $NODES, but the job has $SLURM_NNODES: give" \
    "--nodes=$NODES to sbatch"
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]] && ((GPUS_PER_NODE > SLURM_GPUS_ON_NODE)); then
    refuse "GPUS_PER_NODE is $GPUS_PER_NODE, but the job has $SLURM_GPUS_ON_NODE on a node: give" \
        "--gpus-per-node=$GPUS_PER_NODE --ntasks-per-node=$GPUS_PER_NODE to sbatch"
fi

# Where the workers meet. The port depends on the job, so that jobs on one node do not collide.
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(address_of "${HOSTS[0]}")
[[ -n $MASTER_ADDR ]] || refuse "nobody knows the address of ${HOSTS[0]}, where the workers are to meet"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# For srun, which since Slurm 22.05 takes the processors of a task only from its own flag.
STEP_ARGS=(
    --kill-on-bad-exit=1
    --relative=0
    --nodes="$NODES"
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
    "${CONTAINER_ARGS[@]}"
)

# One task a worker, which learns its place from Slurm.
export WORLD_SIZE=$((NODES * GPUS_PER_NODE))
export LOCAL_WORLD_SIZE=$GPUS_PER_NODE
# shellcheck disable=SC2034 # the scripts use it
DISTRIBUTED_ARGS=(
    "${STEP_ARGS[@]}"
    --cpu-bind=cores
    --ntasks="$WORLD_SIZE"
    --ntasks-per-node="$GPUS_PER_NODE"
)
# shellcheck disable=SC2016,SC2034 # the variables are each task's own; the scripts use it
WORKER=(
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$0" "$@"'
    "${INSIDE[@]}" "$PYTHON" -u
)
