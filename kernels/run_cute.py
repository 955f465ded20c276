"""The real mask_mod, executed on the CPU, beside the term that it was lifted to.

The compiler's host JIT runs the mask_mod over an array of cells, in a forked child: what ends the
child ends nothing else. Inline PTX cannot be compiled for a CPU and is refused before.
"""

import mmap
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass.cute as cute
import numpy as np
from cutlass import Int32

from kernels.from_cute import Lifted
from kernels.simplify import signed_range, span
from kernels.target import Target
from kernels.trace import COORDINATES, WORD, call, descriptor, first_line, rank, trace
from spec.term import Term, postorder
from spec.to_numpy import to_numpy
from spec.to_text import to_text

Cells = Mapping[str, np.ndarray[Any, Any]]
Array = np.ndarray[Any, Any]
Kernel = Callable[[Array, Array, list[Array], int], None]
DONE = "done"


class CannotRun(Exception):
    """The mask_mod could not be executed here; the message is one line."""


def run(
    target: Target, layout: tuple[str, ...], cells: Cells, tables: Cells, timeout: float = 60
) -> Array:
    """Whether each cell is visible, by the compiled code: [cells], or [cells, lanes] if packed.

    `cells`: an int32 array [n] for each coordinate and each symbol of the target; `tables`: an
    int32 array for each name of `layout`. Indices are not checked here: a read outside a table
    reads what lies there, or ends the child, which raises CannotRun.
    """
    traced = trace(target, layout)
    if "llvm.inline_asm" in str(traced.module):
        raise CannotRun("holds inline PTX, which has no CPU form")
    return _run(target, layout, traced.lanes, cells, tables, timeout)


