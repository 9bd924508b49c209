#!/usr/bin/env bash
# GPT of 345 million parameters on the GPUs of one server, started with torchrun.
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#     bash examples/gpt/train_gpt_345m.sh
#
# Run it from the root of the repository with the environment active (source .venv/bin/activate).
set -euo pipefail

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
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 4096
    --position-embedding-type rope
    --attention-dropout 0
)

TRAINING_ARGS=(
    --micro-batch-tokens 8192
    --global-batch-size 128
    --train-iters 50000
    --bf16
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --clip-grad 1.0
    --exit-signal-handler
)

MODEL_PARALLEL_ARGS=(
    --pipeline-model-parallel-size 2
    --distributed-backend nccl
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split 949,50,1
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
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
    "${EVAL_AND_LOGGING_ARGS[@]}"
