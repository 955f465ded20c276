"""Campaigns of every mask of the catalogue on both providers, by the command that a user types."""

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
# A campaign takes up to about 25 GB of the GPU's memory.
AT_ONCE, WORKERS = 4, 4
SUMS = ("cells", "wrong_cells", "sequences", "launches", "kernels", "compile_seconds",
        "run_seconds", "kernel_seconds")


def run(options: Any) -> Record:
    """One campaign for each provider and mask, AT_ONCE at a time."""
    gpu = options.backend == "gpu"
    specs = options.spec or list(MASKS)
    paths = {(provider, spec): found for provider, version in PROVIDERS.items() for spec, found in
             groups(version and processes.release(version), specs, gpu).items()}
    jobs = [partial(campaign, options, provider, spec, paths[provider, spec])
            for spec in specs for provider in PROVIDERS if paths[provider, spec]]
    parts = processes.at_once(jobs, AT_ONCE)
    return {
        "budget_seconds": options.budget, "at_once": AT_ONCE,
        "providers": {name: summed(name, [p for p in parts if p["provider"] == name])
                      for name in PROVIDERS},
        "not_expressed": {name: [spec for spec in specs if not paths[name, spec]]
                          for name in PROVIDERS},
        "parts": parts,
    }


def campaign(
    options: Any, provider: str, spec: str, paths: Groups, folder: Path
) -> Record:
    """What one command found, as its summary has it."""
    version = PROVIDERS[provider]
    where = ["--vllm", processes.release(version)] if version else ["--provider", provider]
    summary = folder / "summary.json"
    command = [
        sys.executable, "-m", "fuzz.run", "--backend", options.backend, "--budget",
        f"{options.budget}s", "--findings", str(folder / "findings"), "--json", str(summary),
        "--workers", str(WORKERS), *where, "--spec", spec,
        *(word for target in dict.fromkeys(target for target, _, _ in paths.values())
          for word in ("--target", target)),
    ]
    ended = processes.run(command, processes.python(folder), options.budget + 60)
    part: Record = {"provider": provider, "spec": spec, "command": processes.shown(command),
                    "status": ended.status, "seconds": ended.seconds}
    print(f"{provider} {spec}: status {ended.status} after {ended.seconds:.0f} s", flush=True)
    if not summary.is_file() or not summary.stat().st_size:
        return {**part, "told": ended.told}
    told = json.loads(summary.read_text())
    if unknown := told["run"].get("classes", {}).keys() - paths.keys():
        raise RuntimeError(f"the campaign ran what it was not asked for: {unknown}")
    now = told["run"]
    part |= {name: now.get(name, 0) for name in SUMS}
    part |= {"findings": [f"{one['kind']}: {one['path']}: {one['region']}"
                          for one in told["findings"]],
             **{name: now[name] for name in ("skipped", "infrastructure") if now.get(name)},
             "groups": counted(MASKS[spec], paths, now.get("classes", {}))}
    print(f"  {part['cells']:.3g} cells, {part['wrong_cells']} wrong", flush=True)
    return part


def summed(provider: str, parts: list[Record]) -> Record:
    return {name: sum(part.get(name, 0) for part in parts) for name in SUMS}
