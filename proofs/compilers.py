"""The compiler that a release of vLLM pins, in an environment of its own, and a worker in it.

The METADATA of a wheel pins the compiler that its FA4 was written for. Only that compiler's
packages are installed; all else, torch and the solver above all, is seen where it lies. An
environment is made once, and is the same for all releases with the same pins.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import release
from kernels.release import Release

if TYPE_CHECKING:
    from proofs.checks import Options

# What an FA4 imports that follows from the compiler's version. Its other packages, as torch and
# einops, do not.
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels")
COMPILER = PACKAGES[0]
MODULES = ("cutlass", "tvm_ffi", "quack")  # what is imported of them
AUTO, INSTALLED, PINNED = "auto", "installed", "pinned"
# Modules of FA4 that each layer imports; the others read its source.
IMPORTED = {"mask_mod": ("utils",), "builtin": ("utils", "mask"), "tiles": ("block_info",),
            "keys": ("interface", "compute_block_sparsity")}
REQUIRED = re.compile(r"Requires-Dist:\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
# Read after the compiler's own path file, which names the folder of its modules.
PATHS = "zz-maskproof.pth"
MANIFEST = "maskproof.json"
WORKER = Path(__file__).with_name("worker.py")

Progress = Callable[[str], None]
Record = dict[str, Any]


class CompilerError(Exception):
    """A compiler that cannot be had or does not serve, in one line."""


def pins(root: Path) -> tuple[str, ...]:
    """The compiler's packages as a release requires them, `name==1.2.3`, without extras: those
    hold libraries for other versions of CUDA."""
    metadata = next(iter(sorted(root.glob("vllm-*.dist-info/METADATA"))), None)
    if metadata is None:
        raise CompilerError("there is no METADATA that would pin one")
    found = {}
    for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
        match = REQUIRED.fullmatch(line.strip())
        if match and "extra" not in (match[3] or ""):
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            found[name] = f"{name}{match[2].replace(' ', '')}"
    if "==" not in found.get(COMPILER, ""):
        raise CompilerError(f"its METADATA pins no {COMPILER}")
    return tuple(found[name] for name in PACKAGES if name in found)


def versions() -> dict[str, str]:
    """The versions of the compiler's packages here."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def folders() -> list[Path]:
    """Where the sources of the compiler's packages lie that this process imports."""
    found = []
    for name in MODULES:
        spec = find_spec(name)
        found += [Path(each) for each in (spec and spec.submodule_search_locations) or ()]
    return found


def differs(wanted: Sequence[str]) -> str:
    """What of the pins is not so here, in words; empty where all is."""
    here = versions()
    for pin in wanted:
        name, clauses = re.fullmatch(r"([a-z0-9-]+)(.*)", pin).groups()  # type: ignore[union-attr]
        for clause in filter(None, clauses.split(",")):
            exact = clause.removeprefix("===").removeprefix("==")
            if name not in here or exact != clause and not fnmatchcase(here[name], exact):
                return f"{pin} is wanted and {here.get(name, 'none')} is there"
    return ""


def places() -> tuple[str, ...]:
    """The folders of packages that this process imports from. Folders that path files of theirs
    add are left out: those hold the installed compiler."""
    return tuple(dict.fromkeys(
        str(Path(path).resolve()) for path in sys.path if Path(path).name in PACKAGE_FOLDERS
    ))


def cache() -> Path:
    return release.cache().parent / "compilers"


def _manifest(wanted: Sequence[str]) -> dict[str, Any]:
    """All that an environment follows from."""
    return {"pins": list(wanted), "python": sys.version, "platform": sysconfig.get_platform(),
            "places": list(places())}


