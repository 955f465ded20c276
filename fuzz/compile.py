"""`python -m fuzz.compile`: compile the kernels of a campaign ahead, on any machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from fuzz.run import (
    Parser,
    consistent,
    duration,
    expected,
    positive,
    said,
    source_of,
    targets_of,
    what,
)
from fuzz.screen import Screen
from fuzz.targets import gathered, in_turn

HELP = """\
FA4 keeps compiled kernels in a folder, by default below that of temporary files; set
FLASH_ATTENTION_CUTE_DSL_CACHE_DIR to say where, and TRITON_CACHE_DIR for the kernels that compare.
A machine with a GPU finds them there if its Python, compiler and sources are of the same versions.
No GPU is needed here. What is compiled already is not compiled again.

examples:
  python -m fuzz.compile --vllm 0.33.0 --spec mm_prefix
  FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=kernels python -m fuzz.compile --vllm 0.33.0 --variants 3

exit status: 0 all are compiled; 1 the compiler refused some, which a campaign will say; 2 bad
usage; 3 nothing could be compiled, or the time was over.
"""
LOOK = 0.2


def parser() -> Parser:
    found = Parser(
        prog="python -m fuzz.compile", epilog=HELP, description=__doc__.partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    what(found)
    add = found.add_argument
    add("--variants", type=positive, metavar="N",
        help="of each target only the first N of the calls that a campaign makes")
    add("--workers", type=positive, default=os.cpu_count() or 1, metavar="N",
        help="processes (default %(default)s)")
    add("--budget", type=duration, default=duration("1d"), metavar="TIME",
        help="end after so long; what is compiled by then is kept (default: a day)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
        consistent(options)
        return run(options)
    except KeyboardInterrupt:
        return said(3, "interrupted; what was compiled is kept", "fuzz.compile")
    except Exception as error:
        if (status := expected(error)) is None:
            raise
        return said(status, str(error), "fuzz.compile")


def run(options: argparse.Namespace) -> int:
    from fuzz.gpu import GpuBackend

    screen, begin = Screen(), time.monotonic()
    with gathered(source_of(options), screen.note) as found:
        targets = targets_of(options, found, gpu=True)
        backend = GpuBackend(targets, workers=options.workers, arch=options.arch)
        calls = [call for _, call in in_turn(targets.values(), options.arch, gpu=True,
                                             most=options.variants)
                 if backend.refuses(call) is None]
        if not calls:
            return said(3, "none of these calls is one that the kernels have", "fuzz.compile")
        backend.compile_ahead(calls)
        while left := [call for call in calls if not backend.ready(call)]:
            screen.note(f"{len(calls) - len(left)} of {len(calls)} kernels compiled")
            if time.monotonic() - begin > options.budget:
                break
            time.sleep(LOOK)
        screen.note("")
        return told(screen, backend, calls, len(left), time.monotonic() - begin)


def told(screen: Screen, backend: Any, calls: Sequence[Any], left: int, seconds: float) -> int:
    refused = [call for call in calls if backend.failed(call)]
    screen.line(f"{len(calls) - left - len(refused)} of {len(calls)} kernels are compiled, after "
                f"{seconds:.0f} s")
    for call in refused:
        screen.line(f"  refused: {call}")
    return 3 if left else 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
