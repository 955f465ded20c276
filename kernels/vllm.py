"""The mask_mods of a vLLM release: load their factories without vLLM, call every branch.

A factory is a module-level function of the FlashAttention back end that nests a `@cute.jit`
mask_mod. It is compiled alone, under its own file name and line numbers, with the module-level
names that it refers to. What it imports when it is called, FA4's `cute` package as a part of vLLM,
is served inside a scope. Branches follow from the names of a factory's parameters.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, resolve_name
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import kernels.environment  # noqa: F401 (the release's FA4 imports cutlass)
from kernels.release import BACKEND, Release
from kernels.target import Target

PACKAGE = "vllm.v1.attention.backends"
MODULE = f"{PACKAGE}.flash_attn"
CUTE = "vllm.vllm_flash_attn.cute"

# The parameters that factories of mm_prefix have, by what they mean.
RANGES = "max_ranges"  # how many ranges a row of the table holds
WINDOW = "sliding_window_left"  # bounds the causal term; None for no bound
CLAMP = "sliding_window"  # bounds the ranges on the past side; 0 for no bound
RANGE_COUNTS = (2, 8)

GLOBAL_LOOKUPS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class VllmError(Exception):
    """A release whose mask_mods cannot be loaded, in one line."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The factories of a release, to be called inside the scope that `load` opens.

    `factories` maps each name to the function, or to the reason why there is none. `fa4` says which
    FA4 serves them.
    """

    release: Release
    fa4: str
    module: ModuleType
    factories: Mapping[str, Callable[..., Any] | str]


@contextmanager
def load(release: Release) -> Iterator[Loaded]:
    """Serve the release's factories, and its `cute` package under vLLM's name, inside a scope."""
    path = release.root / BACKEND
    source = _parse(path)
    definitions = [node for node in source.body if isinstance(node, Definition) and _nests(node)]
    if not definitions:
        raise VllmError(
            f"{release.name} has no factory of a mask_mod in {BACKEND}: give a release that has"
        )
    needs = {node.name: _needs(node, source) for node in definitions}
    kept = [node for need in needs.values() if not isinstance(need, str) for node in need]
    with ExitStack() as scope:
        fa4 = _serve_fa4(scope, release, _cute_imports(kept))
        module = _execute([node for node in source.body if node in kept], path)
        factories = {
            name: need if isinstance(need, str) else getattr(module, name)
            for name, need in needs.items()
        }
        yield Loaded(release, fa4, module, factories)


def branches(loaded: Loaded) -> list[Target]:
    """Every branch that the release's factories compile, as targets."""
    return [target for name in loaded.factories for target in _targets(loaded, name)]


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise VllmError(f"{path} cannot be read: {_reason(error)}") from None


def _nests(node: ast.AST) -> bool:
    """Whether a function defines a jitted one with the signature of a mask_mod inside."""
    return any(
        inner is not node and isinstance(inner, Definition) and _is_mask_mod(inner)
        for inner in ast.walk(node)
    )


def _is_mask_mod(node: Definition) -> bool:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    jitted = any(ast.unparse(each).split("(")[0].endswith("jit") for each in node.decorator_list)
    return jitted and len(names) >= 5 and names[2][0] == "q" and names[3][0] == "k"


def _needs(factory: Definition, source: ast.Module) -> list[ast.stmt] | str:
    """The factory with all module-level statements it refers to, or why that cannot be."""
    bound = {name: node for node in source.body for name in _binds(node)}
    # These change how the rest compiles.
    future = [node for node in source.body if _module(node) == "__future__"]
    found: list[ast.stmt] = []
    pending: list[ast.stmt] = [factory]
    while pending:
        node = pending.pop()
        if foreign := sorted(_imports_of_vllm(node)):
            return f"{factory.name} needs {foreign[0]}, and vLLM is not imported"
        found.append(node)
        for name in _globals(compile(ast.Module([*future, node], []), "", "exec")):
            if name in bound and bound[name] not in [*found, *pending]:
                pending.append(bound[name])
            elif name not in bound and not hasattr(builtins, name) and not name.startswith("__"):
                return f"{factory.name} refers to {name}, which no plain statement defines"
    return future + found


