"""Laws of `kernels.vllm`: small back ends written here, and the released ones."""

import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kernels.release import BACKEND, OWN_FA4, Release, find
from kernels.vllm import VllmError, branches, load

SIGNATURE = "batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors"
FACTORY = """
def {name}({parameters}):
    import cutlass.cute as cute
    from vllm.vllm_flash_attn.cute.utils import WHO

    @cute.jit
    def mask_mod({signature}):
        return kv_idx <= q_idx

    mask_mod.arguments = locals()
    return mask_mod
"""
RELEASES = ["0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0",
            "0.32.0", "0.33.0"]  # fmt: skip


def factory(parameters: str = "", name: str = "_make_mm_prefix_mask_mod") -> str:
    return FACTORY.format(name=name, parameters=parameters, signature=SIGNATURE)


def a_release(root: Path, source: str, utils: str = "WHO = 'own'\n") -> Release:
    files = {
        BACKEND: source,
        f"{OWN_FA4}/__init__.py": "raise RuntimeError('FA4 was imported as a whole')\n",
        f"{OWN_FA4}/utils.py": utils,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return find(str(root))


def named(root: Path, source: str) -> dict[str, object]:
    with load(a_release(root, source)) as loaded:
        return {target.target.partition("/")[2]: target for target in branches(loaded)}


def of_vllm() -> dict[str, object]:
    return {name: each for name, each in sys.modules.items() if name.startswith("vllm")}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("", {"mm_prefix[window]": {}}),
        (
            "max_ranges",
            {
                "mm_prefix[window,ranges=2]": {"max_ranges": 2},
                "mm_prefix[window,ranges=8]": {"max_ranges": 8},
            },
        ),
        (
            "sliding_window_left=7",
            {
                "mm_prefix[window]": {"sliding_window_left": "W"},
                "mm_prefix[no-window]": {"sliding_window_left": None},
            },
        ),
        (
            "sliding_window=0, *, sliding_window_left: 'int | None' = None",
            {
                "mm_prefix[window]": {"sliding_window": 0, "sliding_window_left": "W"},
                "mm_prefix[no-window]": {"sliding_window": 0, "sliding_window_left": None},
                "mm_prefix[clamp]": {"sliding_window": "W", "sliding_window_left": "W"},
            },
        ),
        (
            "sliding_window, max_ranges",
            {
                "mm_prefix[window,ranges=2]": {"sliding_window": 0, "max_ranges": 2},
                "mm_prefix[clamp,ranges=2]": {"sliding_window": "W", "max_ranges": 2},
                "mm_prefix[window,ranges=8]": {"sliding_window": 0, "max_ranges": 8},
                "mm_prefix[clamp,ranges=8]": {"sliding_window": "W", "max_ranges": 8},
            },
        ),
    ],
)
def test_branches_follow_from_the_names_of_the_parameters(tmp_path, parameters, expected):
    with load(a_release(tmp_path, factory(parameters))) as loaded:
        targets = {target.target.removeprefix("vllm-tree/"): target for target in branches(loaded)}
        assert list(targets) == list(expected)
        for name, arguments in expected.items():
            made = targets[name].make({"window": "W"}).arguments
            assert {key: made[key] for key in arguments} == arguments
            assert targets[name].symbols == (("window",) if "W" in arguments.values() else ())
            assert targets[name].constants.get("num_ranges") == arguments.get("max_ranges")
            assert targets[name].unsupported is None


def test_each_branch_is_held_to_its_own_spec(tmp_path):
    source = factory("sliding_window=0, sliding_window_left=None")
    source += factory(name="_make_rswa_mask_mod")
    specs = {name: target.spec for name, target in named(tmp_path, source).items()}
    assert specs == {
        "mm_prefix[window]": "mm_prefix",
        "mm_prefix[no-window]": "mm_prefix_no_window",
        "mm_prefix[clamp]": "mm_prefix_clamped",
        "rswa": "rswa",
    }


