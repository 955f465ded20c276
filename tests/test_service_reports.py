"""Reports that other programs read: JUnit XML, SARIF and Markdown, whatever a finding's text is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fuzz.backends import KINDS
from fuzz.service.reports import (
    FINGERPRINT,
    LISTED,
    SHOWN,
    WORDS,
    clean,
    entries,
    markdown,
    to_junit,
    to_markdown,
    to_sarif,
)
from fuzz.worker import CRASH, HANG
from tests.findings import dynamic_causal, rswa

Json = Mapping[str, Any]
HOSTILE = [
    "<script>alert(1)</script>", "](javascript:alert(1)) [x](http://a.b)", "a | b\n\n# title",
    "```\n</details>\n```", "\x00\x1b[31m\ud800\ufffe", "]]>&amp;&#60;", "@everyone *bold* ~~no~~",
    "\\| \\", "<!-- ", "1. one\n- two\n> three\n===", "$(reboot) `id`", "<img src=x onerror=y>",
]
# What the schema of SARIF 2.1.0 requires of each object that is used, and what else it may have.
SARIF: Mapping[str, tuple[set[str], set[str]]] = {
    "log": ({"version", "runs"}, {"$schema"}),
    "run": ({"tool"}, {"results", "automationDetails", "columnKind"}),
    "tool": ({"driver"}, set()),
    "driver": ({"name"}, {"version", "rules"}),
    "rule": ({"id"}, {"name", "shortDescription", "help", "defaultConfiguration"}),
    "result": ({"message"}, {"ruleId", "ruleIndex", "kind", "level", "locations",
                             "partialFingerprints", "properties", "suppressions"}),
    "location": (set(), {"physicalLocation", "logicalLocations"}),
    "physical": (set(), {"artifactLocation", "region"}),
    "artifact": (set(), {"uri", "uriBaseId"}),
    "logical": (set(), {"fullyQualifiedName", "kind"}),
    "suppression": ({"kind"}, {"status", "justification"}),
}


def hostile(text: str) -> dict[str, Any]:
    """A finding all of whose strings are `text`."""
    made = rswa()
    return {**made, "kind": text, "region": text, "path": text, "text": text, "provider": text,
            "replay": text, "picture": [text, "#.#"], "fingerprint": text or "0",
            "diagnosis": {"sentence": text}, "bisect": {"edges": [{"sentence": text}]},
            "source": {**made["source"], "targets": [f"{text}::f"]}}


@pytest.fixture
def some() -> list[Any]:
    one, other, third = rswa(), dynamic_causal(), dynamic_causal(window=3)
    one["diagnosis"] = {"sentence": "the mask_mod is never called under causal=True"}
    return entries([one], [other], [third], {third["fingerprint"]: "fixed in vLLM 0.26"})


def test_junit_fails_on_what_is_new_or_regressed_alone(some: list[Any]) -> None:
    suite = ElementTree.fromstring(to_junit(some, 1.5))
    assert suite.attrib == {"name": "maskproof fuzz", "tests": "3", "failures": "2", "errors": "0",
                            "skipped": "1", "time": "1.500"}
    cases = suite.findall("testcase")
    told = [case.find("failure") for case in cases]
    assert [case.find("skipped") is not None for case in cases] == [False, False, True]
    assert told[0] is not None and told[1] is not None and told[2] is None
    assert told[0].get("message", "").startswith("new: leak (inside causal term")
    assert "never called under causal=True" in told[0].get("message", "")
    assert "#+##.." in (told[0].text or "") and "python -m fuzz.replay" in (told[0].text or "")
    assert told[1].get("message", "").startswith("regressed: ")
    assert cases[2].find("skipped").get("message") == "known: fixed in vLLM 0.26"  # type: ignore
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 3


def requires(what: str, given: Json) -> None:
    required, allowed = SARIF[what]
    assert required <= given.keys() <= required | allowed, (what, sorted(given))


def sound(log: Json) -> None:
    """Raises where the log is not what the schema of SARIF 2.1.0 asks for."""
    requires("log", log)
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    for run in log["runs"]:
        requires("run", run)
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        requires("tool", run["tool"])
        requires("driver", run["tool"]["driver"])
        rules = run["tool"]["driver"]["rules"]
        assert len({rule["id"] for rule in rules}) == len(rules)
        for rule in rules:
            requires("rule", rule)
            assert rule["shortDescription"]["text"] and rule["help"]["text"]
            assert rule["defaultConfiguration"]["level"] == "error"
        for result in run["results"]:
            sound_result(result, rules)


def sound_result(result: Json, rules: list[Json]) -> None:
    requires("result", result)
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result["kind"] == "fail" and result["level"] in ("none", "note", "warning", "error")
    assert isinstance(result["message"]["text"], str) and result["message"]["text"]
    assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
    for location in result["locations"]:
        requires("location", location)
        requires("physical", location["physicalLocation"])
        artifact = location["physicalLocation"]["artifactLocation"]
        requires("artifact", artifact)
        assert artifact["uri"].isascii() and not set(' <>"{}|\\^`\n') & {*artifact["uri"]}
        assert location["physicalLocation"]["region"]["startLine"] >= 1
        for logical in location["logicalLocations"]:
            requires("logical", logical)
    for suppression in result.get("suppressions", ()):
        requires("suppression", suppression)
        assert suppression["kind"] in ("inSource", "external")
        assert suppression["status"] in ("accepted", "underReview", "rejected")


def test_sarif_has_a_rule_for_each_kind_and_a_fingerprint_for_each_finding(
    some: list[Any]
) -> None:
    log = json.loads(to_sarif(some))
    sound(log)
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["leak"]
    assert [r["partialFingerprints"][FINGERPRINT] for r in run["results"]] == [
        one.fingerprint for one in some]
    assert [r["level"] for r in run["results"]] == ["error", "error", "note"]
    assert ["suppressions" in r for r in run["results"]] == [False, False, True]
    assert run["results"][2]["suppressions"][0]["justification"] == "fixed in vLLM 0.26"
    assert [r["properties"]["state"] for r in run["results"]] == ["new", "regressed", "known"]


@pytest.mark.parametrize("broken", [
    lambda log: log.pop("runs"), lambda log: log["runs"][0].pop("tool"),
    lambda log: log["runs"][0]["results"][0].pop("message"),
    lambda log: log["runs"][0]["results"][0].update(ruleIndex=-1, ruleId="other"),
    lambda log: log["runs"][0].update(more=1),
])
def test_a_log_that_is_not_sarif_is_told(some: list[Any], broken: Any) -> None:
    log = json.loads(to_sarif(some))
    broken(log)
    with pytest.raises((AssertionError, KeyError)):
        sound(log)


def test_a_file_of_mask_mods_is_named_from_the_root_on(tmp_path: Path) -> None:
    given = rswa()
    given["source"]["targets"] = [f"{tmp_path}/my masks.py::mine"]

    def artifact(root: Path | None) -> Json:
        (result,) = json.loads(to_sarif(entries([given]), root))["runs"][0]["results"]
        return result["locations"][0]["physicalLocation"]["artifactLocation"]

    assert artifact(tmp_path) == {"uri": "my%20masks.py", "uriBaseId": "%SRCROOT%"}
    assert artifact(None) == {"uri": f"file://{tmp_path}/my%20masks.py"}


def test_every_kind_of_finding_has_words() -> None:
    assert {*KINDS, HANG, CRASH} == WORDS.keys()


class Page(HTMLParser):
    """Tags, and the text of a page without them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.said: list[str] = []
        self.blocks: list[str] = []
        self.within = False
        renderer = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        self.feed(renderer.render(text))
        self.close()
        self.text = "".join(self.said)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.blocks += [""] if tag == "pre" else []
        self.within = tag in ("pre", "code")

    def handle_endtag(self, tag: str) -> None:
        self.within = False

    def handle_data(self, data: str) -> None:
        self.said.append(data)
        if self.within and self.blocks:
            self.blocks[-1] += data

    def handle_comment(self, data: str) -> None:
        self.tags.add("comment")


