"""A headless Chromium, which tests control over two pipes by its own protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_SAYING = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    """A browser with one page.

    Attributes:
        said: the messages of the page's console, among them those about what it refused to load.
    """

    def __init__(self, folder):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "about:blank",
        ]

        def descriptors():
            # Chromium reads commands from 3 and writes answers to 4. The pipes may have these
            # numbers, so they are copied first.
            commands_copy = os.dup(commands)
            answers_copy = os.dup(answers)
            os.dup2(commands_copy, 3)
            os.dup2(answers_copy, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *flags], preexec_fn=descriptors, close_fds=False, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._rest = b""
        self.said = []
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        [page] = [target for target in targets if target["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Sends a command to the browser and returns its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            # Recommendations of the browser have this level.
            verbose = answer.get("params", {}).get("entry", {}).get("level") == "verbose"
            if answer.get("method") in _SAYING and not verbose:
                self.said.append(json.dumps(answer["params"]))

    def _next(self, until):
        while b"\0" not in self._rest:
            # ``select.select`` takes no descriptor from 1024 on.
            ready = select.poll()
            ready.register(self._answers, select.POLLIN)
            assert ready.poll(max(0, 1000 * (until - time.monotonic()))), "no answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has gone"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def open(self, url, width=1280, height=800):
        """Opens a page, in a window of that size."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script):
        """Returns the value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script, seconds=30):
        until = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < until, f"not within {seconds} s: {script}"
            time.sleep(0.05)

    def choose(self, selector, file):
        """Puts a file into an input of the page."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    def picture(self, file):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(file).write_bytes(base64.b64decode(data))

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._commands)
        os.close(self._answers)


@contextlib.contextmanager
def browsing():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        try:
            yield browser
        finally:
            browser.close()


def pictured(browser, name):
    """Leaves a screenshot where somebody asks for them: PAGE_PICTURES names a folder."""
    if folder := os.environ.get("PAGE_PICTURES"):
        browser.picture(Path(folder) / f"{name}.png")
