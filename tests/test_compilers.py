"""The compiler that a release pins: what is pinned, its environment, and the worker in it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import release
from kernels.release import BACKEND, OWN_FA4
from proofs import compilers, worker
from proofs.checks import Options
from proofs.compilers import CompilerError, ask, differs, environment, explained, pins
from proofs.layers import Unit, key, of_unit, units
from spec.check import main
from tests.test_layers import FEW

METADATA = """\
Metadata-Version: 2.4
Name: vllm
Version: 0.0.7
Requires-Dist: torch==2.11.0
Requires-Dist: quack_kernels>=0.3.3
Requires-Dist: Apache.TVM-ffi (==0.1.9)
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.5.2; platform_machine == "x86_64"
Requires-Dist: nvidia-cutlass-dsl==9.9; extra == "zen"
"""
PINS = ("nvidia-cutlass-dsl==4.5.2", "apache-tvm-ffi==0.1.9", "quack-kernels>=0.3.3")
NEEDS_ANOTHER = "\nimport cutlass.cute\nThrMma = cutlass.cute.core.ThatOfAnotherVersion\n"


def metadata(root: Path, text: str = METADATA) -> Path:
    (root / "vllm-0.0.7.dist-info").mkdir(parents=True, exist_ok=True)
    (root / "vllm-0.0.7.dist-info" / "METADATA").write_text(text)
    return root


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, request: pytest.FixtureRequest,
              monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own."""
    if not request.node.get_closest_marker("releases"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_pins_are_those_of_the_compiler_without_extras(tmp_path: Path) -> None:
    assert pins(metadata(tmp_path)) == PINS


@pytest.mark.parametrize("text", ["", METADATA.replace("dsl[cu13]==", "dsl[cu13]>="),
                                  METADATA.replace("nvidia-cutlass-dsl", "nvidia-cutlass")])
def test_what_pins_no_compiler_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match="pins no nvidia-cutlass-dsl"):
        pins(metadata(tmp_path, text))
    with pytest.raises(CompilerError, match="no METADATA"):
        pins(tmp_path / "vllm-0.0.7.dist-info")


def test_another_version_than_the_pinned_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"nvidia-cutlass-dsl": "4.5.2", "apache-tvm-ffi": "0.1.9", "quack-kernels": "0.5.0"}
    monkeypatch.setattr(compilers, "versions", lambda: here)
    assert differs(PINS) == "" and differs(["nvidia-cutlass-dsl==4.5.*,>=4"]) == ""
    here["nvidia-cutlass-dsl"] = "4.5.20"
    assert differs(PINS) == "nvidia-cutlass-dsl==4.5.2 is wanted and 4.5.20 is there"
    del here["nvidia-cutlass-dsl"], here["quack-kernels"]
    assert "none is there" in differs(PINS) and "none is there" in differs(PINS[2:])


def fake(python: Path, wanted: Any, progress: Any, module: str = "of_the_test") -> None:
    """What pip does for a compiler: a package whose modules a path file of its own adds."""
    (packages,) = python.parent.parent.glob("lib/*/site-packages")
    (packages / "dsl" / "modules" / module).mkdir(parents=True)
    (packages / "dsl" / "modules" / module / "__init__.py").write_text("pinned = True\n")
    (packages / "dsl.pth").write_text("dsl/modules\n")


def seen(python: Path, code: str) -> str:
    return subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True,
                          env=compilers._surroundings()).stdout.strip()


def test_an_environment_sees_its_own_packages_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    (installed / "of_the_test").mkdir(parents=True)
    (installed / "of_the_test" / "__init__.py").write_text("pinned = False\n")
    (installed / "below").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed), str(installed / "below")])
    monkeypatch.setattr(compilers, "_install", fake)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    python = environment(PINS)
    assert seen(python, "import of_the_test; print(of_the_test.pinned)") == "True"
    assert seen(python, "import torch; print(torch.__file__)") == torch.__file__
    paths = seen(python, "import sys; print(*sys.path, sep='\\n')").splitlines()
    assert str(installed) in paths and str(installed / "below") not in paths
    own = [i for i, path in enumerate(paths) if str(python.parent.parent) in path]
    assert own and max(own) < min(map(paths.index, compilers.places()))
    assert not [path for path in paths if "nvidia_cutlass_dsl" in path]


