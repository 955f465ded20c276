"""Campaigns as a person has them: the file, the commands, and what is left behind."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz import campaign as command
from fuzz.case import Case, Sequence
from fuzz.findings import load as load_finding
from fuzz.findings import save, stored
from fuzz.replay import replay
from fuzz.service import known
from fuzz.service.campaign_file import CAMPAIGN, TARGET, CampaignError, load
from fuzz.service.known import SuiteError
from fuzz.service.replaying import moved
from kernels.fa4 import Call
from kernels.target import Target
from tests.service_stores import finding

ROOT = Path(__file__).resolve().parent.parent
BAD = "known-bad/chunk-local-q"
HERE = str(Path(__file__).resolve())
FILE = """
[campaign]
name = "try"
backend = "cpu"
seed = 5
{campaign}
{target}
"""
OWN = '[[target]]\nnames = ["rswa"]'
TWIN = f'[[target]]\nnames = ["{BAD}"]'


def written(folder: Path, campaign: str = "launches = 3", target: str = OWN) -> Path:
    path = folder / "campaign.toml"
    path.write_text(FILE.format(campaign=campaign, target=target))
    return path


def ran(*arguments: object) -> int:
    return command.main([str(one) for one in arguments])


FAULTS = {
    "no TOML": ("[campaign", "not TOML"),
    "no campaign": ("[[target]]", "a [campaign] with a name is missing"),
    "no name": ("[campaign]", "[campaign] needs a name"),
    "another table": ('[campaign]\nname="x"\n[targets]', "did you mean target?"),
    "key": ('[campaign]\nname="x"\nbugdet="8h"', "has no key 'bugdet'; did you mean budget?"),
    "no such key": ('[campaign]\nname="x"\nzzz=1', "there are name, mode, budget"),
    "name": ('[campaign]\nname="a/b"', "[campaign] name: 'a/b' is not 1 to 64 letters"),
    "mode": ('[campaign]\nname="x"\nmode="fast"', "not one of batch, pr, prune, coverage"),
    "budget": ('[campaign]\nname="x"\nbudget="soon"', 'not a time such as "60s"'),
    "budget as a number": ('[campaign]\nname="x"\nbudget=60', 'not a time such as "60s"'),
    "seed": ('[campaign]\nname="x"\nseed=-1', "not a whole number from 0 to 4294967295"),
    "true": ('[campaign]\nname="x"\nworkers=true', "not a whole number from 1 to 1024"),
    "tracked": ('[campaign]\nname="x"\ntracked="0.33.0"', "not a list of texts"),
    "target": ('target = 3\n[campaign]\nname="x"', "targets are written as [[target]]"),
    "two sources": ('[campaign]\nname="x"\n[[target]]\nvllm="1"\nfile="a.py::b"',
                    "[[target]] 1 has both vllm and file"),
    "fa4": ('[campaign]\nname="x"\n[[target]]\nfa4="a"', "[[target]] 1 fa4: needs vllm"),
    "fa4 beside others": ('[campaign]\nname="x"\n[[target]]\nvllm="1"\nfa4="a"\n[[target]]',
                          "would be that of every other [[target]]"),
    "spec": ('[campaign]\nname="x"\n[[target]]\nspec="causal"', "write specs = [...]"),
    "no spec": ('[campaign]\nname="x"\n[[target]]\nfile="a.py::b"', "needs spec"),
    "names of a file": ('[campaign]\nname="x"\n[[target]]\nfile="a.py::b"\nspec="causal"\n'
                        'names=["b"]', "is not for a file"),
    "mask": ('[campaign]\nname="x"\n[[target]]\nspecs=["windw"]', "did you mean 'window'?"),
    "ranges": ('[campaign]\nname="x"\n[[target]]\nranges={window=[4, 1]}',
               "not a table of parameters, each with [low, high]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_one_line_and_exit_2(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = FAULTS[fault]
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert ran("run", path) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and message in error and "c.toml" in error
    assert not (tmp_path / "findings").exists()


LATER = {
    "target": ('[[target]]\nnames=["rsw"]', "no target 'rsw'", 2),
    "twice": (f"{OWN}\n{OWN}", "[[target]] 2: maskproof/rswa is in one before", 2),
    "parameter": (f"{OWN}\nranges={{windw=[1, 2]}}", "no mask has a parameter 'windw'", 2),
    "range": (f"{OWN}\nranges={{window=[0, 2]}}", "window is from 1 to", 2),
    "file": ('[[target]]\nfile="x.py::f"\nspec="causal"', "x.py: no such file", 2),
    "store": (f'store = "mysql://x/y"\n{OWN}', "a path, sqlite:///PATH or postgresql://", 3),
}


@pytest.mark.parametrize("fault", LATER)
def test_what_shows_when_targets_are_there_is_one_line(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, message, status = LATER[fault]
    assert ran("run", written(tmp_path, target=target)) == status
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and message in error


def test_the_keys_are_all_read(tmp_path: Path) -> None:
    fa4 = written(tmp_path, target='[[target]]\nvllm="0.33.0"\nfa4="cute"')
    (tmp_path / "cute").mkdir()
    assert load(fa4).targets[0].source.fa4 == str(tmp_path / "cute")
    path = written(tmp_path, 'mode="pr"\nbudget="2m"\nfindings="f"\nstore="s.sqlite"\nworkers=2\n'
                   'deadline=3\nknown="k.json"\nregressions="r"\ntracked=["1"]\nbacklog=9\n'
                   'baseline=["vllm-0"]\narch="sm_80"\nlaunches=4',
                   '[[target]]\nvllm="0.33.0"\nmax_keys=64\nranges={window=[1,9]}\n'
                   'specs=["rswa"]\n[[target]]\nfile="m.py::f"\nspec="causal"\naux=["ranges"]\n'
                   'call=["a=1"]')
    found = load(path)
    assert (found.budget, found.findings, found.store) == (
        120, tmp_path / "f", str(tmp_path / "s.sqlite"))
    first, second = found.targets
    assert first.source.vllm == "0.33.0" and first.ranges == {"window": (1, 9)}
    assert second.source.targets == (f"{tmp_path / 'm.py'}::f",)
    assert (second.source.against, second.source.aux, second.source.call) == (
        "causal", ("ranges",), ("a=1",))
    assert (found.tracked, found.baseline) == (("vllm-1",), ("vllm-0",))
    assert {"name", "mode", "budget"} <= CAMPAIGN.keys() and {"vllm", "file"} <= TARGET.keys()
    with pytest.raises(CampaignError, match="No such file"):
        load(tmp_path / "none.toml")


def test_the_file_and_the_commands_of_the_page_are_read(tmp_path: Path) -> None:
    page = (ROOT / "docs/campaigns.md").read_text()
    path = tmp_path / "nightly.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    assert len(load(path).targets) == 3
    lines = re.findall(r"python -m fuzz\.campaign ([^\n#]*)", page)
    assert len(lines) >= 8
    for line in lines:
        command.parser().parse_args(shlex.split(line))
    for name in (*CAMPAIGN, *TARGET):
        assert re.search(rf"\b{name}\b", page), name


def exported(path: Path) -> dict[str, Any]:
    out = path.parent / "out.json"
    assert ran("export", path, "--to", out) == 0
    return json.loads(out.read_text())


def test_a_campaign_fills_its_store_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two sources; a finding replays with its own."""
    path = written(tmp_path, "launches = 6", f'{TWIN}\n[[target]]\nfile="{HERE}::mine"\n'
                   'spec="causal"\nmax_keys=40')
    assert ran("status", path) == 3
    assert "no store yet" in capsys.readouterr().err
    assert ran("run", path) == 1
    first = exported(path)
    assert ran("run", path) == 1
    assert ran("status", path) == 0
    whole, text = exported(path), capsys.readouterr().out
    assert "try: does not run here" in text and "try (batch): ended at" in text
    folder = tmp_path / "findings"
    found = stored(folder)
    assert {one["fingerprint"] for one in whole["findings"]} == found.keys()
    totals = json.loads((folder / "state/snapshot.json").read_text())["totals"]
    days = [row for row in whole["rates"] if row["width"] == 86400]
    for name in ("launches", "sequences", "cells", "wrong_cells", "kernels"):
        assert sum(row[name] for row in days) == totals[name]
    assert sum(row["launches"] for row in days) == 12
    seen = {one["fingerprint"]: one["count"] for one in whole["findings"]}
    assert seen == totals["findings"]
    assert [run["because"] for run in whole["runs"]] == ["all launches are done"] * 2
    file = whole["campaigns"][0]["file"]
    assert file["seed"] == 5 and len(file["targets"]) == 2 and "store" not in file
    assert {one["state"] for one in first["findings"]} == {"new"}
    # What was found first was replayed by the second run.
    again = {one["fingerprint"]: one["state"] for one in whole["findings"]}
    assert all(again[one["fingerprint"]] == "open" for one in first["findings"])
    assert {one["name"] for one in whole["targets"]} == {f"maskproof/{BAD}", f"{HERE}::mine"}
    by_file = [one for one in found.values() if "::mine" in one["path"]]
    assert by_file and len(by_file) < len(found)
    assert all(max(s["seqlen_k"] for s in one["case"]["sequences"]) <= 40 for one in by_file)
    for one in (by_file[0], next(one for one in found.values() if BAD in one["path"])):
        assert replay(one).again
    reached = {row["boundary"] for row in whole["coverage"]}
    assert "prefill" in reached and any(not row["count"] for row in whole["coverage"])
    shown_as_a_table(path, capsys)
    triaged(path, next(iter(found)), capsys)


