"""A user's own mask_mod as a target: from `path/to/file.py::name` or `package.module:name`.

`name` is a mask_mod, or a factory of one, which is called with the `--call` arguments.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import kernels.environment  # noqa: F401  (before a user's file imports cutlass)
from kernels.target import Target

ARGUMENTS = ("batch_idx", "head_idx", "q_idx", "kv_idx", "seqlen_info", "aux_tensors")
EXPECTED = f"FA4 calls mask_mod({', '.join(ARGUMENTS)})"
MOST_NAMES = 12
COLOUR = re.compile(r"\x1b\[[\d;]*m")
_numbers = itertools.count()


class LoadError(Exception):
    """A target that cannot be had; the message is one line."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A `--call` argument that stands for a symbol of the spec: `@window`."""

    name: str


def load(
    text: str,
    call: Sequence[str] = (),
    *,
    spec: str,
    layouts: tuple[tuple[str, ...], ...] = (),
    ranks: Mapping[str, int] | None = None,
) -> Target:
    """The target that `text` names. `call` holds `name=value`, with an int, True, False, None,
    a quoted string, or `@symbol` as the value. The factory has been called once."""
    arguments = dict(map(argument, call))
    module, folder = find_module(text)
    function = attribute(module, text)
    make = maker(text, function, arguments, folder)
    target = Target(
        target=text,
        spec=spec,
        make=make,
        symbols=tuple(dict.fromkeys(v.name for v in arguments.values() if isinstance(v, Symbol))),
        layouts=layouts,
        ranks=ranks or {},
    )
    call_once(target)
    return target


def argument(text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name.isidentifier() and equals):
        raise LoadError(f"--call {text}: write name=value")
    if value[:1] == "@" and value[1:].isidentifier():
        return name, Symbol(value[1:])
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        literal = ...
    if literal is not None and not isinstance(literal, int | str):
        raise LoadError(
            f"--call {text}: a value is an int, True, False, None, a quoted string or @symbol"
        )
    return name, literal


def find_module(text: str) -> tuple[ModuleType, str | None]:
    """The module that `text` names and, of a file, the folder that it may import from."""
    file, colons, _ = text.partition("::")
    if colons:
        return import_file(Path(file)), str(Path(file).resolve().parent)
    name, colon, _ = text.rpartition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        raise LoadError(f"{text}: a target is path/to/file.py::name or package.module:name")
    try:
        return importlib.import_module(name), None
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise LoadError(f"{text}: no module named {error.name!r}") from None
        hint = of_vllm(error)
        raise LoadError(f"{text}: importing {name} raised {described(error)}{hint}") from None
    except (Exception, SystemExit) as error:
        raise LoadError(f"{text}: importing {name} raised {described(error)}") from None


def of_vllm(error: BaseException, path: Path = Path()) -> str:
    """A hint, where a file of vLLM's own does not import by itself."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or missing.partition(".")[0] != "vllm":
        return ""
    inside = next((folder for folder in path.resolve().parents if folder.name == "vllm"), None)
    tree = inside.parent if inside else "TREE"
    return f"; check vLLM's own mask_mods with --vllm {tree}, which does not import it"


def import_file(path: Path) -> ModuleType:
    if not path.exists():
        raise LoadError(f"{path}: no such file")
    if not path.is_file() or path.suffix != ".py":
        raise LoadError(f"{path}: not a Python file")
    name = f"maskproof_target_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with importable(str(path.resolve().parent), {name: module}):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            hint = of_vllm(error, path)
            raise LoadError(f"{path}: importing it raised {described(error)}{hint}") from None
    return module


@contextmanager
def importable(folder: str | None, modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Inside, `folder` can be imported from and `modules` are known; neither stays."""
    if folder is None:
        yield
        return
    before = set(sys.modules)
    sys.path.insert(0, folder)
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if name in modules or Path(file).parent == Path(folder):
                del sys.modules[name]


