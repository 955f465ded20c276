"""The page that is made from the record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.h200.goals import Section, done, goals, unmet, zeros
from benchmarks.h200.record import load

HEAD = """\
# What was shown on an H200

This page is made from `benchmarks/h200.json` by `python -m benchmarks.h200 --docs
benchmarks/h200.json`, and that record by `python -m benchmarks.h200 --json benchmarks/h200.json`
on a machine with one H200. A goal that was missed, or not tried, says so.
"""
METHODS = {
    "cells": "Each provider has one campaign, by the command that is shown. "
    "A table counts the sequences of each boundary class (`fuzz/boundaries.py`) by target and "
    "layout. A dash is a class that the mask, or the calls that are tried, cannot have; the reason "
    "is below the table.",
    "found": "Each search starts with a new folder; kernels that were compiled before are kept. "
    "Seconds are counted from the start of the process until the first finding lies in the folder; "
    "{at_once} searches run at once on the one GPU. In brackets stand queries x keys of the shrunk "
    "case. Paged keys with head dim 96 are a fault of the kernels themselves: without a causal or "
    "local mask a tile is 144 keys wide, cp.async loads 32 of them at a time, and the last load "
    "writes past the tile, into what other keys are read from. What it overwrites varies from run "
    "to run.",
    "controls": "The right calls beside those that are searched, each in a campaign of "
    "{control_seconds} s.",
    "longest": "A mask_mod that leaks one future key, in one row of the last chunk of a prefill. "
    "The usual test is `allclose` of the whole output at {tolerance} on random data, beside a "
    "dense float32 reference of the right mask.",
    "speed": "Both run on {provider} with the same mask_mod and the same sequences, of up to "
    "{longest} keys. The pipeline draws (in {processes} processes), packs, launches and compares, "
    "{in_flight} batches of {sequences} sequences in flight. The usual test launches one case of "
    "random data at a time beside a dense float32 reference on the GPU; the fastest of four ways "
    "to write it counts, and moving lengths and tables to the GPU is not counted.",
    "compile": "All processes are forked from one that has imported everything; the cache is empty "
    "each time. One by one {alone} of the {kernels} kernels were compiled, and their time is "
    "scaled to {kernels}.",
    "isolation": "The mask_mods of `tests/gpu/planted.py` spin for ever, write to an address that "
    "is not there, or trap, at one cell; a launch may take {deadline_seconds} s. Launches without "
    "that cell are to go on.",
    "killed": "A campaign's child and then the campaign itself are killed, and it is started "
    "again.",
    "numerics": "Standard normal data beside float32: largest absolute differences.",
    "confirm": "Each refuted obligation about what a kernel does (`benchmarks/claims.json`, "
    "[findings.md](findings.md)): its call is made, with the proof's witness among {sequences} "
    "sequences, and the mask read out twice, beside the mask that is meant and beside the one that "
    "the proof says the kernel applies. Of two calls with one compile key the later is read out, "
    "after the earlier and by itself, in processes of their own. Blocks that FA4 classifies by "
    "five cells are held against all their cells, and against these five.",
    "tune": "The comparison of one batch of {cells} cells, by how it is cut up.",
}


def page(path: Path) -> str:
    record = load(path)
    parts = [HEAD, "## Goals\n", *table(["goal", "figure", ""], goal_rows(record))]
    for name, method in METHODS.items():
        if name in record:
            section = record[name]
            parts += ["", f"## {name}", "", method.format(**texts(section)), "", made(section), "",
                      *BODIES[name](section)]
    return "\n".join(parts) + "\n"


def texts(section: Section) -> dict[str, str]:
    return {name: f"{value:,}" if isinstance(value, int) else str(value)
            for name, value in section.items() if not isinstance(value, list | dict)}


def goal_rows(record: dict[str, Section]) -> Iterator[list[str]]:
    for goal in goals():
        if goal.section not in record:
            yield [goal.text, "", "**not run**"]
            continue
        section = record[goal.section]
        yield [goal.text, goal.figure(section), "met" if goal.met(section) else "**missed**"]


def made(section: Section) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in section["versions"].items())
    return (f"`{section['command']}`: {section['gpu']}, {section['date']}, "
            f"{section['seconds']:.0f} s; {versions}.")


def table(heads: list[str], rows: Iterable[list[Any]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(cell(each) for each in row) + " |" for row in rows]


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{count:,} {name}" for name, count in value.items()) or "none"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def cells_body(section: Section) -> Iterator[str]:
    for provider, total in section["providers"].items():
        parts = [part for part in section["parts"] if part["provider"] == provider]
        yield f"### {provider}\n"
        yield from table(
            ["mask", "cells", "sequences", "launches"],
            [[part["spec"], *(part[name] for name in ("cells", "sequences", "launches"))]
             for part in parts]
            + [["all", *(total.get(name, 0) for name in ("cells", "sequences", "launches"))]])
        yield (f"\n{total.get('wrong_cells', 0):,} wrong; {total.get('kernels', 0)} kernels; "
               f"status {total['status']}.\n")
        if missing := section["not_expressed"][provider]:
            yield f"Without a target of the command on {provider}: {', '.join(missing)}.\n"
        yield f"By `{total['command']}`.\n"
    yield "Never met, though possible: " + ("; ".join(map(", ".join, zeros(section))) or "none.")
    yield "Campaigns that did not end with status 0, or met trouble: " + (
        ", ".join(unmet(section)) or "none.")
    yield ""
    for spec in dict.fromkeys(part["spec"] for part in section["parts"]):
        yield from class_table(spec, [part for part in section["parts"] if part["spec"] == spec])


def class_table(spec: str, parts: list[Section]) -> Iterator[str]:
    """Sequences of one mask in each class, by provider, target and layout."""
    groups = [(part["provider"], group) for part in parts for group in part.get("groups", ())]
    if not groups:
        return
    yield f"<details><summary>{spec}: sequences in each class</summary>\n"
    reasons: dict[str, list[str]] = {}
    rows = []
    for name in groups[0][1]["classes"]:
        counts = [group["classes"][name] for _, group in groups]
        for (provider, group), count in zip(groups, counts, strict=True):
            if isinstance(count, str):
                where = f"{short(provider, group['target'])} {group['layout']}"
                reasons.setdefault(f"{name}: {count}", []).append(where)
        if not all(isinstance(count, str) for count in counts):
            rows.append([name, *("–" if isinstance(count, str) else
                                 count or "**0**" for count in counts)])
    yield from table(["class", *(f"{provider}<br>{short(provider, group['target'])}<br>"
                                 f"{group['layout']}" for provider, group in groups)], rows)
    yield ""
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for text, where in reasons.items():
        name, _, reason = text.partition(": ")
        grouped.setdefault((reason, tuple(where)), []).append(name)
    for (reason, where), names in grouped.items():
        at = "" if len(where) == len(groups) else f" ({', '.join(where)})"
        yield f"- not possible, {reason}{at}: {', '.join(names)}"
    yield "\n</details>\n"


def short(provider: str, target: str) -> str:
    return target.removeprefix(f"{provider}/")


def found_body(section: Section) -> Iterator[str]:
    seeds = sorted({each["seed"] for each in section["searches"]})
    rows: dict[tuple[str, str], dict[int, Section]] = {}
    for each in section["searches"]:
        rows.setdefault((each["target"], each["backend"]), {})[each["seed"]] = each
    yield from table(
        ["faulty call", "back end", "kind", *(f"seed {seed}" for seed in seeds), "replayed"],
        [[target, backend, ", ".join(sorted({one.get("kind", "none") for one in by.values()})),
          *(search(by.get(seed, {})) for seed in seeds),
          any(one.get("replayed") for one in by.values())]
         for (target, backend), by in rows.items()])
    if section["searches"]:
        yield f"\nAs `{section['searches'][0]['command']}`."


def controls_body(section: Section) -> Iterator[str]:
    yield from table(
        ["right call", "status", "findings", "cells"],
        [[one["target"], one["status"], one["findings"], one["cells"]]
         for one in section["controls"]])


def search(each: Section) -> str:
    if not each.get("kind"):
        return "**not found**"
    return f"{each['seconds']:.1f} s ({each['queries']} x {each['keys']})"


def longest_body(section: Section) -> list[str]:
    rows = []
    for name, one in section["providers"].items():
        usual = one["usual"]
        rows.append([name, one["leaky"]["cells"], one["leaky"]["counts"], one["right"]["counts"],
                     one["leaky"]["seconds"], usual["agrees"], usual["largest_difference"],
                     usual["in_the_leaked_row"], usual["rows"]])
    return table(["provider", "cells", "leaky kernel", "right kernel", "GPU s", "allclose agrees",
                  "largest difference", "in the leaked row", "rows compared"], rows)


def speed_body(section: Section) -> Iterator[str]:
    yield from table(
        ["mask", "mask_mod", "cells/s", "usual", "ratio", "sequences/s", "usual", "ratio",
         "kernel share", "usual test"],
        [[one["spec"], one["mask_mod"], one["pipeline"]["cells_per_second"],
          one["usual"]["cells_per_second"], one["cells_ratio"],
          one["pipeline"]["sequences_per_second"], one["usual"]["cases_per_second"],
          one["sequences_ratio"], f"{one['pipeline']['kernel_share']:.1%}",
          one["usual"]["variant"]] for one in section["specs"]])
    yield (f"\nKernel seconds of one launch of {section['long_sequences']} sequences of about "
           f"{section['long_keys']:,} keys:\n")
    names = ("readout_seconds", "random_seconds", "built_in_causal_seconds", "to_random",
             "to_causal")
    yield from table(
        ["mask", "read-out data", "random data", "built-in causal", "read-out : random",
         "mask_mod : causal"],
        [[one["spec"], *(one["long"][name] for name in names)] for one in section["specs"]])


def compile_body(section: Section) -> list[str]:
    return table(
        ["", "kernels", "processes", "seconds"],
        [["at once", section["kernels"], section["processes"], section["parallel"]["seconds"]],
         ["one by one", section["alone"], 1, section["one_by_one"]["seconds"]],
         ["one by one, scaled", section["kernels"], 1, section["one_by_one_seconds_scaled"]]])


def isolation_body(section: Section) -> Iterator[str]:
    yield from table(
        ["mask_mod", "findings", "launches", "cells compared beside", "wrong",
         "children restarted", "shrunk cases"],
        [[one["mask_mod"], one.get("kinds", {}), one.get("launches", 0), one.get("cells", 0),
          one.get("wrong_cells", 0), one.get("children_restarted", 0),
          "; ".join(f"{case['queries']} x {case['keys']}" for case in one.get("cases", ()))]
         for one in section["planted"]])


def killed_body(section: Section) -> Iterator[str]:
    killed = section["killed"]
    yield from table(
        ["", *killed["in_all"]],
        [[text, *killed[name].values()] for text, name in (
            ("when the campaign was killed", "when_the_campaign_was_killed"),
            ("second run", "second_run"), ("in all", "in_all"))])
    yield (f"\nThe child was killed after {killed['child_killed_after_launches']:,} launches, the "
           f"campaign after {killed['launches_after_the_child']:,}, with "
           f"{killed['begun_and_not_ended']} begun and not ended.")


def numerics_body(section: Section) -> Iterator[str]:
    yield from table(
        ["provider", "call", "rows", "output", "tolerance", "LSE", "tolerance", "agrees"],
        [[one["provider"], one["label"], *(one.get(name, one.get("error", "")) for name in (
            "rows", "out", "tolerance", "lse", "lse_tolerance", "agrees"))]
         for one in done(section)])
    yield from not_done(section)


def not_done(section: Section) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for one in section["calls"]:
        if "not_done" in one:
            reasons.setdefault(one["not_done"], []).append(one["label"])
    for reason, labels in reasons.items():
        yield f"\nNot done, {reason}: {'; '.join(labels)}."


def confirm_body(section: Section) -> Iterator[str]:
    yield from table(
        ["claim", "kernels", "cells", "wrong", "wrong as claimed", "the witness", "by itself"],
        [[f"{one['target']} {one['obligation']}: {one['sentence']}", one.get("fa4", ""),
          one.get("cells", ""), one.get("error") or one.get("refused") or one["wrong"],
          bool(one.get("as_predicted")), one.get("witness", {}).get("kind", ""),
          one.get("by_itself", "")] for one in section["claims"]])
    for why, names in section["not_here"].items():
        yield f"\nNot tried, {why}: {'; '.join(names)}."


def tune_body(section: Section) -> list[str]:
    names = ("tile", "span", "warps", "stripe", "compare_seconds", "wall_seconds", "wrong")
    return table(list(names), [[one[name] for name in names] for one in section["tried"]])


BODIES = {
    "cells": cells_body, "found": found_body, "controls": controls_body,
    "longest": longest_body, "speed": speed_body,
    "compile": compile_body, "isolation": isolation_body, "killed": killed_body,
    "numerics": numerics_body,
    "confirm": confirm_body, "tune": tune_body,
}