def shown_as_a_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(path.read_text().replace("seed = 5", 'mode = "coverage"'))
    assert ran("run", path) == 0
    text = capsys.readouterr().out
    assert "combinations (" in text and "reached" in text.splitlines()[0]
    assert sum(BAD in line for line in text.splitlines()) == 1


def triaged(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("triage", path, name, "wontfix") == 2
    assert ran("triage", path, "0123", "accept") == 2
    assert ran("triage", path, name, "wontfix", "--reason", "padding") == 0
    assert f"{name}: wontfix" in capsys.readouterr().out
    history = [row["after"] for row in exported(path)["history"] if row["fingerprint"] == name]
    assert history[-1] == "wontfix"


def test_ranges_narrow_what_is_drawn(tmp_path: Path) -> None:
    path = written(tmp_path, "launches = 4",
                   '[[target]]\nnames=["known-bad/no-window-term"]\nranges={window=[3, 3]}')
    assert ran("run", path) == 1
    for one in stored(tmp_path / "findings").values():
        assert one["case"]["call"]["params"] == {"window": 3}


def test_verdicts_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "launches = 1")
    assert ran("run", path) == 0
    check = tmp_path / "check.json"
    row = {"target": "vllm-0.33.0/rswa", "obligation": "equals-spec", "arch": "sm_90",
           "spec": "rswa", "verdict": "PROVED", "diagnosis": None}
    check.write_text(json.dumps({"schema": 1, "results": [row]}))
    assert ran("record", path, check) == 0
    assert "1 verdicts are new" in capsys.readouterr().out
    check.write_text("{}")
    assert ran("record", path, check) == 2
    assert [one["release"] for one in exported(path)["verdicts"]] == ["vllm-0.33.0"]


