"""A provider's kernels for the targets of a campaign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuzz.targets import GENERATED
from kernels import fa4
from kernels.fa4 import Call
from kernels.target import Target


@dataclass(slots=True)
class Bound:
    """A provider to read from, each of whose kernels serves all values of the parameters that it
    has not compiled in. While it is `dry` nothing is launched."""

    provider: Any
    targets: Mapping[str, Target]
    dry: bool = False

    @property
    def fa4(self) -> str:
        return self.provider.fa4

    def fixed(self, call: Call) -> Call:
        """The call with the parameters that its kernel has compiled in; others come in tables."""
        if call.mask_mod is None:
            return call
        target = self.targets[call.mask_mod]
        if call.mask_mod.startswith(GENERATED):
            return replace(call, params={**call.params, **target.constants})
        return replace(call, params={name: call.params[name] for name in target.symbols})

    def layout(self, call: Call) -> tuple[str, ...]:
        return self.provider.mask_mod(self.fixed(call))[1] if call.mask_mod else ()

    def compile(self, call: Call, sequences: int) -> None:
        self.provider.compile(self.fixed(call), sequences)

    def launch(self, call: Call, on: fa4.Resident, **given: Any) -> None:
        if not self.dry:
            self.provider.launch(self.fixed(call), on, **given)
