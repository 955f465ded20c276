"""Campaigns on real kernels: what is right stays silent, what is wrong is found. Needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzz import replay
from fuzz import run as command
from fuzz.findings import stored

pytestmark = pytest.mark.gpu
# Wrong calls, and the most queries and keys that are left of their cases.
BAD = {
    "known-bad/chunk-local-q": (4, 8),
    "known-bad/no-window-term": (4, 8),
    "built-in/known-bad/window -1, right 0": (4, 8),
}


def campaign(folder: Path, *options: str, seconds: int = 40) -> tuple[int, dict]:
    summary = folder / "summary.json"
    status = command.main([
        "--backend", "gpu", "--budget", f"{seconds}s", "--findings", str(folder / "findings"),
        "--json", str(summary), *options,
    ])
    return status, json.loads(summary.read_text())


@pytest.mark.parametrize("target", ["rswa", "built-in/causal"])
def test_what_is_right_has_no_finding(target: str, tmp_path: Path) -> None:
    status, summary = campaign(tmp_path, "--target", target, "--launches", "3")
    assert (status, summary["findings"]) == (0, [])
    assert summary["run"]["cells"] > 10**6 and summary["run"]["launches"] == 3


@pytest.mark.parametrize("target", BAD)
def test_what_is_wrong_is_found_shrunk_and_replayed(target: str, tmp_path: Path) -> None:
    status, summary = campaign(tmp_path, "--target", target, "--stop-on-first")
    assert status == 1 and summary["run"]["wrong_cells"] > 0
    for finding in stored(tmp_path / "findings").values():
        (sequence,) = finding["case"]["sequences"]
        queries, keys = BAD[target]
        assert sequence["seqlen_q"] <= queries and sequence["seqlen_k"] <= keys
        assert replay.replay(finding).again
