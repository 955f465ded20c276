"""The record: one JSON file, a section for each thing that was shown."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
DIGITS = 5
# Containers below this depth are written on one line.
DEPTH = 3


def load(path: Path) -> Record:
    return json.loads(path.read_text()) if path.is_file() and path.stat().st_size else {}


def merge(path: Path, name: str, section: Record) -> None:
    """Replaces one section of the file and keeps the others; whole or not at all."""
    record = {**load(path), name: rounded(section)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
        new.write(written(dict(sorted(record.items()))) + "\n")
    Path(new.name).chmod(0o644)
    Path(new.name).replace(path)


def rounded(value: Any) -> Any:
    """Numbers that were measured, to five digits."""
    if isinstance(value, dict):
        return {str(name): rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def written(value: Any, depth: int = 0) -> str:
    """JSON with a line for each entry, down to DEPTH."""
    if depth == DEPTH or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    pad, ends = " " * (depth + 1), "{}" if isinstance(value, dict) else "[]"
    inner = [
        f"{pad}{json.dumps(name)}: {written(part, depth + 1)}" for name, part in value.items()
    ] if isinstance(value, dict) else [pad + written(part, depth + 1) for part in value]
    return ends[0] + "\n" + ",\n".join(inner) + "\n" + " " * depth + ends[1]


def stamped(name: str, given: list[str], work: Callable[[], Record]) -> Record:
    """What a section found, with what it takes to find it again."""
    from fuzz.findings import versions

    begin = perf_counter()
    found = work()
    return {
        "command": " ".join(["python -m benchmarks.h200 --json FILE --only", name, *given]),
        "gpu": gpu(), "versions": {**versions(), **triton()},
        "date": datetime.now(UTC).date().isoformat(), "seconds": perf_counter() - begin, **found,
    }


def gpu() -> str:
    """The name of the GPU, told by a program of its own."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return told.stdout.partition("\n")[0].strip()
    return "none"


def triton() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return {"triton": version("triton")}
    return {}
