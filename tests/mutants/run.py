"""Mutation testing: do the tests notice faults? ``make mutants`` runs this.

Works in temporary copies of the tree; the tree itself is never changed. For each fault of the list
its change is made, its tests are run until the first fails, and the change is undone. Exit status:
0, or 1 if too few faults are noticed, or 2 if the list or the tests are not in order.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import psutil
from tqdm import tqdm

from tests.mutants.faults import ROOT, Fault, StaleList, load, problems

BUILD_SECONDS = 300.0
VERIFY_SECONDS = 1800.0
_FAILED = re.compile(r"(FAILED|ERROR) \S+::")
PYTEST = ("-x", "-q", "-p", "no:cacheprovider")
PRODUCTS = ("libmegatron_flex.so", "twin_manager")


class Verdict(str, Enum):
    """What became of a fault."""

    NOTICED = "noticed"
    TIMED_OUT = "noticed by a time-out"
    SURVIVED = "survived"
    BROKEN = "could not be tried"


@dataclass(frozen=True)
class Outcome:
    """``detail``: the first test that failed, or what went wrong."""

    fault: Fault
    verdict: Verdict
    seconds: float
    detail: str = ""

    @property
    def noticed(self) -> bool:
        """Whether some test failed."""
        return self.verdict in (Verdict.NOTICED, Verdict.TIMED_OUT)


@dataclass(frozen=True)
class Done:
    """How a command ended: ``status`` is ``None`` if it ran into its time limit."""

    status: int | None
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """The end of its output."""
        return "\n".join(self.output.splitlines()[-30:])


class Tree:
    """A copy of the source tree, with a built native library."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root / str(number)
        self.scratch = root / f"t{number}"  # short: names of sockets have a limit
        self.scratch.mkdir()
        self._running: subprocess.Popen[bytes] | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._closed = False
        _copy_sources(self.root)
        # Bytecode is told from its source by a hash: two changes within one second differ too.
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
        subprocess.run([*command, "megatron_flex"], cwd=self.root, check=True)

    def build(self) -> Done:
        """Build the native library; only what has changed is compiled."""
        return self.run(["kernels/build.py"], BUILD_SECONDS)

    def take_library(self, other: Path) -> None:
        """Take over a built library."""
        for name in PRODUCTS:
            partial = self.root / "megatron_flex" / f".{name}"
            shutil.copy2(other / name, partial)
            partial.replace(self.root / "megatron_flex" / name)

    def test(self, tests: Iterable[str], seconds: float) -> Done:
        """Run tests until the first fails; at the time limit all of them are killed."""
        zygote = self._ready()
        assert zygote.stdin is not None
        output = self.scratch / "output"
        job = {"arguments": [*PYTEST, *tests], "output": str(output)}
        began = time.monotonic()
        zygote.stdin.write(json.dumps(job).encode() + b"\n")
        zygote.stdin.flush()
        child = self._answer(None)
        assert child is not None
        status = self._answer(seconds)
        spent = time.monotonic() - began
        _kill(child)
        if status is None:
            self._answer(None)
        return Done(status, output.read_text(errors="replace"), spent)

    def _ready(self) -> subprocess.Popen[bytes]:
        """The process that forks tests; one that was killed is started again."""
        if self._closed:
            raise RuntimeError("this copy is not used any more")
        if self._zygote is None or self._zygote.poll() is not None:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.zygote"],
                cwd=self.root,
                env=self._environment | {"PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        return self._zygote

    def _answer(self, seconds: float | None) -> int | None:
        """The next number that the zygote says; ``None`` if it does not within ``seconds``."""
        assert self._zygote is not None
        assert self._zygote.stdout is not None
        ready, _, _ = select.select([self._zygote.stdout], [], [], seconds)
        if not ready:
            return None
        line = self._zygote.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks tests has ended")
        return int(line)

    def run(self, arguments: Sequence[str], seconds: float) -> Done:
        """Run Python in the copy; at the time limit it and all its descendants are killed."""
        if self._closed:
            raise RuntimeError("this copy is not used any more")
        began = time.monotonic()
        with tempfile.TemporaryFile(dir=self.scratch) as output:
            self._running = process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
            _kill(process.pid)
            process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Done(status, text, time.monotonic() - began)

    @property
    def _environment(self) -> dict[str, str]:
        return {
            **{k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self.root),
            "TMPDIR": str(self.scratch),
            "MFLEX_CUDA": "OFF",
        }

    def close(self) -> None:
        """End what is running, with all that it started, and start nothing more."""
        self._closed = True
        for process in (self._running, self._zygote):
            if process is not None:
                _kill(process.pid)


def _copy_sources(target: Path) -> None:
    """Everything that git knows or would know, as it is on the disk."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _kill(pid: int) -> None:
    """End a process with all that it started."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def try_fault(tree: Tree, fault: Fault) -> Outcome:
    """Make the change, run the tests, undo the change."""
    path = tree.root / fault.file
    source = path.read_text(encoding="utf-8")
    began = time.monotonic()
    path.write_text(fault.applied(source), encoding="utf-8")
    try:
        if fault.native:
            built = tree.build()
            if built.status != 0:
                return Outcome(fault, Verdict.BROKEN, built.seconds, built.tail)
        done = tree.test(fault.tests, fault.seconds)
    finally:
        path.write_text(source, encoding="utf-8")
        shutil.rmtree(tree.scratch, ignore_errors=True)
        tree.scratch.mkdir(exist_ok=True)
    verdict, detail = judge(done)
    return Outcome(fault, verdict, time.monotonic() - began, detail)


def judge(done: Done) -> tuple[Verdict, str]:
    """What a run of tests says of a fault."""
    if done.status is None:
        return Verdict.TIMED_OUT, f"nothing within {done.seconds:.0f} s"
    if done.status == 0:
        return Verdict.SURVIVED, ""
    # With "::": an error without it is of a file that could not even be imported.
    failed = [s for s in done.output.splitlines() if _FAILED.match(s)]
    if done.status == 1 and failed:
        return Verdict.NOTICED, failed[0]
    if done.status < 0 or done.status >= 128:
        return Verdict.NOTICED, f"the tests crashed, status {done.status}"
    return Verdict.BROKEN, done.tail


def verify(trees: Sequence[Tree], faults: Iterable[Fault]) -> str | None:
    """Run all tests of the list without a fault; what is wrong, or ``None`` if all are green."""
    named = {test for fault in faults for test in fault.tests}
    files = {test for test in named if "::" not in test}
    tests = sorted(files | {test for test in named if test.split("::")[0] not in files})
    failures: list[str] = []

    def run(tree: Tree, share: list[str]) -> None:
        done = tree.run(["-m", "pytest", *PYTEST, *share], VERIFY_SECONDS)
        if done.status != 0:
            failures.append(done.tail)

    shares = [(tree, tests[n :: len(trees)]) for n, tree in enumerate(trees)]
    _together({tree: partial(run, tree, share) for tree, share in shares if share})
    return "\n".join(failures) if failures else None


def _together(jobs: Mapping[Tree, Callable[[], None]]) -> None:
    """Run a job for each copy at the same time; the first error ends all."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs.values()]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for tree in jobs:
                tree.close()
            raise


def run_all(trees: Sequence[Tree], faults: Sequence[Fault], verbose: bool) -> list[Outcome]:
    """Try all faults; those in C++ in the first copy, where the library is built."""
    native: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    others: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in sorted((f for f in faults if f.native), key=lambda f: f.file):
        native.put(fault)
    for fault in sorted((f for f in faults if not f.native), key=lambda f: -f.seconds):
        others.put(fault)
    outcomes: list[Outcome] = []
    good = tempfile.mkdtemp(dir=trees[0].root.parent)
    for name in PRODUCTS:
        shutil.copy2(trees[0].root / "megatron_flex" / name, good)
    bar = tqdm(
        total=len(faults), unit="fault", mininterval=0.5 if sys.stderr.isatty() else 10, smoothing=0
    )

    def work(tree: Tree, queues: Sequence[queue.SimpleQueue[Fault]]) -> None:
        for waiting in queues:
            while True:
                try:
                    fault = waiting.get_nowait()
                except queue.Empty:
                    break
                outcome = try_fault(tree, fault)
                if fault.native:
                    tree.take_library(Path(good))
                outcomes.append(outcome)
                if verbose or not outcome.noticed:
                    bar.write(
                        f"{outcome.verdict.value}: {fault.id} ({outcome.seconds:.0f} s)"
                        f" {outcome.detail}",
                        file=sys.stdout,
                    )
                survived = sum(not o.noticed for o in outcomes)
                bar.set_postfix(survived=survived, refresh=False)
                bar.update()

    with bar:
        _together({t: partial(work, t, (native, others)[t is not trees[0] :]) for t in trees})
    return outcomes


def report(outcomes: Sequence[Outcome]) -> str:
    """The table by room, the survivors with their reasons, and what only a time-out noticed."""
    rooms = sorted({o.fault.room for o in outcomes})
    lines = [f"{'room':<14} {'faults':>7} {'noticed':>8} {'survived':>9} {'harmless':>9}"]
    for room in [*rooms, "all"]:
        own = [o for o in outcomes if room in (o.fault.room, "all")]
        count = Counter(o.noticed for o in own)
        harmless = sum(not o.noticed and o.fault.harmless is not None for o in own)
        lines.append(f"{room:<14} {len(own):>7} {count[True]:>8} {count[False]:>9} {harmless:>9}")
    for outcome in sorted(outcomes, key=lambda o: (o.fault.room, o.fault.id)):
        f = outcome.fault
        if outcome.verdict is Verdict.SURVIVED:
            reason = f"harmless: {f.harmless}" if f.harmless else "no test notices it"
            lines.append(f"survived: {f.id} ({f.file}; {f.breaks}): {reason}")
        elif outcome.verdict is not Verdict.NOTICED:
            lines.append(f"{outcome.verdict.value}: {f.id} ({f.file}): {outcome.detail}")
        elif f.harmless:
            lines.append(f"noticed, though the list calls it harmless: {f.id} ({f.file})")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at the same time")
    parser.add_argument(
        "--threshold", type=float, default=80.0, help="least share of noticed faults, in percent"
    )
    parser.add_argument(
        "--only", default="", help="faults whose room, file or id contains one of these words"
    )
    parser.add_argument("--list", action="store_true", help="print the list and try nothing")
    parser.add_argument("--verbose", action="store_true", help="say what noticed each fault")
    return parser.parse_args()


def main() -> int:
    """Run the list; the exit status."""
    arguments = _arguments()
    began = time.monotonic()
    try:
        faults = load()
    except StaleList as error:
        print(f"the list of faults is not in order: {error}")
        return 2
    stale = problems(faults)
    if stale:
        print("the list of faults does not fit the source:", *stale, sep="\n  ")
        return 2
    words = arguments.only.split()
    if words:
        faults = tuple(f for f in faults if any(w in f"{f.room} {f.file} {f.id}" for w in words))
    if arguments.list:
        for fault in faults:
            print(f"{fault.room}: {fault.id} ({fault.file}): {fault.breaks}")
        return 0
    if not faults:
        print(f"no fault has '{arguments.only}' in its room, file or id")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees = [Tree(Path(directory), n) for n in range(max(1, arguments.workers))]
        print("building the native library", flush=True)
        built = trees[0].build()
        if built.status != 0:
            print(built.tail)
            return 2
        for tree in trees[1:]:
            tree.take_library(trees[0].root / "megatron_flex")
        print("running all tests of the list without a fault", flush=True)
        wrong = verify(trees, faults)
        if wrong is not None:
            print(f"they are not green without a fault:\n{wrong}")
            return 2
        print(f"green after {time.monotonic() - began:.0f} s; trying {len(faults)} faults")
        try:
            outcomes = run_all(trees, faults, arguments.verbose)
        finally:
            for tree in trees:
                tree.close()
    print(report(outcomes))
    noticed = sum(o.noticed for o in outcomes)
    rate = 100.0 * noticed / len(outcomes)
    print(
        f"{noticed} of {len(outcomes)} faults noticed ({rate:.1f} %) in"
        f" {(time.monotonic() - began) / 60:.0f} minutes"
    )
    if any(o.verdict is Verdict.BROKEN for o in outcomes):
        return 2
    return 0 if rate >= arguments.threshold else 1


if __name__ == "__main__":
    sys.exit(main())
