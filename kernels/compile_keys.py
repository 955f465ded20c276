"""FA4's compile keys: which kernel a call is given, and which one it asks for.

A host function of FA4 keeps compiled kernels under a key. Here its cache is replaced by one that
writes keys down, and the compiler by one that stops at the traced stage: a key takes milliseconds
and a traced kernel half a second, without a GPU. What a call may vary is read from the signature
of the host function.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass.cute
import torch
from cutlass._mlir import ir
from cutlass.cutlass_dsl import CuTeDSL

from kernels import keyed_mask_mods
from kernels.ahead import fake_tensors
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.trace import first_line

ARCH = 90
BATCH, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 128, 128
CACHE = "compile_cache"
# Characters of a line that a person is shown.
SHOWN = 120


@dataclass(frozen=True, slots=True)
class Value:
    """An argument of a call: `text` for a person, `make` for the call."""

    text: str
    make: Callable[[], Any] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Aspect:
    """What calls differ in: one parameter, or one part of its value, as `mask_mod.closure`.

    A call may have each of `values`, and the first of `tensors` that the host function accepts.
    `phrase` is what a person calls it.
    """

    name: str
    parameter: str
    values: tuple[Value, ...]
    tensors: tuple[Value, ...] = ()
    phrase: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a host function: `given` are its arguments, those that every call has apart."""

    function: str
    given: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={v.text}' for name, v in self.given)})"

    def but(self, parameter: str, value: Value) -> Call:
        return Call(self.function, tuple({**dict(self.given), parameter: value}.items()))


@dataclass(frozen=True, slots=True)
class Captured:
    """The key that a call's kernel is kept under, and all that the compiler is given for it."""

    key: tuple[Hashable, ...]
    given: Hashable


