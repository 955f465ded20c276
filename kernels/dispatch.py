"""FA4's host flags: which element mask a call of `_flash_attn_fwd` compiles on SM90.

The real function runs on small tensors and symbolic windows, up to the call of the compiler; how
the kernel is made and what it is given is written down. The statements of the kernel that build
its element mask are evaluated with that, and the compile-time branches of `apply_mask` are
followed: the mask depends on nothing but those of `mask_mod`, `dynamic_causal` and the windows
that they read.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import kernels.environment  # noqa: F401  (before FA4)
from kernels.machine import CannotLift
from kernels.provider import Provider, parsed
from kernels.stand_in import Number, Paths, StandIn, executed, said
from spec.from_text import from_text
from spec.term import TRUE, Term, and_, eq, ite, read, sym, term

ARCH = 90
KERNEL, KERNEL_FILE, MASK_FILE = "FlashAttentionForwardSm90", "flash_fwd_sm90.py", "mask.py"
PARTS = ("mask_mod", "dynamic_causal", "window_size_left", "window_size_right")
# Parameters of the kernel, by those of `_flash_attn_fwd` that they come from.
LENGTHS: Mapping[str, str] = {
    "cu_seqlens_q": "mCuSeqlensQ", "cu_seqlens_k": "mCuSeqlensK", "seqused_q": "mSeqUsedQ",
    "seqused_k": "mSeqUsedK", "page_table": "mPageTable",
}
Q, KV = sym("q"), sym("kv")
CAUSAL = from_text("kv <= q")
# Sizes of the call that runs; the mask flags do not depend on them.
SEQUENCES, TOKENS, HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 2, 8, 4, 2, 128, 128, 4
LONGEST = PAGE * PAGES


@dataclass(frozen=True, slots=True)
class Compiled:
    """How `_flash_attn_fwd` makes the kernel and what it passes; windows are a number or None,
    `dynamic_causal` and `mask_mod` what was given or None. `passed` are the tensors that say where
    a sequence lies, by the names of LENGTHS."""

    is_causal: bool
    is_local: bool
    window_size_left: Any
    window_size_right: Any
    dynamic_causal: Any
    mask_mod: Any
    aux_tensors: Any
    passed: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Effective:
    """`mask` in absolute positions, or None where the mask_mod alone decides. `reads` are those of
    PARTS that the compiled branch reads, `given` those that the kernel has."""

    compiled: Compiled
    reads: frozenset[str]
    given: frozenset[str]
    mask: Term | None

    @property
    def ignored(self) -> frozenset[str]:
        return self.given - self.reads


class _Reached(Exception):
    """The call of the compiler, which ends a run."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


@dataclass(frozen=True)
class _Kernel:
    """A kernel object that was made, with its keyword arguments."""

    name: str
    flags: Mapping[str, Any]


def _kernel_class(name: str) -> Callable[..., _Kernel]:
    return lambda *args, **flags: _Kernel(name, flags)


class _Empty:
    """FA4's cache of compiled kernels, on a first call."""

    def __contains__(self, key: object) -> bool:
        return False


def _compile(*arguments: Any, **options: Any) -> None:
    raise _Reached(*arguments)


KNOWN: Mapping[str, Any] = {
    KERNEL: _kernel_class(KERNEL), "compile": _compile, "is_fake_mode": lambda: True,
    "get_jit_cache": lambda *args: _Empty(), "_get_use_clc_scheduler_default": lambda: False,
    "_get_disable_2cta_default": lambda *args, **kwargs: False,
    "_get_disable_s_ping_pong_default": lambda *args, **kwargs: False,
    "to_cute_tensor": lambda tensor, *args, **kwargs: tensor,
    "to_cute_aux_tensor": lambda tensor, *args, **kwargs: tensor,
    "maybe_contiguous": lambda tensor, *args, **kwargs: tensor,
    "get_broadcast_dims": lambda tensor, *args, **kwargs: (),
    "validate_output_layout": lambda *args, **kwargs: None,
    "AuxData": lambda tensors=None, scalars=None: list(tensors or ()),
}


