"""The front of the room: the loop hands in records, the sinks that the flags ask for get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from megatron_flex.config.config import Config
from megatron_flex.telemetry.console import ConsoleSink, say
from megatron_flex.telemetry.files import Expendable
from megatron_flex.telemetry.interval import Interval
from megatron_flex.telemetry.jsonl import JsonlSink
from megatron_flex.telemetry.log_file import LogFile
from megatron_flex.telemetry.record import (
    CompletionRecord,
    IterationRecord,
    RunRecord,
    ValidationRecord,
)
from megatron_flex.telemetry.scalars import ScalarOptions
from megatron_flex.telemetry.sink import Sink
from megatron_flex.telemetry.summary import Summary
from megatron_flex.telemetry.tensorboard import TensorBoardSink
from megatron_flex.telemetry.wandb import WandbSink


class Recorder:
    """Passes records on to sinks. Use it in a ``with`` statement, or close it.

    A sink that cannot be written to any more is given up with a warning; training goes on.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        interval: Interval,
        echo: Callable[[str], None] | None = None,
        file: LogFile | None = None,
    ) -> None:
        self._interval = interval
        self._echo = echo
        self._file = Expendable(file, self.say)
        self._sinks = tuple(Expendable(sink, self.say) for sink in sinks)

    def say(self, line: str) -> None:
        """Put a line on the screen and into ``--log-file``."""
        if self._echo is not None:
            self._echo(line)
        self.note(line)

    def note(self, text: str) -> None:
        """Put lines into ``--log-file`` alone."""
        self._file(lambda file: file.write(text))

    def summary(self, config: Config, saved: int | None) -> Iterable[str]:
        """The lines that end a run."""
        for sink in self._sinks:
            if isinstance(sink.writer, Summary):
                yield from sink.writer.lines(config, saved)

    def run(self, record: RunRecord) -> None:
        """Record what stays the same, before the first iteration."""
        for sink in self._sinks:
            sink(lambda to: to.run(record) if isinstance(to, JsonlSink) else None)

    def iteration(self, record: IterationRecord) -> None:
        """Record one training iteration; call it once for each, in order."""
        for sink in self._sinks:
            sink(lambda to: to.iteration(record))
        summary = self._interval.add(record)
        if summary is not None:
            found = summary
            for sink in self._sinks:
                sink(lambda to: to.interval(found))

    def validation(self, record: ValidationRecord) -> None:
        """Record one validation or test."""
        for sink in self._sinks:
            sink(lambda to: to.validation(record))

    def completions(self, records: Sequence[CompletionRecord]) -> None:
        """Record the prompts that were completed at one validation."""
        for sink in self._sinks:
            sink(lambda to: to.completions(records))

    def close(self) -> None:
        """Write out what is pending; nothing can be recorded afterwards."""
        sinks, self._sinks = self._sinks, ()
        for sink in sinks:
            sink(lambda to: to.close())
        self._file(lambda file: file.close())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_recorder(
    config: Config,
    *,
    start_iteration: int = 0,
    start_samples: int = 0,
    active: bool = True,
    peak_flops: float | None = None,
    echo: Callable[[str], None] | None = None,
) -> Recorder:
    """The recorder that the logging flags ask for.

    Args:
        config: the configuration.
        start_iteration: iterations already trained; later ones in the JSONL file and in TensorBoard
            are removed.
        start_samples: training samples of these iterations.
        active: whether this worker records (Megatron-LM: the last one). The recorder of the
            others takes records and does nothing.
        peak_flops: peak FLOP/s of a worker's device where it is known; ``--device-peak-tflops``
            comes first.
        echo: prints a line; ``None``: on the standard output.

    Raises:
        TelemetryError: when a file cannot be written or a package is missing.
    """
    g = config.logging
    if g.device_peak_tflops is not None:
        peak_flops = g.device_peak_tflops * 1e12
    interval = Interval(g.log_interval, config.world_size, peak_flops)
    if not active:
        return Recorder((), interval)
    sinks: list[Sink] = [
        ConsoleSink(
            config.training.train_iters,
            log_throughput=g.log_throughput,
            short=g.log_format == "short",
            echo=echo,
        ),
        Summary(),
    ]
    file = None
    if g.log_file is not None:
        file = LogFile(g.log_file)

        def note(line: str) -> None:
            recorder.note(line)

        sinks.append(
            ConsoleSink(config.training.train_iters, log_throughput=g.log_throughput, echo=note)
        )
    if g.log_jsonl is not None:
        sinks.append(JsonlSink(g.log_jsonl, start_iteration))
    options = ScalarOptions(
        world_size=config.world_size,
        log_loss_scale=g.log_loss_scale_to_tensorboard,
        log_validation_ppl=g.log_validation_ppl_to_tensorboard,
        log_memory=g.log_memory_to_tensorboard,
        log_world_size=g.log_world_size_to_tensorboard,
        log_timers=g.log_timers_to_tensorboard,
    )
    if g.tensorboard_dir is not None:
        sinks.append(
            TensorBoardSink(
                g.tensorboard_dir,
                options,
                log_interval=g.tensorboard_log_interval,
                queue_size=g.tensorboard_queue_size,
                start=(start_iteration, start_samples),
            )
        )
    if g.wandb_project is not None:
        sinks.append(
            WandbSink(
                g.wandb_project,
                g.wandb_exp_name or "",
                g.wandb_save_dir or os.path.join(config.checkpoint.save or ".", "wandb"),
                options,
                entity=g.wandb_entity,
                config=config.values(),
                log_interval=g.tensorboard_log_interval,
            )
        )
    recorder = Recorder(sinks, interval, echo or say, file)
    for sink in sinks:
        if isinstance(sink, JsonlSink | TensorBoardSink) and sink.notice is not None:
            recorder.say(f" {sink.notice}")
    return recorder
