"""`python -m tests.web_screenshots http://127.0.0.1:8765`: the pictures of docs/dashboard.md.

Needs a dashboard that is served, playwright, and Chromium.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.test_web_browser import CHROMIUM

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
LARGEST = 60 * 1024
WIDE, NARROW = (1120, 840), (380, 760)


def main(base: str) -> int:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{base}/findings?contains=chunk-local")
        finding = page.locator("td.what a").last.get_attribute("href")
        for name, path, size, scheme in (
            ("overview", "/", WIDE, "light"), ("finding", finding, WIDE, "light"),
            ("findings-dark", "/findings", WIDE, "dark"),
            ("releases", "/releases?show=wrong", (1120, 520), "light"),
            ("finding-narrow", finding, NARROW, "light"),
        ):
            width, height = size
            page = browser.new_page(viewport={"width": width, "height": height},
                                    color_scheme=scheme)
            page.goto(base + path)
            shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            file = FOLDER / f"dashboard-{name}.png"
            shown = shown.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            shown.save(file, optimize=True)
            sys.stdout.write(f"{file}: {file.stat().st_size} bytes\n")
            if file.stat().st_size > LARGEST:
                return 1
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
