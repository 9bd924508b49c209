"""The training loop: next batch, plan, execute, log, save."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch

from megatron_flex.arguments import dump
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.errors import DataError
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.learning_rate import LearningRateSchedule, ScheduleError
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.checkpointing import (
    Checkpoints,
    Restored,
    position_of,
)
from megatron_flex.loop.completions import complete_all
from megatron_flex.loop.divergence import DivergedError, Divergence
from megatron_flex.loop.evaluation import evaluate
from megatron_flex.loop.host_copies import HostCopies
from megatron_flex.loop.iteration import Iterations
from megatron_flex.loop.layouts import Layouts
from megatron_flex.loop.measures import (
    cut_of,
    lists_of,
    memory_ratio,
)
from megatron_flex.loop.opening import beginning, opening
from megatron_flex.loop.recording import Recording
from megatron_flex.loop.setup import planner_setup
from megatron_flex.loop.steps import Steps
from megatron_flex.loop.stopping import Stopping
from megatron_flex.loop.tracing import Tracing
from megatron_flex.model.config import loss_names
from megatron_flex.planner.flops import cost_coefficients, iteration_flops
from megatron_flex.planner.memory import total_parameters
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.runtime.attempt import check_restartable, restart
from megatron_flex.runtime.completion import Completion
from megatron_flex.runtime.executor import Executor
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize
from megatron_flex.runtime.step import StepResult
from megatron_flex.runtime.world import World
from megatron_flex.telemetry.files import Expendable
from megatron_flex.telemetry.memory import memory_in_use
from megatron_flex.telemetry.profiler import Profiler
from megatron_flex.telemetry.progress import ProgressLog
from megatron_flex.telemetry.record import (
    CompletionRecord,
    IterationRecord,
    RunRecord,
    ValidationRecord,
)
from megatron_flex.telemetry.recorder import open_recorder
from megatron_flex.telemetry.sink import TelemetryError
from megatron_flex.telemetry.throughput import known_peak_flops
from megatron_flex.tokenizers.base import TokenizerError
from megatron_flex.twinlayer.errors import TwinError

EXPECTED = (
    CheckpointError,
    DataError,
    DivergedError,
    PlanError,
    ScheduleError,
    TelemetryError,
    TokenizerError,
    TwinError,
)
"""What a user can put right: the message says how, a traceback would only hide it."""


class Trainer:
    """One worker's part of a run."""

    def __init__(
        self, config: Config, world: World, parts: Parts, completion: Completion | None = None
    ) -> None:
        self.config = config
        self.completion = completion or Completion(None)
        self.world = world
        self.parts = parts
        t, g = config.training, config.logging
        if config.flexpipe.flexpipe_switch == "restart":
            check_restartable()
        self.copies = HostCopies(config, world, parts.model.layers.num_slabs)
        position = position_of(config.checkpoint)
        first, samples = self.copies.start_from(position.iteration), position.samples
        coefficients = position.coefficients or cost_coefficients(parts.model)
        version = self.copies.found
        if version is not None and version.common is not None:
            samples = version.common["progress"]["consumed_samples"]
            coefficients = CostCoefficients(**version.common["micro_batch_coefficients"])
        self.steps = Steps(config, parts, world, first, samples, coefficients)
        plan = self.steps.choice.plan
        exact = config.flexpipe.flexpipe_bitwise
        self.holdings = Holdings(
            parts.model, plan, world.rank, world.device, exact=exact, group=world.tensor
        )
        optimizer = OptimizerConfig(t.adam_beta1, t.adam_beta2, t.adam_eps, t.clip_grad)
        self.schedule = LearningRateSchedule(config.learning_rate, t)
        stored = config.checkpoint
        if config.evaluation.skip_train:
            stored = replace(stored, load_optim=False, load_rng=False)
        self.checkpoints = Checkpoints(stored, world, self.holdings, config.values())
        self.copies.reserve(self.holdings, plan)
        restored = self._restore(plan)
        self.progress = restored.progress
        self.coefficients = restored.coefficients
        self.iterations = Iterations(
            config,
            plan,
            Executor(world, self.holdings, optimizer, self.copies.arena()),
            self.coefficients,
            parts.profile,
        )
        self.trace = Tracing(
            config.flexpipe.flexpipe_trace,
            world,
            self.iterations,
            first,
            config.flexpipe.flexpipe_trace_interval,
        )
        self.layouts = Layouts(config.flexpipe)
        self.stopping = Stopping(t)
        self.divergence = Divergence()
        self.profiler = Profiler(config.profiling, world.process, g.tensorboard_dir)
        self.speaks = world.process == world.processes - 1  # Megatron-LM: the last worker prints
        self.recorder = open_recorder(
            config,
            start_iteration=self.progress.iteration,
            start_samples=self.progress.consumed_samples,
            active=self.speaks,
            peak_flops=_peak_flops(config),
        )
        progress_log = None
        if g.log_progress and self.speaks:
            assert config.checkpoint.save is not None, "arguments were checked"
            progress_log = ProgressLog(
                config.checkpoint.save,
                world.processes,
                flops=self.progress.flops,
                tokens=self.progress.tokens,
            )
        self.progress_log = Expendable(progress_log, self._say)
        record = config.flexpipe.flexpipe_record
        recording = Recording(record, first) if record and self.speaks else None
        self.recording = Expendable(recording, self._say)
        self.saved: int | None = None
        self.validated: int | None = None
        if self.speaks:
            self.recorder.note(dump(config))
            for line in opening(config, parts, plan, self.progress, self.coefficients):
                self._say(line)
        if self.speaks and g.log_jsonl is not None:
            self.recorder.run(self._about_run())
        for notice in (self.trace.notice, recording and recording.notice):
            if notice:
                self._say(f" {notice}")
        for line in beginning(config, parts, plan, restored):
            self._say(line)

    def _restore(self, plan: Plan) -> Restored:
        """The newest state there is: in host memory, on the disk, or a fresh one."""
        common = self.copies.restore(self.holdings, plan)
        if common is None:
            updates = not self.config.evaluation.skip_train
            return self.checkpoints.load(
                self.schedule if updates else None, cost_coefficients(self.parts.model)
            )
        source = f"iteration {common['progress']['iteration']} in host memory"
        return self.checkpoints.resume(
            common, self.schedule, source, cost_coefficients(self.parts.model)
        )

    def _about_run(self) -> RunRecord:
        """What stays the same, for the JSONL file."""
        config, parts = self.config, self.parts
        return RunRecord(
            self.progress.iteration,
            self.world.size,
            config.training.train_iters,
            total_parameters(parts.model),
            config.flexpipe.memory_budget,
            planner_setup(config, parts, self.world.size, self.coefficients).to_json(),
            time=time.time(),
        )

    def run(self) -> None:
        """The whole run: training, then validation and test, unless training was stopped."""
        try:
            if self.config.evaluation.skip_train or self.train():
                self.final_evaluation()
        except EXPECTED:
            # A checkpoint that is being written is completed first, by all workers: those that the
            # error does not concern wait for this one meanwhile.
            with suppress(CheckpointError):
                self.checkpoints.close()
            raise
        self.steps.close()
        self.trace.close()
        self.checkpoints.close()
        self.conclude()
        self.recorder.close()
        self.world.barrier()
        # From here on nothing is lost when a worker dies, and host copies may go.
        self.completion.mark()
        self.copies.close()

    def conclude(self) -> None:
        """Say what the run came to."""
        if self.speaks:
            for line in self.recorder.summary(self.config, self.saved):
                self._say(line)

    def train(self) -> bool:
        """Iterations until the run is complete (``True``) or has a reason to stop (``False``)."""
        source = self.parts.train
        assert source is not None, "arguments were checked"
        options = self.config
        last_saved = self.progress.iteration
        reason = None
        while reason is None and (batch := self._next_batch(source)) is not None:
            self.profiler.before(self.progress.iteration)
            result = self._step(source, batch)
            iteration = self.progress.iteration
            *agreed, lost = result.signals
            signals = tuple(agreed)
            self.divergence.add(
                iteration, finite=result.finite, advice=lambda: self.checkpoints.advice
            )
            self.copies.after(iteration, self.iterations.executor, self._common, lost=lost)
            if _due(options.evaluation.eval_interval, iteration) and not any(signals):
                signals = self._evaluate(self.parts.valid, f"iteration {iteration}")
            reason = self.stopping.reason(iteration, signals)
            if any(signals[3:]):  # a save in the background failed on some worker
                self.checkpoints.close()
            if _due(options.checkpoint.save_interval, iteration):
                self._save()
                last_saved = iteration
        self.profiler.close()
        if options.checkpoint.save is not None and last_saved != self.progress.iteration:
            self._save()
        if reason is not None:
            self._say(f" {reason}")
        return reason is None

    def final_evaluation(self) -> None:
        """Validate and test at the end of the run, as Megatron-LM does.

        It validates again where that was due after the last iteration; here that is not repeated.
        """
        at = f"iteration {self.progress.iteration}"
        if self.config.evaluation.eval_interval is not None or self.config.evaluation.skip_train:
            if self.validated != self.progress.iteration:
                self._evaluate(self.parts.valid, f"{at} on validation set")
            self._evaluate(self.parts.test, f"{at} on test set", test=True)

    @property
    def _signals(self) -> tuple[bool, ...]:
        """What this worker wants all to know: see ``Stopping``, and whether a save failed."""
        return *self.stopping.signals, self.checkpoints.failed

    def _common(self) -> dict[str, Any]:
        return self.checkpoints.common(self.progress, self.schedule, self.coefficients)

    # ---- one iteration -----------------------------------------------------------------------

    def _next_batch(self, source: BatchSource) -> GlobalBatch | None:
        """The next global batch, or ``None`` at the end of the run."""
        t, progress = self.config.training, self.progress
        size = t.batch_sizes.size(progress.consumed_samples)
        if t.train_samples is not None:
            if progress.consumed_samples + size > t.train_samples:
                return None
        elif progress.iteration >= t.train_iters:
            return None
        return source.batch(progress.consumed_samples, size)

    def _step(self, source: BatchSource, batch: GlobalBatch) -> StepResult:
        began = time.perf_counter()
        rate = self.schedule.learning_rate
        current = self.steps.choice
        micro_batches = self.iterations.cut(batch, current.plan)
        told, following = self.steps.next(
            self.progress.iteration, micro_batches, last=self._is_last()
        )
        waited = time.perf_counter() - began
        number = self.progress.iteration
        self.recording(lambda to: to.add(number, current))
        result = self.iterations.train(
            source,
            batch,
            StepSize(rate, self.schedule.weight_decay),
            told,
            micro_batches,
            following=following.plan,
            signals=(*self._signals, self.copies.lost),
            count_zeros=self.config.logging.log_num_zeros_in_grad,
            read=self.steps.read,
        )
        self.trace.add(self.progress.iteration + 1)
        if not result.skipped:
            self.schedule.step(batch.size)
        squares = float((batch.lengths.astype(float) ** 2).sum())
        flops = iteration_flops(self.parts.model, batch.tokens, squares)
        done = self.progress
        self.progress = replace(
            done,
            iteration=done.iteration + 1,
            consumed_samples=done.consumed_samples + batch.size,
            skipped=done.skipped + result.skipped,
            nan=done.nan + (not result.finite),
            tokens=done.tokens + batch.tokens,
            flops=done.flops + flops,
        )
        self.progress_log(lambda to: to.iteration(flops, batch.tokens))
        elapsed = time.perf_counter() - began
        ratio = memory_ratio(result.measured)
        self.steps.measured(self.progress.iteration - 1, elapsed, ratio)
        layout = self.layouts.add(current, result.measured, elapsed, self.iterations.plan)
        program = {"predicted-program": told.seconds, "seconds-program": waited}
        cut_extra, cut_notes = cut_of(micro_batches)
        params_norm = self._params_norm() if self.config.logging.log_params_norm else None
        log_memory = self.speaks and self.config.logging.log_memory_to_tensorboard
        self.recorder.iteration(
            IterationRecord(
                iteration=self.progress.iteration,
                consumed_samples=self.progress.consumed_samples,
                elapsed=elapsed,
                learning_rate=rate,
                global_batch_size=batch.size,
                losses=dict(zip(loss_names(self.parts.model), result.losses, strict=True)),
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                tokens=batch.tokens,
                padding=sum(m.tokens for m in micro_batches) - batch.tokens,
                flops=flops,
                finite=result.finite,
                num_zeros=result.zeros,
                params_norm=params_norm,
                memory=memory_in_use() if log_memory else {},
                plan=str(current.plan),
                extra=layout.extra | program | cut_extra,
                lists=lists_of(batch, result.measured),
                notes=layout.notes | cut_notes,
                reason=layout.reason,
                time=time.time(),
            )
        )
        if not following.plan.keeps(self.iterations.plan):
            # Only where a switch is a restart: the others have switched by now.
            self._restart()
        return result

    def _restart(self) -> NoReturn:
        directory = self.config.checkpoint.save
        assert directory is not None, "arguments were checked"
        self._save()
        self.steps.close()
        self.checkpoints.close()
        self.copies.close()
        self.recorder.close()
        self.world.barrier()
        restart(directory)

    def _is_last(self) -> bool:
        """Whether no iteration can follow the one that runs next."""
        t = self.config.training
        return t.train_samples is None and self.progress.iteration + 1 >= t.train_iters

    def _params_norm(self) -> float:
        """L2 norm of all parameters, over all workers."""
        self.iterations.executor.settle()
        owned = (self.holdings.slabs[s].squared_weights() for s in self.holdings.owned)
        return self.world.sum(sum(owned)) ** 0.5

    def _evaluate(
        self, source: BatchSource | None, where: str, *, test: bool = False
    ) -> tuple[bool, ...]:
        """Evaluate and record; the signals of all workers at its end, which may cut it short."""
        options = self.config.evaluation
        batches = None if options.full_validation else options.eval_iters
        if source is None or batches == 0:
            return ()
        size = self.config.training.global_batch_size
        found = evaluate(self.iterations, self.steps, source, size, batches, lambda: self._signals)
        if any(found.signals):
            return found.signals
        if batches is not None and found.samples < batches * size:
            self._say(f" evaluating on all there are: {found.samples} of the {batches * size}"
                      " samples that --eval-iters asks for")  # fmt: skip
        progress = self.progress
        self.recorder.validation(
            ValidationRecord(where, progress.iteration, progress.consumed_samples, found.losses,
                             found.samples, found.tokens, test)
        )  # fmt: skip
        if not test:
            self.validated = progress.iteration
            self._complete()
        return found.signals

    def _complete(self) -> None:
        """Complete the prompts of ``--eval-generate``, and record what came of it."""
        questions = self.parts.questions
        if questions is None:
            return
        self.iterations.executor.settle()
        found = complete_all(
            self.world, self.holdings, self.iterations.plan,
            [prompt.ids for prompt in questions.asked], questions.tokens, questions.stops,
        )  # fmt: skip
        done = self.progress
        self.recorder.completions(
            [
                CompletionRecord(
                    done.iteration, done.consumed_samples, prompt.text,
                    questions.said(completion.said), len(completion.tokens), completion.stop > 0,
                )
                for prompt, completion in zip(questions.asked, found, strict=True)
            ]
        )  # fmt: skip

    def _save(self) -> None:
        self.iterations.executor.settle()
        self.checkpoints.save(
            self.progress,
            self.schedule,
            self.coefficients,
            rotate=not self.divergence.suspected,
        )
        self.saved = self.progress.iteration
        asynchronous = self.config.checkpoint.async_save
        verb = (
            "scheduled an async checkpoint save"
            if asynchronous
            else "successfully saved checkpoint"
        )
        self._say(f"  {verb} from iteration {self.progress.iteration:7d} to"
                  f" {self.config.checkpoint.save}")  # fmt: skip
        iteration = self.progress.iteration
        self.progress_log(lambda to: to.checkpoint(iteration, asynchronous=asynchronous))

    def _say(self, line: str) -> None:
        if self.speaks:
            self.recorder.say(line)


def _due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def _peak_flops(config: Config) -> float | None:
    if not torch.cuda.is_available():
        return None
    return known_peak_flops(torch.cuda.get_device_name(), bf16=config.precision.bf16)
