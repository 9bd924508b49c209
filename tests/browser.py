"""A headless Chromium for tests: pages are opened, clicked, typed at and photographed.

Chromium's DevTools protocol goes through a pair of pipes (``--remote-debugging-pipe``): messages
of JSON that end in a zero byte. No driver and no port are needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60.0
"""Seconds that anything may take."""
_KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
}


def chromium() -> str | None:
    """The browser of this machine, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read in time; ``select`` has no descriptors above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000.0 * seconds))


class BrowserError(RuntimeError):
    """The browser or the page does not do what it was asked for."""


class Browser:
    """A browser process; use it in a ``with`` statement."""

    def __init__(self) -> None:
        path = chromium()
        if path is None:
            raise BrowserError("there is no Chromium: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-extensions", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
            "--hide-scrollbars", f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip

        def place() -> None:
            # The protocol's descriptors are 3 and 4; ours may be these numbers crosswise.
            ours = os.dup(to_browser), os.dup(from_browser)
            high = [os.dup2(fd, number) for fd, number in zip(ours, (30, 31), strict=True)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            command,
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def _next(self, deadline: float, waiting: str) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not readable(self._read, left):
                raise BrowserError(f"{waiting}: no answer in {TIMEOUT:.0f} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"{waiting}: the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def page(self, **options: Any) -> Page:
        """A new page; options as for :meth:`Page.resize`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        found = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            found.call(f"{domain}.enable")
        found.call("Performance.enable", timeDomain="threadTicks")
        found.resize(**options)
        return found


class Page:
    """A tab. Errors of its scripts, and what its console says, are in :attr:`problems`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """The size of the window, as of a phone where it is narrow, and light or dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 500)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.frame()

    def frame(self) -> None:
        """Let the page draw once."""
        self.run("new Promise((go) => { const t = setTimeout(go, 200);"
                 " requestAnimationFrame(() => requestAnimationFrame(() => { clearTimeout(t); go(); })); })")  # fmt: skip  # noqa: E501

    def open(self, path: Path, ready: str = "document.readyState === 'complete'") -> float:
        """Open a file; the seconds until ``ready`` is true there."""
        began = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait(ready)
        return time.monotonic() - began

    @property
    def busy(self) -> float:
        """Processor seconds that the page has taken of its thread, whatever else computes."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))

    def run(self, script: str) -> Any:
        """The value of an expression there."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            raise BrowserError(f"{script}: {text}")
        return answer["result"].get("value")

    def wait(self, script: str, timeout: float = TIMEOUT) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if self.run(f"!!({script})"):
                    return
            except BrowserError as error:
                if "context" not in str(error):  # the page is on its way
                    raise
            if time.monotonic() > deadline:
                raise BrowserError(f"not true in {timeout:.0f} s: {script}")
            time.sleep(0.02)

    def each(self, selector: str, expression: str) -> Any:
        """The values of an expression of ``e``, for each element that a selector finds."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{found}.map((e) => {expression})")

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element in the window, scrolled into view."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        return found[0], found[1], found[2], found[3]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: ``mouseMoved``, ``mousePressed``, ``mouseReleased``."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse to a place in an element, as shares of its size."""
        left, top, width, height = self.box(selector)
        self.mouse("mouseMoved", left + across * width, top + down * height)

    def click(self, selector: str, across: float = 0.5, times: int = 1) -> None:
        """Click half-way down an element, at a share of its width."""
        left, top, width, height = self.box(selector)
        x, y = left + across * width, top + height / 2
        self.mouse("mouseMoved", x, y)
        for number in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.mouse(kind, x, y, button="left", clickCount=number)

    def drag(self, selector: str, across: tuple[float, float], down: float = 0.5) -> None:
        """Press at one place of an element, move, and release at another."""
        left, top, width, height = self.box(selector)
        y = top + down * height
        first, last = (left + share * width for share in across)
        self.mouse("mouseMoved", first, y)
        self.mouse("mousePressed", first, y, button="left", buttons=1, clickCount=1)
        for part in (0.3, 0.7, 1.0):
            self.mouse("mouseMoved", first + part * (last - first), y, button="left", buttons=1)
        self.mouse("mouseReleased", last, y, button="left", clickCount=1)

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press a key, such as ``ArrowRight`` or ``+``."""
        more: dict[str, Any] = {"key": name, "modifiers": 8 if shift else 0}
        if name in _KEYS:
            more["windowsVirtualKeyCode"] = _KEYS[name]
        elif len(name) == 1:
            more["text"] = name
        if name == "Enter":
            more["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def focus(self, selector: str) -> None:
        """Give an element the keyboard."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG of the window, or of the whole page."""
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        return base64.b64decode(data)

    @property
    def problems(self) -> list[str]:
        """Errors of scripts, errors and warnings of the console, and requests that failed."""
        return self._said(_problem)

    @property
    def requests(self) -> list[str]:
        """What the page asked for over a network."""
        return self._said(_request)

    def _said(self, of: Callable[[str, dict[str, Any]], str | None]) -> list[str]:
        mine = [e for e in self._browser.events if e.get("sessionId") == self._session]
        return [text for e in mine if (text := of(e["method"], e["params"])) is not None]


def _problem(method: str, values: dict[str, Any]) -> str | None:
    if method == "Runtime.exceptionThrown":
        details = values["exceptionDetails"]
        return str(details.get("exception", {}).get("description", details["text"]))
    if method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
        return " ".join(str(a.get("value", a.get("description"))) for a in values["args"])
    if method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
        return str(values["entry"]["text"])
    if method == "Network.loadingFailed":
        return f"a request failed: {values['errorText']}"
    return None


def _request(method: str, values: dict[str, Any]) -> str | None:
    if method != "Network.requestWillBeSent":
        return None
    url = str(values["request"]["url"])
    return None if url.startswith(("file:", "data:", "blob:", "about:")) else url
