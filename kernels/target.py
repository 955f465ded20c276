"""A mask_mod under proof, whatever it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One compiled branch of a mask_mod and the spec that it is held to.

    `make` is called inside a trace, with the run-time Int32 of each name in `symbols`, and returns
    the real mask_mod. `layouts` are the meanings that the aux tensors may have, most likely first:
    each is a tuple of table names of the spec, one for each tensor. `constants` are numbers of the
    spec that this branch has compiled in; `ranks` the number of dimensions of tables that the
    catalogue does not have. Where `unsupported` gives a reason, `make` is not called.
    """

    target: str
    spec: str
    make: Callable[[Mapping[str, object]], Callable[..., object]]
    symbols: tuple[str, ...] = ()
    layouts: tuple[tuple[str, ...], ...] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    unsupported: str | None = None
    fa4: str = ""
    note: str = ""
