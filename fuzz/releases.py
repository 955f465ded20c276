"""The releases that `A..B` or a list of names means, in order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache

from kernels import fa4
from kernels.release import LINUX, Release, _order, _pip, find

VERSIONS = re.compile(r"^\s*Available versions:\s*(.+)$", re.MULTILINE)


class RangeError(Exception):
    """A range that means no releases; the message is one line."""


def named(text: str, note: Callable[[str], None] = lambda text: None) -> list[str]:
    """The releases of `A..B`, both included, oldest first; of `A,B,PATH` as they are given. Raises
    RangeError."""
    if ".." not in text or os.sep in text:
        return _listed(text)
    low, _, high = (part.strip().removeprefix("v") for part in text.partition(".."))
    if not all(re.fullmatch(r"\d+(\.\d+)*[\w.+-]*", end) for end in (low, high)):
        raise RangeError(f"{text!r} is not a range as 0.24.0..0.33.0")
    if _order(low) > _order(high):
        raise RangeError(f"{text!r} begins with the later one: write {high}..{low}")
    known = available(note)
    for end in (low, high):
        if all(_order(end) != _order(each) for each in known):
            raise RangeError(f"no release {end}; known are {', '.join(known[-12:])}")
    return [each for each in known if _order(low) <= _order(each) <= _order(high)]


def _listed(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RangeError("no release is named: write 0.24.0..0.33.0, or names with commas between")
    return list(dict.fromkeys(names))


def available(note: Callable[[str], None] = lambda text: None) -> list[str]:
    """Versions that the package index has or that are at hand, oldest first. Where releases are
    unpacked under $VLLM_TREES, no index is asked."""
    here = [each.version for each in fa4.releases() if each.version is not None]
    trees = bool(os.environ.get("VLLM_TREES"))
    found = None if trees else indexed()
    if found is None:
        why = "$VLLM_TREES is set" if trees else "pip's index cannot be asked"
        note(f"{why}: of the releases only those at hand are taken")
    kept: dict[object, str] = {}
    for version in (*(found or ()), *here):
        kept.setdefault(_order(version), version)
    return sorted(kept.values(), key=_order)


@cache
def indexed() -> tuple[str, ...] | None:
    """Every version of vLLM in the index that the user's pip is configured for; None where it
    cannot be asked."""
    anywhere = ["--only-binary=:all:", "--implementation", "cp", "--abi", "abi3",
                "--python-version", "3.12", *(f"--platform={tag}" for tag in LINUX)]
    for options in ([], anywhere):
        answer = _pip("index", "versions", "vllm", "--no-input", "--retries=1",
                      "--disable-pip-version-check", *options)
        if answer.returncode == 0 and (match := VERSIONS.search(answer.stdout)):
            return tuple(each.strip() for each in match[1].split(","))
    return None


def release(name: str, note: Callable[[str], None] = lambda text: None) -> Release:
    """The files of a release by version, or of a wheel or a tree by path; raises ReleaseError or
    Fa4Error."""
    if os.environ.get("VLLM_TREES") and re.fullmatch(r"\d[\w.+-]*", name):
        return fa4.release_of(f"{fa4.VLLM}-{name}")
    return find(name, progress=note)