@pytest.mark.parametrize("own_last", [False, True])
def test_the_project_stands_between_the_environment_and_the_rest(
    own_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = str(tmp_path / "e/lib/site-packages"), str(tmp_path / "o/lib/site-packages")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "e"))
    monkeypatch.setattr(sys, "path", ["/lib", own, f"{own}/dsl", *([] if own_last else [other])])
    worker.place_project()
    assert sys.path[3] == str(worker.PROJECT) and sys.path[4:] == ([] if own_last else [other])


def test_a_half_made_environment_is_never_used(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(python: Path, wanted: Any, progress: Any) -> None:
        fake(python, wanted, progress, "half")
        raise KeyboardInterrupt

    monkeypatch.setattr(compilers, "_install", killed)
    with pytest.raises(KeyboardInterrupt):
        environment(PINS)
    assert [path.suffix for path in compilers.cache().iterdir()] == [".lock"]

    manifest = compilers._manifest(PINS)
    folder = compilers._folder(manifest)
    left = folder.with_name(f".{folder.name}-x")
    for half in (left, folder):  # as a process leaves it that is killed
        (half / "bin").mkdir(parents=True)
        (half / "bin" / "python").write_text("")
    (folder / "maskproof.json").write_text(json.dumps({**manifest, "pins": ["other"]}))
    monkeypatch.setattr(compilers, "_install", fake)
    python = environment(PINS)
    assert python.parent.parent == folder and python.stat().st_size and not left.exists()
    assert seen(python, "import of_the_test; print('whole')") == "whole"

    monkeypatch.setattr(compilers, "_install", lambda *given: 1 / 0)
    assert environment(PINS) == python  # nothing is installed again
    with pytest.raises(ZeroDivisionError):
        environment(PINS[:1])
    monkeypatch.setattr(compilers, "places", lambda: ("/somewhere/site-packages",))
    with pytest.raises(ZeroDivisionError):
        environment(PINS)


def test_two_processes_make_one_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"

    def slow(python: Path, wanted: Any, progress: Any) -> None:
        with made.open("a") as file:
            file.write("once\n")
        time.sleep(0.5)
        fake(python, wanted, progress)

    monkeypatch.setattr(compilers, "_install", slow)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=environment, args=(PINS,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0] and made.read_text() == "once\n"
    assert len([path for path in compilers.cache().iterdir() if path.is_dir()]) == 1


def test_what_pip_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CompilerError, match="pip does not install nvidia-cutlass.*4.5.2") as error:
        environment(PINS)
    assert "\n" not in str(error.value)
    assert not [path for path in compilers.cache().iterdir() if path.is_dir()]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompilerError, match="set XDG_CACHE_HOME"):
        environment(PINS)


