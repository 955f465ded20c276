"""Claims about kernels are exported as calls, read out, and told beside the findings."""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import claims
from benchmarks.h200 import confirm
from benchmarks.h200.goals import goals, problems
from benchmarks.h200.page import confirm_body
from kernels.fa4 import Call, Resident
from kernels.readout import Reader
from proofs.baseline import digest, refutations, sightings
from spec.from_file import resolve
from tests.reference_kernel import Kernel

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = json.loads(confirm.FILE.read_text())
MASKS = [claim for claim in CLAIMS if claim.get("kind") == "mask"]
KEYS = [claim for claim in CLAIMS if claim.get("kind") == "key"]
BLOCKS = [claim for claim in CLAIMS if claim.get("kind") == "blocks"]
SMALL = {"head_dim": 16, "head_dim_v": 16, "page_size": 16, "kv_heads": 2, "q_heads": 2}
SHORT = 20


@dataclass
class Faulty(Kernel):
    """Computes one mask, whatever the call is to be held against."""

    effective: str = ""

    def launch(self, call: Call, on: Resident, **given: Any) -> None:
        super().launch(replace(call, spec=self.effective), on, **given)


def one_of(target: str) -> dict[str, Any]:
    return next(claim for claim in CLAIMS if claim["target"] == target)


