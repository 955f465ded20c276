"""The record of what was shown on an H200.

    python -m benchmarks.h200 --json FILE [--only SECTION ...]      needs a Hopper GPU
    python -m benchmarks.h200 --docs FILE                           writes the page from the record

Each section runs in a process of its own and replaces what the file has of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.h200.record import ROOT, merge, stamped

# Where a section is, in the order in which they run; the last are run only if they are asked for.
SECTIONS = {
    "cells": "cells", "found": "found", "controls": "found", "longest": "longest",
    "speed": "speed", "compile": "compiling", "isolation": "isolation", "killed": "isolation",
    "numerics": "numerics", "confirm": "confirm", "tune": "numerics",
}
USUAL = [name for name in SECTIONS if name != "tune"]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.h200", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    what = found.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="FILE", help="the record to put sections into")
    what.add_argument("--docs", type=Path, metavar="FILE", help="write the page from this record")
    add("--only", nargs="+", choices=SECTIONS, default=USUAL, metavar="SECTION",
        help=f"of {', '.join(SECTIONS)}")
    add("--budget", type=int, default=180, metavar="S",
        help="cells: seconds for each campaign (default %(default)s)")
    add("--spec", action="append", default=[], metavar="NAME", help="cells, speed: only this mask")
    add("--seeds", type=int, default=5, metavar="N", help="found: how many (default %(default)s)")
    add("--limit", type=int, default=480, metavar="S",
        help="found: seconds after which no search is begun (default %(default)s)")
    add("--target", action="append", default=[], metavar="NAME",
        help="found, controls: only faulty calls with this in their names")
    add("--backend", choices=("gpu", "cpu"), default="gpu",
        help="cells, found, controls, isolation, killed: cpu is for trying them out")
    return found


def main() -> int:
    options = parser().parse_args()
    if options.docs:
        from benchmarks.h200.page import page

        sys.stdout.write(page(options.docs))
        return 0
    given = [word for name in ("budget", "seeds", "limit", "backend")
             if getattr(options, name) != parser().get_default(name)
             for word in (f"--{name}", str(getattr(options, name)))]
    given += [word for name in ("spec", "target") for value in getattr(options, name)
              for word in (f"--{name}", value)]
    if len(options.only) > 1:
        command = [sys.executable, "-m", "benchmarks.h200", "--json", str(options.json.resolve())]
        return max(subprocess.run([*command, *given, "--only", name], cwd=ROOT).returncode
                   for name in options.only)
    (name,) = options.only
    work = getattr(import_module(f"benchmarks.h200.{SECTIONS[name]}"), {
        "numerics": "numerics", "tune": "tune", "killed": "kill",
        "controls": "controls"}.get(name, "run"))
    section = stamped(name, given, lambda: work(options))
    merge(options.json, name, section)
    print(f"== {name}: {section['seconds']:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