def reviewed(folder: Path, *options: object, **keys: str) -> int:
    folder.mkdir(exist_ok=True)
    lines = "\n".join(f'{name} = "{value}"' for name, value in keys.items())
    path = written(folder, f'mode = "pr"\nlaunches = 6\n{lines}', TWIN)
    return ran("run", path, *options)


def test_a_pr_run_fails_on_what_is_new_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reviewed(tmp_path / "main") == 1
    assert "new: " in capsys.readouterr().out
    suite = tmp_path / "known.json"
    assert ran("export", tmp_path / "main/campaign.toml", "--known", suite) == 0
    reports = [tmp_path / name for name in ("summary.md", "junit.xml", "sarif.json")]
    assert reviewed(tmp_path / "pr", "--summary", reports[0], "--junit", reports[1], "--sarif",
                    reports[2], known=str(suite)) == 0
    out, error = capsys.readouterr()
    assert "nothing new" in out and "known, of which 0 are gone" in out and "new:" not in out
    assert "Nothing new." in reports[0].read_text() and 'failures="0"' in reports[1].read_text()
    assert json.loads(reports[2].read_text())["version"] == "2.1.0"
    # One that is left away from the suite is new.
    given = json.loads(suite.read_text())
    one = given["known"].pop()
    suite.write_text(json.dumps(given))
    assert reviewed(tmp_path / "other", "--summary", reports[0], known=str(suite)) == 1
    out = capsys.readouterr().out
    assert f"{one['document']['fingerprint']}.json" in out and out.count("new: ") == 1
    assert one["document"]["region"].split(",")[0] in reports[0].read_text()


