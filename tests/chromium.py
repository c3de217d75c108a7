"""Headless Chromium by its debugging pipe: messages of JSON, each ended by a zero byte. No driver is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """A browser with one page; use it as a context."""

    def __init__(self, folder: Path, seconds: float = 60) -> None:
        assert PROGRAM is not None
        self._seconds, self._left, self._number = seconds, b"", 0
        take, self._out = os.pipe()
        self._in, give = os.pipe()
        place = "import fcntl, os, sys; high = [fcntl.fcntl(int(f), fcntl.F_DUPFD, 10) for f in sys.argv[1:3]]; "
        place += "os.dup2(high[0], 3); os.dup2(high[1], 4); os.execv(sys.argv[3], sys.argv[3:])"  # what Chromium uses
        self._process = subprocess.Popen(
            [sys.executable, "-c", place, str(take), str(give), PROGRAM, *_OPTIONS, f"--user-data-dir={folder}"],
            pass_fds=(take, give), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(take), os.close(give)
        self.session: str | None = None
        self.messages: list[str] = []
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in), os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its result. What the page logs meanwhile is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._seconds
        while True:
            answer = self._receive(end)
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.messages.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("Chromium does not answer")
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)

    def open(self, url: str, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of that size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + self._seconds
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"the page never came to {script}")
            time.sleep(0.1)

    def upload(self, selector: str, path: Path) -> None:
        """Choose a file as a user would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def drag(self, points: list[tuple[float, float]]) -> None:
        """Press the mouse, move it along the points, and release it."""
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
