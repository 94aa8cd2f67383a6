"""A browser for the tests of pages, where the machine has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from web.browser import NAMES, Browser, find_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        pytest.skip(f"no headless browser: none of {', '.join(NAMES)} is installed")
    browser = Browser(binary)
    yield browser
    browser.close()
