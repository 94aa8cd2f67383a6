"""The browser that tests of pages use."""

from web.conftest import browser as browser
