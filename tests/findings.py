"""Findings as a run on a GPU writes them, made from what its kernel would have shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.backends import LEAK, LOSS, Outcome, Wrong
from fuzz.case import Case, Sequence
from fuzz.findings import document, save
from fuzz.investigate import signatures
from fuzz.sequences import expected, grid, pack
from fuzz.targets import Source
from kernels.fa4 import Call
from spec.from_file import resolve

DEVICE = {"backend": "gpu", "device": "NVIDIA H200", "seed": 1, "launch": 0, "shrunk": True,
          "shrink_calls": 12, "diagnosis": None}


def finding(
    call: Call, got: str, *sequences: Sequence, source: Source = Source(), **more: Any
) -> dict[str, Any]:
    """What is written where the kernel of `call` shows the mask `got` instead of its spec."""
    mask, case = resolve(call.spec), Case(call, sequences)
    packed = pack(mask, sequences)
    (cells,) = [{**piece, "h": np.zeros_like(piece["b"])} for piece in grid(packed)]
    meant = expected(mask, call.params, packed, cells)
    seen = expected(replace(mask, formula=resolve(got).formula), call.params, packed, cells)
    bad = np.flatnonzero(meant != seen)
    wrong = Wrong(*(cells[name][bad] for name in ("b", "h", "q_idx", "kv_idx")),
                  np.where(seen[bad], LEAK, LOSS), len(bad))
    outcome = Outcome(len(meant), wrong)
    more = {**DEVICE, **more}
    signature = next(iter(signatures(mask, call, packed, outcome, more["backend"])))
    text = f"{wrong.total} of {outcome.cells} cells are wrong"
    return document(signature, case, wrong, text, source, **more)


def saved(folder: Path, given: Mapping[str, Any]) -> Path:
    (folder / "state").mkdir(parents=True, exist_ok=True)
    return save(folder, given)


def dynamic_causal(version: str = "0.24.0", window: int | None = None) -> dict[str, Any]:
    """The tensor is given and never read: a causal sequence sees its future."""
    left = None if window is None else window - 1
    name = "dynamic_causal" if window is None else "dynamic_causal_window"
    call = Call(
        provider=f"vllm-{version}", spec=name, dynamic_causal=True, window_size_left=left,
        window_size_right=left, params={} if window is None else {"window": window},
        q_heads=4, kv_heads=4)
    got = "full" if window is None else "window_symmetric"
    return finding(call, got, Sequence(seqlen_q=2, seqlen_k=3, tables={"dynamic_causal": 1}),
                   source=Source(vllm=version))


def rswa(version: str = "0.33.0") -> dict[str, Any]:
    """The mask_mod is given beside causal=True and never called: the mask is causal."""
    call = Call(provider=f"vllm-{version}", spec="rswa", mask_mod=f"vllm-{version}/rswa",
                causal=True, params={"window": 2}, q_heads=4, kv_heads=4)
    return finding(call, "causal", Sequence(seqlen_q=3, seqlen_k=6, tables={"prefix_lens": 1}),
                   source=Source(vllm=version))


def mm_prefix(version: str = "0.24.0", name: str = "mm_prefix[window,ranges=2]"
              ) -> dict[str, Any]:
    """The mask_mod has no window, and takes the query's place in the chunk for its position."""
    call = Call(provider=f"vllm-{version}", spec="mm_prefix", params={"window": 2},
                mask_mod=f"vllm-{version}/{name}", q_heads=4, kv_heads=4)
    return finding(
        call, "kv <= q - (seqlen_k - seqlen_q)",
        Sequence(seqlen_q=2, seqlen_k=5, tables={"ranges": ((1, 2),)}),
        source=Source(vllm=version), backend="cpu", device="CPU x86_64")


if __name__ == "__main__":
    import sys

    made = {"dynamic_causal": dynamic_causal(), "rswa": rswa(), "mm_prefix": mm_prefix(),
            "dynamic_causal_window": dynamic_causal(window=3)}
    for name, each in made.items():
        Path(sys.argv[1], f"{name}.json").write_text(json.dumps(each, indent=1) + "\n")
