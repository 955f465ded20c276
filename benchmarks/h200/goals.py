"""What was to be shown, and what the record says of it. Reads the record and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Section = dict[str, Any]
CELLS = 10**11
CELLS_RATIO, SEQUENCES_RATIO, SHARE, TO_RANDOM, COMPILING = 1000, 900, 0.85, 1.05, 5
QUERIES, KEYS, SEEDS = 4, 8, 5


@dataclass(frozen=True, slots=True)
class Goal:
    """`figure` and `met` are asked of the section, which is there."""

    section: str
    text: str
    figure: Callable[[Section], str]
    met: Callable[[Section], bool]


def cells_of(provider: str) -> Goal:
    def figure(section: Section) -> str:
        one = section["providers"][provider]
        return f"{one.get('cells', 0):.3g} cells, {one.get('wrong_cells', 0):,} wrong"

    def met(section: Section) -> bool:
        one = section["providers"][provider]
        return one.get("cells", 0) >= CELLS and not one["wrong_cells"]

    return Goal("cells", f"{provider}: at least 10^11 cells of the masks that it can be asked for, "
                "none wrong", figure, met)


def zeros(section: Section) -> list[tuple[str, str, str, str]]:
    """Provider, target, layout and class of what could be met and was not."""
    return [
        (part["provider"], group["target"], group["layout"], name)
        for part in section["parts"] for group in part.get("groups", ())
        for name, count in group["classes"].items() if count == 0
    ]


def unmet(section: Section) -> list[str]:
    """Campaigns that did not end as they should, and masks that they did not come to."""
    ended = [one["provider"] for one in section["providers"].values()
             if one["status"] or not one.get("cells") or one.get("infrastructure")]
    return ended + [f"{part['provider']} {part['spec']}" for part in section["parts"]
                    if not part["cells"]]


def classes_met(section: Section) -> str:
    counts = [count for part in section["parts"] for group in part.get("groups", ())
              for count in group["classes"].values()]
    shown = sum(1 for count in counts if not isinstance(count, str) and count)
    return f"{shown:,} of {shown + len(zeros(section)):,} that are possible"


def searches(section: Section) -> list[Section]:
    return section["searches"]


def replayed(section: Section) -> list[Section]:
    return [each for each in searches(section) if "replayed" in each]


def within(each: Section) -> bool:
    return "queries" in each and each["queries"] <= QUERIES and each["keys"] <= KEYS


def larger(section: Section) -> dict[str, str]:
    """The targets that did not always come down to so little, with the least that each came to."""
    sizes: dict[str, list[tuple[int, int]]] = {}
    for each in searches(section):
        if "queries" in each and not within(each):
            sizes.setdefault(each["target"], []).append((each["keys"], each["queries"]))
    return {name: f"{q} x {k} at best" for name, all_ in sizes.items() for k, q in [min(all_)]}


def slowest(section: Section) -> str:
    found = [each["seconds"] for each in searches(section) if each.get("kind")]
    return (f"{len(found)} of {len(searches(section))} searches; "
            f"{max(found, default=0):.1f} s at most")


def lowest(name: str) -> Callable[[Section], tuple[float, str]]:
    return lambda section: min((at(each, name), each["spec"]) for each in section["specs"])


def highest(name: str) -> Callable[[Section], tuple[float, str]]:
    return lambda section: max((at(each, name), each["spec"]) for each in section["specs"])


def at(each: Section, path: str) -> float:
    value: Any = each
    for name in path.split("."):
        value = value[name]
    return value


def least(path: str, text: str, goal: float, form: str) -> Goal:
    worst = lowest(path)
    return Goal("speed", text, lambda s: f"{form.format(worst(s)[0])} at least ({worst(s)[1]})",
                lambda s: worst(s)[0] >= goal)


def planted_found(section: Section) -> bool:
    planted = section["planted"]
    return len(planted) == 3 and all(
        each.get("kinds", {}).get(each["expected"]) and set(each["kinds"]) == {each["expected"]}
        and each["cells"] and not each["wrong_cells"] for each in planted)


def planted_figure(section: Section) -> str:
    return "; ".join(
        f"{each['mask_mod']}: " + ", ".join(
            f"{count} {kind}" for kind, count in each.get("kinds", {}).items())
        + f", {each.get('cells', 0):.3g} cells beside" for each in section["planted"]
    ) or "not run"


def goals() -> Iterator[Goal]:
    yield from map(cells_of, ("upstream", "vllm-0.33.0"))
    yield Goal("cells", "every boundary class that a mask, a target and a layout can have is met",
               classes_met, lambda s: not zeros(s) and not unmet(s))
    yield Goal("found", f"every faulty call is found from a cold start with each of {SEEDS} seeds",
               slowest, lambda s: all(each.get("kind") for each in searches(s))
               and all(len({one["seed"] for one in searches(s) if one["target"] == target})
                       >= SEEDS for target in s["wanted"]))
    yield Goal("found", f"and comes down to {QUERIES} queries and {KEYS} keys",
               lambda s: f"{sum(map(within, searches(s)))} of {len(searches(s))}"
               + "".join(f"; {name} to {size}" for name, size in larger(s).items()),
               lambda s: all(map(within, searches(s))))
    yield Goal("found", "its shell line replays it, tried of each call once",
               lambda s: f"{sum(e['replayed'] for e in replayed(s))} of {len(replayed(s))}",
               lambda s: len(replayed(s)) == len({e["target"] for e in searches(s)})
               and all(e["replayed"] for e in replayed(s)))
    yield Goal("controls", "the right calls beside the faulty ones show nothing",
               lambda s: f"{sum(e['findings'] for e in s['controls'])} findings in "
               f"{len(s['controls'])} campaigns, "
               f"{sum(e['cells'] for e in s['controls']):.3g} cells",
               lambda s: all(not e["findings"] and not e["status"] and e["cells"]
                             for e in s["controls"]))
    yield Goal("longest", "one leaked key of 147,456 is read out",
               lambda s: "; ".join(f"{name}: {one['leaky']['counts'] or 'nothing'}"
                                   for name, one in s["providers"].items()),
               lambda s: all(one["leaky"]["counts"] == {"leak": 1} and not one["right"]["counts"]
                             for one in s["providers"].values()))
    yield Goal("longest", "and the usual test does not see it",
               lambda s: "; ".join(
                   f"{name}: largest difference {one['usual']['largest_difference']:.2g}, "
                   + ("agrees" if one["usual"]["agrees"] else "differs")
                   for name, one in s["providers"].items()),
               lambda s: all(one["usual"]["agrees"] for one in s["providers"].values()))
    yield least("cells_ratio", f"{CELLS_RATIO:,} times the cells/s of the usual test",
                CELLS_RATIO, "{:,.0f} times")
    yield least("sequences_ratio", f"{SEQUENCES_RATIO} times its sequences/s", SEQUENCES_RATIO,
                "{:,.0f} times")
    yield least("pipeline.kernel_share", f"the kernels take {SHARE:.0%} of the time", SHARE,
                "{:.1%}")
    worst = highest("long.to_random")
    yield Goal("speed", f"read-out data takes a kernel at most {TO_RANDOM} times the time of "
               "random data, at 4,096 keys", lambda s: f"{worst(s)[0]:.3f} times at most "
               f"({worst(s)[1]})", lambda s: worst(s)[0] <= TO_RANDOM)
    yield Goal("compile", f"64 kernels in 16 processes {COMPILING} times as fast as one by one",
               lambda s: f"{s['ratio']:.2f} times: {s['parallel']['seconds']:.1f} s beside "
               f"{s['one_by_one_seconds_scaled']:.1f} s", lambda s: s["ratio"] >= COMPILING)
    yield Goal("isolation", "a hang and two crashes are findings, and the campaign goes on",
               planted_figure, planted_found)
    yield Goal("killed", "kill -9 of a child and of a campaign loses nothing; it resumes",
               lambda s: f"{s['killed']['when_the_campaign_was_killed']['launches']:,} launches "
               f"before, {s['killed']['in_all']['launches']:,} in all",
               lambda s: s["killed"]["nothing_lost"] and s["killed"]["resumed"]
               and not s["killed"]["findings"])
    yield Goal("confirm", "what proofs refute is wrong on the GPU, on every cell as is claimed",
               lambda s: f"{sum(bool(e.get('as_predicted')) for e in s['claims'])} of "
               f"{len(s['claims'])} claims, {sum(e.get('cells', 0) for e in s['claims']):.3g} "
               "cells",
               lambda s: bool(s["claims"]) and all(e.get("as_predicted") for e in s["claims"]))
    yield Goal("numerics", "random data agrees with float32",
               lambda s: f"{sum(bool(e.get('agrees')) for e in done(s))} of {len(done(s))} calls",
               lambda s: all(e.get("agrees") for e in done(s)))


def done(section: Section) -> list[Section]:
    """The calls that the provider does."""
    return [each for each in section["calls"] if "not_done" not in each]


def problems(record: dict[str, Section]) -> list[str]:
    """Where the record contradicts itself."""
    return [f"{name}: {text}" for name, section in record.items()
            for check in (whole, CHECKS.get(name, lambda section: iter(())))
            for text in check(section)]


def whole(section: Section) -> Iterator[str]:
    """Whether all of a section was run, and where it is to be."""
    if "H200" not in section["gpu"]:
        yield f"run on {section['gpu']}"
    for option in ("--backend", "--spec", "--target"):
        if option in section["command"].split():
            yield f"run with {option}"


def near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b))


def cells_problems(section: Section) -> Iterator[str]:
    for provider, total in section["providers"].items():
        parts = [part for part in section["parts"] if part["provider"] == provider]
        for name in ("cells", "sequences"):
            if total.get(name, 0) != sum(part[name] for part in parts):
                yield f"{name} of {provider} is not the sum of its parts"
        if len({part["spec"] for part in parts}) != len(parts):
            yield f"{provider} has a mask twice"
        if {part["spec"] for part in parts} & set(section["not_expressed"][provider]):
            yield f"{provider} has a mask that it cannot express"
    for part in section["parts"]:
        for name in ("one query", "no key"):
            counts = [group["classes"][name] for group in part.get("groups", ())]
            if sum(count for count in counts if not isinstance(count, str)) > part["sequences"]:
                yield f"{part['provider']} {part['spec']}: more in {name!r} than there are"


def found_problems(section: Section) -> Iterator[str]:
    pairs = [(each["release"], each["target"], each["backend"], each["seed"])
             for each in section["searches"]]
    if len(set(pairs)) != len(pairs):  # where one is missing the goal is missed
        yield "a call has a seed twice"
    if any(each["status"] != 1 for each in section["searches"] if each.get("kind")):
        yield "a finding without status 1"


def speed_problems(section: Section) -> Iterator[str]:
    for each in section["specs"]:
        line, usual = each["pipeline"], each["usual"]
        for text, a, b in (
            ("cells/s", line["cells_per_second"], line["cells"] / line["seconds"]),
            ("sequences/s", line["sequences_per_second"], line["sequences"] / line["seconds"]),
            ("kernel share", line["kernel_share"], line["kernel_seconds"] / line["seconds"]),
            ("cells ratio", each["cells_ratio"],
             line["cells_per_second"] / usual["cells_per_second"]),
            ("sequences ratio", each["sequences_ratio"],
             line["sequences_per_second"] / usual["cases_per_second"]),
        ):
            if not near(a, b):
                yield f"{each['spec']}: {text} is not what follows from the rest"
        if line["wrong"] or usual["agree"] != usual["cases"]:
            yield f"{each['spec']}: timed something that is wrong"


def compile_problems(section: Section) -> Iterator[str]:
    one = section["one_by_one"]["seconds"] * section["kernels"] / section["alone"]
    if not near(one, section["one_by_one_seconds_scaled"]) or not near(
            section["ratio"], one / section["parallel"]["seconds"]):
        yield "the ratio is not what follows from the rest"
    if section["parallel"]["kernels_in_the_cache"] < section["kernels"]:
        yield "fewer kernels in the cache than were to be compiled"


def killed_problems(section: Section) -> Iterator[str]:
    killed = section["killed"]
    for name, count in killed["when_the_campaign_was_killed"].items():
        if (killed["in_all"][name] - killed["second_run"][name] == count) < killed["nothing_lost"]:
            yield f"{name} do not add up"


def confirm_problems(section: Section) -> Iterator[str]:
    for each in section["claims"]:
        name = f"{each['target']} {each['obligation']}"
        shown = each.get("refused") or each.get("wrong") and not each.get("unlike")
        if each.get("as_predicted") and ("error" in each or not shown):
            yield f"{name}: as predicted, and nothing shows it"
        if each.get("as_predicted") and each["kind"] == "key" and each["by_itself"]:
            yield f"{name}: the later call is wrong by itself"
    if len({each["digest"] for each in section["claims"]}) != len(section["claims"]):
        yield "a claim is there twice"


CHECKS: dict[str, Callable[[Section], Iterator[str]]] = {
    "cells": cells_problems, "found": found_problems, "speed": speed_problems,
    "compile": compile_problems, "killed": killed_problems,
    "confirm": confirm_problems,
}
