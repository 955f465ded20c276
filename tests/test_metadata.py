"""Builders of metadata: loaded alone, run as they are and on terms, and held to what they mean."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from kernels.metadata import FILE, Builder, Requests, Shape, builders, paths, run_listed, run_rows
from kernels.provider import Provider, installed, of_release
from kernels.release import find
from proofs.checks import Options, Row
from proofs.metadata import (
    CONTRACTS,
    Subject,
    _overlaps,
    batches,
    compare,
    fault,
    of_builder,
    rows,
    smallest,
)
from proofs.obligation import Verdict
from proofs.report import explain, record
from spec.to_numpy import to_numpy

# Written for these tests: the parameters are a release's, the code is not.
OWN_ROWS = '''
def own_rows(out, mm_prefix_range, query_start_loc_cpu, seq_lens_cpu):
    if not mm_prefix_range:
        return 0
    first_rows = query_start_loc_cpu.numpy()
    total = int(first_rows[-1])
    out[:total] = -1
    for request in mm_prefix_range:
        top = int(first_rows[request])
        bottom = int(first_rows[request + 1])
        cached = int(seq_lens_cpu[request]) - (bottom - top)
        for start, end in mm_prefix_range[request]:
            if not start < end:
                continue
            low = min(max(top + start - cached, top), bottom)
            high = max(min(top + end - cached + 1, bottom), top)
            if low < high:
                out[low:high] = (start, end)
    return total
'''
OWN_TABLE = '''
def own_table(mm_prefix_range, num_seqs, device):
    lists = [list(mm_prefix_range.get(r) or []) for r in range(num_seqs)]
    width = max(1, max([len(each) for each in lists]))
    flat = [pair for each in lists for pair in each + [(-1, -1)] * (width - len(each))]
    made = async_tensor_h2d(flat, dtype=torch.int32, device=device)
    return made.view(num_seqs, width, 2)
'''
SOURCES = {"own_rows": OWN_ROWS, "own_table": OWN_TABLE}


def built(folder: Path, source: str) -> Builder:
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    (found,) = builders(folder)
    return found


def checked(folder: Path, source: str) -> dict[str, Row]:
    made = of_builder("tests/metadata/own", built(folder, source))
    return {row.result.obligation.name: row for row in made}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_right_builder_is_proved(tmp_path: Path, source: str) -> None:
    made = checked(tmp_path, source)
    for row in made.values():
        assert row.result.verdict is Verdict.PROVED, row.result.reason
        assert row.result.killed
        assert row.compared is not None
        assert row.compared.cells
    assert set(made) == {"metadata", "no-overflow"}


FAULTS = {
    "row off by one": ("own_rows", "- cached + 1, bottom", "- cached, bottom"),
    "a row too many": ("own_rows", "- cached + 1, bottom", "- cached + 2, bottom"),
    "first row one late": (
        "own_rows", "top + start - cached, top", "top + start - cached + 1, top"),
    "stale rows kept": ("own_rows", "out[:total] = -1", "pass"),
    "clamp at the end of the chunk dropped": (
        "own_rows", "max(min(top + end - cached + 1, bottom), top)", "top + end - cached + 1"),
    "chunk-local positions": ("own_rows", "- cached", "- 0"),
    "single tokens over ranges": ("own_rows", "not start < end", "not start <= end"),
    "rows beyond the last written": ("own_rows", "out[:total] = -1", "out[:total + 1] = -1"),
    "padding that shows keys": ("own_table", "(-1, -1)", "(0, 3)"),
    "last range lost": ("own_table", "for pair in each +", "for pair in each[:-1] + [(0, 0)] +"),
    "ends swapped": ("own_table", "[pair for", "[pair[::-1] for"),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_refuted_with_its_smallest_case(
    tmp_path: Path, case: tuple[str, str, str]
) -> None:
    name, old, new = case
    source = SOURCES[name]
    assert old in source
    row = checked(tmp_path, source.replace(old, new))["metadata"]
    assert row.result.verdict is Verdict.REFUTED
    shown = record(row)["witness"]
    assert len(shown["query_lens"]) <= 2
    assert row.diagnosis is not None
    assert "smallest case" in explain(row)


def test_the_solver_refutes_what_drawing_did_not_find(tmp_path: Path) -> None:
    """A row too late in chunks longer than any that is drawn."""
    late = "max(0, min(1, bottom - top - 98)) + top"
    source = OWN_ROWS.replace("low = min(max(top +", f"low = min(max({late} +")
    assert source != OWN_ROWS
    made = checked(tmp_path, source)["metadata"]
    assert made.result.verdict is Verdict.REFUTED
    assert made.result.witness is not None
    assert any(value > 98 for name, value in made.result.witness.symbols.items()
               if name.startswith("query_len"))
    assert made.replayed == "real code"
    assert made.diagnosis is not None


def test_a_write_before_the_table_is_found(tmp_path: Path) -> None:
    """A slice that begins below 0 counts from the end."""
    source = OWN_ROWS.replace("min(max(top + start - cached, top), bottom)", "top + start - cached")
    assert "REFUTED" in {row.result.verdict.value for row in checked(tmp_path, source).values()}


def test_what_is_not_understood_is_no_proof(tmp_path: Path) -> None:
    source = OWN_ROWS.replace("out[:total] = -1", "out[:total].fill(-1)")
    row = checked(tmp_path, source)["metadata"]
    assert row.result.verdict is Verdict.UNKNOWN
    assert "no proof" in row.result.reason


def test_other_parameters_are_unsupported(tmp_path: Path) -> None:
    row = checked(tmp_path, "def other(mm_prefix_range, cache):\n    return 0\n")["metadata"]
    assert row.result.verdict is Verdict.UNSUPPORTED
    assert "cache" in row.result.reason


def test_ranges_that_overlap_are_a_precondition(tmp_path: Path) -> None:
    row = checked(tmp_path, OWN_ROWS)["metadata"]
    assert row.result.verdict is Verdict.PROVED
    assert "a precondition: for query_lens=" in row.result.obligation.bounds


def test_ways_through_a_builder_part_its_inputs(tmp_path: Path) -> None:
    made = paths(built(tmp_path, OWN_ROWS), Shape((2,)))
    requests = Requests((3,), (7,), {0: ((5, 9), (4, 4))})
    env = {**Shape((2,)).values(requests), "table_rows": 3}
    taken = [run for run in made if to_numpy(run.condition, env)]
    assert len(taken) == 1
    assert len(taken[0].writes) == 2


def test_terms_that_are_not_the_code_are_noticed(tmp_path: Path) -> None:
    builder = built(tmp_path, OWN_ROWS)
    subject = Subject("own", builder, CONTRACTS[builder.parameters])
    assert compare(subject).cells
    other = built(tmp_path, OWN_ROWS.replace("+ 1, bottom", "+ 2, bottom"))

    import proofs.metadata as module

    before = module.paths
    module.paths = lambda _, shape: before(other, shape)
    try:
        with pytest.raises(module.Disagreement):
            compare(subject)
    finally:
        module.paths = before


def test_drawn_batches_have_every_kind_of_range() -> None:
    def drawn(kind: str) -> bool:
        def wanted(requests: Requests) -> bool:
            lists = list(requests.ranges.items())
            rows_ = [row for _, each in lists for row in each]
            match kind:
                case "beyond":
                    return any(row[0] >= requests.seq_lens[r] for r, each in lists for row in each)
                case "touching":
                    return any(a[1] + 1 == b[0] for _, each in lists for a in each for b in each
                               if a[0] < a[1] and b[0] < b[1])
                case "single":
                    return any(a == b for a, b in rows_)
                case "empty":
                    return any(a > b for a, b in rows_)
                case "chunked":
                    return any(requests.seq_lens[r] > requests.query_lens[r] > 0 and each
                               for r, each in lists)
            return len(requests.ranges) < len(requests.query_lens) and bool(rows_)

        return smallest(batches(True), wanted) is not None

    for kind in ("beyond", "touching", "single", "empty", "chunked", "without"):
        assert drawn(kind), kind
    assert smallest(batches(True), _overlaps) is None
    assert smallest(batches(False), _overlaps) is not None


def test_an_installed_fa4_has_no_builders() -> None:
    assert list(rows(installed())) == []


def test_builders_are_found_beside_the_fa4_of_a_release(tmp_path: Path) -> None:
    built(tmp_path, OWN_TABLE)
    provider = Provider("vllm-test", "vllm.cute", tmp_path / "vllm/vllm_flash_attn/cute")
    made = list(rows(provider, Options(obligations=("metadata",))))
    assert [row.result.obligation.target for row in made] == ["vllm-test/metadata/own_table"]
    assert made[0].result.verdict is Verdict.PROVED


@pytest.mark.releases
@pytest.mark.parametrize(("version", "names"), [
    ("0.24.0", {"compute_mm_prefix_range_tensor"}),
    ("0.33.0", {"compute_mm_prefix_range_tensor", "fill_mm_prefix_query_ranges"}),
])
def test_the_builders_of_a_release_are_proved(version: str, names: set[str]) -> None:
    made = list(rows(of_release(find(version))))
    assert {row.result.verdict for row in made} == {Verdict.PROVED}
    assert {row.result.obligation.target for row in made} == \
        {f"vllm-{version}/metadata/{name}" for name in names}


@pytest.mark.releases
def test_a_builder_of_a_release_runs_alone() -> None:
    found = {each.name: each for each in builders(find("0.33.0").root)}
    requests = Requests((3, 2), (5, 2), {0: ((1, 3),)})
    out = np.full((6, 2), 7, np.int32)
    assert run_rows(found["fill_mm_prefix_query_ranges"], requests, out) == 5
    assert out.tolist() == [[1, 3], [1, 3], [-1, -1], [-1, -1], [-1, -1], [7, 7]]
    listed = run_listed(found["compute_mm_prefix_range_tensor"], requests)
    assert listed is not None
    assert listed.tolist() == [[[1, 3]], [[0, 0]]]
    contract = CONTRACTS[found["fill_mm_prefix_query_ranges"].parameters]
    assert fault(contract, found["fill_mm_prefix_query_ranges"], requests) is None
