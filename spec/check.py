"""`python -m spec.check`: prove that real FlashAttention-4 masks equal their spec."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from spec.masks import Mask

HELP = """\
what is checked:
  (nothing)                       the project's own mask_mods, and known-bad twins of them
  --vllm 0.33.0                   every mask_mod of a vLLM release, and what surrounds them in its
                                  kernels; also a wheel, a URL, a source tree, or 'installed'
  --flash-attn                    what surrounds the mask_mods in the installed flash-attn-4
  path/to/file.py::factory        your own mask_mod, or a factory of one
  package.module:mask_mod

examples:
  python -m spec.check --vllm 0.33.0
  python -m spec.check my_masks.py::causal --against causal
  python -m spec.check backend.py::make_mask --call sliding_window_left=@window \\
      --against mm_prefix --aux query_ranges,cu_seqlens_q
  python -m spec.check my_masks.py::mine --against 'window & document' --aux document_ids

which compiler lifts a release's kernels (--compiler):
  auto       the installed one where it imports the release's own FA4, or where mask_mods alone are
             asked for, which takes seconds; else the one that the release pins, which pip puts
             into an environment of its own, once
  installed  the installed one
  pinned     the one that the release pins

exit status: 0 every verdict is the expected one; 1 a fault was found; 2 bad usage, nothing was
checked; 3 something is undecided (UNKNOWN, UNSUPPORTED, VACUOUS, ERROR).
"""
MASK_MOD = "mask_mod"
LAYERS = (MASK_MOD, "builtin", "tiles", "sampling", "dispatch", "metadata", "keys")
COMPILERS = ("auto", "installed", "pinned")
FAST = ("equals-spec", "no-overflow")
# What a check imports; some of it is for Linux only.
DEPENDENCIES = (
    "cutlass", "flash_attn", "numpy", "quack", "requests", "rich", "torch", "triton", "z3",
)


RELEASE = re.compile(r"v?(\d+\.\d[\w.+]*)|(installed|.*\.whl|\w+://.*)")


class Usage(Exception):
    """What a person has to change; one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message}; see python -m spec.check --help")


def parser() -> Parser:
    found = Parser(
        prog="python -m spec.check", epilog=HELP, allow_abbrev=False,
        description="Prove that real FlashAttention-4 masks equal a declarative spec.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("target", nargs="*", help="file.py::name or package.module:name")
    add("--vllm", action="append", default=[], metavar="WHAT",
        help="a version, wheel, URL, source tree, or 'installed' (repeatable)")
    add("--flash-attn", action="store_true", help="the kernels of the installed flash-attn-4")
    add("--fa4", metavar="PATH", help="the FA4 `cute` package to trace a vLLM source tree with")
    add("--compiler", choices=COMPILERS, default="auto",
        help="which compiler lifts a release's kernels, see below (default %(default)s)")
    add("--call", action="append", default=[], metavar="NAME=VALUE",
        help="an argument of the factory; @window passes the spec's symbol (repeatable)")
    add("--against", metavar="MASK",
        help="what a target must equal: a catalogue name, a composition, or a TOML file")
    add("--aux", default="", metavar="NAMES",
        help="which table of the spec each aux tensor is, separated by commas")
    add("--bind", action="append", default=[], metavar="NAME=INT",
        help="fix a parameter of the spec that is otherwise symbolic (repeatable)")
    add("--layer", action="append", default=[], choices=LAYERS,
        help="check only this layer (repeatable)")
    add("--full", action="store_true", help="every tile size and packing, which takes minutes")
    add("--no-cache", action="store_true", help="prove again what was proved before")
    add("--baseline", type=Path, metavar="FILE",
        help="an earlier --json: only what is new or worse fails")
    add("--matrix", type=Path, metavar="FILE",
        help="write releases by obligations, as Markdown")
    add("--refutations", type=Path, metavar="FILE",
        help="write every refuted obligation with its witness, as Markdown")
    add("--fast", action="store_true",
        help="only equality and overflow, of our own and of the newest cached release")
    add("--list", action="store_true", help="list targets and masks, and check nothing")
    add("--json", type=Path, metavar="FILE", help="write every result as JSON")
    add("--junit", type=Path, metavar="FILE", help="write every result as JUnit XML")
    add("--smtlib", type=Path, metavar="DIR", help="write every query as SMT-LIB")
    add("--rlimit", type=positive, default=20_000_000, metavar="N",
        help="solver steps for one query, deterministic (default %(default)s)")
    add("--timeout", type=positive, default=60, metavar="S",
        help="seconds for one query, as a backstop (default %(default)s)")
    add("--no-color", action="store_true", help="plain text")
    return found


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parser().parse_args(arguments)
        _consistent(options)
        status = listing(options) if options.list else run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # `head` has read enough. Python would flush, and fail, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if not _expected(error):
            raise
        install = ": install maskproof's dependencies" if isinstance(error, ImportError) else ""
        print(f"spec.check: {error}{install}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spec.check: interrupted", file=sys.stderr)
        return 130


def _expected(error: Exception) -> bool:
    """An error that says in one line what a person has to change."""
    from spec.term import SpecError

    known = {"ReleaseError", "VllmError", "LoadError", "CompilerError"}
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "").partition(".")[0] in DEPENDENCIES
    return isinstance(error, Usage | SpecError) or type(error).__name__ in known


