"""Several releases in one process, each with the modules that it was loaded with.

A release serves its modules under vLLM's own names, and the one that was loaded last hides those
before. The `make` of its targets brings its own back, which stay until another's does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from fuzz.targets import Source, gathered
from kernels.fa4 import VLLM
from kernels.target import Target


@dataclass(slots=True)
class Serving:
    """`kept` has the modules of each release that was gathered, `now` says whose are in place."""

    kept: list[dict[str, ModuleType]] = field(default_factory=list)
    now: int = -1

    def gather(self, scope: ExitStack, source: Source, progress: Any) -> dict[str, Target]:
        """The targets of a source, usable until the scope ends."""
        if source.vllm is None:
            return scope.enter_context(gathered(source, progress))
        if self.now >= 0:
            self.kept[self.now] = loaded()
        found = scope.enter_context(gathered(source, progress))
        self.kept.append(loaded())
        self.now = len(self.kept) - 1
        return {name: self._serving(target, self.now) for name, target in found.items()}

    def _serving(self, target: Target, which: int) -> Target:
        def make(at: Mapping[str, object]) -> Any:
            self.switch(which)
            return target.make(at)

        return replace(target, make=make)

    def switch(self, which: int) -> None:
        if which == self.now:
            return
        self.kept[self.now] = loaded()
        for name in self.kept[self.now]:
            del sys.modules[name]
        sys.modules.update(self.kept[which])
        self.now = which


def loaded() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items()
            if name.partition(".")[0] == VLLM}
