#!/usr/bin/env bash
#SBATCH --job-name=gpt-3.35b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# GPT of 3.35 billion parameters on 16 GPUs, one task a GPU. Submit it from the root of the
# repository, where `make demo` has made .venv, or with VENV set:
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#     sbatch examples/gpt/train_gpt_3.35b_slurm.sh
#
# Sizes are variables too (NUM_LAYERS, HIDDEN_SIZE, GLOBAL_BATCH_SIZE and the others below), nodes and
# GPUs sbatch's own flags or variables (examples/slurm/common.sh), and what follows the script goes to
# pretrain_gpt.py:
#
#   sbatch --nodes=4 examples/gpt/train_gpt_3.35b_slurm.sh --flexpipe --seed 7
#
# Five minutes before its time is up the run saves, and the job goes back into the queue; so it does
# when a worker or a node is lost. It goes on from what was saved last; submitted again it does, too,
# also on another number of nodes. `scancel` ends it: the run saves if Slurm leaves it the time.
set -euo pipefail

if [[ ! -f examples/slurm/common.sh ]]; then
    echo "error: $PWD is not the root of the repository: submit the script from there, or with" \
        "sbatch --chdir=DIRECTORY" >&2
    exit 2
fi
# shellcheck source=examples/slurm/common.sh
source examples/slurm/common.sh

: "${DATA_PATH:?prefix of the .bin and .idx files}"
: "${TOKENIZER_MODEL:?the SentencePiece model that they were made with}"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt-3.35b/checkpoints}
LOG_PATH=${LOG_PATH:-runs/gpt-3.35b}

# bf16 on GPUs, fp32 where gloo says that there are none.
PRECISION=()
[[ ${BACKEND:-nccl} == gloo ]] || PRECISION=(--bf16)

GPT_MODEL_ARGS=(
    --num-layers "${NUM_LAYERS:-16}"
    --hidden-size "${HIDDEN_SIZE:-4096}"
    --num-attention-heads "${NUM_ATTENTION_HEADS:-32}"
    --seq-length "${SEQ_LENGTH:-8192}"
    --position-embedding-type rope
    --attention-dropout 0
)

TRAINING_ARGS=(
    --global-batch-size "${GLOBAL_BATCH_SIZE:-256}"
    --train-iters "${TRAIN_ITERS:-100000}"
    "${PRECISION[@]}"
    --lr "${LR:-3.0e-4}"
    --min-lr "${MIN_LR:-3.0e-5}"
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --exit-signal-handler
)

# Stages of equal cost, unless the further flags say how: --flexpipe, or --flexpipe-plan and its like.
MODEL_PARALLEL_ARGS=(--distributed-backend "${BACKEND:-nccl}")
[[ -z ${CLUSTER:-} ]] || MODEL_PARALLEL_ARGS+=(--flexpipe-cluster "$CLUSTER")
if [[ " $* " != *" --flexpipe "* ]]; then
    MODEL_PARALLEL_ARGS+=(--micro-batch-tokens "${MICRO_BATCH_TOKENS:-8192}")
    if [[ " $* " != *" --flexpipe-plan"* ]]; then
        MODEL_PARALLEL_ARGS+=(--pipeline-model-parallel-size "${PIPELINE_STAGES:-4}")
    fi
fi

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

run_or_requeue srun "${DISTRIBUTED_ARGS[@]}" "${WORKER[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
