"""A target on the command line: what loads, and the one line for what does not."""

import sys
from pathlib import Path

import pytest

from kernels.from_cute import lift
from kernels.load import LoadError, load
from spec.to_text import to_text

FILE = '''
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from flash_attn.cute.utils import scalar_to_ssa

LIMIT = 3


@cute.jit
def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return kv_idx <= q_idx


@functools.cache
def window(size, inclusive=False, name="", left=None):
    if name == "bad":
        raise RuntimeError("no such\\nwindow")
    limit = size + 1 if inclusive else size

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return q_idx - kv_idx < scalar_to_ssa(Int32(limit), Int32)

    return mask_mod


def relative(size=2):
    from beside import OFFSET

    return window(size + OFFSET)


@cute.jit
def flex(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def plain_flex(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


@cute.jit
def three(b, q_idx, kv_idx):
    return kv_idx <= q_idx


def of_flex():
    return flex


def number():
    return 7
'''


FLEX = "flex(b, h, q_idx, kv_idx) is a FlexAttention mask_mod, not FA4's: FA4 calls mask_mod("


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "masks.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("OFFSET = 1\n")
    return str(tmp_path / "masks.py")


def text(target: str, *call: str) -> str:
    return to_text(lift(load(target, call, spec="causal")).lanes[0])


def test_a_mask_mod_and_a_factory_are_told_apart(file: str) -> None:
    assert text(f"{file}::causal") == "kv_idx <= q_idx"
    assert text(f"{file}::window", "size=4") == "q_idx - kv_idx < 4"
    assert text(f"{file}::window", "size=4", "inclusive=True", "left=None", "name='x'") == (
        "q_idx - kv_idx < 5"
    )
    assert text(f"{file}::relative") == "q_idx - kv_idx < 3"


def test_a_symbol_is_known_when_the_code_runs_only(file: str) -> None:
    target = load(f"{file}::window", ["size=@window", "inclusive=True"], spec="window")
    assert target.symbols == ("window",)
    for _ in range(2):
        assert to_text(lift(target).lanes[0]) == "q_idx - kv_idx < window + 1"


def test_a_module_is_named_with_one_colon(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(file).parent))
    assert text("masks:window", "size=2") == "q_idx - kv_idx < 2"
    sys.modules.pop("masks")


def test_a_file_leaves_no_module_and_no_path_behind(file: str) -> None:
    modules, path = set(sys.modules), list(sys.path)
    load(f"{file}::relative", spec="window")
    left = {name for name in set(sys.modules) - modules if "target" in name or name == "beside"}
    assert not left
    assert sys.path == path


@pytest.mark.parametrize(
    ("target", "call", "message"),
    [
        ("gone.py::causal", [], "gone.py: no such file"),
        ("{folder}::causal", [], "{folder}: not a Python file"),
        ("{folder}/broken.py::causal", [], "SyntaxError: line 1: "),
        ("{folder}/raises.py::causal", [], "importing it raised ValueError: at import"),
        ("{folder}/exits.py::causal", [], "importing it raised SystemExit: 4"),
        ("nonesuch.module:causal", [], "no module named 'nonesuch'"),
        ("spec.nonesuch:causal", [], "no module named 'spec.nonesuch'"),
        ("causal", [], "a target is path/to/file.py::name or package.module:name"),
        ("{file}::casual", [], "no function 'casual': did you mean causal?"),
        ("{file}::LIMIT", [], "LIMIT is int, not a function"),
        ("{file}::nope", [], "no function 'nope'; it has causal, window, relative, flex, "),
        ("{file}::flex", [], FLEX),
        ("{file}::of_flex", [], FLEX),
        ("{file}::plain_flex", [], "plain_" + FLEX),
        ("{file}::three", [], "three(b, q_idx, kv_idx) is not a mask_mod: FA4 calls mask_mod("),
        ("{folder}/engine.py::f", [], "; check vLLM's own mask_mods with --vllm TREE, which"),
        ("{folder}/vllm/v1/a.py::f", [], "own mask_mods with --vllm {folder}, which does not"),
        ("{file}::number", [], "the factory returned int, not a mask_mod"),
        ("{file}::window", [], "needs size: --call size=VALUE"),
        ("{file}::window", ["sise=1"], "takes no 'sise': did you mean size?"),
        ("{file}::window", ["size=1", "name='bad'"], "the factory raised RuntimeError: no such"),
        ("{file}::window", ["size=@w", "name='bad'"], "the factory raised RuntimeError: no such"),
        ("{file}::window", ["size"], "--call size: write name=value"),
        ("{file}::window", ["size=four"], "--call size=four: a value is an int"),
        ("{file}::window", ["size=4.5"], "--call size=4.5: a value is an int"),
        ("{file}::window", ["size=@"], "--call size=@: a value is an int"),
    ],
)
def test_bad_input_is_one_line(target: str, call: list[str], message: str, file: str) -> None:
    folder = str(Path(file).parent)
    Path(folder, "broken.py").write_text("def f(:\n")
    Path(folder, "raises.py").write_text("raise ValueError('at import')\n")
    Path(folder, "exits.py").write_text("raise SystemExit(4)\n")
    Path(folder, "vllm", "v1").mkdir(parents=True)
    for name in ("engine.py", "vllm/v1/a.py"):
        Path(folder, name).write_text("raise ModuleNotFoundError('no vllm', name='vllm.config')\n")
    with pytest.raises(LoadError) as error:
        load(target.format(file=file, folder=folder), call, spec="causal")
    assert message.format(folder=folder) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
