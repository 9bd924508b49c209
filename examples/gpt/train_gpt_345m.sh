#!/usr/bin/env bash
# GPT of 345 million parameters on the GPUs of one server, started with torchrun.
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#     bash examples/gpt/train_gpt_345m.sh
#
# Run it from the root of the repository with the environment active (source .venv/bin/activate).
# Sizes are variables too (GPUS_PER_NODE, NUM_LAYERS, HIDDEN_SIZE and the others below), and what
# follows the script goes to pretrain_gpt.py.
set -euo pipefail

refuse() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}
[[ -f pretrain_gpt.py ]] || refuse "$PWD is not the root of the repository: start the script there"
command -v torchrun >/dev/null || refuse "there is no torchrun on PATH: run \`make demo\` once, then" \
    "\`source .venv/bin/activate\`"

: "${DATA_PATH:?prefix of the .bin and .idx files}"
: "${TOKENIZER_MODEL:?the SentencePiece model that they were made with}"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/gpt-345m/checkpoints}
LOG_PATH=${LOG_PATH:-runs/gpt-345m}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "$GPUS_PER_NODE"
)

GPT_MODEL_ARGS=(
    --num-layers "${NUM_LAYERS:-24}"
    --hidden-size "${HIDDEN_SIZE:-1024}"
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}"
    --seq-length "${SEQ_LENGTH:-4096}"
    --position-embedding-type rope
    --attention-dropout 0
)

TRAINING_ARGS=(
    --micro-batch-tokens "${MICRO_BATCH_TOKENS:-8192}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-128}"
    --train-iters "${TRAIN_ITERS:-50000}"
    --bf16
    --lr "${LR:-3.0e-4}"
    --min-lr "${MIN_LR:-3.0e-5}"
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --clip-grad 1.0
    --exit-signal-handler
)

MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size "${PIPELINE_STAGES:-2}"
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
    --eval-interval 1000
    --eval-iters 10
    --tensorboard-dir "$LOG_PATH/tensorboard"
    --log-jsonl "$LOG_PATH/log.jsonl"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
