"""Calls of compiled FA4 kernels, their masks read out cell by cell on a GPU."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from collections.abc import Mapping
from collections.abc import Sequence as List
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fuzz.backends import KINDS, Announce, Broken, Capacity, Outcome, Refused, wrong
from fuzz.bound import Bound
from fuzz.sequences import Sequences, for_kernel
from fuzz.strategies import MOST_ROWS
from fuzz.targets import in_turn, is_file
from fuzz.worker import forked, one_line
from kernels import fa4
from kernels.fa4 import Call, Fa4Error
from kernels.target import Target
from spec.from_file import resolve

# Wrong cells that come back of a launch; all are counted.
MOST_WRONG = 2**14
# What a provider says no with before it has a kernel.
SAYS_NO = (AssertionError, NotImplementedError, ValueError)
PROBE_SECONDS = 8.0
MOST_WORKERS, NICE = 16, 10
# Of fewer sequences FA4 makes another kernel, and of fewer ranges the formula is another: what is
# less is filled up, so that shrinking compiles nothing.
LEAST = fa4.MANY + 1
COLUMNS = ("b", "h", "q_idx", "kv_idx", "kind")
NAMES = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


@dataclass(slots=True)
class GpuBackend:
    """The kernels of a provider, run in a child. `workers` processes compile ahead."""

    targets: Mapping[str, Target]
    workers: int | None = None
    name: str = "gpu"
    device: str = "a GPU"
    capacity: Capacity = Capacity(sequences=4096, cells=2**30, each=2**28, compiling=0.5)
    readers: dict[str, Any] = field(default_factory=dict)
    prepared: set[Any] = field(default_factory=set)
    # Of each call that is compiled ahead the place of its flag, which is 1 when that is done.
    ahead: dict[str, int] = field(default_factory=dict)
    flags: Any = None
    # A provider that is opened stays so until its process ends.
    opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        """The device is told by a program of its own: this process must not ask CUDA."""
        with suppress(OSError, subprocess.SubprocessError):
            self.device = subprocess.run(
                NAMES, capture_output=True, text=True, timeout=10, check=True
            ).stdout.partition("\n")[0].strip()

    def domain(self, call: Call) -> Mapping[str, tuple[Any, ...]]:
        """Nothing varies inside a space: every kernel is compiled once (`fuzz.targets.in_turn`)."""
        return {}

    def refuses(self, call: Call) -> str | None:
        if call.mask_mod is not None:
            if call.mask_mod not in self.targets:
                return f"no target {call.mask_mod!r} here; there are {', '.join(self.targets)}"
            if is_file(call.mask_mod):
                return "a mask_mod in a file runs on the CPU only"
            if reason := self.targets[call.mask_mod].unsupported:
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
        calls = [call for _, call in in_turn(self.targets.values(), gpu=True)
                 if self.refuses(call) is None]
        for provider in {call.provider: None for call in calls}:
            with suppress(Fa4Error):  # `check` says it of every call
                self._reader(provider)
        self.ahead = {repr(call): i for i, call in enumerate(calls)}
        self.flags = mmap.mmap(-1, max(len(calls), 1))
        workers = self.workers or min(os.cpu_count() or 1, MOST_WORKERS)
        for i in range(workers):
            forked(partial(self._compile_ahead, calls[i::workers]))

    def ready(self, call: Call) -> bool:
        place = self.ahead.get(repr(call))
        return place is None or self.flags[place] == 1

    def check(self, call: Call, sequences: Sequences, announce: Announce) -> Outcome:
        if reason := self.refuses(call):
            raise Refused(reason)
        announce("compile")
        started = time.perf_counter()
        try:
            reader = self._reader(call.provider)
            at, new = self._ready(reader, call, sequences)
        except Fa4Error as error:
            raise Refused(str(error)) from None
        except SAYS_NO as error:
            raise Refused(f"{call.provider}: {one_line(error)}") from None
        ready = time.perf_counter()
        announce("run")
        try:
            reading = reader.read(call, at, nan=beyond(at))
        except Exception as error:  # a CUDA error stays with its process
            raise Broken(error) from error
        return outcome(reading, ready - started, time.perf_counter() - ready, int(new))

    def _reader(self, provider: str) -> Any:
        if provider not in self.readers:
            from kernels.readout import Reader

            source = Bound(self.opened.enter_context(fa4.provider(provider)), self.targets)
            self.readers[provider] = Reader(source, limit=MOST_WRONG)
        return self.readers[provider]

    def _ready(self, reader: Any, call: Call, sequences: Sequences) -> tuple[fa4.Sequences, bool]:
        """The sequences as the kernel takes them, and whether it is new. All is compiled then: the
        comparison, too, which reads once what no kernel has written."""
        from kernels.readout import formula_of
        from spec.to_triton import fits_int32

        at = self._given(reader.source, call, sequences)
        key = fa4.compile_key(reader.source.fixed(call), len(at))
        term = formula_of(call, at.tables)
        longest = int(at.seqlens_k.max(initial=0))
        # What the comparison is compiled for: the formula, its width, and how its data is aligned.
        how = (term, fits_int32(term, call.params), longest > call.kv_heads * call.head_dim_v,
               at.rows * (call.q_heads // call.kv_heads) % 4 == 0)
        new = key not in self.prepared
        if new:
            reader.source.compile(call, len(at))
        if (key, how) not in self.prepared:
            reader.source.dry = True
            try:
                reader.read(call, at, nan=beyond(at))
            finally:
                reader.source.dry = False
        self.prepared |= {key, (key, how)}
        return at, new

    def _given(self, source: Bound, call: Call, sequences: Sequences) -> fa4.Sequences:
        mask, constants = resolve(call.spec), {"num_ranges": MOST_ROWS}
        if call.mask_mod is not None:
            constants |= self.targets[call.mask_mod].constants
        names = tuple(name for name in source.layout(call) if name not in call.params)
        return for_kernel(mask, sequences.padded(LEAST, mask), call.params, names, constants)

    def _compile_ahead(self, calls: List[Call]) -> None:
        """What is compiled stays in the cache on disk."""
        os.nice(NICE)
        for call in calls:
            with suppress(Exception):  # `check` meets it again, and says so
                self._reader(call.provider).source.compile(call, LEAST)
            self.flags[self.ahead[repr(call)]] = 1


def beyond(at: fa4.Sequences) -> str:
    """Where NaN lies beyond the sequences. Of one without keys, kernels with a mask_mod read the
    page that its page table names first, and hide it: then nowhere."""
    from kernels.readout import NOWHERE, UNUSED

    return NOWHERE if ((at.seqlens_q > 0) & (at.seqlens_k == 0)).any() else UNUSED


def outcome(reading: Any, compile_seconds: float, run_seconds: float, kernels: int) -> Outcome:
    """What a `kernels.readout.Reading` came to."""
    cells = [(w.sequence, w.head, w.q, w.kv, KINDS.index(w.kind)) for w in reading.wrong]
    columns = np.array(cells, dtype=np.int64).reshape(-1, 5).T
    found = wrong([dict(zip(COLUMNS, columns, strict=True))], reading.total)
    return Outcome(reading.cells, found, compile_seconds, run_seconds, kernels)


def _touch() -> None:
    import torch

    torch.ones(8, device="cuda").sum().item()
