"""`python -m fuzz.run`: look for calls whose mask is not the one that they claim to compute."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fuzz.backends import Backend
    from fuzz.loop import Loop
    from fuzz.screen import Screen
    from fuzz.spaces import Part
    from fuzz.state import State
    from fuzz.strategies import Space
    from fuzz.targets import Source
    from kernels.target import Target

HELP = """\
what is fuzzed:
  (nothing)                       the project's own mask_mods
  --vllm 0.33.0                   those of a vLLM release; also a wheel, a source tree, 'installed'
  --target NAME                   only this one, known-bad twins too (repeatable)
  --target my_masks.py::mine --spec MASK [--aux NAMES] [--call NAME=VALUE]
                                  your own mask_mod, or a factory of one
  --spec NAME                     only what is to compute this mask; where nothing does, a mask_mod
                                  that is made from its formula

examples:
  python -m fuzz.run --backend cpu --budget 60s
  python -m fuzz.run --budget 8h --vllm 0.33.0 --findings nightly --json summary.json
  python -m fuzz.run --backend cpu --target known-bad/chunk-local-q --stop-on-first
  python -m fuzz.replay findings/finding-0123456789ab.json

The findings folder holds finding-<fingerprint>.json, and everything else in state/. A campaign that
is started again there goes on where it was; the same fault is counted, not stored twice.

exit status: 0 the folder holds no finding; 1 it does; 2 bad usage; 3 it could not run, or the time
was over before anything had.
"""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
ARCHES = ("sm_90", "sm_80")
MOST_DRAWERS = 12


class Usage(Exception):
    """What a person has to change; one line."""


class CannotRun(Exception):
    """What keeps a campaign from running; one line."""


@dataclass(slots=True)
class Interrupt:
    """Ctrl-C ends at once what comes before a campaign. From then on it is only `noted`: raised in
    the middle of something it could be lost there, or leave half of it behind."""

    noted: bool = False
    came: bool = False

    def __call__(self, *_: object) -> None:
        self.came = True
        if not self.noted:
            raise KeyboardInterrupt


INTERRUPT = Interrupt()


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message}; see {self.prog} --help")


def what(found: argparse.ArgumentParser) -> None:
    """The options that say what calls are about."""
    add = found.add_argument
    add("--provider", choices=("upstream", "vllm"), help="whose kernels; --vllm implies vllm")
    add("--vllm", metavar="WHAT", help="a version, wheel, URL, source tree, or 'installed'")
    add("--fa4", metavar="PATH", help="the FA4 `cute` package for a vLLM source tree")
    add("--spec", action="append", default=[], metavar="NAME",
        help="a mask: catalogue name, composition or TOML file (repeatable)")
    add("--target", action="append", default=[], metavar="NAME", help="a mask_mod (repeatable)")
    add("--call", action="append", default=[], metavar="NAME=VALUE",
        help="an argument of the factory in a file; @window passes the spec's symbol")
    add("--aux", default="", metavar="NAMES",
        help="which table of the spec each aux tensor of a file's mask_mod is")
    add("--arch", choices=ARCHES, default=ARCHES[0], help="code path (default %(default)s)")


def parser() -> Parser:
    found = Parser(
        prog="python -m fuzz.run", epilog=HELP, allow_abbrev=False,
        description="Run random calls, compare the mask of every cell with the spec, and shrink "
        "what is wrong.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--backend", choices=("auto", "cpu", "gpu"), default="auto",
        help="auto takes the GPU if there is one")
    add("--budget", type=duration, default=duration("60s"), metavar="TIME",
        help="wall time from the start of the process: 60s, 5m, 8h (default 60s)")
    what(found)
    add("--seed", type=whole, metavar="N", help="default: the folder's, or a new one")
    add("--launches", type=positive, metavar="N", help="end after so many launches")
    add("--max-keys", type=positive, default=512, metavar="N",
        help="the longest sequence (default %(default)s)")
    add("--workers", type=positive, metavar="N",
        help="child processes at once: for launches on the CPU (default 1), or for compiling ahead "
        "of the GPU (default: what cores there are, up to 16)")
    add("--deadline", type=positive, default=20, metavar="S",
        help="seconds after which a launch counts as a hang (default %(default)s)")
    add("--stop-on-first", action="store_true", help="end after the first finding")
    add("--findings", type=Path, default=Path("findings"), metavar="DIR",
        help="where findings go and are resumed from (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the summary as JSON")
    return found


def duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 60s, 5m or 8h")
    return float(match[1]) * UNITS[match[2]]


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 2**32")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    if arguments is None:
        begun = process_start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, INTERRUPT)
    try:
        options = parser().parse_args(arguments)
        consistent(options)
        writable(options.json)
        return run(options, begun + options.budget)
    except KeyboardInterrupt:
        return said(3, "interrupted before anything ran")
    except Exception as error:
        if (status := expected(error)) is None:
            raise
        return said(status, str(error))


def process_start() -> float:
    """When this process began, on `time.monotonic`'s clock."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def said(status: int, text: str, who: str = "fuzz.run") -> int:
    sys.stderr.write(f"{who}: {' '.join(text.split())}\n")
    return status


