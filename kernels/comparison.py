"""Triton kernels that hold the output of an attention kernel against a formula, cell by cell.

A row is one query of one sequence; the output holds, for each row and query head, `DV` weights:
those of the keys `first + kv_head * DV` and on. What differs is counted, and the first records are
kept. What was looked at is poisoned, for the next launch to write over. `screen` is fast and finds
the rows that are not right; `compare` says of those what is wrong.
"""

import triton
import triton.language as tl

LEAK, LOSS, DOUBLE, EMPTY_ROW, LSE, UNWRITTEN, NAN, OVERRUN = range(1, 9)
KINDS = {
    LEAK: "leak", LOSS: "loss", DOUBLE: "double", EMPTY_ROW: "empty-row", LSE: "lse",
    UNWRITTEN: "unwritten", NAN: "nan", OVERRUN: "overrun",
}
# A quiet NaN that no kernel computes, in bfloat16 and in float16, and one in float32.
POISON = 0x7FDA
LSE_POISON = 0x7FDADADA
FIELDS = 5  # of a record: sequence, head, query, key, kind

_leak, _loss, _double, _empty_row = map(tl.constexpr, (LEAK, LOSS, DOUBLE, EMPTY_ROW))
_lse, _unwritten, _nan, _overrun = map(tl.constexpr, (LSE, UNWRITTEN, NAN, OVERRUN))
_poison, _lse_poison = tl.constexpr(POISON), tl.constexpr(LSE_POISON)
_fields, _kinds = tl.constexpr(FIELDS), tl.constexpr(len(KINDS))
_least_subnormal = tl.constexpr(2.0**-24)
_minus_infinity = tl.constexpr(float("-inf"))


@triton.jit
def report(kind, sequence, head, q_idx, kv, found, records, by_sequence, CAPACITY: tl.constexpr):
    """Counts what is not 0 in `kind`, and keeps as many records as there is room for."""
    wrong = kind != 0
    total = tl.sum(tl.sum(wrong.to(tl.int32), axis=1), axis=0)
    if total > 0:
        size: tl.constexpr = kind.shape[0] * kind.shape[1]
        flat = tl.reshape(wrong.to(tl.int32), [size])
        place = tl.reshape(tl.cumsum(flat, axis=0) - 1, kind.shape)
        at = tl.atomic_add(found, total.to(tl.int64)) + place
        keep = wrong & (at < CAPACITY)
        to = records + at * _fields
        tl.store(to, tl.broadcast_to(sequence, kind.shape), mask=keep)
        tl.store(to + 1, tl.zeros_like(kind) + head, mask=keep)
        tl.store(to + 2, tl.broadcast_to(q_idx, kind.shape), mask=keep)
        tl.store(to + 3, tl.broadcast_to(kv, kind.shape), mask=keep)
        tl.store(to + 4, kind, mask=keep)
        for each in range(1, _kinds + 1):
            of_kind = tl.sum(tl.sum((kind == each).to(tl.int32), axis=1), axis=0)
            tl.atomic_add(found + each, of_kind.to(tl.int64))
        here = tl.sum(wrong.to(tl.int32), axis=1, keep_dims=True)
        tl.atomic_add(by_sequence + sequence, here, mask=(here > 0) & (sequence >= 0))


@triton.jit
def value(bits, HALF: tl.constexpr):
    """The number that 16 bits are, and whether it is finite."""
    if HALF:
        # 5 bits of exponent, of which 0 is that of the subnormals.
        exponent = (bits >> 10) & 31
        mantissa = (bits & 1023).to(tl.float32)
        power = ((exponent + 102) << 23).to(tl.float32, bitcast=True)
        size = tl.where(exponent == 0, mantissa * _least_subnormal, (1024 + mantissa) * power)
        finite = exponent != 31
    else:
        size = ((bits & 0x7FFF) << 16).to(tl.float32, bitcast=True)
        finite = (bits & 0x7F80) != 0x7F80
    return tl.where(bits >= 0x8000, -size, size), finite


@triton.jit
def bits_of(weight, HALF: tl.constexpr):
    """The 16 bits nearest to a positive float32."""
    if HALF:
        bits = weight.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = (weight.to(tl.int32, bitcast=True) + 0x8000) >> 16
    return bits


