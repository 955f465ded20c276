"""`python -m fuzz.campaign`: campaigns that a file describes, and the store that they fill."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz import run as command
from fuzz.run import CannotRun, Parser, Usage, process_start, said
from fuzz.serve import PORT, beside, port

if TYPE_CHECKING:
    from fuzz.service.campaign_file import Campaign
    from fuzz.service.modes import Reviewed
    from fuzz.service.store import Store

# What the extra `service` brings.
EXTRA = ("sqlalchemy", "alembic", "psycopg")

HELP = """\
docs/campaigns.md has every key of a campaign's file. A campaign that is started again
goes on where it was, whatever ended it; what ended is in the store once.

examples:
  python -m fuzz.campaign run nightly.toml
  python -m fuzz.campaign run examples/laptop.toml --serve
  python -m fuzz.campaign status nightly.toml
  python -m fuzz.campaign triage nightly.toml 0123456789ab wontfix --reason "padded rows"
  python -m fuzz.campaign export nightly.toml --known known.json
  python -m spec.check --vllm 0.33.0 --json check.json
  python -m fuzz.campaign record nightly.toml check.json

exit status of run: as of fuzz.run; in mode pr 0 nothing new, 1 something new; 2 bad usage; 3 it
could not run.
"""
DECISIONS = ("accept", "wontfix", "infrastructure", "reopen")
# Seconds that a campaign takes to end, at most.
ENDING = 60.0


def parser() -> Parser:
    found = Parser(
        prog="python -m fuzz.campaign", epilog=HELP, allow_abbrev=False,
        description="Run campaigns for days, and keep what they find.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(dest="command", required=True, parser_class=Parser)

    def add(name: str, text: str) -> Any:
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("file", type=Path, metavar="FILE", help="the campaign's file, as TOML")
        return one.add_argument

    option = add("run", "run the campaign until its budget is over")
    option("--budget", type=command.duration, metavar="TIME", help="instead of the file's")
    option("--serve", action="store_true", help="show a dashboard of it while it runs")
    option("--port", type=port, default=PORT, help="the dashboard's (default %(default)s)")
    for kind, text in (("summary", "Markdown"), ("junit", "JUnit XML"), ("sarif", "SARIF")):
        option(f"--{kind}", type=Path, metavar="OUT", help=f"mode pr: what is new, as {text}")
    add("status", "say what the campaign and its store have")
    add("stop", "end the campaign that runs, and wait until it has")
    option = add("export", "write all that the store has as JSON")
    option("--to", type=Path, metavar="OUT", help="a file instead of standard output")
    option("--known", type=Path, metavar="OUT", help="only the suite of known issues")
    option("--regressions", type=Path, metavar="DIR",
           help="only the findings that are fixed, as files for a regression corpus")
    option = add("triage", "decide about a finding")
    option("fingerprint")
    option("decision", choices=DECISIONS)
    option("--reason", default="", help="why; only accept needs none")
    option = add("record", "store the verdicts of a check")
    option("check", type=Path, nargs="+", metavar="CHECK.json", help="what spec.check --json wrote")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    if arguments is None:
        begun = process_start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, command.INTERRUPT)
    try:
        options = parser().parse_args(arguments)
        return COMMANDS[options.command](options, begun)
    except KeyboardInterrupt:
        return said(3, "interrupted before anything ran", "fuzz.campaign")
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        return said(3, f"{error.name} is not installed: pip install 'maskproof[service]'",
                    "fuzz.campaign")
    except Exception as error:
        if (status := expected(error)) is None:
            raise
        return said(status, str(error), "fuzz.campaign")


def expected(error: Exception) -> int | None:
    """The exit status of an error that says in one line what a person has to change."""
    name = type(error).__name__
    if name in ("CampaignError", "SuiteError", "TriageError"):
        return 2
    if name in ("StoreError", "Away") or isinstance(error, OSError):
        return 3
    return command.expected(error)


def loaded(options: argparse.Namespace) -> Campaign:
    from fuzz.service.campaign_file import load

    return load(options.file)


def run(options: argparse.Namespace, begun: float) -> int:
    from dataclasses import replace

    campaign = loaded(options)
    if options.budget:
        campaign = replace(campaign, budget=options.budget)
    if campaign.mode == "coverage":
        return coverage(campaign)

    from fuzz.service import modes
    from fuzz.service.running import running

    with beside(options.file, options.port) if options.serve else nullcontext(), \
            running(campaign, begun + campaign.budget) as work:
        if campaign.mode == "batch":
            return modes.batch(work)
        if campaign.mode == "prune":
            return modes.prune(work)
        found, seconds = modes.pr(work), time.monotonic() - begun
        work.screen.note("")
        for line in modes.lines_of(found, seconds):
            sys.stdout.write(line + "\n")
        written(options, found, seconds)
        return found.status


def written(options: argparse.Namespace, found: Reviewed, seconds: float) -> None:
    """Writes the reports of a `pr` run that were asked for."""
    from fuzz.service.reports import entries, to_junit, to_markdown, to_sarif

    listed = entries(found.new, found.regressed, found.known, found.reasons)
    root = Path.cwd()
    for path, text in ((options.summary, lambda: to_markdown(listed)),
                       (options.junit, lambda: to_junit(listed, seconds)),
                       (options.sarif, lambda: to_sarif(listed, root))):
        if path is not None:
            path.write_text(text(), encoding="utf-8")


@contextmanager
def store_of(campaign: Campaign) -> Iterator[Store]:
    """The campaign's store, if there is one. Raises StoreError or Away."""
    from fuzz.service.store import StoreError, opened, url_of

    url = url_of(campaign.store, campaign.findings)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        raise StoreError(f"no store yet at {url.database}: run the campaign first")
    store = opened(url)
    try:
        yield store
    finally:
        store.close()


