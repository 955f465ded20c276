"""The exact mask that a compiled kernel applies, read cell by cell out of its output.

With Q = K = 0 every visible key of a row weighs the same, and with V one-hot over the position of
the key the output row is 1/n on its n visible keys and 0 elsewhere. LSE = log n is a second
witness. A launch shows `kv_heads * head_dim_v` keys, a chunk of `head_dim_v` a head; what is longer
takes several. Where the keys are paged, all sequences share a few pages of identity matrices.

The formula is evaluated on the device by the kernel that reads the output (`kernels.comparison`);
only what is wrong comes back. Memory is bounded: batches are cut where it would not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.ahead import ahead, is_fake, launch
from kernels.derived import BLOCK, differs_by_head, formula_of, on_device
from kernels.fa4 import (
    BATCHED,
    MANY,
    PAGED,
    VARLEN,
    Call,
    Fa4Error,
    Resident,
    Sequences,
    provider,
    shapes,
    supported,
)  # fmt: skip
from kernels.guarded import AT_END, Guarded
from kernels.numerics import Numerics, measure
from kernels.pages import NOWHERE, SLOTS, UNUSED, Pages, pages
from spec.domain import COORDINATES, INDICES
from spec.term import Term, symbols
from spec.to_triton import LONGEST, fits_int32, numbers_of, to_triton

if TYPE_CHECKING:
    import torch

__all__ = [
    "EVERY", "NOWHERE", "SHARED", "SLOTS", "UNUSED", "Numerics", "Pending", "Reader", "Reading",
    "Wrong", "formula_of", "read",
]  # fmt: skip
# Whether all heads are taken to apply one mask, so that they read different keys, or each is read.
SHARED, EVERY = "shared", "every"
# Rows behind the last one, which a kernel must leave as they are.
GUARD = 64
# Cells that one program of the comparison looks at at once, and keys of a row, a power of two;
# its rows at most, and its warps. The fastest of those tried on an H200.
TILE, SPAN, MOST_ROWS, WARPS = 512, 128, 32, 1
# Others to try, and with each how many words lie between what is poisoned again.
SIZES = (
    (512, 128, 1, 32), (512, 128, 1, 8), (256, 128, 1, 32), (1024, 128, 1, 32), (1024, 128, 2, 32),
    (512, 64, 1, 32), (2048, 128, 4, 32),
)  # fmt: skip
STRIPE = 32
# Programs that say what is wrong with what the others list.
COMPARING = 2048
# Room for what a formula reads besides coordinates: parameters, and addresses and sizes of tables.
NUMBERS = 256
# A weight is 1/n rounded to the output's dtype: to 8 bits in bfloat16, to 7 in float16 where n is
# 147,456. A key that counts twice weighs twice as much.
WEIGHT_TOLERANCE = 0.02
# LSE = log n comes from the hardware's approximate logarithm.
LSE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, order=True)
class Wrong:
    """One cell that is not as the spec says. A row as a whole has `kv` -1.

    `kind` is leak (visible, and should be hidden), loss (hidden, and should be visible), double
    (a weight that is not 1/n), empty-row (no visible key, and not LSE = -inf), lse (not log n),
    unwritten, nan (or infinite), or overrun (written behind the last row, `sequence` -1).
    """

    sequence: int
    head: int
    q: int
    kv: int
    kind: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a read-out found. `counts` are by kind and `by_sequence` by sequence, complete; `wrong`
    holds some of them, in order. `cells` are of a sequence, a head, a query and a key."""

    cells: int
    rows: int
    launches: int
    wrong: tuple[Wrong, ...]
    counts: Mapping[str, int]
    by_sequence: Mapping[int, int]
    kernel_seconds: float
    compare_seconds: float
    fa4: str

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Reader:
    """Reads masks out of one provider's kernels. It keeps buffers and compiled comparisons."""

    def __init__(
        self, source: Any, *, device: str = "cuda", limit: int = 1000, memory: int = 8 << 30
    ) -> None:
        """`source` is a `Provider`, or has its `launch`, `layout`, `compile` and `fa4`. At most
        `limit` wrong cells of a batch are kept; outputs and one-hot values take at most about
        `memory` bytes, of one sequence as many as it needs."""
        self.source, self.device, self.limit, self.memory = source, device, limit, memory
        self._buffers: dict[Any, torch.Tensor] = {}
        self._pages: dict[tuple[Any, ...], Pages] = {}
        self._guarded = Guarded(device)
        self._turn = 0

    def read(
        self, call: Call, sequences: Sequences, *, heads: str = SHARED, nan: str = UNUSED,
        guard: str | None = None,
    ) -> Reading:
        """The mask of every cell, held against the call's spec.

        `nan` says where, of paged keys, K and V hold NaN: NOWHERE, in the UNUSED pages, or also in
        the unused SLOTS of a sequence's last page, which else go on with the values that would show
        a leak. With `guard` each aux tensor lies at an edge of mapped memory, with its end (AT_END)
        or its start (AT_START): a read beyond that ends with an illegal access. Raises Fa4Error for
        a call that the provider does not do.
        """
        return self.start(call, sequences, heads=heads, nan=nan, guard=guard).finish()

    def start(
        self, call: Call, sequences: Sequences, *, heads: str = SHARED, nan: str = UNUSED,
        guard: str | None = None,
    ) -> Pending:
        """As `read`, without waiting for the device."""
        if reason := supported(call):
            raise Fa4Error(reason)
        layout = self.source.layout(call)
        term = formula_of(call, sequences.tables, layout)
        if differs_by_head(term):
            heads = EVERY
        parts = []
        for first, last in self._batches(call, sequences):
            whole = (first, last) == (0, len(sequences))
            part = sequences if whole else sequences.select(slice(first, last))
            try:
                wide = is_wide(call, part, term)
                parts.append(
                    self._enqueue(call, layout, part, term, wide, heads, nan, guard, first))
            except BaseException:
                self._buffers.clear()  # what was to be poisoned may not be
                raise
        factor = call.q_heads if heads == EVERY else call.q_heads // call.kv_heads
        return Pending(
            tuple(parts), sequences.cells * factor, sequences.rows * call.q_heads, self.limit,
            self.source.fa4,
        )

    def prepare(
        self, call: Call, sequences: Sequences, *, heads: str = SHARED, nan: str = UNUSED,
        short: bool = False,
    ) -> None:
        """Compiles all that `start` launches for such a call into the caches on disk, of FA4 and of
        Triton, in a process that has no CUDA context and is given none.

        Of `sequences` only the names and ranks of their tables are looked at, how many ranges a
        sequence has, and whether there are more than MANY. `short` leaves out what only sequences
        of more than LONGEST tokens need. Raises what the compilers refuse with.
        """
        if reason := supported(call):
            raise Fa4Error(reason)
        layout = self.source.layout(call)
        term = formula_of(call, sequences.tables, layout)
        if differs_by_head(term):
            heads = EVERY
        count = MANY + 1 if len(sequences) > MANY else 2
        lengths = np.array([3] + [2] * (count - 1), np.int32)
        sample = Sequences(lengths, lengths, sequences.tables)
        self.source.compile(call, len(sequences))
        # What Triton compiles depends on no device that a tensor is on.
        blank = Reader(Idle(), device="cpu", limit=self.limit)
        with ahead(call.arch):
            for wide in is_wide_ahead(call, term) if short else (False, True):
                blank._enqueue(call, layout, sample, term, wide, heads, nan, None, 0)

    def _batches(self, call: Call, sequences: Sequences) -> Iterator[tuple[int, int]]:
        """Where to cut: runs of sequences that fit in memory together."""
        each = sequences.seqlens_q * np.int64(2 * call.q_heads * call.head_dim_v)
        if call.layout != PAGED:
            keys = sequences.seqlens_k.astype(np.int64)
            if call.layout == BATCHED:
                keys = np.full_like(keys, keys.max(initial=0))
            each = each + keys * (6 * call.kv_heads * (call.head_dim_v + call.head_dim))
        if each.sum() <= self.memory:
            yield 0, len(sequences)
            return
        first, used = 0, 0
        for b, size in enumerate(each.tolist()):
            if b > first and used + size > self.memory:
                yield first, b
                first, used = b, 0
            used += size
        yield first, len(sequences)

    def _enqueue(
        self, call: Call, layout: tuple[str, ...], sequences: Sequences, term: Term, wide: bool,
        heads: str, nan: str, edge: str | None, before: int,
    ) -> Part:
        import torch
        from triton import language as tl

        from kernels.comparison import FIELDS, LSE_POISON, compare, screen

        n = len(sequences)
        span = call.kv_heads * call.head_dim_v
        end = max(int(sequences.seqlens_k.max(initial=0)), 1)
        firsts = range(0, end, span)
        if heads == EVERY:
            firsts = range(call.head_dim_v - span, end, call.head_dim_v)
        on = self._sent(call, layout, sequences, term, len(firsts))
        records = self._new(self.limit * FIELDS, torch.int32)
        part = Part(
            before, on.more["found"].view(torch.int64), records.view(-1, FIELDS),
            on.more["by_sequence"], [],
        )
        row_sequence, row_q = self._rows(call, on)
        rows = len(row_sequence)
        if not rows:
            return part
        guard = GUARD if call.layout != BATCHED else 0
        given, bits = self._given(call, sequences, guard)
        fill = self._keys(call, on, given, nan)
        there = on
        if edge is not None and self.device != "cpu":
            there = self._guarded.tables(on, at_end=edge == AT_END)
        groups = call.q_heads if heads == EVERY else call.q_heads // call.kv_heads
        seen = self._pair(rows * groups)
        nowhere = self._zeros(max(n, 1), torch.int32)
        columns = gcd(SPAN, call.head_dim_v)
        block = min(TILE // columns, MOST_ROWS)
        programs = -(-(rows + guard) // block)
        suspects = self._new(programs, torch.int32)
        of_row, visible = to_triton(term, 64 if wide else 32)
        fixed = {
            "of_row": of_row, "visible": visible, "WIDE": tl.int64 if wide else tl.int32,
            "HALF": call.dtype == "fp16", "DV": call.head_dim_v, "ROWS": block,
            "LSE_TOLERANCE": LSE_TOLERANCE,
        }
        for i, first in enumerate(firsts):
            fill(first)
            given["lse"].view(torch.int32).fill_(LSE_POISON)
            times = [self._now()]
            self.source.launch(call, there, **given)
            times.append(self._now())
            data = (
                _by_head(call, given["lse"]), rows, guard, row_sequence, row_q,
                on.seqlens_q, on.seqlens_k,
                nowhere if call.layout == BATCHED else on.cu_seqlens_q,
                on.cu_seqlens_k if call.layout == VARLEN else nowhere,
                on.more["extra"].view(torch.float32), seen[i % 2], seen[1 - i % 2], suspects,
                on.more["listed"],
            )
            sizes = (
                on.more["numbers"].view(torch.int64), first, call.q_heads,
                call.q_heads // call.kv_heads, groups, i, int(first == firsts[-1]), self._turn,
            )
            self._turn = 1 - self._turn
            launch(
                screen, programs, bits.view(torch.int32), *data, *sizes, **fixed, SPAN=columns,
                NEGATIVE=heads == EVERY, STRIPE=STRIPE, num_warps=WARPS,
            )
            launch(
                compare, min(programs, COMPARING), bits, *data, part.found, records,
                part.by_sequence, *sizes, **fixed,
                COLUMNS=_power(call.head_dim_v), CAPACITY=self.limit,
                WEIGHT_TOLERANCE=WEIGHT_TOLERANCE, num_warps=WARPS,
            )
            part.times.append([*times, self._now()])
        return replace(part, result=self._returned(part.found), ready=self._now())

    def _given(
        self, call: Call, sequences: Sequences, guard: int
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """The tensors of a launch, and the bits of its output with the rows behind it."""
        from kernels.comparison import POISON

        given = {}
        for name, (shape, dtype) in shapes(call, sequences).items():
            size = int(np.prod(shape, dtype=np.int64))
            if name in ("q", "sink") or name == "k" and call.layout != PAGED:
                given[name] = self._zeros(size, dtype).view(shape)
            elif name == "lse" or name == "v" and call.layout != PAGED:
                given[name] = self._new(size, dtype).view(shape)
        shape, dtype = shapes(call, sequences)["out"]
        size = int(np.prod(shape, dtype=np.int64))
        bits = self._poisoned(size + guard * call.q_heads * call.head_dim_v)
        bits[size:].fill_(POISON)  # where rows were before, half of it is not
        given["out"] = bits[:size].view(dtype).view(shape)
        return given, bits

    def _rows(self, call: Call, on: Resident) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequence of each row of the output, or -1, and its query in that sequence."""
        import torch

        from kernels.comparison import place_rows

        n = len(on.sequences)
        if call.layout == BATCHED:
            every = torch.arange(n, dtype=torch.int32, device=self.device)
            longest = int(on.sequences.seqlens_q.max(initial=0))
            q = torch.arange(longest, dtype=torch.int32, device=self.device).expand(n, -1)
            sequence = torch.where(q < on.seqlens_q[:, None], every[:, None], -1)
            return sequence.flatten(), q.flatten()
        sequence, row = self._pair(on.sequences.rows)
        launch(place_rows, n, sequence, row, on.cu_seqlens_q, n, BLOCK=BLOCK)
        return sequence, row

    def _keys(
        self, call: Call, on: Resident, given: dict[str, Any], nan: str
    ) -> Callable[[int], None]:
        """A function that sets K and V for the launch whose first key it is told."""
        import torch

        if call.layout == PAGED:
            key = call.page_size, call.kv_heads, call.head_dim, call.head_dim_v, call.dtype, nan
            if key not in self._pages:
                self._pages[key] = pages(call, nan, self.device)
            shared = self._pages[key]
            width = shapes(call, on.sequences)["page_table"][0][1]
            given["k"], given["v"] = shared.k, shared.v

            def place_pages(first: int) -> None:
                given["page_table"] = shared.table(first, on.seqlens_k, width)

            return place_pages
        v = given["v"].flatten(-2)
        shown = torch.arange(v.shape[-1], device=self.device)
        place = torch.arange(v.shape[-2], device=self.device)
        if call.layout == VARLEN:
            sequence = torch.repeat_interleave(on.seqlens_k.long(), output_size=len(place))
            place = place - on.cu_seqlens_k[sequence]

        def place_ones(first: int) -> None:
            v.copy_((place - first)[:, None] == shown)

        return place_ones

    def measure(self, call: Call, sequences: Sequences, seed: int = 0) -> Numerics:
        """Random Q, K and V against a float32 reference: what a read-out cannot see."""
        return measure(self.source, self.device, call, sequences, seed)

    def _new(self, size: int, dtype: Any) -> torch.Tensor:
        import torch

        return torch.empty(size, dtype=dtype, device=self.device)

    def _pair(self, size: int) -> torch.Tensor:
        """Two rows of int32, each of which begins at a multiple of 16 bytes."""
        import torch

        return self._new(2 * (size + -size % 4), torch.int32).view(2, -1)[:, :size]

    def _zeros(self, size: int, dtype: Any) -> torch.Tensor:
        """Zeros that nobody writes to."""
        import torch

        held = self._buffers.get(dtype)
        if held is None or len(held) < size:
            held = torch.zeros(size + size // 4, dtype=dtype, device=self.device)
            self._buffers[dtype] = held
        return held[:size]

    def _poisoned(self, size: int) -> torch.Tensor:
        """Bits that are poison at first, and half of which are so when the comparison is done."""
        import torch

        from kernels.comparison import POISON

        held = self._buffers.get("out")
        if held is None or len(held) < size:
            held = torch.full(
                (size + size // 4,), POISON, dtype=torch.int16, device=self.device
            )
            self._buffers["out"] = held
        return held[:size]

    def _sent(
        self, call: Call, layout: tuple[str, ...], sequences: Sequences, term: Term, launches: int
    ) -> Resident:
        """Sequences, the numbers that the formula reads, and zeros to count in."""
        from kernels.comparison import KINDS

        more = {
            "numbers": np.zeros(2 * NUMBERS, np.int32),
            "found": np.zeros(2 * (len(KINDS) + 1), np.int32),
            "listed": np.zeros(launches, np.int32),
            "by_sequence": np.zeros(max(len(sequences), 1), np.int32),
            # The sink is 0, as good as one more key.
            "extra": np.full(call.q_heads, float(call.sink), np.float32).view(np.int32),
        }

        def finish(tables: Mapping[str, Any], here: Mapping[str, Any]) -> None:
            numbers = numbers_of(term, {**call.params, **tables})
            here["numbers"].view(np.int64)[: len(numbers)] = numbers

        return on_device(call, layout, sequences, self.device, more, finish)

    def _returned(self, found: torch.Tensor) -> torch.Tensor:
        """On its way to the host, where it is once all that was enqueued before has run."""
        import torch

        if self.device == "cpu" or is_fake():
            return found
        there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return there.copy_(found, non_blocking=True)

    def _now(self) -> Any:
        import torch

        if self.device == "cpu" or is_fake():
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Idle:
    """A source whose kernels are compiled elsewhere."""

    def launch(self, call: Call, on: Resident, **given: Any) -> None: ...


def is_wide(call: Call, sequences: Sequences, term: Term) -> bool:
    """Whether the formula is computed in 64 bits."""
    longest = max(sequences.seqlens_q.max(initial=0), sequences.seqlens_k.max(initial=0))
    return bool(longest > LONGEST) or not fits_int32(term, call.params)


def is_wide_ahead(call: Call, term: Term) -> tuple[bool, ...]:
    """What `is_wide` may say of short sequences, with the parameters that the call has."""
    if symbols(term) - COORDINATES - INDICES - call.params.keys():
        return False, True
    return (not fits_int32(term, call.params),)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _by_head(call: Call, lse: Any) -> Any:
    """LSE as [heads, rows]; batched it is [n, heads, longest]."""
    return lse.transpose(0, 1).reshape(call.q_heads, -1) if call.layout == BATCHED else lse


@dataclass(frozen=True, slots=True)
class Part:
    """What the device is to find in some of the sequences, the first of which is `before`."""

    before: int
    found: torch.Tensor
    records: torch.Tensor
    by_sequence: torch.Tensor
    times: list[list[Any]]
    result: torch.Tensor | None = None
    ready: Any = None


@dataclass(frozen=True, slots=True)
class Pending:
    """A read-out that the device may still be at."""

    parts: tuple[Part, ...]
    cells: int
    rows: int
    limit: int
    fa4: str

    def finish(self) -> Reading:
        """Waits for the device. Raises what the kernel ended with."""
        from kernels.comparison import KINDS

        counts: dict[str, int] = {}
        wrong: list[Wrong] = []
        by_sequence: dict[int, int] = {}
        for part in self.parts:
            if part.result is None:
                continue
            if not isinstance(part.ready, float):
                part.ready.synchronize()
            total, *kinds = part.result.tolist()
            if not total:
                continue
            for kind, count in zip(KINDS.values(), kinds, strict=True):
                if count:
                    counts[kind] = counts.get(kind, 0) + count
            each = part.by_sequence.cpu().numpy()
            by_sequence |= {part.before + int(b): int(each[b]) for b in np.flatnonzero(each)}
            for b, head, q, kv, kind in part.records[: min(total, self.limit)].tolist():
                wrong.append(Wrong(b + part.before if b >= 0 else b, head, q, kv, KINDS[kind]))
        seconds = [_seconds(*times) for part in self.parts for times in part.times]
        return Reading(
            self.cells, self.rows, len(seconds), tuple(sorted(wrong)[: self.limit]), counts,
            by_sequence, sum(kernel for kernel, _ in seconds),
            sum(compare for _, compare in seconds), self.fa4,
        )


def _seconds(begin: Any, between: Any, end: Any) -> tuple[float, float]:
    if isinstance(begin, float):
        return between - begin, end - between
    return begin.elapsed_time(between) / 1000, between.elapsed_time(end) / 1000


def read(call: Call, sequences: Sequences, **options: Any) -> Reading:
    """One read-out by a provider that is opened for it."""
    with provider(call.provider) as source:
        return Reader(source).read(call, sequences, **options)