@triton.jit
def judge(
    out, lse, rows, guard, row, sequence, seqlen_k, known, first, head, HEADS, RATIO,
    visible: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, DV: tl.constexpr,
    COLUMNS: tl.constexpr, WEIGHT_TOLERANCE: tl.constexpr,
):
    """The kind of each cell, 0 where it is right; its key; whether it weighs, and is no number."""
    column = tl.arange(0, COLUMNS)[None, :]
    is_row, live = row < rows, sequence >= 0
    there = (row < rows + guard) & (column < DV)
    log = tl.load(lse + head * rows.to(tl.int64) + row, mask=is_row, other=0.0)
    at = out + (row.to(tl.int64) * HEADS + head) * DV + column
    bits = tl.load(at, mask=there, other=_poison).to(tl.int32) & 0xFFFF
    weight, finite = value(bits, HALF)
    weighs = (bits & 0x7FFF) != 0
    kv = first + (head // RATIO) * DV + column
    whose = tl.zeros((1, 1), WIDE) + head
    expected = live & there & (kv >= 0) & (kv < seqlen_k) & visible(whose, kv.to(WIDE), known)
    known = (log > -1.0) & (log < 100.0)
    uneven = tl.abs(weight * tl.exp(tl.where(known, log, 0.0)) - 1) > WEIGHT_TOLERANCE
    kind = tl.where(expected, tl.where(weighs, tl.where(uneven & known, _double, 0), _loss),
                    tl.where(weighs, _leak, 0))
    kind = tl.where(finite, kind, tl.where(bits == _poison, _unwritten, _nan))
    kind = tl.where(live & there, kind, 0)
    kind = tl.where(~is_row & there & (bits != _poison), _overrun, kind)
    return kind, kv, weighs & finite & live & there, ~finite & live & there


@triton.jit
def judge_row(log, extra, sequence, count, head, HEADS, LSE_TOLERANCE: tl.constexpr):
    """The kind of each row as a whole. A `count` below 0 is of a row that is known to be wrong."""
    total = count.to(tl.float32) + tl.load(extra + head, mask=head < HEADS, other=0)
    empty = total == 0
    off = tl.abs(log - tl.log(tl.where(total > 0, total, 1.0))) > LSE_TOLERANCE
    kind = tl.where(off | (log == _minus_infinity), _lse, 0)
    kind = tl.where(empty, tl.where(log == _minus_infinity, 0, _empty_row), kind)
    kind = tl.where(count < 0, 0, kind)
    kind = tl.where(log != log, _nan, kind)
    kind = tl.where(log.to(tl.int32, bitcast=True) == _lse_poison, _unwritten, kind)
    return tl.where((sequence >= 0) & (head < HEADS), kind, 0)


_SIZES = [
    "rows", "guard", "first", "HEADS", "RATIO", "GROUPS", "LAUNCH", "LAST", "TURN",
]  # fmt: skip


@triton.jit
def words_of(words, start, left, word, is_row):
    """Some words of the output, which nobody reads again."""
    return tl.load(words + (start + left + word), mask=is_row, other=0,
                   eviction_policy="evict_first")


@triton.jit(do_not_specialize=_SIZES)
def screen(
    words, lse, rows, guard, row_sequence, row_q, seqlens_q, seqlens_k, offsets_q, offsets_k, extra,
    before, seen, suspects, listed, numbers, first, HEADS, RATIO, GROUPS, LAUNCH, LAST, TURN,
    of_row: tl.constexpr, visible: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    DV: tl.constexpr, SPAN: tl.constexpr, NEGATIVE: tl.constexpr, ROWS: tl.constexpr,
    STRIPE: tl.constexpr, LSE_TOLERANCE: tl.constexpr,
):
    """Whether all is as it should be in `ROWS` rows, by one program: else they are listed in
    `suspects`, int32 [programs], as one more of `listed`, int32 [launches], and `compare` is to say
    what is wrong. It asks for no less than `compare` does.

    words: the output [rows + guard, HEADS, DV], int32 for two of its numbers; lse: float32 [HEADS,
    rows]; row_sequence, row_q: int32 [rows], -1 for a row that belongs to no sequence; seqlens_*,
    offsets_*: int32 by sequence; extra: float32 [HEADS], what a sink adds to the sum of a row.
    `RATIO` query heads share a key head. The heads of one of the `GROUPS` see different keys and
    share a count of visible ones, int32 [rows, GROUPS], that each `LAUNCH` from 0 to the `LAST`
    takes from `before` and puts into `seen`. `SPAN` columns, which divide `DV`, are looked at at
    once. `NEGATIVE` where a head may lie before the first key.

    Of what is right every second stripe of `STRIPE` words is poisoned again, the other half at the
    next `TURN`; neighbouring rows begin with different halves. What is then left unwritten in a
    stretch longer than a stripe is found at once, and in a shorter one at every second turn at
    least: in between it holds what an earlier launch wrote there. That is compared as any other
    value, so that no cell that differs passes.
    """
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    start = row.to(tl.int64)[:, None] * HEADS * (DV // 2)
    word = tl.arange(0, SPAN // 2)[None, :]
    # The output is under way before what it depends on is known.
    coming = words_of(words, start, 0, word, is_row[:, None])
    sequence = tl.load(row_sequence + row, mask=is_row, other=-1)
    live = sequence >= 0
    q_idx = tl.load(row_q + row, mask=is_row, other=-1)
    seqlen_q = tl.load(seqlens_q + sequence, mask=live, other=0)
    seqlen_k = tl.load(seqlens_k + sequence, mask=live, other=0)
    offset_q = tl.load(offsets_q + sequence, mask=live, other=0)
    offset_k = tl.load(offsets_k + sequence, mask=live, other=0)
    known = of_row(
        sequence.to(WIDE), q_idx.to(WIDE), seqlen_q.to(WIDE), seqlen_k.to(WIDE), offset_q.to(WIDE),
        offset_k.to(WIDE), numbers,
    )
    suspect = tl.zeros((ROWS,), tl.int32)
    none = tl.zeros((1, 1), tl.int32)
    end = seqlen_k[:, None]
    spans: tl.constexpr = DV // SPAN
    width = HEADS // GROUPS * spans
    # Of the heads of a group each has a key head of its own, or a group has one head.
    apart = GROUPS // RATIO
    for group in range(GROUPS):
        lowest = first + group // RATIO * DV
        log = tl.load(lse + group * rows.to(tl.int64) + row, mask=live, other=0.0)
        # 1/n may be rounded otherwise than here; `compare` then finds nothing. It is not 0.
        share = tl.maximum(bits_of(tl.exp(-log), HALF) & 0xFFFF, 1)
        low_share, high_share = share[:, None], share[:, None] << 16
        wrong = tl.zeros((ROWS, SPAN // 2), tl.int32)
        total = tl.zeros((ROWS, SPAN // 2), tl.int32)
        parted = tl.zeros((ROWS,), tl.int32)
        for i in range(width):
            here = coming
            # The next span of this group or, after the last, the first of the next one.
            follows = tl.where(i + 1 == width, 0, i + 1)
            left = follows // spans * GROUPS + group + tl.where(i + 1 == width, 1, 0)
            left = left * (DV // 2) + follows % spans * (SPAN // 2)
            more = none + (GROUPS - 1 - group) * width + (width - 1 - i)
            coming = words_of(words, start, left, word, is_row[:, None] & (more > 0))
            head = i // spans * GROUPS + group
            kv = lowest + i // spans * apart * DV + i % spans * SPAN + 2 * word
            whose = none.to(WIDE) + head
            low = (kv < end) & visible(whose, kv.to(WIDE), known)
            high = (kv + 1 < end) & visible(whose, kv.to(WIDE) + 1, known)
            if NEGATIVE:
                low, high = low & (kv >= 0), high & (kv >= -1)
            wrong |= here ^ (tl.where(low, low_share, 0) | tl.where(high, high_share, 0))
            # Where none is wrong, as many shares as there are visible keys.
            total += (here & 0xFFFF) + (here >> 16)
            same = tl.load(lse + head * rows.to(tl.int64) + row, mask=live, other=0.0)
            parted |= same.to(tl.int32, bitcast=True) ^ log.to(tl.int32, bitcast=True)
        at = row.to(tl.int64) * GROUPS + group
        earlier = tl.load(before + at, mask=is_row & (row * 0 + LAUNCH != 0), other=0)
        suspect |= tl.max((wrong != 0).to(tl.int32), axis=1) | parted
        # Below 0 once a number of the row is none: then the row has no sum to speak of.
        count = tl.sum(total, axis=1) // share
        count = tl.where(earlier < 0, -1, earlier + count)
        tl.store(seen + at, count, mask=is_row & (row * 0 + LAST == 0))
        if LAST != 0:
            # One head of the group speaks for those that have the same LSE.
            suspect |= judge_row(log, extra, sequence, count, row * 0 + group, HEADS, LSE_TOLERANCE)
    worst = tl.max((live & (suspect != 0)).to(tl.int32), axis=0)
    if (worst > 0) | (tile * ROWS + ROWS > rows):
        tl.store(suspects + tl.atomic_add(listed + LAUNCH, 1), tile)
    else:
        poison = tl.full((ROWS, SPAN // 2), _poison * 65537, tl.int32)
        for left in range(0, HEADS * (DV // 2), SPAN // 2):
            due = (((left + word) // STRIPE + row[:, None] + TURN) & 1) == 0
            tl.store(words + (start + left + word), poison, mask=due,
                     eviction_policy="evict_first")


@triton.jit(do_not_specialize=_SIZES)
def compare(
    out, lse, rows, guard, row_sequence, row_q, seqlens_q, seqlens_k, offsets_q, offsets_k, extra,
    before, seen, suspects, listed, found, records, by_sequence, numbers, first,
    HEADS, RATIO, GROUPS, LAUNCH, LAST, TURN,
    of_row: tl.constexpr, visible: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    DV: tl.constexpr, COLUMNS: tl.constexpr, CAPACITY: tl.constexpr, ROWS: tl.constexpr,
    WEIGHT_TOLERANCE: tl.constexpr, LSE_TOLERANCE: tl.constexpr,
):
    """What is wrong in the rows that `screen` listed, and in the `guard` rows behind the last.
    out: int16 bits; found: int64, the total and one count a kind; records: int32 [CAPACITY,
    FIELDS]. What was looked at is poisoned again."""
    for place in range(tl.program_id(0), tl.load(listed + LAUNCH), tl.num_programs(0)):
        row = tl.load(suspects + place) * ROWS + tl.arange(0, ROWS)
        sequence = tl.load(row_sequence + row, mask=row < rows, other=-1)
        live = sequence >= 0
        q_idx = tl.load(row_q + row, mask=row < rows, other=-1)
        seqlen_q = tl.load(seqlens_q + sequence, mask=live, other=0)
        seqlen_k = tl.load(seqlens_k + sequence, mask=live, other=0)
        offset_q = tl.load(offsets_q + sequence, mask=live, other=0)
        offset_k = tl.load(offsets_k + sequence, mask=live, other=0)
        known = of_row(
            sequence.to(WIDE), q_idx.to(WIDE), seqlen_q.to(WIDE), seqlen_k.to(WIDE),
            offset_q.to(WIDE), offset_k.to(WIDE), numbers,
        )
        row, sequence, live = row[:, None], sequence[:, None], live[:, None]
        q_idx, seqlen_k = q_idx[:, None], seqlen_k[:, None]
        nowhere = tl.full((ROWS, 1), -1, tl.int32)
        column = tl.arange(0, COLUMNS)[None, :]
        for group in range(GROUPS):
            weighed = tl.zeros((ROWS, COLUMNS), tl.int32)
            spoiled = tl.zeros((ROWS, COLUMNS), tl.int32)
            for member in range(HEADS // GROUPS):
                head = member * GROUPS + group
                kind, kv, weighs, spoils = judge(
                    out, lse, rows, guard, row, sequence, seqlen_k, known, first, head, HEADS,
                    RATIO, visible, WIDE, HALF, DV, COLUMNS, WEIGHT_TOLERANCE,
                )
                report(kind, sequence, head, q_idx, kv, found, records, by_sequence, CAPACITY)
                weighed += weighs.to(tl.int32)
                spoiled |= spoils.to(tl.int32)
                to = out + (row.to(tl.int64) * HEADS + head) * DV + column
                poison = tl.full((ROWS, COLUMNS), _poison, tl.int16)
                tl.store(to, poison, mask=(row < rows + guard) & (column < DV))
            # `screen` counted what is to be visible; this is what is.
            at = row.to(tl.int64) * GROUPS + group
            earlier = (row < rows) & (tl.zeros((1, 1), tl.int32) + LAUNCH != 0)
            count = tl.load(before + at, mask=earlier, other=0)
            none = (tl.max(spoiled, axis=1, keep_dims=True) > 0) | (count < 0)
            count = tl.where(none, -1, count + tl.sum(weighed, axis=1, keep_dims=True))
            tl.store(seen + at, count, mask=row < rows)
            if LAST != 0:
                for each in range(HEADS // GROUPS):
                    whose = tl.zeros((1, 1), tl.int32) + each * GROUPS + group
                    log = tl.load(lse + whose * rows.to(tl.int64) + row, mask=live, other=0.0)
                    as_row = judge_row(log, extra, sequence, count, whose, HEADS, LSE_TOLERANCE)
                    report(
                        as_row, sequence, whose, q_idx, nowhere, found, records, by_sequence,
                        CAPACITY,
                    )


@triton.jit(do_not_specialize=["sequences"])
def place_rows(row_sequence, row_q, cu_seqlens_q, sequences, BLOCK: tl.constexpr):
    """The sequence and the query of each packed row, by one program a sequence."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens_q + sequence)
    end = tl.load(cu_seqlens_q + sequence + 1)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(row_sequence + row, tl.zeros_like(row) + sequence, mask=row < end)
        tl.store(row_q + row, row - begin, mask=row < end)


@triton.jit(do_not_specialize=["width", "size", "keys", "step", "zero", "tails", "first"])
def place_pages(
    table, seqlens_k, width, size, keys, step, zero, tails, first, BLOCK: tl.constexpr
):
    """A row of the page table, by one program a sequence: see `kernels.readout.Pages`."""
    sequence = tl.program_id(0)
    length = tl.load(seqlens_k + sequence)
    for start in range(0, width, BLOCK):
        page = start + tl.arange(0, BLOCK)
        shift = page * size - first
        shown = (shift > -size) & (shift < keys)
        place = tl.where(shown, (shift + size - step) // step, zero)
        used = length - page * size
        tail = zero + 2 + place * (size - 1) + used - 1
        place = tl.where((tails != 0) & (used < size), tail, place)
        place = tl.where(used > 0, place, zero + 1)
        # A kernel with a mask_mod looks at the first page even of a sequence without keys.
        place = tl.where((length <= 0) & (page == 0), zero, place)
        tl.store(table + sequence * width + page, place, mask=page < width)


@triton.jit(do_not_specialize=["num_ranges"])
def place_ranges(own, ranges, cu_seqlens_q, seqlens_k, num_ranges, BLOCK: tl.constexpr):
    """`query_ranges` of a sequence, by one program: see `kernels.derived.place_own_rows`."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens_q + sequence)
    end = tl.load(cu_seqlens_q + sequence + 1)
    before = tl.load(seqlens_k + sequence) - end
    at = ranges + sequence.to(tl.int64) * num_ranges * 2
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        q = row + before
        left, right = tl.full([BLOCK], -1, tl.int32), tl.full([BLOCK], -1, tl.int32)
        longest = tl.full([BLOCK], -1, tl.int64)
        for r in range(num_ranges):
            first = tl.load(at + 2 * r)
            last = tl.load(at + 2 * r + 1)
            size = last.to(tl.int64) - first
            better = (first <= q) & (q <= last) & (size > longest)
            longest = tl.where(better, size, longest)
            left, right = tl.where(better, first, left), tl.where(better, last, right)
        to = own + row.to(tl.int64) * 2
        tl.store(to, left, mask=row < end)
        tl.store(to + 1, right, mask=row < end)
