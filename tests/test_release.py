"""Laws of `kernels.release`, on small wheels and a server on this machine."""

import io
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kernels import release
from kernels.release import BACKEND, MANIFEST, OWN_FA4, ReleaseError, cached, find

FILES = {
    BACKEND: "# back end\n" * 50,
    "vllm/__init__.py": "raise RuntimeError('vLLM was imported')\n",
    "vllm/v1/attention/backends/utils.py": "# builders\n",
    "vllm/v1/attention/ops/triton_unified_attention.py": "# triton\n",
    f"{OWN_FA4}/__init__.py": "",
    f"{OWN_FA4}/utils.py": "# FA4\n",
    "vllm-9.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.1.0\n",
    "vllm-9.1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "vllm-9.1.0.dist-info/RECORD": "",
}
WHEEL = "vllm-9.1.0-py3-none-any.whl"


def wheel_bytes(files: dict[str, str] = FILES, filler: int = 0) -> bytes:
    """A wheel; `filler` bytes of something large lie in its middle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for count, (name, text) in enumerate(files.items()):
            wheel.writestr(name, text)
            if count == 1 and filler:
                wheel.writestr("vllm/big.so", bytes(filler), zipfile.ZIP_STORED)
    return buffer.getvalue()


@dataclass
class Server:
    """A package index at `/simple/` and what it lists at `/files/`."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    sent: int = 0

    def answer(self, path: str, wanted: str | None) -> tuple[int, bytes, dict[str, str]]:
        if path == "/simple/vllm/":
            links = "".join(f'<a href="/files/{name}">{name}</a>' for name in self.files)
            return 200, links.encode(), {"Content-Type": "text/html"}
        content = self.files.get(path.removeprefix("/files/"))
        if content is None:
            return 404, b"", {}
        if not (wanted and self.ranges):
            return 200, content, {}
        start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())
        extent = f"bytes {start}-{end}/{len(content)}"
        return 206, content[start : end + 1], {"Content-Range": extent}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body, headers = state.answer(self.path, self.headers["Range"])
            state.sent += len(body)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.address = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        use_index(monkeypatch, f"{state.address}/simple")
        yield state
        http.shutdown()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "maskproof" / "vllm"


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let pip know this index alone."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    settings = {"CONFIG_FILE": "/dev/null", "INDEX_URL": url, "FIND_LINKS": "", "NO_CACHE_DIR": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def refuse(*arguments: object) -> None:
    raise AssertionError(f"not to be called: {arguments}")


