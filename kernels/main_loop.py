"""The main loop of FA4's SM90 forward kernel: which tiles of keys it computes, and how masked.

The statements are taken from the real kernel, from the call of `get_n_block_min_max` to the end of
the dense main loop, and run inside a trace with stand-ins for what computes. A loop over tiles
becomes one turn with a run-time number for its counter. Statements or names that are not known are
refused.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from kernels.machine import CannotLift
from kernels.provider import Provider, parsed

FILE = "flash_fwd_sm90.py"
START = "block_info.get_n_block_min_max"
DENSE = "const_expr(not self.use_block_sparsity)"
DYNAMIC = "self._mDynamicCausal"
EMPTY_SPLIT = "n_block_min >= n_block_max_orig"
# What a turn of a loop may leave to the next: no number that a tile depends on.
CARRIED = {"kv_consumer_state", "O_should_accumulate"}


@dataclass(frozen=True, slots=True)
class Visit:
    """One tile of keys, `n_block`, in each of `count` turns of `turn`; `count` None: once.

    `masked` says whether the element mask runs, `seqlen` whether it looks at seqlen_k too.
    """

    n_block: Any
    turn: Any
    count: Any
    masked: bool
    seqlen: bool


class Recorder:
    """Stand-ins for what the main loop calls, which write down the tiles."""

    def __init__(self, turns: list[Any], seqlen_in_first: bool) -> None:
        self.turns = list(turns)
        self.visits: list[Visit] = []
        self.range: tuple[Any, Any] | None = None
        self.open: tuple[Any, Any] = (None, None)
        self.seqlen_in_first = seqlen_in_first

    def begin(self, count: Any) -> Any:
        if not self.turns:
            raise CannotLift("main loop: more loops than are known")
        self.open = (self.turns.pop(0), count)
        return self.open[0]

    def end(self) -> None:
        self.open = (None, None)

    def report(self, n_block_min: Any, n_block_max: Any) -> None:
        self.range = (n_block_min, n_block_max)

    def first_half(self, *, n_block: Any, mask_fn: Any, **rest: Any) -> None:
        self.visits.append(Visit(n_block, None, None, True, self.seqlen_in_first))

    def one_n_block(self, state: Any, *, n_block: Any, mask_fn: Any, **rest: Any) -> None:
        seqlen = mask_fn is not None and mask_fn.keywords["mask_seqlen"]
        turn, count = self.open
        self.visits.append(Visit(n_block, turn, count, mask_fn is not None, bool(seqlen)))


class _Nothing:
    """A thing of the kernel that decides no tile."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Flags:
    """The compile-time attributes of the kernel object that the main loop reads."""

    is_causal: bool
    is_local: bool
    is_split_kv: bool
    intra_wg_overlap: bool
    tile_n: int
    _mDynamicCausal: Any  # noqa: N815
    mask_mod: Any = None
    use_block_sparsity: bool = False

    def __getattr__(self, name: str) -> Any:
        if name in ("warp_scheduler_barrier_sync", "warp_scheduler_barrier_arrive"):
            return lambda: None
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotLift(f"main loop: self.{name} is not known")


@dataclass(frozen=True)
class MainLoop:
    """`run(self, recorder, names)` is the real main loop. `seqlen_in_first` says whether the tile
    of the first half-block is masked by seqlen_k; `drops_empty_splits` whether a split without
    tiles has its output cleared; `knows_dynamic_causal` whether it reads a flag per sequence."""

    run: Callable[..., None]
    seqlen_in_first: bool
    drops_empty_splits: bool
    knows_dynamic_causal: bool


@functools.cache
def main_loop(provider: Provider) -> MainLoop:
    tree = parsed(provider.folder / FILE)
    kernel = next((n for n in tree.body if isinstance(n, ast.ClassDef)), None)
    methods = {n.name: n for n in kernel.body if isinstance(n, ast.FunctionDef)} if kernel else {}
    if missing := {"mma", "first_half_block_overlap"} - methods.keys():
        raise CannotLift(f"{FILE} has no method {min(missing)}")
    statements = _statements(methods["mma"])
    drops = any(ast.unparse(n.test) == EMPTY_SPLIT for n in ast.walk(methods["mma"])
                if isinstance(n, ast.If))
    return MainLoop(
        _compiled(provider, statements), _first_seqlen(methods["first_half_block_overlap"]), drops,
        any(DYNAMIC in ast.unparse(n) for n in statements),
    )


