"""Find the files of a vLLM release: a version, a wheel, a URL, a source tree, the installed one.

Of a wheel only the few files that masks live in are read, by HTTP ranges where the server has
them, and kept under the user's cache directory. A version that lies there needs no network and no
pip. Nothing here imports vLLM, and nothing is imported from the network side until it is needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import url2pathname

if TYPE_CHECKING:
    import requests

BACKEND = "vllm/v1/attention/backends/flash_attn.py"
OWN_FA4 = "vllm/vllm_flash_attn/cute"
NEEDED = re.compile(
    r"vllm/vllm_flash_attn/(cute/.+|__init__|flash_attn_interface)\.py"
    r"|vllm/v1/attention/backends/[^/]+\.py"
    r"|vllm/v1/attention/ops/triton_[^/]+\.py"
    r"|[^/]+\.dist-info/METADATA"
)
VERSION = re.compile(r"v?(\d+(\.\d+)+([a-zA-Z0-9.+_-]*[a-zA-Z0-9])?)")
MANIFEST = "maskproof.json"
INDEX = "wheel from the package index"
# Any Linux wheel will do, wherever this runs: only Python files are read.
LINUX = [f"manylinux{tag}_x86_64" for tag in ("_2_35", "_2_31", "_2_28", "_2_17", "2014", "1")]
UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError,
    KeyError, ValueError, NotImplementedError, RuntimeError,
)  # fmt: skip

Progress = Callable[[str], None]


class ReleaseError(Exception):
    """A release that cannot be had, in one line that says what to do next."""


@dataclass(frozen=True, slots=True)
class Release:
    """The files of one vLLM: `root` contains `vllm/`, `fa4` is a `cute` package if there is one."""

    name: str
    version: str | None
    root: Path
    origin: str
    fa4: Path | None = None


def find(what: str, *, fa4: str | Path | None = None, progress: Progress | None = None) -> Release:
    """The release that `what` names; `fa4` is an FA4 to use in place of the release's own."""
    given = None if fa4 is None else _cute_folder(Path(fa4))
    root, origin = _locate(what, progress or (lambda text: None))
    if not (root / BACKEND).is_file():
        raise ReleaseError(f"{what} has no {BACKEND}: give a vLLM that has FA4 mask_mods")
    return _release(root, origin, given)


def cached() -> list[Release]:
    """The versions that lie complete in the cache, without any use of the network."""
    folders = sorted(cache().glob("[0-9]*"), key=lambda folder: _order(folder.name))
    return [_release(folder, INDEX) for folder in folders if _is_complete(folder)]


def _locate(what: str, progress: Progress) -> tuple[Path, str]:
    if what == "installed":
        return _installed(), "installed package"
    if urlsplit(what).scheme in ("http", "https", "file"):
        return _from_url(what, progress), _shown(what)
    if (match := VERSION.fullmatch(what)) and not what.endswith(".whl"):
        return _from_version(match[1], progress), INDEX
    path = Path(what).expanduser()
    if path.is_file():
        return _from_wheel(path), str(path)
    if path.is_dir():
        path = path.resolve()
        return (path if (path / BACKEND).is_file() else path.parent), str(path)
    raise ReleaseError(
        f"no such file: {what} (give a version, a wheel, a URL, a source tree or 'installed')"
    )


def _release(root: Path, origin: str, fa4: Path | None = None) -> Release:
    own = root / OWN_FA4
    version = _version(root)
    name = f"vllm-{version or 'tree'}"
    return Release(name, version, root, origin, fa4 or (own if own.is_dir() else None))


def _version(root: Path) -> str | None:
    sources = [
        *root.glob("vllm-*.dist-info/METADATA"),
        root / "PKG-INFO",
        root / "vllm.egg-info/PKG-INFO",
        root / "vllm/_version.py",
    ]
    pattern = re.compile(r"^(?:Version:|__version__\s*=|version\s*=)[^'\"\d\n]*['\"]?(\d[\w.+-]*)")
    for source in filter(Path.is_file, sources):
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines()
        if found := next(filter(None, map(pattern.match, lines)), None):
            return found[1]
    return None


def _cute_folder(path: Path) -> Path:
    for folder in ("", "cute", "flash_attn/cute", OWN_FA4, "vllm_flash_attn/cute"):
        if (path / folder / "__init__.py").is_file() and (path / folder / "utils.py").is_file():
            return (path / folder).resolve()
    raise ReleaseError(f"{path} holds no FA4: give its cute folder, or a checkout that has one")


