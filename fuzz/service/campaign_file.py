"""campaign.toml: what a campaign is about, read and checked.

    [campaign]
    name = "nightly"            # letters, digits, dots and dashes
    mode = "batch"              # batch, pr, prune or coverage
    budget = "8h"               # wall time of one run
    findings = "nightly"        # a folder, from the folder of this file on, as is every path here
    store = "postgresql://..."  # a path or a URL; without it store.sqlite in the findings folder
    known = "known.json"        # pr: known issues, as `fuzz.campaign export --known` writes them
    baseline = ["vllm-0.33.0"]  # pr: what is known of these releases is known of the targets, too
    regressions = "regressions" # pr: a folder of findings which have to be gone
    tracked = ["vllm-0.33.0"]   # where a replay has to pass before a finding closes

    [[target]]                  # without vllm and file the project's own mask_mods
    vllm = "0.33.0"             # a version, wheel, URL, source tree, or "installed"
    names = ["rswa"]            # only these mask_mods
    specs = ["rswa"]            # only what is to compute these masks
    max_keys = 512
    ranges = {window = [1, 64]} # parameters

    [[target]]
    file = "my_masks.py::mine"  # your own mask_mod, or a factory of one
    spec = "causal"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fuzz.run import ARCHES, duration
from fuzz.service.storer import BACKLOG
from fuzz.targets import Source
from kernels.fa4 import VLLM
from spec.from_file import resolve
from spec.term import SpecError

MODES = ("batch", "pr", "prune", "coverage")
BACKENDS = ("auto", "cpu", "gpu")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CampaignError(Exception):
    """A campaign file that cannot be used; one line that names the file and the key."""


class _Bad(Exception):
    """What a value has to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A [[target]]: mask_mods of one source, by name and by the mask they are to compute; sequences
    of up to `longest` keys, parameters in `ranges`, both ends included."""

    source: Source
    names: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()
    longest: int = 512
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What a campaign file says; `budget` and `deadline` in seconds."""

    path: Path
    name: str
    mode: str = "batch"
    budget: float = 60.0
    findings: Path = Path("findings")
    store: str | None = None
    seed: int | None = None
    workers: int | None = None
    backend: str = "auto"
    arch: str = ARCHES[0]
    deadline: int = 20
    launches: int | None = None
    backlog: int = BACKLOG
    known: Path | None = None
    baseline: tuple[str, ...] = ()
    regressions: Path | None = None
    tracked: tuple[str, ...] = ()
    targets: tuple[Wanted, ...] = ()


Check = Callable[[Any], Any]


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise _Bad("a text")
    return given


def _name(given: Any) -> str:
    if not isinstance(given, str) or not NAME.fullmatch(given):
        raise _Bad("1 to 64 letters, digits, dots, dashes and underscores")
    return given


def _one_of(*values: str) -> Check:
    def check(given: Any) -> str:
        if given not in values:
            raise _Bad(f"one of {', '.join(values)}")
        return given

    return check


def _time(given: Any) -> float:
    try:
        return duration(given)
    except Exception:
        raise _Bad('a time such as "60s", "5m" or "8h"') from None


def _number(low: int, high: int = 2**31 - 1) -> Check:
    def check(given: Any) -> int:
        if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
            raise _Bad(f"a whole number from {low} to {high}")
        return given

    return check


