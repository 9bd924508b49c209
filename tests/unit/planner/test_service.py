from __future__ import annotations

import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_flex.cluster.cluster import description, load
from megatron_flex.data.cut import Cut
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.planner_process import PlannerGoneError, PlannerProcess
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner import frames
from megatron_flex.planner.decision import Decision, Infeasible
from megatron_flex.planner.lookahead import FIRST
from megatron_flex.planner.messages import Answer, Question, Setup
from megatron_flex.planner.options import PlannerName, PlannerOptions
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.service import Service, serve

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=500,
    padded_vocab_size=512,
    max_position_embeddings=4096,
    ffn_hidden_size=256,
    kv_channels=16,
    num_query_groups=4,
)
OPTIONS = PlannerOptions(memory_optimisation=False, recompute=False, offload_optimizer=False,
                         offload_activations=False)  # fmt: skip
SETUP = Setup(
    MODEL,
    description(load("cpux4")),
    None,
    OPTIONS,
    Cut(512, cost=CostCoefficients(1.0, 1e-4)),
    "0:10@0,1,2,3",
)
SIMULATING = replace(SETUP, options=replace(OPTIONS, simulations=30))
SHORT, LONG = (20, 60, 100, 30, 80, 50, 40, 90), (20, 60, 3000, 30, 80, 50, 40, 90)


def with_planner(name: PlannerName, budget: int | None = None) -> Setup:
    return replace(SETUP, options=replace(OPTIONS, planner=name, budget=budget))


@pytest.mark.parametrize("name", ["lookahead", "hbsa", "static"])
def test_every_planner_answers_with_a_plan_for_the_model(name: PlannerName) -> None:
    service = Service(with_planner(name))
    answer = service.answer(Question(7, (SHORT, LONG), "0:10@0,1,2,3", SHORT))
    assert answer.iteration == 7
    assert not answer.problem
    assert answer.decision is not None
    answer.decision.plan.check(MODEL.layers.num_units, 4)
    assert answer.decision.predicted.seconds > 0


def test_the_static_planner_stays_with_its_first_choice() -> None:
    service = Service(with_planner("static"))
    first = service.answer(Question(0, (SHORT, LONG))).decision
    assert first is not None
    running = str(first.plan)
    for iteration, lengths in enumerate((LONG, SHORT, LONG), 1):
        later = service.answer(Question(iteration, (lengths,), running, SHORT)).decision
        assert later is not None
        assert later.plan.stages == first.plan.stages


def test_what_fits_nowhere_is_a_problem_in_words_and_not_a_plan() -> None:
    answer = Service(with_planner("lookahead", 2_000_000)).answer(Question(0, (LONG,)))
    assert answer.decision is None
    assert "no plan fits" in answer.problem
    assert "--flexpipe-memory-budget-gb" in answer.problem


def test_memory_that_was_predicted_too_low_makes_the_budget_smaller_for_a_while() -> None:
    service = Service(with_planner("lookahead", 10_000_000_000))
    budgets = []
    told: list[tuple[float, ...]] = [(), (0.98, 1.005), (1.08, 1.0), *[(1.0,)] * 14, (1.0,)]
    for iteration, ratios in enumerate(told):
        question = Question(iteration, (SHORT,), memory=ratios)
        assert Question.from_json(question.to_json()) == question
        answer = service.answer(question)
        assert answer.decision is not None
        budgets.append(answer.decision.budget)
    assert budgets[:2] == [1e10, 1e10]  # the margin covers half a per cent
    assert budgets[2:-1] == [pytest.approx(1e10 / 1.08, rel=1e-6)] * 15
    assert budgets[-1] == 1e10


def test_a_smaller_budget_never_makes_a_batch_impossible() -> None:
    low, high = 1e6, 1e10
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        answer = Service(with_planner("lookahead", int(middle))).answer(Question(0, (LONG,)))
        low, high = (middle, high) if answer.problem else (low, middle)
    service = Service(with_planner("lookahead", int(high)))
    for iteration in range(3):
        answer = service.answer(Question(iteration, (LONG,), memory=(1.3,)))
        assert answer.decision is not None, answer.problem
        assert answer.decision.budget == int(high)
    assert service.answer(Question(3, (SHORT,))).decision is not None


