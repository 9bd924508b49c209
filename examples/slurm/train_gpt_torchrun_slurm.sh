#!/usr/bin/env bash
#SBATCH --job-name=gpt-345m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# GPT of 345 million parameters on 16 GPUs, with a torchrun on each node: one that loses a worker
# starts all of them again, and they go on from copies in the nodes' memory (docs/twinlayer.md), which
# takes seconds and loses at most SNAPSHOT_INTERVAL iterations. Submit it from the root of the
# repository, where `make demo` has made .venv, or with VENV set:
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#     sbatch examples/slurm/train_gpt_torchrun_slurm.sh
#
# Sizes are variables too (NUM_LAYERS, HIDDEN_SIZE, GLOBAL_BATCH_SIZE and the others below), nodes and
# GPUs sbatch's own flags or variables (examples/slurm/common.sh), and what follows the script goes to
# pretrain_gpt.py:
#
#   sbatch --nodes=4 examples/slurm/train_gpt_torchrun_slurm.sh --seed 7
#
# Five minutes before its time is up the run saves, and the job goes back into the queue; so it does
# when a node is lost, or a worker more often than MAX_RESTARTS times.
set -euo pipefail

if [[ ! -f examples/slurm/common.sh ]]; then
    echo "error: $PWD is not the root of the repository: submit the script from there, or with" \
        "sbatch --chdir=DIRECTORY" >&2
    exit 2
fi
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
# shellcheck source=examples/slurm/common.sh
source examples/slurm/common.sh

: "${DATA_PATH:?prefix of the .bin and .idx files}"
: "${TOKENIZER_MODEL:?the SentencePiece model that they were made with}"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt-345m/checkpoints}
LOG_PATH=${LOG_PATH:-runs/gpt-345m}

# torchrun learns from srun where it runs; a worker's place it says itself.
unset WORLD_SIZE LOCAL_WORLD_SIZE
# A torchrun that is told to end leaves its workers the time to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$WARNING_SECONDS
# It calls that a failure, whatever they did: where a node was told (`scancel --signal=TERM`) and the
# run has saved, the step ends well.
export CHECKPOINT_PATH
# shellcheck disable=SC2016 # the variables are each node's own
TOLD=(
    bash -c '
        saved() { cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" 2>/dev/null; }
        told= before=$(saved)
        trap "told=1" TERM
        "$@" &
        while wait $!; status=$?; [[ $told == 1 ]]; do told=2; done
        [[ -z $told || $(saved) == "$before" ]] || status=0
        exit "$status"' torchrun
)
DISTRIBUTED_ARGS=(
    "${STEP_ARGS[@]}"
    --ntasks="$NODES"
    --ntasks-per-node=1
    "${TOLD[@]}" "${INSIDE[@]}" "$PYTHON" -m torch.distributed.run
    --nnodes="$NODES"
    --nproc-per-node="$GPUS_PER_NODE"
    --max-restarts="${MAX_RESTARTS:-3}"
    --rdzv-id="$SLURM_JOB_ID"
    --rdzv-backend=c10d
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
)

# bf16 on GPUs, fp32 where gloo says that there are none.
PRECISION=()
[[ ${BACKEND:-nccl} == gloo ]] || PRECISION=(--bf16)

GPT_MODEL_ARGS=(
    --num-layers "${NUM_LAYERS:-24}"
    --hidden-size "${HIDDEN_SIZE:-1024}"
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}"
    --seq-length "${SEQ_LENGTH:-4096}"
    --position-embedding-type rope
    --attention-dropout 0
)

TRAINING_ARGS=(
    --global-batch-size "${GLOBAL_BATCH_SIZE:-128}"
    --train-iters "${TRAIN_ITERS:-50000}"
    "${PRECISION[@]}"
    --lr "${LR:-3.0e-4}"
    --min-lr "${MIN_LR:-3.0e-5}"
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --clip-grad 1.0
    --exit-signal-handler
)

# A plan for every iteration, and versions of all weights and optimizer state in the nodes' memory.
MODEL_PARALLEL_ARGS=(
    --flexpipe
    ${CLUSTER:+--flexpipe-cluster "$CLUSTER"}
    --flexpipe-record "$LOG_PATH/plans.txt"
    --flexpipe-twin-snapshot "${SNAPSHOT_INTERVAL:-20}"
    --distributed-backend "${BACKEND:-nccl}"
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split "${SPLIT:-949,50,1}"
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval "${SAVE_INTERVAL:-1000}"
    --keep-last-n 3
    --async-save
    --eval-interval 1000
    --eval-iters 10
    --tensorboard-dir "$LOG_PATH/tensorboard"
    --log-jsonl "$LOG_PATH/log.jsonl"
)

run_or_requeue srun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
