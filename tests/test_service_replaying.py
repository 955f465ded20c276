"""What a finding's case comes to with the code of a release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fuzz.backends import LEAK, LOSS, CpuBackend, Outcome, wrong
from fuzz.case import Sequence
from fuzz.service.records import AGAIN, FAILED, GONE
from fuzz.service.replaying import Replayer
from fuzz.targets import Source, gathered
from fuzz.worker import CRASH, HANG, SKIP, Failure
from kernels.fa4 import Call
from tests.findings import finding

CALL = Call(provider="upstream", spec="rswa", mask_mod="maskproof/rswa", params={"window": 2})


def outcome(kind: int | None) -> Outcome:
    """A case of four cells of which one is wrong, or none."""
    cell = {"b": 0, "h": 0, "q_idx": 0, "kv_idx": 1, "kind": kind}
    parts = [] if kind is None else [{name: np.array([value]) for name, value in cell.items()}]
    return Outcome(4, wrong(parts, len(parts)))


@pytest.mark.parametrize(("result", "expected"), [
    (outcome(LEAK), AGAIN), (outcome(None), GONE), (outcome(LOSS), FAILED),
    (Failure(CRASH, "run", "SIGSEGV", died=True), FAILED),
    (Failure(CRASH, "compile", "NameError"), FAILED),
    (Failure(HANG, "start", "did not end", died=True), FAILED),
    (Failure(SKIP, "run", "not here"), FAILED),
])
def test_only_a_case_that_runs_and_is_right_is_gone(result: Any, expected: str) -> None:
    sequence = Sequence(seqlen_q=2, seqlen_k=2, tables={"prefix_lens": 0})
    given = finding(CALL, "full", sequence, backend="cpu")
    worker = SimpleNamespace(run=lambda call, packed: result)
    with gathered(Source()) as targets:
        replayer = Replayer(CpuBackend(targets), worker, targets)  # type: ignore[arg-type]
        found = replayer.replay(given, "upstream")
    assert found is not None and found.result == expected, found
