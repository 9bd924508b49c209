"""What planning gains on variable lengths: iteration time against perfect balance.

    python benchmarks/gain.py                            # all rows
    python benchmarks/gain.py --batches 3 --rows 0 3     # some rows, few batches

Simulated on described A100s. Each row is a model, a number of devices, samples a batch and the
longest of them; *long p*: a share p of the samples is lognormal with a median of 16,000 tokens. The
planner sees several ways of cutting each batch to micro-batches: whole samples packed to token
budgets, or in the columns *slices* by cost, where long samples become chains. Columns, as multiples
of all work divided by all devices, sums over the batches:

- chain: the longest sample alone through the model and back, where that is more: no schedule of
  whole samples with a fused backward is faster;
- for each schedule: planned for every batch, and the best single plan over the batches, as their
  programs would run, with messages, reductions, updates and memory;
- bound: what no order of the last column's plans could beat (each device's work after the first
  forward has reached it; the longest micro-batch), with their reductions and updates;
- fixed, update, reduction: what they spend on costs that do not grow with the tokens, on updates,
  and on reductions that nothing hides;
- room: for how many chains of the batch's longest sample the fullest device has memory (mean); none
  where nothing was cut.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron_flex.cluster.cluster import load
from megatron_flex.data.cut import Cut
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.data.mock import mixture_lengths
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.flops import model_work, total_work
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.presets import model
from megatron_flex.planner.simulation import Prediction, predict, static_bytes
from megatron_flex.planner.ways import ways
from megatron_flex.schedule.list_scheduler import lower_bound

Lengths = NDArray[np.int64]
SLICES = "+slices"
FIRST = 50
"""Simulations of the first decision of a run, which nobody waits for more than once."""


@dataclass(frozen=True)
class Row:
    """One setting; ``long``: the share of long samples, 0 for the mixture alone."""

    model: str
    devices: int
    samples: int
    longest: int
    long: float = 0.0

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens of a micro-batch to choose from."""
        return (4096, 16384, 65536) if self.long else (1024, 2048, 4096, 8192)

    @property
    def simulations(self) -> int:
        """Of a decision: about as many as 30 % of an iteration's time holds on one core."""
        return 100 if self.long else 12

    def lengths(self, number: int) -> Lengths:
        """The samples of a batch."""
        found = mixture_lengths(7000 + number, np.arange(self.samples))
        if self.long:
            r = np.random.default_rng(1000 + number)
            long = r.lognormal(np.log(16000), 0.7, self.samples).astype(np.int64)
            found = np.where(r.random(self.samples) < self.long, long, found)
        return np.clip(found, 1, self.longest)

    def __str__(self) -> str:
        kind = f"long p = {self.long:g}" if self.long else f"up to {self.longest:,}"
        return f"{self.model} x{self.devices}, {self.samples}, {kind}"


ROWS = (
    Row("gpt-3.35b", 16, 32, 2048),
    Row("gpt-3.35b", 16, 32, 8192),
    Row("gpt-3.35b", 16, 32, 65536),
    Row("gpt-3.35b", 16, 128, 8192),
    Row("gpt-13b", 32, 64, 8192),
    Row("gpt-13b", 32, 64, 65536),
    Row("gpt-13b", 32, 256, 65536),
    Row("gpt-13b", 16, 32, 65536, 0.05),
    Row("gpt-13b", 16, 32, 65536, 0.2),
    Row("gpt-13b", 32, 128, 65536, 0.2),
    Row("gpt-3.35b", 8, 64, 65536, 0.2),
    Row("gpt-3.35b", 4, 32, 65536, 0.2),
)


