"""The dashboard in headless Chromium: pages, keyboard, narrow screens, with and without JavaScript.

Needs `pip install playwright` and Debian's package chromium, or Chrome.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fuzz.service import reads
from fuzz.service.web.rendering import HERE
from tests.web_stores import TOKEN, Served, many, stored

pytest_plugins = ["tests.service_fixtures", "tests.web_fixtures"]

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome")
                 if (found := shutil.which(name))), None)
MISSING = ("no playwright here (pip install playwright)"
           if importlib.util.find_spec("playwright") is None
           else "no Chromium here (Debian: apt-get install chromium)" if CHROMIUM is None else None)
browsing = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
PAGES = ("/", "/?span=all", "/findings", "/coverage?by=everything", "/releases", "/sign-in",
         "/nothing")
NARROW, WIDE = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """A page in a fresh profile; what the browser complains of is a failure."""
    context = browser.new_context(**{"viewport": WIDE, **options})
    page, said = context.new_page(), []
    page.on("console", lambda one: said.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda one: said.append(str(one)))
    yield page
    context.close()
    wrong = [text for text in said if "status of 404" not in text and "status of 409" not in text]
    assert not wrong


def a_finding(served: Served) -> str:
    with served.store.reading() as connection:
        return reads.findings_page(connection).rows[0]["fingerprint"]


UNLABELLED = """() => [...document.querySelectorAll("input:not([type=hidden]), select, textarea")]
  .filter((one) => one.labels.length === 0).length"""
OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.mark.browser
@browsing
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_whole(browser: Any, real: Served, viewport: Any, scheme: str) -> None:
    with opened(browser, viewport=viewport, color_scheme=scheme) as page:
        for path in (*PAGES, f"/findings/{a_finding(real)}"):
            page.goto(real.base + path)
            assert page.locator("h1").count() == 1, path
            assert page.locator("html[lang=en] main#content").count() == 1
            assert not page.evaluate(OVERFLOW), path
            assert page.evaluate(UNLABELLED) == 0, path
        page.goto(f"{real.base}/findings/{a_finding(real)}")
        assert page.locator("svg.mask g.leaked, svg.mask g.lost").count() > 0
        assert page.locator("svg.mask").first.bounding_box()["width"] > 60
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(251, 250, 248)" if scheme == "light" else "rgb(21, 24, 27)")


@pytest.mark.browser
@browsing
def test_a_list_is_filtered_and_turned_over_without_javascript(
    browser: Any, small: Served
) -> None:
    many(small.store, 100_000)
    with opened(browser, java_script_enabled=False) as page:
        page.goto(f"{small.base}/findings")
        assert page.locator("noscript meta[http-equiv=refresh]").count() == 1 or \
            'http-equiv="refresh"' in page.content()
        page.get_by_label("Kind").select_option("hang")
        page.get_by_label("Release").select_option("vllm-0.33.0")
        page.get_by_label("Text").fill("region 7")
        page.get_by_role("button", name="Show").click()
        assert "kind=hang" in page.url and "contains=region+7" in page.url
        rows = page.locator("tbody tr")
        assert rows.count() == 50
        first = rows.first.text_content()
        page.get_by_role("link", name="after").click()
        assert "after=" in page.url and rows.first.text_content() != first
        assert all("hang" in text for text in rows.all_text_contents())
        page.get_by_role("link", name="before").click()
        assert rows.first.text_content() == first
        page.get_by_role("link", name=re.compile("won.t fix")).click()
        assert "state=wontfix" in page.url and page.locator("tbody .state.wontfix").count() == 50


@pytest.mark.browser
@browsing
def test_a_finding_is_judged_by_keyboard_alone(browser: Any, small: Served) -> None:
    name = stored(small.store)
    with opened(browser) as page:
        page.goto(f"{small.base}/findings")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.locator(".skip").bounding_box()["x"] >= 0
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.pathname || ''") == f"/findings/{name}":
                break
        style = "getComputedStyle(document.activeElement)"
        assert page.evaluate(f"{style}.outlineStyle") == "solid"
        assert page.evaluate(f"parseFloat({style}.outlineWidth)") >= 2
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/findings/{name}")

        page.get_by_role("link", name="Sign in").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/sign-in"))
        assert page.evaluate("document.activeElement.name") == "token"
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/findings/{name}")

        page.get_by_role("radio").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Tab")
        page.keyboard.type("padded rows")
        page.keyboard.press("Tab")
        page.keyboard.type("Ann")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/findings/{name}#history")
        assert "by Ann (dashboard)" in page.locator("ol.history li").first.inner_text()
        assert page.locator("h1 .state.wontfix").count() == 1


@pytest.mark.browser
@browsing
def test_a_page_refreshes_and_leaves_alone_what_is_in_use(browser: Any, small: Served) -> None:
    with opened(browser) as page:
        page.goto(f"{small.base}/")
        page.locator("summary").click()
        assert "None" not in page.locator("body").inner_text()
        stored(small.store)
        page.evaluate("refresh()")
        page.wait_for_selector("table.findings tbody tr")
        assert page.evaluate("document.querySelector('details').open")
        page.goto(f"{small.base}/findings")
        page.get_by_label("Text").focus()
        stored(small.store, region="another")
        page.evaluate("refresh()")
        assert page.locator("tbody tr").count() == 1
        page.get_by_label("Text").blur()
        page.evaluate("refresh()")
        page.wait_for_function("document.querySelectorAll('tbody tr').length === 2")
        page.get_by_role("link", name="Stop that").click()
        assert page.locator("body[data-refresh]").count() == 0


@pytest.mark.browser
@browsing
def test_markup_of_a_finding_is_not_run(browser: Any, small: Served) -> None:
    evil = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    name = stored(small.store, region=evil)
    with opened(browser) as page:
        for path in ("/", "/findings", f"/findings/{name}"):
            page.goto(small.base + path)
            assert page.locator("main img").count() == 0 and page.title() != "run"
            assert "<img src=x" in page.locator("main").inner_text()


def luminance(colour: str) -> float:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_pictures_have_contrast(scheme: int) -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for parts of pictures."""
    css = (HERE / "static" / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\n *\}", css, re.S)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", blocks[scheme]))
    for name in ("ink", "soft", "link", "good", "bad", "unsure"):
        for ground in ("ground", "sheet"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert contrast(colours["ink"], colours["warm"]) >= 4.5
    for one, other in (("leaked", "hidden"), ("lost", "sheet"), ("lost", "hidden"),
                       ("leaked", "on-leaked"), ("visible", "hidden"), ("focus", "ground")):
        assert contrast(colours[one], colours[other]) >= 3, (one, other)
