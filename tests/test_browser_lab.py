"""JupyterLab opens the explorer in a real browser: the notebook runs, a slider is moved, slate and figure change."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import jupytext
import nbformat
import pytest
from browser import SCREENSHOTS, chromium

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "explorer.py"
SMALLER = {"n_users = 500": "n_users = 200", "epochs = 2": "epochs = 1"}  # another world, the same application
SETTINGS = {
    "page_config.json": '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}',
    "default_setting_overrides.json": '{"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}',
}


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on a folder that holds the explorer; its address."""
    notebook = jupytext.read(NOTEBOOK)
    for usual, less in SMALLER.items():
        assert usual in notebook.cells[1].source
        notebook.cells[1].source = notebook.cells[1].source.replace(usual, less)
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / "explorer.ipynb")
    (tmp_path / "config" / "labconfig").mkdir(parents=True)
    for name, text in SETTINGS.items():
        (tmp_path / "config" / "labconfig" / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=bach", f"--ServerApp.root_dir={tmp_path / 'work'}",
    ]  # fmt: skip
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    env = os.environ | {name: str(tmp_path / folder) for name, folder in own.items()}
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(200):
            try:
                urlopen(f"http://127.0.0.1:{port}/api?token=bach")
                break
            except URLError:
                assert server.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/lab/tree/explorer.ipynb?token=bach"
    finally:
        server.terminate()
        server.wait(20)


def test_the_explorer_in_jupyterlab(lab):
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(180_000)  # the notebook trains three small models
        page.goto(lab)
        page.wait_for_selector("text=/Python 3.*Idle/")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        plot = page.locator(".jupyter-widgets .js-plotly-plot")
        plot.locator(".ytick").first.wait_for(state="attached")
        page.keyboard.press("Control+b")  # close the file browser
        page.get_by_text("back to π_u").scroll_into_view_if_needed()

        def slate() -> list[str]:
            return plot.locator(".ytick").all_text_contents()

        def bars() -> list[str | None]:
            points = plot.locator(".bars .point path")
            return [points.nth(n).get_attribute("d") for n in range(15)]

        first, drawn = slate(), bars()
        assert not re.search("new|↑|↓", " ".join(first)), "nothing was moved yet, only rounded by the browser"
        assert (
            len(first) == 15 and "proved" in page.locator(".jupyter-widgets", has_text="answered in").first.inner_text()
        )
        page.locator(".widget-slider .noUi-handle").nth(1).focus()
        page.keyboard.press("End")  # all the way to the right
        ticks = "[...document.querySelectorAll('.jupyter-widgets .js-plotly-plot .ytick')].map((t) => t.textContent)"
        page.wait_for_function(f"(old) => JSON.stringify({ticks}) !== JSON.stringify(old)", arg=first)
        page.wait_for_timeout(1000)  # the bars come after the words
        assert slate() != first and bars() != drawn
        asked = page.locator("select", has_text="1. ").last
        why = asked.input_value()
        box = plot.locator(".bars .point").nth(3).bounding_box()
        page.mouse.click(box["x"] + 8, box["y"] + box["height"] / 2)
        page.wait_for_function("([s, old]) => s.value !== old", arg=[asked.element_handle(), why])
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "explorer.png")
        page.get_by_text("back to π_u").click()
        page.wait_for_function(f"(old) => JSON.stringify({ticks}) === JSON.stringify(old)", arg=first)