def _installed() -> Path:
    from importlib.util import find_spec

    try:
        spec = find_spec("vllm")
    except ValueError:  # a module in sys.modules that has no spec
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    roots = [Path(place).parent for place in places if (Path(place).parent / BACKEND).is_file()]
    if not roots:
        raise ReleaseError("no vLLM with a FlashAttention back end is installed: give a version")
    return roots[0]


def _from_wheel(path: Path, version: str | None = None) -> Path:
    try:
        with zipfile.ZipFile(path) as wheel:
            return _keep(wheel, str(path), version)
    except UNREADABLE as error:
        raise ReleaseError(f"{path} is not a sound wheel ({_line(error)}): get it again") from None


def _from_url(url: str, progress: Progress, version: str | None = None) -> Path:
    if urlsplit(url).scheme == "file":
        return _from_wheel(Path(url2pathname(urlsplit(url).path)), version)
    import requests

    shown = _shown(url)
    progress(f"asking for {shown}")
    try:
        with (
            _session() as session,
            _remote_file(session, url, progress) as file,
            zipfile.ZipFile(file) as wheel,
        ):
            return _keep(wheel, shown, version, progress)
    except requests.HTTPError as error:
        answer = f"the server answers {error.response.status_code} for {shown}"
        raise ReleaseError(f"{answer}: check it, or download the wheel and give its path") from None
    except requests.RequestException as error:
        raise ReleaseError(
            f"{shown} cannot be reached ({type(error).__name__}): "
            "go online, or give a wheel file or a version that is cached"
        ) from None
    except UNREADABLE as error:
        raise ReleaseError(f"{shown} is not a sound wheel ({_line(error)}): try again") from None


def _shown(url: str) -> str:
    """The address without the secrets that it may hold."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _from_version(version: str, progress: Progress) -> Path:
    for folder in cache().glob("[0-9]*"):
        if _order(folder.name) == _order(version) and _is_complete(folder):
            return folder
    progress(f"asking pip where vllm {version} is")
    url, version = _ask_pip(version)
    return _from_url(url, progress, version)


def _order(version: str) -> tuple[tuple[int, str], ...]:
    """A sort key under which 0.33 and 0.33.0 are equal and 0.9.0 comes before 0.10.0."""
    parts = re.sub(r"(\.0)+$", "", version).split(".")
    return tuple((int("".join(takewhile(str.isdigit, part)) or -1), part) for part in parts)


def _ask_pip(version: str) -> tuple[str, str]:
    """Address and version of a wheel in the index that the user's pip is configured for."""
    with tempfile.TemporaryDirectory(prefix="maskproof-") as folder:
        report = Path(folder) / "report.json"
        anywhere = ["--target", folder, "--implementation", "cp", "--abi", "abi3"]
        anywhere += ["--python-version", "3.12", *(f"--platform={tag}" for tag in LINUX)]
        for options in ([], anywhere):
            answer = _pip(
                "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:",
                "--quiet", "--no-input", "--retries=1", "--disable-pip-version-check",
                "--report", str(report), *options, f"vllm=={version}",
            )  # fmt: skip
            if answer.returncode == 0:
                found = json.loads(report.read_text())["install"][0]
                return found["download_info"]["url"], found["metadata"]["version"]
            if "No matching distribution" not in answer.stderr or "Retrying" in answer.stderr:
                break
    raise ReleaseError(_why_not(version, answer.stderr))