def message(act: Callable[[], object]) -> str:
    with pytest.raises(ReleaseError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        write(root / name, text.encode())
    return root


def test_a_version_is_fetched_by_ranges_and_then_needs_no_network(server, cache, monkeypatch):
    server.files[WHEEL] = wheel_bytes()
    # pip takes a small wheel whole where the index serves no metadata beside it; what is read
    # afterwards is what counts.
    url, version = release._ask_pip("9.1.0")
    assert (url, version) == (f"{server.address}/files/{WHEEL}", "9.1.0")

    server.files[WHEEL] = wheel_bytes(filler=5 << 20)
    monkeypatch.setattr(release, "_ask_pip", lambda version: (url, version))
    server.sent = 0
    said: list[str] = []
    found = find("9.1.0", progress=said.append)
    assert server.sent < 1 << 20
    assert (found.name, found.version) == ("vllm-9.1.0", "9.1.0")
    assert found.root == cache / "9.1.0"
    assert found.fa4 == found.root / OWN_FA4
    assert (found.root / BACKEND).read_text() == FILES[BACKEND]
    assert not (found.root / "vllm/__init__.py").exists()
    assert not (found.root / "vllm/big.so").exists()
    assert said

    monkeypatch.setattr(release, "_pip", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert find("9.1.0") == find("9.1") == find("v9.1.0") == found
    assert cached() == [found]


def test_a_server_without_ranges_sends_the_whole_wheel(server):
    server.ranges = False
    server.files[WHEEL] = wheel_bytes(filler=3 << 20)
    said: list[str] = []
    assert find("9.1.0", progress=said.append).name == "vllm-9.1.0"
    assert any("of 3 MB" in text for text in said)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_url_is_read_and_shown_without_its_secrets(server, ranges):
    server.ranges = ranges
    server.files[WHEEL] = wheel_bytes()
    address = server.address.replace("//", "//user:secret@")
    found = find(f"{address}/files/{WHEEL}")
    assert found.name == "vllm-9.1.0"
    assert found.origin == f"{server.address}/files/{WHEEL}"
    assert not cached(), "only what pip finds may stand for a version"
    assert "404" in message(lambda: find(f"{address}/files/other.whl?token=secret"))
    assert "secret" not in message(lambda: find(f"{address}/files/other.whl?token=secret"))


def test_an_unknown_version_names_the_newest_and_how_to_list(server):
    server.files[WHEEL] = wheel_bytes()
    said = message(lambda: find("9.9.9"))
    assert "newest: 9.1.0" in said
    assert "pip index versions vllm" in said


def test_offline_and_not_cached_is_one_line(monkeypatch):
    use_index(monkeypatch, "http://127.0.0.1:9/simple")
    assert "go online" in message(lambda: find("9.1.0"))
    assert "cannot be reached" in message(lambda: find(f"http://127.0.0.1:9/{WHEEL}"))


def test_without_pip_the_message_says_so(monkeypatch):
    answer = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip")
    monkeypatch.setattr(release, "_pip", lambda *arguments: answer)
    assert "install pip" in message(lambda: find("9.1.0"))


def test_pip_is_asked_again_for_a_linux_wheel(monkeypatch):
    """On another system, or a Python that has no wheel, pip finds none of its own."""
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        if "--target" not in arguments:
            none = "ERROR: No matching distribution found for vllm==9.1.0"
            return subprocess.CompletedProcess([], 1, "", none)
        found = {"download_info": {"url": "https://host/x.whl"}, "metadata": {"version": "9.1.0"}}
        report = arguments[arguments.index("--report") + 1]
        Path(report).write_text(json.dumps({"install": [found]}))
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(release, "_pip", pip)
    assert release._ask_pip("9.1.0") == ("https://host/x.whl", "9.1.0")
    assert len(asked) == 2


@pytest.mark.parametrize("setting", ["cert", "proxy"])
def test_pips_certificates_and_proxy_are_used(monkeypatch, setting):
    listed = subprocess.CompletedProcess([], 0, f"global.{setting}='/some/where'\n", "")
    monkeypatch.setattr(release, "_pip", lambda *arguments: listed)
    session = release._session()
    assert "/some/where" in (session.verify, session.proxies.get("https"))


def test_a_wheel_file_goes_by_its_contents(tmp_path):
    first = write(tmp_path / WHEEL, wheel_bytes())
    changed = write(tmp_path / "b" / WHEEL, wheel_bytes(FILES | {BACKEND: "# other\n"}))
    assert find(str(first)).name == find(str(changed)).name == "vllm-9.1.0"
    assert (find(str(first)).root / BACKEND).read_text() == FILES[BACKEND]
    assert (find(str(changed)).root / BACKEND).read_text() == "# other\n"
    assert find(first.as_uri()).root == find(str(first)).root


def test_a_damaged_wheel_is_one_line_and_leaves_nothing(tmp_path, cache):
    whole = wheel_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as wheel:
        member = wheel.getinfo(BACKEND)
    inside = member.header_offset + 30 + len(BACKEND)
    damaged = {
        "no-zip": b"not a zip file",
        "empty": b"",
        "truncated": whole[: len(whole) // 2],
        "flipped": whole[:inside] + bytes([whole[inside] ^ 255]) + whole[inside + 1 :],
        "wrong-sum": whole.replace(member.CRC.to_bytes(4, "little"), b"\0\1\2\3"),
    }
    for name, content in damaged.items():
        path = write(tmp_path / f"{name}.whl", content)
        assert "is not a sound wheel" in message(lambda path=path: find(str(path)))
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("name", ["vllm/vllm_flash_attn/cute/../../../../x.py", "/x.py", "..\\x"])
def test_a_member_outside_its_folder_is_refused(tmp_path, name):
    path = write(tmp_path / WHEEL, wheel_bytes(FILES | {name: "x = 1\n"}))
    assert "outside its folder" in message(lambda: find(str(path)))
    assert not list(tmp_path.rglob("x.py"))


def test_a_wheel_of_something_else_is_one_line(tmp_path):
    path = write(tmp_path / "other.whl", wheel_bytes({"other/__init__.py": ""}))
    assert f"has no {BACKEND}" in message(lambda: find(str(path)))


@pytest.mark.parametrize("fault", ["missing", "changed", "no manifest", "bad manifest", "older"])
def test_a_faulty_cache_is_fetched_again(server, cache, fault):
    server.files[WHEEL] = wheel_bytes()
    folder = find("9.1.0").root
    manifest = folder / MANIFEST
    match fault:
        case "missing":
            (folder / BACKEND).unlink()
        case "changed":
            (folder / BACKEND).write_text("# edited\n")
        case "no manifest":
            manifest.unlink()
        case "bad manifest":
            manifest.write_text("[]")
        case "older":
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"needed": "x"}))
    assert not cached()
    assert (find("9.1.0").root / BACKEND).read_text() == FILES[BACKEND]
    assert [each.name for each in cached()] == ["vllm-9.1.0"]
    assert [each.name for each in cache.iterdir()] == ["9.1.0"]


