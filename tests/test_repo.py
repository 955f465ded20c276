"""Laws of the repository itself."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("spec", "kernels", "proofs", "fuzz", "tests", "benchmarks", "docs", ".ci")
FILES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")
         if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".png"]
FILES += [p for p in ROOT.iterdir() if p.suffix in (".md", ".toml")]
CODE = [p for p in FILES if p.suffix == ".py"]
PRODUCT = [p for p in CODE if p.relative_to(ROOT).parts[0] in ("spec", "kernels", "proofs", "fuzz")
           and not p.name.startswith(("test_", "conftest"))]

MAY_IMPORT = {"spec": {"spec"}, "kernels": {"spec", "kernels"},
              "proofs": {"spec", "kernels", "proofs"},
              "fuzz": {"spec", "kernels", "proofs", "fuzz"}}
COMMANDS = {"spec/check.py", "spec/show.py", "spec/screen.py", "spec/catalogue.py"}
LONGEST = 650


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[tuple[str, bool]]:
    """Every top-level package that a file imports, and whether it does at its own import."""
    tree = ast.parse(path.read_text())
    late = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.If)
            for inner in ast.walk(node)}
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                       else [node.module or ""])
            found |= {(module.partition(".")[0], node not in late) for module in modules}
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_imports_point_one_way(path: Path) -> None:
    above = {(package, at_once) for package, at_once in imports(path)
             if package in MAY_IMPORT.keys() - MAY_IMPORT[path.relative_to(ROOT).parts[0]]}
    assert all(name(path) in COMMANDS and not at_once for _, at_once in above), above


@pytest.mark.parametrize("path", CODE, ids=name)
def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def test_one_file_talks_to_the_solver() -> None:
    makes = re.compile(r"\bz3\.(Simple)?Solver\b|\bz3\.(Optimize|Goal|Tactic)\b")
    assert {name(p) for p in PRODUCT if makes.search(p.read_text())} == {"proofs/obligation.py"}


def test_only_commands_print() -> None:
    prints = {name(p) for p in PRODUCT if re.search(r"(?<![.\w])print\(", p.read_text())}
    assert prints <= COMMANDS


def test_nothing_names_a_registry_or_a_place_of_its_makers() -> None:
    registries = ("py" + "pi.org", "python" + "hosted", "huggingface" + ".co", "opt/py" + "pi")
    places = ("/" + "work/", "/" + "tmp/v/", "/home" + "/")
    for path in FILES:
        found = [word for word in (*registries, *places) if word in path.read_text()]
        assert not found, f"{name(path)}: {found}"


def readme_commands(module: str) -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    found = re.findall(rf"python3? -m {re.escape(module)}\b([^\n`#]*)", text)
    return [shlex.split(line.split("&&")[0]) for line in found]


def test_every_command_of_the_readme_parses() -> None:
    from spec.check import parser as check
    from spec.show import parser as show

    for module, parser in (("spec.check", check), ("spec.show", show)):
        assert (commands := readme_commands(module))
        for arguments in commands:
            parser().parse_args(arguments)