def _consistent(options: argparse.Namespace) -> None:
    if options.target and (options.vllm or options.flash_attn):
        raise Usage("give a target or --vllm or --flash-attn, not both")
    if options.layer and options.layer != [MASK_MOD] and not (options.vllm or options.flash_attn):
        raise Usage("--layer needs --vllm or --flash-attn: nothing else has kernels")
    if options.compiler != "auto" and not options.vllm:
        raise Usage("--compiler is about the kernels of a release: it needs --vllm")
    if options.compiler == "pinned" and options.fa4:
        raise Usage("--compiler pinned is for a release's own FA4: leave --fa4 out")
    if options.fast and options.layer and options.layer != [MASK_MOD]:
        raise Usage("--fast is about mask_mods alone: leave --layer out")
    if options.flash_attn and options.layer == [MASK_MOD] and not options.vllm:
        raise Usage("--flash-attn has no mask_mods: leave --layer mask_mod out")
    for text in options.target:
        if found := RELEASE.fullmatch(text):
            raise Usage(f"{text} is no mask_mod; a release of vLLM is --vllm {found[1] or text}")
        if "::" not in text and Path(text).is_dir():
            raise Usage(f"{text} is a folder; a source tree of vLLM is --vllm {text}")
    if options.target and not options.against:
        raise Usage("say what the target must equal: --against MASK (see --list)")
    if not options.target:
        for name in ("call", "against", "aux", "bind"):
            if getattr(options, name):
                raise Usage(f"--{name} needs a target: path/to/file.py::name")
    named = ([text.partition("=")[0].strip() for text in given]
             for given in (options.call, options.bind))
    for given in (options.target, _names(options.aux), *named):
        if twice := next((name for i, name in enumerate(given) if name in given[:i]), None):
            raise Usage(f"{twice} is given twice")
    if options.fa4 and len(options.vllm) != 1:
        raise Usage("--fa4 needs --vllm, once")
    options.known = _baseline(options.baseline)
    for path in (options.json, options.junit, options.matrix, options.refutations):
        if path is not None:
            _writable(path)
    if options.smtlib is not None:
        try:
            options.smtlib.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Usage(f"{options.smtlib}: {error.strerror}") from None


