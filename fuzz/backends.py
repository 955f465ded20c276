"""Where cases run. A back end has `name`, `device`, `capacity`, `depth` and six questions.

    domain(call)             the values that fields of a call like this may have, the plainest first
    warm_up()                loads what every child needs, once, before they are forked
    refuses(call)            why a call is outside what it can run, or None
    ready(call)              whether its kernel need not be compiled first, as far as is known
    start(call, sequences, announce)   starts them; what it returns waits, and says what is wrong
    probe()                  what is wrong with the machine itself, or None

`start` is only ever called in a child process (`fuzz.worker`), which it may hang or end; everything
else runs in the parent, which must not touch the device. Up to `depth` launches are started before
the first is waited for, and what ends the child is shrunk for up to `patience` seconds. Before each
stage `announce("compile")` or `announce("run ...")` is called, on which deadlines depend.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fuzz.boundaries import PAGES, RATIOS
from fuzz.sequences import Array, Sequences, expected, given, grid, located
from fuzz.targets import mask_mods
from kernels.fa4 import Call
from kernels.target import Target
from spec.from_file import resolve

# A key seen that is hidden, and the other way round; then faults that only a kernel's output has.
# The last is what random data shows, and a mask does not.
KINDS = ("leak", "loss", "double", "empty-row", "lse", "unwritten", "nan", "overrun", "numerics")
LEAK, LOSS = KINDS.index("leak"), KINDS.index("loss")
Announce = Callable[[str], None]


class Refused(Exception):
    """A call that a back end cannot run; the message is the reason."""


class Broken(Exception):
    """What ended a launch and leaves the child, too, of no use; it is made from the exception."""


class NoBackend(Exception):
    """A back end that cannot be had here; the message is one line."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Wrong cells, one entry each; `kv_idx` is -1 where a whole row is wrong. `kind` indexes KINDS.
    `total` may be more than there are entries."""

    b: Array
    h: Array
    q_idx: Array
    kv_idx: Array
    kind: Array
    total: int

    def __len__(self) -> int:
        return len(self.b)

    @property
    def cells(self) -> dict[str, Array]:
        return {"b": self.b, "h": self.h, "q_idx": self.q_idx, "kv_idx": self.kv_idx}


def wrong(parts: List[Mapping[str, Array]], total: int) -> Wrong:
    def column(name: str) -> Array:
        return np.concatenate([np.zeros(0, dtype=np.int64), *(p[name] for p in parts)])

    return Wrong(*(column(name) for name in ("b", "h", "q_idx", "kv_idx", "kind")), total)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch came to: `cells` were compared. Of the seconds that it ran `kernel_seconds`
    were spent in the code under test, where that is known."""

    cells: int
    wrong: Wrong
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    kernel_seconds: float = 0.0
    kernels: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much one launch takes: `cells` in all, `each` in one sequence."""

    sequences: int
    cells: int
    each: int


class Backend(Protocol):
    name: str
    device: str
    capacity: Capacity
    depth: int
    patience: float

    def domain(self, call: Call) -> Mapping[str, tuple[Any, ...]]: ...
    def refuses(self, call: Call) -> str | None: ...
    def ready(self, call: Call) -> bool: ...
    def start(
        self, call: Call, sequences: Sequences, announce: Announce
    ) -> Callable[[], Outcome]: ...
    def probe(self) -> str | None: ...
    def warm_up(self) -> None: ...


# Below this many cells every head is asked for every cell, else one head for each.
FEW_CELLS = 2**14
MOST_WRONG = 2**16
TILE = 128
FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
PAGE = mmap.PAGESIZE


@dataclass(slots=True)
class CpuBackend:
    """The real mask_mods, compiled by the compiler's host JIT and called on every cell."""

    targets: Mapping[str, Target]
    name: str = "cpu"
    device: str = field(default_factory=lambda: f"CPU {platform.machine()}")
    capacity: Capacity = Capacity(sequences=192, cells=2**19, each=2**16)
    depth: int = 1
    patience: float = 0.0
    compiled: dict[str, tuple[Any, tuple[str, ...], int]] = field(default_factory=dict)

    def domain(self, call: Call) -> Mapping[str, tuple[Any, ...]]:
        return {"q_heads": RATIOS, "page_size": PAGES}

    def refuses(self, call: Call) -> str | None:
        if call.mask_mod is None:
            return "the call has no mask_mod, and the CPU runs nothing else"
        windows = call.window_size_left, call.window_size_right
        if call.causal or call.dynamic_causal or windows != (None, None):
            return "built-in flags are not part of a mask_mod and act on a GPU only"
        if call.mask_mod not in self.targets:
            return f"no target {call.mask_mod!r} here; there are {', '.join(self.targets)}"
        return self.targets[call.mask_mod].unsupported

    def ready(self, call: Call) -> bool:
        return True

    def probe(self) -> str | None:
        return None

    def warm_up(self) -> None:
        from fuzz.compiled import warm_up

        warm_up()

    def start(
        self, call: Call, sequences: Sequences, announce: Announce
    ) -> Callable[[], Outcome]:
        return partial(self.check, call, sequences, announce)

    def check(self, call: Call, sequences: Sequences, announce: Announce) -> Outcome:
        """Runs the sequences and says which cells are wrong."""
        if reason := self.refuses(call):
            raise Refused(reason)
        assert call.mask_mod is not None
        target = self.targets[call.mask_mod]
        started = time.perf_counter()
        new = call.mask_mod not in self.compiled
        if new:
            from fuzz.compiled import compiled

            announce("compile")
            self.compiled[call.mask_mod] = compiled(target)
        kernel, layout, lanes = self.compiled[call.mask_mod]
        compile_seconds = time.perf_counter() - started
        aux = list(given(sequences, layout, call.params, target.constants).values())
        run = _Run(kernel, target, call, sequences, lanes)
        for fatal in FATAL:  # LLVM's own handlers take most of a second to end a process
            signal.signal(fatal, signal.SIG_DFL)
        announce("run")
        seconds, parts, total, cells = run.real(aux)
        announce("run padded rows and keys")
        seconds += run.padded(aux)
        return Outcome(cells, wrong(parts, total), compile_seconds, seconds, seconds, int(new))


