"""What a campaign looks like: one line of progress while it runs, then its summary."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz.loop import Progress


class Screen:
    """One line of progress on a terminal, nothing elsewhere; the summary on both."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.last = 0.0

    def line(self, text: str) -> None:
        sys.stderr.write(text + "\n")

    def note(self, text: str) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns
            sys.stderr.write("\r\x1b[K" + text[:width - 1])
            sys.stderr.flush()

    def progress(self, at: Progress) -> None:
        if self.live and (at.doing or time.monotonic() - self.last > 0.5):
            self.last = time.monotonic()
            self.note(" | ".join([*figures(at.now, at.seconds), f"findings {at.findings}",
                                  *([at.doing] if at.doing else [])]))

    def summary(self, summary: dict[str, Any]) -> None:
        self.note("")
        try:
            sys.stdout.write("".join(line + "\n" for line in summary_lines(summary)))
            sys.stdout.flush()
        except BrokenPipeError:  # whoever read it has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summary_lines(summary: dict[str, Any]) -> list[str]:
    now = summary["run"]
    lines = [
        f"{summary['backend']} ({summary['device']}), seed {summary['seed']}: "
        f"{summary['ended']} after {summary['seconds']:.1f} s",
        "; ".join(figures(now, summary["seconds"])),
    ]
    for reason, count in now.get("infrastructure", {}).items():
        lines.append(f"fault of the machine, {count} times: {reason}")
    for one in summary["findings"]:
        lines += [f"{one['kind']} (seen {one['seen']} times) {one['path']}", f"  {one['region']}",
                  f"  python -m fuzz.replay {shlex.quote(one['file'])}"]
    if summary["findings"]:
        return lines
    return [*lines, "no finding" if now.get("sequences") else "nothing ran"]


def figures(now: dict[str, Any], seconds: float) -> list[str]:
    def rate(name: str) -> str:
        return short(now.get(name, 0) / max(seconds, 1e-9))

    skipped = [f"skipped {count}: {why[:60]}" for why, count in now.get("skipped", {}).items()]
    return [
        f"{now.get('launches', 0)} launches", f"{short(now.get('sequences', 0))} sequences "
        f"({rate('sequences')}/s)", f"{short(now.get('cells', 0))} cells ({rate('cells')}/s)",
        f"compiled {now.get('kernels', 0)} kernels in {now.get('compile_seconds', 0):.1f} s",
        f"ran {now.get('run_seconds', 0):.1f} s", f"of it the kernels "
        f"{now.get('kernel_seconds', 0):.1f} s", *skipped,
    ]


def short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