OWN = {"h2", "h3", "p", "pre", "code", "details", "summary", "table", "thead", "tbody", "tr", "th",
       "td"}


def test_the_summary_shows_picture_cause_and_replay_line(some: list[Any]) -> None:
    text = to_markdown(some)
    page = Page(text)
    assert page.tags == OWN
    assert "Attention masks: 1 new, 1 regressed, 1 known" in page.text
    assert "Cause: the mask_mod is never called under causal=True" in page.text
    assert "Cause: not known" in page.text and "fixed in vLLM 0.26" in page.text
    assert "\n3    #+##..\n" in text and "```sh\npython -m fuzz.replay finding-" in text


def test_with_nothing_new_the_summary_says_so() -> None:
    page = Page(to_markdown(entries([], [], [rswa()])))
    assert "0 new, 0 regressed, 1 known" in page.text and "Nothing new." in page.text
    assert Page(to_markdown([])).text.startswith("Attention masks: 0 new, 0 regressed, 0 known\n")
    assert ElementTree.fromstring(to_junit([])).get("tests") == "0"
    sound(json.loads(to_sarif([])))


def test_a_summary_of_many_findings_stays_small() -> None:
    many = entries([{**rswa(), "fingerprint": f"{i:012x}", "path": "x" * 5000}
                    for i in range(1000)])
    text = to_markdown(many)
    assert len(text.encode()) < 2**20 and f"{1000 - SHOWN} more" in text
    assert f"{1000 - SHOWN - LISTED} more are not listed." in text
    assert text.count("Cause:") == SHOWN


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("known", [False, True])
def test_text_of_a_finding_is_never_markup(text: str, known: bool) -> None:
    harmful(text, known)


@given(st.text(max_size=60))
def test_no_text_is_markup(text: str) -> None:
    harmful(text, False)


def harmful(text: str, known: bool) -> None:
    given = hostile(text)
    found = entries([], [], [given], {given["fingerprint"]: text}) if known else entries([given])
    sound(json.loads(to_sarif(found).encode()))
    case = ElementTree.fromstring(to_junit(found).encode()).find("testcase")
    assert case is not None and " ".join(clean(text).split()) in case.get("classname", "")
    page = Page(to_markdown(found))
    assert page.tags <= OWN, page.tags
    assert " ".join(clean(text).split()) in " ".join(page.text.split())
    if not known:
        picture, replay = page.blocks
        assert picture == f"{clean(text)}\n#.#\n"
        assert replay == f"{clean(text)}\n".replace("\n", " ")[:-1] + "\n" or not text


def test_a_link_of_sarif_cannot_be_made() -> None:
    log = json.loads(to_sarif(entries([hostile("[x](http://a.b)")])))
    assert "](" not in log["runs"][0]["results"][0]["message"]["text"]


def test_nobody_is_mentioned() -> None:
    assert "@" not in markdown("@everyone") and Page(markdown("@everyone")).text == "@everyone\n"