def _texts(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise _Bad("a list of texts")
    return tuple(given)


def _releases(given: Any) -> tuple[str, ...]:
    return tuple(f"{VLLM}-{name}" if name[0].isdigit() else name for name in _texts(given))


def _mask(given: Any) -> str:
    try:
        resolve(_text(given))
    except SpecError as error:
        raise _Bad(f"a mask ({error})") from None
    return given


def _masks(given: Any) -> tuple[str, ...]:
    return tuple(_mask(one) for one in _texts(given))


def _ranges(given: Any) -> dict[str, tuple[int, int]]:
    def is_range(one: Any) -> bool:
        return (isinstance(one, list) and len(one) == 2 and all(type(end) is int for end in one)
                and one[0] <= one[1])

    if not isinstance(given, dict) or not all(map(is_range, given.values())):
        raise _Bad("a table of parameters, each with [low, high]")
    return {name: (low, high) for name, (low, high) in given.items()}


CAMPAIGN: dict[str, Check] = {
    "name": _name, "mode": _one_of(*MODES), "budget": _time, "findings": _text, "store": _text,
    "seed": _number(0, 2**32 - 1), "workers": _number(1, 1024), "backend": _one_of(*BACKENDS),
    "arch": _one_of(*ARCHES), "deadline": _number(1, 3600), "launches": _number(1),
    "backlog": _number(1), "known": _text, "baseline": _releases, "regressions": _text,
    "tracked": _releases,
}
TARGET: dict[str, Check] = {
    "vllm": _text, "fa4": _text, "file": _text, "call": _texts, "aux": _texts, "spec": _mask,
    "names": _texts, "specs": _masks, "max_keys": _number(1, 2**16), "ranges": _ranges,
}
PATHS = ("findings", "known", "regressions")


def load(path: Path) -> Campaign:
    """The campaign that a file describes. Raises CampaignError."""
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise CampaignError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CampaignError(f"{path}: not TOML: {error}") from None
    try:
        return _campaign(path, given)
    except _Bad as error:
        raise CampaignError(f"{path}: {error}") from None


def _campaign(path: Path, given: Mapping[str, Any]) -> Campaign:
    _known(given, ("campaign", "target"), "the file")
    if not isinstance(head := given.get("campaign"), dict):
        raise _Bad("a [campaign] with a name is missing")
    found = _checked(head, CAMPAIGN, "[campaign]")
    if "name" not in found:
        raise _Bad("[campaign] needs a name")
    tables = given.get("target", [{}])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise _Bad("targets are written as [[target]]")
    base = path.absolute().parent
    for name in PATHS:
        if name in found or name == "findings":
            found[name] = base / found.get(name, "findings")
    if "store" in found and "://" not in found["store"]:
        found["store"] = str(base / found["store"])
    targets = tuple(_target(one, f"[[target]] {i + 1}", base) for i, one in enumerate(tables))
    if len(targets) > 1 and any(one.source.fa4 for one in targets):
        raise _Bad("[[target]] fa4: an FA4 from elsewhere would be that of every other [[target]]")
    return Campaign(path=path, targets=targets, **found)


def _target(given: Mapping[str, Any], where: str, base: Path) -> Wanted:
    found = _checked(given, TARGET, where)
    vllm, file = found.get("vllm"), found.get("file")
    if vllm and file:
        raise _Bad(f"{where} has both vllm and file: make two of it")
    if "fa4" in found and not vllm:
        raise _Bad(f"{where} fa4: needs vllm")
    for name in ("call", "aux", "spec"):
        if name in found and not file:
            raise _Bad(f"{where} {name}: is for a file" + (
                "; write specs = [...]" if name == "spec" else ""))
    if file and "spec" not in found:
        raise _Bad(f"{where} needs spec, the mask that {file} is to compute")
    for name in ("names", "specs"):
        if name in found and file:
            raise _Bad(f"{where} {name}: is not for a file, which names one mask_mod")
    source = Source(
        vllm=_placed(vllm, base), fa4=_placed(found.get("fa4"), base),
        targets=(_file(file, base),) if file else (), call=found.get("call", ()),
        aux=found.get("aux", ()), against=found.get("spec", "full"),
        generated=() if file else found.get("specs", ()),
    )
    return Wanted(source=source, names=found.get("names", ()), specs=found.get("specs", ()),
                  longest=found.get("max_keys", 512), ranges=found.get("ranges", {}))


def _placed(text: str | None, base: Path) -> str | None:
    """A path from the folder of the file on, if that is there."""
    return str((base / text).resolve()) if text and (base / text).exists() else text


def _file(text: str, base: Path) -> str:
    path, colons, name = text.partition("::")
    return f"{(base / path).resolve()}::{name}" if colons else text


def _checked(given: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> dict[str, Any]:
    _known(given, tuple(checks), where)
    found = {}
    for name, value in given.items():
        try:
            found[name] = checks[name](value)
        except _Bad as error:
            raise _Bad(f"{where} {name}: {value!r} is not {error}") from None
    return found


def _known(given: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise _Bad(f"{where} has no key {name!r}; {hint}")
