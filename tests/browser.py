"""A real browser for tests: Chromium by its driver's own protocol, nothing to install beside the two programs."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


class Browser:
    """One window. Console messages are kept by the driver until they are asked for."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert DRIVER and CHROMIUM
        self.process = subprocess.Popen([DRIVER, f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
        self.address = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        for _ in range(100):
            try:
                self._send("GET", "/status")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        found = self._send("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self.address += f"/session/{found['sessionId']}"

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self.process.terminate()
            self.process.wait(10)

    def open(self, page: Path) -> None:
        self._send("POST", "/url", {"url": page.resolve().as_uri()})
        for _ in range(100):
            if self.run("return document.documentElement.dataset.ready"):
                return
            time.sleep(0.05)
        raise AssertionError(f"the page's script did not end: {self.console()}")

    def frame(self, number: int | None) -> None:
        """What scripts run in from now on: a frame of the page, or the page again."""
        self._send("POST", "/frame", {"id": number})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """Messages since the last time."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        """Of the page, also below the least width of a window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def dark(self, wanted: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.command("Emulation.setEmulatedMedia", {"features": [feature]})

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.command("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def screenshot(self, path: Path, whole: bool = True) -> None:
        made = self.command("Page.captureScreenshot", {"captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(made["data"]))

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