def test_a_factory_without_a_window_must_serve_windowed_layers(tmp_path):
    target = named(tmp_path, factory())["mm_prefix[window]"]
    assert target.spec == "mm_prefix"
    assert "no window" in target.note


@pytest.mark.parametrize("parameters", ["extra", "extra=0", "*extra", "**extra", "*, extra=None"])
def test_an_unknown_parameter_is_unsupported_by_name(tmp_path, parameters):
    target = named(tmp_path, factory(parameters))["mm_prefix"]
    assert target.unsupported == "parameter extra of _make_mm_prefix_mask_mod is not known"


def test_an_unknown_factory_is_unsupported_by_name(tmp_path):
    targets = named(tmp_path, factory() + factory(name="_make_new_mask_mod"))
    assert targets["mm_prefix[window]"].unsupported is None
    assert targets["new"].unsupported == "factory _make_new_mask_mod is not known"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "def _make_mm_prefix_mask_mod(max_ranges):\n    return max_ranges\n",
        factory().replace("@cute.jit", ""),
        factory().replace(SIGNATURE, "q_idx, kv_idx, seqlen_info, aux_tensors"),
    ],
)
def test_a_back_end_without_a_factory_is_one_line(tmp_path, source):
    with pytest.raises(VllmError, match="has no factory of a mask_mod"):
        named(tmp_path, source)


@pytest.mark.parametrize("source", ["def broken(:\n", "\0", "x = '\n"])
def test_a_back_end_that_is_no_python_is_one_line(tmp_path, source):
    with pytest.raises(VllmError, match="cannot be read") as caught:
        named(tmp_path, source)
    assert "\n" not in str(caught.value)


def test_only_what_the_factories_refer_to_is_executed(tmp_path):
    source = f"""
from __future__ import annotations
import functools
import no_such_package
from vllm.config import VllmConfig
BASE = 40
LIMIT: int = BASE + 1
def limit() -> NoSuchType:
    return LIMIT + 1
class Impl(VllmConfig):
    pass
raise RuntimeError("the whole back end was executed")
@functools.cache
{factory("sliding_window=limit()").lstrip()}
"""
    with load(a_release(tmp_path, source)) as loaded:
        made = loaded.factories["_make_mm_prefix_mask_mod"]()
        assert made.arguments["sliding_window"] == 42
        assert made.arguments["WHO"] == "own"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from vllm.config import size\n" + factory("max_ranges=size"), "needs vllm.config,"),
        (factory().replace("import cutlass.cute as", "import vllm.config as"), "needs vllm.config"),
        ("from ..utils import size\n" + factory("x=size"), "needs vllm.v1.attention.utils"),
        ("if True:\n    size = 2\n" + factory("max_ranges=size"), "refers to size"),
        ("class A:\n    b = size\n" + factory("max_ranges=A"), "refers to size"),
    ],
)
def test_a_factory_that_needs_more_of_vllm_is_unsupported(tmp_path, source, reason):
    (target,) = named(tmp_path, source).values()
    assert reason in target.unsupported
    assert target.target == "vllm-tree/mm_prefix"


def test_a_cache_is_bypassed(tmp_path):
    source = "import functools\n@functools.cache\n" + factory("sliding_window_left").lstrip()
    with load(a_release(tmp_path, source)) as loaded:
        make = branches(loaded)[0].make
        assert make({"window": []}) is not make({"window": []}), "a list has no hash"


def test_file_and_lines_are_those_of_the_release(tmp_path):
    source = "\n" * 30 + factory()
    with load(a_release(tmp_path, source)) as loaded:
        made = branches(loaded)[0].make({})
        code = made.__wrapped__.__code__
        assert code.co_filename == str(tmp_path / BACKEND)
        assert "def mask_mod" in source.splitlines()[code.co_firstlineno]


