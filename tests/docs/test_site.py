"""The site as it was built (`make docs`): tabs, and a search that finds what people type."""

import functools
import http.server
import re
import threading
from pathlib import Path

import pytest

from support.browser import chromium, why_not

SITE = Path(__file__).parents[2] / "site"
pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").is_file(), reason="no site is built: make docs"
)

WANTED = {
    "custom reward": "howto/environment/",
    "batch size": "scale/",
    "out of memory": "scale/",
    "reward flat": "troubleshooting/",
    "telemetry": "howto/installation/",
}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_search_finds_what_people_type_on_the_first_hit():
    handler = functools.partial(_Quiet, directory=SITE)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        chromium() as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        root = f"http://127.0.0.1:{server.server_address[1]}/"
        found = {}
        for query in WANTED:
            page.goto(f"{root}?q={query.replace(' ', '+')}")
            page.locator(".md-search-result__item").first.wait_for(state="attached", timeout=60_000)
            link = page.locator(".md-search-result__item").first.locator("a").first
            found[query] = link.get_attribute("href").split("?")[0].removeprefix(root)
        server.shutdown()
    assert found.keys() == WANTED.keys() and all(
        found[one].startswith(WANTED[one]) for one in WANTED
    ), found


def test_the_pages_are_behind_tabs_and_a_reference_is_no_scroll():
    start = (SITE / "index.html").read_text(encoding="utf-8")
    tabs = re.findall(r'class="md-tabs__link">\s*(.+?)\s*</a>', start, re.S)
    assert [tab.split("\n")[-1].strip() for tab in tabs] == [
        "Start",
        "How to",
        "Methods",
        "Tools",
        "Reference",
        "Background",
    ]
    for page in (".", "configuration"):
        text = (SITE / "reference" / page / "index.html").read_text(encoding="utf-8")
        assert "_setting(" not in text, page
