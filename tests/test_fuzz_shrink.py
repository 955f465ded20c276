"""Every planted fault is found by the CPU back end, and shrunk to a few queries and keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz.backends import CpuBackend
from fuzz.case import Case, Sequence, from_json
from fuzz.diagnose import Diagnoses
from fuzz.findings import stored
from fuzz.investigate import Investigator, isolate
from fuzz.loop import Loop, Settings
from fuzz.replay import replay
from fuzz.sequences import pack
from fuzz.shrink import shrink
from fuzz.state import open_state
from fuzz.strategies import Space
from fuzz.targets import Source, call_of, chosen, gathered
from fuzz.worker import Deadlines, Worker
from kernels.fa4 import Call
from kernels.mask_mods import TARGETS
from spec.environment import environment, truth_table
from spec.from_file import resolve
from spec.masks import mask

BAD = [target.target for target in TARGETS if target.expected]
SECONDS = 30.0


@contextmanager
def campaign(
    folder: Path, source: Source, *named: str, seed: int = 1, **settings: Any
) -> Iterator[Loop]:
    """A campaign of the CPU back end, not yet run."""
    with gathered(source) as found:
        targets = chosen(found, named, ())
        backend = CpuBackend(targets)
        backend.warm_up()
        spaces = [
            Space(call=call_of(target, "sm_90"), mask=resolve(target.spec),
                  constants=target.constants, domain=backend.domain(call_of(target, "sm_90")))
            for target in targets.values()
        ]
        until = time.monotonic() + settings.pop("seconds", SECONDS)
        deadlines = settings.pop("deadlines", Deadlines(run=10))
        worker, state = Worker(backend, deadlines), open_state(folder)
        investigator = Investigator(
            worker=worker, source=source, folder=folder, until=until + 3,
            origin={"backend": "cpu", "device": "CPU", "seed": seed},
            diagnoses=Diagnoses({}), known=set(stored(folder)),
            most_new=settings.pop("most_new", 4),
        )
        try:
            yield Loop(spaces, Settings(seed=seed, until=until, **settings), state, [worker],
                           investigator)
        finally:
            state.close()


def size(finding: Mapping[str, Any]) -> tuple[int, int, int]:
    sequences = from_json(finding["case"]).sequences
    return (len(sequences), max(s.seqlen_q for s in sequences),
            max(s.seqlen_k for s in sequences))


def hunted(folder: Path, source: Source, name: str, seed: int) -> dict[str, dict[str, Any]]:
    began = time.monotonic()
    with campaign(folder, source, name, seed=seed, stop_on_first=True, most_new=2) as run:
        run.run()
    assert time.monotonic() - began < SECONDS
    return stored(folder)


@pytest.mark.parametrize("name", BAD)
def test_a_known_bad_twin_is_found_and_shrunk(name: str, tmp_path: Path) -> None:
    found = hunted(tmp_path, Source(), name, seed=1)
    assert found
    for finding in found.values():
        count, queries, keys = size(finding)
        assert (count, finding["shrunk"]) == (1, True)
        assert queries <= 4 and keys <= 8
        assert replay(finding).again


@pytest.mark.parametrize("seed", [11, 12, 13, 14])
def test_a_fault_is_found_from_any_seed(seed: int, tmp_path: Path) -> None:
    assert hunted(tmp_path, Source(), "known-bad/chunk-local-q", seed)


@pytest.mark.parametrize("branch", ["mm_prefix[window,ranges=2]", "mm_prefix[window,ranges=8]"])
@pytest.mark.releases
def test_the_first_release_with_a_mask_mod_is_found_wrong(branch: str, tmp_path: Path) -> None:
    source = Source(vllm="0.24.0")
    with campaign(tmp_path, source, branch, launches=4) as run:
        run.run()
    found = stored(tmp_path)
    regions = {(one["kind"], one["region"]) for one in found.values()}
    # No window term; and a query index that is local to the chunk.
    assert ("leak", "inside causal term, outside window term and range term") in regions
    assert ("loss", "inside causal term and window term, outside range term") in regions
    for finding in found.values():
        count, queries, keys = size(finding)
        assert count == 1 and queries <= 4 and keys <= 8


@pytest.mark.releases
def test_the_newest_release_is_found_right(tmp_path: Path) -> None:
    with campaign(tmp_path, Source(vllm="0.33.0"), launches=40) as run:
        run.run()
        assert run.now["cells"] > 10**6
    assert not stored(tmp_path)


def test_the_right_twins_are_found_right(tmp_path: Path) -> None:
    with campaign(tmp_path, Source(), launches=60) as run:
        run.run()
        assert run.now["cells"] > 5 * 10**6
        assert "wrong_cells" not in run.now or run.now["wrong_cells"] == 0
        assert set(run.now) == {"launches", "sequences", "cells", "wrong_cells", "classes", "paths",
                                "compile_seconds", "run_seconds", "kernel_seconds",
                                 "kernels"}
    assert not stored(tmp_path)


def test_a_mask_mod_made_from_a_formula_is_found_right(tmp_path: Path) -> None:
    source = Source(generated=("window & chunked_local", "sink_window", "dynamic_causal_window"))
    names = [f"generated/{text}" for text in source.generated]
    with campaign(tmp_path, source, *names, launches=24) as run:
        run.run()
        assert run.now["cells"] > 10**6
    assert not stored(tmp_path)


def test_code_made_from_a_formula_stays_inside_its_tables(tmp_path: Path) -> None:
    """On rows of padding too, where a kernel asks the code and the formula says nothing."""
    with campaign(tmp_path, Source(generated=("document",)), "generated/document",
                  launches=6) as run:
        run.run()
        assert run.now["cells"] > 0 and not stored(tmp_path)


def test_a_read_past_a_table_on_padded_rows_is_found(tmp_path: Path) -> None:
    (found,) = hunted(tmp_path, Source(), "known-bad/unclamped-lookup", seed=1).values()
    assert (found["kind"], found["region"]) == ("crash", "run padded rows and keys")
    assert "SIGSEGV" in found["text"] and max(size(found)) <= 8


SPACE = Space(call=Call(provider="upstream", spec="mm_prefix"), mask=mask("mm_prefix"),
              longest=6000)


def case_of(*sequences: tuple[int, int, Any], window: int = 64) -> Case:
    return Case(replace(SPACE.call, params={"window": window}), tuple(
        Sequence(seqlen_q=q, seqlen_k=k, tables={"ranges": ranges}) for q, k, ranges in sequences))


def test_a_long_case_of_a_bulk_launch_shrinks() -> None:
    """The case that FACTS measured: it begins far beyond what Hypothesis would draw."""

    def fails(case: Case) -> bool:
        (one,) = case.sequences
        return any(last - first >= 3 for first, last in one.tables["ranges"]) and one.seqlen_q > 2

    found = shrink(SPACE, case_of((300, 5000, ((4900, 5050),))), fails, 20)
    assert found.finished and found.calls < 1000
    (one,) = found.case.sequences
    assert (one.seqlen_q, one.seqlen_k) == (3, 0)
    assert one.tables["ranges"] == ((0, 3),)
    assert found.case.call.params == {"window": 1}


def test_when_time_ends_a_shrink_the_smallest_known_case_stands() -> None:
    def fails(case: Case) -> bool:
        time.sleep(0.05)
        return case.sequences[0].seqlen_k >= 5

    began = time.monotonic()
    found = shrink(SPACE, case_of((300, 5000, ())), fails, 0.5)
    assert not found.finished and time.monotonic() - began < 10
    assert 5 <= found.case.sequences[0].seqlen_k <= 5000


def test_a_case_that_fails_only_sometimes_is_kept_as_it_is() -> None:
    answers = iter([True] * 3)
    case = case_of((3, 5, ()))
    assert shrink(SPACE, case, lambda one: next(answers, False), 5).case.sequences


def test_a_fault_of_two_sequences_together_is_isolated() -> None:
    at = pack(SPACE.mask, case_of(*[(n, n, ()) for n in range(1, 40)]).sequences)
    tried: list[list[int]] = []

    def holds(indices: Any) -> bool:
        tried.append(list(indices))
        return 7 in indices and 30 in indices

    assert sorted(isolate(at, [7, 30], holds)) == [7, 30]
    assert len(tried) < 100


def test_a_sequence_that_fails_alone_is_isolated_at_once() -> None:
    at = pack(SPACE.mask, case_of(*[(n, n, ()) for n in range(1, 40)]).sequences)
    assert isolate(at, [12, 30], lambda indices: 30 in indices) == [30]


def test_the_pictures_of_a_finding_are_those_of_spec_and_code(tmp_path: Path) -> None:
    (name, *_), source = BAD, Source()
    for finding in hunted(tmp_path, source, name, seed=3).values():
        case = from_json(json.loads(json.dumps(finding["case"])))
        (one,) = case.sequences
        spec = resolve(case.call.spec)
        meant = truth_table(spec, environment(
            spec, {**case.call.params, **one.tables}, one.seqlen_q, one.seqlen_k))
        assert finding["expected"] == ["".join(".#"[int(seen)] for seen in row) for row in meant]
        differing = sum(a != b for x, y in zip(finding["expected"], finding["got"], strict=True)
                        for a, b in zip(x, y, strict=True))
        assert differing == finding["wrong_cells"] == len(finding["wrong"])


def test_an_interrupt_ends_a_shrink_at_once() -> None:
    case = case_of((300, 5000, ()))
    tried: list[Case] = []
    found = shrink(SPACE, case, lambda one: tried.append(one) or True, 20, over=lambda: True)
    assert not found.finished and found.case == case and not tried