@pytest.mark.parametrize("fails", [False, True])
def test_an_imported_vllm_is_left_untouched(tmp_path, monkeypatch, fails):
    mine = {name: types.ModuleType(name) for name in ("vllm", "vllm.vllm_flash_attn", "vllm.x")}
    for name, module in mine.items():
        monkeypatch.setitem(sys.modules, name, module)
    try:
        with load(a_release(tmp_path, factory())) as loaded:
            assert "vllm.x" not in sys.modules
            branches(loaded)[0].make({})
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert of_vllm() == mine
    assert not [name for module in mine.values() for name in vars(module) if name[0] != "_"]


def test_nothing_is_left_behind_where_loading_fails(tmp_path):
    before = of_vllm()
    with pytest.raises(VllmError, match="do not load: ZeroDivisionError"):
        named(tmp_path, "X = 1 / 0\n" + factory("max_ranges=X"))
    assert of_vllm() == before


def test_a_target_is_not_called_outside_its_scope(tmp_path):
    target = named(tmp_path / "a", factory())["mm_prefix[window]"]
    with pytest.raises(VllmError, match="inside `load`"):
        target.make({})
    with load(a_release(tmp_path / "b", factory())) as loaded:
        with pytest.raises(VllmError, match="inside `load`"):
            target.make({})
        branches(loaded)[0].make({})


def test_scopes_nest(tmp_path):
    first = a_release(tmp_path / "a", factory(), "WHO = 'a'\n")
    second = a_release(tmp_path / "b", factory(), "WHO = 'b'\n")
    with load(first) as outer:
        with load(second) as inner:
            assert branches(inner)[0].make({}).arguments["WHO"] == "b"
        assert branches(outer)[0].make({}).arguments["WHO"] == "a"


def test_the_installed_fa4_serves_where_the_own_one_does_not_import(tmp_path):
    source = factory().replace("import WHO", "import scalar_to_ssa")
    with load(a_release(tmp_path, source, "import cutlass\ncutlass.no_such_name\n")) as loaded:
        assert loaded.fa4.startswith("flash-attn-4 ")
        assert "own FA4 does not import with nvidia-cutlass-dsl" in loaded.fa4
        assert "no_such_name" in loaded.fa4
        assert callable(branches(loaded)[0].make({}).arguments["scalar_to_ssa"])
        assert branches(loaded)[0].fa4 == loaded.fa4


def test_an_own_fa4_that_lacks_a_name_does_not_serve(tmp_path):
    source = factory().replace("import WHO", "import scalar_to_ssa")
    with load(a_release(tmp_path, source)) as loaded:
        assert "cannot import name 'scalar_to_ssa'" in loaded.fa4


def test_a_given_fa4_serves_under_both_names_or_is_an_error(tmp_path):
    root = a_release(tmp_path / "tree", factory()).root
    fa4 = tmp_path / "fa4" / "flash_attn" / "cute"
    fa4.mkdir(parents=True)
    (fa4 / "__init__.py").write_text("raise RuntimeError\n")
    (fa4 / "other.py").write_text("WHO = 'given'\n")
    (fa4 / "utils.py").write_text("from flash_attn.cute.other import WHO\n")
    with load(find(str(root), fa4=tmp_path / "fa4")) as loaded:
        assert loaded.fa4 == f"FA4 in {fa4}"
        assert branches(loaded)[0].make({}).arguments["WHO"] == "given"
    (fa4 / "other.py").write_text("1 / 0\n")
    broken = find(str(root), fa4=tmp_path / "fa4")
    with pytest.raises(VllmError, match="does not import: ZeroDivisionError"), load(broken):
        pass


def test_a_tree_without_fa4_takes_the_installed(tmp_path):
    (tmp_path / BACKEND).parent.mkdir(parents=True)
    (tmp_path / BACKEND).write_text(factory().replace("import WHO", "import scalar_to_ssa"))
    with load(find(str(tmp_path))) as loaded:
        assert loaded.fa4.endswith("(vllm-tree has no FA4 of its own)")


