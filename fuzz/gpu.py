"""Calls of compiled FA4 kernels, their masks read out cell by cell on a GPU."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fuzz.backends import KINDS, Announce, Broken, Capacity, Outcome, Refused, wrong
from fuzz.bound import Bound
from fuzz.case import is_shared, stated
from fuzz.sequences import Sequences, for_kernel
from fuzz.strategies import MOST_ROWS
from fuzz.targets import in_turn, is_file, mask_mods
from fuzz.worker import forked, one_line
from kernels import fa4
from kernels.fa4 import Call, Fa4Error
from kernels.target import Target
from spec.from_file import resolve
from spec.masks import Mask

# Wrong cells that come back of a launch; all are counted.
MOST_WRONG = 2**14
# What a provider says no with before it has a kernel.
SAYS_NO = (AssertionError, NotImplementedError, ValueError)
PROBE_SECONDS = 8.0
MOST_WORKERS, NICE = 16, 10
# Seconds for one kernel, after which the process that compiles ahead gives up.
COMPILING = 300
# Launches of a kernel of which one has random data, too, and how many sequences that are.
MEASURED, MEASURED_SEQUENCES = 64, 16
# Launches of a kernel of which two have aux tensors at edges of memory, one at each of its ends.
# Sequences of so few rows always have.
GUARDED, GUARDED_ROWS = 16, 4096
# Of fewer sequences FA4 makes another kernel, and of fewer ranges the formula is another: what is
# less is filled up, so that shrinking compiles nothing. Calls for few sequences keep their number.
LEAST = fa4.MANY + 1
COLUMNS = ("b", "h", "q_idx", "kv_idx", "kind")
NAMES = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


@dataclass(slots=True)
class GpuBackend:
    """The kernels of a provider, run in a child. `workers` processes compile ahead."""

    targets: Mapping[str, Target]
    workers: int | None = None
    # The same by what calls name their mask_mods.
    mask_mods: Mapping[str, Target] = field(init=False)
    name: str = "gpu"
    device: str = "a GPU"
    capacity: Capacity = Capacity(sequences=16384, cells=2**30, each=2**28)
    depth: int = 3
    patience: float = 120.0  # a new child takes seconds to be there
    arch: str = "sm_90"
    readers: dict[str, Any] = field(default_factory=dict)
    # Of each kernel that is here how often it ran, and those that random data was wrong with.
    launches: dict[str, int] = field(default_factory=dict)
    inexact: set[str] = field(default_factory=set)
    # Of each call that is compiled ahead the place of its seconds, which are 0 until that is done
    # and negative where the compiler refused, and the process that does it.
    ahead: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: Any = None
    # A provider that is opened stays so until its process ends.
    opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        """The device is told by a program of its own: this process must not ask CUDA."""
        self.mask_mods = mask_mods(self.targets)
        with suppress(OSError, subprocess.SubprocessError):
            self.device = subprocess.run(
                NAMES, capture_output=True, text=True, timeout=10, check=True
            ).stdout.partition("\n")[0].strip()

    def domain(self, call: Call) -> Mapping[str, tuple[Any, ...]]:
        """Nothing varies inside a space: every kernel is compiled once (`fuzz.targets.in_turn`)."""
        return {}

    def refuses(self, call: Call) -> str | None:
        if call.mask_mod is not None:
            if call.mask_mod not in self.mask_mods:
                return f"no target {call.mask_mod!r} here; there are {', '.join(self.mask_mods)}"
            if reason := self.mask_mods[call.mask_mod].unsupported:
                return reason
        return fa4.supported(call)

    def probe(self) -> str | None:
        from kernels.run_cute import CannotRun, in_child

        try:
            in_child(_touch, PROBE_SECONDS)
        except CannotRun as error:
            return f"the GPU is unwell: {error}"
        return None

    def warm_up(self) -> None:
        """Imports what children need, and begins to compile ahead; makes no CUDA context."""
        self.compile_ahead([call for _, call in in_turn(self.targets.values(), self.arch, gpu=True)
                            if self.refuses(call) is None])

    def compile_ahead(self, calls: List[Call]) -> None:
        """Begins to compile them, in this order, in processes of their own."""
        for provider in {call.provider: None for call in calls}:
            with suppress(Fa4Error):  # `start` says it of every call
                self._reader(provider)
        gc.freeze()  # or else collecting garbage copies the memory of all that are forked
        self.seconds = np.frombuffer(mmap.mmap(-1, 8 * max(len(calls), 1)))
        workers = self.workers or min(os.cpu_count() or 1, MOST_WORKERS)
        places = {repr(call): i for i, call in enumerate(calls)}
        for i in range(workers):
            some = calls[i::workers]
            child = forked(partial(self._compile_ahead, some, places))
            self.ahead |= {repr(call): (places[repr(call)], child) for call in some}

    def ready(self, call: Call) -> bool:
        """Whether it is compiled, or refused, or no process is there that would do it ahead."""
        if repr(call) not in self.ahead:
            return True
        place, child = self.ahead[repr(call)]
        return self.seconds[place] != 0 or not _is_running(child)

    def failed(self, call: Call) -> bool:
        """Whether it was to be compiled ahead, and was not."""
        place, child = self.ahead[repr(call)]
        return self.seconds[place] < 0 or self.seconds[place] == 0 and not _is_running(child)

    def start(
        self, call: Call, sequences: Sequences, announce: Announce
    ) -> Callable[[], Outcome]:
        if reason := self.refuses(call):
            raise Refused(reason)
        announce("compile")
        begin = time.perf_counter()
        try:
            reader = self._reader(call.provider)
            at = self._given(reader.source, call, sequences)
            key = fa4.compile_key(reader.source.fixed(call), len(at))
            if new := key not in self.launches:
                reader.source.compile(call, len(at))
                self._rehearse(reader, call, at)
        except Fa4Error as error:
            raise Refused(str(error)) from None
        except SAYS_NO as error:
            raise Refused(f"{call.provider}: {one_line(error)}") from None
        compiled = time.perf_counter() - begin + (self._seconds_ahead(call) if new else 0)
        self.launches[key] = self.launches.get(key, 0) + 1
        announce("run")
        try:
            edges = self._edges(key, at)
            started = [reader.start(call, at, guard=edge) for edge in edges]
        except Exception as error:  # a CUDA error stays with its process
            raise Broken(error) from error

        def finish() -> Outcome:
            try:
                found = outcome([each.finish() for each in started][-1], compiled, int(new))
                return self._measured(reader, call, sequences, key, found)
            except Exception as error:
                raise Broken(error) from error

        return finish

    def _rehearse(self, reader: Any, call: Call, at: fa4.Sequences) -> None:
        """Reads once what no kernel has written. CUDA and the comparison are loaded then, which
        would else count as the time that the kernel runs."""
        reader.source.dry = True
        try:
            reader.read(call, at, guard=None)
        finally:
            reader.source.dry = False

    def _edges(self, key: str, at: fa4.Sequences) -> tuple[str | None, ...]:
        """Of the launches that are made the edge of memory at which aux tensors lie, None for no
        edge: now and then one, and of a few sequences, in which a fault is isolated, both."""
        from kernels.guarded import AT_END, AT_START

        if at.rows <= GUARDED_ROWS:
            return AT_START, AT_END
        return {1: (AT_END,), 2: (AT_START,)}.get(self.launches[key] % GUARDED, (None,))

    def check(self, call: Call, sequences: Sequences, announce: Announce) -> Outcome:
        """Runs the sequences and says which cells are wrong."""
        return self.start(call, sequences, announce)()

    def _measured(
        self, reader: Any, call: Call, sequences: Sequences, key: str, found: Outcome
    ) -> Outcome:
        """With what random data shows of the first sequences, where it is this kernel's turn and
        the mask is right: else it only shows the same again."""
        turn = key in self.inexact or self.launches[key] % MEASURED == 1
        if found.wrong.total or not turn:
            return found
        few = sequences.take(slice(0, MEASURED_SEQUENCES), resolve(call.spec))
        measured = reader.measure(call, self._given(reader.source, call, few))
        if measured.agrees:
            return found
        self.inexact.add(key)
        row = {"b": measured.worst_sequence, "h": 0, "q_idx": 0, "kv_idx": -1,
               "kind": KINDS.index("numerics")}
        more = {name: np.array([value]) for name, value in row.items()}
        known = {**found.wrong.cells, "kind": found.wrong.kind}
        return replace(found, wrong=wrong([known, more], found.wrong.total + 1))

    def _reader(self, provider: str) -> Any:
        if provider not in self.readers:
            from kernels.readout import Reader

            source = self.opened.enter_context(fa4.provider(provider))
            source.more = {name: each for name, each in self.mask_mods.items() if is_file(name)}
            self.readers[provider] = Reader(Bound(source, self.mask_mods), limit=MOST_WRONG)
        return self.readers[provider]

    def _seconds_ahead(self, call: Call) -> float:
        place, _ = self.ahead.get(repr(call), (None, 0))
        return 0.0 if place is None else abs(float(self.seconds[place]))

    def _given(self, source: Bound, call: Call, sequences: Sequences) -> fa4.Sequences:
        mask, constants = resolve(call.spec), {"num_ranges": MOST_ROWS}
        if call.mask_mod is not None:
            constants |= self.mask_mods[call.mask_mod].constants
        # Own rows follow from ranges, and are made from these on the device.
        derived = {"query_ranges"} if "ranges" in sequences.tables else set()
        names = tuple(name for name in source.layout(call)
                      if name not in call.params and name not in derived)
        filled = sequences.padded(1 if call.few else LEAST, mask)
        return for_kernel(mask, filled, call.params, names, constants)

    def _compile_ahead(self, calls: List[Call], places: Mapping[str, int]) -> None:
        """What is compiled stays in the caches on disk."""
        os.nice(NICE)
        for call in calls:
            started, sign = time.perf_counter(), -1
            signal.alarm(COMPILING)
            with suppress(Exception):  # `start` meets it again, and says so
                reader, mask = self._reader(call.provider), resolve(call.spec)
                # Of a parameter that is drawn, and handed on in a table, the value does not matter.
                any_value = {name: param.low for name, param in mask.params.items()}
                whole = replace(call, params={**any_value, **call.params})
                some = self._given(reader.source, whole, none(mask))
                reader.prepare(call, some, short=True)
                sign = 1
            self.seconds[places[repr(call)]] = sign * (time.perf_counter() - started)


def _is_running(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def none(mask: Mask) -> Sequences:
    """No sequence, with tables of the right ranks."""
    shapes = {name: [dim.value if dim.op == "const" else 1 for dim in table.dims]
              for name, table in stated(mask).items()}
    tables = {name: np.zeros(shape if is_shared(stated(mask)[name]) else [0, *shape[1:]], np.int32)
              for name, shape in shapes.items()}
    return Sequences(np.zeros(0, np.int64), np.zeros(0, np.int64), tables)


def outcome(reading: Any, compile_seconds: float, kernels: int) -> Outcome:
    """What a `kernels.readout.Reading` came to."""
    cells = [(w.sequence, w.head, w.q, w.kv, KINDS.index(w.kind)) for w in reading.wrong]
    columns = np.array(cells, dtype=np.int64).reshape(-1, 5).T
    found = wrong([dict(zip(COLUMNS, columns, strict=True))], reading.total)
    return Outcome(
        reading.cells, found, compile_seconds, reading.kernel_seconds + reading.compare_seconds,
        reading.kernel_seconds, kernels,
    )


def _touch() -> None:
    import torch

    torch.ones(8, device="cuda").sum().item()