@dataclass(frozen=True, slots=True)
class Kernel:
    """The traced IR, without the names that the compiler makes up, and its digest."""

    text: str

    @property
    def sha(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def first_difference(self, other: Kernel) -> str:
        """The first line in which two kernels differ, of both, for a person."""
        lines = zip(self.text.splitlines(), other.text.splitlines(), strict=False)
        mine, its = next(((a, b) for a, b in lines if a != b), ("the same", "and more lines"))
        at = next((i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), 0)
        start = max(0, at - SHOWN // 2)
        return " | ".join(line[start : start + SHOWN].strip() for line in (mine, its))


class _Stop(BaseException):
    """Ends a call from within; no `except Exception` on the way takes it."""


class _Keys:
    """A compile cache that keeps nothing and writes down what is looked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[Hashable, ...]] = []

    def __setitem__(self, key: tuple[Hashable, ...], kernel: Any) -> None:
        pass

    def __contains__(self, key: tuple[Hashable, ...]) -> bool:
        self.seen.append(key)
        return False


class _Compiler:
    """`cutlass.cute` as a host function knows it, with a `compile` of ours."""

    def __init__(self, real: Any, compile_: Callable[..., Any]) -> None:
        self._real, self.compile = real, compile_

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@dataclass(frozen=True)
class Host:
    """A host function of FA4 that keeps kernels, and the arguments that every call of it has.

    `says` tells those arguments to a person; `bases` are calls to which one argument is added.
    """

    name: str
    function: Callable[..., Any]
    says: str
    fixed: Callable[[], Mapping[str, Any]]
    bases: tuple[Mapping[str, Value], ...]

    @property
    def calls(self) -> list[Call]:
        return [Call(self.name, tuple(given.items())) for given in self.bases]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Every parameter with its annotation."""
        hints = typing.get_type_hints(self.function)
        return {name: hints.get(name, Any) for name in inspect.signature(self.function).parameters}

    def captured(self, base: Call, aspect: Aspect) -> dict[Call, Captured]:
        """The calls that differ from `base` in one aspect alone, those that are turned away apart.
        """
        def made(value: Value) -> tuple[Call, Captured | None]:
            call = base.but(aspect.parameter, value)
            return call, self.capture(call)

        found = [*map(made, aspect.values)]
        accepted = (each for each in map(made, aspect.tensors) if each[1] is not None)
        found += [each for each in (next(accepted, None),) if each is not None]
        return {call: captured for call, captured in found if captured is not None}

    def capture(self, call: Call) -> Captured | None:
        """None where the function turns the call away."""
        keys, compiled = _Keys(), []

        def stop(*arguments: Any, **options: Any) -> None:
            if not keys.seen:  # a kernel that the host function needs beside its own
                return
            with ir.Context(), ir.Location.unknown():
                compiled.append(_fingerprint((arguments, options)))
            raise _Stop

        try:
            with self._patched(keys, stop):
                self._do(call)
        except _Stop:
            return Captured(keys.seen[-1], compiled[-1])
        except Exception:
            return None
        return None

    def kernel(self, call: Call) -> Kernel:
        """Raises CannotLift where the compiler refuses."""
        found: list[str] = []

        def stop(owner: Any, module: Any, name: str) -> None:
            found.append(str(module))
            raise _Stop

        keys = _Keys()

        def compile_(*arguments: Any, **options: Any) -> None:
            if keys.seen:
                cutlass.cute.compile(*arguments, **options)

        try:
            with self._patched(keys, compile_), _after_a_trace(stop):
                self._do(call)
        except _Stop:
            return Kernel(_normal(found[-1]))
        except Exception as error:
            raise CannotLift(f"{call}: {type(error).__name__}: {first_line(error)}") from None
        raise CannotLift(f"{call}: nothing was compiled")

    def _do(self, call: Call) -> None:
        with fake_tensors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {name: value.make() for name, value in call.given}
            self.function(**{**self.fixed(), **given})

    @contextmanager
    def _patched(self, keys: _Keys, compile_: Callable[..., Any]) -> Iterator[None]:
        """Inside, nothing of the module is compiled or kept."""
        module = sys.modules[self.function.__module__]
        keeping = [each for each in vars(module).values() if hasattr(each, CACHE)]
        caches, cute = [getattr(each, CACHE) for each in keeping], module.cute
        for each in keeping:
            setattr(each, CACHE, keys if each is self.function else _Keys())
        module.cute = _Compiler(cute, compile_)
        try:
            yield
        finally:
            module.cute = cute
            for each, cache in zip(keeping, caches, strict=True):
                setattr(each, CACHE, cache)


def _after_a_trace(hook: Callable[[Any, Any, str], None]) -> Any:
    """Inside, each trace that is done is told to `hook`."""
    compiler = CuTeDSL._get_dsl()
    if hasattr(compiler, "trace_finalize_hooks"):
        return compiler.trace_finalize_hooks(hook)
    # Compilers up to 4.5 have no such hooks, and hash each trace that is done.
    return patch.object(compiler, "get_module_hash", partial(hook, compiler))


# `1@0` in a layout is a stride, not a symbol.
MADE_UP = re.compile(r"@(?:cutlass|kernel)_\w+")


def _normal(text: str) -> str:
    """The IR with the compiler's own symbols numbered: some hold addresses and counts."""
    names: dict[str, str] = {}
    return MADE_UP.sub(lambda found: names.setdefault(found[0], f"@name_{len(names)}"), text)


SIMPLE = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype)


def _fingerprint(value: Any, seen: tuple[int, ...] = ()) -> Hashable:
    """Equal for two values that the compiler cannot tell apart. What cannot be looked into is
    equal to nothing else."""
    if isinstance(value, SIMPLE):
        return type(value), repr(value)
    if id(value) in seen:
        return "again", seen.index(id(value))
    within = partial(_fingerprint, seen=(*seen, id(value)))
    if isinstance(value, Mapping):
        return type(value), tuple((str(k), within(v)) for k, v in value.items())
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), tuple(map(within, value))
    if isinstance(value, types.FunctionType):
        return _of_function(value, within)
    if isinstance(value, types.MethodType):
        return within(value.__func__), within(value.__self__)
    if (mlir := getattr(type(value), "__get_mlir_types__", None)) is not None:
        try:
            return type(value), tuple(map(str, mlir(value)))
        except Exception:
            return type(value), object()
    own = getattr(value, "__dict__", None)
    return type(value), within(own) if own is not None else object()