def expected(error: Exception) -> int | None:
    """The exit status of an error that says in one line what a person has to change."""
    from spec.term import SpecError

    name = type(error).__name__
    if isinstance(error, Usage | SpecError) or name in ("LoadError", "TargetError", "CaseError"):
        return 2
    if isinstance(error, CannotRun | ImportError):
        return 3
    return 3 if name in ("StateError", "FindingError", "NoBackend", "ReleaseError", "CannotDraw",
                         "VllmError") else None


def consistent(options: argparse.Namespace) -> None:
    from fuzz.targets import is_file
    from spec.from_file import resolve

    files = [text for text in options.target if is_file(text)]
    if options.vllm and options.provider == "upstream":
        raise Usage("--vllm implies --provider vllm")
    if options.provider == "vllm" and not options.vllm:
        raise Usage("--provider vllm needs --vllm VERSION")
    if options.fa4 and not options.vllm:
        raise Usage("--fa4 needs --vllm")
    for text in options.spec:
        resolve(text)
    if files and (options.vllm or len(files) != len(options.target)):
        raise Usage("a target in a file cannot be mixed with others")
    if files and len(options.spec) != 1:
        raise Usage("say what the target must equal: --spec MASK, once")
    if (options.call or options.aux) and not files:
        raise Usage("--call and --aux need a target in a file: --target path/to/file.py::name")


def writable(path: Path | None) -> None:
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise CannotRun(f"{path}: {error.strerror}") from None


def source_of(options: argparse.Namespace) -> Source:
    from fuzz.targets import Source, is_file

    files = tuple(absolute(text) for text in options.target if is_file(text))
    return Source(
        vllm=options.vllm, fa4=options.fa4, targets=files, call=tuple(options.call),
        against=options.spec[0] if files else "full",
        generated=() if files else tuple(dict.fromkeys(options.spec)),
        aux=tuple(name.strip() for name in options.aux.split(",") if name.strip()),
    )


def targets_of(
    options: argparse.Namespace, found: dict[str, Target], *, gpu: bool
) -> dict[str, Target]:
    """Those that were asked for; on a GPU there are calls with built-in flags, too."""
    from fuzz.targets import beside, built_in, chosen, is_file

    named = [absolute(text) if is_file(text) else text for text in options.target]
    more = {**beside(found), **built_in(found)} if gpu else {}
    return chosen({**found, **more}, named, options.spec)


def absolute(text: str) -> str:
    """A file's target by its whole path, so that a finding replays from anywhere."""
    path, colons, name = text.partition("::")
    return f"{Path(path).resolve()}::{name}" if colons else text


def run(options: argparse.Namespace, until: float) -> int:
    from hypothesis.configuration import set_hypothesis_home_dir

    from fuzz.backends import has_gpu, take
    from fuzz.findings import stored
    from fuzz.screen import Screen
    from fuzz.spaces import Part
    from fuzz.state import open_state
    from fuzz.targets import gathered

    screen = Screen()
    source = source_of(options)
    with closing(open_state(options.findings)) as state, gathered(source, screen.note) as found:
        set_hypothesis_home_dir(state.folder / "hypothesis")
        known = stored(options.findings)
        targets = targets_of(options, found, gpu=options.backend != "cpu" and has_gpu())
        backend = take(options.backend, targets, workers=options.workers, arch=options.arch)
        if options.backend == "auto":
            screen.line(f"backend: {backend.name} ({backend.device})")
        screen.note("loading the compiler")
        backend.warm_up()
        # What an end cut off before it was small is looked into again.
        shrunk = {name for name, one in known.items() if one.get("shrunk")}
        part = Part(source=source, targets=targets, longest=options.max_keys)
        campaign = prepared(options, until, [part], backend, state, shrunk, screen)
        INTERRUPT.noted = True
        campaign.run()
        return finished(options, campaign, state, backend, screen)


