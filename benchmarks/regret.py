"""How far the planner's decisions are from the best plan that a long search finds.

    python benchmarks/regret.py                              # all settings of benchmarks/gain.py
    python benchmarks/regret.py --settings 0 3 --batches 2   # some, few batches
    python benchmarks/regret.py --budgets 50                 # one number of simulations

For every setting and number of simulations, decisions are made for one batch after the other, each
with the pool of plans that the earlier ones left. The reference for a batch is the better of two
local searches of 1,000 simulations, from the exact search's plans and from even plans. Printed:

- regret: the decision's simulated time over the reference, less 1: mean and worst over the batches;
- single: the sum of the decisions' times over that of the best single plan for all batches (of
  those decided on and even ones, each batch cut as suits the plan best), less 1;
- ms: CPU time of one simulation (of what decisions with 50 take more than those with few);
- first ms: CPU time of a first answer (4 simulations of plans that were good before), median over
  the batches, each after one that runs the plan decided for it, and
- first: its mean regret, without the switch to it.

*held* is the number of simulations that 30 % of an iteration's time holds at the measured rate; the
first decision of a run, which no iteration waits for, has 200.
Decisions are for a start, without a switch, split backwards on straight plans and Vs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.gain import ROWS, Row
from megatron_flex.cluster.cluster import description, load
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.planner import pace
from megatron_flex.planner.anytime import Entry, search
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.flops import model_work, total_work
from megatron_flex.planner.lookahead import FIRST
from megatron_flex.planner.messages import Question, Setup
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.presets import model
from megatron_flex.planner.service import AT_THE_START, Service
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.trials import Switching, Trials, moves_of
from megatron_flex.planner.ways import ways

LONG_SEARCH = 1000
FEW = 5
WINDOW = 4


class Setting:
    """A row, its batches and the ways of cutting them."""

    def __init__(self, row: Row, batches: int) -> None:
        self.config, self.cluster = model(row.model), load(f"a100x{row.devices}")
        self.profile = closed_form_profile(self.config, self.cluster)
        work = total_work(model_work(self.config))
        cost = CostCoefficients(work.linear, work.quadratic)
        self.row, self.cut = row, Cut(by_cost=True, sliced=True, cost=cost)
        self.lengths = [row.lengths(number).tolist() for number in range(batches)]
        self.batches = [ways(self.cut, own, row.devices) for own in self.lengths]

    def planner(self, count: int) -> Planner:
        """A planner that takes so many simulations."""
        options = PlannerOptions(schedule="zb", simulations=count)
        return Planner(self.config, self.profile, self.cluster, options)

    def first_answers(self, counts: Sequence[int]) -> tuple[list[float], list[float]]:
        """CPU seconds of each first answer but the first batch's, and its simulated seconds.

        ``counts``: simulations of the whole decisions between them.
        """
        options = PlannerOptions(schedule="zb")
        static = str(static_plan(self.config, self.row.devices, self.row.devices))
        setup = Setup(self.config, description(self.cluster), None, options, self.cut, static)
        service, plan = Service(setup), None
        taken, found = [], []
        for number, (own, count) in enumerate(zip(self.lengths, counts, strict=True)):
            window = tuple(map(tuple, self.lengths[number : number + WINDOW]))
            before = tuple(self.lengths[number - 1]) if plan else ()
            question = Question(number, window, plan, before, simulations=max(count, FIRST + 1))
            began = time.process_time()
            first = service.first(question)
            if plan is not None:
                taken.append(time.process_time() - began)
                decision = None if first is None else first.decision
                found.append(math.inf if decision is None else decision.predicted.seconds)
            whole = service.answer(question).decision
            assert whole is not None, own
            plan = str(whole.plan)
        return taken, found

    def searched(self, batches: Sequence[Batch], starts: Iterable[Entry], count: int) -> float:
        """Seconds of the best plan that a local search finds."""
        planner = self.planner(count)
        finder = planner.finder(batches)
        beyond = Switching(finder, None, 0.0)
        trials = Trials(planner.units, finder, None, lambda c: c, lambda c: c.price.fits, beyond)
        moves = partial(moves_of, planner.elements, len(batches), straight=True, v=True)
        found = search(trials, starts, moves, count)
        return found.trials[0].score if found.trials else math.inf

    def reference(self, batches: Sequence[Batch]) -> float:
        """Seconds of the best of two long searches."""
        planner = self.planner(0)
        finder = planner.finder(batches)
        fits = [c for c in finder.searched(None) if c.price.fits]
        fits.sort(key=lambda c: c.seconds)
        exact = [(Plan(c.plan.stages), c.micro_batching) for c in fits]
        even = [(plan, way) for way in range(len(batches)) for plan in planner.even_plans]
        return min(self.searched(batches, starts, LONG_SEARCH) for starts in (exact, even))

    def alone(self, plan: Plan, batches: Sequence[Batch]) -> float:
        """Seconds of one plan, cut as suits it best; infinite if it does not fit."""
        entries = [(plan, way) for way in range(len(batches))]
        return self.searched(batches, entries, len(entries))


@dataclass(frozen=True)
class Decided:
    """Decisions for all batches, and CPU seconds of each."""

    decisions: tuple[Decision, ...]
    taken: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        """Simulated times."""
        return [d.predicted.seconds for d in self.decisions]


def decide(setting: Setting, counts: Sequence[int], progress: Callable[[], object]) -> Decided:
    """A decision for every batch with its number of simulations; the pool goes along."""
    pool = Pool.empty()
    found, taken = [], []
    for batches, count in zip(setting.batches, counts, strict=True):
        planner = setting.planner(count)
        began = time.process_time()
        decision, pool = planner.decide_with(pool, batches, None)
        taken.append(time.process_time() - began)
        found.append(decision)
        progress()
    return Decided(tuple(found), tuple(taken))


class Single:
    """The best single plan."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._known: dict[Plan, float] = {}

    def seconds(self, decided: Decided) -> float:
        """Of all batches on the best of the plans decided on and the even ones."""
        plans = dict.fromkeys(Plan(d.plan.stages) for d in decided.decisions)
        return min(map(self._all, (*plans, *self._setting.planner(0).even_plans)))

    def _all(self, plan: Plan) -> float:
        if plan not in self._known:
            setting = self._setting
            self._known[plan] = sum(setting.alone(plan, own) for own in setting.batches)
        return self._known[plan]