def _of_function(value: types.FunctionType, within: Callable[[Any], Hashable]) -> Hashable:
    """Everything that a trace of the function can read, `__cute_hash__` apart: it is the key's."""
    cells = tuple(within(cell.cell_contents) for cell in value.__closure__ or ())
    read = {name: value.__globals__[name] for name in value.__code__.co_names
            if name in value.__globals__}
    read = {k: v if isinstance(v, SIMPLE) else id(v) for k, v in read.items()}
    marks = {k: v for k, v in vars(value).items() if k not in ("__cute_hash__", "__wrapped__")}
    wrapped = getattr(value, "__wrapped__", None)
    return (value.__module__, value.__qualname__, value.__code__.co_code,
            repr(value.__code__.co_consts), cells, within(value.__defaults__),
            within(value.__kwdefaults__), within(read), within(marks), within(wrapped))


def tensor(*shape: int, dtype: torch.dtype = torch.int32, strides: tuple[int, ...] | None = None
           ) -> Value:
    kind = str(dtype).removeprefix("torch.")
    if strides is not None:
        text = f"{kind}{list(shape)} with strides {list(strides)}"
        return Value(text, lambda: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"))
    return Value(f"{kind}{list(shape)}", lambda: torch.empty(shape, dtype=dtype, device="cuda"))


def number(value: Any) -> Value:
    return Value(repr(value), lambda: value)


def listed(*items: Value) -> Value:
    return Value(f"[{', '.join(item.text for item in items)}]",
                 lambda: [item.make() for item in items])


NONE = number(None)
# Shapes and dtypes that FA4's tensors have for the calls here; those that it refuses fall away.
TENSORS = (
    *(tensor(n, dtype=dtype) for n in (BATCH, BATCH + 1, HEADS, 1)
      for dtype in (torch.int32, torch.float32, torch.bfloat16)),
    tensor(BATCH, 2), tensor(BATCH, KV_HEADS, dtype=torch.float32),
)
NUMBERS: Mapping[Any, tuple[Any, ...]] = {bool: (False, True), int: (-1, 0, 3), float: (0.5, 30.0)}
# FA4 has pairs of numbers for tiles alone.
PAIRS = ((128, 128), (128, 64))


def kinds(annotation: Any) -> list[Any]:
    """The types that an annotation allows, without what they hold."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    return [typing.get_origin(option) or option for option in options]


def _whole(name: str, annotation: Any) -> Aspect | None:
    """The parameter itself, where values of it are known."""
    found = [number(value) for kind in kinds(annotation) for value in NUMBERS.get(kind, ())]
    if any(typing.get_args(option) == (int, int) for option in typing.get_args(annotation)):
        found += map(number, PAIRS)
    tensors = TENSORS if torch.Tensor in kinds(annotation) else ()
    if not found and not tensors:
        return None
    optional = (NONE,) if type(None) in kinds(annotation) else ()
    return Aspect(name, name, (*optional, *found), tensors, name)


def aspects(host: Host, provider: Provider) -> tuple[list[Aspect], list[str]]:
    """What calls may differ in, read from the host function's signature; and the parameters of
    which no value is known."""
    found: list[Aspect] = []
    unknown = []
    for name, annotation in host.parameters.items():
        whole = _whole(name, annotation)
        parts = [whole] if whole else []
        if Callable in kinds(annotation) and keyed_mask_mods.fits(name):
            parts += _of_code(provider, name)
        if _lists_tensors(annotation):
            parts += _of_tensors(name)
        found += parts
        if not parts:
            unknown.append(name)
    return found, unknown


def _of_code(provider: Provider, name: str) -> list[Aspect]:
    made = {part: (phrase.format(name), values)
            for part, (phrase, values) in keyed_mask_mods.PARTS.items()}
    for mark in sorted(marks(provider, name)):
        made[mark] = f"the attribute {mark} of {name}", keyed_mask_mods.marked(mark)
    return [Aspect(f"{name}.{part}", name, tuple(Value(text, make) for text, make in values),
                   phrase=phrase) for part, (phrase, values) in made.items()]


def marks(provider: Provider, name: str) -> set[str]:
    """The attributes that FA4 asks of a callable of that name, anywhere in its source."""
    asked = re.compile(rf"getattr\(\s*(?:self\.)?{name},\s*\"(\w+)\"")
    return {mark for path in provider.folder.glob("*.py")
            for mark in asked.findall(path.read_text(encoding="utf-8"))}


def _of_tensors(name: str) -> list[Aspect]:
    one = tensor(BATCH, 2)
    parts = {
        "dtype": [tensor(BATCH, 2, dtype=dtype) for dtype in (
            torch.int32, torch.int64, torch.int16, torch.float32)],
        "rank": [one, tensor(BATCH, 2, 2)],
        "strides": [one, tensor(BATCH, 2, strides=(0, 1)), tensor(BATCH, 2, strides=(1, BATCH))],
    }
    several = (NONE, *(listed(*[one] * count) for count in (1, 2, 3)))
    return [Aspect(name, name, several, phrase=f"the number of {name}"), *(
        Aspect(f"{name}.{part}", name, tuple(map(listed, tensors)),
               phrase=f"the {part} of {name}") for part, tensors in parts.items())]


def _lists_tensors(annotation: Any) -> bool:
    """Whether a list is allowed whose items are tensors, or are not told."""
    options = (annotation, *typing.get_args(annotation))
    lists = [each for each in options if (typing.get_origin(each) or each) is list]
    return any(typing.get_args(each) in ((), (torch.Tensor,)) for each in lists)


FORWARD = (f"SM{ARCH}, {BATCH} packed sequences over pages of {PAGE} keys, {HEADS} heads on "
           f"{KV_HEADS}, head_dim {DIM}, bf16")
BLOCKS = f"{BATCH} sequences of 512 x 512, tiles of 128 x 128"


def hosts(provider: Provider) -> list[Host]:
    """The host functions that compile a mask; only where the provider is served."""
    code = Value(*keyed_mask_mods.BASE)
    masked = {"mask_mod": code, "aux_tensors": listed(tensor(BATCH, 2))}
    window = {"window_size_left": number(3), "window_size_right": number(3)}
    forward = Host(
        "_flash_attn_fwd", provider.module("interface")._flash_attn_fwd, FORWARD, _forward,
        ({}, {"causal": number(True)}, window, masked),
    )
    blocks = Host(
        "compute_block_sparsity",
        provider.module("compute_block_sparsity").compute_block_sparsity, BLOCKS, _blocks,
        (masked,),
    )
    return [forward, blocks]


def _forward() -> Mapping[str, Any]:
    """Paged keys, two sequences: vLLM's call."""
    pages, kind = 4, {"dtype": torch.bfloat16, "device": "cuda"}
    cached = (pages, PAGE, KV_HEADS, DIM)
    return {
        "q": torch.empty(6, HEADS, DIM, **kind), "k": torch.empty(cached, **kind),
        "v": torch.empty(cached, **kind),
        "cu_seqlens_q": torch.empty(BATCH + 1, dtype=torch.int32, device="cuda"),
        "seqused_k": torch.empty(BATCH, dtype=torch.int32, device="cuda"),
        "page_table": torch.empty(BATCH, 2, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1024, "max_seqlen_k": 2 * PAGE, "_arch": ARCH,
    }


def _blocks() -> Mapping[str, Any]:
    return {"tile_m": 128, "tile_n": 128, "batch_size": BATCH, "num_heads": HEADS,
            "seqlen_q": 512, "seqlen_k": 512, "device": "cuda"}