def _folder(manifest: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return cache() / digest[:24]


def _is_complete(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """The manifest is written last."""
    try:
        return json.loads((folder / MANIFEST).read_text()) == manifest
    except (OSError, ValueError):
        return False


def environment(wanted: Sequence[str], progress: Progress = lambda text: None) -> Path:
    """The interpreter of an environment with these pins, which is made if there is none."""
    manifest = _manifest(wanted)
    folder = _folder(manifest)
    try:
        if not _is_complete(folder, manifest):
            with _alone(folder, progress):
                if not _is_complete(folder, manifest):
                    _make(folder, manifest, progress)
    except OSError as error:
        raise CompilerError(
            f"{' '.join(str(error).split())}: set XDG_CACHE_HOME to another folder") from None
    return folder / "bin" / "python"


@contextmanager
def _alone(folder: Path, progress: Progress) -> Iterator[None]:
    """Inside, no other process makes this environment. The lock ends with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process installs the pinned compiler")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, manifest: Mapping[str, Any], progress: Progress) -> None:
    """Under another name until it is whole. What a process left that was killed is removed."""
    for left in [folder, *folder.parent.glob(f".{folder.name}-*")]:
        shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(new)
        packages = Path(sysconfig.get_path(
            "purelib", "venv", {"base": str(new), "platbase": str(new)}))
        (packages / PATHS).write_text("".join(f"{place}\n" for place in manifest["places"]))
        _install(new / "bin" / "python", manifest["pins"], progress)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1))
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _install(python: Path, wanted: Sequence[str], progress: Progress) -> None:
    """What the path file shows, as torch, counts as installed, so that no other comes."""
    progress(f"pip installs {' '.join(wanted)}")
    command = [
        sys.executable, "-P", "-m", "pip", "--python", str(python), "install", "--no-user",
        "--only-binary=:all:", "--no-compile", "--no-input", "--no-warn-conflicts", "--retries=1",
        "--disable-pip-version-check", *wanted,
    ]
    lines = []
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           errors="replace", env=_surroundings())
    with _ended(pip):
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line.strip())
            if line.startswith(("Collecting", "  Downloading", "Installing")):
                progress(f"pip: {line.strip()}")
    if pip.wait() != 0:
        raise CompilerError(f"pip does not install {' '.join(wanted)}: {_why(lines)}")


def _why(lines: Sequence[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip"
    if any("Retrying" in line for line in lines):
        return "its index cannot be reached"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next(iter(errors or [line for line in reversed(lines) if line]), "no reason given")


def _surroundings() -> dict[str, str]:
    """The environment variables without those that put other folders first."""
    return {name: value for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")}


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """However the scope is left, the process does not outlive it by error or interruption."""
    try:
        yield
    except BaseException:
        process.kill()
        process.wait()
        raise


def refusal(there: Release, layers: Sequence[str]) -> str:
    """Why the FA4 of a release does not import with the compiler of this process; empty where it
    does. Only what the layers import is tried, of what there is."""
    from kernels.machine import CannotLift
    from kernels.provider import of_release

    provider = of_release(there)
    names = dict.fromkeys(name for layer in layers for name in IMPORTED.get(layer, ()))
    with provider.served():
        for name in names:
            try:
                if (provider.folder / f"{name}.py").is_file():
                    provider.module(name)
            except CannotLift as error:
                return str(error)
    return ""


def by_pinned(
    which: str, what: str, layers: Sequence[str], options: Options, progress: Progress, *,
    full: bool, cache: Path | None, source: Mapping[str, Any],
) -> list[Record] | str:
    """The records of a release, made by the compiler that it pins if `which` says so; else why
    neither compiler serves, or nothing where the installed one does.

    Where mask_mods alone are asked for, `auto` is the installed one: another FA4's helpers trace
    the same mask_mod, and that takes seconds.
    """
    from proofs import report

    if which == AUTO and set(layers) <= {"mask_mod"}:
        return ""
    there = release.find(what, progress=progress)
    if there.fa4 is None:
        return ""
    why = refusal(there, layers) if which == AUTO else ""
    if which == AUTO and not why:
        return ""
    try:
        wanted = pins(there.root)
        return ask(environment(wanted, progress), {
            "root": str(there.root), "own": f"{there.name}'s own FA4", "pins": wanted,
            "solver": report.versions()["z3-solver"], "layers": list(layers), "full": full,
            "cache": cache and str(cache), "source": source, "options": _plain(options),
        }, progress)
    except CompilerError as error:
        if which == PINNED:
            raise CompilerError(f"{there.name}: the compiler that it pins: {error}") from None
        return f"{there.name} with {here()}: {why}; with {_named(there.root)}: {error}"


def here() -> str:
    return f"{COMPILER} {versions().get(COMPILER, '(not installed)')}"


def _named(root: Path) -> str:
    try:
        return f"{pins(root)[0].replace('==', ' ')}, which it pins"
    except CompilerError:
        return f"a {COMPILER} that it pins"


def _plain(options: Options) -> Mapping[str, Any]:
    limits = options.limits
    return {"rlimit": limits.rlimit, "timeout": limits.timeout,
            "smtlib": limits.smtlib and str(limits.smtlib), "obligations": options.obligations,
            "thorough": options.thorough, "constants": dict(options.constants)}


def explained(records: Sequence[Record], reasons: Mapping[str, str]) -> list[Record]:
    """Records of the installed compiler; a row of a release whose FA4 it does not import says
    what became of the pinned one, too. `reasons` are by the release's name."""
    def told(one: Record) -> str:
        reason = reasons.get(one["target"].partition("/")[0])
        return reason if reason and "does not import" in one["reason"] else one["reason"]

    return [{**one, "reason": told(one)} for one in records]


def ask(python: Path, request: Mapping[str, Any], progress: Progress) -> list[Record]:
    """What a worker under that interpreter answers: the records of what is asked for."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        worker = subprocess.Popen(
            [python, "-P", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
            text=True, env=_surroundings())
        with _ended(worker):
            assert worker.stdin is not None and worker.stdout is not None
            with suppress(BrokenPipeError), worker.stdin as stdin:
                json.dump({**request, "parent": os.getpid()}, stdin)
            for line in worker.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(answer["progress"])
                elif "refused" in answer:
                    raise CompilerError(answer["refused"])
                else:
                    worker.wait()
                    return answer["records"]
        said.seek(0)
        raise CompilerError(_last_words(worker.wait(), said.read()))


def _last_words(status: int, said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"its process ended with {how}{f': {lines[-1].strip()}' if lines else ''}"