def prepared(
    options: argparse.Namespace, until: float, parts: Sequence[Part], backend: Backend,
    state: State, known: set[str], screen: Screen,
) -> Loop:
    """The loop of a campaign over the targets of `parts`; findings that are `known` are counted
    only."""
    from fuzz.diagnose import Diagnoses
    from fuzz.investigate import MOST_NEW, Investigator
    from fuzz.loop import AHEAD, GRACE, Loop, Settings
    from fuzz.slots import Slots
    from fuzz.worker import Deadlines, Worker

    spaces = drawn_for(options, parts, backend, state)
    targets = {name: target for part in parts for name, target in part.targets.items()}
    deadlines = Deadlines(run=float(options.deadline))
    seed = state.take_seed(options.seed)
    count = options.workers or 1 if backend.name == "cpu" else 1
    drawing = 1 if backend.name == "cpu" else drawers()
    slots = Slots(count * (1 + (2 * AHEAD + 2) * backend.depth) + drawing)
    workers = [Worker(backend, deadlines, slots) for _ in range(count)]
    investigator = Investigator(
        worker=workers[0], source=parts[0].source, folder=options.findings,
        origin={"backend": backend.name, "device": backend.device, "seed": seed},
        until=until + GRACE, diagnoses=Diagnoses(targets), known=known,
        most_new=1 if options.stop_on_first else MOST_NEW, interrupted=lambda: INTERRUPT.came,
    )
    settings = Settings(seed=seed, until=until, launches=options.launches,
                        stop_on_first=options.stop_on_first)
    return Loop(spaces, settings, state, workers, investigator, screen.progress,
                    lambda: INTERRUPT.came, drawing)


def drawers() -> int:
    """Processes that draw for a GPU: what cores there are, but for two."""
    return max(1, min(MOST_DRAWERS, len(os.sched_getaffinity(0)) - 2))


def drawn_for(
    options: argparse.Namespace, parts: Sequence[Part], backend: Backend, state: State
) -> list[Space]:
    """What is drawn for each target; a target that cannot run here is counted with its reason."""
    from fuzz.spaces import spaces_of

    spaces, refused = spaces_of(parts, options.arch, backend)
    if refused:
        state.add({"skipped": refused})
    if not spaces:
        why = "; ".join(refused) or f"no target computes {' or '.join(options.spec)}"
        raise CannotRun(f"nothing can run: {why}")
    return spaces


def finished(
    options: argparse.Namespace, campaign: Loop, state: State, backend: Backend, screen: Screen
) -> int:
    from fuzz.findings import file_of, stored

    summary = summed(options, campaign, state, backend)
    findings = stored(options.findings)
    summary["findings"] = [
        {"fingerprint": name, "kind": one["kind"], "region": one["region"], "path": one["path"],
         "file": str(file_of(options.findings, name)),
         "seen": summary["totals"].get("findings", {}).get(name, 0)}
        for name, one in findings.items()
    ]
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    screen.summary(summary)
    if findings:
        return 1
    if not summary["run"].get("sequences"):
        why = "; ".join(summary["run"].get("skipped", {})) or campaign.stopped
        return said(3, f"no launch came to an end: {why}")
    return 0


def summed(
    options: argparse.Namespace, campaign: Loop, state: State, backend: Backend
) -> dict[str, Any]:
    from fuzz.findings import versions

    seconds = time.monotonic() - campaign.started
    given = {name: str(value) if isinstance(value, Path) else value
             for name, value in vars(options).items()}
    return {
        "schema": 1, "backend": backend.name, "device": backend.device,
        "seed": campaign.settings.seed, "seconds": round(seconds, 3), "ended": campaign.stopped,
        "run": dict(campaign.now), "totals": dict(state.totals),
        "children_restarted": sum(max(worker.restarts, 0) for worker in campaign.workers),
        "options": given, "versions": versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
