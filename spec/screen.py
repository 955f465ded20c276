"""What a check looks like in a terminal: progress while it runs, then a table and explanations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Record = Mapping[str, Any]
STYLES = {"PROVED": "green", "REFUTED": "bold red"}
UNDECIDED, AS_EXPECTED = "bold yellow", "dim green"
# A line of the table is never broken where output goes to a file or a pipe.
PIPE_WIDTH, NARROWEST = 240, 120
FEW = 3  # of what is only listed in JSON
# Layers by what a refutation in them means for those who serve with a release.
MATTERS = {
    "mask_mod": "wherever the mask_mod is called",
    "dispatch": "in the calls that the release itself makes, or a caller with these flags",
    "metadata": "in every batch of that kind", "builtin": "wherever the kernel applies that mask",
    "tiles": "wherever the kernel visits these tiles",
    "keys": "where one process makes both calls",
    "sampling": "only where block sparsity is computed",
}


class Screen:
    def __init__(self, *, color: bool) -> None:
        plain = not sys.stdout.isatty()
        self.console = Console(
            no_color=not color or None, highlight=False, width=PIPE_WIDTH if plain else None
        )
        # A narrow terminal breaks lines better than a table does.
        self.console.width = max(self.console.width, NARROWEST)

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        if not self.console.is_terminal:
            yield lambda text: None
            return
        with self.console.status(text) as status:
            yield lambda text: status.update(text)

    def lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)

    def report(self, records: Sequence[Record], seconds: float) -> None:
        self.console.print(_table(records))
        self.console.print()
        for line in _assumed(records):
            self.console.print(line, markup=False, soft_wrap=True)
        for line in dict.fromkeys(one["fa4"] for one in records if one["fa4"]):
            self.console.print(f"traced with {line}", markup=False)
        for one in records:
            if one["explanation"]:
                self.console.print()
                self.console.print(one["explanation"], markup=False, soft_wrap=True)
        self.console.print()
        for line in faults(records):
            self.console.print(line, markup=False, soft_wrap=True)
        self.console.print(_summary(records, seconds), markup=False)


def _table(records: Sequence[Record]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("verdict", "target", "obligation", "spec"):
        table.add_column(name, no_wrap=name == "verdict", overflow="fold")
    for name in ("mutants", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in records:
        verdict = one["verdict"]
        expected = verdict == one["expected"] and verdict != "PROVED"
        style = AS_EXPECTED if expected else STYLES.get(verdict, UNDECIDED)
        killed, total = one["mutants"]["killed"], one["mutants"]["total"]
        table.add_row(
            f"[{style}]{verdict}{' (expected)' if expected else ''}[/]", _plain(one["target"]),
            one["obligation"], _plain(one["spec"]),
            f"{killed}/{total}" if verdict == "PROVED" else "",
            "cached" if one["cached"] else f"{1000 * one['seconds']:.1f}",
        )
    return table


def _assumed(records: Sequence[Record]) -> Iterator[str]:
    """What the verdicts rest on: reasons, bounds, and every assumption once."""
    for one in records:
        if one["reason"]:
            yield f"{one['target']}: {one['reason']}"
    for one in records:
        if meaning := one["extra"].get("meaning"):
            yield meaning
        if calls := one["extra"].get("not_stated"):
            release = one["target"].partition("/")[0]
            yield (f"{release}: {len(calls)} combinations of flags for which it is not stated what "
                   "is meant (in --json), as")
            yield from (f"  {call}" for call in calls[:FEW])
    proved = [one for one in records if one["verdict"] == "PROVED"]
    for theory, names in _grouped((o["theory"], o["obligation"]) for o in proved).items():
        yield f"proved in {theory}: {', '.join(names)}"
    for bounds, targets in _grouped((o["bounds"], o["target"]) for o in proved).items():
        yield f"  {bounds}: {', '.join(targets)}"
    users = _grouped((fact, o["obligation"]) for o in proved for fact in o["assumptions"])
    for names, facts in _grouped((tuple(names), fact) for fact, names in users.items()).items():
        yield f"assumed by {', '.join(names)}:"
        yield from (f"  {fact}" for fact in facts)


def _grouped(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    found: dict[Any, dict[str, None]] = {}
    for key, member in pairs:
        found.setdefault(key, {})[member] = None
    return {key: list(members) for key, members in found.items()}


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def faults(records: Sequence[Record]) -> Iterator[str]:
    """What is wrong, in short: of each layer every cause once, and where it was seen."""
    wrong = [one for one in records
             if one["verdict"] == "REFUTED" and one["expected"] != "REFUTED"]
    if not wrong:
        return
    yield f"what is wrong ({len(wrong)} refuted):"
    for layer, matters in MATTERS.items():
        causes = _grouped((_cause(one), one["target"]) for one in wrong if one["layer"] == layer)
        if causes:
            yield f"  {layer}, which matters {matters}:"
        for cause, targets in causes.items():
            yield f"    {', '.join(targets)}: {cause}"
    yield ""


def _cause(one: Record) -> str:
    if one["diagnosis"]:
        return one["diagnosis"]["sentence"]
    return one["reason"] or f"{one['obligation']} does not hold"


def _summary(records: Sequence[Record], seconds: float) -> str:
    counts: dict[str, int] = {}
    for one in records:
        words = one["verdict"]
        if words == "REFUTED" and one["expected"] == "REFUTED":
            words = "REFUTED as expected"
        counts[words] = counts.get(words, 0) + 1
    solver = sum(one["seconds"] for one in records if not one["cached"])
    said = ", ".join(f"{count} {words}" for words, count in counts.items()) or "nothing checked"
    kept = sum(one["cached"] for one in records)
    cache = f", {kept} from the cache" if kept else ""
    return f"{said}{cache}; {seconds:.1f} s, of which {solver:.2f} s proofs and their mutants"


def call(target: str, source: Mapping[str, Any]) -> str:
    """The arguments of `proofs.replay.visible` that find a target again."""
    given = {name: _anywhere(value) for name, value in source.items()
             if value and not (name == "against" and value == "full")}
    return ", ".join([repr(_anywhere(target)),
                      *(f"{name}={value!r}" for name, value in given.items())])


def _anywhere(value: Any) -> Any:
    """A path, alone or before `::`, so that it holds in every folder; anything else as it is."""
    if not isinstance(value, str):
        return value
    file, colons, name = value.partition("::")
    return f"{Path(file).resolve()}{colons}{name}" if Path(file).exists() else value
