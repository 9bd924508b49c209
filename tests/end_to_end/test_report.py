"""The page of a run in a real browser: rendered, clicked through, and compared with the records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.report.figures import switches, time_parts
from megatron_flex.report.page import page as written
from tests.browser import Browser, Page, chromium
from tests.end_to_end.pages import (
    GANTT,
    ITERATIONS,
    PLANS,
    READY,
    Pages,
    across,
    drag,
    make_pages,
    place,
    plot,
    show,
    tip,
    value,
    view,
)
from tests.unit.report.records import write_log
from tests.unit.tools.test_whatif import CHOSEN as SIMULATED
from tests.unit.tools.test_whatif import SMALL, model_file
from tools import report, simulate, status, whatif

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="there is no Chromium here: apt-get install chromium"
)

CONTROLS = ".plot[tabindex], canvas[tabindex], button:not(:disabled), input, summary"
CHOSEN = "Number(document.getElementById('chosen').value)"
LINES = "path[data-series]"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return make_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def page(browser: Browser, pages: Pages) -> Iterator[Page]:
    """The page of the scripted run."""
    found = browser.page()
    found.open(pages.one, READY)
    yield found
    assert found.problems == []


def test_the_page_opens_at_once_without_errors_and_without_a_network(
    browser: Browser, pages: Pages
) -> None:
    for path in (pages.one, pages.both):
        found = browser.page()
        found.open(path, READY)
        found.frame()
        assert found.busy < 2.0
        assert found.problems == []
        assert found.requests == []
        assert path.stat().st_size < 1e6
        assert {"Where the time goes", "One iteration"} <= set(found.each("h2", "e.innerText"))


@pytest.mark.parametrize("width", [320, 360, 768, 1600])
def test_no_width_scrolls_sideways(browser: Browser, pages: Pages, width: int) -> None:
    for path in (pages.one, pages.both):
        found = browser.page(width=width, height=740)
        found.open(path, READY)
        found.wait("document.querySelector('canvas[data-course]')")
        assert found.run("document.documentElement.scrollWidth") <= width
        assert found.problems == []


def test_dark_where_the_system_is_dark(browser: Browser, pages: Pages) -> None:
    found = browser.page()
    found.open(pages.one, READY)

    def seen() -> tuple[float, float, str]:
        """Brightness of ground and letters, and a colour of what is drawn on a canvas."""
        style = "getComputedStyle(document.body)"
        ground, letters = found.run(f"[{style}.backgroundColor, {style}.color]")
        canvas = f"document.querySelector('{plot('plans')} canvas')"
        drawn = found.run(f"[...{canvas}.getContext('2d').getImageData(100, 40, 1, 1).data].join()")
        a, b = (sum(map(int, re.findall(r"\d+", c)[:3])) / 3 for c in (ground, letters))
        return a, b, str(drawn)

    light = seen()
    found.resize(dark=True)
    dark = seen()
    found.resize(dark=False)
    assert light[0] > 200 > 100 > light[1]
    assert dark[0] < 60 < 180 < dark[1]
    assert dark[2] != light[2]
    assert seen() == light


def test_the_loss_is_that_of_the_records(page: Page, pages: Pages) -> None:
    losses = [r["lm loss"] for r in pages.scripted.iterations]
    for k in (1, 7, ITERATIONS):
        page.hover(plot("loss"), across(page, "loss", k))
        assert tip(page)[""] == f"iteration {k}"
        assert value(tip(page)["lm loss"]) == pytest.approx(losses[k - 1], rel=1e-3)
    # And drawn where it belongs: y is a straight line of the value, x of the iteration.
    (d,) = page.each(f"{plot('loss')} {LINES}", "e.getAttribute('d')")
    points = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", d)]
    assert len(points) == ITERATIONS
    low, high = losses.index(min(losses)), losses.index(max(losses))
    slope = (points[high][1] - points[low][1]) / (losses[high] - losses[low])
    assert slope < 0
    for (_, y), loss in zip(points, losses, strict=True):
        assert y == pytest.approx(points[low][1] + slope * (loss - losses[low]), abs=0.2)
    steps = [b[0] - a[0] for a, b in pairwise(points)]
    assert max(steps) - min(steps) < 0.25
    evaluations = [v for v in pages.scripted.validations if v["event"] == "validation"]
    assert len(page.each(f"{plot('loss')} .validation", "1")) == len(evaluations)


def test_rates_lengths_and_times_are_those_of_the_records(page: Page, pages: Pages) -> None:
    k = 9
    record, following = pages.scripted.iterations[k - 1 : k + 1]
    page.hover(plot("rate"), across(page, "rate", k))
    assert value(tip(page)["measured"]) == pytest.approx(record["tokens_per_second"], rel=1e-3)
    balanced = record["tokens"] / record["seconds-balanced"]
    assert value(tip(page)["perfect balance"]) == pytest.approx(balanced, rel=1e-3)
    page.hover(plot("lengths"), across(page, "lengths", k))
    assert value(tip(page)["longest"]) == max(record["lengths"])
    assert value(tip(page)["samples"]) == len(record["lengths"])
    page.hover(plot("time"), across(page, "time", k))
    names = page.run("Object.fromEntries(Object.entries(PARTS).map(([k, v]) => [k, v[0]]))")
    shown = tip(page)
    for part, seconds in time_parts(record, following).items():
        assert value(shown[names[part]]) == pytest.approx(seconds, rel=2e-3, abs=1e-6), part
    assert value(shown["iteration"]) == pytest.approx(record["elapsed"], rel=1e-3)


def test_the_time_of_all_iterations_is_added_up(page: Page, pages: Pages) -> None:
    sums: dict[str, float] = {}
    records = pages.scripted.iterations
    for record, following in zip(records, [*records[1:], None], strict=True):
        for part, seconds in time_parts(record, following).items():
            sums[part] = sums.get(part, 0.0) + seconds
    whole = sum(sums.values())
    shown = dict(page.each(".totals [data-part]", "[e.dataset.part, e.children[1].innerText]"))
    assert set(shown) == set(sums)
    for part, seconds in sums.items():
        assert value(shown[part]) == pytest.approx(seconds / whole, rel=0.02, abs=1e-4), part


def test_shares_and_legends_change_what_is_drawn(page: Page) -> None:
    def axis() -> str:
        return str(page.each(f"{plot('time')} .grid text", "e.textContent")[0])

    assert axis().endswith(" s")
    page.click("[data-chart=time] button.share")
    assert axis().endswith("%")
    assert page.run("document.activeElement.className") == "share"
    page.key("Enter")
    assert axis().endswith(" s")
    series = f"{plot('rate')} {LINES}"
    assert len(page.each(series, "1")) == 2
    page.click("[data-chart=rate] .legend button:nth-child(2)")
    assert page.each(series, "e.dataset.series") == ["measured"]
    page.hover(plot("rate"))
    assert "perfect balance" not in tip(page)
    page.click("[data-chart=rate] .legend button:nth-child(2)")
    assert len(page.each(series, "1")) == 2


def test_charts_zoom_together(page: Page) -> None:
    drag(page, "loss", 5, 12)
    assert view(page) == [5, 12]
    assert page.each("#from, #to", "e.value") == ["5", "12"]
    d = page.each(f"{plot('memory')} {LINES}", "e.getAttribute('d')")[0]
    assert len(re.findall(r"[\d.]+,", d)) == 8 + 2  # one more on each side, for the line to go on
    assert page.text("#switch-count").startswith("1 in view")
    page.click("#all")
    assert view(page) == [1, ITERATIONS]
    drag(page, "time", 15, 18)
    assert view(page) == [15, 18]
    page.click(plot("plans"), times=2)
    assert view(page) == [1, ITERATIONS]
    page.run("document.getElementById('from').value = 4")
    page.run("document.getElementById('from').dispatchEvent(new Event('change'))")
    assert view(page) == [4, ITERATIONS]


def test_charts_answer_to_the_keyboard(page: Page, pages: Pages) -> None:
    page.focus(plot("loss"))
    page.key("Home")
    assert tip(page)[""] == "iteration 1"
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert tip(page)[""] == "iteration 3"
    loss = pages.scripted.iterations[2]["lm loss"]
    assert value(tip(page)["lm loss"]) == pytest.approx(loss, rel=1e-3)
    page.key("ArrowRight", shift=True)
    assert tip(page)[""] == "iteration 13"
    page.key("Enter")
    assert page.run(CHOSEN) == 13
    page.key("+")
    low, high = view(page)
    assert low <= 13 <= high
    assert high - low < 12
    page.key("0")
    assert view(page) == [1, ITERATIONS]
    page.key("Escape")
    assert tip(page)[""] == ""


def test_tab_comes_to_every_control_and_drawing(page: Page) -> None:
    page.wait(f"{GANTT}.found")
    page.run("document.activeElement.blur(); window.seen = new Set()")
    page.run("document.addEventListener('focusin', (e) => seen.add(e.target))")
    for _ in range(len(page.each(CONTROLS, "1")) + 5):
        page.key("Tab")
    missed = page.each(CONTROLS, "e.checkVisibility() && !seen.has(e) ? e.outerHTML : ''")
    assert [m for m in missed if m] == []


def test_plans_are_drawn_and_said(page: Page) -> None:
    for k, degrees in ((3, "(1,1)"), (9, "(2)"), (15, "(1,1,1) on 2")):
        page.hover(plot("plans"), across(page, "plans", k))
        assert tip(page)["workers of each stage"] == degrees
    places = [(3, 1), (3, 6), (15, 1), (9, 1), (3, 4), (9, 4)]
    at = [(across(page, "plans", k), unit / 8) for k, unit in places]
    colours = page.run(
        f"(() => {{ const c = document.querySelector('{plot('plans')} canvas');"
        " const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const of = (x, y) => 4 * (Math.floor(TOP + y * 170) * c.width + Math.floor(x * c.width));"
        f" return {json.dumps(at)}.map((p) => all.slice(of(...p), of(...p) + 3).join()); }})()"
    )
    first, last, three, two, border, none = colours
    assert first == last == three, "stages of one worker"
    assert two != first, "two workers"
    assert border != first, "a border between stages"
    assert none == two, "and none"


def test_memory_of_each_worker_is_the_most_it_used(page: Page, pages: Pages) -> None:
    records = pages.scripted.iterations
    most = [max(r["memory-by-worker"][w] for r in records) for w in (0, 1)]
    budget = pages.scripted.last_run["budget"]
    page.focus(".workers .plot")
    for worker in (0, 1):
        page.key("ArrowRight")
        assert tip(page)[""] == f"worker {worker}"
        assert value(tip(page)["most used"]) == pytest.approx(most[worker], rel=1e-3)
        assert value(tip(page)["of the budget"]) == pytest.approx(most[worker] / budget, rel=0.01)
    heights = page.each(".workers rect", "Number(e.getAttribute('height'))")
    assert heights[0] / heights[1] == pytest.approx(most[0] / most[1], rel=1e-2)
    page.hover(plot("memory"), across(page, "memory", 4))
    assert value(tip(page)["measured"]) == pytest.approx(records[3]["memory-measured"], rel=1e-3)
    assert value(tip(page)["budget"]) == budget


def test_switches_are_listed_with_their_stalls_and_lead_to_the_iteration(
    page: Page, pages: Pages
) -> None:
    found = switches(pages.scripted)
    assert [s.iteration for s in found] == [7, 14, 19]
    assert page.text("#switch-count").startswith("3 in view")
    rows = page.each(".switch summary", "e.innerText")
    for row, switch in zip(reversed(rows), found, strict=True):
        assert row.split()[0] == str(switch.iteration)
        assert switch.stall is not None
        assert value(row[row.index("stall") + 6 :]) == pytest.approx(switch.stall, rel=1e-3)
    assert "(1,1) → (2)" in rows[-1]
    page.click(".switch:last-of-type summary")
    assert PLANS[0] in page.text(".switch:last-of-type")
    page.click(".switch:last-of-type button")
    assert page.run(CHOSEN) == 7


def test_every_second_iteration_is_traced_and_no_evaluation(pages: Pages) -> None:
    for run in (pages.scripted, pages.planned):
        assert set(run.trace) == set(range(2, ITERATIONS + 1, 2))
        for events in run.trace.values():  # evaluations come before iterations 6 and 16
            computed = [
                (e["name"], e["args"]["what"])
                for e in events
                if e["name"] in ("Forward", "Backward")
            ]
            assert computed
            assert len(set(computed)) == len(computed)


def test_an_iteration_is_drawn_as_planned_and_as_it_went(page: Page, pages: Pages) -> None:
    show(page, 10)
    events = pages.scripted.trace[10]
    spans = [e for e in events if e["ph"] == "X"]
    begin = min(e["ts"] for e in spans)
    forward = max((e for e in spans if e["name"] == "Forward"), key=lambda e: float(e["dur"]))
    middle = (forward["ts"] - begin + forward["dur"] / 2) / 1e6
    page.hover("canvas[data-course=actual]", *place(page, "actual", forward["pid"], middle))
    shown = tip(page)
    words = dict(word.split("=") for word in forward["args"]["what"].split())
    assert shown[""] == f"worker {forward['pid']}: forward"
    tokens = next(e for e in events if e["name"] == "iteration")["args"]["tokens"]
    batch = int(words["micro_batch"])
    assert shown["micro-batch"].startswith(f"{batch} ({tokens[batch]:,} tokens")
    assert value(shown["takes"]) == pytest.approx(forward["dur"] / 1e6, rel=0.02)
    start, stop = forward["args"]["planned"]
    assert value(shown["planned to take"]) == pytest.approx(stop - start, rel=0.02)
    _, title = page.each(".gantts h3", "e.innerText")
    length = max(e["ts"] + e["dur"] for e in spans) - begin
    assert value(title.split(": ")[1]) == pytest.approx(length / 1e6, rel=1e-3)
    computing = sum(e["dur"] for e in spans if e["name"].startswith(("Forward", "Backward")))
    shown_share = value(title.split("computing ")[1])
    assert shown_share == pytest.approx(computing / (2 * length), rel=0.02)
    # Two replicas of all units: no stage waits for another.
    text = page.text("#shares")
    assert value(text.split("computing ")[1]) == pytest.approx(computing / (2 * length), rel=0.02)
    assert value(text.split("not yet sent) ")[1]) == 0.0
    show(page, 4)  # two stages: the second waits for the first
    assert value(page.text("#shares").split("not yet sent) ")[1]) > 0.0


def test_the_drawing_of_an_iteration_zooms(page: Page) -> None:
    page.wait(f"{GANTT}.found")

    def window() -> list[float]:
        return list(page.run(f"{GANTT}.window"))

    page.click("button[aria-label='zoom in']")
    assert window() == [0.25, 0.75]
    page.click("button[aria-label=later]")
    assert window() == pytest.approx([0.4, 0.9])
    page.click("button[aria-label=earlier]")
    assert window() == pytest.approx([0.25, 0.75])
    page.click("button[aria-label='zoom out']")
    assert window() == pytest.approx([0.0, 1.0])
    page.click("button[aria-label='zoom in']")
    page.click("button[aria-label='whole iteration']")
    assert window() == [0, 1]
    page.drag("canvas[data-course=actual]", (0.4, 0.6))
    low, high = window()
    assert 0.3 < low < 0.45 < 0.5 < high < 0.65
    page.click("canvas[data-course=planned]", times=2)
    assert window() == [0, 1]
    lengths = f"{GANTT}.panels.map((p) => p.length)"
    planned, actual = page.run(lengths)
    page.click("button[aria-label='same time scale for both']")
    assert page.run(lengths) == [max(planned, actual)] * 2


def test_operations_are_reached_by_keys(page: Page) -> None:
    page.wait(f"{GANTT}.found")
    page.focus("canvas[data-course=planned]")
    page.key("ArrowRight")
    first = tip(page)
    assert first[""].startswith("worker 0: ")
    page.key("ArrowRight")
    second = tip(page)
    assert value(second["from"]) >= value(first["to"]) - 1e-6
    page.key("ArrowDown")
    assert tip(page)[""].startswith("worker 1: ")
    page.key("ArrowUp")
    assert tip(page)[""].startswith("worker 0: ")
    page.key("+")
    assert page.run(f"{GANTT}.window[1] - {GANTT}.window[0]") == pytest.approx(0.5)
    page.key("0")
    assert page.run(f"{GANTT}.window") == [0, 1]
    page.key("Escape")
    assert tip(page)[""] == ""


def test_one_goes_from_drawn_iteration_to_drawn_iteration(page: Page, pages: Pages) -> None:
    assert page.run(CHOSEN) == ITERATIONS
    drawn = page.run("Object.keys(shown().gantts).map(Number)")
    assert set(range(2, ITERATIONS + 1, 2)) <= set(drawn)
    page.click("#iteration .row button:nth-of-type(1)")
    assert page.run(CHOSEN) == drawn[-2]
    page.click("#iteration .row button:nth-of-type(2)")
    assert page.run(CHOSEN) == ITERATIONS
    assert page.each("#iteration .row button:nth-of-type(2)", "e.disabled")[0]
    page.click(plot("bubble"), across(page, "bubble", 6))
    assert page.run(CHOSEN) == 6
    assert page.text("#plan-text") == str(pages.scripted.iterations[5]["plan"])


def test_predictions_stand_beside_what_was_measured(page: Page, pages: Pages) -> None:
    page.focus(plot("predicted"))
    page.key("ArrowRight")
    records = pages.scripted.iterations
    shown, field = tip(page), "predicted-program"
    assert shown[""] == "iteration 1"
    assert value(shown["measured"]) == pytest.approx(records[0]["elapsed"], rel=1e-3)
    predicted = value(shown["program, by the cost model"])
    assert predicted == pytest.approx(records[0][field], rel=1e-3)
    ratios = sorted(r["elapsed"] / r[field] for r in records)
    text = page.text("[data-chart=predicted] .note")
    assert value(text.split(": ")[1]) == pytest.approx(ratios[len(ratios) // 2], rel=1e-2)
    page.key("Enter")
    assert page.run(CHOSEN) == 1


def test_several_runs_stand_side_by_side(browser: Browser, pages: Pages) -> None:
    page = browser.page()
    page.open(pages.both, READY)
    both = (pages.scripted, pages.planned)
    _, *cells = page.each("#overview [data-figure=iterations] td", "e.innerText")
    assert cells == [str(ITERATIONS)] * 2
    page.hover(plot("loss"), across(page, "loss", 5))
    for run in both:
        shown = value(tip(page)[f"{run.name}: lm loss"])
        assert shown == pytest.approx(run.iterations[4]["lm loss"], rel=1e-3)
    before = page.text("#iteration dl")
    page.click("input[type=radio][value='1']")
    assert page.run("shown().name") == "planned"
    assert page.text("#iteration dl") != before
    page.wait(f"{GANTT}.wanted.startsWith('1 ') && {GANTT}.found")
    assert page.problems == []


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of ten thousand simulated iterations: some, over and over, each a little slower."""
    directory = tmp_path_factory.mktemp("month")
    words = "--configurations flexpipe-untuned --iterations 30 --simulations 2 --search-every 30"
    assert simulate.main([*words.split(), "--output", str(directory / "some")]) == 0
    first, *lines = (directory / "some" / "flexpipe-untuned.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records[0]["memory-by-worker"]) == 16

    def slower(k: int) -> dict[str, Any]:
        record = records[(k - 1) % len(records)]
        elapsed = record["elapsed"] * (1.0 + 1e-5 * k)
        rate = record["tokens"] / elapsed
        return {**record, "iteration": k, "elapsed": elapsed, "tokens_per_second": rate}

    return write_log(directory / "log.jsonl", [json.loads(first), *map(slower, range(1, 10_001))])


def test_ten_thousand_iterations_open_and_are_exact_when_zoomed(
    browser: Browser, month: Path
) -> None:
    assert report.main([str(month), "--gantts", "4"]) == 0
    found = month.with_name("report.html")
    assert found.stat().st_size < 5e6
    page = browser.page()
    page.open(found, READY)
    page.frame()
    assert page.busy < 2.0
    assert max(page.each("svg", "e.innerHTML.length")) < 500_000, "what is drawn is thinned out"
    bands = f"{plot('rate')} polygon"
    assert len(page.each(bands, "1")) == 2
    assert "running means" in page.text("[data-chart=rate] .note")
    drag(page, "rate", 5000, 5400)
    assert page.each(bands, "1") == []
    low, high = view(page)
    drag(page, "rate", low + 100, low + 140)
    low, high = view(page)
    assert high - low < 60
    k = low + 9
    page.hover(plot("rate"), across(page, "rate", k))
    assert tip(page)[""] == f"iteration {k:,}"
    rate = json.loads(month.read_text().splitlines()[k])["tokens_per_second"]
    assert value(tip(page)["simulated"]) == pytest.approx(rate, rel=1e-3)
    page.run("select(1)")
    page.wait(f"{GANTT}.wanted === '0 1' && {GANTT}.found")
    page.resize(360, 740)
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert page.problems == []
    assert page.requests == []


def test_of_a_longer_run_a_point_is_a_mean(browser: Browser, pages: Pages, tmp_path: Path) -> None:
    found = tmp_path / "grouped.html"
    found.write_text(written([pages.scripted], longest=7))
    page = browser.page()
    page.open(found, READY)
    assert "each point is the mean of 3 iterations" in page.text("h1 + p")
    page.hover(plot("loss"), across(page, "loss", 8))
    assert tip(page)[""] == "iterations 7 to 9"
    losses = [r["lm loss"] for r in pages.scripted.iterations]
    assert value(tip(page)["lm loss"]) == pytest.approx(sum(losses[6:9]) / 3, rel=1e-3)
    (corners,) = page.each(f"{plot('loss')} polygon", "e.getAttribute('points')")
    assert len(corners.split()) == 2 * 7, "from the least to the most of each point"
    page.click(plot("loss"), across(page, "loss", ITERATIONS))
    assert page.run(CHOSEN) == ITERATIONS
    assert page.problems == []


def test_the_status_of_a_real_run(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(pages.directory / "scripted"), "--once"]) == 0
    printed = capsys.readouterr().out
    assert f"{ITERATIONS} of {ITERATIONS} (100 %)" in printed
    assert "(1,1,1) on 2 -> (2) at iteration 19" in printed
    assert "(3 in all)" in printed


def test_the_page_of_a_what_if_for_thousands_of_devices_opens_at_once(
    browser: Browser, tmp_path: Path
) -> None:
    words = [*SMALL, *"--cluster h200x4096 --global-batch-size 8192".split()]
    words += ["--model", model_file(tmp_path), "--output", str(tmp_path)]
    assert whatif.main([*words, "--configurations", *SIMULATED]) == 0
    path = tmp_path / "report.html"
    assert path.stat().st_size < 5e6
    found = browser.page()
    found.open(path, READY)
    found.frame()
    assert found.busy < 2.0
    found.resize(360, 740)
    assert found.run("document.documentElement.scrollWidth") <= 360
    assert found.problems == []
    assert found.requests == []
    names = " ".join(found.each("th, h1", "e.innerText"))
    assert all(name in names for name in SIMULATED)
