"""How FA4 classifies a block by five points of its mask_mod: which points, as terms.

`BlockSparsityKernel` calls a mask_mod whose `use_fast_sampling` is set on five cells of a block
only. All visible makes a full block, which no mask is applied to; all hidden makes one that is
skipped. The statements that choose the cells are taken from the real kernel and run in a trace.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Boolean, Int32, const_expr

from kernels.block_info import lifted, run
from kernels.from_cute import entries
from kernels.machine import CannotLift
from kernels.provider import Provider, parsed
from kernels.release import BACKEND, OWN_FA4
from kernels.run_cute import Agreement, first_difference
from spec.term import Term, const, substitute, sym
from spec.tiles import Tile

FILE = "compute_block_sparsity.py"
POINTS = 5
FAST = "const_expr(self.use_fast_sampling)"
SAMPLED = "tidx < 5"
# How the mask_mod is called, and where among the arguments its query and key stand.
CALLS = {"call_mask_mod": slice(3, 5), "self.mask_mod": slice(2, 4)}
SWITCH = "use_fast_sampling"
# What becomes of a block, in the words of the kernel. Other words are refused.
VERDICTS = {
    "has_unmasked": "cute.arch.vote_any_sync(thread_result & thread_is_valid)",
    "has_masked": "cute.arch.vote_any_sync(Boolean(not thread_result) & thread_is_valid)",
    "is_partial": "Boolean(has_masked and has_unmasked)",
    "is_full": "Boolean(has_unmasked and (not has_masked))",
}
NAMES = ("tidx", "m_block", "n_block", "seqlen_q", "seqlen_k")


@dataclass(frozen=True, slots=True)
class Points:
    """`cells` are the query and key, as indices of the sequence, of each of five points."""

    cells: tuple[tuple[Term, Term], ...]
    arithmetic: tuple[tuple[Term, Term, int, str], ...]


def points(provider: Provider, tile: Tile) -> Points:
    """The cells of the block (`m_block`, `n_block`) that are looked at."""
    (q, kv), walk = lifted(_work(provider, tile), NAMES)
    threads = [{sym("tidx"): const(i)} for i in range(POINTS)]
    return Points(
        tuple((substitute(q, at), substitute(kv, at)) for at in threads),
        tuple((substitute(path, at), substitute(value, at), width, place) for at in threads
              for (value, width), path, place in entries(walk.arithmetic)),
    )


def compare(
    provider: Provider, tile: Tile, columns: Mapping[str, np.ndarray[Any, Any]],
    value: Callable[[Term], np.ndarray[Any, Any]],
) -> Agreement:
    """Runs the real statements on `columns`, an int32 array for each of NAMES, beside the terms."""
    (q, kv), _ = lifted(_work(provider, tile), NAMES)
    count = len(columns["tidx"])
    expected = np.stack([np.broadcast_to(value(term), count) for term in (q, kv)], axis=-1)
    got = run(_work(provider, tile), columns, 2, NAMES)
    return Agreement(cells=expected.size, visible=0, left_out=0, uncovered=(),
                     mismatch=first_difference(columns, expected, got))


def _work(provider: Provider, tile: Tile) -> Callable[[Mapping[str, Any]], list[Any]]:
    chosen = _sampling(provider)

    def work(given: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        kernel = SimpleNamespace(tile_mn=(tile.tile_m, tile.tile_n), use_fast_sampling=True)
        chosen(kernel, lambda q, kv: found.extend((q, kv)), *(given[name] for name in NAMES))
        return found

    return work


@functools.cache
def _sampling(provider: Provider) -> Callable[..., None]:
    kernel = next((n for n in ast.walk(parsed(provider.folder / FILE))
                   if isinstance(n, ast.FunctionDef) and n.name == "kernel"), None)
    if kernel is None:
        raise CannotLift(f"{FILE} has no kernel")
    _check_verdicts(kernel)
    statements = list(_statements(kernel))
    text = "\n".join([
        "@cute.jit", f"def sampling(self, record, {', '.join(NAMES)}):",
        *("    " + line for line in ast.unparse(ast.Module(statements, [])).splitlines()), "",
    ])
    name = f"<sampling of {provider.name}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"cutlass": cutlass, "cute": cute, "Boolean": Boolean, "Int32": Int32,
             "const_expr": const_expr, "__name__": f"{provider.cute}.sampling"}
    exec(compile(text, name, "exec", dont_inherit=True), scope)
    return scope["sampling"]


def _check_verdicts(kernel: ast.FunctionDef) -> None:
    said = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in ast.walk(kernel)
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in VERDICTS
            and ast.unparse(n.value) in VERDICTS.values()}
    if said != VERDICTS:
        raise CannotLift(f"{FILE}: a block is classified in another way than is known")


def _statements(kernel: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Those that compute the query of a point, then its key, then the call that is recorded."""
    loop = next((n for n in kernel.body if isinstance(n, ast.For)), None)
    if loop is None:
        raise CannotLift(f"{FILE}: no loop over blocks of keys")
    recorded = False
    for body, base in ((kernel.body, "m_base"), (loop.body, "n_base")):
        first = next((n for n in body if isinstance(n, ast.Assign)
                      and ast.unparse(n.targets[0]) == base), None)
        fast = next((n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == FAST
                     and any(base in ast.unparse(s) for s in n.body)), None)
        if first is None or fast is None:
            raise CannotLift(f"{FILE}: no {base} with five points")
        yield first
        for node in fast.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == SAMPLED:
                yield from ast.parse(f"record({', '.join(_called_on(node))})").body
                recorded = True
                break
            yield node
    if not recorded:
        raise CannotLift(f"{FILE}: the mask_mod is not called on five points")


def _called_on(node: ast.If) -> tuple[str, str]:
    """The names of the query and key that the mask_mod is called on."""
    calls = [(n, CALLS[ast.unparse(n.func)]) for n in ast.walk(node)
             if isinstance(n, ast.Call) and ast.unparse(n.func) in CALLS]
    arguments = [ast.unparse(a) for call, at in calls for a in call.args[at]]
    if len(arguments) != 2 or not all(a.startswith("ssa(") for a in arguments):
        raise CannotLift(f"{FILE}: the mask_mod is called in another way than is known")
    q, kv = (a.removeprefix("ssa(").removesuffix(")") for a in arguments)
    return q, kv


def switched_on(provider: Provider) -> Mapping[str, frozenset[str]]:
    """Factories of the vLLM that a provider is a part of whose mask_mods set `use_fast_sampling`,
    with the names of their parameters; none for another provider."""
    path = provider.folder.parents[len(Path(OWN_FA4).parts) - 1] / BACKEND
    tree = parsed(path) if path.is_file() else ast.Module([], [])
    return {
        node.name: frozenset(a.arg for a in (*node.args.args, *node.args.kwonlyargs))
        for node in tree.body if isinstance(node, ast.FunctionDef)
        and any(isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Attribute)
                and n.targets[0].attr == SWITCH and ast.unparse(n.value) == "True"
                for n in ast.walk(node))
    }
