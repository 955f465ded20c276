"""Pictures as SVG: what is in them, cell by cell, and that no text of a finding is markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.service.web import drawing
from fuzz.service.web.longer import longer
from tests.service_stores import finding

ROWS = st.integers(1, 9).flatmap(lambda n: st.lists(
    st.text("#.", min_size=n, max_size=n), min_size=1, max_size=9))


@given(ROWS, st.data())
def test_every_cell_is_drawn_as_what_became_of_it(meant: list[str], data: st.DataObject) -> None:
    n = len(meant[0])
    got = data.draw(st.lists(st.text("#.", min_size=n, max_size=n), min_size=len(meant),
                             max_size=len(meant)))
    picture = drawing.mask_picture({"expected": meant, "got": got, "first_q": 5, "first_kv": 7})
    assert picture is not None
    root = ElementTree.fromstring(picture)
    drawn = {(kind, *map(int, re.findall(r"\d+", title.text or "")[:2]))
             for kind in ("leaked", "lost")
             for title in root.iterfind(f".//g[@class='{kind}']/title")}
    wrong = {("leaked" if new == "#" else "lost", 5 + i, 7 + j)
             for i, (a, b) in enumerate(zip(meant, got, strict=True))
             for j, (old, new) in enumerate(zip(a, b, strict=True)) if old != new}
    assert drawn == wrong
    visible = root.find(".//path[@class='visible']")
    assert visible is not None and area(visible.get("d") or "") == sum(
        old == new == "#" for a, b in zip(meant, got, strict=True)
        for old, new in zip(a, b, strict=True))


def area(path: str) -> int:
    """Cells under the rectangles of a path."""
    sizes = [(float(w), float(h)) for w, h in re.findall(r"h([\d.]+)v([\d.]+)h-", path)]
    return sum(round((w + 1) / (h + 1)) for w, h in sizes)


@pytest.mark.parametrize("document", [
    {}, {"expected": [], "got": []}, {"expected": "##", "got": 3}, {"expected": ["#"]},
], ids=str)
def test_what_has_no_mask_has_no_picture(document: dict[str, object]) -> None:
    assert drawing.mask_picture(document) is None
    ElementTree.fromstring(drawing.thumbnail(document))


def test_no_text_of_a_document_is_markup() -> None:
    evil = '"><script>alert(1)</script>'
    document = {"expected": [evil, "<b>"], "got": ["#" * 30, "&"], "first_q": evil,
                "first_kv": evil}
    for picture in (drawing.mask_picture(document), drawing.thumbnail(document)):
        assert picture is not None
        ElementTree.fromstring(picture)
        assert "script" not in picture and "<b>" not in picture
    drawn = drawing.plot({evil: [(0, 1)]}, 60, evil)
    ElementTree.fromstring(drawn)
    assert "<script" not in drawn


def test_a_plot_has_gaps_where_nothing_ran() -> None:
    drawn = drawing.plot({"a": [(0, 1), (60, 2), (300, 4)]}, 60)
    line = ElementTree.fromstring(drawn).find(".//path[@class='line']")
    assert line is not None and (line.get("d") or "").count("M") == 2
    assert "Nothing ran" in drawing.plot({"a": []}, 60)


@given(st.floats(1e-6, 1e15))
def test_an_axis_ends_at_a_round_number_above(value: float) -> None:
    top = drawing.nice(value)
    assert value <= top * (1 + 1e-9) and top <= 2.5 * value


def test_the_cause_is_drawn_on_a_longer_sequence() -> None:
    said = {"verdict": "PROVED", "variation": "kv <= q"}
    document = {**finding(spec="window"), "diagnosis": said}
    document["case"]["call"]["spec"] = "window"
    shown = longer(document)
    assert shown is not None and len(shown["got"]) == 12 and len(shown["got"][0]) == 18
    assert shown["got"] == ["#" * (7 + i) + "." * (11 - i) for i in range(12)]
    assert all(row.count("#") == 3 for row in shown["expected"])


@pytest.mark.parametrize("change", [
    {"verdict": "UNKNOWN"}, {"variation": "kv <= nothing"}, {"variation": "kv <"},
    {"variation": "kv <= q and q - kv < window"}, {"variation": "kv <= 99999"},
    {"variation": "__import__('os').system('true')"},
], ids=str)
def test_no_cause_is_drawn_that_is_none(change: dict[str, str]) -> None:
    document = {"case": {"call": {"spec": "window"}},
                "diagnosis": {"verdict": "PROVED", "variation": "kv <= q", **change}}
    assert longer(document) is None


def test_a_mask_that_a_document_names_is_of_the_catalogue() -> None:
    said = {"verdict": "PROVED", "variation": "kv <= q"}
    assert longer({"case": {"call": {"spec": "/etc/passwd"}}, "diagnosis": said}) is None
    assert longer({"case": 3, "diagnosis": said}) is None
