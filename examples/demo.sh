#!/usr/bin/env bash
# Trains a small GPT with four workers on the CPU, on the source of Python's own standard library.
#
#   make demo                                          the whole of it
#   make demo                                          again: trains on from the checkpoint
#   make demo WORKERS=2 PLAN="0:6@0 | 6:10@1"          trains on with other workers and stages
#   make demo PLAN="0:5@0 | 5:9@1 | 9:10@2,3"           trains on, with one uneven plan
#
# Everything it writes is under runs/demo; remove that to start from nothing. WORKERS, PLAN,
# ITERATIONS (of one run of this script) and RUN (another directory) may be set in the environment.
# Without make: put a Python that has this package first in PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RUN=${RUN:-runs/demo}
WORKERS=${WORKERS:-4}
ITERATIONS=${ITERATIONS:-50}
# A plan for every iteration, unless PLAN is a fixed one or there are other than four workers. A
# worker may fill 60 MB, so that batches with long samples need more stages than others.
BUDGET_GB=${BUDGET_GB:-0.06}
if [[ -z ${PLAN:-} && $WORKERS == 4 ]]; then PLAN=each; fi
export OMP_NUM_THREADS=1

say() { printf '\n== %s\n' "$*"; }

mkdir -p "$RUN/data"
if [[ ! -s $RUN/data/corpus.jsonl ]]; then
  say "Collecting the functions and classes of Python's standard library"
  python tools/stdlib_corpus.py --output "$RUN/data/corpus.jsonl"
fi
if [[ ! -s $RUN/data/tokenizer.model ]]; then
  say "Training a tokenizer on them"
  python tools/train_tokenizer.py --input "$RUN/data/corpus.jsonl" --vocab-size 4096 \
    --output "$RUN/data/tokenizer.model"
fi
TOKENIZER_ARGS=(
  --tokenizer-type SentencePieceTokenizer
  --tokenizer-model "$RUN/data/tokenizer.model"
)
if [[ ! -s $RUN/data/stdlib_text_document.bin || ! -s $RUN/data/stdlib_text_document.idx ]]; then
  say "Tokenizing"
  python tools/preprocess_data.py --input "$RUN/data/corpus.jsonl" \
    --output-prefix "$RUN/data/stdlib" "${TOKENIZER_ARGS[@]}" --append-eod --workers 2
fi

# A run that was interrupted goes on to its end; one that is complete is trained on.
done_before=0
if [[ -s $RUN/checkpoints/latest_checkpointed_iteration.txt ]]; then
  done_before=$(<"$RUN/checkpoints/latest_checkpointed_iteration.txt")
fi
last=$(((done_before / ITERATIONS + 1) * ITERATIONS))

GPT_MODEL_ARGS=(
  --num-layers 4
  --hidden-size 128
  --num-attention-heads 4
  --seq-length 8192
  --position-embedding-type rope
  --hidden-dropout 0
  --attention-dropout 0
)
TRAINING_ARGS=(
  --global-batch-size 16
  --train-iters "$last"
  --lr 3e-3
  --min-lr 3e-4
  --lr-decay-style cosine
  --lr-decay-iters 1000
  --lr-warmup-iters 10
  --override-opt_param-scheduler # a run that is trained on has another --train-iters
)
MODEL_PARALLEL_ARGS=(--distributed-backend gloo)
if [[ ${PLAN:-} == each ]]; then
  # The planner also says how each batch is cut: documents of up to 8,192 tokens, to slices.
  MODEL_PARALLEL_ARGS+=(
    --flexpipe
    --flexpipe-memory-budget-gb "$BUDGET_GB"
    --flexpipe-record "$RUN/plans.txt"
  )
elif [[ -n ${PLAN:-} ]]; then
  MODEL_PARALLEL_ARGS+=(--flexpipe-plan "$PLAN")
else
  MODEL_PARALLEL_ARGS+=(--pipeline-model-parallel-size "$WORKERS")
fi
if [[ ${PLAN:-} != each ]]; then
  MODEL_PARALLEL_ARGS+=(--micro-batch-tokens 1024 --flexpipe-slice-tokens 1024)
fi
DATA_ARGS=(--data-path "$RUN/data/stdlib_text_document" --split "97,3,0" "${TOKENIZER_ARGS[@]}")
EVAL_AND_LOGGING_ARGS=(
  --log-interval 10
  --eval-interval 25
  --eval-iters 2
  --save "$RUN/checkpoints"
  --load "$RUN/checkpoints"
  --save-interval 25
  --keep-last-n 2
  --exit-signal-handler
  --tensorboard-dir "$RUN/tensorboard"
  --log-jsonl "$RUN/log.jsonl"
  --log-file "$RUN/train.log"
  --flexpipe-trace "$RUN/trace.json"
  --flexpipe-trace-interval 5
)

if ((done_before)); then
  say "Training on from iteration $done_before to $last with $WORKERS workers"
else
  say "Training $last iterations with $WORKERS workers (they need some seconds to start)"
fi
stopped=
trap 'stopped=1' INT # the workers save and end; what torchrun says of it is its own
if ! torchrun --standalone --nproc-per-node "$WORKERS" pretrain_gpt.py \
  "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
  "${EVAL_AND_LOGGING_ARGS[@]}"; then
  if [[ -n $stopped ]]; then
    say "Stopped. The same command goes on from the last checkpoint"
    exit 130
  fi
  say "Training failed; the message above says why"
  exit 1
fi
trap - INT

if [[ ${PLAN:-} == each ]]; then
  say "Switches that the data caused (all of them: $RUN/plans.txt)"
  python examples/switches.py "$RUN/plans.txt"
fi

say "Writing a page on the run"
python tools/report.py "$RUN"

BIN=$(dirname "$(command -v torchrun)")
BIN=${BIN#"$PWD/"}
say "Done. In $PWD:"
cat <<END
  $RUN/report.html   a page on the run: open it in a browser
  $RUN/checkpoints   the last two checkpoints; any layout of any number of workers can load them
  $RUN/log.jsonl     one JSON object an iteration
  $RUN/tensorboard   the same for TensorBoard
  $RUN/trace.json    what each worker did when, for the page and for ui.perfetto.dev
  $RUN/train.log     all arguments, and log lines in the form of Megatron-LM

Try next, in that directory:
  $BIN/tensorboard --logdir $RUN/tensorboard
  make demo WORKERS=2 PLAN="0:6@0 | 6:10@1"
      the same training goes on with two workers and other stages, as if nothing had changed
  make demo PLAN="0:5@0 | 5:9@1 | 9:10@2,3"
      it goes on with four workers in one uneven layout
  $BIN/python tools/status.py $RUN
      what a run is at, also while it trains
  $BIN/python tools/draw_schedule.py --devices 4 --tokens 900,120,400,60,300 --schedule gpipe 1f1b
      what four workers do when, on five micro-batches of different lengths
  $BIN/python pretrain_gpt.py --help
README.md says how to train on your own data.
END
