"""What to fill a store with in tests: findings, launches that have ended, a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuzz.case import Case, Sequence
from fuzz.findings import Signature, document, path_of, save
from fuzz.service.store import Store
from fuzz.service.taking import About, Taker, begun
from fuzz.state import State, open_state
from fuzz.targets import Source
from kernels.fa4 import Call

AXES = ["vllm-0.33.0", "vllm-0.33.0/rswa", "rswa", "cpu", "", ""]
NAME = "cpu vllm-0.33.0/rswa for rswa"


def finding(
    kind: str = "leak", region: str = "whole rows", release: str = "vllm-0.33.0",
    name: str = "rswa", spec: str = "rswa", **more: Any,
) -> dict[str, Any]:
    """A finding as fuzz.run writes it."""
    call = Call(provider=release, spec=spec, mask_mod=f"{release}/{name}", params={"window": 4})
    tables = {"prefix_lens": 1} if spec == "rswa" else {}
    case = Case(call, (Sequence(seqlen_q=1, seqlen_k=2, tables=tables),))
    signature = Signature(release, path_of(call, "cpu"), kind, region)
    source = Source(vllm=release.removeprefix("vllm-"))
    return document(signature, case, None, "1 of 2 cells are wrong", source, backend="cpu",
                    device="CPU", seed=1, shrunk=True, **more)


def saved(folder: Path, one: dict[str, Any]) -> None:
    (folder / "state").mkdir(parents=True, exist_ok=True)
    save(folder, one)


def ended(number: int = 1, **more: Any) -> dict[str, Any]:
    """What a launch of `number` sequences adds."""
    return {"launches": 1, "sequences": number, "cells": 10 * number, "wrong_cells": 0,
            "compile_seconds": 0.0, "run_seconds": 0.25, "kernel_seconds": 0.125, "kernels": 0,
            "classes": {NAME: {"prefill": number, "decode": 0}},
            "paths": {NAME: {"launches": 1, "sequences": number, "cells": 10 * number}}, **more}


def a_state(folder: Path) -> State:
    state = open_state(folder)
    state.keep_journals()
    return state


def about(folder: Path, state: State, name: str = "nightly", **more: Any) -> About:
    facts = {"host": "here", "backend": "cpu", "device": "CPU", "seed": 1, "workers": 1,
             "versions": {}}
    given = {
        "name": name, "mode": "batch", "file": {"seed": 1}, "tracked": ["vllm-0.33.0"],
        "targets": [{"name": "vllm-0.33.0/rswa", "release": "vllm-0.33.0", "spec": "rswa",
                     "source": {"vllm": "0.33.0"}}],
        "reachable": [(AXES, ("prefill", "decode", "no key"))], "run": "run-1", "started": 1000,
        "stream": state.stream, "entries": state.entries, "folder": folder, "facts": facts,
    }
    return About(**{**given, **more})


def a_taker(folder: Path, state: State, store: Store, now: float = 1000, **more: Any) -> Taker:
    return begun(about(folder, state, **more), store, now)


def take_all(taker: Taker, now: float = 1000) -> int:
    total = 0
    while did := taker.take(now):
        total += did
    return total
