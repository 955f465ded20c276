"""What a check costs, as ratios to the imports that it cannot do without; all in one run.

    python benchmarks/check_ratio.py --rounds 5

The measured commands take turns, each in a process of its own. The promises: a warm check of a
release takes at most twice the time of its imports and 1.3 times their memory, its solver less than
a second, and `--list` less than half a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = "import torch, z3, cutlass, flash_attn.cute"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process and its children: seconds on the clock, seconds of CPU, peak memory in MB."""

    wall: float
    cpu: float
    memory: float


def measured(command: Sequence[str]) -> Cost:
    start = time.perf_counter()
    silence = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=silence)
    _, status, used = os.wait4(pid, 0)
    wall = time.perf_counter() - start
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise SystemExit(f"{' '.join(command)} ended with status {code}")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(getattr(c, name) for c in costs) for name in Cost.__slots__))


def solver_seconds(file: Path) -> float:
    return sum(row["seconds"] for row in json.loads(file.read_text())["results"])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5, help="turns (default %(default)s)")
    options.add_argument("--vllm", default="0.33.0", help="the release (default %(default)s)")
    given = options.parse_args()
    os.chdir(ROOT)
    # FA4's own imports need an architecture where there is no GPU, as the check sets one.
    import kernels.environment  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        check = [sys.executable, "-m", "spec.check"]
        commands = {
            "imports": [sys.executable, "-c", IMPORTS],
            "check": [*check, "--vllm", given.vllm, "--layer", "mask_mod", "--json", str(file)],
            "list": [*check, "--list"],
        }
        for command in commands.values():
            measured(command)  # the cache of the release and of Python's bytecode is warm from here
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        solver = []
        for _ in range(given.rounds):
            for name, command in commands.items():
                costs[name].append(measured(command))
            solver.append(solver_seconds(file))
    report({name: median(found) for name, found in costs.items()}, statistics.median(solver))
    return 0


def report(costs: dict[str, Cost], solver: float) -> None:
    print(f"{'':10}{'wall s':>8}{'CPU s':>8}{'MB':>8}")
    for name, cost in costs.items():
        print(f"{name:10}{cost.wall:8.2f}{cost.cpu:8.2f}{cost.memory:8.0f}")
    check, imports = costs["check"], costs["imports"]
    for words, value, promise in (
        ("check / imports, time", check.wall / imports.wall, 2),
        ("check / imports, CPU", check.cpu / imports.cpu, 2),
        ("check / imports, memory", check.memory / imports.memory, 1.3),
        ("proofs and their mutants, seconds", solver, 1),
        ("list, seconds", costs["list"].wall, 0.5),
    ):
        missed = "" if value <= promise else ": MISSED"
        print(f"{words:36}{value:6.2f}  (at most {promise}{missed})")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