def test_a_tight_budget_takes_more_stages() -> None:
    loose = Service(with_planner("lookahead")).answer(Question(0, (SHORT,))).decision
    assert loose is not None
    peak = max(loose.predicted.device_bytes)
    tight = Service(with_planner("lookahead", int(0.6 * peak))).answer(Question(0, (SHORT,)))
    assert tight.decision is not None
    assert len(tight.decision.plan.stages) > len(loose.plan.stages)
    assert max(tight.decision.predicted.device_bytes) <= 0.6 * peak


def test_measured_times_correct_predictions() -> None:
    service = Service(SETUP)
    assert service.answer(Question(0, (SHORT,))).factor == 1.0
    measured = ((1.0, 3.0), (2.0, 6.0), (1.0, 50.0))
    assert service.answer(Question(1, (SHORT,), measured=measured)).factor == 3.0


def test_questions_answers_and_setups_survive_their_text_form() -> None:
    question = Question(3, (SHORT, LONG), "0:10@0", LONG, ((0.5, 0.75),))
    assert Question.from_json(question.to_json()) == question
    assert Setup.from_json(SETUP.to_json()) == SETUP
    for setup in (SETUP, with_planner("lookahead", 2_000_000)):
        answer = Service(setup).answer(question)
        assert Answer.from_json(answer.to_json()) == answer


def test_the_service_answers_one_by_one() -> None:
    questions = [Question(i, (SHORT,)) for i in range(3)]
    asked, out = io.BytesIO(), io.BytesIO()
    for message in (SETUP.to_json(), *(q.to_json() for q in questions)):
        frames.write(asked, message)
    asked.seek(0)
    serve(asked, out)
    out.seek(0)
    answers = [Answer.from_json(data) for data, _ in iter(lambda: frames.read(out), None)]
    assert [a.iteration for a in answers] == [0, 1, 2]
    assert answers[0] == Service(SETUP).answer(questions[0])


def test_a_first_answer_comes_before_the_whole_one_and_costs_it_nothing() -> None:
    both, alone = Service(SIMULATING), Service(SIMULATING)
    assert both.first(Question(0, (SHORT,))) is None  # nothing is known yet
    plan: str | None = None
    running: tuple[int, ...] = ()
    for iteration, lengths in enumerate((SHORT, LONG, SHORT, LONG)):
        name = f"train {iteration - 1}" if plan else ""
        question = Question(iteration, (lengths,), plan, running, name=name)
        *_, whole = replies = list(both.replies(question))
        assert whole == alone.answer(question)
        assert isinstance(whole, Answer)
        assert whole.decision is not None
        firsts = [r for r in replies if isinstance(r, Answer) and r.first]
        assert len(firsts) == int(iteration > 0)
        for first in firsts:
            assert Answer.from_json(first.to_json()) == first
            assert first.iteration == iteration
            assert first.decision is not None
            assert first.decision.simulations <= FIRST < whole.decision.simulations
        plan, running = str(whole.decision.plan), lengths


def test_as_few_simulations_are_a_first_answer() -> None:
    service = Service(SIMULATING)
    start = service.answer(Question(0, (SHORT,)))
    assert start.decision is not None
    question = Question(1, (LONG,), str(start.decision.plan), SHORT)
    first = service.first(question)
    assert first is not None
    few = service.answer(replace(question, simulations=FIRST))
    assert replace(first, first=False, whole=few.whole) == few


def test_where_no_plan_of_a_first_answer_fits_the_whole_one_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(SIMULATING)
    start = service.answer(Question(0, (SHORT,)))
    assert start.decision is not None
    question = Question(1, (SHORT,), str(start.decision.plan), SHORT)
    assert service.first(question) is not None

    def none_fits(*_: object, **__: object) -> Decision:
        raise Infeasible("no plan fits", 1)

    with monkeypatch.context() as patched:
        patched.setattr(service.planner, "search", none_fits)
        assert service.first(question) is None
    assert service.answer(replace(question, simulations=FIRST)).decision is not None