def _why_not(version: str, stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip: install pip, or give a wheel file"
    if "Retrying" in stderr:
        return f"vllm {version} is not cached and pip's index cannot be reached: go online once"
    if found := re.search(r"\(from versions: ([^)]*)\)", stderr):
        newest = ", ".join(found[1].split(", ")[:-4:-1])
        return (
            f"pip finds no wheel of vllm {version} (newest: {newest}): "
            "`python -m pip index versions vllm` lists them"
        )
    errors = [line for line in stderr.splitlines() if line.strip()] or ["no reason given"]
    said = next((line for line in errors if line.startswith("ERROR: ")), errors[-1])
    return f"pip cannot find vllm {version}: {said.removeprefix('ERROR: ')}"


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -P: a folder of the user's that is named as some module of pip's must not be imported.
    command = [sys.executable, "-P", "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _session() -> requests.Session:
    """A session that goes through the proxy and trusts the certificates that pip does."""
    import requests

    settings = dict(
        re.findall(r"^\S*\.(cert|proxy)='(.+)'$", _pip("config", "list").stdout, re.MULTILINE)
    )
    session = requests.Session()
    session.headers["Accept-Encoding"] = "identity"
    if "cert" in settings:
        session.verify = settings["cert"]
    if "proxy" in settings:
        session.proxies = dict.fromkeys(("http", "https"), settings["proxy"])
    return session


@contextmanager
def _remote_file(session: requests.Session, url: str, progress: Progress) -> Iterator[BinaryIO]:
    """The file at `url`, read in pieces as they are asked for, or else downloaded first."""
    first = session.get(url, headers={"Range": "bytes=0-0"}, stream=True, timeout=60)
    with first:
        first.raise_for_status()
        extent = re.fullmatch(r"bytes 0-0/(\d+)", first.headers.get("Content-Range", ""))
        if not extent:
            with tempfile.TemporaryFile() as copy:
                _download(first, copy, progress)
                yield copy
                return
    yield io.BufferedReader(_Ranges(session, url, int(extent[1])), 1 << 18)


def _download(answer: requests.Response, copy: BinaryIO, progress: Progress) -> None:
    total = int(answer.headers.get("Content-Length", 0)) >> 20
    for chunk in answer.iter_content(1 << 20):
        copy.write(chunk)
        progress(f"downloading the whole wheel: {copy.tell() >> 20} of {total or '?'} MB")
    copy.seek(0)


class _Ranges(io.RawIOBase):
    """A remote file that is read by HTTP ranges. A buffer around it decides their length."""

    def __init__(self, session: requests.Session, url: str, size: int) -> None:
        self._session, self._url, self._size, self._at = session, url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        wanted = {"Range": f"bytes={self._at}-{end - 1}"}
        answer = self._session.get(self._url, headers=wanted, timeout=60)
        answer.raise_for_status()
        if answer.status_code != 206 or len(answer.content) != end - self._at:
            raise OSError("the server did not send the range asked for")
        buffer[: end - self._at] = answer.content
        self._at = end
        return len(answer.content)


def _keep(
    wheel: zipfile.ZipFile,
    origin: str,
    version: str | None,
    progress: Progress = lambda text: None,
) -> Path:
    """Unpack what is needed of `wheel` into the cache, unless it lies there already.

    Without a version to vouch for it, the wheel may be anything: its contents name the folder.
    """
    members = _members(wheel, origin)
    sums = {member.filename: member.CRC for member in members}
    digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
    folder = cache() / (version or f"wheel-{digest[:16]}")
    if _is_complete(folder):
        return folder
    size = sum(member.compress_size for member in members) >> 10
    progress(f"reading {len(members)} files ({size} KB)")
    contents = {member.filename: wheel.read(member) for member in members}
    manifest = {"origin": origin, "needed": NEEDED.pattern, "members": sums}
    contents[MANIFEST] = json.dumps(manifest, indent=1).encode()
    try:
        _write(contents, folder)
    except OSError as error:
        raise ReleaseError(f"{_line(error)}: set XDG_CACHE_HOME to another folder") from None
    return folder


def _write(contents: dict[str, bytes], folder: Path) -> None:
    """Fill the folder in one step; another process may do the same at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        for name, content in contents.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        while not _is_complete(folder):
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch) / f"broken-{os.urandom(4).hex()}")
            try:
                new.rename(folder)
            except OSError:
                if not folder.exists():
                    raise


def _members(wheel: zipfile.ZipFile, origin: str) -> list[zipfile.ZipInfo]:
    for name in wheel.namelist():
        if ".." in re.split(r"[/\\]", name) or name.startswith(("/", "\\")) or ":" in name:
            raise ReleaseError(f"{origin} has a member outside its folder, {name!r}: do not use it")
    members = [member for member in wheel.infolist() if NEEDED.fullmatch(member.filename)]
    # In the order of the wheel, so that neighbours arrive in one range.
    members.sort(key=lambda member: member.header_offset)
    if BACKEND not in {member.filename for member in members}:
        raise ReleaseError(f"{origin} has no {BACKEND}: give a vLLM that has FA4 mask_mods")
    return members


def _is_complete(folder: Path) -> bool:
    """Whether each file that was unpacked here is still what the wheel says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["needed"] == NEEDED.pattern and all(
            zlib.crc32((folder / name).read_bytes()) == crc
            for name, crc in manifest["members"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "maskproof" / "vllm"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
