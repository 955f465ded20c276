"""The sections of the record that tell right from wrong, small. Needs a Hopper GPU."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.h200 import isolation, processes
from benchmarks.h200.record import ROOT

pytestmark = pytest.mark.gpu
SECONDS = 60


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Any]]:
    """The planted mask_mods, at once, each in a campaign of SECONDS."""
    isolation.BUDGET = SECONDS
    jobs = [partial(isolation.planted, *each) for each in isolation.PLANTED.items()]
    return {each["mask_mod"]: each for each in processes.at_once(jobs, len(jobs))}


@pytest.mark.parametrize(("name", "kind"), isolation.PLANTED.items())
def test_what_breaks_a_launch_is_a_finding_and_not_the_end(
    planted: dict[str, dict[str, Any]], name: str, kind: str
) -> None:
    one = planted[name]
    assert one["status"] == 1 and set(one["kinds"]) == {kind}, one
    assert one["cells"] > 0 and one["wrong_cells"] == 0
    assert all(case["queries"] >= 37 and case["keys"] > 77 for case in one["cases"])


def test_a_leaked_key_of_many_is_read_out_and_not_seen_by_the_usual_test(tmp_path: Path) -> None:
    """In a process of its own: the one here may have used CUDA with another cache."""
    script = (
        "from benchmarks.h200.longest import Leak, of_provider\n"
        "one = of_provider('upstream', Leak(32_768))\n"
        "assert one['leaky']['counts'] == {'leak': 1} and not one['right']['counts'], one\n"
        "assert one['usual']['agrees'] and one['usual']['rows'] == 2048, one\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=200)
