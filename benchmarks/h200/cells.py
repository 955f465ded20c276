"""A campaign of every mask of the catalogue on each provider, by the command that a user types."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.h200 import processes
from benchmarks.h200.classes import Groups, counted, groups
from benchmarks.h200.record import Record
from spec.masks import MASKS

PROVIDERS = {"upstream": None, "vllm-0.33.0": "0.33.0"}
WORKERS = 8
SUMS = ("cells", "wrong_cells", "sequences", "launches", "kernels", "compile_seconds",
        "run_seconds", "kernel_seconds")
PARTS = ("cells", "sequences", "launches")


def run(options: Any) -> Record:
    """One campaign for each provider, at once."""
    gpu = options.backend == "gpu"
    specs = options.spec or list(MASKS)
    paths = {provider: groups(version and processes.release(version), specs, gpu)
             for provider, version in PROVIDERS.items()}
    ran = processes.at_once(
        [partial(campaign, options, provider, paths[provider]) for provider in PROVIDERS],
        len(PROVIDERS))
    return {
        "budget_seconds": options.budget,
        "providers": {one["provider"]: one for one, _ in ran},
        "not_expressed": {name: [spec for spec in specs if not paths[name][spec]]
                          for name in PROVIDERS},
        "parts": [part for _, parts in ran for part in parts],
    }


def campaign(
    options: Any, provider: str, paths: dict[str, Groups], folder: Path
) -> tuple[Record, list[Record]]:
    """What one command found, as its summary has it, and for each mask."""
    version = PROVIDERS[provider]
    where = ["--vllm", processes.release(version)] if version else ["--provider", provider]
    summary = folder / "summary.json"
    targets = dict.fromkeys(target for each in paths.values() for target, _, _ in each.values())
    command = [
        sys.executable, "-m", "fuzz.run", "--backend", options.backend, "--budget",
        f"{options.budget}s", "--findings", str(folder / "findings"), "--json", str(summary),
        "--workers", str(WORKERS), *where,
        *(word for spec, each in paths.items() if each for word in ("--spec", spec)),
        *(word for target in targets for word in ("--target", target)),
    ]
    ended = processes.run(command, processes.python(folder), options.budget + 60)
    whole: Record = {"provider": provider, "command": processes.shown(command),
                     "status": ended.status, "seconds": ended.seconds}
    print(f"{provider}: status {ended.status} after {ended.seconds:.0f} s", flush=True)
    if not summary.is_file() or not summary.stat().st_size:
        return {**whole, "told": ended.told}, []
    told = json.loads(summary.read_text())
    now = told["run"]
    asked = {path for each in paths.values() for path in each}
    if unknown := now.get("classes", {}).keys() - asked:
        raise RuntimeError(f"the campaign ran what it was not asked for: {unknown}")
    whole |= {name: now.get(name, 0) for name in SUMS}
    whole |= {"findings": [f"{one['kind']}: {one['path']}: {one['region']}"
                           for one in told["findings"]],
              **{name: now[name] for name in ("skipped", "infrastructure") if now.get(name)}}
    print(f"  {whole['cells']:.3g} cells, {whole['wrong_cells']} wrong", flush=True)
    return whole, [part(provider, spec, each, now) for spec, each in paths.items() if each]


def part(provider: str, spec: str, paths: Groups, now: Record) -> Record:
    """What a campaign says of one mask."""
    seen = [now.get("paths", {}).get(path, {}) for path in paths]
    return {"provider": provider, "spec": spec,
            **{name: sum(one.get(name, 0) for one in seen) for name in PARTS},
            "groups": counted(MASKS[spec], paths, now.get("classes", {}))}
