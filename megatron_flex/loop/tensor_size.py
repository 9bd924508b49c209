"""``--tensor-model-parallel-size auto``: how many workers share each layer, before a run starts.

Every worker comes to the same answer by itself: from the flags, the lengths of the first batches,
and what the cluster's description or the profile say; nothing is measured.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

import torch

from megatron_flex.arguments import TENSOR_SIZE, ArgumentsError
from megatron_flex.config.config import Config
from megatron_flex.data.errors import DataError
from megatron_flex.loop.assemble import assemble
from megatron_flex.loop.lengths import Lengths
from megatron_flex.loop.plans import read_plans
from megatron_flex.loop.setup import planner_setup
from megatron_flex.planner.decision import Infeasible
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.service import Service
from megatron_flex.planner.tensor_choice import Outlook, best, in_words, reasons, sizes
from megatron_flex.planner.ways import ways
from megatron_flex.runtime.world import server_size
from megatron_flex.tokenizers.base import TokenizerError

BATCHES = 4
"""First batches that are planned for."""
SIMULATIONS = 12
"""Plans that a decision simulates."""


def chosen_size(build: Callable[[int], Config], workers: int, out: TextIO | None = None) -> int:
    """The size that is predicted to be fastest; the first worker prints why.

    Args:
        build: the configuration with a size.
        workers: of the job.
        out: where to; default the standard output.

    Raises:
        ArgumentsError: no size can be; the message says why of each.
    """
    found = [outlook(build, n) for n in sizes(workers, server_size(workers))]
    try:
        choice = best(found)
    except PlanError as error:
        raise ArgumentsError([str(error)]) from error
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f" {x}" for x in reasons(found, choice)), file=out, flush=True)
    return choice.size


def first_possible(build: Callable[[int], Config], workers: int) -> Config | None:
    """The configuration with the smallest size that the flags allow, if any does."""
    for size in sizes(workers, server_size(workers)):
        with suppress(ArgumentsError):
            return build(size)
    return None


def outlook(build: Callable[[int], Config], size: int) -> Outlook:
    """What is predicted of a run whose layers are shared by ``size`` workers."""
    try:
        config = build(size)
        if torch.cuda.is_available() and config.flexpipe.flexpipe_cluster is None:
            raise PlanError(f"{' '.join(TENSOR_SIZE)} on GPUs needs --flexpipe-cluster")
        return _planned(config, size)
    except ArgumentsError as error:
        return Outlook(size, problem="; ".join(error.messages))
    except (Infeasible, PlanError, TokenizerError, DataError, ValueError) as error:
        return Outlook(size, problem=str(error))


def _planned(config: Config, size: int) -> Outlook:
    parts = assemble(config)
    source, coefficients = parts.train, cost_coefficients(parts.model)
    if source is None:
        raise PlanError("there is no training data to choose by: give a number")
    setup = planner_setup(config, parts, config.devices, coefficients)
    options = replace(setup.options, simulations=SIMULATIONS, exact_memory=False)
    planner = Service(replace(setup, options=options)).planner
    static = parts.plan
    script = config.flexpipe.flexpipe_plans
    if script is not None:
        static = read_plans(script, parts.model.layers, config.devices)[0].plan
    lengths = Lengths(source, 0, 0, config.training.batch_sizes.size)
    seconds, plan, peak = [], "", 0.0
    for iteration in range(BATCHES):
        cut = ways(setup.cut, lengths.of(iteration), config.devices)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a profile of other sizes
            if config.flexpipe.flexpipe:
                decision = planner.decide(cut, None)
            else:
                finder = planner.finder(cut)
                candidate = finder.best_of(static, None)
                if not candidate.price.fits:
                    raise PlanError(f"a batch does not fit the plan of the flags, {static}")
                decision = planner.choose(finder, [candidate], None)
        seconds.append(decision.predicted.seconds)
        peak = max(peak, *decision.predicted.device_bytes)
        plan = plan or in_words(decision.plan)
    return Outlook(size, statistics.mean(seconds), plan, peak)
