#!/usr/bin/env bash
#SBATCH --job-name=bert-large
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# BERT of 24 layers on 8 GPUs, one task a GPU. Submit it from the root of the
# repository, where `make demo` has made .venv, or with VENV set. The data are made with
# tools/preprocess_data.py --split-sentences --tokenizer-type BertWordPieceLowerCase.
#
#   DATA_PATH=/data/corpus_text_sentence VOCAB_FILE=/data/bert-vocab.txt \
#     sbatch examples/bert/train_bert_large_slurm.sh
#
# Five minutes before its time is up every worker gets SIGTERM; the run saves and ends with status 0.
# Submitted again, it goes on from there, also on another number of nodes.
set -euo pipefail

: "${DATA_PATH:?prefix of the .bin and .idx files}"
: "${VOCAB_FILE:?the word pieces that they were made with, one a line}"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-runs/bert-large/checkpoints}
LOG_PATH=${LOG_PATH:-runs/bert-large}
PYTHON=${VENV:-.venv}/bin/python

# Where the workers meet. The port depends on the job, so that jobs on one node do not collide.
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${NODES[0]}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))

DISTRIBUTED_ARGS=(
    --kill-on-bad-exit=1
    --cpu-bind=cores
)

BERT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --attention-dropout 0
)

TRAINING_ARGS=(
    --micro-batch-tokens 8192
    --global-batch-size 256
    --train-iters 1000000
    --bf16
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style linear
    --lr-warmup-fraction .01
    --weight-decay 0.01
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
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB_FILE"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
    --keep-last-n 3
    --async-save
    --eval-interval 1000
    --eval-iters 10
    --tensorboard-dir "$LOG_PATH/tensorboard"
    --log-jsonl "$LOG_PATH/log.jsonl"
)

# shellcheck disable=SC2016 # the variables are each task's own
srun "${DISTRIBUTED_ARGS[@]}" \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$0" "$@"' \
    "$PYTHON" -u pretrain_bert.py \
    "${BERT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}"
