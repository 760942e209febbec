"""A real Chromium without a window, driven as WebDriver says: requests of HTTP and JSON."""

import base64
import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from chromium import ARGUMENTS
from machine import free_port, until


class Browser:
    """A browser with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"http://127.0.0.1:{(port := free_port())}"
        log = (folder / "driver.log").open("w")
        self.process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=log)
        until(self._answers, "chromedriver answers")
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": [*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"]},
            "goog:loggingPrefs": {"performance": "ALL"},
            "unhandledPromptBehavior": "ignore",
        }
        self.session = self._ask("/session", capabilities={"alwaysMatch": wanted})["sessionId"]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Close the browser, and then its driver."""
        try:
            self._request("DELETE", f"/session/{self.session}")
        finally:
            self.process.terminate()
            self.process.wait()

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"chromedriver does not start:\n{(self.folder / 'driver.log').read_text()[-2000:]}")
        try:
            return bool(self._request("GET", "/status")["ready"])
        except OSError:
            return False

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        requested = urllib.request.Request(self.address + path, content, kind, method=method)
        with urllib.request.urlopen(requested, timeout=60) as answer:
            return json.load(answer)["value"]

    def _ask(self, path: str, **body: Any) -> Any:
        return self._request("POST", path, body)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol, which no policy of a page holds back."""
        return self._ask(f"/session/{self.session}/goog/cdp/execute", cmd=command, params=parameters)

    def open(self, page: Path | str, width: int = 1280, dark: bool = False) -> None:
        """Show a file, or a URL, in a window of `width` pixels to someone who likes it light, or dark."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=scheme)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        self._ask(f"/session/{self.session}/url", url=page if isinstance(page, str) else page.as_uri())

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        found = self.devtools("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """A picture of the whole page."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """The URLs that the page asked for since this was asked last, itself and refused ones included."""
        rows = self._ask(f"/session/{self.session}/se/log", type="performance")
        events = [json.loads(row["message"])["message"] for row in rows]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def has_dialog(self) -> bool:
        """Whether a script opened a dialog, such as an alert."""
        try:
            self._request("GET", f"/session/{self.session}/alert/text")
        except urllib.error.HTTPError as error:
            assert json.load(error)["value"]["error"] == "no such alert"
            return False
        return True

    def dismiss(self) -> None:
        """Close the dialog."""
        self._ask(f"/session/{self.session}/alert/dismiss")