def test_what_was_fixed_and_is_there_again_fails_a_pr_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The regression corpus is replayed first, and counts although the loop found nothing."""
    assert reviewed(tmp_path / "main") == 1
    corpus = tmp_path / "corpus"
    (corpus / "state").mkdir(parents=True)
    one = min(stored(tmp_path / "main/findings").values(), key=lambda one: one["fingerprint"])
    save(corpus, one)
    save(corpus, {**one, "fingerprint": "0" * 12, "region": "nowhere"})
    capsys.readouterr()
    assert reviewed(tmp_path / "pr", regressions=str(corpus)) == 1
    out = capsys.readouterr().out
    assert f"regressed: {one['kind']}" in out and out.count("regressed: ") == 1


def test_a_suite_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "known.json"
    for text, message in (("[", "not a suite"), ("{}", "of schema 1"),
                          ('{"schema": 1, "known": [{}]}', "known issue 1"),
                          ('{"schema": 1, "known": [{"document": {"schema": 1}}]}', "issue 1")):
        suite.write_text(text)
        with pytest.raises(SuiteError, match=message):
            known.load(suite)
    assert reviewed(tmp_path / "pr", known=str(suite)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_known_issue_is_known_in_its_release_and_in_a_baseline() -> None:
    here = finding(release="vllm-0.34.0")
    suite = known.load_rows([{"state": "open", "reason": "", "document": finding()}])
    assert known.is_known(finding(), suite)
    assert not known.is_known(here, suite)
    assert known.is_known(here, suite, ["vllm-0.33.0"])
    assert not known.is_known(finding(region="elsewhere"), suite, ["vllm-0.33.0"])


def of_release(name: str, spec: str = "rswa", **constants: int) -> dict[str, Target]:
    return {name: Target(target=name, spec=spec, make=lambda at: None, constants=constants)}


def test_a_case_moves_to_the_mask_mod_of_that_name_in_another_release() -> None:
    call = Call(provider="vllm-0.33.0", spec="rswa", mask_mod="vllm-0.33.0/rswa")
    case = Case(call, (Sequence(seqlen_q=1, seqlen_k=2, tables={"prefix_lens": 1}),))
    mods = of_release("vllm-0.33.0/rswa") | of_release("vllm-0.34.0/rswa")
    assert moved(case, "vllm-0.33.0", mods) == call
    there = moved(case, "vllm-0.34.0", mods)
    assert there is not None
    assert (there.provider, there.mask_mod) == ("vllm-0.34.0", "vllm-0.34.0/rswa")
    assert moved(case, "vllm-0.35.0", mods) is None and moved(case, "upstream", mods) is None
    assert moved(case, "vllm-0.34.0", of_release("vllm-0.34.0/rswa", "causal")) is None
    assert moved(case, "vllm-0.34.0", of_release("vllm-0.34.0/other")) is None


def test_a_case_moves_to_one_of_its_family_that_has_room() -> None:
    call = Call(provider="vllm-0.24.0", spec="mm_prefix",
                mask_mod="vllm-0.24.0/mm_prefix[window,ranges=8]", params={"window": 4})
    ranges = tuple((i, i) for i in range(3))
    case = Case(call, (Sequence(seqlen_q=1, seqlen_k=4, tables={"ranges": ranges}),))
    name = "vllm-0.33.0/mm_prefix[window]"
    there = moved(case, "vllm-0.33.0", of_release(name, "mm_prefix"))
    assert there is not None and there.mask_mod == name
    small = of_release("vllm-0.23.0/mm_prefix[ranges=2]", "mm_prefix", num_ranges=2)
    large = of_release("vllm-0.23.0/mm_prefix[ranges=4]", "mm_prefix", num_ranges=4)
    assert moved(case, "vllm-0.23.0", small) is None
    there = moved(case, "vllm-0.23.0", small | large)
    assert there is not None and there.mask_mod in large


@pytest.mark.releases
def test_two_releases_in_one_campaign_each_run_their_own_code(tmp_path: Path) -> None:
    """A fault of the first of them is fixed in the second; each was traced with its own modules."""
    path = written(tmp_path, 'launches = 10\ntracked = ["0.33.0"]',
                   '[[target]]\nvllm="0.33.0"\n[[target]]\nvllm="0.24.0"')
    assert ran("run", path) == 1
    assert ran("run", path) == 1
    found = exported(path)
    assert {one["release"] for one in found["findings"]} == {"vllm-0.24.0"}
    assert {one["kind"] for one in found["findings"]} <= {"leak", "loss"}
    assert {one["release"] for one in found["paths"]} == {"vllm-0.24.0", "vllm-0.33.0"}
    results = {(one["release"], one["result"]) for one in found["replays"]}
    assert results == {("vllm-0.24.0", "again"), ("vllm-0.33.0", "gone")}
    fixed = {one["fixed_in"] for one in found["findings"] if one["state"] == "fixed"}
    assert fixed == {"vllm-0.33.0"}
    assert ran("export", path, "--regressions", tmp_path / "corpus") == 0
    names = {one["fingerprint"] for one in found["findings"] if one["state"] == "fixed"}
    assert stored(tmp_path / "corpus").keys() == names
    document = found["documents"][0]["document"]
    assert document["source"]["vllm"] == "0.24.0" and replay(document).again


def test_prune_makes_cases_smaller_and_puts_copies_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "state").mkdir(parents=True)
    keys = f'launches = 6\nregressions = "{corpus}"'
    path = written(tmp_path, keys, TWIN)
    assert ran("run", path) == 1
    folder = tmp_path / "findings"
    name, small = next(iter(stored(folder).items()))
    large = {**small, "shrunk": False, "case": {**small["case"], "sequences": [
        {**one, "seqlen_q": one["seqlen_q"] + 9, "seqlen_k": one["seqlen_k"] + 9}
        for one in small["case"]["sequences"]]}}
    save(folder, large)
    save(corpus, small)
    save(corpus, {**small, "fingerprint": "f" * 12})
    written(tmp_path, f'mode = "prune"\n{keys}', TWIN)
    assert ran("run", path) == 0
    text = capsys.readouterr().err
    assert f"{name}: " in text and " cells before, " in text and "a copy of another" in text
    again = load_finding(folder / f"finding-{name}.json")
    assert again["case"] == small["case"] and again["shrunk"]
    assert len(stored(corpus)) == 1 and len(list((corpus / "pruned").iterdir())) == 1
    whole = exported(path)
    assert {one["because"] for one in whole["runs"]} == {
        "all launches are done", "all cases were looked at"}
    document = {row["fingerprint"]: row["document"] for row in whole["documents"]}
    assert document[name]["case"] == again["case"]


def until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_campaign_is_stopped_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, 'budget = "120s"')
    assert ran("stop", path) == 0
    assert "does not run here" in capsys.readouterr().out
    process = subprocess.Popen(
        [sys.executable, "-m", "fuzz.campaign", "run", path], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: (tmp_path / "findings/store.sqlite").exists())
    assert ran("run", path) == 3
    assert "another campaign is using this folder" in capsys.readouterr().err
    assert ran("status", path) == 0
    assert "try: runs here" in capsys.readouterr().out
    assert ran("stop", path) == 0
    out, error = process.communicate(timeout=30)
    assert process.returncode in (0, 3) and "interrupted after" in out
    assert exported(path)["runs"][0]["because"] == "interrupted"


def mine(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    """A mask_mod that forgets the cached keys."""
    return kv_idx <= q_idx


def test_without_the_database_package_only_campaigns_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ("import sys; sys.modules['sqlalchemy'] = None\n"
            "import fuzz.run, fuzz.loop, fuzz.replay\nfrom fuzz import campaign\n"
            f"sys.exit(campaign.main(['run', {str(written(tmp_path))!r}]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == ("fuzz.campaign: sqlalchemy is not installed: "
                           "pip install 'maskproof[service]'\n")
