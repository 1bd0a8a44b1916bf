"""The page in a real browser: opens from a file, logs nothing, runs nothing that is not its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lavra.report.render import render_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 "
    "--enable-logging=stderr --v=0 --dump-dom"
)


def opened(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after its script ran, and everything written to the console."""
    if BROWSER is None:
        message = "no chromium here (Debian: apt-get install chromium)"
        pytest.fail(message) if os.environ.get("LAVRA_REALDATA") else pytest.skip(message)
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("empty", [False, True])
def test_the_page_opens_from_a_file_without_console_messages(
    full_run: Path, tmp_path: Path, empty: bool
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    dom, console = opened(render_report(folder if empty else full_run), tmp_path / "profile")
    assert console == []
    assert "<title>" in dom and "<title>owned</title>" not in dom
    assert ("Not there." in dom) is empty


def test_the_console_is_really_watched(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<script>missing()</script>", encoding="utf-8")
    _, console = opened(page, tmp_path / "profile")
    assert len(console) == 1


def test_the_pointer_shows_the_values_under_it(full_run: Path, tmp_path: Path) -> None:
    html = render_report(full_run).read_text(encoding="utf-8")
    # The page's policy forbids foreign scripts, the one that moves the pointer too; so it goes.
    html = re.sub(r"<meta http-equiv[^>]+>", "", html)
    move = """<script>
    const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
    chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 5, clientY: box.top + 50}));
    </script>"""
    page = tmp_path / "moved.html"
    page.write_text(html.replace("</body>", move + "</body>"), encoding="utf-8")
    dom, console = opened(page, tmp_path / "profile")
    assert console == []
    shown = re.findall(r'<div class="tip"[^>]*>([^<]+)', dom)
    assert len(shown) == 1
    assert re.fullmatch(r"9\.83M tokens\ntrain 3\.\d+\nvalidation 3\.\d+", shown[0])
