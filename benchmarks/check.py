"""What a whole check costs: seconds on the clock and of CPU, and memory of the whole process tree.

    python -m benchmarks.check                      # --vllm 0.33.0 --no-cache
    python -m benchmarks.check --vllm 0.33.0 --full

Memory is the largest sum of proportional set sizes, so that pages that processes share count once,
and beside it that of resident set sizes, where they count in each.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT = ("--vllm", "0.33.0", "--no-cache")
EVERY = 0.25
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the clock, of the CPU in user and in system mode; MB at the peak."""

    wall: float
    user: float
    system: float
    proportional: float
    resident: float
    processes: int
    status: int


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for pid in found:
        try:
            for task in (PROC / str(pid) / "task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def memory(pids: Sequence[int]) -> tuple[float, float]:
    """Proportional and resident size of processes together, in MB."""
    total = {"Pss:": 0, "Rss:": 0}
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for name, kilobytes, *_ in (line.split() for line in lines[1:]):
            total[name] = total.get(name, 0) + int(kilobytes)
    return total["Pss:"] / 1024, total["Rss:"] / 1024


def measured(command: Sequence[str]) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = subprocess.Popen(command)
    proportional = resident = 0.0
    most = 0
    while child.poll() is None:
        pids = tree(child.pid)
        now = memory(pids)
        proportional, resident = max(proportional, now[0]), max(resident, now[1])
        most = max(most, len(pids))
        time.sleep(EVERY)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(time.perf_counter() - start, used.ru_utime - before.ru_utime,
                used.ru_stime - before.ru_stime, proportional, resident, most, child.returncode)


def main() -> int:
    arguments = sys.argv[1:] or list(DEFAULT)
    cost = measured([sys.executable, "-m", "spec.check", *arguments])
    print(f"\nspec.check {' '.join(arguments)} on {os.cpu_count()} cores, status {cost.status}")
    print(f"wall {cost.wall:.1f} s, user {cost.user:.1f} s, system {cost.system:.1f} s; "
          f"at the peak {cost.proportional:.0f} MB proportional, {cost.resident:.0f} MB resident, "
          f"{cost.processes} processes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