@dataclass(frozen=True, slots=True)
class _Run:
    kernel: Callable[[Array, Array, list[Array], int], None]
    target: Target
    call: Call
    sequences: Sequences
    lanes: int

    def real(self, aux: list[Array]) -> tuple[float, list[dict[str, Array]], int, int]:
        """Every cell, beside the spec: seconds in the code, wrong cells, their number, and that of
        all cells."""
        mask = resolve(self.call.spec)
        parts, total, count, seconds = [], 0, 0, 0.0
        tables = [guarded(table, at_end=True) for table in aux]
        for cells in self._cells():
            started = time.perf_counter()
            got = self._answers(cells, tables)
            seconds += time.perf_counter() - started
            cells, got = self._keys(cells, got)
            meant = expected(mask, self.call.params, self.sequences, cells)
            count += got.size
            if (bad := np.flatnonzero(got != meant)).size:
                total += bad.size
                kind = np.where(got[bad], LEAK, LOSS)
                kept = slice(0, max(0, MOST_WRONG - sum(len(p["b"]) for p in parts)))
                parts.append({**{k: v[bad][kept] for k, v in cells.items()}, "kind": kind[kept]})
        return seconds, parts, total, count

    def padded(self, aux: list[Array]) -> float:
        """Rows and keys past the end that a partial tile calls the mask_mod on; no answer counts,
        but each table is read inside its ends."""
        seconds = 0.0
        cells = padding(self.sequences, self.lanes, self.call.q_heads)
        for at_end in (True, False) if aux else ():
            tables = [guarded(table, at_end=at_end) for table in aux]
            started = time.perf_counter()
            self._answers(cells, tables)
            seconds += time.perf_counter() - started
        return seconds

    def _cells(self) -> Iterator[dict[str, Array]]:
        heads = self.call.q_heads
        times = heads if int(self.sequences.cells.sum()) * heads <= FEW_CELLS else 1
        for cells in grid(self.sequences, self.lanes):
            for first in range(times):
                yield {**cells, "h": (first + cells["b"] + cells["q_idx"]) % heads}

    def _answers(self, cells: Mapping[str, Array], tables: list[Array]) -> Array:
        from kernels.trace import COORDINATES, WORD

        count = len(cells["b"])
        values = {**cells, **located(self.sequences, cells["b"])}
        columns = np.empty((len(COORDINATES) + len(self.target.symbols), count), dtype=np.int32)
        for row, name in zip(columns, COORDINATES + self.target.symbols, strict=True):
            row[:] = values[name] if name in values else self.call.params[name]
        out = np.zeros((count, max(1, self.lanes // WORD)), dtype=np.int32)
        if count:
            self.kernel(out, columns, tables, count)
        if self.lanes == 1:
            return out != 0
        bits = out[:, :, None] >> np.arange(min(self.lanes, WORD)) & 1
        return bits.reshape(count, self.lanes) != 0

    def _keys(self, cells: Mapping[str, Array], got: Array) -> tuple[dict[str, Array], Array]:
        """Cells of vectors as cells of keys, those past the end left away."""
        if self.lanes == 1:
            return dict(cells), got[:, 0]
        keys = cells["kv_idx"][:, None] + np.arange(self.lanes)
        inside = keys < self.sequences.seqlen_k[cells["b"]][:, None]
        wide = {name: np.broadcast_to(column[:, None], keys.shape)[inside]
                for name, column in cells.items()}
        return {**wide, "kv_idx": keys[inside]}, got[inside]


def padding(sequences: Sequences, lanes: int, heads: int) -> dict[str, Array]:
    """The first and the last row and key past the end of each partial tile."""
    def around(length: int) -> list[int]:
        end = -(-length // TILE) * TILE
        return [0, length - 1, *([length, end - 1] if end > length else [])]

    found = []
    for b, (queries, keys) in enumerate(zip(sequences.seqlen_q, sequences.seqlen_k, strict=True)):
        if queries and keys:
            found += [(b, q, kv // lanes * lanes) for q in around(int(queries))
                      for kv in around(int(keys))]
    b, q_idx, kv_idx = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return {"b": b, "q_idx": q_idx, "kv_idx": kv_idx, "h": (b + q_idx) % heads}


def guarded(table: Array, *, at_end: bool) -> Array:
    """A copy whose end, or whose start, lies at a page that ends the process when it is touched."""
    size = -(-max(table.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + PAGE + size):
        _protect(guard)
    start = PAGE + (size - table.nbytes if at_end else 0)
    copy = np.frombuffer(memory, table.dtype, table.size, start).reshape(table.shape)
    copy[...] = table
    return copy


def _protect(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")


def has_gpu() -> bool:
    """Whether there is a GPU, told without any use of it."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def take(wanted: str, targets: Mapping[str, Target], **options: Any) -> Backend:
    """The back end that was asked for; `auto` takes the GPU if there is one."""
    for name in ("cutlass", "flash_attn"):
        if find_spec(name) is None:
            raise NoBackend(f"{name} is not installed: install maskproof's dependencies")
    if wanted == "cpu" or wanted == "auto" and not has_gpu():
        return CpuBackend(mask_mods(targets))
    if not has_gpu():
        raise NoBackend("no GPU here (no /dev/nvidia*): use --backend cpu")
    try:
        from fuzz.gpu import GpuBackend
    except ImportError as error:
        raise NoBackend(f"the GPU back end cannot be imported: {error}") from None
    return GpuBackend(targets, **options)
