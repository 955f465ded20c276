"""Commands of the project as processes of their own, some at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter
from typing import IO, Any

from benchmarks.h200.record import ROOT

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
# Of what a command wrote only the end is of use, and only when it failed.
TOLD = 400


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    seconds: float
    told: str


def python(folder: Path, cache: Path | None = None) -> dict[str, str]:
    """An environment in which `python` is this Python, the project can be imported and, if `cache`
    is given, compiled kernels are kept there."""
    there = folder / "bin" / "python"
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    there.chmod(0o755)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {} if cache is None else {CACHE: str(cache)}
    return {**os.environ, "PATH": f"{there.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": path, **more}


@dataclass(frozen=True, slots=True)
class Running:
    """A process that writes to a file, in a process group of its own."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def is_running(self) -> bool:
        return self.process.poll() is None

    def ended(self, limit: float) -> Ended:
        """Waits. What is there after `limit` seconds is ended, with status -9."""
        begin = perf_counter()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.output.seek(0)
        told = self.output.read().decode(errors="replace")[-TOLD:]
        self.output.close()
        return Ended(self.process.returncode, perf_counter() - begin, told)


def started(command: Sequence[str] | str, env: dict[str, str]) -> Running:
    """A command, as a list or as a shell line."""
    output = TemporaryFile()  # noqa: SIM115  `ended` closes it
    return Running(subprocess.Popen(
        command, cwd=ROOT, env=env, shell=isinstance(command, str), stdin=subprocess.DEVNULL,
        stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
    ), output)


def run(command: Sequence[str] | str, env: dict[str, str], limit: float) -> Ended:
    return started(command, env).ended(limit)


def at_once(
    jobs: Sequence[Callable[[Path], Any]], count: int, limit: float = inf
) -> list[Any]:
    """What the jobs return, in their order, `count` of them at a time, each in a new folder; None
    for one whose turn comes only after `limit` seconds."""
    until = perf_counter() + limit

    def alone(job: Callable[[Path], Any]) -> Any:
        if perf_counter() > until:
            return None
        with TemporaryDirectory() as folder:
            return job(Path(folder))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(alone, jobs))


def release(version: str) -> str:
    """What `--vllm` is to be: the unpacked tree if there is one, or else the version."""
    tree = Path(os.environ.get("VLLM_TREES", "")) / version
    return str(tree) if os.environ.get("VLLM_TREES") and tree.is_dir() else version


def shown(command: Sequence[str]) -> str:
    """A command as a person would type it, without the places of this machine."""
    trees = os.environ.get("VLLM_TREES")
    words = ["python" if word == sys.executable else word for word in command]
    if trees:
        words = [word.replace(trees, "$VLLM_TREES") for word in words]
    hidden = {"--findings": "DIR", "--json": "FILE"}
    return " ".join(hidden.get(before, word) if before in hidden else
                    (f"'{word}'" if " " in word or "[" in word else word)
                    for before, word in zip(["", *words], words, strict=False))
