"""Where FA4 comes from: the installed package, or the fork inside a vLLM release."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)
from kernels.machine import CannotLift
from kernels.release import Release
from kernels.vllm import CUTE, _installed_cute, _served

INSTALLED = "flash_attn.cute"


@dataclass(frozen=True)
class Provider:
    """One FA4. `name` begins the names of targets; `cute` is the module name of its package,
    whose files lie in `folder`. Of a release `root` contains `vllm/`."""

    name: str
    cute: str
    folder: Path
    root: Path | None = None

    @contextmanager
    def served(self) -> Iterator[Provider]:
        """Inside, the modules of this FA4 import under its name."""
        with _served(self.folder, (self.cute,)):
            yield self

    def module(self, name: str) -> ModuleType:
        """One module of the package; only inside `served`."""
        try:
            return importlib.import_module(f"{self.cute}.{name}")
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CannotLift(f"{self.cute}.{name} does not import: {said}") from None

    @cached_property
    def tile_size_sm90(self) -> Callable[..., Any]:
        """FA4's own choice of tiles, `(head_dim, head_dim_v, is_causal, is_local)`."""
        name = "_tile_size_fwd_sm90"
        return self.defined("interface.py", name, "FwdConfig")[name]

    def defined(self, file: str, *names: str) -> Mapping[str, Any]:
        """Module-level definitions of a file, executed alone."""
        path = self.folder / file
        nodes = [node for node in parsed(path).body
                 if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
        if missing := set(names) - {node.name for node in nodes}:
            raise CannotLift(f"{path.name} has no {min(missing)}")
        scope: dict[str, Any] = {"dataclass": dataclass, "__name__": f"{self.cute}.{path.stem}"}
        exec(compile(ast.Module(nodes, []), str(path), "exec", dont_inherit=True), scope)
        return scope


def parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise CannotLift(f"{path.name} cannot be read: {error}") from None


def installed() -> Provider:
    return Provider(f"flash-attn-4-{version('flash-attn-4')}", INSTALLED, _installed_cute())


def of_release(release: Release) -> Provider:
    if release.fa4 is None:
        raise CannotLift(f"{release.name} has no FA4 of its own")
    return Provider(release.name, CUTE, release.fa4, release.root)