class Setting:
    """A row under one schedule; a name that ends in ``+slices`` cuts long samples."""

    def __init__(self, row: Row, name: str, batches: int) -> None:
        schedule = name.removesuffix(SLICES)
        config, cluster = model(row.model), load(f"a100x{row.devices}")
        options = PlannerOptions(schedule=schedule, simulations=row.simulations)
        self.planner = Planner(config, closed_form_profile(config, cluster), cluster, options)
        work = total_work(model_work(config))
        cost = CostCoefficients(work.linear, work.quadratic)
        self.lengths = [row.lengths(number) for number in range(batches)]
        self.ways: list[list[Batch]] = []
        for lengths in self.lengths:
            if name != schedule:
                cut = Cut(by_cost=True, sliced=True, cost=cost)
                self.ways.append(list(ways(cut, lengths.tolist(), row.devices)))
                continue
            whole = GlobalBatch(0, lengths, (int(lengths.sum()),))
            cuts = {cut_by_tokens(whole, budget, cost): None for budget in row.budgets}
            self.ways.append([Batch.of(cut) for cut in cuts])

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """Seconds of all units, forward and backward: fixed, a token, a token pair."""
        units = self.planner.units
        found: NDArray[np.float64] = (units.forward + units.backward).sum(axis=1)
        return found

    def ideal(self, lengths: Lengths) -> float:
        """All work without fixed costs, divided by all devices."""
        _, token, pair = self.coefficients
        work = token * lengths + pair * lengths.astype(float) ** 2
        return float(work.sum()) / self.planner.units.num_devices

    def chain(self, lengths: Lengths) -> float:
        """The longest sample alone, or :meth:`ideal`."""
        fixed, token, pair = self.coefficients
        longest = float(lengths.max())
        return max(self.ideal(lengths), fixed + token * longest + pair * longest**2)

    def best(self, plan: Plan, ways: Sequence[Batch]) -> Prediction | None:
        """The plan with the way of cutting that suits it; ``None`` if none fits."""
        found: Prediction | None = None
        for batch in ways:
            price = self.planner.finder([batch]).best_of(plan, None).price
            if not price.fits:
                continue
            try:
                one = predict(self.planner.units, price.plan, batch)
            except PlanError:
                continue
            if one is not None and (found is None or one.seconds < found.seconds):
                found = one
        return found

    def room(self, prediction: Prediction, batch: Batch) -> float | None:
        """Memory left for activations, in chains of the longest sample; ``None``: none is cut."""
        if not batch.chains:
            return None
        problem, units = prediction.placement.problem, self.planner.units
        sizes = [sum(float(batch.sliced[m]) for m in chain) for chain in batch.chains]
        longest = batch.chains[int(np.argmax(sizes))]
        operations, stages = problem.operations, range(len(problem.plan.stages))
        taken = np.zeros(units.num_devices)
        for stage in stages:
            code = stage * operations.batches + longest[0]
            taken[operations.device[code]] += operations.takes[code]
        free = units.whole_budget - np.array(static_bytes(units, problem.plan, batch))
        held = taken > 0
        return float((free[held] / taken[held]).min())

    def planned(self, progress: Callable[[], object]) -> list[tuple[Plan, Prediction, Batch]]:
        """A decision for each batch, as its program would run; the pool of plans goes along."""
        found = []
        pool, count = Pool.empty(), FIRST
        for cuts in self.ways:
            decision, pool = self.planner.decide_with(pool, cuts, None, count=count)
            count = self.planner.options.simulations or count
            batch = cuts[decision.micro_batching]
            prediction = predict(self.planner.units, decision.plan, batch)
            assert prediction is not None  # only a finite stop gives None
            found.append((decision.plan, prediction, batch))
            progress()
        return found

    def single(self, pool: Sequence[Plan]) -> float:
        """Seconds of the plan of the pool, and the even ones, that is best over all batches."""
        best = float("inf")
        plans = dict.fromkeys(Plan(p.stages) for p in (*pool, *self.planner.even_plans))
        for plan in plans:
            total = 0.0
            for cuts in self.ways:
                prediction = self.best(plan, cuts)
                total += float("inf") if prediction is None else prediction.seconds
                if total >= best:
                    break
            best = min(best, total)
        return best


def table(rows: Sequence[Row], schedules: Sequence[str], batches: int | None) -> None:
    """Print the rows as they come."""
    names = [f"{s}, {kind}" for s in schedules for kind in ("planned", "single")]
    print(f"{'':34s}{'chain':>7s}" + "".join(f"{n:>20s}" for n in names)
          + f"{'bound':>8s}{'fixed':>8s}{'update':>8s}{'reduction':>11s}{'room':>7s}")  # fmt: skip
    for row in rows:
        count = batches or (10 if row.long else 24)
        cells: list[float] = []
        spent, room = (0.0, 0.0, 0.0, 0.0), "-"
        for schedule in schedules:
            setting = Setting(row, schedule, count)
            ideal = sum(map(setting.ideal, setting.lengths))
            if not cells:
                cells.append(sum(map(setting.chain, setting.lengths)) / ideal)
            with tqdm(total=count, desc=f"{row}, {schedule}", leave=False, file=sys.stderr) as bar:
                planned = setting.planned(bar.update)
            cells.append(sum(p.seconds for _, p, _ in planned) / ideal)
            cells.append(setting.single([plan for plan, _, _ in planned]) / ideal)
            devices = setting.planner.units.num_devices
            fixed = setting.coefficients[0] / devices
            rooms = [setting.room(p, batch) for _, p, batch in planned]
            found = [r for r in rooms if r is not None]
            room = f"{sum(found) / len(found):.1f}" if found else "-"
            spent = (
                sum(bound(p) for _, p, _ in planned) / ideal,
                sum(fixed * len(batch.tokens) for _, _, batch in planned) / ideal,
                sum(max(p.timeline.update) for _, p, _ in planned) / ideal,
                sum(p.timeline.norm - p.placement.makespan for _, p, _ in planned) / ideal,
            )
        print(f"{row!s:34s}{cells[0]:7.2f}" + "".join(f"{c:20.2f}" for c in cells[1:])
              + f"{spent[0]:8.2f}{spent[1]:8.2f}{spent[2]:8.2f}{spent[3]:11.2f}{room:>7s}",
              flush=True)  # fmt: skip


def bound(prediction: Prediction) -> float:
    """Seconds below which no order of the plan's operations comes."""
    placement = prediction.placement
    after = prediction.seconds - placement.makespan  # reductions that nothing hides, updates
    return lower_bound(placement.problem) + after


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", choices=range(len(ROWS)), metavar="N",
                        help="rows by number, from 0")  # fmt: skip
    parser.add_argument("--batches", type=int, help="of each row; default 24, of long ones 10")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb", f"zb{SLICES}"])
    arguments = parser.parse_args()
    rows = ROWS if arguments.rows is None else [ROWS[n] for n in arguments.rows]
    table(rows, arguments.schedules, arguments.batches)


if __name__ == "__main__":
    main()
