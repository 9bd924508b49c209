"""From the command line to one frozen configuration."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.arguments import ArgumentsError, dump, parse, plan_of
from megatron_flex.config.config import Config, all_options
from megatron_flex.config.refused import FLAGS
from megatron_flex.planner.plan import Plan
from tests.unit.config.commands import BASE, command, config, refusal

ROOT = Path(__file__).resolve().parents[2]


def test_an_unknown_flag_gets_a_suggestion() -> None:
    assert refusal("--num-layer 3") == "--num-layer is unknown: did you mean --num-layers?"
    assert refusal("--qqqqqqqqqq") == "--qqqqqqqqqq is unknown: --help lists all flags"


def test_flags_are_not_abbreviated() -> None:
    assert "--global-batch is unknown" in refusal("--global-batch 3")


def test_a_word_that_belongs_to_no_flag_is_an_error() -> None:
    assert refusal("--seed 3 4") == "'4' follows no flag that takes it: remove it"


def test_a_flag_without_its_value_is_an_error() -> None:
    assert "--seed" in refusal("--seed")


def test_equals_signs_and_repeated_flags_work_as_usual() -> None:
    assert config("--seed=7").training.seed == 7
    assert config("--seed 7 --seed 8").training.seed == 8


def test_whichever_worker_of_a_server_comes_first_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, printed in ((3, 1), (0, 0), (1, 0)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(ArgumentsError):
            parse(["--nothing"])
        assert capsys.readouterr().err.count("--nothing is unknown") == printed


@pytest.mark.parametrize("text", ["0", "-1", "x", ""])
def test_a_wrong_number_of_workers_in_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ArgumentsError, match="WORLD_SIZE is"):
        parse(BASE)


def test_the_number_of_workers_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert parse(BASE).world_size == 6
    monkeypatch.delenv("WORLD_SIZE")
    assert parse(BASE).world_size == 1


def test_a_program_ends_with_status_2_and_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from megatron_flex.arguments import parse; parse()", "--fp16"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "error: --fp16 cannot be used: " in done.stderr


def test_parsing_needs_no_torch() -> None:
    code = (
        "import sys; from megatron_flex.arguments import parse; parse(sys.argv[1:]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *BASE], timeout=60, cwd=ROOT, check=True)


def test_sizes_of_the_model_are_derived_as_in_megatron() -> None:
    plain = config().model_config(1001)
    assert (plain.ffn_hidden_size, plain.kv_channels, plain.num_query_groups) == (256, 16, 4)
    assert (plain.vocab_size, plain.padded_vocab_size) == (1001, 1024)
    assert plain.max_position_embeddings == 512
    assert plain.causal
    assert plain.params_dtype == "float32"
    gated = config("--swiglu --hidden-size 768 --bf16").model_config(1001)
    assert gated.ffn_hidden_size == 2048
    assert gated.kv_channels == 192
    assert gated.params_dtype == "bfloat16"
    grouped = config("--group-query-attention").model_config(10)
    assert grouped.num_query_groups == 1
    assert "--ffn-hidden-size" in refusal("--swiglu --hidden-size 4")


@pytest.mark.parametrize(
    ("flags", "vocabulary", "size", "padded"),
    [
        ("", 1, 1, 128),
        ("", 128, 128, 128),
        ("", 129, 129, 256),
        ("--make-vocab-size-divisible-by 7", 15, 15, 21),
        ("--vocab-extra-ids 100", 100, 200, 256),
        ("--padded-vocab-size 5000", 1000, 1000, 5000),
    ],
)
def test_the_vocabulary_is_padded_as_in_megatron(
    flags: str, vocabulary: int, size: int, padded: int
) -> None:
    model = config(flags).model_config(vocabulary)
    assert (model.vocab_size, model.padded_vocab_size) == (size, padded)


def test_bert_has_token_types_and_a_second_head_unless_refused() -> None:
    bert = config(architecture="bert").model_config(1000)
    assert (bert.architecture, bert.causal, bert.binary_head, bert.num_tokentypes) == (
        "bert",
        False,
        True,
        2,
    )
    single = config("--bert-no-binary-head", architecture="bert").model_config(1000)
    assert (single.binary_head, single.num_tokentypes) == (False, 0)
    assert not config().model_config(1000).binary_head


def test_lengths_of_samples_and_positions_follow_from_each_other() -> None:
    assert config().data.max_sample_length == 512
    longer = config("--max-sample-length 900")
    assert (longer.model.seq_length, longer.model.max_position_embeddings) == (512, 900)
    only = config("--max-sample-length 900", without=("--seq-length",))
    assert only.model.seq_length == 900
    assert "give --seq-length" in refusal(without=("--seq-length",))


def test_the_batch_size_follows_from_the_micro_batch_size_and_the_replicas() -> None:
    flags = "--micro-batch-size 3 --pipeline-model-parallel-size 2"
    without = ("--micro-batch-tokens", "--global-batch-size")
    assert config(flags, without=without, world_size=8).training.global_batch_size == 12


def test_the_number_of_iterations_follows_from_the_samples() -> None:
    constant = config("--train-samples 100", without=("--train-iters",))
    assert constant.training.train_iters == 6
    ramp = config("--train-samples 100 --rampup-batch-size 4 4 48", without=("--train-iters",))
    # 4 x 4, 2 x 8, 2 x 12 samples reach 56 > 48, then 2 x 16.
    assert ramp.training.train_iters == 10
    assert ramp.training.batch_sizes.size(0) == 4


def test_the_plan_follows_from_the_flags() -> None:
    c = config("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1")
    assert str(plan_of(c, c.model_config(1000))) == "0:7@0,1 | 7:10@2,3"
    c = config("--flexpipe-plan 0:5@0,1|5:10@2")
    assert plan_of(c, c.model_config(1000)) == Plan.parse("0:5@0,1 | 5:10@2")


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ("--recompute-activations", "1,3,5,7"),
        ("--recompute-granularity selective --recompute-modules mlp", "2,4,6,8"),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", "1-8"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "1-8",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "1-2,5-6",
        ),
    ],
)
def test_recompute_flags_name_units_of_the_static_plan(flags: str, units: str) -> None:
    layout = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"
    c = config(layout, flags)
    expected = f"0:5@0,1 | 5:10@2,3 ; recompute {units}"
    assert plan_of(c, c.model_config(1000)) == Plan.parse(expected)


def test_a_plan_in_full_may_name_recomputed_units_but_not_beside_the_flags() -> None:
    plan = ["--flexpipe-plan", "0:10@0-3 ; recompute 2"]
    c = parse([*command(), *plan], world_size=4)
    assert plan_of(c, c.model_config(1000)).o_plan.recompute == (2,)
    with pytest.raises(ArgumentsError, match="--flexpipe-plan says what is recomputed"):
        parse([*command(), *plan, "--recompute-activations"], world_size=4)
    c = parse([*command(), plan[0], "0:10@0-3", "--recompute-activations"], world_size=4)
    assert plan_of(c, c.model_config(1000)).o_plan.recompute == (1, 3, 5, 7)


def test_long_samples_move_the_cut() -> None:
    c = config("--pipeline-model-parallel-size 2 --seq-length 100000")
    model = c.model_config(50000)
    short, long = plan_of(c, model, length=1.0), plan_of(c, model, length=1e6)
    assert short.stages[0].stop > long.stages[0].stop


def test_the_dump_has_dotted_leaders_and_every_option() -> None:
    c = config("--data-path a b --tokenizer-type NullTokenizer", without=("--mock-data",))
    lines = dump(c).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert lines[1:-1] == sorted(lines[1:-1], key=str.lower)
    assert "  adam_beta1 ...................................... 0.9" in lines
    assert "  data_path ....................................... ['a', 'b']" in lines
    assert len(lines) == 4 + sum(1 for _ in all_options())


def test_the_values_survive_json_and_build_the_same_configuration() -> None:
    c = config("--train-samples 320 --rampup-batch-size 4 4 64", without=("--train-iters",))
    values = json.loads(json.dumps(c.values()))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    assert Config.from_values("gpt", 4, values, frozenset()) == c


def test_the_model_can_come_from_the_checkpoint() -> None:
    saved = config("--num-layers 6 --group-query-attention --swiglu").values()
    argv = command(
        "--load d --use-checkpoint-args",
        without=("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size"),
    )
    seen = []

    def read(early: Config) -> dict[str, object]:
        seen.append(early.checkpoint.load)
        return json.loads(json.dumps(saved))

    c = parse(argv, world_size=4, saved_values=read)
    assert seen == ["d"]
    assert c.model_config(1001) == config(
        "--num-layers 6 --group-query-attention --swiglu"
    ).model_config(1001)
    assert c.training.global_batch_size == 16


def test_a_flag_that_differs_from_the_checkpoint_is_an_error() -> None:
    argv = command("--load d --use-checkpoint-args")
    with pytest.raises(ArgumentsError, match="--num-layers is 4, but the checkpoint has 6"):
        parse(argv, saved_values=lambda _: config("--num-layers 6").values())
    argv = command("--load-hf d --save s")
    with pytest.raises(ArgumentsError) as error:
        parse(argv, saved_values=lambda _: config("--num-layers 6").values())
    assert str(error.value) == "--num-layers is 4, but the model has 6: remove the flag"


_NUMBERS = st.sampled_from(["0", "1", "2", "3", "8", "100", "-1", "0.5", "1e-3", "nan", "x", ""])
_FLAGS = [f for o in all_options() for f in o.flags] + [f for r in FLAGS for f in r.flags]
_WORDS = st.one_of(
    st.sampled_from(_FLAGS),
    _NUMBERS,
    st.sampled_from(["rope", "WSD", "cosine", "0:10@0-3", "Et*4|L", "a", "--", "-x", "--=", "%s"]),
)


@given(st.lists(_WORDS, max_size=6), st.integers(1, 6))
def test_any_command_line_gives_a_configuration_or_one_error(words: list[str], world: int) -> None:
    message = ""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            c = parse([*BASE, *words], world_size=world)
        except ArgumentsError as error:
            message = str(error)
    if message:
        assert errors.getvalue() == f"arguments: error: {message}\n"
        return
    plan_of(c, c.model_config(900)).check(2 * c.model.num_layers + 2, world)


@st.composite
def _command_lines(draw: st.DrawFn) -> dict[str, str]:
    """Values of flags that go together."""
    heads = draw(st.integers(1, 8))
    groups = draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
    length = draw(st.integers(1, 10**6))
    return {
        "num_layers": str(draw(st.integers(1, 200))),
        "num_attention_heads": str(heads),
        "hidden_size": str(heads * 2 * draw(st.integers(32, 200))),
        "num_query_groups": str(groups),
        "max_sample_length": str(length),
        "norm_epsilon": repr(draw(st.floats(1e-12, 1e-3))),
        "lr": repr(draw(st.floats(1e-9, 10.0))),
        "adam_beta2": repr(draw(st.floats(0, 0.999999))),
        "seed": str(draw(st.integers(0, 2**63 - 1))),
        "overlong": draw(st.sampled_from(["truncate", "split", "drop", "error"])),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        "global_batch_size": str(draw(st.integers(1, 10**6))),
    }


@given(_command_lines(), st.booleans())
def test_every_value_arrives_as_it_was_given(values: dict[str, str], equals: bool) -> None:
    flags = {o.field: o.flag for o in all_options()}
    words = [f"{flags[k]}={v}" if equals else f"{flags[k]} {v}" for k, v in values.items()]
    c = config(*words, "--group-query-attention")
    arrived = c.values()
    for name, text in values.items():
        assert type(arrived[name])(text) == arrived[name]
    assert c.given >= set(values)
    model = c.model_config(1000)
    assert model.kv_channels * model.num_attention_heads == model.hidden_size
    assert model.max_position_embeddings >= c.data.max_sample_length