def _baseline(path: Path | None) -> list[Any] | None:
    """The results of an earlier `--json`."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
        results = found["results"]
        for one in results:
            [one[name] for name in ("target", "obligation", "spec", "verdict", "expected")]
    except OSError as error:
        raise Usage(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Usage(f"{path}: not what --json writes") from None
    return results


def _writable(path: Path) -> None:
    """Known before anything is checked; what the file holds stays until then."""
    try:
        path.open("a").close()
    except OSError as error:
        raise Usage(f"{path}: {error.strerror}") from None


def listing(options: argparse.Namespace) -> int:
    from kernels import release
    from kernels.mask_mods import TARGETS
    from spec.masks import MASKS

    print("own targets (python -m spec.check):")
    wide, spec_wide = (max(len(getattr(target, name)) for target in TARGETS)
                       for name in ("target", "spec"))
    for target in TARGETS:
        bad = f"{target.spec:{spec_wide}}  known bad" if target.expected else target.spec
        print(f"  {target.target:{wide}}  {bad}")
    print("releases in the cache (python -m spec.check --vllm VERSION):")
    print("\n".join(f"  {found.name}" for found in release.cached()) or "  none")
    print("masks (python -m spec.show NAME):")
    wide = max(map(len, MASKS))
    for mask in MASKS.values():
        print(f"  {mask.name:{wide}}  {mask.sentence}")
    return 0


def constants(options: argparse.Namespace) -> dict[str, int]:
    """The `--bind` values, each a parameter of the mask and inside its range."""
    from spec.from_file import resolve

    found: dict[str, int] = {}
    for text in options.bind:
        name, _, value = text.partition("=")
        mask = resolve(options.against)
        if name not in mask.params:
            has = ", ".join(mask.params) or "none"
            raise Usage(f"--bind {text}: {options.against} has no parameter {name!r}; it has {has}")
        try:
            found[name] = mask.params[name].check(int(value))
        except ValueError:
            raise Usage(f"--bind {text}: write {name}=NUMBER") from None
    return found


def _names_known(options: argparse.Namespace, mask: Mask) -> None:
    """Every symbol of `--call` and every table of `--aux` is one that the spec can mean."""
    from spec.domain import PARAMS, TABLES

    for text in options.call:
        value = text.partition("=")[2].strip()
        if value[:1] == "@" and value[1:] not in mask.params:
            has = ", ".join(f"@{name}" for name in mask.params) or "none"
            raise Usage(f"--call {text}: {options.against} has no such parameter; it has {has}")
    known = [*TABLES, *mask.tables, *PARAMS, *mask.params]
    for name in _names(options.aux):
        if name not in known:
            has = ", ".join(sorted({*TABLES, *mask.tables}))
            held = (f"; a tensor of one element may hold {' or '.join(mask.params)}"
                    if mask.params else "")
            raise Usage(f"--aux {name}: no such table in {options.against} or the catalogue; "
                        f"there are {has}{held}")


def _counts_known(options: argparse.Namespace, mask: Mask, bound: Mapping[str, int]) -> None:
    """Whatever counts the turns of an `any` is bound: a proof writes them out."""
    from spec.environment import counting

    for name in counting(mask.given(_names(options.aux))):
        if name not in bound:
            some = max(mask.params[name].low, min(mask.params[name].high, 2))
            raise Usage(f"{options.against} needs a number for {name} "
                        f"({mask.params[name].meaning or 'a parameter'}): --bind {name}={some}")


def run(options: argparse.Namespace) -> int:
    from spec.from_file import resolve
    from spec.screen import Screen

    started = time.perf_counter()
    screen = Screen(color=not options.no_color)
    mask = resolve(options.against) if options.against else None
    if mask is not None:
        _names_known(options, mask)
    bound = constants(options)
    if mask is not None:
        _counts_known(options, mask, bound)
    with screen.progress("loading the compiler") as announce:
        from proofs.checks import Options
        from proofs.obligation import Limits

        limits = Limits(options.rlimit, options.timeout, options.smtlib)
        settings = Options(limits, FAST if options.fast else (), not options.fast, bound)
        pinned = {what: _by_pinned(options, what, settings, announce) for what in options.vllm}
        records: list[Any] = []

        def mask_mods() -> None:
            for release in options.vllm or ([] if options.flash_attn else [None]):
                records.extend(_mask_mods(options, release, settings, announce, pinned))

        around = _surroundings(options, settings, announce, pinned, mask_mods)
        if options.fast and not options.vllm and not options.target:
            records += _newest_cached(settings, announce)
        records += around
    if not records:
        raise Usage(f"nothing there to check for --layer {' or '.join(options.layer) or 'any'}")
    screen.lines(found for found in pinned.values() if isinstance(found, str) and found)
    seconds = time.perf_counter() - started
    _write(options, records, seconds)
    screen.report(records, seconds)
    return _status(options, records, screen)


def _layers(options: argparse.Namespace) -> list[str]:
    if options.fast:
        return [MASK_MOD]
    return [name for name in LAYERS if not options.layer or name in options.layer]


def _source(options: argparse.Namespace, release: str | None) -> dict[str, Any]:
    return {"vllm": release, "fa4": options.fa4, "call": options.call,
            "against": options.against or "full", "aux": _names(options.aux)}


def _kept(options: argparse.Namespace) -> Path | None:
    """The folder of verdicts that are not proved again."""
    from kernels import release

    return None if options.no_cache or options.smtlib else release.cache().parent / "verdicts"


Pinned = Mapping[str, list[Any] | str]


def _by_pinned(
    options: argparse.Namespace, what: str, settings: Any, announce: Any
) -> list[Any] | str:
    """The records of a release if the compiler that it pins lifts it; else why that does not,
    although the installed one does not either, or nothing."""
    from proofs import compilers

    layers = _layers(options)
    if options.compiler == compilers.INSTALLED or options.fa4:
        return ""
    return compilers.by_pinned(
        options.compiler, what, layers, settings, announce,
        full=options.full, cache=_kept(options), source=_source(options, what))


def _mask_mods(
    options: argparse.Namespace, release: str | None, settings: Any, announce: Any, pinned: Pinned
) -> list[Any]:
    """Records of the mask_mods of a release, of targets in files, or of the project's own."""
    from proofs.checks import check
    from proofs.replay import gather
    from proofs.report import record
    from spec.from_file import resolve
    from spec.screen import call

    if options.layer and MASK_MOD not in options.layer:
        return []
    there = pinned.get(release or "")
    if isinstance(there, list):
        return [one for one in there if one["layer"] == MASK_MOD]
    source = _source(options, release)
    with gather(options.target, **source, progress=announce) as targets:
        return [record(row, call(row.result.obligation.target, source))
                for row in check(targets, resolve, settings, announce)]


