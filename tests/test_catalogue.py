"""The page that a person reads is what the terms say."""

from pathlib import Path

from spec.catalogue import REGENERATE, catalogue
from spec.masks import MASKS, POINTS
from spec.to_text import to_text

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == catalogue(), f"regenerate it: {REGENERATE}"


def test_the_page_holds_every_part_of_every_mask() -> None:
    page = PAGE.read_text()
    for mask in MASKS.values():
        section = page.split(f"\n### {mask.name}\n")[1].split("\n## ")[0].split("\n### ")[0]
        for part in (mask.sentence, to_text(mask.formula), mask.empty_rows, mask.source,
                     *mask.settles.values(), *mask.params, *mask.tables,
                     *mask.picture.split("\n")):
            assert part in section, (mask.name, part)
    for point, text in POINTS.items():
        assert f"| {point} | {text} |" in page
