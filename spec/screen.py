"""What a check looks like in a terminal: progress while it runs, then a table and explanations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from proofs.checks import Row

STYLES = {"PROVED": "green", "REFUTED": "bold red"}
UNDECIDED, AS_EXPECTED = "bold yellow", "dim green"
# A line of the table is never broken where output goes to a file or a pipe.
PIPE_WIDTH, NARROWEST = 240, 120


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

    def report(self, rows: Sequence[Row], source: Mapping[str, Any], seconds: float) -> None:
        from proofs.report import explain

        self.console.print(_table(rows))
        self.console.print()
        for line in _assumed(rows):
            self.console.print(line, markup=False, soft_wrap=True)
        for line in dict.fromkeys(row.fa4 for row in rows if row.fa4):
            self.console.print(f"traced with {line}", markup=False)
        for row in rows:
            if row.result.verdict.value == "REFUTED":
                self.console.print()
                self.console.print(explain(row, _call(row, source)), markup=False, soft_wrap=True)
        self.console.print()
        self.console.print(_summary(rows, seconds), markup=False)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("verdict", "target", "obligation", "spec"):
        table.add_column(name, no_wrap=name == "verdict", overflow="fold")
    for name in ("mutants", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result, obligation = row.result, row.result.obligation
        verdict = result.verdict.value
        expected = result.as_expected and verdict != "PROVED"
        style = AS_EXPECTED if expected else STYLES.get(verdict, UNDECIDED)
        total = len(obligation.mutants)
        table.add_row(
            f"[{style}]{verdict}{' (expected)' if expected else ''}[/]", _plain(obligation.target),
            obligation.name, _plain(obligation.spec),
            f"{result.killed}/{total}" if verdict == "PROVED" else "",
            f"{1000 * result.seconds:.1f}",
        )
    return table


def _assumed(rows: Sequence[Row]) -> Iterator[str]:
    """What the verdicts rest on: reasons, bounds, and every assumption once."""
    from proofs.obligation import Verdict
    from spec.to_text import to_text

    for row in rows:
        if row.result.reason:
            yield f"{row.result.obligation.target}: {row.result.reason}"
    proved = [row.result.obligation for row in rows if row.result.verdict is Verdict.PROVED]
    for theory, names in _grouped((o.theory, o.name) for o in proved).items():
        yield f"proved in {theory}: {', '.join(names)}"
    for bounds, targets in _grouped((o.bounds, o.target) for o in proved).items():
        yield f"  {bounds}: {', '.join(targets)}"
    users = _grouped((to_text(fact), o.name) for o in proved for fact in o.assumptions)
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


def _summary(rows: Sequence[Row], seconds: float) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        words = row.result.verdict.value
        if words == "REFUTED" and row.result.as_expected:
            words = "REFUTED as expected"
        counts[words] = counts.get(words, 0) + 1
    solver = sum(row.result.seconds for row in rows)
    said = ", ".join(f"{count} {words}" for words, count in counts.items()) or "nothing checked"
    return f"{said}; {seconds:.1f} s, of which {solver:.2f} s proofs and their mutants"


def _call(row: Row, source: Mapping[str, Any]) -> str:
    """The arguments of `proofs.replay.visible` that find the row's target again."""
    given = {name: _anywhere(value) for name, value in source.items()
             if value and not (name == "against" and value == "full")}
    return ", ".join([repr(_anywhere(row.result.obligation.target)),
                      *(f"{name}={value!r}" for name, value in given.items())])


def _anywhere(value: Any) -> Any:
    """A path, alone or before `::`, so that it holds in every folder; anything else as it is."""
    if not isinstance(value, str):
        return value
    file, colons, name = value.partition("::")
    return f"{Path(file).resolve()}{colons}{name}" if Path(file).exists() else value
