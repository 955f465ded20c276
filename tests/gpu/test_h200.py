"""The sections of the record that tell right from wrong, small. Needs a Hopper GPU."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.h200 import isolation, processes
from benchmarks.h200.goals import done
from benchmarks.h200.record import ROOT, load

pytestmark = pytest.mark.gpu
SECTIONS = ("layouts", "numerics", "wrong")
SECONDS = 60


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sections that take seconds, each in a process of its own."""
    path = tmp_path_factory.mktemp("h200") / "record.json"
    command = [sys.executable, "-m", "benchmarks.h200", "--json", str(path), "--only", *SECTIONS]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return load(path)


def test_every_layout_is_right(record: dict[str, Any]) -> None:
    section = record["layouts"]
    assert section["wrong"] == 0 and section["cells"] > 10**8
    assert not [each for each in done(section) if "error" in each] and len(done(section)) > 70


def test_random_data_agrees(record: dict[str, Any]) -> None:
    assert all(each.get("agrees") for each in done(record["numerics"]))


def test_wrong_calls_are_seen_to_be_wrong(record: dict[str, Any]) -> None:
    assert all(each.get("wrong") for each in done(record["wrong"]))


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
    assert all(case["queries"] > 3 and case["keys"] > 77 for case in one["cases"])


def test_a_leaked_key_of_many_is_read_out_and_not_seen_by_the_usual_test(tmp_path: Path) -> None:
    """In a process of its own: the one here may have used CUDA with another cache."""
    script = (
        "from benchmarks.h200.longest import Leak, of_provider\n"
        "one = of_provider('upstream', Leak(32_768))\n"
        "assert one['leaky']['counts'] == {'leak': 1} and not one['right']['counts'], one\n"
        "assert one['usual']['agrees'] and one['usual']['rows'] == 2048, one\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=200)