def held(two: tuple[Decided, Decided], seconds: float) -> tuple[int, float]:
    """Simulations that fit into a part of an iteration, and the seconds of one.

    ``two``: decisions with few and with more simulations; what they share is not counted.
    """
    few, more = two
    simulations = sum(d.simulations for d in more.decisions) - sum(
        d.simulations for d in few.decisions
    )
    one = (sum(more.taken) - sum(few.taken)) / max(1, simulations)
    return max(1, min(int(pace.PART * seconds / max(one, 1e-6)), LONG_SEARCH)), one


def lines(row: Row, batches: int, budgets: Sequence[int]) -> Iterator[str]:
    """What is printed for one setting."""
    setting = Setting(row, batches)
    total = batches * (len(budgets) + 4)
    with tqdm(total=total, desc=str(row), leave=False, file=sys.stderr) as bar:
        reference = []
        for own in setting.batches:
            reference.append(setting.reference(own))
            bar.update()
        few = decide(setting, [FEW] * batches, bar.update)
        found = {n: decide(setting, [n] * batches, bar.update) for n in budgets}
        timed = found.get(50) or decide(setting, [50] * batches, bar.update)
        fit = [held((few, timed), seconds) for seconds in reference]
        counts = [count for count, _ in fit]
        chosen = decide(setting, [max(AT_THE_START, counts[0]), *counts[1:]], bar.update)
        single = Single(setting)
        first, answers = setting.first_answers([50] * batches)
    behind = statistics.mean(a / r - 1.0 for a, r in zip(answers, reference[1:], strict=True))
    columns = [(str(n), decided) for n, decided in found.items()]
    columns.append((f"held: {min(counts)}-{max(counts)}", chosen))
    for name, decided in columns:
        loss = [s / r - 1.0 for s, r in zip(decided.seconds, reference, strict=True)]
        over = sum(decided.seconds) / single.seconds(decided) - 1.0
        yield (
            f"{row!s:36s}{name:>16s}{statistics.mean(loss):9.2%}{max(loss):9.2%}{over:+10.2%}"
            f"{1000 * fit[0][1]:8.2f}{1000 * statistics.median(first):10.1f}{behind:9.2%}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", type=int, nargs="+", choices=range(len(ROWS)), metavar="N",
                        help="settings by number, from 0; default all")  # fmt: skip
    parser.add_argument("--batches", type=int, default=6, help="of each setting")
    parser.add_argument("--budgets", type=int, nargs="+", default=[10, 50, 200, 1000],
                        help="numbers of simulations")  # fmt: skip
    arguments = parser.parse_args()
    rows = ROWS if arguments.settings is None else [ROWS[n] for n in arguments.settings]
    print(f"{'':36s}{'simulations':>16s}{'regret':>9s}{'worst':>9s}{'single':>10s}"
          f"{'ms':>8s}{'first ms':>10s}{'first':>9s}")  # fmt: skip
    for row in rows:
        for line in lines(row, arguments.batches, arguments.budgets):
            print(line, flush=True)


if __name__ == "__main__":
    main()