def read(claim: dict[str, Any], kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(confirm, "SEQUENCES", 3)
    monkeypatch.setattr(confirm, "LONGEST", SHORT)
    monkeypatch.setattr(confirm.with_witness, "__defaults__", (SHORT,))
    call = replace(Call(**claim["call"]), **SMALL)
    return confirm.mask_read(Reader(kernel, device="cpu"), call, claim)


def record(**fields: Any) -> dict[str, Any]:
    """A record of a check."""
    return {
        "target": "vllm-0.33.0/window(-1,0)", "obligation": "effective-mask", "layer": "dispatch",
        "spec": "causal", "verdict": "REFUTED", "expected": "PROVED", "explanation": "x",
        "reason": "", "diagnosis": {"sentence": "all", "variation": "True", "verdict": "PROVED"},
        "witness": {"b": 0, "q_idx": 0, "kv_idx": 1, "seqlen_q": 2, "seqlen_k": 2, "tables": {}},
        **fields,
    }


def test_every_claim_has_a_call_and_a_mask_that_can_be_read_out() -> None:
    assert MASKS and KEYS and BLOCKS
    for claim in MASKS:
        call = Call(**claim["call"])
        assert set(resolve(claim["effective"]).tables) <= set(resolve(call.spec).tables)
        assert claim["effective"] != call.spec
    for claim in KEYS:
        assert claim["first"] != claim["then"]
        [resolve(claim[name]["call"]["spec"]) for name in ("first", "then")]
    assert len({claim["digest"] for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("target", ["vllm-0.33.0/dispatch/rswa", "vllm-0.24.0/window(-1,0)"])
def test_a_kernel_that_is_wrong_as_claimed_is_told_from_one_that_is_not(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = one_of(target)
    found = read(claim, Faulty(effective=claim["effective"]), monkeypatch)
    assert found["as_predicted"] and found["wrong"] and not found["unlike"]
    assert found["witness"]["kind"] == "leak"

    right = read(claim, Faulty(effective=claim["spec"]), monkeypatch)
    assert not right["as_predicted"] and not right["wrong"] and right["unlike"]
    assert right["witness"]["kind"] == "right"


def test_one_cell_that_is_not_as_claimed_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_lost(b: int, visible: Any) -> Any:
        if b == 0:
            visible[..., 0, 0] = False
        return visible

    claim = one_of("vllm-0.33.0/window(-1,0)")
    kernel = Faulty(effective=claim["effective"], mask=one_lost)
    found = read(claim, kernel, monkeypatch)
    assert found["wrong"] and found["unlike"]["loss"] and not found["as_predicted"]


def blocks_of(claim: dict[str, Any]) -> tuple[Call, Any, Any, Any]:
    call = Call(**claim["call"])
    sequences = confirm.alike(confirm.with_witness(claim, call.spec, 3))
    cells = confirm.visible(call, sequences)
    return (call, sequences, confirm.by_points(cells, claim["tile"], claim["point"]),
            confirm.by_all(cells, claim["tile"]))


@pytest.mark.parametrize("claim", BLOCKS, ids=lambda claim: claim["target"])
def test_blocks_are_classified_wrongly_as_claimed_or_not(claim: dict[str, Any]) -> None:
    call, sequences, five, every = blocks_of(claim)
    found = confirm.blocks_compared(claim, call, sequences, five)
    assert found["as_predicted"] and found["wrong"]
    assert found["witness"]["kind"] in ("leak", "loss")
    right = confirm.blocks_compared(claim, call, sequences, every)
    assert not right["as_predicted"] and not right["wrong"] and right["unlike"]
    assert right["witness"]["kind"] == "right"
    other = five.copy()
    other.flat[0] = (other.flat[0] + 1) % 3
    assert not confirm.blocks_compared(claim, call, sequences, other)["as_predicted"]


def test_the_classes_of_blocks_follow_from_their_lists() -> None:
    counts, lists = np.array([[[1, 0]]]), np.array([[[[2, 0, 0], [9, 9, 9]]]])
    full = np.array([[[1, 2]]]), np.array([[[[0, 9, 9], [0, 1, 9]]]])
    assert confirm.classes(counts, lists, *full).tolist() == [[[2, 0, 1], [2, 2, 0]]]


def test_blocks_at_the_end_of_a_sequence_have_fewer_cells() -> None:
    cells = np.ones((1, 3, 5), bool)
    cells[0, 2, 4] = cells[0, 0, 0] = False
    assert confirm.by_all(cells, (2, 2)).tolist() == [[[1, 2, 2], [2, 2, 0]]]


def run_in_turn(claim: dict[str, Any], monkeypatch: pytest.MonkeyPatch, answer: Any,
                then_alone: Any = None) -> dict[str, Any]:
    """`of_key`, with what the two processes would tell."""
    right = {"wrong": {}, "unlike": {"leak": 1}, "as_predicted": False, "fa4": "x", "cells": 9}
    told = [right if then_alone is None else then_alone, answer]
    monkeypatch.setattr(confirm, "alone", lambda jobs, count, limit: told)
    return confirm.of_key(claim)


def test_a_key_is_seen_where_the_later_call_has_the_earlier_ones_mask_or_is_refused(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = {"wrong": {"loss": 3}, "unlike": {}, "as_predicted": True, "fa4": "x", "cells": 9}
    other = {**stale, "unlike": {"leak": 1}, "as_predicted": False}
    refused = {"fa4": "x", "refused": "TypeError: arguments"}
    for told, seen in ((stale, True), (other, False), (refused, True)):
        found = run_in_turn(KEYS[0], monkeypatch, told)
        assert found["as_predicted"] is seen and found["by_itself"] == {}
    for by_itself in (stale, refused):
        for told in (stale, refused):
            assert not run_in_turn(KEYS[0], monkeypatch, told, by_itself)["as_predicted"]
    assert run_in_turn(KEYS[0], monkeypatch, {"error": "x"}) == {"error": "x"}


def test_a_process_that_ends_or_hangs_is_an_error_and_the_others_are_not() -> None:
    def ends() -> dict[str, Any]:
        os._exit(3)

    def hangs() -> dict[str, Any]:
        time.sleep(60)
        return {}

    def fails() -> dict[str, Any]:
        raise ValueError("no")

    began = time.perf_counter()
    found = confirm.alone([partial(dict, a=1), ends, hangs, fails, partial(dict, a=2)], 2, 2.0)
    assert found == [{"a": 1}, {"error": "the process ended"}, {"error": "not done in time"},
                     {"error": "ValueError: no"}, {"a": 2}]
    assert time.perf_counter() - began < 20


def test_tables_are_put_together_from_their_elements() -> None:
    found = claims.nested({"ranges[0, 1, 0]": 4, "ranges[0, 1, 1]": 7, "prefix_lens[0]": 2,
                           "dynamic_causal": [1]})
    assert {name: table.tolist() for name, table in found.items()} == {
        "ranges": [[[-1, -1], [4, 7]]], "prefix_lens": [2], "dynamic_causal": [1]}


def test_only_refuted_obligations_about_kernels_are_claims() -> None:
    given = [record(), record(verdict="PROVED"), record(expected="REFUTED"),
             record(layer="metadata"), record(target="own/x")]
    (found,) = claims.claims(given)
    assert found["effective"] == "(True)" and found["digest"] == digest(record())
    assert Call(**found["call"]) == Call(provider="vllm-0.33.0", spec="causal",
                                         window_size_left=-1, window_size_right=0)


SEEN = {"gpu": "NVIDIA H200", "date": "2026-01-01"}


def test_a_finding_says_what_was_seen_while_its_claim_is_the_same() -> None:
    seen = {**SEEN, "claims": [{"digest": digest(record()), "said": "it is wrong"},
                               {"digest": "0", "said": ""}]}
    line = "Seen on an NVIDIA H200, 2026-01-01: it is wrong."
    assert line in refutations([record()], seen)
    assert sightings(seen).keys() == {digest(record())}
    other = {"sentence": "none", "variation": "False", "verdict": "PROVED"}
    for changed in (record(diagnosis=other), record(spec="full"), record(target="vllm-0.1/a")):
        assert "Seen on" not in refutations([changed], seen)
    moved = {**record()["witness"], "kv_idx": 0}
    assert line in refutations([record(witness=moved)], seen)
    assert "Seen on" not in refutations([record()], {})


def told(**fields: Any) -> dict[str, Any]:
    return {"target": "t", "obligation": "o", "digest": "d", "sentence": "s", "kind": "mask",
            "call": {}, "fa4": "FA4", "cells": 100, "wrong": {"leak": 2}, "unlike": {},
            "as_predicted": True, "sequences": 4,
            "witness": {"q_idx": 0, "kv_idx": 1, "kind": "leak"}, **fields}


@pytest.mark.parametrize(("one", "words"), [
    (told(), ("2 of 100 cells are wrong (2 leak)", "the one that is claimed", "leak")),
    (told(as_predicted=False, unlike={"loss": 1}), ("**not as is claimed here**", "loss")),
    (told(kind="blocks", blocks=7), ("2 of 7 blocks are classified wrongly",)),
    (told(refused="TypeError: x"), ("is refused, with `TypeError: x`",)),
    (told(by_itself={}), ("by itself the later call is right",)),
])
def test_what_was_seen_is_a_sentence(one: dict[str, Any], words: tuple[str, ...]) -> None:
    assert all(word in confirm.said(one) for word in words)


def test_nothing_is_said_of_what_failed() -> None:
    assert confirm.said({**told(), "error": "x"}) == ""


def section(*claims: dict[str, Any]) -> dict[str, Any]:
    return {**SEEN, "command": "x", "claims": list(claims), "not_here": {"no": ["a b"]}}


def test_a_claim_that_was_not_seen_is_a_shortfall_and_a_contradiction_a_problem() -> None:
    (goal,) = (goal for goal in goals() if goal.section == "confirm")
    sound = section(told(), told(digest="e", kind="key", by_itself={}))
    assert goal.met(sound) and problems({"confirm": sound}) == []
    assert not goal.met(section()) and not goal.met(section(told(as_predicted=False)))
    assert not goal.met(section({"error": "x", **{k: told()[k] for k in ("target", "digest")}}))
    for place, value in (("wrong", {}), ("unlike", {"leak": 1}), ("digest", "e"),
                         ("error", "x")):
        broken = copy.deepcopy(sound)
        broken["claims"][0][place] = value
        assert problems({"confirm": broken}), place
    wrong_alone = section(told(kind="key", by_itself={"leak": 1}))
    assert problems({"confirm": wrong_alone})


def test_the_page_shows_every_claim_and_what_was_not_tried() -> None:
    text = "\n".join(confirm_body(section(told(), told(as_predicted=False))))
    assert text.count("t o: s") == 2 and "**no**" in text and "Not tried, no: a b." in text


def test_the_findings_page_says_what_the_record_says() -> None:
    record = json.loads((ROOT / "benchmarks" / "h200.json").read_text()).get("confirm", {})
    page = (ROOT / "docs" / "findings.md").read_text()
    current = {claim["digest"] for claim in CLAIMS}
    lines = {line for name, text in sightings(record).items() if name in current for line in text}
    assert {line for line in page.splitlines() if line.startswith("Seen on")} == {
        line.strip() for line in lines}


def test_what_other_kernels_show_of_a_releases_flags_is_no_confirmation() -> None:
    def one(target: str, obligation: str, fa4: str) -> dict[str, Any]:
        return {"target": target, "obligation": obligation, "fa4": fa4, "error": "none"}

    own = [one("vllm-0.33.0/dispatch/rswa", "effective-mask", "FA4 of vllm-0.33.0"),
           one("vllm-0.24.0/mm_prefix[window]", "equals-spec", "FA4 of vllm-0.33.0"),
           one("flash-attn-4-4.0.0/window(-1,0)", "effective-mask", "flash-attn-4 4.0.0")]
    others = [one("vllm-0.24.0/dispatch/rswa", "effective-mask", "FA4 of vllm-0.33.0")]
    found = confirm.sorted_out([*own, *others])
    assert [each["target"] for each in found["claims"]] == [each["target"] for each in own]
    assert found["not_here"] == {
        "about the kernels of vllm-0.24.0, which do not import here":
            ["vllm-0.24.0/dispatch/rswa effective-mask"]}
