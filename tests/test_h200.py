"""The record of what was shown on an H200, and the page that is made from it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.h200 import found, usual
from benchmarks.h200.__main__ import SECTIONS, USUAL
from benchmarks.h200.classes import by_table, counted, impossible, names
from benchmarks.h200.goals import goals, problems, zeros
from benchmarks.h200.isolation import PLANTED, child_of, children_of
from benchmarks.h200.page import BODIES, METHODS, page
from benchmarks.h200.record import load, merge, rounded
from benchmarks.h200.speed import call_of
from fuzz.boundaries import counts
from fuzz.drawing import drawn
from fuzz.recipe import expand_recipe
from fuzz.strategies import Space, recipes
from kernels.fa4 import Call, Sequences
from spec.masks import MASKS
from tests.reference_kernel import Kernel

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "h200.json"
STAMP = {"command": "python -m benchmarks.h200 --json FILE --only X", "gpu": "NVIDIA H200",
         "versions": {"torch": "2"}, "date": "2026-01-01", "seconds": 1.0}


def test_the_page_is_what_the_record_makes() -> None:
    assert (ROOT / "docs" / "h200.md").read_text() == page(RECORD)


def test_the_record_does_not_contradict_itself() -> None:
    assert problems(load(RECORD)) == []


def test_sections_of_the_record_leave_no_mask_out() -> None:
    record = load(RECORD)
    masks = set(MASKS)
    for provider, missing in record["cells"]["not_expressed"].items():
        run = {part["spec"] for part in record["cells"]["parts"] if part["provider"] == provider}
        assert run | set(missing) == masks
    assert {each["spec"] for each in record["speed"]["specs"]} == masks


def test_every_section_has_goals_and_a_place_on_the_page() -> None:
    assert METHODS.keys() == BODIES.keys() == SECTIONS.keys()
    assert {goal.section for goal in goals()} == set(USUAL)


def cells() -> dict[str, Any]:
    group = {"target": "upstream/a", "layout": "paged",
             "classes": {"one query": 3, "no key": 2, "window of one": "no window"}}
    sums = {"cells": 10**11, "sequences": 9, "launches": 1}
    part = {**sums, "provider": "upstream", "spec": "causal", "groups": [group]}
    ran = {"command": "x", "status": 0, "wrong_cells": 0}
    other = {**dict.fromkeys(sums, 0), **ran, "cells": 10**11, "provider": "vllm-0.33.0"}
    providers = {"upstream": {**sums, **ran, "provider": "upstream"}, "vllm-0.33.0": other}
    return {**STAMP, "providers": providers, "not_expressed": {"upstream": [], "vllm-0.33.0": []},
            "parts": [part, {**part, "provider": "vllm-0.33.0", "sequences": 0, "groups": []}]}


def searches() -> dict[str, Any]:
    return {**STAMP, "at_once": 1, "wanted": ["a"],
            "searches": [
        {"release": "", "target": "a", "backend": "gpu", "seed": seed, "status": 1, "kind": "leak",
         "seconds": 2.0, "queries": 1, "keys": 2, "command": "x",
         **({"replayed": True} if seed == 1 else {})}
        for seed in range(1, 6)]}


def speeds() -> dict[str, Any]:
    return {**STAMP, "specs": [{
        "spec": "causal", "cells_ratio": 1000.0, "sequences_ratio": 900.0,
        "pipeline": {"cells": 4000, "sequences": 1800, "seconds": 2.0, "wrong": 0,
                     "cells_per_second": 2000.0, "sequences_per_second": 900.0,
                     "kernel_seconds": 1.8, "kernel_share": 0.9},
        "usual": {"cases": 5, "agree": 5, "cells_per_second": 2.0, "cases_per_second": 1.0},
        "long": {"to_random": 1.0}}]}


def compiling() -> dict[str, Any]:
    return {**STAMP, "kernels": 64, "alone": 12, "processes": 16, "ratio": 6.4,
            "parallel": {"seconds": 10.0, "kernels_in_the_cache": 64},
            "one_by_one": {"seconds": 12.0}, "one_by_one_seconds_scaled": 64.0}


SOUND = {"cells": cells, "found": searches, "speed": speeds, "compile": compiling}
FAULTS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("cells", ("providers", "upstream", "cells"), 2 * 10**11),
    ("cells", ("parts", 0, "sequences"), 2),
    ("cells", ("gpu",), "none"), ("cells", ("command",), "x --backend cpu"),
    ("found", ("searches", 4, "seed"), 4), ("found", ("searches", 4, "status"), 0),
    ("speed", ("specs", 0, "cells_ratio"), 1100.0),
    ("speed", ("specs", 0, "pipeline", "kernel_share"), 0.95),
    ("speed", ("specs", 0, "pipeline", "wrong"), 1), ("speed", ("specs", 0, "usual", "agree"), 4),
    ("compile", ("ratio",), 9.0), ("compile", ("parallel", "kernels_in_the_cache"), 60),
]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_record_has_no_problem_and_meets_its_goals(name: str) -> None:
    record = rounded(SOUND[name]())
    assert problems({name: record}) == []
    for goal in goals():
        if goal.section == name and not goal.text.startswith("vllm"):
            assert goal.met(record), goal.text


@pytest.mark.parametrize(("name", "place", "value"), FAULTS)
def test_a_contradiction_is_a_problem(name: str, place: tuple[Any, ...], value: Any) -> None:
    record = copy.deepcopy(SOUND[name]())
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert problems({name: record})


def met(name: str, record: dict[str, Any]) -> list[bool]:
    return [goal.met(record) for goal in goals() if goal.section == name]


def test_a_class_that_was_not_met_and_a_wrong_cell_are_shortfalls(tmp_path: Path) -> None:
    record = cells()
    record["parts"][0]["groups"][0]["classes"]["no key"] = 0
    assert zeros(record) == [("upstream", "upstream/a", "paged", "no key")]
    assert met("cells", record) == [True, True, False]
    record["providers"]["upstream"]["wrong_cells"] = 1
    assert met("cells", record) == [False, True, False]
    (tmp_path / "r.json").write_text(json.dumps({"cells": record}))
    text = page(tmp_path / "r.json")
    assert "upstream, upstream/a, paged, no key" in text and "**0**" in text
    assert text.count("**missed**") == 2
    assert text.count("**not run**") == sum(goal.section != "cells" for goal in goals())


@pytest.mark.parametrize(("place", "value"), [
    (("searches", 0, "kind"), None), (("searches", 0, "keys"), 9),
    (("searches", 0, "replayed"), False),
])
def test_a_search_that_falls_short_is_a_shortfall(place: tuple[Any, ...], value: Any) -> None:
    record = searches()
    record[place[0]][place[1]][place[2]] = value
    assert not all(met("found", record)) and all(met("found", searches()))


def test_a_section_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    merge(path, "b", {"x": [1, {"y": 0.1234567}]})
    merge(path, "a", {"z": {"deep": {"deeper": [1, 2]}}})
    merge(path, "b", {"x": []})
    assert load(path) == {"a": {"z": {"deep": {"deeper": [1, 2]}}}, "b": {"x": []}}
    merge(path, "b", {"x": 0.1234567})
    assert load(path)["b"] == {"x": 0.12346}


CALL = Call(provider="upstream", spec="window", mask_mod="generated")


def test_what_a_mask_does_not_have_is_not_possible() -> None:
    every = by_table()
    for name in every["window"]:
        assert impossible(MASKS["causal"], [CALL], name) == "no window"
        assert impossible(MASKS["window"], [CALL], name) is None
    for table, reason in (("ranges", "no ranges"), ("prefix_lens", "no prefix"),
                          ("dynamic_causal", "no flags")):
        assert {impossible(MASKS["causal"], [CALL], name) for name in every[table]} == {reason}
    assert impossible(MASKS["document"], [CALL], "more queries than keys")
    assert impossible(MASKS["causal"], [CALL], "more queries than keys") is None


def test_a_compiled_in_window_has_no_other_windows_classes() -> None:
    def reason(name: str, *windows: int) -> str | None:
        calls = [Call(provider="", spec="window", params={"window": each}) for each in windows]
        return impossible(MASKS["window"], calls, name)

    assert reason("window of one", 3, 2) == "its windows are 2, 3"
    assert reason("window of one", 3, 1) is None
    assert reason("window at a tile", 4) and reason("window at a tile", 4, 129) is None
    assert reason("window shorter than the keys", 600)


@pytest.mark.parametrize("spec", ["document", "dynamic_causal_window", "rswa", "same_range"])
def test_what_is_not_possible_is_never_drawn(spec: str) -> None:
    params = {"window": 4} if "window" in MASKS[spec].params else {}
    space = Space(call=Call(provider="upstream", spec=spec, mask_mod="generated", params=params),
                  mask=MASKS[spec], constants=params)
    seen = dict.fromkeys(names(), 0)
    for recipe in drawn(recipes(space, 400), 1, 12):
        at = expand_recipe(recipe, space.mask, constants=params)
        for name, count in counts(space.mask, recipe.call, at).items():
            seen[name] += count
    (group,) = counted(MASKS[spec], {"p": ("t", "paged", [space.call])}, {"p": seen})
    for name, count in group["classes"].items():
        assert not (isinstance(count, str) and seen[name]), name
        assert isinstance(count, str) or count, f"{name} is possible, and was not drawn"


def test_every_call_that_is_known_to_be_wrong_is_searched_for() -> None:
    from kernels.mask_mods import TARGETS

    wrong = {target.target for target in TARGETS if target.expected}
    own = {each.target: each for each in found.faulty(None, {t.target: t for t in TARGETS}, "gpu")}
    assert own.keys() == wrong
    assert all(each.twins and not set(each.twins) & wrong for each in own.values())


def test_the_usual_test_is_right_and_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(usual, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    lengths = np.array([[5, 9], [1, 12], [8, 8]], np.int32).T
    for spec in ("full", "rswa", "chunked_local"):
        call = call_of(spec, layout="varlen")
        prefixes = {"prefix_lens": np.array([1, 2, 3], np.int32)} if spec == "rswa" else {}
        sequences = Sequences(lengths[0].copy(), lengths[1].copy(), prefixes)
        for reference in usual.REFERENCES:
            for check in usual.CHECKS:
                for kernel, agree in ((Kernel(), 3), (Kernel(mask=lambda b, v: v & False), 0)):
                    cases = usual.cases(kernel, call, [sequences])
                    one = usual.timed(kernel, call, cases, reference, check, 0, 3)
                    assert (one["cases"], one["agree"]) == (3, agree)
                    assert one["cells"] == 45 + 12 + 64


def test_the_child_that_was_begun_last_is_found() -> None:
    script = "import subprocess, sys; a = [subprocess.Popen(['sleep', '60']) for _ in range(3)];" \
             "print(a[-1].pid, flush=True); sys.stdin.read(); [p.kill() for p in a]"
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    assert parent.stdout and parent.stdin
    last = int(parent.stdout.readline())
    assert len(children_of(parent.pid)) == 3 and child_of(parent.pid) == last
    parent.communicate()
    with pytest.raises(RuntimeError):
        children_of(parent.pid)


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_mask_mods_keep_their_faults_in_a_trace(name: str) -> None:
    from fuzz.targets import Source, gathered
    from kernels.trace import trace

    file = os.path.relpath(ROOT / "tests" / "gpu" / "planted.py")
    with gathered(Source(targets=(f"{file}::{name}",), against="causal")) as targets:
        (target,) = targets.values()
        text = str(trace(target, ()).module)
    word = {"spins": "nanosleep", "writes_out_of_bounds": "st.global", "traps": "trap"}[name]
    assert "has_side_effects" in text and word in text