@pytest.fixture
def process() -> Iterator[PlannerProcess]:
    running = PlannerProcess(SETUP)
    yield running
    running.close()


def test_the_process_gives_the_answers_of_the_service(process: PlannerProcess) -> None:
    question = Question(5, (SHORT, LONG), "0:10@0,1,2,3", SHORT)
    assert process.take(0.0) is None
    process.ask(question)
    assert process.take(60.0) == Service(SETUP).answer(question)


def test_a_killed_process_is_an_error_and_no_wait(process: PlannerProcess) -> None:
    process.ask(Question(0, (SHORT,)))
    assert process.take(60.0) is not None
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PlannerGoneError, match="has ended"):
        process.take(60.0)
    assert time.monotonic() - began < 30.0


def test_a_launcher_that_ends_the_job_leaves_the_planner_to_its_worker(
    process: PlannerProcess,
) -> None:
    process.ask(Question(0, (SHORT,)))
    assert process.take(60.0) is not None
    os.kill(process.pid, signal.SIGTERM)
    process.ask(Question(1, (SHORT,)))
    answer = process.take(60.0)
    assert isinstance(answer, Answer)
    assert answer.iteration == 1


def test_questions_to_a_stopped_process_do_not_wait(process: PlannerProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    asked: list[int] = []

    def ask() -> None:
        for iteration in range(4):  # a pipe takes 64 KiB
            process.ask(Question(iteration, ((64,) * 20_000,)))
            asked.append(process.unanswered)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(60.0)
    assert asked == [1, 2, 3, 4]
    began = time.monotonic()
    process.close()
    assert time.monotonic() - began < 30.0


def test_a_closed_process_has_ended(process: PlannerProcess) -> None:
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert Plan.parse(SETUP.static)


@pytest.mark.parametrize("name", ["lookahead", "hbsa", "static"])
@pytest.mark.parametrize("saving", [False, True])
def test_a_refusal_names_the_smallest_budget_which_is_accepted(
    name: PlannerName, saving: bool
) -> None:
    def problem(budget: int) -> str:
        options = PlannerOptions(planner=name, budget=budget, exact_memory=True)
        if not saving:
            options = replace(OPTIONS, planner=name, budget=budget, exact_memory=True)
        return Service(replace(SETUP, options=options)).answer(question).problem

    question = Question(0, (LONG, SHORT))
    text = problem(1_000_000)
    found = re.search(r"smallest budget that would do is (\S+) MB \(--\S+-gb (\S+)\)$", text)
    assert found, text
    megabytes, gigabytes = map(float, found.groups())
    assert megabytes == pytest.approx(1e3 * gigabytes)
    assert not problem(round(1e9 * gigabytes))
    almost = problem(round(0.985e9 * gigabytes))  # margin and room for messages are in it
    assert f"that would do is {found[1]} MB" in almost


def test_recorded_numbers_of_simulations_repeat_a_run_exactly() -> None:
    """With ``auto`` clocks decide how many; all else follows from the questions."""
    setup = replace(SETUP, options=replace(OPTIONS, schedule="zb", simulations=None))
    service = Service(setup)
    questions, answers = [], []
    running: str | None = None
    before: tuple[int, ...] = ()
    for iteration, lengths in enumerate((SHORT, LONG, SHORT, LONG)):
        question = Question(iteration, (lengths, SHORT), running, before)
        answer = service.answer(question)
        assert answer.decision is not None
        assert Answer.from_json(answer.to_json()) == answer
        assert answer.decision.simulations > 0
        questions.append(replace(question, simulations=answer.decision.simulations))
        answers.append(answer)
        running, before = str(answer.decision.plan), lengths
    assert Question.from_json(questions[1].to_json()) == questions[1]
    again = Service(setup)
    assert [again.answer(question) for question in questions] == answers
    # A resumed run begins without plans of earlier batches, and goes on.
    resumed = Service(setup).answer(questions[-1]).decision
    assert resumed is not None
    assert resumed.plan.num_units == MODEL.layers.num_units