def test_a_compiler_without_pip_or_network_is_named() -> None:
    assert compilers._why(["/x/python: No module named pip"]).endswith("has no pip")
    assert compilers._why(["WARNING: Retrying (x)", "ERROR: no"]) == "its index cannot be reached"
    assert compilers._why(["a", "ERROR: no matching", "b"]) == "no matching"
    assert compilers._why(["said last", ""]) == "said last"
    assert compilers._why([]) == "no reason given"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A release whose FA4 does not import with the installed compiler."""
    from kernels.provider import installed

    root = tmp_path / "tree"
    shutil.copytree(installed().folder, root / OWN_FA4,
                    ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("utils.py", "mask.py", "interface.py"):
        with (root / OWN_FA4 / name).open("a") as file:
            file.write(NEEDS_ANOTHER)
    (root / BACKEND).parent.mkdir(parents=True)
    (root / BACKEND).write_text("")
    return root


def checked(tree: Path, folder: Path, *more: str) -> list[dict[str, Any]]:
    file = folder / "results.json"
    main(["--vllm", str(tree), "--no-cache", "--json", str(file), *more])
    return json.loads(file.read_text())["results"]


@pytest.mark.parametrize("pinned", [False, True])
def test_without_either_compiler_rows_name_both(
    pinned: bool, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(*given: Any) -> None:
        raise CompilerError("pip does not install it: its index cannot be reached")

    monkeypatch.setattr(compilers, "_install", no_network)
    why = "cannot be reached" if pinned else "there is no METADATA"
    if pinned:
        metadata(tree)
    rows = checked(tree, tmp_path, "--layer", "keys", "--layer", "builtin")
    told = [line for line in capsys.readouterr().out.splitlines() if why in line]
    name = "vllm-0.0.7" if pinned else "vllm-tree"
    assert told[0].startswith(f"{name} with {compilers.here()}: ")
    assert {row["layer"] for row in rows} == {"keys", "builtin"}
    for row in rows:
        assert row["verdict"] == "UNSUPPORTED" and "ThatOfAnotherVersion" in row["reason"]
        assert why in row["reason"] and compilers.here() in row["reason"]
        assert not pinned or "nvidia-cutlass-dsl 4.5.2" in row["reason"]
    assert main(["--vllm", str(tree), "--layer", "keys", "--compiler", "pinned"]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_the_installed_compiler_is_taken_where_it_is_asked_for_or_serves(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "environment", lambda *given: 1 / 0)
    metadata(tree)
    rows = checked(tree, tmp_path, "--layer", "keys", "--compiler", "installed")
    assert "does not import" in rows[0]["reason"] and "4.5.2" not in rows[0]["reason"]
    there = release.find(str(tree))
    assert compilers.refusal(there, ["tiles", "sampling"]) == ""  # reads no broken module
    assert "ThatOfAnotherVersion" in compilers.refusal(there, ["keys"])
    for which, layers in (("auto", ["mask_mod"]), ("auto", ["sampling", "tiles"])):
        assert compilers.by_pinned(which, str(tree), layers, Options(), print,
                                   full=False, cache=None, source={}) == ""
    for which, layers in (("pinned", ["mask_mod"]), ("auto", ["mask_mod", "keys"])):
        with pytest.raises(ZeroDivisionError):
            compilers.by_pinned(which, str(tree), layers, Options(), print,
                                full=False, cache=None, source={})


def test_a_layer_that_cannot_be_cut_into_units_is_unsupported(tree: Path) -> None:
    from kernels.provider import of_release

    (unit,) = units(of_release(release.find(str(tree))), ["builtin"])
    (row,) = of_unit(unit, Options())
    assert row["verdict"] == "UNSUPPORTED" and "ThatOfAnotherVersion" in row["reason"]


def test_only_rows_that_do_not_import_tell_of_the_other_compiler() -> None:
    rows = [{"target": "v/a", "reason": "x does not import: y"}, {"target": "v/b", "reason": "z"},
            {"target": "w/a", "reason": "x does not import: y"}]
    told = explained(rows, {"v": "neither", "w": ""})
    assert [row["reason"] for row in told] == ["neither", "z", "x does not import: y"]


def test_a_verdict_follows_from_the_compiler_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {key(FEW[0], Options())}
    for name in compilers.PACKAGES:
        monkeypatch.setattr(compilers, "versions", lambda name=name: {name: "0"})
        found.add(key(FEW[0], Options()))
    refused = Unit(FEW[0].layer, FEW[0].provider, FEW[0].configuration, refused="no")
    assert len({*found, key(refused, Options())}) == 5


@pytest.fixture
def acting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts another program in the place of the worker."""
    def put(code: str) -> Path:
        file = tmp_path / "worker.py"
        file.write_text(f"import json, os, signal, sys, time\n{code}\n")
        monkeypatch.setattr(compilers, "WORKER", file)
        return Path(sys.executable)

    return put


def test_a_worker_answers_in_lines_whatever_the_compiler_prints(acting: Any) -> None:
    python = acting("given = json.load(sys.stdin)\nprint('noise', file=sys.stderr)\n"
                    "print(json.dumps({'progress': given['say']}))\n"
                    "print(json.dumps({'records': [given['parent']]}))")
    said: list[str] = []
    assert ask(python, {"say": "hello"}, said.append) == [os.getpid()] and said == ["hello"]


