"""What surrounds the mask_mods of a provider, cut into units that are proved in processes of their
own and kept: what has not changed since is not proved again.

A unit is one configuration of a layer whose module has `configurations` and `of_configuration`, or
else all of a layer whose module has `rows` alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec.term import sym

if TYPE_CHECKING:
    from kernels.provider import Provider
    from proofs.checks import Options

Record = dict[str, Any]
Announce = Callable[[str], None]
MODULES: Mapping[str, str] = {
    "builtin": "proofs.builtin", "tiles": "proofs.tiles", "sampling": "proofs.sampling",
    "dispatch": "proofs.dispatch", "metadata": "proofs.metadata", "keys": "proofs.keys",
}
# What may come out otherwise another time.
NOT_KEPT = ("UNKNOWN", "ERROR")
SET_PARENT_DEATH_SIGNAL = 1
ENVIRONMENT = ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH", "FLASH_ATTENTION_NUM_SMS")


@dataclass(frozen=True)
class Unit:
    """`configuration` is None for all of a layer, which may be more if it is `full`. `refused` says
    why nothing of it can be lifted."""

    layer: str
    provider: Provider
    configuration: Any = None
    full: bool = False
    refused: str = ""

    @property
    def name(self) -> str:
        which = f"/{self.configuration.name}" if self.configuration is not None else ""
        return f"{self.provider.name}/{self.layer}{which}"


def units(provider: Provider, layers: Sequence[str], *, full: bool = False) -> list[Unit]:
    """The units of a provider. `full` asks for every tile size, packing and architecture."""
    found = []
    for layer in layers:
        module = import_module(MODULES[layer])
        if hasattr(module, "of_configuration"):
            found += _configured(layer, module, provider, full)
        else:
            found.append(Unit(layer, provider, full=full))
    return found


def _configured(layer: str, module: Any, provider: Provider, full: bool) -> list[Unit]:
    from kernels.machine import CannotLift

    try:
        with provider.served():
            return [Unit(layer, provider, each)
                    for each in module.configurations(provider, full=full)]
    except CannotLift as error:
        return [Unit(layer, provider, full=full, refused=str(error))]


def check(
    chosen: Sequence[Unit], options: Options, announce: Announce = lambda text: None,
    cache: Path | None = None, processes: int | None = None,
    beside: Callable[[], None] = lambda: None,
) -> list[Record]:
    """The records of all units, in their order; those that `cache` holds are not proved again.
    `beside` is done in this process while others prove."""
    keys = {unit: key(unit, options) for unit in chosen} if cache else {}
    found: dict[Unit, list[Record]] = {}
    for unit in chosen:
        if cache and (kept := _kept(cache, keys[unit])) is not None:
            found[unit] = [{**one, "cached": True} for one in kept]
    left = [unit for unit in chosen if unit not in found]
    for unit, records in _proved(left, options, processes or os.cpu_count() or 1, beside):
        announce(f"{unit.name} ({len(found) + 1} of {len(chosen)})")
        found[unit] = records
        if cache and records and not any(one["verdict"] in NOT_KEPT for one in records):
            _keep(cache, keys[unit], records)
    return [one for unit in chosen for one in found[unit]]


def _proved(
    left: Sequence[Unit], options: Options, processes: int, beside: Callable[[], None]
) -> Iterator[tuple[Unit, list[Record]]]:
    if not left:
        beside()
        return
    # What is imported here need not be in each process.
    for layer, provider in dict.fromkeys((unit.layer, unit.provider) for unit in left):
        module = import_module(MODULES[layer])
        if hasattr(module, "prepare"):
            module.prepare(provider)
    # What takes longest begins first.
    left = sorted(left, key=lambda unit: unit.configuration is not None and unit.layer != "keys")
    # Forked processes have the units as they are; only their numbers are passed on.
    _at_hand[:] = [(unit, options) for unit in left]
    pool = ProcessPoolExecutor(
        min(processes, len(left)), mp_context=get_context("fork"), initializer=_in_child)
    ran = {pool.submit(_of_number, number): unit for number, unit in enumerate(left)}
    try:
        beside()
        for future in as_completed(ran):
            unit = ran[future]
            try:
                yield unit, future.result()
            except BrokenProcessPool:
                why = "the process that proves it ended"
                yield unit, [nothing(unit.name, unit.layer, "ERROR", why)]
    finally:
        pool.shutdown(cancel_futures=True)


_at_hand: list[tuple[Unit, Options]] = []


def _of_number(number: int) -> list[Record]:
    return of_unit(*_at_hand[number])


def _in_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    end_with_parent()


def end_with_parent() -> None:
    """The kernel ends this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def of_unit(unit: Unit, options: Options) -> list[Record]:
    from proofs.report import record

    if unit.refused:
        return [nothing(unit.name, unit.layer, "UNSUPPORTED", unit.refused)]
    module = import_module(MODULES[unit.layer])
    if unit.configuration is None:
        more = {"full": unit.full} if "full" in signature(module.rows).parameters else {}
        rows = list(module.rows(unit.provider, options, lambda text: None, **more))
    else:
        with unit.provider.served():
            rows = module.of_configuration(unit.provider, unit.configuration, options)
    found = [record(row) for row in rows]
    root = unit.provider.root
    if root is not None and (gone := [f for f in needed(unit.layer) if not (root / f).is_file()]):
        found.append(nothing(unit.name, unit.layer, "UNSUPPORTED", f"there is no {gone[0]}"))
    return found