def _binds(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Assign() | ast.AnnAssign():
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            return [each.id for each in names if isinstance(each.ctx, ast.Store)]
        case _:
            return []


def _globals(code: CodeType) -> set[str]:
    """Names that the code, or a function in it, looks up outside its functions."""
    names = {
        str(step.argval) for step in dis.get_instructions(code) if step.opname in GLOBAL_LOOKUPS
    }
    return names.union(*(_globals(part) for part in code.co_consts if isinstance(part, CodeType)))


def _module(node: ast.AST) -> str:
    """The module that an import statement takes something from, in absolute form."""
    if not isinstance(node, ast.ImportFrom):
        return ""
    return resolve_name("." * node.level + (node.module or ""), PACKAGE)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [_module(node)] if isinstance(node, ast.ImportFrom) else []


def _imports_of_vllm(node: ast.AST) -> set[str]:
    """The modules of vLLM that a statement imports, FA4 apart."""
    names = {name for inner in ast.walk(node) for name in _imported(inner)}
    return {name for name in names if _within(name, "vllm") and not _within(name, CUTE)}


def _cute_imports(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """The import statements, inside of functions too, that take something from FA4."""
    return [
        inner
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
        and any(_within(name, CUTE) for name in _imported(inner))
    ]


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _execute(nodes: list[ast.stmt], path: Path) -> ModuleType:
    """A module of these statements alone; it keeps file and lines, for cutlass reads the source."""
    module = ModuleType(MODULE)
    module.__file__ = str(path)
    module.__package__ = PACKAGE
    sys.modules[MODULE] = module
    _not_imported_again(module)
    try:
        exec(compile(ast.Module(nodes, []), str(path), "exec"), module.__dict__)
    except Exception as error:
        raise VllmError(f"the factories of {path} do not load: {_reason(error)}") from None
    return module


def _not_imported_again(module: ModuleType) -> None:
    """Compilers up to 4.5 import again, beside a function, all that the file of its module does."""
    from cutlass.cutlass_dsl import CuTeDSL

    preprocessor = CuTeDSL._get_dsl().preprocessor
    if hasattr(preprocessor, "module_cache"):
        preprocessor.module_cache[module] = []


def _serve_fa4(scope: ExitStack, release: Release, imports: list[ast.stmt]) -> str:
    """Serve the FA4 that the factories' own imports succeed with, and say which it is."""
    why = f"{release.name} has no FA4 of its own"
    if release.fa4:
        own = release.fa4.is_relative_to(release.root)
        try:
            _try_fa4(scope, release.fa4, imports, also_itself=not own)
        except Exception as error:
            if not own:
                raise VllmError(f"{release.fa4} does not import: {_reason(error)}") from None
            compiler = f"nvidia-cutlass-dsl {_installed('nvidia-cutlass-dsl')}"
            why = f"the release's own FA4 does not import with {compiler}: {_reason(error)}"
        else:
            return f"{release.name}'s own FA4" if own else f"FA4 in {release.fa4}"
    installed = f"flash-attn-4 {_installed('flash-attn-4')} ({why})"
    try:
        _try_fa4(scope, _installed_cute(), imports, also_itself=False)
    except Exception as error:
        raise VllmError(f"{installed} does not import: {_reason(error)}") from None
    return installed


def _try_fa4(scope: ExitStack, folder: Path, imports: list[ast.stmt], *, also_itself: bool) -> None:
    """Enter the scope that serves `folder`, or leave no trace and raise what the imports raise.

    An FA4 from elsewhere calls itself `flash_attn.cute`: its parts must not mix with the installed.
    """
    with ExitStack() as attempt:
        attempt.enter_context(_served(folder, (CUTE, "flash_attn.cute")[: 1 + also_itself]))
        exec(compile(ast.Module(imports, []), str(folder), "exec"), {"__package__": PACKAGE})
        scope.push(attempt.pop_all())


@contextmanager
def _served(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Let `names` be packages of the modules in `folder`, and hide all that is beside them.

    What was imported before under their top-level names is put aside and comes back. No `__init__`
    runs: that of FA4 imports all kernels, and a mask_mod needs a few lines of one module.
    """
    tops = {name.partition(".")[0] for name in names}
    before = _loaded(tops)
    for name in before:
        del sys.modules[name]
    try:
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts)):
                _add_package(".".join(parts[:end]), None)
            _add_package(name, folder)
        yield
    finally:
        for name in _loaded(tops):
            del sys.modules[name]
        sys.modules.update(before)


def _loaded(tops: set[str]) -> dict[str, ModuleType]:
    return {name: each for name, each in sys.modules.items() if name.partition(".")[0] in tops}


def _add_package(name: str, folder: Path | None) -> None:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)] if folder else []
    module = sys.modules[name] = module_from_spec(spec)
    # Set to None, it makes `inspect` fail where a module of this name once had a file.
    module.__dict__.pop("__file__", None)


def _installed_cute() -> Path:
    spec = find_spec("flash_attn")
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / "cute").is_dir():
            return Path(place) / "cute"
    raise ModuleNotFoundError("flash-attn-4 is not installed")


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True, slots=True)
class _Branch:
    """A way to call a factory. An argument `"@window"` is the run-time Int32 of that name."""

    name: str
    spec: str
    layouts: tuple[tuple[str, ...], ...]
    arguments: Mapping[str, int | str | None] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


def _targets(loaded: Loaded, name: str) -> list[Target]:
    factory = loaded.factories[name]
    reason = factory if isinstance(factory, str) else _not_known(name, factory)
    if reason or isinstance(factory, str):
        short = name.removeprefix("_make_").removesuffix("_mask_mod")
        return [_target(loaded, _Branch(short, short, ()), _no_mask_mod, reason)]
    make = _without_cache(factory)
    return [_target(loaded, branch, make) for branch in FAMILIES[name].branches(_names(factory))]


def _target(
    loaded: Loaded, branch: _Branch, factory: Callable[..., Any], unsupported: str | None = None
) -> Target:
    values = branch.arguments.values()
    return Target(
        target=f"{loaded.release.name}/{branch.name}",
        spec=branch.spec,
        make=partial(_call, loaded.module, factory, branch.arguments),
        symbols=tuple(sorted({value[1:] for value in values if isinstance(value, str)})),
        layouts=branch.layouts,
        constants=branch.constants,
        unsupported=unsupported,
        fa4=loaded.fa4,
        note=branch.note,
    )


def _call(
    module: ModuleType,
    factory: Callable[..., Any],
    arguments: Mapping[str, int | str | None],
    symbols: Mapping[str, object],
) -> Callable[..., Any]:
    # Outside its scope the factory would find an installed vLLM, or another release.
    if sys.modules.get(MODULE) is not module:
        raise VllmError(f"{module.__file__} is no longer loaded: call `make` inside `load`")
    return factory(
        **{
            name: symbols[value[1:]] if isinstance(value, str) else value
            for name, value in arguments.items()
        }
    )


def _no_mask_mod() -> Callable[..., Any]:
    raise VllmError("this target is unsupported: `make` is not to be called")


def _names(factory: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(factory).parameters)


def _not_known(name: str, factory: Callable[..., Any]) -> str | None:
    """What keeps the branches of a factory from being known."""
    if name not in FAMILIES:
        return f"factory {name} is not known"
    unknown = [
        each
        for each in inspect.signature(factory).parameters
        if each not in FAMILIES[name].parameters
    ]
    return f"parameter {unknown[0]} of {name} is not known" if unknown else None


def _without_cache(factory: Any) -> Callable[..., Any]:
    """The factory itself: a cache would look a run-time value up by its hash."""
    while hasattr(factory, "cache_info"):
        factory = factory.__wrapped__
    return factory


def _mm_prefix(parameters: set[str]) -> Iterator[_Branch]:
    off = {name: value for name, value in ((WINDOW, None), (CLAMP, 0)) if name in parameters}
    for count in RANGE_COUNTS if RANGES in parameters else (None,):
        compiled_in = {} if count is None else {RANGES: count}
        suffix = "".join(f",ranges={count}" for count in compiled_in.values())
        for name, spec, arguments, note in _mm_prefix_calls(parameters):
            yield _Branch(
                f"mm_prefix[{name}{suffix}]",
                spec,
                layouts=(("query_ranges", "cu_seqlens_q"), ("ranges",)),
                arguments=off | compiled_in | arguments,
                constants={} if count is None else {"num_ranges": count},
                note=note,
            )


def _mm_prefix_calls(parameters: set[str]) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Name, spec, arguments that are not off, and note of each way in which vLLM may call it."""
    window = {WINDOW: "@window"} if WINDOW in parameters else {}
    note = "" if window else "takes no window, and is the only one for windowed layers"
    yield "window", "mm_prefix", window, note
    if window:
        yield "no-window", "mm_prefix_no_window", {}, ""
    if CLAMP in parameters:
        yield "clamp", "mm_prefix_clamped", window | {CLAMP: "@window"}, note


def _rswa(parameters: set[str]) -> Iterator[_Branch]:
    yield _Branch("rswa", "rswa", (("prefix_lens", "window"),))


@dataclass(frozen=True, slots=True)
class _Family:
    """The parameters that are known of a factory, and its branches given those that it has."""

    parameters: frozenset[str]
    branches: Callable[[set[str]], Iterator[_Branch]]


FAMILIES = {
    "_make_mm_prefix_mask_mod": _Family(frozenset({RANGES, WINDOW, CLAMP}), _mm_prefix),
    "_make_rswa_mask_mod": _Family(frozenset(), _rswa),
}
