"""A hand-made run, a report of it on disk, and a headless browser where there is one."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.report.html import Page, render
from foretrace.report.tracks import Track
from tests.report.report_demo import make_tracks
from tests.report.report_views import make_blame, make_show, make_whatif


@pytest.fixture(scope="session")
def tracks() -> list[Track]:
    return make_tracks()


@pytest.fixture(scope="session")
def page_file(tracks: list[Track], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section, on disk."""
    blames = [make_blame(), make_blame(by="layer"), make_blame(by="kind")]
    page = Page(show=make_show(), blames=blames, whatifs=[make_whatif()], tracks=tracks, focus_step=2)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(page), encoding="utf-8")
    return path


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless Chromium; tests that look at the page skip without it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium to look at the page with: {str(error).splitlines()[0]}")
        yield started
        started.close()
    with warnings.catch_warnings():  # what Playwright leaves unclosed is no mistake of the test that comes next
        warnings.simplefilter("ignore")
        gc.collect()
