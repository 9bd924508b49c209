"""Situations from practice, each reported against a system of this kind, with its right outcome.

====  ==========================================================================================
row   test
====  ==========================================================================================
1     test_stages_exchange_no_shapes
2     test_replicas_of_a_pipeline_take_any_lengths
3     test_the_loss_is_a_mean_over_tokens_not_over_replicas
4     test_a_masked_share_contributes_nothing; unit/model/test_blocks.py:
      test_a_micro_batch_whose_targets_are_all_masked_contributes_nothing
5     test_a_masked_batch_is_skipped_and_counted
6     test_tied_embeddings_get_one_process_gradient; test_exactness.py (tied)
7     test_layers_that_do_not_divide_are_all_there_once; test_exactness.py:
      test_uneven_layers_equal_one_process
8     test_an_old_layout_does_not_stick; end_to_end/test_resume.py:
      test_a_run_saved_by_three_workers_goes_on_alike_on_one_two_four_and_five
9     test_optimizer_state_fits_any_data_parallel_degree
10    test_a_micro_batch_may_be_longer_than_the_sequence_length; unit/config/test_validate.py
11    end_to_end/test_resume.py: test_an_evaluation_leaves_no_trace_in_training
12    test_a_long_sample_among_short_ones_trains; test_a_sample_that_cannot_fit_is_refused;
      unit/data/test_microbatches.py: test_a_long_sample_is_balanced_by_cost_not_by_tokens
13    test_equal_tokens_are_not_equal_cost
14    test_shared_weights_count_once_under_a_split_backward; unit/schedule/test_validate.py:
      test_a_norm_counted_by_two_holders_is_refused
15    on one plan: end_to_end/test_resume.py: test_an_evaluation_leaves_no_trace_in_training;
      between two: test_an_evaluation_between_two_plans_is_exact
16    end_to_end/test_resume.py (three workers, resumed by one and two)
17    test_failures.py: test_a_worker_that_starts_late_is_waited_for
18    unit/schedule/test_validate.py: test_a_receive_larger_than_its_message_is_refused
19    test_packed_samples_do_not_see_each_other; unit/model/test_blocks.py:
      test_packed_samples_give_the_losses_and_gradients_of_the_samples_run_apart
20    unit/tools/test_preprocess_data.py: test_flawed_lines_are_counted_and_not_fatal;
      unit/data/test_bert.py:
      test_a_document_of_one_sentence_is_counted_with_the_head_and_used_without
21    test_failures.py: test_a_disk_that_fills_up_is_said_once_and_the_previous_checkpoint_stays;
      unit/checkpoint/test_full_disk.py
22    test_checkpoint_async.py:
      test_a_slow_disk_and_a_short_interval_name_complete_checkpoints_only
23    test_padded_rows_of_the_vocabulary_never_change; unit/checkpoint/test_save_load.py:
      test_rows_that_pad_the_vocabulary_stay_out_of_the_checksum
24    unit/tokenizers/test_hugging_face.py:
      test_stored_truncation_and_padding_are_not_obeyed; test_a_stored_template_is_not_obeyed;
      test_stored_dropout_is_not_obeyed
25    unit/tokenizers/test_hugging_face.py:
      test_an_end_token_that_only_the_configuration_knows_has_its_id;
      test_every_special_token_is_taken_from_the_decoder_or_is_an_error;
      test_a_decoder_that_contradicts_the_vocabulary_is_refused;
      test_of_several_usual_names_none_is_taken;
      test_a_usual_name_that_is_not_marked_as_special_is_not_taken
26    end_to_end/test_resume.py:
      test_a_run_whose_weights_are_lost_ends_and_keeps_its_good_checkpoints;
      unit/loop/test_checkpointing.py: test_a_state_that_is_not_finite_is_not_saved;
      unit/telemetry/test_log_line.py: test_perplexity_stays_printable
27    end_to_end/test_resume.py:
      test_a_converted_checkpoint_is_evaluated_by_its_own_arguments;
      unit/checkpoint/test_conversion.py: test_the_tokenizer_survives_the_way_there_and_back
28    end_to_end/test_resume.py: test_checkpoints_without_a_tracker_are_never_taken_for_nothing
29    end_to_end/test_resume.py:
      test_without_the_optimizer_the_schedule_goes_on_from_its_position
30    unit/data/test_paths.py: test_a_field_of_a_split_is_read_whole;
      test_a_list_that_means_nothing_is_refused;
      unit/config/test_validate.py: test_files_with_data_paths_are_read_and_checked;
      test_a_file_with_data_paths_for_each_split_is_read_and_checked
31    unit/loop/test_assemble.py:
      test_a_split_that_rounds_to_no_validation_document_is_an_error
32    unit/telemetry/test_tensorboard.py: test_a_resumed_run_leaves_one_point_a_step;
      end_to_end/test_outputs.py: test_a_resumed_run_has_each_iteration_once_in_all_its_files
33    end_to_end/test_early_exits.py: test_every_early_exit_is_said_once
34    unit/loop/test_outputs.py: test_a_directory_is_no_file; test_a_full_disk_is_said;
      test_a_directory_that_cannot_be_made_is_said; unit/telemetry/test_recorder.py:
      test_a_disk_that_fills_up_costs_the_logs_and_not_the_run; test_failures.py:
      test_a_log_that_cannot_be_written_is_said_once;
      test_a_disk_that_fills_up_under_the_logs_costs_the_logs_alone
35    unit/loop/test_outputs.py: test_what_is_not_ours_is_refused_and_stays;
      unit/telemetry/test_jsonl.py: test_a_file_that_is_not_ours_stays_as_it_is;
      test_a_run_that_starts_anew_keeps_the_log_of_an_earlier_one; unit/config/test_validate.py:
      test_a_file_that_is_named_twice_is_refused
36    test_planned.py:
      test_a_profile_of_another_model_is_refused_and_of_another_machine_warned_of;
      unit/cluster/test_profile.py:
      test_a_profile_of_another_model_is_refused_naming_what_differs
37    unit/planner/test_service.py:
      test_a_refusal_names_the_smallest_budget_which_is_accepted; unit/tools/test_questions.py:
      test_plan_names_the_smallest_budget_of_a_run_which_is_accepted; unit/planner/test_explain.py:
      test_the_smallest_budget_that_would_do_is_named_and_does; test_planned.py:
      test_a_batch_that_fits_nowhere_is_refused_before_it_runs
38    unit/loop/test_plans.py: test_a_bad_script_is_refused_by_line
39    unit/tools/test_preprocess_data.py: test_a_prompt_gets_no_end_token;
      test_a_prompt_that_ends_in_the_end_token_is_warned_of; unit/loop/test_assemble.py:
      test_prompts_that_end_in_the_end_token_are_warned_of
40    unit/data/test_gpt.py: test_a_loss_of_one_percent_of_the_tokens_is_worth_a_warning;
      test_the_parts_of_long_documents_have_every_token_once (unit/data/test_bert.py, too);
      unit/data/test_pairs.py: test_the_parts_of_long_pairs_have_every_completion_token_once;
      unit/loop/test_assemble.py:
      test_what_is_cut_off_is_said_at_the_start
41    test_failures.py:
      test_a_signal_to_any_worker_saves_after_the_iteration_and_ends_all_with_status_0;
      unit/loop/test_stopping.py: test_a_later_ctrl_c_ends_at_once
42    unit/telemetry/test_trace.py: test_a_resumed_run_goes_on_in_the_same_trace;
      end_to_end/test_outputs.py: test_a_resumed_run_has_each_iteration_once_in_all_its_files
43    end_to_end/test_examples.py: test_what_is_wrong_with_a_job_is_said_before_anything_starts;
      test_a_script_in_another_directory_says_so; test_a_job_that_is_long_enough_starts;
      test_sizes_come_from_variables_and_further_flags_from_the_command;
      test_nodes_and_gpus_come_from_the_job_or_from_variables; test_shell_scripts_pass_shellcheck
44    end_to_end/test_resume.py: test_a_bfloat16_run_goes_on_from_weights_that_were_loaded_alone
45    unit/tools/test_preprocess_data.py: test_no_line_is_lost_between_workers;
      unit/data/test_sources.py: test_two_equal_sets_of_a_blend_have_orders_of_their_own;
      unit/data/test_blend.py: test_sets_of_a_blend_are_shuffled_differently;
      unit/data/test_bert.py: test_two_equal_sentences_are_each_cut_at_both_ends
46    end_to_end/test_recovery.py: test_a_worker_killed_after_the_end_starts_nothing_anew
====  ==========================================================================================
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_flex.arguments import parse, plan_of
from megatron_flex.data.batches import GlobalBatch
from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.data.microbatches import CostCoefficients, cut_by_count, cut_by_tokens
from megatron_flex.data.packed import PackedBatch
from megatron_flex.loop.memory import MemoryLimitError, check_memory, device_bytes
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.flops import model_work
from megatron_flex.planner.plan import Plan
from megatron_flex.programs import build_program
from megatron_flex.quantities import size
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.step import StepInputs, StepResult
from megatron_flex.runtime.world import World
from megatron_flex.schedule.compact import groups_of
from megatron_flex.schedule.instructions import ReduceGradient, SquaredNorm, UpdateOrSkip
from megatron_flex.schedule.part import part_of
from megatron_flex.schedule.validate import validate
from tests.close import assert_numbers_close, assert_state_close
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

TIED = jobs.TINY
PLAIN = replace(TIED, hidden_dropout=0.0, attention_dropout=0.0)
DECAY = 0.9  # beta1: after one update the first moment is a tenth of the gradient


# ---- jobs ------------------------------------------------------------------------------------


def step(
    config: ModelConfig,
    plan: str,
    lengths: Sequence[int],
    masked: frozenset[int] = frozenset(),
    samples_at_once: int = 1,
    head_sums: Sequence[float] = (),
) -> tuple[StepResult, dict[str, torch.Tensor], list[float]]:
    """One iteration on samples of given lengths, ``samples_at_once`` in each micro-batch.

    Returns the result, the gradients that this worker owns, and the gradients that the head's
    outputs received. With ``head_sums`` the head is replaced: sample i has that sum of losses.
    """
    world = World.create(torch.device("cpu"), timedelta(seconds=30))
    layout = Plan.parse(plan)
    holdings = Holdings(config, layout, world.rank, world.device)
    scales: list[float] = []
    head = holdings.blocks.get(config.layers.num_units - 1)
    if head is not None and head_sums:

        def known(hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
            output = 0.0 * hidden.sum().view(1) + sum(head_sums[s] for s in batch.samples)
            if output.requires_grad:
                output.register_hook(lambda g: scales.append(float(g)))
            return output

        head.forward = known
    tokens = sum(n for i, n in enumerate(lengths) if i not in masked)
    batch = GlobalBatch(0, np.array(lengths, dtype=np.int64), (tokens,))
    parts = cut_by_count(batch, samples_at_once)
    program = build_program(config, layout, parts, world.size)
    validate(program, config.layers)
    if world.reductions is not None:
        world.reductions.prepare(set(groups_of(program.instructions)))
    executor = Executor(world, holdings, OptimizerConfig(adam_beta1=DECAY, clip_grad=0.0))
    inputs = StepInputs(
        lambda m, inputs, targets: jobs.packed(config, parts[m], masked),
        batch.denominators,
        StepSize(learning_rate=1e-3, weight_decay=0.0),
    )
    result = executor.run(part_of(program, world.rank), inputs)
    moments = {
        name: tensor / (1 - DECAY)
        for name, tensor in holdings.named_state(owned=True, model=False).items()
        if ".exp_avg." in name
    }
    return result, moments, scales


def _on_plan(job: Callable[..., jobs.Outcome], plan: str) -> jobs.Outcome:
    return job(plans=plan)


def compare(
    workers: WorkerPool,
    size: int,
    plan: str,
    lengths: Sequence[int],
    config: ModelConfig = TIED,
    masked: frozenset[int] = frozenset(),
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """One iteration on ``plan`` equals the same one on one worker, gradient by gradient."""
    alone = f"0:{config.layers.num_units}@0"
    ((expected, gradients, _),) = workers.run(1, step, config, alone, lengths, masked)
    answers = workers.run(size, step, config, plan, lengths, masked)
    found = {name: tensor for _, owned, _ in answers for name, tensor in owned.items()}
    result = answers[0][0]
    assert_numbers_close(result.losses, expected.losses, 3e-7)
    assert_state_close(found, gradients, 1e-6)
    return result, found


# ---- shapes, layouts, denominators -----------------------------------------------------------


def test_stages_exchange_no_shapes(workers: WorkerPool) -> None:
    compare(workers, 4, "0:2@0 | 2:4@1 | 4:7@2 | 7:8@3", [4, 8, 60, 2, 16, 3])


def test_replicas_of_a_pipeline_take_any_lengths(workers: WorkerPool) -> None:
    compare(workers, 4, "0:4@0,1 | 4:8@2,3", [5, 47, 1, 19, 33, 2, 60])


def test_the_loss_is_a_mean_over_tokens_not_over_replicas(workers: WorkerPool) -> None:
    # Replica 0 has loss sum 1 over 1 token, replica 1 has 9 over 3; a mean of means is 2.
    answers = workers.run(2, step, PLAIN, "0:8@0,1", [1, 3], head_sums=[1.0, 9.0])
    for result, _, scales in answers:
        assert result.losses == (2.5,)
        assert scales == [0.25]
    compare(workers, 2, "0:8@0,1", [1, 3])


@pytest.mark.parametrize(
    ("masked", "plan"),
    [
        ([2], "0:4@0 | 4:8@1,2"),  # one micro-batch
        ([1, 3, 5], "0:8@0,1,2"),  # half of them
        ([0, 1, 2, 3, 4], "0:3@0,1 | 3:8@2"),  # all but one
    ],
)
def test_a_masked_share_contributes_nothing(
    workers: WorkerPool, masked: list[int], plan: str
) -> None:
    lengths = [9, 30, 4, 17, 22, 8]
    result, gradients = compare(workers, 3, plan, lengths, PLAIN, frozenset(masked))
    assert not result.skipped
    assert all(torch.isfinite(g).all() for g in gradients.values())
    # The mean is over the targets that count; over all of them it would be smaller.
    assert result.losses[0] == pytest.approx(np.log(PLAIN.vocab_size), rel=0.05)


def test_a_replica_whose_whole_share_is_masked_agrees_with_the_others(workers: WorkerPool) -> None:
    # Two micro-batches, one on each replica.
    compare(workers, 2, "0:8@0,1", [9, 30], PLAIN, frozenset([1]))
    compare(workers, 2, "0:8@0,1", [9, 30], PLAIN, frozenset([0]))


def test_a_masked_batch_is_skipped_and_counted(workers: WorkerPool) -> None:
    third = frozenset(range(16, 24))  # the samples of the third iteration
    job = partial(jobs.train, TIED, iterations=5, masked=third, longest=20)
    alone = jobs.merge(workers.run(1, _on_plan, job, "0:8@0"))
    split = jobs.merge(workers.run(3, _on_plan, job, "0:3@0,1 | 3:8@2"))
    jobs.assert_same(split, alone)
    assert [r.skipped for r in split[0]] == [False, False, True, False, False]
    assert [r.finite for r in split[0]] == [True] * 5
    assert split[0][2].losses == (0.0,)


@pytest.mark.parametrize(
    "plan", ["0:4@0,1 | 4:8@2,3", "0:2@0 | 2:6@1 | 6:8@2,3", "0:6@1-3 | 6:8@0"]
)
def test_tied_embeddings_get_one_process_gradient(workers: WorkerPool, plan: str) -> None:
    _, gradients = compare(workers, 4, plan, [20, 7, 41, 3, 12], PLAIN)
    tied = gradients["optimizer.state.exp_avg.embedding.word_embeddings.weight"]
    assert tied.abs().sum() > 0


@pytest.mark.parametrize(
    ("layers", "size", "flags"),
    [
        (30, 4, "--pipeline-model-parallel-size 4"),
        (7, 2, "--pipeline-model-parallel-size 2"),
        (40, 16, "--pipeline-model-parallel-size 16"),
        (20, 2, "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"),
    ],
)
def test_layers_that_do_not_divide_are_all_there_once(layers: int, size: int, flags: str) -> None:
    words = [*runs.MODEL, *runs.TRAINING, "--mock-data", "--train-iters", "3"]
    words += ["--num-layers", str(layers), *shlex.split(flags)]
    config = parse(words, world_size=size)
    plan = plan_of(config, config.model_config(runs.VOCABULARY))
    units = [unit for stage in plan.stages for unit in range(stage.start, stage.stop)]
    assert units == list(range(2 * layers + 2))
    assert all(stage.stop > stage.start for stage in plan.stages)
    if "last" in flags:
        assert plan.stages[-1].stop - plan.stages[-1].start == 3  # a layer and the head


# ---- checkpoints on other layouts ------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prefix = runs.write_documents(tmp_path_factory.mktemp("data") / "text")
    data = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", "6"]
    return [*runs.MODEL, *runs.TRAINING, *data]


def resume(
    workers: WorkerPool, flags: list[str], directory: Path, first: str, then: Sequence[str]
) -> list[runs.Run]:
    """Save on plan ``first`` after 3 of 6 iterations; go on from there on each plan of ``then``."""
    saving = ["--save", str(directory), "--save-interval", "3", "--exit-interval", "3"]
    size = Plan.parse(first).devices[-1] + 1
    whole = runs.run(workers, size, [*flags, "--flexpipe-plan", first])
    runs.run(workers, size, [*flags, "--flexpipe-plan", first, *saving])
    results = []
    for text in then:
        size = Plan.parse(text).devices[-1] + 1
        more = ["--flexpipe-plan", text, "--load", str(directory)]
        results.append(runs.run(workers, size, [*flags, *more]))
        runs.assert_same(results[-1], whole, start=3)
        assert f" plan: {Plan.parse(text)}" in results[-1].printed
    return results


def test_an_old_layout_does_not_stick(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    resume(workers, flags, tmp_path, "0:1@1 | 1:8@0", ["0:8@0", "0:3@0 | 3:5@1 | 5:7@2 | 7:8@3"])


def test_optimizer_state_fits_any_data_parallel_degree(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    (six, three) = resume(workers, flags, tmp_path, "0:8@0-3", ["0:8@0-5", "0:8@0-2"])
    assert six.updates == three.updates == 6


# ---- lengths and cost ------------------------------------------------------------------------


def test_a_micro_batch_may_be_longer_than_the_sequence_length(
    workers: WorkerPool, flags: list[str]
) -> None:
    # 64 tokens is the longest sample; all 8 samples of a batch share one micro-batch of about 240.
    long = ["--micro-batch-tokens", "1000"]
    alone = runs.run(workers, 1, [*flags, *long])
    split = runs.run(workers, 3, [*flags, *long, "--flexpipe-plan", "0:3@0 | 3:6@1 | 6:8@2"])
    runs.assert_same(split, alone)
    assert min(r.tokens for r in alone.history.iterations) > 64


def test_a_long_sample_among_short_ones_trains(workers: WorkerPool) -> None:
    # On one worker of two, beside the others; the first worker has the embedding only.
    config = replace(PLAIN, num_layers=1, max_position_embeddings=4000)
    compare(workers, 2, "0:1@0 | 1:4@1", [20] * 6 + [4000] + [20] * 5, config)


def test_a_sample_that_cannot_fit_is_refused() -> None:
    plan = Plan.parse("0:4@0 | 4:8@1")
    state = device_bytes(TIED, plan, 1, 0)
    need = device_bytes(TIED, plan, 1, 4000)
    assert device_bytes(TIED, plan, 0, 4000) < need, "the output head makes worker 1 the fuller one"
    check_memory(TIED, plan, None, 4000, need)
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(TIED, plan, None, 4000, need - 1)
    message = str(caught.value)
    assert f"worker 1 needs at least {size(need)} for a sample of 4,000 tokens" in message
    assert f"({size(state)} for weights" in message
    for flag in ("--max-sample-length", "--overlong drop", "--pipeline-model-parallel-size"):
        assert flag in message


def test_what_counts_is_the_longest_sample_that_there_is(flags: list[str]) -> None:
    from megatron_flex.loop.assemble import assemble

    parts = assemble(parse([*flags, "--max-sample-length", "60", "--seq-length", "4000"]))
    longest = max(int(n) for s in parts.train.sets for n in s.lengths(np.arange(s.selection.size)))  # type: ignore[union-attr]
    assert longest < 60
    need = device_bytes(parts.model, parts.plan, 0, longest)
    check_memory(parts.model, parts.plan, parts.train, 4000, need)
    with pytest.raises(MemoryLimitError, match=f"a sample of {longest} tokens"):
        check_memory(parts.model, parts.plan, parts.train, 4000, need - 1)


def test_equal_tokens_are_not_equal_cost() -> None:
    whole = MicroBatch((Slice.all_of(0, 2048),))
    small = MicroBatch(tuple(Slice.all_of(i, 32) for i in range(64)))
    assert whole.tokens == small.tokens == 2048
    assert whole.squares == 64 * small.squares
    works = model_work(replace(TIED, hidden_size=512, ffn_hidden_size=2048, kv_channels=128))
    costs = [sum(w.forward(m.tokens, m.squares) for w in works) for m in (whole, small)]
    assert costs[0] > 1.2 * costs[1]
    # The cut sees it too: the long one is worth several micro-batches of small ones.
    lengths = np.array([2048] + [32] * 256, dtype=np.int64)
    cost = CostCoefficients(1.0, 1 / 512)
    parts = cut_by_tokens(GlobalBatch(0, lengths, (int(lengths.sum()),)), 4096, cost)
    share = {m.tokens for m in parts if m.squares < whole.squares}
    assert all(2048 < tokens <= 4096 for tokens in share)


# ---- shared weights --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "zb-v"])
def test_shared_weights_count_once_under_a_split_backward(policy: str) -> None:
    plan = Plan.parse(
        "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0" if policy == "zb-v" else "0:2@0,2 | 2:6@1 | 6:8@3"
    )
    batch = MicroBatch((Slice.all_of(0, 10),))
    program = build_program(TIED, plan, [batch] * 6, 4, policy=policy)
    validate(program, TIED.layers)
    tied = TIED.layers.tied_slab
    assert tied is not None
    lists = program.instructions
    counted = [d for d, ops in enumerate(lists) for i in ops if i == SquaredNorm(tied)]
    assert len(counted) == 1
    holders = {d for d, ops in enumerate(lists) for i in ops if i == UpdateOrSkip(tied)}
    reduced = [
        (d, i.group)
        for d, ops in enumerate(lists)
        for i in ops
        if isinstance(i, ReduceGradient) and i.slab == tied
    ]
    if policy == "zb-v":  # embedding and head on one worker: nothing to sum
        assert holders == {0}
        assert reduced == []
    else:
        assert reduced == [(d, (0, 2, 3)) for d in (0, 2, 3)]


def test_an_evaluation_between_two_plans_is_exact(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    prefix = runs.write_documents(tmp_path / "valid", count=9)
    plans = tmp_path / "plans.txt"
    plans.write_text("0:8@0,1\n0:5@0 | 5:8@1\n0:3@1 | 3:8@0\n0:8@0,1\n0:2@0 | 2:8@1\n")
    cut = flags.index("--split")
    data = [*flags[: cut - 2], "--train-data-path", flags[cut - 1], "--valid-data-path", prefix]
    words = [*data, *flags[cut + 2 :], "--eval-interval", "1", "--eval-iters", "2"]
    alone = runs.run(workers, 1, words)
    switched = runs.run(workers, 2, [*words, "--flexpipe-plans", str(plans)])
    runs.assert_same(switched, alone)
    for a, e in zip(switched.history.validations, alone.history.validations, strict=True):
        assert_numbers_close(list(a.losses.values()), list(e.losses.values()), 3e-7)


def test_packed_samples_do_not_see_each_other(workers: WorkerPool) -> None:
    lengths = [3, 5]
    ((packed, together, _),) = workers.run(1, step, TIED, "0:8@0", lengths, samples_at_once=2)
    ((apart, alone, _),) = workers.run(1, step, TIED, "0:8@0", lengths, samples_at_once=1)
    assert_numbers_close(packed.losses, apart.losses, 7e-7)
    assert_state_close(together, alone, 2e-6)


def test_padded_rows_of_the_vocabulary_never_change(workers: WorkerPool, flags: list[str]) -> None:
    plan = ["--flexpipe-plan", "0:3@0,1 | 3:8@2", "--weight-decay", "0"]
    first = runs.run(workers, 3, [*flags, *plan, "--train-iters", "3"])
    last = runs.run(workers, 3, [*flags, *plan])
    name = "embedding.word_embeddings.weight"
    vocabulary = runs.VOCABULARY + 1  # NullTokenizer adds the end of a document
    assert first.state[name].shape[0] == 96
    assert torch.equal(first.state[name][vocabulary:], last.state[name][vocabulary:])
    assert not last.state[f"optimizer.state.exp_avg.{name}"][vocabulary:].any()
    assert not torch.equal(first.state[name][:vocabulary], last.state[name][:vocabulary])


# ---- this table ------------------------------------------------------------------------------


def test_every_row_of_the_table_names_tests_that_exist() -> None:
    assert __doc__ is not None
    rows = [int(n) for n in re.findall(r"^(\d+) ", __doc__, re.M)]
    assert rows == list(range(1, 47))
    tests = Path(__file__).parents[1]
    written = {
        name
        for path in tests.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    files = {path.name for path in tests.rglob("test_*.py")}
    for name in re.findall(r"\b(test_\w+)(\.py)?", __doc__):
        word, ending = name
        assert (f"{word}.py" in files) if ending else (word in written), word
