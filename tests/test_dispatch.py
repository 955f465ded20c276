"""Host flags of FA4: code run on symbols and stand-ins, and the masks that flags come to."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.dispatch import SYMBOLIC, Flags, flag_space, of_flags
from kernels.machine import CannotLift
from kernels.provider import Provider, installed, of_release
from kernels.release import find
from kernels.stand_in import Number, Paths, executed, explore
from spec.term import Term, sym
from spec.to_numpy import to_numpy

PROVIDER = installed()


def run(path: Path, text: str, **given: Any) -> dict[str, Any]:
    path.write_text(text)
    return executed(path, "vllm.some.module", given)


def test_a_module_runs_without_what_it_imports(tmp_path: Path) -> None:
    names = run(tmp_path / "m.py", """
from dataclasses import dataclass
from vllm.config import Base, known, other
import vllm.envs as envs

class Layer(Base["key"]):
    flag: other.Kind | None = known()

@dataclass
class Record:
    number: other.Number = 3

def ask():
    from ..elsewhere import thing
    return thing(envs.LIMIT, key=1).part[0]

def branch():
    return 1 if envs.LIMIT else 2
""", known=lambda: 7)
    assert names["Layer"].flag == 7 and names["Record"]().number == 3
    assert repr(names["ask"]()) == "<vllm.elsewhere.thing().part[]>"
    with pytest.raises(CannotLift, match=r"the value of vllm\.envs\.LIMIT"):
        names["branch"]()


@pytest.mark.parametrize("text", ["unknown + 1", "len(unknown)", "[*unknown]", "unknown == 3",
                                  "int(unknown)", "3 in unknown", "range(unknown)"])
def test_no_value_is_made_up(text: str, tmp_path: Path) -> None:
    with pytest.raises(CannotLift):
        run(tmp_path / "m.py", f"from vllm import unknown\nx = {text}\n")


def test_every_answer_of_a_comparison_is_tried() -> None:
    def clamped(paths: Paths) -> Any:
        left = paths.number(sym("left"), -5, 5)
        right = paths.number(sym("right"), -5, 5)
        if left + right < 0 or left == 3:
            return -1
        return max(left - 1 + 2, right) if right else right // 2

    found = explore(clamped)
    for left, right in product(range(-5, 6), repeat=2):
        env = {"left": left, "right": right}
        held = [value for condition, value in found if to_numpy(condition, env)]
        assert len(held) == 1, env
        value = held[0].term if isinstance(held[0], Number) else held[0]
        got = int(to_numpy(value, env)) if isinstance(value, Term) else value
        expected = -1 if left + right < 0 or left == 3 else \
            max(left + 1, right) if right else right // 2
        assert got == expected, env


def test_what_an_interval_decides_is_not_asked() -> None:
    found = explore(lambda paths: paths.number(sym("w"), 0, 9) >= 0)
    assert len(found) == 1 and found[0][1] is True
    with pytest.raises(CannotLift, match="value of a symbolic number"):
        explore(lambda paths: range(paths.number(sym("w"), 0, 9)))
    with pytest.raises(CannotLift, match="ways through"):
        explore(lambda paths: [paths.number(sym(f"w{i}"), 0, 9) > 3 for i in range(9)])


QUERIES, KEYS = np.meshgrid(np.arange(12), np.arange(12), indexing="ij")


def meant(flags: Flags, left: int, right: int) -> Any:
    """What flash-attention's documentation says of a call without mask_mod and negatives."""
    seen = np.ones(QUERIES.shape, bool)
    if flags.causal:
        seen &= KEYS <= QUERIES
    if flags.left is not None:
        seen &= KEYS >= QUERIES - left
    if flags.right is not None:
        seen &= KEYS <= QUERIES + right
    return seen


STATED = [flags for flags in flag_space(PROVIDER)
          if not flags.mask_mod and -1 not in (flags.left, flags.right)]


