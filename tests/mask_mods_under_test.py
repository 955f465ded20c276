"""Mask_mods of every kind that FA4's own repository tests with, and some that provoke a lifter.

`CASES` lists them. A packed one answers for `vec` adjacent keys with bits of Uint32 words; where
it holds inline PTX, which no CPU runs, its scalar `twin` says what each key should get.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from flash_attn.cute.mask import r2p_bitmask_above, r2p_bitmask_below
from flash_attn.cute.utils import scalar_to_ssa, shl_u32, shr_u32, ssa_to_scalar

from kernels.target import Target

BLOCK = 5
ALL = 0xFFFFFFFF


def answer(visible: Any) -> Any:
    return scalar_to_ssa(visible, Boolean)


@cute.jit
def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    offset = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
    return kv_idx <= q_idx + offset


def sliding_window(left, right):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        middle = q_idx + scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        low = middle - scalar_to_ssa(left, Int32)
        high = middle + scalar_to_ssa(right, Int32)
        return (low <= kv_idx) & (kv_idx <= high)

    return mask_mod


@cute.jit
def block_diagonal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    size = scalar_to_ssa(BLOCK, Int32)
    return (q_idx // size) == (kv_idx // size)


@cute.jit
def block_causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    size = scalar_to_ssa(BLOCK, Int32)
    return (q_idx // size) >= (kv_idx // size)


def block_diagonal_of(size):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return answer(q_idx[0] // size == kv_idx[0] // size)

    return mask_mod


@cute.jit
def mini_causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    size = scalar_to_ssa(BLOCK, Int32)
    return (kv_idx % size) <= (q_idx % size)


@cute.jit
def prefix_lm(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    prefix = scalar_to_ssa(7, Int32)
    return ((q_idx < prefix) & (kv_idx < prefix)) | (kv_idx <= q_idx)


@cute.jit
def dilated(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    distance = q_idx - kv_idx
    zero = scalar_to_ssa(0, Int32)
    near = (kv_idx <= q_idx) & (distance < scalar_to_ssa(12, Int32))
    return near & (distance % scalar_to_ssa(2, Int32) == zero)


@cute.jit
def document(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids = aux_tensors[0]
    of_query = scalar_to_ssa(ids[b[0], h[0], q_idx[0]], Int32)
    of_key = scalar_to_ssa(ids[b[0], h[0], kv_idx[0]], Int32)
    return of_query == of_key


@cute.jit
def document_packed_rows(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids = aux_tensors[0]
    of_query = ids[q_idx[0] + seqlen_info.offset_q]
    return answer(of_query == ids[kv_idx[0] + seqlen_info.offset_k])


@cute.jit
def threshold(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return scalar_to_ssa(aux_tensors[0][kv_idx[0]], Int32) <= kv_idx


@cute.jit
def flagged(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    flag = aux_tensors[0][b[0]]
    first = Int32(0)
    last = q_idx[0] + seqlen_info.seqlen_k - seqlen_info.seqlen_q
    if flag > 0:
        first = last - flag
        if flag > 4:
            first = first + 2
    elif flag < -2:
        last = aux_tensors[0][b[0] + 1]
    return answer(first <= kv_idx[0] and kv_idx[0] <= last)


def listed_ranges(count):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        visible = kv_idx <= q_idx
        for i in cutlass.range_constexpr(count):
            first = scalar_to_ssa(aux_tensors[0][b[0], i, 0], Int32)
            last = scalar_to_ssa(aux_tensors[0][b[0], i, 1], Int32)
            inside = (first <= q_idx) & (q_idx <= last) & (first <= kv_idx) & (kv_idx <= last)
            visible = visible | (inside & (first < last))
        return visible

    return mask_mod


@cute.jit
def compiled_loop(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    sums = Int32(0)
    for i in cutlass.range(3, unroll_full=True):
        if aux_tensors[0][i] < kv_idx[0]:
            sums = sums + aux_tensors[0][i]
    return answer(sums <= q_idx[0])


@cute.jit
def clamped_row(q_idx, seqlen_info):
    return cutlass.max(cutlass.min(ssa_to_scalar(q_idx), seqlen_info.seqlen_q - 1), 0)


def nested(window):
    @cute.jit
    def near(q, kv):
        return q - kv < window

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        row = clamped_row(q_idx, seqlen_info)
        kv = kv_idx[0]
        return answer((kv <= row and near(row, kv)) or kv == seqlen_info.seqlen_k - 1)

    return mask_mod


@cute.jit
def tree_bits(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    ancestors = Uint32(aux_tensors[0][q_idx[0]])
    slot = kv_idx[0] - (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    shift = cutlass.min(cutlass.max(slot, Int32(0)), Int32(31))
    bit = (ancestors >> Uint32(shift)) & Uint32(1)
    return answer(slot < 0 or (slot < 32 and bit == Uint32(1)))


@cute.jit
def words_of_bits(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    word = aux_tensors[0][q_idx[0], kv_idx[0] >> 2]
    return answer((word >> (kv_idx[0] & 3)) & 1 == 1)


@cute.jit
def unsigned_groups(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q, kv = Uint32(q_idx[0]), Uint32(kv_idx[0])
    same = q // Uint32(3) == kv // Uint32(3)
    return answer(same or (q % Uint32(4) < kv % Uint32(4) and kv < q))


@cute.jit
def unsigned_order(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q, kv = Uint32(q_idx[0]), Uint32(kv_idx[0])
    low = Uint32(seqlen_info.seqlen_q - 3)
    return answer((q <= kv and kv > low) or (q >= Uint32(6) and kv < low))


@cute.jit
def long_products(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    product = Int64(q_idx[0]) * Int64(kv_idx[0])
    return answer(Int32(product >> 3) < q_idx[0])


@cute.jit
def bit_tricks(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q, kv = q_idx[0], kv_idx[0]
    mixed = (q ^ kv) | (q & 6) | (kv & ~Int32(3))
    return answer(mixed < (kv << 1) - (q >> 1) + (q ^ -1))


def divided(by):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        q, kv = q_idx[0], kv_idx[0]
        return answer(q // by - kv % by <= kv // by)

    return mask_mod


@cute.jit
def summed_words(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q, kv = q_idx[0], kv_idx[0]
    word = (Uint32(q < kv) << 4) + (Uint32(q == kv) << 1) + Uint32(q < 3)
    return answer(Int32(word) <= 16 and word != Uint32(2))


def packed_causal(vec: int) -> Any:
    """The truth values of `vec` keys, put together bit by bit."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        offset = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        keep = kv_idx <= q_idx + offset.broadcast_to((vec,))
        words = cute.make_rmem_tensor(max(1, vec // 32), Uint32)
        for c in cutlass.range_constexpr(max(1, vec // 32)):
            word = Uint32(0)
            for j in cutlass.range_constexpr(min(32, vec)):
                word = word | (Uint32(keep[c * 32 + j]) << j)
            words[c] = word
        return words.load()

    mask_mod.__vec_size__ = vec
    return mask_mod


def packed_limits(vec: int, window: Any = None) -> Any:
    """Causal, and a window where there is one, as runs of ones: FA4's R2P masks."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        row = q_idx[0] + seqlen_info.seqlen_k - seqlen_info.seqlen_q - kv_idx[0]
        words = cute.make_rmem_tensor(max(1, vec // 32), Uint32)
        for c in cutlass.range_constexpr(max(1, vec // 32)):
            words[c] = r2p_bitmask_below(row + 1, c)
            if cutlass.const_expr(window is not None):
                words[c] = words[c] & r2p_bitmask_above(row + 1 - window, c)
        return words.load()

    mask_mod.__vec_size__ = vec
    return mask_mod


def packed_blocks(vec: int, size: int) -> Any:
    """The first keys of each block, as many as the table says."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        first = kv_idx[0]
        limit = aux_tensors[0][first // size] - first % size
        words = cute.make_rmem_tensor(max(1, vec // 32), Uint32)
        for c in cutlass.range_constexpr(max(1, vec // 32)):
            words[c] = r2p_bitmask_below(limit, c)
        return words.load()

    mask_mod.__vec_size__ = vec
    return mask_mod


def blocks(size: int) -> Any:
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        kv = kv_idx[0]
        return answer(kv % size < aux_tensors[0][kv // size])

    return mask_mod


@cute.jit
def loaded_word(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    words = cute.make_rmem_tensor(1, Uint32)
    words[0] = Uint32(aux_tensors[0][q_idx[0], kv_idx[0] >> 5])
    return words.load()


loaded_word.__vec_size__ = 32


@cute.jit
def shifted_word(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    words = cute.make_rmem_tensor(1, Uint32)
    word = Uint32(aux_tensors[0][q_idx[0], kv_idx[0] >> 5])
    words[0] = shr_u32(word, Uint32(kv_idx[0] & 31))
    return words.load()


shifted_word.__vec_size__ = 8


@cute.jit
def bit_of_word(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    word = aux_tensors[0][q_idx[0], kv_idx[0] >> 5]
    return answer((Uint32(word) >> Uint32(kv_idx[0] & 31)) & Uint32(1) == Uint32(1))


def shifted_by_ptx(operation: Callable[..., Any], word: int) -> Any:
    """The bits of a constant, shifted by `q_idx` as PTX does."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        words = cute.make_rmem_tensor(1, Uint32)
        words[0] = operation(Uint32(word), Uint32(q_idx[0]))
        return words.load()

    mask_mod.__vec_size__ = 32
    return mask_mod


Make = Callable[[Mapping[str, Any]], Any]


def fixed(mask_mod: Any) -> Make:
    return lambda values: mask_mod


@dataclass(frozen=True, slots=True)
class Case:
    """`tables`: the shape and the exclusive upper bound of the contents of each aux tensor.
    Key indices are multiples of `step` below `keys`."""

    name: str
    make: Make
    tables: Mapping[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    symbols: tuple[str, ...] = ()
    vec: int = 1
    step: int = 1
    keys: int = 24
    batches: int = 3
    twin: Make | None = None

    @property
    def target(self) -> Target:
        return self._as_target(self.make)

    @property
    def twin_target(self) -> Target:
        assert self.twin is not None
        return self._as_target(self.twin)

    def _as_target(self, make: Make) -> Target:
        return Target(
            target=self.name,
            spec="none",
            make=make,
            symbols=self.symbols,
            layouts=(tuple(self.tables),),
            ranks={name: len(shape) for name, (shape, _) in self.tables.items()},
        )


WINDOW = ("window",)
BITS = {"bits": ((24, 5), 2**31)}

CASES = (
    Case("causal", fixed(causal)),
    Case("sliding_window", fixed(sliding_window(4, 2))),
    Case("sliding_window[symbolic]", lambda s: sliding_window(s["window"], 0), symbols=WINDOW),
    Case("block_diagonal", fixed(block_diagonal)),
    Case("block_diagonal[symbolic]", lambda s: block_diagonal_of(s["window"]), symbols=WINDOW),
    Case("block_causal", fixed(block_causal)),
    Case("mini_causal", fixed(mini_causal)),
    Case("prefix_lm", fixed(prefix_lm)),
    Case("dilated", fixed(dilated)),
    Case("document", fixed(document), {"ids": ((3, 2, 24), 3)}),
    Case("document[packed rows]", fixed(document_packed_rows), {"document_ids": ((48,), 3)}),
    Case("threshold", fixed(threshold), {"bias": ((24,), 24)}),
    Case("flagged", fixed(flagged), {"flags": ((41,), 9)}, batches=40),
    Case("listed_ranges", fixed(listed_ranges(3)), {"ranges": ((40, 3, 2), 10)}, batches=40),
    Case("compiled_loop", fixed(compiled_loop), {"terms": ((3,), 9)}),
    Case("nested", lambda s: nested(s["window"]), symbols=WINDOW),
    Case("tree_bits", fixed(tree_bits), {"ancestors": ((24,), 2**31)}, keys=40),
    Case("words_of_bits", fixed(words_of_bits), {"nibbles": ((24, 6), 16)}),
    Case("unsigned_groups", fixed(unsigned_groups)),
    Case("unsigned_order", fixed(unsigned_order)),
    Case("long_products", fixed(long_products)),
    Case("bit_tricks", fixed(bit_tricks)),
    Case("divided", fixed(divided(3))),
    Case("divided[negative]", fixed(divided(-3))),
    Case("divided[symbolic]", lambda s: divided(s["window"]), symbols=WINDOW),
    Case("summed_words", fixed(summed_words)),
    *(
        Case(f"packed_causal[{v}]", fixed(packed_causal(v)), vec=v, step=v, keys=160)
        for v in (2, 4, 8, 16, 32, 64, 128)
    ),
    *(
        Case(
            f"packed_limits[{v}]",
            fixed(packed_limits(v)),
            vec=v,
            step=v,
            keys=160,
            twin=fixed(causal),
        )
        for v in (8, 32, 64, 128)
    ),
    Case(
        "packed_window[64]",
        lambda s: packed_limits(64, s["window"]),
        symbols=WINDOW,
        vec=64,
        step=64,
        keys=640,
        twin=lambda s: sliding_window(s["window"] - 1, 0),
    ),
    Case(
        "packed_blocks[64]",
        fixed(packed_blocks(64, 128)),
        {"sizes": ((6,), 128)},
        vec=64,
        step=64,
        keys=640,
        twin=fixed(blocks(128)),
    ),
    Case("loaded_word", fixed(loaded_word), BITS, vec=32, step=32, keys=160),
    Case(
        "shifted_word",
        fixed(shifted_word),
        BITS,
        vec=8,
        step=8,
        keys=160,
        twin=fixed(bit_of_word),
    ),
    Case("bit_of_word", fixed(bit_of_word), BITS, keys=160),
)


def shift_cases() -> dict[str, Any]:
    """PTX shifts of words of many shapes, as (operation, word)."""
    words = [0, 1, ALL, 0x80000000, 0x7FFFFFFF, 0xAAAAAAAA, 0x12345678, 0xFFFF0000, 0x0F0F00F1]
    return {f"{op}:{word:08x}": (fn, word) for op, fn in (("shl", shl_u32), ("shr", shr_u32))
            for word in words}
