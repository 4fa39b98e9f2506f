"""A browser, a server of canned answers and a page that must give no cause for complaint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from support.page_server import PageServer, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# The shell without a window takes a quarter of the time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# What of the browser's own words is no complaint: it names every answer that is an error.
EXPECTED = "Failed to load resource"
REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


# Of a module and no longer: while it is there no other test may run an event loop in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium-headless-shell)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.fixture
def canned() -> Iterator[PageServer]:
    found = PageServer()
    with running(found.app()) as found.url:
        yield found


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Makes pages, each in a context of its own unless one is given; they end without a complaint."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def make(context: BrowserContext | None = None, **options: object) -> Page:
        if context is None:
            context = browser.new_context(**options)  # type: ignore[arg-type]
            context.set_default_timeout(10_000)
            context.add_init_script(REPORT_VIOLATIONS)
            contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.on(
            "console",
            lambda said: (
                complaints.append(said.text)
                if said.type in ("error", "warning") and not said.text.startswith(EXPECTED)
                else None
            ),
        )
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(new_page: Callable[..., Page], canned: PageServer) -> Page:
    """The page, ready."""
    opened = new_page(viewport={"width": 1280, "height": 800})
    opened.goto(canned.url)
    opened.locator("#model", has_text="demo").wait_for()
    return opened