def _statements(method: ast.FunctionDef) -> list[ast.stmt]:
    """From the call that gives the range of tiles to the dense main loop, which ends them."""
    for body in _bodies(method):
        starts = [i for i, n in enumerate(body) if isinstance(n, ast.Assign) and _calls(n, START)]
        ends = [i for i, n in enumerate(body) if isinstance(n, ast.If) and _test(n) == DENSE]
        if len(starts) == len(ends) == 1 and starts[0] < ends[0]:
            dense = body[ends[0]]
            assert isinstance(dense, ast.If)
            report = ast.parse("recorder.report(n_block_min, n_block_max)").body
            return [*body[starts[0] : ends[0]], *report, *_straight(dense.body)]
    raise CannotLift(f"{FILE}: mma has no main loop that begins with {START}")


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for inner in ast.walk(node):
        for field in ("body", "orelse"):
            if isinstance(body := getattr(inner, field, None), list):
                yield body


def _calls(node: ast.AST, text: str) -> bool:
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) == text for n in ast.walk(node))


def _test(node: ast.If) -> str:
    return ast.unparse(node.test)


def _straight(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements whose loops over tiles are one turn each."""
    return _Unroll().visit(ast.Module(body, [])).body


class _Unroll(ast.NodeTransformer):
    def visit_For(self, node: ast.For) -> Any:  # noqa: N802
        call = node.iter
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "cutlass.range"
                and len(call.args) == 1 and isinstance(node.target, ast.Name)):
            raise CannotLift(f"{FILE}:{node.lineno}: a loop that is not over cutlass.range(count)")
        if any(isinstance(n, ast.For | ast.While) for inner in node.body for n in ast.walk(inner)):
            raise CannotLift(f"{FILE}:{node.lineno}: a loop in a loop over tiles")
        stored = {n.id for inner in node.body for n in ast.walk(inner)
                  if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if stored - CARRIED:
            raise CannotLift(f"{FILE}:{node.lineno}: a loop carries {min(stored - CARRIED)}")
        begin = ast.parse(f"{node.target.id} = recorder.begin({ast.unparse(call.args[0])})").body
        return [*begin, *node.body, *ast.parse("recorder.end()").body]


def _first_seqlen(method: ast.FunctionDef) -> bool:
    """Whether the first half-block calls its mask once, on its own tile, with mask_seqlen=True."""
    calls = [n for n in ast.walk(method)
             if isinstance(n, ast.Call) and ast.unparse(n.func) == "mask_fn"]
    if len(calls) != 1:
        raise CannotLift(f"{FILE}: first_half_block_overlap calls mask_fn {len(calls)} times")
    given = {k.arg: ast.unparse(k.value) for k in calls[0].keywords}
    if given.get("n_block") != "n_block":
        raise CannotLift(f"{FILE}: first_half_block_overlap masks another tile than its own")
    return given.get("mask_seqlen") == "True"


NAMES = ("block_info", "seqlen", "m_block", "split_idx", "num_splits", "psc")
SILENT = ("softmax", "score_mod_fn", "kv_consumer_state", "pipeline_q", "q_consumer_phase",
          "mma_pv_fn", "q_narrow_params", "blocksparse_tensors")


def _compiled(provider: Provider, statements: list[ast.stmt]) -> Callable[..., None]:
    arguments = ", ".join(("self", "recorder", *NAMES, *SILENT, "mask_fn", "narrow_q",
                           "process_first_half_block", "process_last_half_block",
                           "mma_one_n_block"))
    # The compiler rewrites a function from its source, where it has to find the decorator.
    head = ["@cute.jit", f"def main_loop({arguments}):",
            "    process_first_half_block_tile = process_first_half_block",
            "    process_last_half_block_tile = process_last_half_block"]
    body = ast.unparse(ast.Module(statements, []))
    text = "\n".join([*head, *("    " + line for line in body.splitlines()), ""])
    name = f"<main loop of {provider.name}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"cutlass": cutlass, "cute": cute, "Int32": Int32, "const_expr": const_expr,
             "partial": partial, "__name__": f"{provider.cute}.main_loop"}
    exec(compile(text, name, "exec", dont_inherit=True), scope)
    return scope["main_loop"]


def record(loop: MainLoop, flags: Flags, turns: list[Any], given: dict[str, Any]) -> Recorder:
    """Runs the main loop inside a trace; `given` has a value for each of NAMES."""
    recorder = Recorder(turns, loop.seqlen_in_first)
    silent = dict.fromkeys(SILENT, _Nothing()) | {"score_mod_fn": None}
    loop.run(
        flags, recorder, *(given[name] for name in NAMES), *(silent[name] for name in SILENT),
        _Nothing(), False, recorder.first_half, _Nothing(), recorder.one_n_block,
    )
    return recorder