def test_the_compilers_environment_keeps_what_is_set():
    code = "import os, kernels.environment; print(os.environ['CUTE_DSL_ARCH'])"
    for given, expected in (({"CUTE_DSL_ARCH": "sm_100a"}, "sm_100a"), ({}, "sm_90a")):
        bare = {key: value for key, value in os.environ.items() if key != "CUTE_DSL_ARCH"}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=bare | given,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == expected


def traced(target, layout):
    """One cell of the mask_mod, traced and run on this CPU, as a function of its coordinates."""
    import cutlass
    import torch
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack
    from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    @cute.jit
    def host(
        out: cute.Tensor,
        first: cute.Tensor,
        second: cute.Tensor,
        q: Int32,
        kv: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        window: Int32,
    ):
        info = types.SimpleNamespace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        indices = [scalar_to_ssa(index, Int32) for index in (Int32(0), Int32(0), q, kv)]
        visible = target.make({"window": window})(*indices, info, [first, second])
        out[0] = cutlass.Int8(ssa_to_scalar(visible))

    shapes = {"query_ranges": (9, 2), "ranges": (1, 8, 2)}
    # Rows without a range; the R-SWA prefix and window are 1.
    tensors = [torch.full(shapes.get(name, (9,)), -1, dtype=torch.int32) for name in layout]
    for name, tensor in zip(layout, tensors, strict=True):
        if name not in shapes:
            tensor.fill_(0 if name == "cu_seqlens_q" else 1)
    out = torch.zeros(1, dtype=torch.int8)
    views = [from_dlpack(each).mark_layout_dynamic() for each in (out, *tensors, *tensors)[:3]]
    compiled = cute.compile(host, *views, *[Int32(0)] * 5)

    def cell(q: int, kv: int, seqlen_q: int, seqlen_k: int, window: int) -> bool:
        compiled(*views, *map(Int32, (q, kv, seqlen_q, seqlen_k, window)))
        return bool(out[0])

    return cell


def with_a_fitting_layout(target):
    """A wrong layout has another rank, and does not trace."""
    failed = []
    for layout in target.layouts:
        try:
            return traced(target, layout)
        except Exception as error:
            failed.append(error)
    raise ExceptionGroup(target.target, failed)


@pytest.fixture(scope="module")
def released():
    """Releases by version, from the cache of the user who runs this."""
    return functools.cache(find)


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
def test_every_branch_of_a_release_is_known(released, version):
    with load(released(version)) as loaded:
        targets = branches(loaded)
    assert targets
    assert not [target.target for target in targets if target.unsupported]
    assert all(target.target.startswith(f"vllm-{version}/") for target in targets)
    names = {target.target.partition("/")[2] for target in targets}
    if "mm_prefix[window]" in names:
        assert names == {"mm_prefix[window]", "mm_prefix[no-window]", "mm_prefix[clamp]", "rswa"}


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
def test_every_branch_of_a_release_traces_and_runs(released, version):
    with load(released(version)) as loaded:
        for target in branches(loaded):
            cell = with_a_fitting_layout(target)
            assert cell(0, 0, 4, 4, 9)
            assert not cell(0, 1, 4, 4, 9)


@pytest.mark.releases
def test_releases_in_one_process_do_not_mix(released):
    """Of 0.24.0 a query sees what lies outside the window, and does not know its context."""
    for version, outside, in_context in (("0.24.0", True, False), ("0.33.0", False, True)) * 2:
        with load(released(version)) as loaded:
            cell = with_a_fitting_layout(branches(loaded)[0])
            assert cell(5, 0, 6, 6, 2) is outside
            assert cell(0, 5, 1, 6, 2) is in_context


@pytest.mark.releases
@pytest.mark.parametrize("version", ["0.22.1", "0.23.0"])
def test_a_release_without_mask_mods_is_one_line(released, version):
    with pytest.raises(VllmError, match=f"vllm-{version} has no factory"), load(released(version)):
        pass