def _surroundings(
    options: argparse.Namespace, settings: Any, announce: Any, pinned: Pinned,
    beside: Callable[[], None],
) -> list[Any]:
    """Records of the other layers of each provider; `beside` is done meanwhile."""
    layers = [name for name in _layers(options) if name != MASK_MOD]
    if not layers or not (options.vllm or options.flash_attn):
        beside()
        return []
    from kernels import release
    from kernels.provider import installed, of_release
    from proofs import compilers
    from proofs.layers import check, nothing, units

    found = [installed()] if options.flash_attn else []
    records = []
    reasons = {}
    for what in options.vllm:
        if isinstance(pinned[what], list):
            records += [one for one in pinned[what] if one["layer"] != MASK_MOD]
            continue
        there = release.find(what, fa4=options.fa4, progress=announce)
        reasons[there.name] = pinned[what]
        if there.fa4 is None:
            why = "it has no FA4 of its own: give one with --fa4 PATH"
            records += [nothing(f"{there.name}/{layer}", layer, "UNSUPPORTED", why)
                        for layer in layers]
        else:
            found.append(of_release(there))
    announce("what surrounds the mask_mods")
    chosen = [unit for provider in found for unit in units(provider, layers, full=options.full)]
    rows = check(chosen, settings, announce, _kept(options), beside=beside)
    return [*records, *compilers.explained(rows, reasons)]


def _status(options: argparse.Namespace, records: list[Any], screen: Any) -> int:
    from proofs.baseline import against
    from proofs.report import exit_status

    if options.known is None:
        return exit_status(records)
    told, lines = against(records, options.known)
    screen.lines(lines)
    return exit_status(told)


def _newest_cached(settings: Any, announce: Any) -> list[Any]:
    """Records of the newest release in the cache that has mask_mods."""
    from kernels import release
    from kernels.vllm import VllmError
    from proofs.checks import check
    from proofs.replay import gather
    from proofs.report import record
    from spec.from_file import resolve

    for found in reversed(release.cached()):
        try:
            with gather(vllm=found.version) as targets:
                return [record(row) for row in check(targets, resolve, settings, announce)]
        except VllmError:
            continue  # older than the first mask_mod
    return []


def _names(text: str) -> tuple[str, ...]:
    """Names of tables, with or without their shape: `query_ranges[token, 2],cu_seqlens_q`."""
    plain = re.sub(r"\[[^\]]*\]", "", text)
    return tuple(name.strip() for name in plain.split(",") if name.strip())


def _write(options: argparse.Namespace, records: list[Any], seconds: float) -> None:
    from proofs.baseline import matrix, refutations
    from proofs.report import to_json, to_junit

    if options.json is not None:
        options.json.write_text(json.dumps(to_json(records, seconds), indent=1) + "\n")
    if options.junit is not None:
        options.junit.write_text(to_junit(records, seconds) + "\n")
    if options.matrix is not None:
        options.matrix.write_text(matrix(records))
    if options.refutations is not None:
        options.refutations.write_text(refutations(records))


if __name__ == "__main__":
    sys.exit(main())
