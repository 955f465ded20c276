"""The read-out finds what is wrong and nothing else, with a plain kernel in place of FA4's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.derived import on_device
from kernels.fa4 import BATCHED, PAGED, VARLEN, Call, Fa4Error, Sequences
from kernels.pages import pages
from kernels.readout import EVERY, NOWHERE, SLOTS, STRIPE, UNUSED, Reader, Wrong, formula_of
from spec.environment import own_rows
from spec.masks import MASKS
from spec.to_numpy import to_numpy
from spec.to_triton import tables_of
from tests.reference_kernel import Kernel, sampled

ROOT = Path(__file__).parents[1]
VALUES = {"window": 5, "chunk": 6, "sink": 2}
SMALL = {"head_dim": 16, "head_dim_v": 16, "page_size": 16, "kv_heads": 2, "q_heads": 2}


def call_of(spec: str, **fields: Any) -> Call:
    params = {name: value for name, value in VALUES.items() if name in MASKS[spec].params}
    return Call(provider="upstream", spec=spec, params=params, **{**SMALL, **fields})


def reader(kernel: Kernel, **options: Any) -> Reader:
    return Reader(kernel, device="cpu", **options)


def lengths(*pairs: tuple[int, int], **tables: Any) -> Sequences:
    q, k = np.array(pairs, np.int32).T
    return Sequences(q.copy(), k.copy(), tables)


def visible_cells(call: Call, sequences: Sequences) -> set[tuple[int, int, int]]:
    """(sequence, query, key) of every visible cell, by NumPy."""
    term, found = formula_of(call, sequences.tables), set()
    for b, (queries, keys) in enumerate(
        zip(sequences.seqlens_q.tolist(), sequences.seqlens_k.tolist(), strict=True)
    ):
        env = {
            **call.params, **sequences.tables, "b": b, "h": 0, "seqlen_q": queries,
            "seqlen_k": keys, "q_idx": np.arange(queries)[:, None], "kv_idx": np.arange(keys),
            "offset_q": int(sequences.seqlens_q[:b].sum()), "offset_k": 0,
        }
        cells = np.broadcast_to(to_numpy(term, env), (queries, keys))
        found |= {(b, int(q), int(kv)) for q, kv in np.argwhere(cells)}
    return found


@pytest.mark.parametrize("layout", [PAGED, VARLEN, BATCHED])
@pytest.mark.parametrize("spec", MASKS)
def test_a_right_kernel_has_no_wrong_cell(spec: str, layout: str) -> None:
    call = call_of(spec, layout=layout)
    sequences = sampled(call, seed=len(spec), longest=36, sequences=4)
    reading = reader(Kernel()).read(call, sequences)
    assert (reading.counts, reading.wrong) == ({}, ())
    assert reading.cells == sequences.cells > 0


@pytest.mark.parametrize("spec", MASKS)
def test_every_changed_cell_is_found_and_no_other(spec: str) -> None:
    """A fifth of all cells changes; what is reported is what NumPy says of them."""
    call = call_of(spec, q_heads=1, kv_heads=1, head_dim_v=32)
    sequences = sampled(call, seed=1, longest=24)
    noise = torch.Generator().manual_seed(2)
    flips: dict[int, torch.Tensor] = {}

    def mask(b: int, visible: torch.Tensor) -> torch.Tensor:
        if b not in flips:
            flips[b] = torch.rand(visible.shape, generator=noise) < 0.2
        return visible ^ flips[b]

    reading = reader(Kernel(mask=mask), limit=100_000).read(call, sequences)
    changed = {(b, int(q), int(kv)) for b, f in flips.items() for _, q, kv in f.nonzero().tolist()}
    was_visible = visible_cells(call, sequences)
    expected = {
        Wrong(b, 0, q, kv, "loss" if (b, q, kv) in was_visible else "leak") for b, q, kv in changed
    }
    assert set(reading.wrong) == expected and reading.total == len(expected) > 0
    assert sum(reading.by_sequence.values()) == len(expected)


def planted(b: int, head: int, q: int, kv: int, factor: float) -> Kernel:
    def weigh(at: int, weights: torch.Tensor) -> torch.Tensor:
        if at == b:
            weights = weights.clone()
            weights[head, q, kv] *= factor
        return weights

    return Kernel(weigh=weigh)


def leaked(b: int, q: int, kv: int) -> Kernel:
    def mask(at: int, visible: torch.Tensor) -> torch.Tensor:
        if at == b:
            visible = visible.clone()
            visible[:, q, kv] = True
        return visible

    return Kernel(mask=mask)


CAUSAL = call_of("causal")
THREE = lengths((3, 5), (7, 40), (4, 2))


def test_a_key_that_counts_twice_is_found() -> None:
    reading = reader(planted(1, 0, 2, 3, 2.0)).read(CAUSAL, THREE)
    # Every weight of the row is then 1/(n + 1), and LSE is not log n, for either head.
    assert Wrong(1, 0, 2, 3, "double") in reading.wrong
    assert reading.counts == {"double": 1, "lse": 1}


def test_a_whole_chunk_that_counts_twice_is_found() -> None:
    def weigh(b: int, weights: torch.Tensor) -> torch.Tensor:
        return weights * 2 if b == 0 else weights

    reading = reader(Kernel(weigh=weigh)).read(CAUSAL, THREE)
    # Two heads of two chunks; each of the 3 rows sees 3 to 5 keys.
    assert reading.counts == {"lse": 2 * 3, "double": 3 + 4 + 5}
    assert set(reading.by_sequence) == {0}


def test_an_empty_row_must_have_no_sum() -> None:
    def spoil(given: dict[str, torch.Tensor]) -> None:
        given["lse"][:, 10] = 0.0  # the first query of the third sequence stands before all keys

    reading = reader(Kernel(spoil=spoil)).read(CAUSAL, THREE)
    assert reading.wrong == (Wrong(2, 0, 0, -1, "empty-row"), Wrong(2, 1, 0, -1, "empty-row"))


@pytest.mark.parametrize("layout", [PAGED, BATCHED])
def test_an_output_that_was_not_written_is_found(layout: str) -> None:
    call = replace(CAUSAL, layout=layout)

    def spoil(given: dict[str, torch.Tensor]) -> None:
        out, lse = given["out"], given["lse"]
        bits, row = out.view(torch.int16), (1, 0) if layout == BATCHED else (3,)
        bits[(*row, 1, 4)] = 0x7FDA
        lse.view(torch.int32)[(1, 0, 0) if layout == BATCHED else (0, 3)] = 0x7FDADADA

    reading = reader(Kernel(spoil=spoil)).read(call, lengths((3, 5), (7, 12)))
    assert Wrong(1, 1, 0, 4 + 16, "unwritten") in reading.wrong
    assert Wrong(1, 0, 0, -1, "unwritten") in reading.wrong
    assert reading.counts.keys() == {"unwritten"}


class Lazy(Kernel):
    """Leaves so many columns of head 1 of the packed row `row` as they were, from `first` on."""

    row, first, columns = 9, 0, 0

    def launch(self, call: Call, on: Any, **given: Any) -> None:
        kept = given["out"][self.row, 1, self.first : self.first + self.columns]
        before = kept.clone()
        super().launch(call, on, **given)
        kept.copy_(before)


WIDE = replace(CAUSAL, head_dim_v=4 * 2 * STRIPE, kv_heads=2)


@pytest.mark.parametrize("columns, first", [
    (2 * STRIPE + 1, 0), (2 * STRIPE + 1, 150), (2 * STRIPE, 64), (8, 150), (1, 2 * STRIPE - 1),
])
def test_what_is_left_unwritten_is_found_again_and_again(columns: int, first: int) -> None:
    """In a long stretch by every launch, in a short one by every second at least, whatever the
    launches before have left there. What was left may be right, and is then not wrong."""
    kernel = Lazy()
    held = reader(kernel)
    assert [held.read(WIDE, THREE).total for _ in range(2)] == [0, 0]
    kernel.first, kernel.columns = first, columns
    found = [held.read(WIDE, THREE) for _ in range(2)]
    assert all(each.counts.keys() <= {"unwritten"} for each in found)
    caught = [each.total > 0 for each in found]
    assert all(caught) if columns > 2 * STRIPE else any(caught)
    kernel.columns = 0
    assert held.read(WIDE, THREE).total == 0


def test_rows_of_an_earlier_launch_are_no_overrun() -> None:
    held = reader(Kernel())
    for sequences in (lengths((90, 100)), lengths((3, 5)), lengths((70, 80)), THREE):
        assert held.read(CAUSAL, sequences).total == 0


def test_nan_and_infinity_are_found() -> None:
    def spoil(given: dict[str, torch.Tensor]) -> None:
        given["out"][4, 0, 2] = float("nan")
        given["out"][5, 0, 2] = float("inf")
        given["lse"][1, 6] = float("nan")

    reading = reader(Kernel(spoil=spoil)).read(CAUSAL, THREE)
    # Both of the launches that 40 keys take are spoiled.
    assert {(w.q, w.kv, w.kind) for w in reading.wrong} == {
        (1, 2, "nan"), (1, 34, "nan"), (2, 2, "nan"), (2, 34, "nan"), (3, -1, "nan")
    }


def test_what_is_written_behind_the_last_row_is_found() -> None:
    def spoil(given: dict[str, torch.Tensor]) -> None:
        out = given["out"]
        beyond = torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() + 5)
        beyond[0] = 1.0

    reading = reader(Kernel(spoil=spoil)).read(CAUSAL, THREE)
    assert {(w.sequence, w.kind) for w in reading.wrong} == {(-1, "overrun")}


def test_a_key_behind_the_end_of_a_sequence_is_a_leak() -> None:
    """The page of the last key goes on with one-hot rows, which a key too many shows."""
    class Beyond(Kernel):
        def launch(self, call: Call, on: Any, **given: Any) -> None:
            longer = replace_lengths(on, on.sequences.seqlens_k + 1)
            super().launch(replace(call, spec="full"), longer, **given)

    def replace_lengths(on: Any, seqlens_k: Any) -> Any:
        from dataclasses import replace as with_fields

        return with_fields(on, sequences=with_fields(on.sequences, seqlens_k=seqlens_k))

    reading = reader(Beyond()).read(call_of("full"), lengths((3, 5), (2, 33)))
    leaks = [w for w in reading.wrong if w.kind == "leak"]
    assert {(w.sequence, w.kv) for w in leaks} == {(0, 5), (1, 33)} and len(leaks) == 5


@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 48])
@pytest.mark.parametrize("nan", [NOWHERE, UNUSED, SLOTS])
def test_pages_of_any_size_show_every_key(page_size: int, nan: str) -> None:
    call = call_of("causal", page_size=page_size, kv_heads=3, q_heads=3)
    sequences = sampled(call, seed=page_size, longest=70, sequences=3)
    assert reader(Kernel()).read(call, sequences, nan=nan).total == 0
    found = reader(leaked(0, 1, 69)).read(call, sequences, nan=nan)
    assert Wrong(0, 69 // 16 % 3, 1, 69, "leak") in found.wrong


def test_unused_pages_and_slots_hold_nan() -> None:
    call = call_of("causal", kv_heads=1, q_heads=1)
    shared = pages(call, SLOTS, "cpu")
    table = shared.table(0, torch.tensor([5, 16, 40, 0], dtype=torch.int32), 4)
    v = shared.v[table.long()].flatten(1, 2)[..., 0, :].float()
    # Of a sequence without keys kernels with a mask_mod look at the first page, and hide it.
    for b, used in enumerate((5, 16, 40, 16)):
        assert v[b, used:].isnan().all() and not v[b, :used].isnan().any()
    assert not v[3, :16].any()
    assert torch.equal(v[2, :16], torch.eye(16))
    assert shared.k[table.long()].flatten(1, 2)[0, 5:].isnan().all()


@pytest.mark.parametrize("heads", ["shared", EVERY])
@pytest.mark.parametrize("q_heads", [2, 6])
def test_one_wrong_head_is_found(q_heads: int, heads: str) -> None:
    call = replace(CAUSAL, q_heads=q_heads)
    sequences = lengths((7, 40))
    kernel = planted(0, q_heads - 1, 0, 20, 0.0)  # 20 lies in the chunk of the second key head
    reading = reader(kernel).read(call, sequences, heads=heads)
    assert {w for w in reading.wrong if w.kind == "loss"} == {
        Wrong(0, q_heads - 1, 0, 20, "loss")
    }
    assert reading.cells == sequences.cells * (q_heads if heads == EVERY else q_heads // 2)


def test_every_head_is_read_at_every_key() -> None:
    """A fault of one head in a chunk that another head shows."""
    kernel = planted(0, 1, 0, 3, 0.0)
    assert reader(kernel).read(CAUSAL, lengths((7, 40))).counts.keys() <= {"lse"}
    reading = reader(kernel).read(CAUSAL, lengths((7, 40)), heads=EVERY)
    assert Wrong(0, 1, 0, 3, "loss") in reading.wrong


def test_a_formula_with_heads_is_read_at_every_head() -> None:
    call = replace(CAUSAL, spec="causal and (h == 0 or kv % 2 == 0)")
    sequences = lengths((7, 40), (3, 3))
    reading = reader(Kernel()).read(call, sequences)
    assert reading.total == 0 and reading.cells == 2 * sequences.cells


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sink", [False, True])
def test_weights_are_understood_in_every_dtype(dtype: str, sink: bool) -> None:
    call = replace(CAUSAL, dtype=dtype, sink=sink, head_dim_v=64)
    sequences = lengths((2, 700), (3, 1))
    assert reader(Kernel()).read(call, sequences).total == 0
    reading = reader(planted(0, 0, 1, 600, 2.0)).read(call, sequences, heads=EVERY)
    assert Wrong(0, 0, 1, 600, "double") in reading.wrong


OWN_ROWS = ("query_ranges", "cu_seqlens_q")


class Given(Kernel):
    """Its mask_mod is given the range of each query. `told` keeps what it was given."""

    told: torch.Tensor

    def layout(self, call: Call) -> tuple[str, ...]:
        return OWN_ROWS

    def launch(self, call: Call, on: Any, **given: Any) -> None:
        self.told = on.tables["query_ranges"].clone()
        super().launch(call, on, **given)


def nested(count: int, longest: int) -> Sequences:
    """Sequences whose ranges hold each other, cross, or are none."""
    rng = np.random.default_rng(count)
    k = rng.integers(0, longest, count)
    q = rng.integers(0, longest, count)  # more queries than keys, too
    ranges = np.sort(rng.integers(-4, longest + 4, (count, 5, 2)), axis=2)
    ranges[rng.random((count, 5)) < 0.3] = -1
    ranges[:, 4] = ranges[:, 0] + 1  # as long, and mostly holding the same queries
    tables = {"ranges": ranges.astype(np.int32)}
    return Sequences(q.astype(np.int32), k.astype(np.int32), tables)


@pytest.mark.parametrize("longest", [30, 700])
def test_the_range_of_each_query_is_made_where_it_is_read(longest: int) -> None:
    """As NumPy has it, also where ranges overlap. 700 queries take more than one block."""
    call = call_of("mm_prefix")
    sequences = nested(9 if longest < 100 else 3, longest)
    on = on_device(call, OWN_ROWS, sequences, "cpu")
    told = on.tables["query_ranges"].numpy()
    ends = np.cumsum(sequences.seqlens_q)
    for b, (queries, keys) in enumerate(zip(sequences.seqlens_q, sequences.seqlens_k, strict=True)):
        expected = own_rows(sequences.tables["ranges"][b][::-1], int(queries), int(keys))
        got = told[ends[b] - queries : ends[b]]
        size = expected[:, 1] - expected[:, 0]
        assert np.array_equal(got[:, 1] - got[:, 0], size)
        assert np.array_equal(got, first_of_the_longest(sequences, b))


def first_of_the_longest(sequences: Sequences, b: int) -> np.ndarray[Any, Any]:
    queries, keys = int(sequences.seqlens_q[b]), int(sequences.seqlens_k[b])
    rows = []
    for q in range(keys - queries, keys):
        held = [tuple(row) for row in sequences.tables["ranges"][b].tolist()
                if row[0] <= q <= row[1]]
        rows.append(max(held, key=lambda row: row[1] - row[0], default=(-1, -1)))
    return np.array(rows).reshape(-1, 2)


def test_a_table_that_is_given_is_not_made() -> None:
    call, sequences = call_of("mm_prefix"), nested(4, 20)
    rows = np.full((sequences.rows, 2), 7, np.int32)
    known = replace(sequences, tables={**sequences.tables, "query_ranges": rows})
    assert (on_device(call, OWN_ROWS, known, "cpu").tables["query_ranges"] == 7).all()
    assert "query_ranges" not in on_device(call, (), sequences, "cpu").tables
    assert on_device(call, OWN_ROWS, nested(0, 1), "cpu").tables["query_ranges"].shape == (1, 2)


def test_the_formula_is_over_what_the_kernel_reads() -> None:
    call, sequences = call_of("mm_prefix"), sampled(call_of("mm_prefix"), seed=3)
    kernel = Given()
    assert reader(kernel).read(call, sequences).total == 0 and len(kernel.told) == sequences.rows
    assert "query_ranges" in tables_of(formula_of(call, sequences.tables, OWN_ROWS))
    assert "query_ranges" not in tables_of(formula_of(call, sequences.tables))
    wrong = Given(mask=lambda b, visible: ~visible)
    cells = reader(Kernel(mask=lambda b, visible: ~visible)).read(call, sequences).by_sequence
    assert reader(wrong).read(call, sequences).by_sequence == cells


def test_batches_are_cut_where_memory_would_not_do() -> None:
    call = call_of("mm_prefix")
    sequences = sampled(call, seed=5, sequences=9)
    wrong = Kernel(mask=lambda b, visible: ~visible)
    whole, cut = (reader(wrong, memory=most, limit=10**5).read(call, sequences)
                  for most in (1 << 30, 1))
    assert cut.launches > whole.launches and cut.cells == whole.cells
    assert cut.by_sequence == whole.by_sequence
    assert set(cut.wrong) == set(whole.wrong)


def test_only_some_wrong_cells_come_back_and_all_are_counted() -> None:
    call = replace(CAUSAL, spec="causal")
    kernel = Kernel(mask=lambda b, visible: ~visible)
    every = reader(kernel, limit=10_000).read(call, THREE)
    some = reader(kernel, limit=7).read(call, THREE)
    assert some.counts == every.counts and some.by_sequence == every.by_sequence
    assert len(some.wrong) == 7 and set(some.wrong) <= set(every.wrong)


def test_a_reader_can_be_used_again_after_a_fault() -> None:
    held = reader(Kernel(mask=lambda b, visible: ~visible))
    assert held.read(CAUSAL, THREE).total > 0
    held.source = Kernel()
    assert held.read(replace(CAUSAL, q_heads=4), THREE).total == 0
    assert held.read(CAUSAL, lengths((0, 3), (2, 2))).total == 0
    assert held.read(CAUSAL, lengths((0, 0))).cells == 0


def test_a_call_that_cannot_be_done_is_refused() -> None:
    with pytest.raises(Fa4Error, match="no splits on SM90"):
        reader(Kernel()).read(replace(CAUSAL, num_splits=3), THREE)


@pytest.mark.parametrize("layout", [PAGED, VARLEN, BATCHED])
def test_the_numeric_oracle_agrees_with_a_right_kernel(layout: str) -> None:
    call = replace(CAUSAL, layout=layout, sink=True, softcap=3.0, q_heads=4)
    numerics = reader(Kernel()).measure(call, THREE)
    assert numerics.agrees and numerics.out > 0


def test_the_numeric_oracle_sees_a_missing_softcap() -> None:
    class Uncapped(Kernel):
        def launch(self, call: Call, on: Any, **given: Any) -> None:
            super().launch(replace(call, softcap=0.0), on, **given)

    call = replace(CAUSAL, softcap=0.5)
    assert not reader(Uncapped()).measure(call, lengths((30, 60))).agrees


def test_the_numeric_oracle_is_blind_to_one_key_of_many() -> None:
    sequences = lengths((1, 2048))
    call = call_of("causal", kv_heads=1, q_heads=1, head_dim_v=128)
    kernel = planted(0, 0, 0, 77, 0.0)
    assert reader(kernel).measure(call, sequences).out < 2e-2
    assert Wrong(0, 0, 0, 77, "loss") in reader(kernel).read(call, sequences).wrong


COMPILE = """
import numpy as np
from triton import compile, language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.comparison import compare, screen
from kernels.fa4 import Call
from kernels.readout import formula_of
from spec.to_triton import to_triton