def attribute(module: ModuleType, text: str) -> Callable[..., Any]:
    name = text.rpartition(":")[2]
    found = getattr(module, name, None)
    if callable(found):
        return found
    if found is not None:
        raise LoadError(f"{text}: {name} is {type(found).__name__}, not a function")
    names = [key for key, value in vars(module).items() if callable(value) and key[:2] != "__"]
    if hint := meant(name, names):
        raise LoadError(f"{text}: no function {name!r}{hint}")
    own = [key for key in names if made_in(module, getattr(module, key))]
    has = ", ".join([*own[:MOST_NAMES], *["..."][: len(own) > MOST_NAMES]]) or "none"
    raise LoadError(f"{text}: no function {name!r}; it has {has}")


def made_in(module: ModuleType, value: Any) -> bool:
    """Whether a function, jitted or cached as it may be, is not one that the module imports."""
    return inspect.isfunction(inspect.unwrap(value)) and value.__module__ == module.__name__


def meant(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names)
    return f": did you mean {' or '.join(close)}?" if close else ""


def maker(
    text: str, function: Callable[..., Any], arguments: Mapping[str, Any], folder: str | None
) -> Callable[[Mapping[str, object]], Callable[..., object]]:
    if not arguments and takes_cells(function) and required(function) == len(ARGUMENTS):
        return lambda values: function
    if not arguments and (is_jitted(function) or is_flex(function)):
        raise LoadError(f"{text}: {unlike(function)}")
    factory = without_cache(function)
    check_arguments(text, factory, arguments)

    def make(values: Mapping[str, object]) -> Callable[..., object]:
        bound = {
            name: values[value.name] if isinstance(value, Symbol) else value
            for name, value in arguments.items()
        }
        with importable(folder, {}):
            try:
                mask_mod = factory(**bound)
            except (Exception, SystemExit) as error:
                raise LoadError(f"{text}: the factory raised {described(error)}") from None
        return checked(text, mask_mod)

    return make


def checked(text: str, mask_mod: Any) -> Callable[..., object]:
    if not callable(mask_mod):
        raise LoadError(f"{text}: the factory returned {type(mask_mod).__name__}, not a mask_mod")
    if not takes_cells(mask_mod):
        raise LoadError(f"{text}: {unlike(mask_mod)}")
    return mask_mod


def without_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that sees each call: a cache would keep values of one trace for the next."""
    return function.__wrapped__ if hasattr(function, "cache_info") else function


def is_jitted(function: Callable[..., Any]) -> bool:
    return hasattr(inspect.unwrap(function), "_dsl_cls")


def signature(function: Callable[..., Any]) -> str:
    parameters = ", ".join(inspect.signature(function).parameters)
    return f"{getattr(function, '__name__', 'function')}({parameters})"


def is_flex(function: Callable[..., Any]) -> bool:
    """Whether this is a mask_mod of PyTorch: four arguments, the last two a query and a key."""
    names = list(inspect.signature(function).parameters)
    return len(names) == required(function) == 4 and names[2][0] == "q" and names[3][0] == "k"


def unlike(function: Callable[..., Any]) -> str:
    """Why FA4 cannot call it."""
    kind = "a FlexAttention mask_mod, not FA4's" if is_flex(function) else "not a mask_mod"
    return f"{signature(function)} is {kind}: {EXPECTED}"


def takes_cells(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(*ARGUMENTS)
    except (TypeError, ValueError):
        return False
    return True


def required(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters)


def check_arguments(
    text: str, factory: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    shown = signature(factory)
    parameters = inspect.signature(factory).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in arguments:
        if name not in parameters and not anything:
            raise LoadError(f"{text}: {shown} takes no {name!r}{meant(name, list(parameters))}")
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in arguments
    ]
    if missing:
        raise LoadError(f"{text}: {shown} needs {' and '.join(missing)}: --call {missing[0]}=VALUE")


def call_once(target: Target) -> None:
    """Calls the factory, so that what it raises is known before anything is checked."""
    if not target.symbols:
        target.make({})
        return
    from kernels.trace import in_trace

    in_trace(target.make, target.symbols)


def described(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: line {error.lineno}: {error.msg}"
    text = COLOUR.sub("", str(error))
    message = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
