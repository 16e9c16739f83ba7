"""A real browser for tests: Chromium by playwright, what a page said while it was open, and pictures of it to look at.

BACH_CHROMIUM says which browser to take; without it chromium, chromium-browser or google-chrome of the PATH.
Screenshots are kept in outputs/screenshots of the project.
"""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

SCREENSHOTS = Path(__file__).resolve().parent.parent / "outputs" / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    return os.environ.get("BACH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium():
    """The browser; where there is none the test is skipped and says why."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no test in a browser")
    path = find_chromium()
    if path is None:
        pytest.skip(f"no Chromium on the PATH ({', '.join(NAMES)}) and BACH_CHROMIUM is not set")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """A file that is open in the browser; `errors` and `requests` are all since it was opened."""

    def __init__(self, browser, path: Path, width=1280, height=800, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def _heard(self, message) -> None:
        """Errors and warnings, but not those about the speed of a graphics card that is not there."""
        slow = "GL Driver Message" in message.text or "willReadFrequently" in message.text
        if message.type in ("error", "warning") and not slow:
            self.errors.append(message.text)

    def scroll_through(self) -> None:
        """From top to bottom, until every figure is drawn."""
        for place in range(self.page.locator(".plot").count()):
            plot = self.page.locator(".plot").nth(place)
            plot.scroll_into_view_if_needed()
            self.page.wait_for_function("n => document.querySelectorAll('.plot')[n].dataset.drawn", arg=place)

    def screenshot(self, name: str, at: str = "header") -> Path:
        """What one sees with this element at the top."""
        self.page.evaluate("at => document.querySelector(at).scrollIntoView({behavior: 'instant'})", at)
        self.page.wait_for_timeout(300)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        return SCREENSHOTS / f"{name}.png"

    def check_quiet(self) -> None:
        """No error, no warning, and nothing but files of this machine was asked for."""
        assert not self.errors
        assert all(url.startswith(("file:", "data:", "blob:")) for url in self.requests), self.requests