pointers = dict.fromkeys("row_sequence row_q seqlens_q seqlens_k offsets_q offsets_k before seen "
                         "words suspects listed records by_sequence".split(), "*i32")
sizes = dict.fromkeys("rows guard first HEADS RATIO GROUPS LAUNCH LAST TURN".split(), "i32")
types = {**pointers, **sizes, "out": "*i16", "lse": "*fp32", "extra": "*fp32", "found": "*i64",
         "numbers": "*i64"}
call = Call(provider="upstream", spec="mm_prefix | chunked_local")
term = formula_of(call, {"ranges": np.zeros((1, 2, 2))})
for kernel, bits, half in ((screen, 32, True), (screen, 64, False), (compare, 32, False)):
    of_row, visible = to_triton(term, bits)
    values = dict(
        of_row=of_row, visible=visible, WIDE=getattr(tl, f"int{bits}"), HALF=half, DV=96, SPAN=32,
        NEGATIVE=half, STRIPE=8, COLUMNS=128, CAPACITY=8, ROWS=4, WEIGHT_TOLERANCE=0.02,
        LSE_TOLERANCE=1e-5,
    )
    names = kernel.arg_names
    source = ASTSource(
        kernel, {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in values.items() if name in names},
    )
    done = compile(source, target=GPUTarget("cuda", 90, 32))
    print("ptx" in done.asm)
