"""The lifter on fragments, and what is taken for granted of the code around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack

from kernels.builtin import Batch as Calls
from kernels.builtin import ExactDivisor, Variant, elements, lift, run
from kernels.from_cute import walk_module
from kernels.machine import CannotLift, Num, number
from kernels.memory import float_bits
from kernels.provider import installed
from kernels.run_cute import in_child
from kernels.trace import descriptor, guarded
from kernels.walk import Tensor, Walk
from spec.sample import Batch, evaluate
from spec.term import substitute, sym
from spec.tiles import Tile

PROVIDER = installed()
THREAD = sym("thread")


def traced(work: Callable[[Any, Any], None], element: Any = np.int32) -> Any:
    """The IR of `work(out, number)`."""

    @cute.jit(preprocess=False)
    def host(out: cute.Tensor, number: Int32):
        work(out, number)

    out = from_dlpack(np.zeros(8, element))
    return guarded(lambda: cute.compile(host, out, Int32(0), no_jit_engine=True), ()).ir_module


def walked(module: Any, **options: Any) -> tuple[dict[int, Any], Walk]:
    walk = Walk((), (), **options)
    out = ("out", "words", "f32" if options.get("floats") else "i32")
    memory = walk_module(walk, module, (Tensor(out), Num(THREAD, 32)))
    return {key[1]: word for key, word in memory.items() if key[0] == out}, walk


def test_floats_are_moved_as_their_bits() -> None:
    def work(out: Any, n: Any) -> None:
        out[0] = Float32(1.5)
        out[1] = -Float32.inf

    words, _ = walked(traced(work, np.float32), floats=True)
    assert [number(words[i]).value for i in range(2)] == [float_bits(1.5), float_bits(-math.inf)]
    assert float_bits(1.5) == np.float32(1.5).view(np.int32)


def test_floats_are_refused_where_they_are_not_asked_for() -> None:
    def work(out: Any, n: Any) -> None:
        out[0] = Float32(1.5)

    with pytest.raises(CannotLift, match="f32 is not an integer"):
        walked(traced(work, np.float32))


def shuffled(width: int, lane: Any) -> Callable[[Any, Any], None]:
    def work(out: Any, n: Any) -> None:
        control = (32 - width) << 8 | 31
        out[0] = cute.arch.shuffle_sync(n * 3, lane, mask_and_clamp=control)

    return work


def test_a_word_of_another_lane_is_that_lanes() -> None:
    words, walk = walked(traced(shuffled(4, 2)), thread=THREAD)
    ((word, (definition, lane)),) = walk.shuffles.items()
    assert number(words[0]) is word and lane == 2
    threads = Batch({}, {"b": np.arange(64), "thread": np.arange(64)}, {})
    source = evaluate(definition, threads) // 3
    assert (source == np.arange(64) // 4 * 4 + 2).all()


def test_a_shuffle_needs_a_thread_and_a_whole_warp() -> None:
    with pytest.raises(CannotLift, match="no thread is known"):
        walked(traced(shuffled(4, 2)))
    with pytest.raises(CannotLift, match="past its segment"):
        walked(traced(shuffled(4, 5)), thread=THREAD)

    def apart(out: Any, n: Any) -> None:
        @cute.jit
        def some(out: cute.Tensor, n: Int32):
            if n < 7:
                out[0] = cute.arch.shuffle_sync(n, 1, mask_and_clamp=(32 - 4) << 8 | 31)

        some(out, n)

    with pytest.raises(CannotLift, match="some lanes do not reach"):
        walked(traced(apart), thread=THREAD)


def numbers(rng: np.random.Generator, count: int) -> dict[str, Any]:
    return {
        "thread": rng.integers(0, 128, count), "m_block": rng.integers(0, 3, count),
        "n_block": rng.integers(-1, 4, count), "seqlen_q": rng.integers(1, 200, count),
        "seqlen_k": rng.integers(1, 200, count), "psc": rng.integers(0, 2, count),
        "window_size_left": rng.integers(0, 99, count), "b": np.zeros(count, int),
        "window_size_right": rng.integers(0, 99, count), "batch": rng.integers(0, 2, count),
        "head": rng.integers(0, 2, count),
    }


@pytest.mark.parametrize("mode", ["causal", "local"])
def test_a_wrong_term_is_told_from_the_real_code(mode: str) -> None:
    variant = Variant(mode, Tile(64, 32), seqlen=True)
    at = Batch({}, numbers(np.random.default_rng(2), 200), {})
    with PROVIDER.served():
        fragment = lift(PROVIDER, variant)
        blank = np.zeros((1, 1, 1, 1), np.int32), np.zeros((200, 4), np.int32)
        got, again = run(PROVIDER, [Calls(variant, at.cells, *blank)] * 2)
    assert (got == again).all()
    assert got.shape == (200, elements(variant)) and len(fragment.elements) == elements(variant)
    off = {sym("seqlen_k"): sym("seqlen_k") + 1}
    terms = [e.kept for e in fragment.elements]
    wrong = [substitute(t, off) for t in terms]
    assert (np.stack([evaluate(t, at) for t in terms], axis=-1) == got).all()
    assert (np.stack([evaluate(t, at) for t in wrong], axis=-1) != got).any()


def test_elements_of_all_threads_fill_the_tile_once() -> None:
    tile = Tile(128, 48)
    with PROVIDER.served():
        fragment = lift(PROVIDER, Variant("full", tile, seqlen=True))
    threads = np.arange(256)
    at = Batch({}, {"b": threads, "thread": threads}, {})
    cells = [(evaluate(e.row, at), evaluate(e.col, at)) for e in fragment.elements]
    flat = np.concatenate([row * tile.tile_n + col for row, col in cells])
    assert (np.sort(flat) == np.arange(tile.tile_m * tile.tile_n)).all()


EDGES = [0, 1, 2, 3, 5, 7, 127, 128, 129, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 2, 2**31 - 1]


def divided(make: Callable[[Any], Any], pairs: Any) -> Any:
    """Quotient and remainder of each pair, by a divisor that `make` gives, on this CPU."""
    import mmap

    shared = mmap.mmap(-1, 8 * len(pairs))
    out = np.frombuffer(shared, np.int32).reshape(-1, 2)

    def one(out: Any, pairs: Any, i: Any) -> None:
        quotient, remainder = divmod(pairs[i, 0], make(pairs[i, 1]))
        out[i, 0], out[i, 1] = Int32(quotient), Int32(remainder)

    @cute.jit
    def host(out: cute.Tensor, pairs: cute.Tensor, count: Int32):
        for i in range(count):
            one(out, pairs, i)

    def execute() -> None:
        arguments = descriptor(out), descriptor(pairs), Int32(len(pairs))
        cute.compile(host, *arguments)(*arguments)

    in_child(execute, 60)
    return out


@pytest.mark.parametrize("make", [ExactDivisor, cute.FastDivmodDivisorV2])
def test_fast_divisors_divide_exactly(make: Callable[[Any], Any]) -> None:
    """The magic number and shift of the compiler's divisor against division, over all sizes."""
    rng = np.random.default_rng(6)
    sizes = rng.integers(0, 31, (40_000, 2))
    near = (1 << sizes) + rng.integers(-2, 3, sizes.shape) * (sizes > 2)
    spread = rng.integers(0, 2**31, (40_000, 2)) >> rng.integers(0, 31, (40_000, 2))
    edges = np.array(np.meshgrid(EDGES, EDGES)).reshape(2, -1).T
    multiples = np.stack([np.minimum(spread[:, 1] * rng.integers(1, 9, 40_000), 2**31 - 1),
                          spread[:, 1]], axis=-1)
    pairs = np.concatenate([near, spread, edges, multiples, multiples - [1, 0]])
    pairs = np.ascontiguousarray(pairs[(pairs >= 0).all(1) & (pairs[:, 1] > 0)], np.int32)
    assert (divided(make, pairs) == np.stack(np.divmod(*pairs.T), axis=-1)).all()


def test_a_wrong_divisor_is_told() -> None:
    class Wrong(ExactDivisor):
        def __rdivmod__(self, dividend: Any) -> tuple[Any, Any]:
            quotient, remainder = super().__rdivmod__(dividend)
            return quotient, remainder + Int32(dividend == 6)

    pairs = np.array([[5, 3], [6, 3]], np.int32)
    assert divided(Wrong, pairs).tolist() == [[1, 2], [2, 1]]