def test_many_at_once_fill_the_cache_once(tmp_path, cache):
    path = write(tmp_path / WHEEL, wheel_bytes())
    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            roots = {each.root for each in pool.map(lambda _: find(str(path)), range(16))}
        (root,) = roots
        assert list(cache.iterdir()) == [root]
        (root / BACKEND).unlink()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / WHEEL, wheel_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert "XDG_CACHE_HOME" in message(lambda: find(str(path)))


@pytest.mark.parametrize(
    ("added", "name"),
    [
        ({}, "vllm-tree"),
        ({"vllm/_version.py": "__version__ = version = '9.2.0.dev3+gabc'\n"}, "9.2.0.dev3+gabc"),
        ({"PKG-INFO": "Metadata-Version: 2.1\nVersion: 9.3.0\n"}, "9.3.0"),
        ({"vllm-9.4.0.dist-info/METADATA": "Version: 9.4.0\n"}, "9.4.0"),
    ],
)
def test_a_source_tree_is_named_by_the_version_it_states(tmp_path, added, name):
    root = tree(tmp_path / "vllm", {BACKEND: ""} | added)
    found = find(str(root))
    assert found.name == (name if name == "vllm-tree" else f"vllm-{name}")
    assert found.root == find(str(root / "vllm")).root == root
    assert found.fa4 is None


@pytest.mark.parametrize("inside", ["", "cute", "flash_attn/cute", OWN_FA4])
def test_an_fa4_is_found_in_what_is_given(tmp_path, inside):
    root = tree(tmp_path / "source", {BACKEND: ""})
    fa4 = tree(tmp_path / "fa4" / inside, {"__init__.py": "", "utils.py": ""})
    assert find(str(root), fa4=tmp_path / "fa4").fa4 == fa4
    assert "holds no FA4" in message(lambda: find(str(root), fa4=tmp_path / "source"))


def test_the_installed_package_is_found_but_not_imported(tmp_path, monkeypatch):
    assert "is installed" in message(lambda: find("installed"))
    root = tree(tmp_path / "site", FILES)
    monkeypatch.syspath_prepend(str(root))
    assert (find("installed").name, find("installed").root) == ("vllm-9.1.0", root)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("what", ["no/such/tree", "9.1.0.whl", "", "latest"])
def test_what_is_not_there_is_one_line(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message(lambda: find(what))


def test_a_tree_without_the_back_end_is_one_line(tmp_path):
    assert f"has no {BACKEND}" in message(lambda: find(str(tmp_path)))


def test_versions_are_in_order(cache):
    names = ["0.9.0", "0.10.1.1", "0.30.0", "0.33.0"]
    manifest = json.dumps({"needed": release.NEEDED.pattern, "members": {}})
    for name in reversed(names):
        write(cache / name / MANIFEST, manifest.encode())
    assert [each.root.name for each in cached()] == names


def test_the_import_is_light():
    code = "import sys, kernels.release; print({'requests', 'torch', 'cutlass'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.releases
def test_a_released_wheel_is_fetched_with_what_is_needed():
    found = find("0.33.0")
    assert found.name == "vllm-0.33.0"
    assert "mask_mod" in (found.root / BACKEND).read_text()
    assert (found.fa4 / "utils.py").is_file()
    assert list((found.root / "vllm/v1/attention/ops").glob("triton_*.py"))