"""


def test_the_comparison_compiles_for_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr[-2000:]


# Two sizes of everything that a launch may vary in; `prepare` sees a third. An argument that a
# kernel is launched with makes it compile as `prepare` did, or anew.
AHEAD = """
import sys
import numpy as np
from kernels.fa4 import BATCHED, VARLEN, Call, Sequences
from kernels.readout import EVERY, SLOTS, Idle, Reader

class Source(Idle):
    fa4, compiled = "none", 0

    def layout(self, call):
        return ("query_ranges", "cu_seqlens_q") if call.mask_mod else ()

    def compile(self, call, sequences):
        self.compiled += 1

def some(count, longest):
    lengths = np.arange(count, dtype=np.int32) % longest + 1
    return Sequences(lengths, lengths, {"ranges": np.zeros((count, 3, 2), np.int32)})

reader = Reader(Source(), device="cpu", limit=77)
own = Call(provider="upstream", spec="mm_prefix", mask_mod="maskproof/mm_prefix[window]",
           params={"window": 5}, kv_heads=2, q_heads=6, head_dim_v=32, page_size=16)
calls = [(own, {}), (Call(provider="upstream", spec="causal", layout=BATCHED), {}),
         (Call(provider="upstream", spec="causal", layout=VARLEN, dtype="fp16"), {}),
         (Call(provider="upstream", spec="causal", q_heads=2), {"heads": EVERY, "nan": SLOTS})]
if sys.argv[1] == "ahead":
    for call, options in calls:
        reader.prepare(call, some(5, 2), **options)
    print(reader.source.compiled)
else:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
    from kernels.ahead import Target
    driver.set_active(Target(90))
    JITFunction.__getitem__ = lambda self, grid: (
        lambda *given, **constants: self.warmup(*given, grid=grid, **constants))
    import kernels.readout
    for wide in (False, True):
        kernels.readout.is_wide = lambda *_: wide
        for call, options in calls:
            for sequences in (some(1, 1), some(6, 3), some(11, 100)):
                reader.start(call, sequences, **options)
"""


def run_ahead(cache: Path, what: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AHEAD, what], cwd=ROOT, capture_output=True,
        text=True, timeout=600,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if what == "ahead":
        assert done.stdout.split() == ["4"]
    return {file.parent.name + file.stem for file in cache.rglob("*.cubin")}


def test_what_is_prepared_is_all_that_a_launch_needs(tmp_path: Path) -> None:
    made = run_ahead(tmp_path, "ahead")
    kernels = {name[52:] for name in made}
    assert kernels == {"screen", "compare", "place_rows", "place_pages", "place_ranges"}
    assert run_ahead(tmp_path, "launch") == made