@pytest.mark.parametrize("flags", STATED, ids=str)
def test_flags_mean_what_is_documented(flags: Flags) -> None:
    found = explore(lambda paths: of_flags(PROVIDER, flags, paths))
    for left, right in product((0, 1, 4), repeat=2):
        env = {"q": QUERIES, "kv": KEYS, "window_size_left": left, "window_size_right": right}
        masks = [one.mask for condition, one in found if to_numpy(condition, env)]
        assert len(masks) == 1 and masks[0] is not None
        got = np.broadcast_to(to_numpy(masks[0], env), QUERIES.shape)
        assert (got == meant(flags, left, right)).all(), (left, right)


def test_a_mask_mod_replaces_the_flags_of_the_installed_fa4() -> None:
    for flags in (f for f in flag_space(PROVIDER) if f.mask_mod):
        for _, one in explore(lambda paths, flags=flags: of_flags(PROVIDER, flags, paths)):
            assert one.mask is None and "mask_mod" not in one.ignored


def planted(tmp_path: Path, file: str, old: str, new: str) -> Provider:
    shutil.copytree(PROVIDER.folder, tmp_path / "cute")
    path = tmp_path / "cute" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return Provider("faulty", PROVIDER.cute, tmp_path / "cute")


def text_of(provider: Provider, flags: Flags) -> str:
    ((_, one),) = explore(lambda paths: of_flags(provider, flags, paths))[:1]
    return repr(one.mask)


CAUSAL = Flags(True, None, None, False, False)
LOCAL = Flags(False, SYMBOLIC, SYMBOLIC, False, False)
FAULTS = {
    "host": ("interface.py", "causal, local = False, True", "causal, local = False, False", LOCAL,
             "True"),
    "kernel": ("flash_fwd_sm90.py", "mask_causal=self.is_causal", "mask_causal=False", CAUSAL,
               "True"),
    "windows": ("flash_fwd_sm90.py", "            window_size_left=window_size_left,\n",
                "            window_size_left=None,\n", LOCAL, "kv - q <= window_size_right"),
    "element": ("mask.py", "causal_row_offset + self.window_size_right", "causal_row_offset", LOCAL,
                None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_source_changes_the_mask(name: str, tmp_path: Path) -> None:
    file, old, new, flags, expected = FAULTS[name]
    faulty = planted(tmp_path, file, old, new)
    got = text_of(faulty, flags)
    assert got != text_of(PROVIDER, flags)
    assert expected is None or got == f"Term({expected!r})"


def test_visits_that_mask_otherwise_are_refused(tmp_path: Path) -> None:
    faulty = planted(tmp_path, "flash_fwd_sm90.py",
                     "mask_fn=partial(mask_fn, mask_mod=self.mask_mod),",
                     "mask_fn=partial(mask_fn, mask_mod=None),")
    with pytest.raises(CannotLift, match="same flags everywhere"):
        text_of(faulty, Flags(False, None, None, False, True))


def test_a_mask_mod_that_a_run_time_test_guards_is_refused(tmp_path: Path) -> None:
    faulty = planted(tmp_path, "mask.py", "mask_value = call_mask_mod(\n",
                     "mask_value = None if n_block > 3 else call_mask_mod(\n")
    with pytest.raises(CannotLift, match="mask_mod only where a run-time test"):
        text_of(faulty, Flags(False, None, None, False, True))


@pytest.mark.releases
def test_the_fork_ignores_a_mask_mod_under_causal() -> None:
    newest, older = (of_release(find(version)) for version in ("0.33.0", "0.26.0"))
    flags = Flags(True, None, None, False, True)
    assert text_of(newest, flags) == "Term('kv <= q')" and text_of(older, flags) == "None"


@pytest.mark.parametrize(("file", "old", "new", "reason"), [
    ("flash_fwd.py", "self.is_causal = is_causal", "self.is_causal = not is_causal",
     "keep is_causal"),
    ("flash_fwd_sm90.py", "window_size_left = Int32(window_size_left)",
     "window_size_left = Int32(window_size_right)", "changes window_size_left"),
    ("flash_fwd_sm90.py", "            window_size_left,\n            window_size_right,\n"
     "            learnable_sink,",
     "            window_size_right,\n            window_size_left,\n            learnable_sink,",
     "passes window_size_right for window_size_left"),
])
def test_flags_that_change_inside_the_kernel_are_refused(
    file: str, old: str, new: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CannotLift, match=reason):
        text_of(planted(tmp_path, file, old, new), LOCAL)
