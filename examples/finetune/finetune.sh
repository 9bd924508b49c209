#!/usr/bin/env bash
# From a Hugging Face model and a file of conversations to a trained Hugging Face model.
#
#   bash examples/finetune/finetune.sh Llama-3.2-1B-Instruct my_chats.jsonl runs/tuned
#
# MODEL is a directory with config.json, safetensors and tokenizer.json; CHATS is JSONL or .parquet
# (docs/finetuning.md says what is in it); everything is written to RUN, the trained model to
# RUN/model. What follows goes to pretrain_gpt.py. WORKERS (processes; default: the GPUs here, else
# 2), CLUSTER (--flexpipe-cluster, on GPUs), SEQ_LENGTH, TRAIN_ITERS, GLOBAL_BATCH_SIZE, LR, SPLIT,
# CHAT_TEMPLATE and BACKEND may be set in the environment. The same command again goes on where it was interrupted.
#
# Run it from the root of the repository with the environment active (source .venv/bin/activate).
set -euo pipefail

refuse() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}
[[ -f pretrain_gpt.py ]] || refuse "$PWD is not the root of the repository: start the script there"
command -v torchrun >/dev/null || refuse "there is no torchrun on PATH: run \`make demo\` once, then" \
    "\`source .venv/bin/activate\`"
(($# >= 3)) || refuse "give three words: MODEL CHATS RUN (a Hugging Face directory, a file of" \
    "conversations, a directory to write to)"
MODEL=${1%/} CHATS=$2 RUN=${3%/}
shift 3
[[ -f $MODEL/config.json ]] || refuse "$MODEL has no config.json: give a Hugging Face directory"
[[ -f $MODEL/tokenizer.json ]] || refuse "$MODEL has no tokenizer.json"
[[ -f $CHATS ]] || refuse "$CHATS is not there: give a file of conversations"
[[ ! -e $RUN/model ]] || refuse "$RUN/model is there already: move it, or give another directory"

GPUS=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
PRECISION=()
if ((GPUS)); then
    BACKEND=${BACKEND:-nccl}
    PRECISION=(--bf16)
fi
TRAIN_ITERS=${TRAIN_ITERS:-200}

# Samples cannot be longer than what the model has positions for.
POSITIONS=$(sed -nE 's/.*"(max_position_embeddings|n_positions)": *([0-9]+).*/\2/p' \
    "$MODEL/config.json" | head -n 1)
POSITIONS=${POSITIONS:-2048}
((${SEQ_LENGTH:=$((POSITIONS < 2048 ? POSITIONS : 2048))} <= POSITIONS)) ||
    refuse "SEQ_LENGTH=$SEQ_LENGTH is more than the $POSITIONS positions of $MODEL: lower it"

# A model that was never taught to chat gets ChatML.
if [[ -z ${CHAT_TEMPLATE:-} && ! -f $MODEL/chat_template.jinja ]] &&
    ! grep -qs '"chat_template"' "$MODEL/tokenizer_config.json"; then
    CHAT_TEMPLATE=examples/finetune/chatml.jinja
    printf 'note: %s has no chat template: it gets %s (CHAT_TEMPLATE chooses another)\n' \
        "$MODEL" "$CHAT_TEMPLATE" >&2
fi
TEMPLATE=()
[[ -z ${CHAT_TEMPLATE:-} ]] || TEMPLATE=(--chat-template "$CHAT_TEMPLATE")

# What the data were made from: other conversations need another RUN.
made_from=$(sha256sum -- "$CHATS" "$MODEL/tokenizer.json" ${CHAT_TEMPLATE:+"$CHAT_TEMPLATE"} |
    cut -d ' ' -f 1)
if [[ -s $RUN/data_chat_document.idx ]]; then
    [[ ! -e $RUN/data.sha256 || $(<"$RUN/data.sha256") == "$made_from" ]] ||
        refuse "$RUN has data that were made from another file, tokenizer or template than $CHATS:" \
            "give another directory, or remove $RUN"
else
    python tools/preprocess_data.py --input "$CHATS" --output-prefix "$RUN/data" \
        --sample-format chat "${TEMPLATE[@]}" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" \
        --workers "${PREPROCESS_WORKERS:-2}"
    printf '%s\n' "$made_from" >"$RUN/data.sha256"
fi

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node "${WORKERS:-$((GPUS ? GPUS : 2))}"
)
TRAINING_ARGS=(
    --load-hf "$MODEL"
    --seq-length "$SEQ_LENGTH"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-32}"
    --train-iters "$TRAIN_ITERS"
    --lr "${LR:-1e-5}"
    --min-lr "${MIN_LR:-1e-6}"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.03
    --exit-signal-handler
    "${PRECISION[@]}"
)
MODEL_PARALLEL_ARGS=(
    --flexpipe
    ${CLUSTER:+--flexpipe-cluster "$CLUSTER"}
    --flexpipe-profile measure
    --distributed-backend "${BACKEND:-gloo}"
)
DATA_ARGS=(
    --data-path "$RUN/data_chat_document"
    --sample-format chat
    --split "${SPLIT:-98,2,0}"
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --eval-interval "${EVAL_INTERVAL:-50}"
    --eval-iters 4
    --save "$RUN/checkpoints"
    --load "$RUN/checkpoints"
    --save-interval 100
    --keep-last-n 1
    --tensorboard-dir "$RUN/tensorboard"
    --log-jsonl "$RUN/log.jsonl"
)
trap 'printf "stopped: the same command goes on\n" >&2; exit 130' INT
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
trap - INT

reached=$(<"$RUN/checkpoints/latest_checkpointed_iteration.txt")
if ((reached < TRAIN_ITERS)); then
    printf 'stopped at iteration %s of %s: the same command goes on\n' "$reached" "$TRAIN_ITERS"
    exit 0
fi

python tools/checkpoint/convert.py --model-type GPT --loader flex --saver hf \
    --load-dir "$RUN/checkpoints" --save-dir "$RUN/model" "${TEMPLATE[@]}"
printf 'trained: %s\n' "$RUN/model"
