"""Kernels compiled ahead where there is no GPU, by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import compile as command
from fuzz import gpu
from fuzz.gpu import GpuBackend

ONE = ("--target", "rswa", "--variants", "1", "--workers", "1")


def test_a_kernel_is_compiled_once_and_lies_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    env = {**os.environ, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder),
           "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    env.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-m", "fuzz.compile", *ONE]
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "1 of 1 kernels are compiled" in ran.stderr, ran.stderr
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("fwd/*.o")}
    assert len(made) == 1 and any((tmp_path / "triton").rglob("*.cubin"))
    again = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert made == {path: path.stat().st_mtime_ns for path in folder.rglob("fwd/*.o")}


def test_what_the_compiler_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GpuBackend, "_reader", lambda self, provider: 1 / 0 if _is_child() else 0)
    assert command.main(ONE) == 1
    said = capfd.readouterr().err
    assert "0 of 1 kernels are compiled" in said and "refused: Call(provider='upstream'" in said


PARENT = os.getpid()


def _is_child() -> bool:
    return os.getpid() != PARENT


def test_a_process_that_dies_has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "forked", lambda work: 0)
    monkeypatch.setattr(gpu, "_is_running", lambda child: False)
    assert command.main(ONE) == 1


def test_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "forked", lambda work: 0)
    monkeypatch.setattr(gpu, "_is_running", lambda child: True)
    assert command.main([*ONE, "--budget", "1s"]) == 3


@pytest.mark.parametrize(("words", "status", "text"), [
    (["--target", "nothing"], 2, "no target 'nothing'"),
    (["--variants", "0"], 2, "'0' is not a whole number above 0"),
    (["--vllm", "/nowhere", "--target", "rswa"], 3, "/nowhere"),
    (["--target", "rswa", "--arch", "sm_80", "--variants", "1"], 3, "none of these calls"),
])
def test_what_cannot_be_done_is_one_line(
    words: list[str], status: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == status
    said = capfd.readouterr().err
    assert text in said and said.count("\n") == 1
