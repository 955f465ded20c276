"""A read past a table at the edge of mapped memory ends the process that reads. Needs a GPU.

As a program, `python -m tests.gpu.test_guarded EDGE WHAT`, it reads the int32 at an index of a
table, or the mask of a mask_mod of the project whose tables lie at an edge.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import triton
from triton import language as tl

from kernels.fa4 import Call, Resident, Sequences, provider
from kernels.guarded import WORD, Guarded

pytestmark = pytest.mark.gpu
SIZE = 12
EDGES = {"start": False, "end": True}


@triton.jit
def peek(out, table, index):
    tl.store(out, tl.load(table + index))


def read(edge: str, index: int) -> int:
    import torch

    values = torch.arange(SIZE, dtype=torch.int32, device="cuda") + 100
    table = Guarded().place(values, at_end=EDGES[edge])
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    peek[(1,)](out, table, index)
    torch.cuda.synchronize()
    return int(out)


class Placed:
    """A provider whose aux tensors all lie at an edge."""

    def __init__(self, source: Any, edge: str) -> None:
        self.source, self.edge, self.held = source, edge, Guarded()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def launch(self, call: Call, on: Resident, **given: Any) -> None:
        self.source.launch(call, self.held.tables(on, at_end=EDGES[self.edge]), **given)


def wrong(mask_mod: str, edge: str) -> int:
    """Wrong cells of a mask_mod of the project for `mm_prefix`. The last sequence fills no tile."""
    from kernels.readout import Reader

    q, k = np.array([(1, 1), (127, 127), (129, 129), (1, 300), (40, 513), (5, 9)], np.int32).T
    rows = np.full((int(q.sum()), 2), -1, np.int32)
    on = Sequences(q.copy(), k.copy(), {"query_ranges": rows})
    call = Call(provider="upstream", spec="mm_prefix", params={"window": 3}, kv_heads=2, q_heads=2,
                mask_mod=f"maskproof/{mask_mod}")
    with provider("upstream") as source:
        return Reader(Placed(source, edge)).read(call, on).total


def child(edge: str, what: int | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.test_guarded", edge, str(what)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("index", [0, SIZE - 1])
def test_inside_a_table_its_elements_are_read(edge: str, index: int) -> None:
    assert read(edge, index) == 100 + index


@pytest.mark.parametrize(("edge", "index"), [("end", SIZE), ("start", -1)])
def test_one_past_the_guarded_end_is_an_illegal_access(edge: str, index: int) -> None:
    found = child(edge, index)
    assert found.returncode != 0 and "illegal memory access" in found.stderr
    assert child(edge, index - (1 if edge == "end" else -1)).returncode == 0


def test_the_other_end_is_readable() -> None:
    assert child("end", -1).returncode == 0
    assert child("start", SIZE).returncode == 0


def test_memory_is_used_again_and_given_back() -> None:
    import torch

    held = Guarded()
    table = torch.arange(1000, dtype=torch.int32, device="cuda").view(10, 50, 2)
    for at_end in (True, False, True):
        there = held.place(table, at_end=at_end)
        assert torch.equal(there, table) and there.data_ptr() % WORD == 0
        assert len(held.used) == 1
        held.again()
    large = torch.zeros(2**20, dtype=torch.int32, device="cuda")
    held.place(large)
    assert (len(held.used), len(held.free)) == (1, 1)
    held.close()
    assert not held.used and not held.free


@pytest.mark.parametrize("edge", EDGES)
def test_a_right_mask_mod_reads_inside_its_tables(edge: str) -> None:
    """A whole kernel, padded rows and keys included."""
    assert wrong("mm_prefix[window]", edge) == 0


def test_a_mask_mod_without_care_for_padded_rows_reads_past_its_table() -> None:
    found = child("end", "known-bad/unclamped-lookup")
    assert found.returncode != 0 and "illegal memory access" in found.stderr


if __name__ == "__main__":
    edge, what = sys.argv[1:]
    number = what.lstrip("-").isdigit()
    sys.stdout.write(f"{read(edge, int(what)) if number else wrong(what, edge)}\n")