def needed(layer: str) -> tuple[str, ...]:
    """Files of a release without which a layer would find nothing there, and be silent."""
    from kernels import forward, metadata

    return {"dispatch": (str(forward.BACKEND), str(forward.INTERFACE)),
            "metadata": (str(metadata.FILE),)}.get(layer, ())


def nothing(target: str, layer: str, verdict: str, reason: str) -> Record:
    """A record of what nothing can be said of."""
    from proofs.checks import Row
    from proofs.obligation import Obligation, Result, Verdict
    from proofs.report import record

    claimed = Obligation(target=target, name=layer, spec="", claim=sym("?") < 0, assumptions=(),
                         bounds="none", layer=layer)
    return record(Row(Result(claimed, Verdict(verdict), reason=reason)))


def key(unit: Unit, options: Options) -> str:
    """What the records of a unit follow from: the sources of the provider and of this project, the
    versions of all that is used, and the options."""
    from kernels import forward
    from proofs import compilers
    from proofs.report import versions

    limits = replace(options.limits, smtlib=None)
    root = unit.provider.root
    # `--fa4` may take the kernels, and what calls them, from another release.
    beside = forward.root_of(unit.provider)
    theirs = [_digest(folder) for folder in (
        unit.provider.folder, *(each / "vllm" for each in (root, beside) if each),
        *compilers.folders())]
    parts = [unit.name, repr(unit.configuration), unit.full, unit.refused, theirs, _ours(),
             repr(limits), repr(options.obligations), options.thorough, versions(),
             compilers.versions(),
             [os.environ.get(name) for name in ENVIRONMENT]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_digests: dict[Path, str] = {}


def _sources(folder: Path) -> list[Path]:
    """Every source below a folder, behind links to other folders too, of which none is entered
    twice."""
    found, entered = [], set()
    for place, below, files in os.walk(folder, followlinks=True):
        below[:] = [name for name in sorted(below)
                    if (real := os.path.realpath(os.path.join(place, name))) not in entered
                    and not entered.add(real)]  # type: ignore[func-returns-value]
        found += [Path(place, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _digest(folder: Path) -> str:
    """Of every source in a folder, by name and contents."""
    if folder not in _digests:
        total = hashlib.sha256()
        for path in _sources(folder):
            total.update(f"{path.relative_to(folder)}\n".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
        _digests[folder] = total.hexdigest()
    return _digests[folder]


def _ours() -> str:
    root = Path(__file__).resolve().parent.parent
    return " ".join(_digest(root / name) for name in ("spec", "kernels", "proofs"))


FIELDS = {
    "target", "layer", "arch", "obligation", "spec", "verdict", "expected", "cached", "replayed",
    "compared", "theory", "bounds", "assumptions", "seconds", "mutants", "witness", "diagnosis",
    "reason", "extra", "fa4", "explanation",
}


def _kept(cache: Path, key: str) -> list[Record] | None:
    try:
        records = json.loads((cache / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(records, list) and records and all(
        isinstance(one, dict) and one.keys() == FIELDS for one in records)
    return records if whole else None


def _keep(cache: Path, key: str, records: Sequence[Record]) -> None:
    """A cache that cannot be written to is none."""
    path = cache / f"{key}.json"
    new = path.with_name(f".{key}.{os.getpid()}.new")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(records))
        os.replace(new, path)
    except OSError:
        return
