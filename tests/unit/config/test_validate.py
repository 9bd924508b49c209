"""Flags that contradict each other or have no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.config.commands import config, refusal

ITERS = ("--train-iters",)

FULL = "--recompute-granularity full"

WRONG: list[tuple[str, tuple[str, ...], str]] = [
    # (more flags, flags taken away, what the message says)
    (FULL, (), "--recompute-granularity full needs --recompute-method and --recompute-num-layers"),
    (
        f"{FULL} --recompute-method uniform --recompute-num-layers 2",
        (),
        "each half of a layer keeps its own here: use 1",
    ),
    (f"{FULL} --recompute-activations", (), "means --recompute-granularity selective, not full"),
    (
        f"{FULL} --recompute-method block --recompute-num-layers 1 --recompute-modules mlp",
        (),
        "--recompute-modules has no effect without --recompute-granularity selective",
    ),
    ("--flexpipe-slice-tokens -1", (), "expected auto, 0 for never, or a number of tokens"),
    ("--flexpipe-slice-tokens 00", (), "expected auto, 0 for never, or a number of tokens"),
    ("--flexpipe-slice-tokens some", (), "expected auto, 0 for never, or a number of tokens"),
    ("--flexpipe --flexpipe-bitwise", ("--micro-batch-tokens",), "cuts all batches alike"),
    ("--flexpipe-batching pad", (), "--flexpipe-batching pad takes --micro-batch-size samples"),
    (
        "--flexpipe-baseline megatron-pad",
        (),
        "--flexpipe-baseline megatron-pad takes --micro-batch-s",
    ),
    (
        "--flexpipe-batching bucket --micro-batch-size 2",
        ("--micro-batch-tokens",),
        "--flexpipe-batching bucket needs --micro-batch-tokens",
    ),
    ("--flexpipe-batching dynapipe", (), "chooses the size of every micro-batch: remove"),
    (
        "--flexpipe-batching dynapipe --flexpipe",
        ("--micro-batch-tokens",),
        "is for one plan that stays, and --flexpipe is not",
    ),
    (
        "--flexpipe-batching dynapipe --recompute-activations",
        ("--micro-batch-tokens",),
        "with --flexpipe-batching dynapipe the planner chooses what is recom",
    ),
    ("--flexpipe-batching pack --flexpipe-slice-tokens 64", (), "keeps samples whole: remove"),
    ("--flexpipe-baseline packed-1f1b --flexpipe", (), "--flexpipe-baseline keeps one plan"),
    ("--flexpipe-slice-tokens 0", ("--micro-batch-tokens",), "give either --micro-batch-tokens"),
    ("--recompute-method block", (), "--recompute-method has no effect without --recompute-gran"),
    ("--recompute-modules moe", (), "models are dense; use mlp"),
    ("--flexpipe --recompute-activations", (), "with --flexpipe the planner chooses what is recom"),
    ("--flexpipe-plans p --recompute-activations", (), "the plans in --flexpipe-plans say what"),
    ("--rotary-base 500", (), "--rotary-base has no effect without --position-embedding-type rope"),
    ("--num-query-groups 2", (), "--num-query-groups has no effect without --group-query"),
    ("--group-query-attention --num-query-groups 3", (), "4 is not a multiple of --num-query"),
    (
        "--num-attention-heads 6",
        (),
        "--hidden-size 64 is not a multiple of --num-attention-heads 6",
    ),
    (
        "--position-embedding-type rope --kv-channels 5",
        (),
        "rotary embeddings need an even number of channels, not 5",
    ),
    ("--max-position-embeddings 256", (), "samples may have 512 tokens, but --max-position"),
    ("--max-sample-length 900 --max-position-embeddings 512", (), "samples may have 900 tokens"),
    ("--bert-no-binary-head", (), "--bert-no-binary-head is for BERT"),
    ("--mask-prob .2", (), "--mask-prob is for BERT"),
    ("", ("--mock-data",), "give --tokenizer-type"),
    ("--tokenizer-type NullTokenizer", ("--mock-data",), "give one source of data"),
    ("--data-path a", (), "give one source of data: .* not several"),
    (
        "--data-path a --train-data-path b --tokenizer-type NullTokenizer",
        ("--mock-data",),
        "not several",
    ),
    (
        "--valid-data-path a --tokenizer-type NullTokenizer",
        ("--mock-data",),
        "give --train-data-path beside",
    ),
    (
        "--train-data-path a --split 1,1,1 --tokenizer-type NullTokenizer",
        ("--mock-data",),
        "--split has no effect on data sets for each split",
    ),
    (
        "--data-path 1 a b c --tokenizer-type NullTokenizer",
        ("--mock-data",),
        "either each prefix has a weight",
    ),
    ("--split 0,1,1", (), "leave nothing for training"),
    ("--split a,b", (), "--split a,b: field 'a' is not a finite number"),
    ("--split 1e308,1e308", (), "--split takes up to three proportions"),
    (
        "--data-path 0.5 a nan b --tokenizer-type NullTokenizer",
        ("--mock-data",),
        "--data-path: weight 'nan' is not a finite number",
    ),
    ("--split 1,0,1 --eval-interval 10", (), "--eval-interval needs validation data"),
    ("--pair-keys a b", (), "--pair-keys has no effect without --sample-format pair"),
    ("--sample-format pair", (), "--sample-format pair is for GPT and data on disk"),
    ("--sample-format chat", (), "--sample-format chat is for GPT and data on disk"),
    ("--sample-format chat --overlong split", (), "--overlong split is not for --sample-format"),
    ("", ("--vocab-size",), "--tokenizer-type NullTokenizer needs --vocab-size"),
    ("--tokenizer-model m", (), "--tokenizer-model has no effect with --tokenizer-type Null"),
    (
        "--padded-vocab-size 2048 --make-vocab-size-divisible-by 64",
        (),
        "--make-vocab-size-divisible-by has no effect with --padded-vocab-size",
    ),
    ("--padded-vocab-size 512", (), "the padded vocabulary .512. is smaller"),
    ("", ("--micro-batch-tokens",), "give either --micro-batch-tokens"),
    ("--micro-batch-size 2", (), "not both"),
    ("", ("--global-batch-size",), "give --global-batch-size"),
    ("", ITERS, "give either --train-iters or --train-samples"),
    ("--train-samples 100", (), "not both"),
    ("--train-samples 15", ITERS, "--train-samples 15 is less than one batch"),
    ("--lr-decay-samples 5", (), "--lr-decay-samples does not go with --train-iters: use --lr-de"),
    ("--lr-warmup-samples 5", (), "use --lr-warmup-iters"),
    ("--train-samples 320 --lr-warmup-iters 5", ITERS, "use --lr-warmup-samples"),
    ("--rampup-batch-size 4 4 64", (), "use --train-samples instead of --train-iters"),
    ("--train-samples 320 --rampup-batch-size 5 4 64", ITERS, "do not lead from 5 to"),
    ("--train-samples 320 --rampup-batch-size 0 4 64", ITERS, "takes a start and an increment"),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 5", (), "not both"),
    ("--lr-warmup-iters 20", (), "must be shorter than the schedule"),
    ("--lr-warmup-init 1e-5", (), "--lr-warmup-init has no effect without a warm-up"),
    ("--min-lr 1", (), "must not be above --lr"),
    ("--lr-warmup-init 1 --lr-warmup-iters 5", (), "must not be above --lr"),
    ("--lr-decay-style constant --min-lr 1e-5", (), "--min-lr has no effect with --lr-decay-style"),
    ("--lr-decay-style constant --lr-decay-iters 5", (), "--lr-decay-iters has no effect"),
    ("--lr-wsd-decay-iters 5", (), "--lr-wsd-decay-iters has no effect without --lr-decay-style"),
    ("--lr-decay-style WSD", (), "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 16 --lr-warmup-iters 5",
        (),
        "longer than what the warm-up leaves",
    ),
    ("--start-weight-decay .1", (), "--start-weight-decay has no effect without"),
    ("--weight-decay-incr-style linear", (), "needs --start-weight-decay and --end-weight-decay"),
    (
        "--weight-decay-incr-style linear --start-weight-decay .2 --end-weight-decay .1",
        (),
        "must not be above --end-weight-decay",
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay .1"
        " --weight-decay .1",
        (),
        "--weight-decay has no effect",
    ),
    (
        "--load d --override-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
        (),
        "not both",
    ),
    ("--override-opt_param-scheduler", (), "has no effect without --load of a run that goes on"),
    ("--save-interval 5", (), "--save-interval has no effect without --save"),
    ("--async-save", (), "--async-save has no effect without --save"),
    ("--log-progress", (), "--log-progress has no effect without --save"),
    ("--keep-last-n 2", (), "--keep-last-n has no effect without --save"),
    ("--save d --save-interval 4 --save-retain-interval 6", (), "must be a multiple of"),
    ("--ckpt-step 5", (), "--ckpt-step has no effect without --load"),
    ("--finetune", (), "--finetune has no effect without --load"),
    ("--no-load-optim", (), "--no-load-optim has no effect without --load"),
    ("--exit-on-missing-checkpoint", (), "has no effect without --load"),
    (
        "--load d --exit-on-missing-checkpoint --pretrained-checkpoint e",
        (),
        "which --exit-on-missing-checkpoint forbids",
    ),
    ("--tensorboard-log-interval 2", (), "has no effect without --tensorboard-dir"),
    ("--no-log-loss-scale-to-tensorboard", (), "has no effect without --tensorboard-dir"),
    ("--device-peak-tflops 9", (), "has no effect without --log-throughput"),
    ("--wandb-exp-name x", (), "--wandb-exp-name has no effect without --wandb-project"),
    ("--wandb-project x --wandb-save-dir d", (), "--wandb-project needs --wandb-exp-name"),
    ("--wandb-project x --wandb-exp-name y", (), "--wandb-project needs --wandb-save-dir"),
    ("--profile-step-start 3", (), "--profile-step-start has no effect without --profile"),
    ("--profile --profile-step-end 10", (), "--profile-step-end must be above"),
    ("--profile --use-pytorch-profiler", (), "writes its trace to --tensorboard-dir"),
    ("--profile --profile-ranks 1 4", (), "names worker 4, but there are 4"),
    ("--full-validation --eval-iters 5", (), "--eval-iters has no effect with --full-validation"),
    ("--skip-train --eval-interval 5", (), "--eval-interval has no effect with --skip-train"),
    ("--pipeline-model-parallel-size 3", (), "4 workers are no multiple of --pipeline-model-par"),
    ("--tensor-model-parallel-size 3", (), "4 workers are no multiple of --tensor-model-parallel"),
    (
        "--tensor-model-parallel-size 2 --flexpipe-plan 0:5@0|5:10@3",
        (),
        "; with --tensor-model-parallel-size 2 each of these is 2 workers",
    ),
    ("--sequence-parallel", (), "has no effect without --tensor-model-parallel-size of at least 2"),
    (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
        (),
        "1 groups of 4 workers are no multiple of --pipeline-model-parallel-size 2",
    ),
    (
        "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1",
        (),
        "--num-query-groups 1 is not a multiple of --tensor-model-parallel-size 2",
    ),
    (
        "--flexpipe-plan 0:10@0-3 --pipeline-model-parallel-size 2",
        (),
        "--pipeline-model-parallel-size has no effect with --flexpipe-plan",
    ),
    (
        "--flexpipe-plan 0:9@0-3",
        (),
        "--flexpipe-plan: the plan .* covers 9 units, the model has 10",
    ),
    (
        "--flexpipe-plan 0:10@0-3 --flexpipe-plans x",
        (),
        "--flexpipe-plan has no effect with --flexpipe-plans",
    ),
    ("--flexpipe-memory-budget-gb 1e300", (), "must be at most"),
    ("--flexpipe --flexpipe-lookahead 1000000000", (), "must be at most 1000"),
    ("--flexpipe-twin-snapshot 5 --flexpipe-twin-timeout 1e300", (), "must be at most"),
    ("--flexpipe-no-twin", (), "--flexpipe-no-twin has no effect without --flexpipe or"),
    ("--skip-train --flexpipe-record x", (), "--flexpipe-record has no effect with --skip-train"),
    ("--flexpipe-twin-timeout 9", (), "no effect without --flexpipe-twin-snapshot"),
    ("--flexpipe-twin-snapshot 5 --flexpipe-no-twin", (), "keeps what --flexpipe-no-twin forbids"),
    (
        "--flexpipe-twin-snapshot 5 --save a --save-interval 9",
        (),
        "give --load the directory of --save",
    ),
    (
        "--flexpipe-twin-snapshot 5 --save a --save-interval 9 --load b",
        (),
        "give --load the directory of --save",
    ),
    ("--flexpipe-plan 0:10@0-4", (), "names device 4, but there are 4 workers"),
    ("--flexpipe-plan 0:5@x", (), "--flexpipe-plan: stage 0 of the plan is '0:5@x'"),
    (
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 5",
        (),
        "--decoder-last-pipeline-num-layers",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tL",
        (),
        "--pipeline-model-parallel-layout Ett.tL: must be one E, then 4 t",
    ),
    ("--flexpipe --flexpipe-switch restart", (), "restart goes through checkpoints: give --save"),
    ("--data-args-path nowhere", (), "--data-args-path nowhere cannot be read"),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|ttL",
        (),
        "has 3 stages, which is no multiple of --pipeline-model-parallel-size 2",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        (),
        "--num-layers 4 is no multiple of --pipeline-model-parallel-size 2 times"
        " --num-layers-per-virtual-pipeline-stage 3",
    ),
    ("--num-virtual-stages-per-pipeline-rank 2", (), "rank needs a pipeline"),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --num-layers-per-virtual-pipeline-stage 1",
        (),
        "say the same",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
        " --flexpipe-schedule zb-v",
        (),
        "no effect with --flexpipe-schedule zb-v",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL"
        " --flexpipe-schedule v-half",
        (),
        "must have 4 stages, not 2",
    ),
    (
        "--pipeline-model-parallel-size 2 --flexpipe-schedule interleaved",
        (),
        "interleaved needs several stages on each worker",
    ),
]


@pytest.mark.parametrize(("more", "without", "message"), WRONG, ids=[w[2][:60] for w in WRONG])
def test_a_contradiction_or_a_flag_without_effect_is_one_clear_error(
    more: str, without: tuple[str, ...], message: str
) -> None:
    text = refusal(more, without=without)
    assert re.search(message, text), text
    assert "\n" not in text or text.splitlines()[0].endswith("things to change:")


RIGHT: list[tuple[str, tuple[str, ...]]] = [
    ("--flexpipe", ("--micro-batch-tokens",)),
    ("--flexpipe --flexpipe-slice-tokens 0", ("--micro-batch-tokens",)),
    ("--flexpipe-slice-tokens 256", ("--micro-batch-tokens",)),
    ("--flexpipe-slice-tokens 256 --micro-batch-size 2", ("--micro-batch-tokens",)),
    ("--flexpipe --flexpipe-bitwise --flexpipe-slice-tokens auto", ()),
    ("", ()),
    ("--pipeline-model-parallel-size 2", ()),
    ("--pipeline-model-parallel-size 4 --num-layers 7", ()),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel", ()),
    ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1", ()),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|tL", ()),
    ("--flexpipe-plan 0:5@0,1|5:10@2", ()),
    ("--flexpipe-schedule gpipe", ()),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", ()),
    ("--pipeline-model-parallel-size 2 --flexpipe-schedule zb-v", ()),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL", ()),
    ("--flexpipe --flexpipe-schedule interleaved", ()),
    ("--flexpipe-twin-snapshot 5 --flexpipe-twin-timeout 60", ()),
    ("--flexpipe-twin-snapshot 5 --save a --save-interval 9 --load ./a", ()),
    ("--micro-batch-size 3", ("--micro-batch-tokens",)),
    ("--split 99,1,0 --eval-interval 10", ()),
    ("--swiglu --normalization RMSNorm --disable-bias-linear --bf16", ()),
    ("--group-query-attention --num-query-groups 2", ()),
    ("--position-embedding-type rope --rotary-base 500000 --rotary-percent .5", ()),
    ("--train-samples 320 --rampup-batch-size 4 4 64 --lr-warmup-samples 32", ITERS),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style minus_sqrt", ()),
    ("--lr-decay-style constant --lr-warmup-fraction .1 --lr-decay-iters 10", ()),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay .1",
        (),
    ),
    ("--save d", ()),
    ("--save d --load d --save-interval 5 --save-retain-interval 10 --async-save", ()),
    ("--load d --finetune --no-load-optim --no-load-rng --ckpt-step 5", ()),
    ("--tensorboard-dir d --log-memory-to-tensorboard --log-throughput", ()),
    ("--calculate-per-token-loss --accumulate-allreduce-grads-in-fp32", ()),
    ("--data-path 1 a 2 b --tokenizer-type NullTokenizer", ("--mock-data",)),
    ("--train-data-path a --valid-data-path b --tokenizer-type NullTokenizer", ("--mock-data",)),
    ("--data-path p --sample-format pair --tokenizer-type NullTokenizer", ("--mock-data",)),
]


@pytest.mark.parametrize(("more", "without"), RIGHT)
def test_a_command_line_that_makes_sense_is_accepted(more: str, without: tuple[str, ...]) -> None:
    config(more, without=without)


def test_all_problems_are_reported_at_once() -> None:
    text = refusal("--rotary-base 5 --save-interval 7 --ckpt-step 3")
    assert text.startswith("3 things to change:\n  1. --rotary-base")
    assert "\n  2. --save-interval has" in text
    assert "\n  3. --ckpt-step" in text


def test_missing_flags_are_named_together() -> None:
    text = refusal(without=("--num-layers", "--hidden-size", "--lr"))
    assert text == "give --num-layers, --hidden-size, --lr"


def test_bert_flags_are_for_bert() -> None:
    bert = config("--bert-no-binary-head --mask-prob .2", architecture="bert")
    assert not bert.model.bert_binary_head
    text = refusal("--sample-format pair", architecture="bert")
    assert "--sample-format pair is for GPT" in text
    text = refusal("--flexpipe-slice-tokens 256", architecture="bert")
    assert "BERT looks at all tokens of a sample at once" in text


def test_files_with_data_paths_are_read_and_checked(tmp_path: Path) -> None:
    def problem(words: str) -> str:
        return refusal(f"--tokenizer-type NullTokenizer {words}", without=("--mock-data",))

    listed = tmp_path / "paths.txt"
    listed.write_text("1.0 a\n2.0 b\n")
    words = f"--tokenizer-type NullTokenizer --data-args-path {listed}"
    assert config(words, without=("--mock-data",)).data.data_path == ("1.0", "a", "2.0", "b")
    listed.write_text("1.0 a b c")
    assert "--data-args-path: either each prefix" in problem(f"--data-args-path {listed}")
    listed.write_text("0.5 a nan b")
    assert "--data-args-path: weight 'nan'" in problem(f"--data-args-path {listed}")
    listed.write_text(" ")
    assert f"--data-args-path {listed} is empty" in problem(f"--data-args-path {listed}")
    assert "cannot be read" in problem(f"--data-args-path {tmp_path}/absent")
    assert "not several" in problem(f"--data-args-path {tmp_path} --data-path a")


def test_a_file_with_data_paths_for_each_split_is_read_and_checked(tmp_path: Path) -> None:
    parts = tmp_path / "parts.json"
    flags = f"--tokenizer-type NullTokenizer --per-split-data-args-path {parts}"
    parts.write_text('{"train": ["1", "a"], "valid": "b c", "test": null}')
    data = config(flags, without=("--mock-data",)).data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        ("1", "a"),
        ("b", "c"),
        (),
    )
    parts.write_text('{"train": ["a"], "valid": [], "test": []}')
    text = refusal(f"{flags} --eval-interval 3", without=("--mock-data",))
    assert "--eval-interval needs validation data" in text
    text = refusal(f"{flags} --split 1,1,1", without=("--mock-data",))
    assert "--split has no effect on data sets for each split" in text
    parts.write_text('{"train": "1 a", "valid": ["inf", "b"], "test": null}')
    assert "weight 'inf'" in refusal(flags, without=("--mock-data",))
    for content in ('{"train": ["a"]}', "[1]", "{", '{"train": 3, "valid": 1, "test": 2}', "3"):
        parts.write_text(content)
        assert "is no JSON object with keys" in refusal(flags, without=("--mock-data",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--flexpipe-plans {0}/p --flexpipe-record {0}/x/../p",
            "--flexpipe-record .*p is the path of --flexpipe-plans too, and would overwrite it",
        ),
        ("--log-file {0}/p --log-jsonl {0}/p", "--log-jsonl .* is the path of --log-file too"),
        ("--flexpipe-record {0}/p --flexpipe-trace {0}/link", "--flexpipe-trace .* is the path of"),
        ("--save {0} --log-file {0}", "--log-file .* is the path of --save too"),
        ("--eval-generate {0}/p --log-file {0}/p", "--log-file .* is the path of --eval-generate"),
    ],
)
def test_a_file_that_is_named_twice_is_refused(tmp_path: Path, words: str, message: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "p").write_text("0:6@0\n")
    (tmp_path / "link").symlink_to("p")
    assert re.search(message, refusal(words.format(tmp_path)))
    assert (tmp_path / "p").read_text() == "0:6@0\n"


def test_a_directory_may_have_two_uses_and_dev_null_any(tmp_path: Path) -> None:
    config(f"--save {tmp_path} --tensorboard-dir {tmp_path}")
    config("--log-file /dev/null --log-jsonl /dev/null")
