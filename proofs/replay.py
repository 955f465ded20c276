"""One cell of one real mask_mod, executed on the CPU: what a pasted test calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.target import Target
from spec.from_file import resolve

if TYPE_CHECKING:
    from kernels.from_cute import Lifted


class ReplayError(Exception):
    """A cell that cannot be run; the message is one line."""


@contextmanager
def gather(
    targets: Sequence[str] = (), *, vllm: str | None = None, fa4: str | None = None,
    call: Sequence[str] = (), against: str = "full", aux: Sequence[str] = (),
    progress: Any = None,
) -> Iterator[list[Target]]:
    """The targets that a command line means, usable inside the scope.

    `vllm` is a version, wheel, URL, source tree or "installed"; `targets` are `file.py::factory`
    or `package.module:mask_mod`, with the factory's arguments in `call`, the mask in `against` and
    the name of each aux tensor in `aux`. Without either, the project's own.
    """
    if vllm is not None:
        from kernels import release
        from kernels import vllm as provider

        with provider.load(release.find(vllm, fa4=fa4, progress=progress)) as loaded:
            yield provider.branches(loaded)
    elif targets:
        from kernels.load import load

        mask = resolve(against)
        ranks = dict.fromkeys(mask.params, 1)
        ranks |= {table.name: len(table.dims) for table in mask.tables.values()}
        layouts = (tuple(aux),) if aux else ()
        yield [load(text, call, spec=against, layouts=layouts, ranks=ranks) for text in targets]
    else:
        from kernels.mask_mods import TARGETS

        yield list(TARGETS)


def visible(
    target: str, *, cell: Mapping[str, int], tables: Mapping[str, Any], **source: Any
) -> bool:
    """Whether the real code sees the key: `cell` gives b, q_idx, kv_idx, the lengths and the
    parameters, `tables` what the aux tensors hold; `source` is as in `gather`."""
    from kernels.from_cute import lift

    own = (target,) if ":" in target else ()
    with gather(own, **source) as found:
        chosen = next((t for t in found if t.target == target), None)
        if chosen is None:
            names = ", ".join(t.target for t in found)
            raise ReplayError(f"no target {target!r}; there are {names}")
        lifted = lift(chosen)
        scalars = {name: [cell[name]] for name in lifted.layout if name not in tables}
        return visible_key(chosen, lifted, cell, {**tables, **scalars})


def visible_key(
    target: Target, lifted: Lifted, cell: Mapping[str, int], tables: Mapping[str, Any]
) -> bool:
    """What the real code says of one key, which may be in any lane of a packed mask_mod."""
    from kernels.run_cute import run

    lane = cell["kv_idx"] % len(lifted.lanes)
    vector = {**cell, "kv_idx": cell["kv_idx"] - lane}
    cells = {name: np.array([value], dtype=np.int32) for name, value in vector.items()}
    arrays = {name: np.array(value, dtype=np.int32) for name, value in tables.items()}
    return bool(run(target, lifted.layout, cells, arrays).reshape(-1)[lane])