def _run(
    target: Target, layout: tuple[str, ...], lanes: int, cells: Cells, tables: Cells, timeout: float
) -> Array:
    names = COORDINATES + target.symbols
    columns = np.ascontiguousarray(np.stack([np.asarray(cells[name], np.int32) for name in names]))
    words = max(1, lanes // WORD)
    shared = mmap.mmap(-1, 4 * max(1, words * columns.shape[1]))
    out = np.frombuffer(shared, np.int32)[: words * columns.shape[1]].reshape(-1, words)
    aux = [np.ascontiguousarray(tables[name], np.int32) for name in layout]
    if columns.shape[1]:
        in_child(lambda: _execute(target, layout, columns, aux, out), timeout)
    if lanes == 1:
        return out[:, 0] != 0
    bits = out[:, :, None] >> np.arange(min(lanes, WORD)) & 1
    return bits.reshape(len(out), lanes) != 0


def _execute(
    target: Target, layout: tuple[str, ...], columns: Array, aux: list[Array], out: Array
) -> None:
    compiled(target, layout)(out, columns, aux, len(out))


def compiled(target: Target, layout: tuple[str, ...]) -> Kernel:
    """The mask_mod as a function `(out, columns, aux, count)` that calls it on `count` cells.

    `columns` [coordinates and symbols, count] has the cells, `aux` the tables of `layout`, and
    `out` [count, words] gets the words that it answers: all int32.
    """
    names = COORDINATES + target.symbols

    def one_cell(out: Any, inputs: list[Any], i: Any) -> None:
        columns, *aux = inputs
        values = {name: columns[k, i] for k, name in enumerate(names)}
        mask_mod = target.make({name: values[name] for name in target.symbols})
        for j, (word, _) in enumerate(call(target, mask_mod, aux, values)):
            out[i, j] = Int32(word)

    @cute.jit
    def host(out: cute.Tensor, inputs: list, count: Int32):
        for i in range(count):
            one_cell(out, inputs, i)

    def arguments(out: Array, columns: Array, aux: list[Array], count: int) -> tuple[Any, ...]:
        return descriptor(out), [descriptor(array) for array in (columns, *aux)], Int32(count)

    tables = [np.zeros((2,) * rank(target, name), dtype=np.int32) for name in layout]
    columns = np.zeros((len(names), 2), dtype=np.int32)
    function = cute.compile(host, *arguments(np.zeros((1, 1), dtype=np.int32), columns, tables, 0))

    def kernel(out: Array, columns: Array, aux: list[Array], count: int) -> None:
        function(*arguments(out, columns, aux, count))

    return kernel


def in_child(work: Callable[[], None], timeout: float) -> None:
    """Does `work` in a forked process, of which only shared memory stays."""
    receive, send = Pipe(duplex=False)
    with warnings.catch_warnings():
        # The threads that Python warns of belong to libraries that the child does not call.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _work_and_exit(work, send)
    send.close()
    answered = receive.poll(timeout)
    if not answered:
        os.kill(child, signal.SIGKILL)
    try:
        said = receive.recv() if answered else f"did not end within {timeout:g} s"
    except EOFError:
        said = ""
    _, status = os.waitpid(child, 0)
    if said != DONE:
        raise CannotRun(said or f"the process that ran it {ending(status)}")


def _work_and_exit(work: Callable[[], None], send: Connection) -> None:
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        work()
        send.send(DONE)
    except BaseException as error:
        send.send(f"{type(error).__name__}: {first_line(error)}")
    finally:
        os._exit(0)


def ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended early, with status {os.waitstatus_to_exitcode(status)}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """A term beside the code it was lifted from.

    `cells` were compared, `visible` of them are visible; `left_out` break a condition under which
    term and code are the same (an overflow, a division by zero). `uncovered` says which sides of
    which comparisons no cell was on. `mismatch` is the first cell on which the two differ.
    """

    cells: int
    visible: int
    left_out: int
    uncovered: tuple[str, ...]
    mismatch: Mapping[str, int | bool] | None


class Clamped:
    """A table that answers at its edge for indices beyond it: for sides of `ite` not taken."""

    def __init__(self, table: Array) -> None:
        self.table = table

    def __getitem__(self, index: Any) -> Array:
        index = index if isinstance(index, tuple) else (index,)
        pairs = zip(index, self.table.shape, strict=True)
        return self.table[tuple(np.clip(i, 0, size - 1) for i, size in pairs)]


def agree(
    lifted: Lifted, target: Target, cells: Cells, tables: Cells, timeout: float = 60
) -> Agreement:
    """Compares the term with the compiled code, on every cell where they are to be the same."""
    if lifted.inline_ptx:
        raise CannotRun("holds inline PTX, which has no CPU form")
    count = len(cells["q_idx"])
    env: dict[str, Any] = {**cells, **{name: Clamped(tables[name]) for name in lifted.layout}}
    memo: dict[Term, Any] = {}

    def value(term: Term) -> Array:
        with np.errstate(divide="ignore"):
            return np.broadcast_to(to_numpy(term, env, memo), count)

    sound = sound_cells(lifted, tables, value, count)
    kept = {name: np.asarray(column)[sound] for name, column in cells.items()}
    expected = np.stack([value(lane)[sound] for lane in lifted.lanes], axis=-1)
    got = _run(target, lifted.layout, len(lifted.lanes), kept, tables, timeout)
    return Agreement(
        cells=expected.size,
        visible=int(expected.sum()),
        left_out=count - int(sound.sum()),
        uncovered=tuple(uncovered(lifted.lanes, lambda term: value(term)[sound])),
        mismatch=first_difference(kept, expected, got.reshape(expected.shape)),
    )


def sound_cells(
    lifted: Lifted, tables: Cells, value: Callable[[Term], Array], count: int
) -> Array:
    """Where code and term are to be the same, and the code reads inside its tables."""
    sound = np.ones(count, bool)
    for path, term, width, _ in lifted.arithmetic:
        low, high = signed_range(width)
        sound &= ~value(path) | (low <= value(term)) & (value(term) <= high)
    for path, claim, _ in lifted.conditions:
        sound &= ~value(path) | value(claim)
    for path, read, _ in lifted.reads:
        for index, size in zip(read.args, tables[read.value].shape, strict=True):
            sound &= ~value(path) | (value(index) >= 0) & (value(index) < size)
    return sound


def uncovered(lanes: tuple[Term, ...], value: Callable[[Term], Array]) -> Iterator[str]:
    """The sides that a comparison could be on and was not."""
    for node in postorder(*lanes):
        if node.op not in ("lt", "le", "eq"):
            continue
        low, high = span(node.args[0] - node.args[1])
        difference = value(node.args[0]) - value(node.args[1])
        sides = (
            ("below", low < 0, (difference < 0).any()),
            ("equal", low <= 0 <= high, (difference == 0).any()),
            ("above", high > 0, (difference > 0).any()),
        )
        missed = [side for side, possible, hit in sides if possible and not hit]
        if missed:
            yield f"{to_text(node)}: never {' or '.join(missed)}"


def first_difference(cells: Cells, expected: Array, got: Array) -> dict[str, int | bool] | None:
    differing = np.argwhere(expected != got)
    if not len(differing):
        return None
    cell, lane = differing[0]
    coordinates = {name: int(column[cell]) for name, column in cells.items()}
    return {
        **coordinates,
        "lane": int(lane),
        "term": bool(expected[cell, lane]),
        "code": bool(got[cell, lane]),
    }