@functools.cache
def interface(provider: Provider) -> Mapping[str, Any]:
    """The names of FA4's `interface.py`, executed without its kernels."""
    names = executed(provider.folder / "interface.py", f"{provider.cute}.interface", KNOWN)
    for name in ("_flash_attn_fwd", "_resolve_causal_local_window"):
        if name not in names:
            raise CannotLift(f"interface.py has no {name}")
    names["_get_device_arch"] = lambda: ARCH
    # Only refuses tensors, those of the CPU among them.
    names["_validate_tensor"] = lambda *args, **kwargs: None
    return names


def arguments(**flags: Any) -> dict[str, Any]:
    """Of a call over paged keys, that has these flags."""
    import torch

    def tensor(*shape: int, dtype: Any = torch.int32) -> Any:
        return torch.empty(shape, dtype=dtype)

    cache = tensor(PAGES * SEQUENCES, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    query = tensor(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    return {
        "q": query, "k": cache, "v": cache, "out": query, "max_seqlen_q": TOKENS,
        "cu_seqlens_q": tensor(SEQUENCES + 1), "seqused_k": tensor(SEQUENCES),
        "max_seqlen_k": LONGEST, "page_table": tensor(SEQUENCES, PAGES), "num_splits": 1, **flags,
    }


def compiled(provider: Provider, call: Mapping[str, Any]) -> Compiled:
    """How the call compiles: runs the real `_flash_attn_fwd`."""
    try:
        interface(provider)["_flash_attn_fwd"](**call)
    except _Reached as reached:
        return _compiled(provider, *reached.arguments)
    except CannotLift:
        raise
    except Exception as error:
        raise CannotLift(f"_flash_attn_fwd: {said(error)}") from None
    raise CannotLift("_flash_attn_fwd returns before it compiles")


def _compiled(provider: Provider, kernel: Any, *given: Any) -> Compiled:
    if not isinstance(kernel, _Kernel) or kernel.name != KERNEL:
        raise CannotLift(f"_flash_attn_fwd compiles another kernel than {KERNEL}")
    if missing := {"is_causal", "is_local", "mask_mod"} - kernel.flags.keys():
        raise CannotLift(f"{KERNEL} is made without {min(missing)}")
    names = [a.arg for a in _method(provider, KERNEL_FILE, "__call__").args.args][1:]
    passed = dict(zip(names, given, strict=False))
    if missing := {"window_size_left", "window_size_right", *LENGTHS.values()} - passed.keys():
        raise CannotLift(f"{KERNEL} is called without {min(missing)}")
    causal, local = kernel.flags["is_causal"], kernel.flags["is_local"]
    if not isinstance(causal, bool) or not isinstance(local, bool):
        raise CannotLift(f"is_causal={causal!r} or is_local={local!r} is no flag")
    aux = [value for value in given if isinstance(value, list) and value]
    if len(aux) > 1:
        raise CannotLift(f"{KERNEL} is called with more than one list of aux tensors")
    return Compiled(
        causal, local, passed["window_size_left"], passed["window_size_right"],
        passed.get("mDynamicCausal"), kernel.flags["mask_mod"], aux[0] if aux else None,
        {name: passed[own] for name, own in LENGTHS.items()},
    )


@functools.cache
def _class_methods(provider: Provider, file: str, name: str) -> Mapping[str, ast.FunctionDef]:
    found = [node for node in parsed(provider.folder / file).body
             if isinstance(node, ast.ClassDef) and node.name == name]
    if len(found) != 1:
        raise CannotLift(f"{file} has no class {name}")
    return {n.name: n for n in found[0].body if isinstance(n, ast.FunctionDef)}


def _method(provider: Provider, file: str, method: str) -> ast.FunctionDef:
    name = KERNEL if file == KERNEL_FILE else "AttentionMask"
    methods = _class_methods(provider, file, name)
    if method not in methods:
        raise CannotLift(f"{name} has no {method}")
    return methods[method]


def effective(provider: Provider, how: Compiled) -> Effective:
    """The mask that the compiled kernel applies to each element."""
    mask, flags = element_mask(provider, how)
    reads = reached(provider, mask, flags)
    given = frozenset(name for name in PARTS if getattr(how, name) is not None)
    as_called = replace(how, is_causal=flags["mask_causal"], is_local=flags["mask_local"],
                        window_size_left=mask.window_size_left,
                        window_size_right=mask.window_size_right)
    own = None if "mask_mod" in reads else bounded(as_called, reads)
    return Effective(how, reads, given, own)


def bounded(how: Compiled, reads: frozenset[str]) -> Term:
    """What a branch of `apply_mask` without a mask_mod means, given what it reads."""
    if not how.is_causal and not how.is_local:
        return TRUE
    right = CAUSAL if how.is_causal else TRUE
    if "window_size_right" in reads:
        right = KV - Q <= _term(how.window_size_right)
    if "dynamic_causal" in reads:
        is_causal = ~eq(read("dynamic_causal", sym("b")), 0)
        right = ite(is_causal, CAUSAL, TRUE if how.is_causal else right)
    if "window_size_left" not in reads:
        return right
    left = Q - KV <= _term(how.window_size_left)
    return left if right is TRUE else and_(right, left)


def _term(value: Any) -> Term:
    if isinstance(value, Number):
        return value.term
    if isinstance(value, int | Term):
        return term(value)
    raise CannotLift(f"a window of {type(value).__name__}")


class _Names(dict):
    """Names of an expression; those that are not known are stood in for."""

    def __missing__(self, name: str) -> Any:
        return StandIn(name, {})


def element_mask(provider: Provider, how: Compiled) -> tuple[Any, Mapping[str, Any]]:
    """The attributes of the kernel's AttentionMask, and the flags of its calls of `apply_mask`."""
    handed_on(provider)
    dynamic = None if how.dynamic_causal is None else StandIn("mDynamicCausal", {})
    self = SimpleNamespace(
        is_causal=how.is_causal, is_local=how.is_local, mask_mod=how.mask_mod, tile_m=128,
        tile_n=128, pack_gqa=False, qhead_per_kvhead=1, _mDynamicCausal=dynamic,
        use_block_sparsity=False,
    )
    names = _Names(
        self=self, partial=partial, const_expr=lambda value: value, mDynamicCausal=dynamic,
        window_size_left=how.window_size_left, window_size_right=how.window_size_right,
        AttentionMask=_Mask,
    )
    def assigned(method: str, target: str) -> Any:
        return _value(_assigned(provider, method, target), names)

    names["AttentionMaskCls"] = assigned("kernel", "AttentionMaskCls")
    if dynamic is not None or "psc" in _assignments(provider, "mma"):
        if assigned("kernel", "self._mDynamicCausal") is not dynamic:
            raise CannotLift(f"{KERNEL}._mDynamicCausal is not the tensor that it is called with")
        names["psc"] = assigned("mma", "psc")
    names["mask"] = mask = assigned("mma", "mask")
    names["mask_fn"] = assigned("mma", "mask_fn")
    calls = [_value(node, names) for node in _mask_calls(provider)]
    flags = [{name: call.keywords.get(name) for name in ("mask_causal", "mask_local", "mask_mod")}
             for call in calls]
    if not flags or any(one != flags[0] for one in flags):
        raise CannotLift(f"{KERNEL}.mma does not call apply_mask with the same flags everywhere")
    return mask, flags[0]


BASE, BASE_FILE = "FlashAttentionForwardBase", "flash_fwd.py"
FLAGS, WINDOWS = ("is_causal", "is_local", "mask_mod"), ("window_size_left", "window_size_right")


@functools.cache
def handed_on(provider: Provider) -> None:
    """Makes sure that flags and windows reach the element mask as the kernel is given them, under
    their own names; raises CannotLift."""
    made = _assigned_in(_class_methods(provider, BASE_FILE, BASE)["__init__"])
    inside = _class_methods(provider, KERNEL_FILE, KERNEL)
    for method in inside.values():
        changed = _assigned_in(method)
        for name in FLAGS:
            if f"self.{name}" in changed and set(changed[f"self.{name}"]) != {name}:
                raise CannotLift(f"{KERNEL}.{method.name} changes {name}")
        for name in WINDOWS:
            for node in changed.get(name, {}).values():
                if _value(node, _Names({name: name, "Int32": lambda value: value})) is not name:
                    raise CannotLift(f"{KERNEL}.{method.name} changes {name}")
    for name in FLAGS:
        if set(made.get(f"self.{name}", ())) != {name}:
            raise CannotLift(f"{BASE} does not keep {name} as it is given")
    calls = [n for n in ast.walk(inside["__call__"])
             if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.kernel"]
    names = [a.arg for a in inside["kernel"].args.args][1:]
    for call in calls:
        passed = dict(zip(names, map(ast.unparse, call.args), strict=False))
        for name in (*WINDOWS, *({"mDynamicCausal"} & set(names))):
            if passed.get(name) != name:
                raise CannotLift(f"{KERNEL}.__call__ passes {passed.get(name)} for {name}")
    if len(calls) != 1:
        raise CannotLift(f"{KERNEL}.__call__ launches {len(calls)} kernels")


class _Mask(SimpleNamespace):
    """An AttentionMask with what it is made with."""

    swap_AB, qhead_per_kvhead_packgqa = False, 1
    window_size_left = window_size_right = dynamic_causal = None

    def __init__(self, *sizes: Any, **fields: Any) -> None:
        super().__init__(**fields)

    def apply_mask(self, **flags: Any) -> None:
        raise AssertionError("only bound, never called")


@functools.cache
def _assignments(provider: Provider, method: str) -> Mapping[str, Mapping[str, ast.expr]]:
    return _assigned_in(_method(provider, KERNEL_FILE, method))


def _assigned_in(method: ast.FunctionDef) -> Mapping[str, Mapping[str, ast.expr]]:
    """What each target is set to in a method, by its text."""
    found: dict[str, dict[str, ast.expr]] = {}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = ast.unparse(node.targets[0])
            found.setdefault(target, {})[ast.unparse(node.value)] = node.value
    return found


def _assigned(provider: Provider, method: str, target: str) -> ast.expr:
    """What the one statement that sets `target` sets it to."""
    found = _assignments(provider, method).get(target, {})
    if len(found) != 1:
        raise CannotLift(f"{KERNEL}.{method} sets {target} in {len(found)} ways")
    return next(iter(found.values()))


@functools.cache
def _mask_calls(provider: Provider) -> tuple[ast.Call, ...]:
    """The bindings of `mask_fn`, one for each way in which the main loop masks a tile."""
    return tuple(node for node in ast.walk(_method(provider, KERNEL_FILE, "mma"))
                 if isinstance(node, ast.Call) and ast.unparse(node.func) == "partial"
                 and ast.unparse(node.args[0]) == "mask_fn")


@functools.cache
def _code(node: ast.expr, file: str) -> CodeType:
    return compile(ast.Expression(node), file, "eval")


def _value(node: ast.expr, names: _Names) -> Any:
    try:
        return eval(_code(node, KERNEL_FILE), {}, names)
    except CannotLift:
        raise
    except Exception as error:
        raise CannotLift(f"{KERNEL_FILE}:{node.lineno}: {said(error)}") from None


class _Unknown(Exception):
    """A test that is not decided when the kernel is compiled."""


class _Known(dict):
    def __missing__(self, name: str) -> Any:
        raise _Unknown


def reached(provider: Provider, mask: Any, flags: Mapping[str, Any]) -> frozenset[str]:
    """Those of PARTS that `apply_mask` reads, along the branches that are decided at compile time
    and both sides of all others."""
    method = _method(provider, MASK_FILE, "apply_mask")
    known = _Known(self=mask, const_expr=lambda value: value, mask_seqlen=True, **flags)
    for one in method.args.args[1:]:
        if one.arg in flags and flags[one.arg] is None and one.arg != "mask_mod":
            raise CannotLift(f"apply_mask is called without {one.arg}")
    found: set[str] = set()
    perhaps: set[str] = set()
    _read(method.body, known, found, perhaps)
    if unsure := perhaps - found:
        raise CannotLift(f"apply_mask reads {min(unsure)} only where a run-time test says so")
    return frozenset(found)


def _decided(test: ast.expr, known: _Known) -> bool | None:
    try:
        value = eval(_code(test, MASK_FILE), {"__builtins__": {}}, known)
    except (_Unknown, NameError, AttributeError, TypeError, CannotLift):
        return None
    return value if isinstance(value, bool) else None


def _read(node: Any, known: _Known, found: set[str], perhaps: set[str]) -> None:
    """Adds to `found` what is read for certain, to `perhaps` what one side of a test reads."""
    match node:
        case list():
            for each in node:
                _read(each, known, found, perhaps)
        case ast.If(test, body, orelse) | ast.IfExp(test, body, orelse):
            decided = _decided(test, known)
            if decided is not None:
                _read(body if decided else orelse, known, found, perhaps)
                return
            _read(test, known, found, perhaps)
            for side in (body, orelse):
                _read(side, _Known(known), perhaps, perhaps)
            _forget([body, orelse], known)
        case ast.Assign([ast.Name(name)], value) if _decided(value, known) is not None:
            known[name] = _decided(value, known)
        case ast.Attribute(ast.Name("self"), name):
            found.update({name} & set(PARTS))
        case ast.Call(ast.Attribute(ast.Name("self"), name)):
            raise CannotLift(f"apply_mask calls self.{name}, which is not followed")
        case ast.Name("mask_mod"):
            found.add("mask_mod")
        case ast.AST():
            _read(list(ast.iter_child_nodes(node)), known, found, perhaps)
            if isinstance(node, ast.stmt):
                _forget([node], known)


def _forget(nodes: list[Any], known: _Known) -> None:
    """What is set at run time, or on one side of a test, is not decided any more."""
    for part in nodes:
        for each in part if isinstance(part, list) else [part]:
            for name in _stored(each):
                known.pop(name, None)


@functools.cache
def _stored(node: ast.AST) -> frozenset[str]:
    return frozenset(inner.id for inner in ast.walk(node)
                     if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store))


NEGATIVE = -1
SYMBOLIC = "symbolic"


@dataclass(frozen=True, slots=True)
class Flags:
    """One point of the flag space of `_flash_attn_fwd`; a window is None, -1 or SYMBOLIC."""

    causal: bool
    left: int | str | None
    right: int | str | None
    dynamic_causal: bool
    mask_mod: bool

    def __str__(self) -> str:
        parts = [f"causal={self.causal}", f"window=({self.left}, {self.right})",
                 *(["dynamic_causal"] if self.dynamic_causal else []),
                 *(["mask_mod"] if self.mask_mod else [])]
        return ", ".join(parts)


def flag_space(provider: Provider) -> Iterator[Flags]:
    sides = (None, NEGATIVE, SYMBOLIC)
    knows = "dynamic_causal" in _parameters(interface(provider)["_flash_attn_fwd"])
    for causal in (True, False):
        for left in sides:
            for right in sides:
                for dynamic in (False, True) if knows else (False,):
                    for mask_mod in (False, True):
                        yield Flags(causal, left, right, dynamic, mask_mod)


def _parameters(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


class MaskMod:
    """A mask_mod that is given and never called here."""


MASK_MOD = MaskMod()
LARGEST = 2**31 - 1


def of_flags(provider: Provider, flags: Flags, paths: Paths) -> Effective:
    """The effective mask of a low-level call. Symbolic windows are `window_size_left` and
    `window_size_right`, 0 .. 2**31 - 1."""
    import torch

    def window(name: str, value: Any) -> Any:
        return paths.number(sym(name), 0, LARGEST) if value == SYMBOLIC else value

    given: dict[str, Any] = {
        "causal": flags.causal, "window_size_left": window("window_size_left", flags.left),
        "window_size_right": window("window_size_right", flags.right),
    }
    if flags.dynamic_causal:
        given["dynamic_causal"] = torch.empty(SEQUENCES, dtype=torch.int32)
    if flags.mask_mod:
        given["mask_mod"] = MASK_MOD
    return effective(provider, compiled(provider, arguments(**given)))


def alternatives(found: list[tuple[Term, Effective]], own: Callable[[Effective], Term]) -> Term:
    """One term for the masks found along all paths; `own` is that of a mask_mod."""
    (_, last), *others = reversed(found)
    mask = own(last)
    for condition, one in others:
        mask = ite(condition, own(one), mask)
    return mask