@pytest.mark.parametrize(("code", "message"), [
    ("sys.exit('one\\nlast words')", "its process ended with status 1: last words"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended with SIGKILL"),
    ("print(json.dumps({'refused': 'not so'}), flush=True); time.sleep(60)", "not so"),
])
def test_a_worker_that_gives_no_records_is_one_line(
    code: str, message: str, acting: Any
) -> None:
    with pytest.raises(CompilerError) as error:
        ask(acting(code), {}, print)
    assert str(error.value) == message


def running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(pid)


def test_an_interrupted_check_ends_its_worker(acting: Any) -> None:
    python = acting("signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                    "print(json.dumps({'progress': os.getpid()}), flush=True)\ntime.sleep(60)")
    started: list[int] = []

    def interrupt(pid: int) -> None:
        started.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(python, {}, interrupt)
    assert gone(started[0])


def test_a_worker_ends_with_its_parent() -> None:
    code = ("from proofs import worker; import os, time, subprocess, sys\n"
            "if len(sys.argv) > 1:\n"
            "    worker.end_with(int(sys.argv[1])); print(os.getpid(), flush=True)\n"
            "    time.sleep(60)\n"
            "subprocess.run([sys.executable, '-c', sys.argv[0], sys.argv[0]])")
    starter = ("import os, subprocess, sys; code = sys.argv[1]\n"
               "subprocess.run([sys.executable, '-c', code, str(os.getpid())])")
    parent = subprocess.Popen([sys.executable, "-c", starter, code], stdout=subprocess.PIPE,
                              text=True, cwd=worker.PROJECT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert running(child)
    os.kill(child, signal.SIGINT)  # Ctrl-C is for the parent
    time.sleep(0.2)
    assert running(child)
    parent.kill()
    parent.wait()
    assert gone(child)
    orphan = subprocess.run([sys.executable, "-c", code, "1"], cwd=worker.PROJECT, timeout=60,
                            capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout) == (1, "")


def test_what_was_not_asked_for_does_not_serve(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = compilers.versions()
    from proofs.report import versions

    request = {"pins": [f"{name}=={found}" for name, found in here.items()], "root": str(tree),
               "solver": versions()["z3-solver"], "layers": ["tiles"]}
    assert worker.unfit(request) == ""
    assert "is wanted" in worker.unfit({**request, "pins": ["nvidia-cutlass-dsl==0.1"]})
    assert worker.unfit({**request, "solver": "0"}).startswith("z3-solver 0 is wanted")
    assert "ThatOfAnotherVersion" in worker.unfit({**request, "layers": ["keys"]})
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert worker.unfit(request).startswith("cutlass was imported from ")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--compiler", "pinned"], "--compiler is about the kernels of a release"),
    (["--compiler", "pinned", "--vllm", "0.24.0", "--fa4", "x"], "leave --fa4 out"),
    (["--compiler", "newest", "--vllm", "0.24.0"], "invalid choice: 'newest'"),
])
def test_a_compiler_that_cannot_be_asked_for_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


OLD = "0.24.0"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The release with causal masks that are one key short."""
    root = tmp_path_factory.mktemp("faulty") / "tree"
    shutil.copytree(release.find(OLD).root, root)
    file = root / OWN_FA4 / "mask.py"
    right = "causal_row_offset = (\n                    1 + self.seqlen_k"
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, right.replace("1 + ", "")))
    yield root


def verdicts(rows: list[dict[str, Any]], mode: str) -> set[str]:
    return {row["verdict"] for row in rows if row["obligation"] == "element-mask"
            and row["target"].partition("/builtin/")[2].startswith(f"{mode}[")}


@pytest.mark.releases
def test_a_release_that_the_installed_compiler_does_not_import_is_proved(tmp_path: Path) -> None:
    rows = checked(Path(OLD), tmp_path, "--layer", "builtin")
    for mode in ("full", "causal", "local", "local-left", "local-right", "mask_mod",
                 "dynamic_causal"):
        assert verdicts(rows, mode) == {"PROVED"}
    # Its apply_mask does not look at the flag beside a window.
    assert verdicts(rows, "dynamic_causal-local") == {"REFUTED"}
    for row in rows:
        assert "nvidia-cutlass-dsl 4.5.2" in row["fa4"]
        assert row["extra"]["versions"]["nvidia-cutlass-dsl"] == "4.5.2"


@pytest.mark.releases
def test_a_fault_that_is_planted_in_such_a_release_is_refuted(faulty: Path, tmp_path: Path) -> None:
    rows = checked(faulty, tmp_path, "--layer", "builtin")
    assert verdicts(rows, "causal") == {"REFUTED"} and verdicts(rows, "full") == {"PROVED"}
    assert all("nvidia-cutlass-dsl 4.5.2" in row["fa4"] for row in rows)