def status(options: argparse.Namespace, begun: float) -> int:
    from fuzz.screen import figures
    from fuzz.service import reads

    campaign = loaded(options)
    runs = "runs" if is_running(campaign) else "does not run"
    sys.stdout.write(f"{campaign.name}: {runs} here\n")
    with store_of(campaign) as store, store.reading() as connection:
        for one in reads.all_campaigns(connection):
            last, states = one["run"], one["findings"]
            seconds = sum(row["seen"] - row["started"]
                          for row in reads.all_runs(connection, one["id"], limit=2**20))
            sys.stdout.write(f"{one['name']} ({one['mode']}): {state_of(one)}\n")
            sys.stdout.write(f"  {'; '.join(figures(one['totals'], max(seconds, 1)))}\n")
            found = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            sys.stdout.write(f"  findings: {found or 'none'}\n")
            if last is not None:
                sys.stdout.write(f"  on {last['backend']} ({last['device']})\n")
    return 0


def state_of(campaign: dict[str, Any]) -> str:
    if (last := campaign["run"]) is None:
        return "never ran"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["seen"]))
    if campaign["alive"]:
        return f"runs, heard of at {when}"
    return f"ended at {when}: {last['because'] or 'it ended without a word'}"


def is_running(campaign: Campaign) -> bool:
    """Whether a process has the findings folder."""
    import fcntl

    try:
        with (campaign.findings / "state" / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def stop(options: argparse.Namespace, begun: float) -> int:
    from fuzz.service.running import STOP

    campaign = loaded(options)
    if not is_running(campaign):
        sys.stdout.write(f"{campaign.name} does not run here\n")
        return 0
    asked = campaign.findings / "state" / STOP
    asked.touch()
    until = time.monotonic() + ENDING
    while is_running(campaign):
        if time.monotonic() > until:
            raise CannotRun(f"{campaign.name} has not ended within {ENDING:g} s; it was asked to")
        time.sleep(0.2)
    asked.unlink(missing_ok=True)
    sys.stdout.write(f"{campaign.name} has ended\n")
    return 0


def export(options: argparse.Namespace, begun: float) -> int:
    from fuzz.service import known
    from fuzz.service.exporting import everything
    from fuzz.service.reads import all_documents

    with store_of(loaded(options)) as store, store.reading() as connection:
        rows = all_documents(connection)
        if options.known is not None:
            options.known.write_text(json.dumps(known.to_json(rows), indent=1) + "\n")
        if options.regressions is not None:
            known.save_fixed(options.regressions, rows)
        if options.to is None and (options.known or options.regressions):
            return 0
        text = json.dumps(everything(connection), indent=1) + "\n"
    if options.to is not None:
        options.to.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


def triage(options: argparse.Namespace, begun: float) -> int:
    from fuzz.service.records import happened
    from fuzz.service.triage import Accepted, Reopened, SetAside

    event: Any = SetAside(options.decision, options.reason)
    if options.decision in ("accept", "reopen"):
        event = Accepted() if options.decision == "accept" else Reopened(options.reason)
    with store_of(loaded(options)) as store, store.writing() as connection:
        now = happened(connection, options.fingerprint, event, int(time.time()), "command line")
    if now is None:
        raise Usage(f"the store has no finding {options.fingerprint}")
    sys.stdout.write(f"{options.fingerprint}: {now.state}\n")
    return 0


def record(options: argparse.Namespace, begun: float) -> int:
    from fuzz.service.records import record_verdicts

    with store_of(loaded(options)) as store:
        for path in options.check:
            try:
                given = json.loads(path.read_text())
                with store.writing() as connection:
                    changed = record_verdicts(connection, given, int(path.stat().st_mtime))
            except (ValueError, KeyError, TypeError):
                raise Usage(f"{path}: not what spec.check --json writes") from None
            sys.stdout.write(f"{path}: {changed} verdicts are new or others than before\n")
    return 0


def coverage(campaign: Campaign) -> int:
    """Prints of each path how many boundary classes were reached, and which were not."""
    from fuzz.service.reads import boundaries, campaign_of, coverage_table

    with store_of(campaign) as store, store.reading() as connection:
        if (one := campaign_of(connection, campaign.name)) is None:
            raise CannotRun(f"the store knows no campaign {campaign.name!r}")
        rows = coverage_table(connection, one["id"])
        sys.stdout.write("".join(line + "\n" for line in covered(rows)))
        missing = [row["boundary"] for row in boundaries(connection, one["id"])
                   if not row["count"]]
        if missing:
            sys.stdout.write(f"reached nowhere: {', '.join(missing)}\n")
    return 0


def covered(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The coverage table in columns, and what share of all combinations was reached."""
    heads = ("reached", "of", "share", "release", "target", "spec", "where", "layout", "flags")
    table = [heads, *(
        (str(row["reached"]), str(row["combinations"]),
         f"{row['reached'] / max(row['combinations'], 1):.0%}",
         *(row[name] or "-" for name in heads[3:])) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in table]
    reached, whole = (sum(row[name] for row in rows) for name in ("reached", "combinations"))
    return [*lines, f"{reached} of {whole} combinations ({reached / max(whole, 1):.0%})"]


COMMANDS: dict[str, Callable[[argparse.Namespace, float], int]] = {
    "run": run, "status": status, "stop": stop, "export": export, "triage": triage,
    "record": record,
}

if __name__ == "__main__":
    sys.exit(main())
