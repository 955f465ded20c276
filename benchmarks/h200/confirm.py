"""What the proofs say that kernels do, seen on the GPU: each claim of `benchmarks/claims.json`.

A refuted call is made once, and its mask is read out: it is to be wrong, and on every cell it is
to be the mask that the proof says it is. Each claim has processes of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.h200.inputs import RANGES, UPSTREAM, drawn
from benchmarks.h200.record import ROOT, Record
from kernels.derived import formula_of, on_device
from kernels.fa4 import Call, Fa4Error, Provider, Sequences, provider, release_of, releases
from kernels.readout import Reader, Reading
from kernels.target import Target
from spec.from_text import from_text
from spec.term import INT
from spec.to_numpy import to_numpy

FILE = ROOT / "benchmarks" / "claims.json"
# Sequences beside the witness, their longest, and those of one size whose blocks are classified.
SEQUENCES, LONGEST, BATCH = 47, 300, 16
SEED = 20
# Processes at once, and seconds after which those that are left are ended; those that a claim has
# of its own end before it.
PROCESSES, LIMIT, INNER = 20, 70, 60
SKIPPED, PARTIAL, FULL = 0, 1, 2
POINTS = 5


def run(options: Any) -> Record:
    claims = json.loads(FILE.read_text())
    here = [claim for claim in claims if reason(claim) is None]
    warm_up()
    found = alone([partial(confirm, claim) for claim in here], PROCESSES, LIMIT)
    told = [{**known(claim), **what} for claim, what in zip(here, found, strict=True)]
    for one in told:
        print(one, flush=True)
    left = [(claim, why) for claim in claims if (why := reason(claim))]
    return {"sequences": SEQUENCES + 1, **sorted_out(told, left)}


def sorted_out(told: Sequence[Record], left: Sequence[tuple[Record, str]] = ()) -> Record:
    """The claims that were tried on the kernels that they are about, and why others were not."""
    not_here: dict[str, list[str]] = {}
    for claim, why in (*left, *((one, why) for one in told if (why := elsewhere(one)))):
        not_here.setdefault(why, []).append(f"{claim['target']} {claim['obligation']}")
    return {"not_here": not_here,
            "claims": [{**one, "said": said(one)} for one in told if not elsewhere(one)]}


def elsewhere(one: Record) -> str | None:
    """Why what was seen says nothing of a claim: one about flags is one about a release's own
    kernels, which other kernels stood in for."""
    name = one["target"].partition("/")[0]
    if one["obligation"] != "effective-mask" or one.get("fa4", name).endswith(name):
        return None
    if not name.startswith("vllm-"):
        return None
    return f"about the kernels of {name}, which do not import here"


def reason(claim: Record) -> str | None:
    """Why a claim is not tried, or None where it is."""
    if "left_out" in claim:
        return claim["left_out"]
    name = claim["target"].partition("/")[0]
    if name.startswith("vllm-"):
        there = {each.name for each in releases()}
        return None if name in there else f"{name} is not at hand"
    from importlib.metadata import version

    there = f"flash-attn-4-{version('flash-attn-4')}"
    return None if name == there else f"{name} is not installed"


def known(claim: Record) -> Record:
    shown = claim.get("call") or claim["then"]["call"]
    return {**{name: claim[name] for name in ("target", "obligation", "digest", "sentence")},
            "kind": claim["kind"], "call": shown}


def warm_up() -> None:
    """Imports what takes seconds, so that processes forked from this one need not."""
    import kernels.comparison  # noqa: F401

    with provider(UPSTREAM):
        pass


def alone(jobs: Sequence[Callable[[], Record]], count: int, limit: float) -> list[Record]:
    """What the jobs return, each in a process forked from this one, which must not have used CUDA.
    `error` says what became of one that returns nothing."""
    context, found = get_context("fork"), [{"error": "not done in time"} for _ in jobs]
    left, running = list(enumerate(jobs)), {}
    end = perf_counter() + limit
    while left or running:
        while left and len(running) < count:
            i, job = left.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(there, job))
            process.start()
            there.close()
            running[here] = i, process
        ready = wait(list(running), max(0.0, end - perf_counter()))
        for here in ready or list(running):
            i, process = running.pop(here)
            if here in ready:
                found[i] = _told(here)
            process.kill()
            process.join()
    return found


def _tell(there: Connection, job: Callable[[], Record]) -> None:
    try:
        told = job()
    except Exception as error:  # noqa: BLE001  the others are still of use
        told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
    there.send(told)


def _told(here: Connection) -> Record:
    try:
        return here.recv()
    except EOFError:
        return {"error": "the process ended"}


def confirm(claim: Record) -> Record:
    return KINDS[claim["kind"]](claim)


def of_mask(claim: Record) -> Record:
    call = Call(**claim["call"])
    with provider(call.provider) as source:
        source.more = asked(claim, source)
        return mask_read(Reader(source), call, claim)


def mask_read(reader: Reader, call: Call, claim: Record) -> Record:
    """The wrong cells of the call, and those that are not as predicted; the witness by itself."""
    sequences = with_witness(claim, call.spec, SEQUENCES)
    found = compared(reader, call, claim["effective"], sequences)
    first = reader.read(call, sequences.select([0]))
    return {**found, "sequences": len(sequences), "witness": witness(claim["witness"], first)}


def compared(reader: Reader, call: Call, effective: str, sequences: Sequences) -> Record:
    meant = reader.read(call, sequences)
    predicted = reader.read(replace(call, spec=effective), sequences)
    return {"fa4": meant.fa4, "cells": meant.cells, "wrong": dict(meant.counts),
            "unlike": dict(predicted.counts),
            "as_predicted": meant.total > 0 and predicted.total == 0}


def witness(cell: Record, found: Reading) -> Record:
    """The cell, and what is wrong with it: leak, loss, or nothing."""
    at = cell["q_idx"], cell["kv_idx"]
    kinds = [each.kind for each in found.wrong if (each.q, each.kv) == at]
    return {"q_idx": at[0], "kv_idx": at[1], "kind": next(iter(kinds), "right")}


def asked(claim: Record, source: Provider) -> Mapping[str, Target]:
    """The mask_mod that a release's `forward` asks a factory for, as a target of the call's."""
    if "factory" not in claim:
        return {}
    from kernels.vllm import _without_cache, load

    factory, name = claim["factory"], claim["call"]["mask_mod"]

    def make(symbols: Mapping[str, object]) -> Any:
        own, release = source._loaded, release_of(claim["call"]["provider"])
        with nullcontext(own) if own and own.release.name == release.name else \
                load(release) as loaded:
            return _without_cache(loaded.factories[factory["name"]])(**factory["arguments"])

    return {name: Target(target=name, spec=claim["spec"], make=make,
                         layouts=(tuple(factory["layout"]),))}


def with_witness(claim: Record, spec: str, count: int, longest: int = LONGEST) -> Sequences:
    """The sequence of the witness, and random ones after it."""
    first = claim["witness"]
    ranges = len(first["tables"].get("ranges", ())) or RANGES
    more = drawn(SEED, spec, count, longest, ranges=ranges)
    lengths = (np.concatenate([[first[name]], rest]).astype(np.int32) for name, rest in (
        ("seqlen_q", more.seqlens_q), ("seqlen_k", more.seqlens_k)))
    return Sequences(*lengths, {
        name: np.concatenate([[first["tables"][name]], table]).astype(np.int32)
        for name, table in more.tables.items()})


class Keyed(Provider):
    """A provider whose mask_mods have the compile keys that FA4 itself makes for them."""

    def __init__(self, source: Provider) -> None:
        super().__init__(source.name, source.fa4, source.interface)
        cache = import_module(f"{source.interface.__package__}.cache_utils").JITCache()
        self._caches = {False: cache, True: cache}
        self.made: dict[str, Any] = {}

    def mask_mod(self, call: Call) -> tuple[Any, tuple[str, ...]]:
        assert call.mask_mod is not None
        return self.made[call.mask_mod], ()


def of_key(claim: Record) -> Record:
    """The later call by itself, and after the earlier: each in a fresh process, with no kernel
    from elsewhere."""
    first, then = claim["first"], claim["then"]
    effective = first["call"]["spec"]
    by_itself, after = alone(
        [partial(in_turn, each, effective) for each in ([then], [first, then])], 2, INNER)
    if "error" in by_itself or "error" in after:
        return {"error": by_itself.get("error") or after["error"]}
    refused = "refused" in after and "refused" not in by_itself
    return {**after, "by_itself": by_itself.get("wrong", by_itself.get("refused")),
            "as_predicted": by_itself.get("wrong") == {} and (refused or after["as_predicted"])}


def in_turn(calls: Sequence[Record], effective: str) -> Record:
    """What the last of the calls computes; `refused` says how it failed, if it did."""
    with provider(calls[0]["call"]["provider"]) as source:
        keyed = Keyed(source)
        reader = Reader(keyed)
        for each in calls:
            call = Call(**each["call"])
            if call.mask_mod is not None:
                keyed.made[call.mask_mod] = made(each["part"], call.mask_mod)
            sequences = drawn(SEED, tables_of(call), SEQUENCES + 1, LONGEST)
            more = {"fa4": source.fa4, "sequences": len(sequences)}
            try:
                found = compared(reader, call, effective, sequences)
            except Fa4Error:
                raise
            except Exception as error:  # noqa: BLE001  of any kind that a kernel's call raises
                if each is not calls[-1]:
                    raise
                return {**more, "refused": f"{type(error).__name__}: {str(error)[:200]}"}
            if each is not calls[-1] and found["wrong"]:
                raise RuntimeError(f"the earlier call is wrong: {found['wrong']}")
        return {**found, **more}


def tables_of(call: Call) -> str:
    """A mask with the tables that the call reads."""
    return "dynamic_causal" if call.dynamic_causal else call.spec


def made(part: str, label: str) -> Any:
    from kernels.keyed_mask_mods import PARTS

    return dict(PARTS[part][1])[label]()


def of_blocks(claim: Record) -> Record:
    """How FA4's kernel classifies blocks by five of their cells, beside what these cells and what
    all cells say."""
    import torch

    call, (m, n) = Call(**claim["call"]), claim["tile"]
    sequences = alike(with_witness(claim, call.spec, BATCH - 1))
    with provider(call.provider) as source:
        mask_mod, layout = source.mask_mod(call)
        on = on_device(call, layout, sequences, "cuda")
        classify = import_module(f"{source.interface.__package__}.compute_block_sparsity")
        found = classify.compute_block_sparsity(
            m, n, len(sequences), 1, int(sequences.seqlens_q[0]), int(sequences.seqlens_k[0]),
            mask_mod, [source._aux(on, name) for name in layout], "cuda")
        torch.cuda.synchronize()
        kernel = classes(*(getattr(found, name).cpu().numpy() for name in (
            "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")))
        return {"fa4": source.fa4, "sequences": len(sequences),
                **blocks_compared(claim, call, sequences, kernel)}


def alike(sequences: Sequences) -> Sequences:
    """All as long as the first of them."""
    return Sequences(np.full_like(sequences.seqlens_q, sequences.seqlens_q[0]),
                     np.full_like(sequences.seqlens_k, sequences.seqlens_k[0]), sequences.tables)


def classes(partial_count: Any, partial_index: Any, full_count: Any, full_index: Any) -> Any:
    """The class of each block [n, m_blocks, n_blocks], of the lists for one head."""
    found = np.full(partial_index[:, 0].shape, SKIPPED)
    for count, index, kind in ((partial_count, partial_index, PARTIAL),
                               (full_count, full_index, FULL)):
        for b, row in np.ndindex(found.shape[:2]):
            found[b, row, index[b, 0, row, : count[b, 0, row]]] = kind
    return found


def blocks_compared(claim: Record, call: Call, sequences: Sequences, kernel: Any) -> Record:
    cells = visible(call, sequences)
    every, five = by_all(cells, claim["tile"]), by_points(cells, claim["tile"], claim["point"])
    cell = claim["witness"]
    block = 0, cell["m_block"], cell["n_block"]
    wrong = {text: int(((kernel == of) & (every != of)).sum())
             for of, text in ((FULL, "full with hidden cells"), (SKIPPED, "skipped with visible"))}
    unlike = int((kernel != five).sum())
    return {"cells": int(cells.size), "blocks": int(kernel.size),
            "wrong": {text: count for text, count in wrong.items() if count},
            "unlike": {"blocks": unlike} if unlike else {},
            "as_predicted": any(wrong.values()) and not unlike,
            "witness": {"q_idx": cell["q_idx"], "kv_idx": cell["kv_idx"],
                        "kind": WRONG.get((int(kernel[block]), bool(
                            cells[0, cell["q_idx"], cell["kv_idx"]])), "right")}}


WRONG = {(FULL, False): "leak", (SKIPPED, True): "loss"}


def visible(call: Call, sequences: Sequences) -> Any:
    """Every cell [n, queries, keys] of sequences of one size, by the formula of the spec."""
    queries, keys = int(sequences.seqlens_q[0]), int(sequences.seqlens_k[0])
    b = np.arange(len(sequences))[:, None, None]
    env = {**call.params, **sequences.tables, "b": b, "h": 0, "seqlen_q": queries,
           "seqlen_k": keys, "q_idx": np.arange(queries)[:, None], "kv_idx": np.arange(keys),
           "offset_q": b * queries, "offset_k": b * keys}
    found = to_numpy(formula_of(call, sequences.tables), env)
    return np.broadcast_to(found, (len(sequences), queries, keys))


def by_all(cells: Any, tile: Sequence[int]) -> Any:
    m, n = (range(0, size, step) for size, step in zip(cells.shape[1:], tile, strict=True))
    blocks = [[cells[:, q:q + tile[0], kv:kv + tile[1]] for kv in n] for q in m]
    return np.stack([np.stack([_class(one.all(axis=(1, 2)), one.any(axis=(1, 2)))
                               for one in row], axis=-1) for row in blocks], axis=1)


def by_points(cells: Any, tile: Sequence[int], point: tuple[str, str]) -> Any:
    """`point` is the query and the key that the thread `tidx` looks at in a block."""
    m_blocks, n_blocks = (-(-size // step) for size, step in zip(cells.shape[1:], tile,
                                                                 strict=True))
    env = {"seqlen_q": cells.shape[1], "seqlen_k": cells.shape[2],
           "tidx": np.arange(POINTS)[:, None, None], "m_block": np.arange(m_blocks)[:, None],
           "n_block": np.arange(n_blocks)}
    q, kv = np.broadcast_arrays(*(to_numpy(from_text(text, sort=INT), env) for text in point))
    seen = cells[:, np.broadcast_to(q, (POINTS, m_blocks, n_blocks)),
                 np.broadcast_to(kv, (POINTS, m_blocks, n_blocks))]
    return _class(seen.all(axis=1), seen.any(axis=1))


def _class(all_visible: Any, any_visible: Any) -> Any:
    return np.where(all_visible, FULL, np.where(any_visible, PARTIAL, SKIPPED))


KINDS: Mapping[str, Callable[[Record], Record]] = {
    "mask": of_mask, "key": of_key, "blocks": of_blocks,
}


def said(one: Record) -> str:
    """What a person is told of a claim that was tried, in one sentence; nothing of an error."""
    if "error" in one:
        return ""
    where = f"on {one['fa4']}"
    if "refused" in one:
        return (f"{where} the later call is refused, with `{one['refused']}`; by itself it is not, "
                "and no cell of it is wrong")
    count = f"{sum(one['wrong'].values()):,}"
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in one["wrong"].items()) or "none"
    if one["kind"] == "blocks":
        text = f"{where} {count} of {one['blocks']:,} blocks are classified wrongly ({kinds})"
        like = "the five points classify every block as the kernel does"
    else:
        text = f"{where} {count} of {one['cells']:,} cells are wrong ({kinds})"
        like = "on every cell the kernel's mask is the one that is claimed here"
    if not one["as_predicted"]:
        like = f"**not as is claimed here** ({one['unlike'] or 'nothing is wrong'})"
    if "witness" in one:
        cell = one["witness"]
        like += f"; q_idx {cell['q_idx']}, kv_idx {cell['kv_idx']} of a proof's witness: " \
                f"{cell['kind']}"
    if one.get("by_itself") == {}:
        like += "; by itself the later call is right"
    return f"{text}; {like}"
