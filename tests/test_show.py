"""`python -m spec.show`, and the pictures and environments behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.environment import environment, own_rows
from spec.masks import MASKS, mask
from spec.show import main, shown
from spec.term import SpecError
from spec.to_picture import HIDDEN, LEAKED, LOST, VISIBLE, cells, draw, picture, save
from spec.to_text import to_text

ROOT = Path(__file__).parents[1]


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    got = capsys.readouterr()
    assert got.err == ""
    return got.out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status: Any = main(argv)
    except SystemExit as stop:
        status = stop.code
    got = capsys.readouterr()
    assert (status, got.out, got.err.count("\n")) == (2, "", 1)
    return got.err


def python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("name", MASKS)
def test_show_prints_all_of_a_mask(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry, text = MASKS[name], output(capsys, name)
    parts = [entry.name, entry.sentence, to_text(entry.formula), entry.empty_rows, entry.source,
             *map(to_text, entry.assume), *entry.settles.values(), *entry.picture.split("\n"),
             *(p.meaning for p in entry.params.values()), *(t.shape for t in entry.tables.values()),
             *(to_text(fact) for t in entry.tables.values() for fact in t.facts)]
    for part in parts:
        assert part in text


def test_show_takes_values_and_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "window", "--set", "window=4", "--seqlen-q", "2", "--seqlen-k", "12")
    assert "seqlen_q = 2, seqlen_k = 12, window = 4" in text
    assert text.endswith(
        " q kv 0    5    10\n10    .......####.\n11    ........####\n\n# visible, . hidden\n"
    )


def test_show_takes_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "same_range", "--set", "ranges=[[0, 1], [3, 3]]", "--seqlen-q=4",
                  "--seqlen-k=4")
    assert "0    ##..\n1    ##..\n2    ....\n3    ...#\n" in text


def test_an_example_of_one_entry_per_position_follows_the_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "document_ids = [0, 0, 0, 0, 1, 1" in output(capsys, "document", "--seqlen-k", "12")


def test_show_takes_a_composition(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "window & document | mm_prefix", "--set", "window=2")
    assert "A query sees a key where window & document | mm_prefix." in text
    assert "assumes     seqlen_q <= seqlen_k" in text


def test_show_takes_a_file_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nmask = "causal & (kv % n == 0)"\n'
                    "params.n = {low = 1, high = 4}\n")
    assert "no picture: no value for n" in output(capsys, str(file))
    assert "#..#" in output(capsys, str(file), "--set", "n=3")
    assert "n=5 is outside 1 .. 4" in refused(capsys, str(file), "--set", "n=5")
    assert "no value for n" in refused(capsys, str(file), "--seqlen-k", "9")


def test_what_is_counted_may_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "any(kv == 7 * r for r in range(num_ranges))", "--cute", "--set",
                  "num_ranges=3")
    assert "14" in text and "21" not in text


@pytest.mark.parametrize("page", ["README.md", "docs/own-masks.md"])
def test_the_files_and_commands_of_the_docs_work(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import re
    import shlex

    text = (ROOT / page).read_text()
    files = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert files
    for file in files:
        (tmp_path / (re.findall(r'^name = "(.+)"', file)[0] + ".toml")).write_text(file)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^python -m spec\.show (.*)(?:\n```\n\n```text\n([^`]*))?", text, re.M)
    assert sum(".toml" in command for command, _ in commands) >= len(files)
    for command, drawn in commands:
        printed = output(capsys, *shlex.split(command))
        assert drawn in printed and "no picture" not in printed


def test_help_and_the_docs_name_every_key_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    from spec.from_file import KEYS, PARAM_KEYS, TABLE_KEYS

    with pytest.raises(SystemExit):
        main(["--help"])
    shown_help = capsys.readouterr().out
    docs = (ROOT / "docs" / "own-masks.md").read_text()
    for key in (*KEYS, *PARAM_KEYS, *TABLE_KEYS):
        assert key in shown_help and key in docs


def test_list_names_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "--list").splitlines()
    assert [line.split()[0] for line in lines] == list(MASKS)


def test_help_teaches_with_commands_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    commands = [line.split(">")[0] for line in text.splitlines() if "  python -m spec.show" in line]
    assert len(commands) >= 5
    (tmp_path / "my_mask.toml").write_text('name = "mine"\nmask = "causal"\n')
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert output(capsys, *shlex.split(command)[3:])
    assert (tmp_path / "thirds.png").exists()


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    got = json.loads(output(capsys, "mm_prefix", "--json"))
    entry = MASKS["mm_prefix"]
    assert (got["schema"], got["name"], got["formula"]) == (1, entry.name, to_text(entry.formula))
    assert "\n".join(got["picture"]) == entry.picture
    assert got["values"] == {"window": 2, "ranges": [[2, 5]]}
    assert got["params"]["window"]["low"] == 1
    assert got["tables"]["ranges"]["dims"] == ["num_seqs", "num_ranges", "2"]


@pytest.mark.parametrize("name", MASKS)
def test_latex_flex_and_cute_are_printed_alone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, name, "--latex").count("\n") == 1
    for form in ("--flex", "--cute"):
        text = output(capsys, name, form)
        compile(text, name, "exec")
        assert "def mask_mod(" in text


@pytest.mark.parametrize("argv, why", [
    ([], "name a mask, or --list"),
    (["windo"], "did you mean 'window'?"),
    (["kv <="], "cannot parse"),
    (["none.toml"], "No such file"),
    (["window", "extra"], "unrecognized arguments"),
    (["window", "--wat"], "unrecognized arguments"),
    (["window", "--set", "window"], "write name=number"),
    (["window", "--set", "window="], "write name=number"),
    (["window", "--set", "window=abc"], "write name=number"),
    (["window", "--set", "window=2.5"], "whole number"),
    (["window", "--set", "window=True"], "whole number"),
    (["window", "--set", "window=0"], "window=0 is outside 1 .. 2147483647"),
    (["window", "--set", "wndow=2"], "window has no parameter or table 'wndow'; it has window"),
    (["full", "--set", "x=2"], "it has none"),
    *((["window", "--set", "x=2", form], "no parameter or table 'x'")
      for form in ("--latex", "--flex", "--cute", "--json")),
    (["any(kv == r for r in range(num_ranges))", "--cute"], "--set num_ranges=NUMBER"),
    (["any(kv == r for r in range(num_ranges))", "--cute", "--set", "num_ranges='a'"], "whole num"),
    (["window", "--seqlen-q", "x"], "invalid int"),
    (["window", "--seqlen-q", "-1"], "must not be negative"),
    (["window", "--seqlen-q", "9999999", "--seqlen-k", "9999999"], "nor their product"),
    (["document", "--seqlen-q", "9"], "document assumes `seqlen_q <= seqlen_k`"),
    (["document", "--set", "document_ids=[0, 1]"], "needs the shape [6] here, not [2]"),
    (["same_range", "--set", "ranges=[[1, 3], [2, 5]]"],
     "spec.show: ranges overlap: [1, 3] and [2, 5]; "),
    (["same_range", "--set", "ranges=[[8, 9], [1, 3], [2, 2], [-1, -1], [3, 5]]"],
     "ranges overlap: [1, 3] and [3, 5]; "),
    (["same_range", "--set", "ranges=[[3, 1]]"], "what it must hold: first and last position"),
    (["same_range", "--set", "ranges=[[1, 3], [5]]"], "rows of different lengths"),
    (["same_range", "--set", "ranges=[1, 3]"], "needs the shape of ranges["),
    (["same_range", "--set", "ranges='a'"], "whole numbers"),
    (["same_range", "--set", "ranges=[[1, 4294967296]]"], "32-bit whole numbers"),
    (["same_range", "--set", "num_ranges=5"], "needs the shape [1, 5, 2] here"),
    (["rswa", "--set", "prefix_lens=-1"], "must satisfy `0 <= prefix_lens[b]`"),
    (["dynamic_causal", "--set", "dynamic_causal=2"], "must satisfy"),
    (["window", "--tile", "4x4"], "add --png FILE or --svg FILE"),
    (["window", "--tile", "4", "--png", "x.png"], "write queries x keys"),
    (["window", "--png", "x.jpg"], "ends in .png"),
    (["window", "--svg", "/nowhere/x.svg"], "cannot write /nowhere/x.svg"),
    (["window", "--json", "--latex"], "not allowed with"),
])
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, *argv)


def test_as_a_command_bad_input_has_no_traceback() -> None:
    done = python("-m", "spec.show", "windo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "spec.show: no mask 'windo' in the catalogue; did you mean 'window'?\n"


def test_a_reader_may_stop_early() -> None:
    command = f"{sys.executable} -m spec.show --list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_show_starts_without_heavy_imports() -> None:
    done = python("-c", "import sys\nfrom spec.show import main\nmain(['mm_prefix'])\n"
                        "main(['rswa', '--flex'])\nmain(['rswa', '--cute'])\nprint(*sys.modules)")
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "numpy" in loaded
    assert loaded.isdisjoint({"torch", "z3", "cutlass", "matplotlib", "rich"})


def test_a_terminal_gets_styles_unless_it_wants_none() -> None:
    run = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-m', 'spec.show', 'causal']))"
    assert "\x1b[1m" in python("-c", run, TERM="xterm", NO_COLOR="").stdout
    assert "\x1b[1m" not in python("-m", "spec.show", "causal", TERM="xterm").stdout


def test_pictures_are_written_and_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    output(capsys, "window", "--png", str(png), "--svg", str(svg), "--tile", "2x4")
    first = png.read_bytes(), svg.read_bytes()
    assert first[0].startswith(b"\x89PNG")
    assert b"window: seqlen_q = 4, seqlen_k = 8, window = 3" in first[1]
    output(capsys, "window", "--png", str(png), "--svg", str(svg), "--tile", "2x4")
    assert (png.read_bytes(), svg.read_bytes()) == first


def test_a_saved_picture_shows_the_cells_and_the_tiles(tmp_path: Path) -> None:
    from matplotlib.image import imread

    seen = np.array([[True, False], [False, True]])
    shades = {}
    for name, tile in (("plain", None), ("tiled", (1, 1))):
        save(tmp_path / f"{name}.png", seen, tile=tile)
        image = imread(tmp_path / f"{name}.png")[..., :3]
        blue = np.isclose(image, np.array([0x3B, 0x6E, 0xA5]) / 255, atol=0.01).all(axis=2)
        shades[name] = blue.mean()
    assert 0.2 < shades["tiled"] < shades["plain"] < 0.5
    save(tmp_path / "two.svg", seen, ~seen)
    text = (tmp_path / "two.svg").read_text()
    for word in ("expected", "got", "differing"):
        assert f"<!-- {word} -->" in text


def test_a_saved_picture_has_cells_at_their_positions() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, cells(np.ones((2, 5), bool)), 3, 0, (1, 2))
    assert axes.images[0].get_extent() == [-0.5, 4.5, 4.5, 2.5]
    tiles = {line.get_segments()[i][0][0] for line in axes.collections[2:3] for i in range(3)}
    assert tiles == {-0.5, 1.5, 3.5}


def test_large_pictures_point_to_png(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "causal", "--seqlen-q", "300", "--seqlen-k", "300")
    assert "300 x 300 cells are too many for text (200 x 200): save a picture with --png" in text


def test_differing_cells_have_four_symbols() -> None:
    expected, got = np.array([[True, True, False, False]]), np.array([[True, False, True, False]])
    assert cells(expected, got).tolist() == [[VISIBLE, LOST, LEAKED, HIDDEN]]
    assert picture(expected, got, first_q=7, first_kv=12) == (
        "q kv 12 15\n7    #-+.\n\n. hidden, # visible, + leaked: visible in got only, "
        "- lost: visible in expected only; 2 of 4 cells differ"
    )


def test_axes_hold_absolute_positions() -> None:
    lines = picture(np.zeros((3, 22), bool), first_q=-1, first_kv=8).split("\n")
    assert lines[0] == " q kv 8 10   15   20   25"
    assert [line.split()[0] for line in lines[1:4]] == ["-1", "0", "1"]
    far = picture(np.zeros((1, 30), bool), first_q=2**31, first_kv=2**31 - 9).split("\n")
    assert far[0].split() == ["q", "kv", "2147483639", "2147483660"]
    start = far[1].index(".")
    assert far[0].index("2147483660") - start == 21
    assert picture(np.zeros((0, 4), bool)).startswith("q kv 0\n\n")


def test_the_own_row_is_the_longest_range_that_holds_the_query() -> None:
    ranges = np.array([[2, 3], [5, 5], [-1, -1], [5, 9]])
    assert own_rows(ranges, 7, 6).tolist() == [
        [-1, -1], [-1, -1], [-1, -1], [2, 3], [2, 3], [-1, -1], [5, 9]
    ]


def test_tables_come_with_or_without_the_axis_of_sequences() -> None:
    entry = MASKS["same_range"]
    plain = environment(entry, {"ranges": [[2, 5]]}, 6, 6)
    whole = environment(entry, {"ranges": [[[2, 5]]]}, 6, 6)
    assert plain["ranges"].tolist() == whole["ranges"].tolist() == [[[2, 5]]]
    assert plain["num_ranges"] == 1
    assert environment(entry, {"ranges": []}, 6, 6)["ranges"].shape == (1, 0, 2)
    assert environment(MASKS["rswa"], {"window": 1, "prefix_lens": 3}, 2, 6)["prefix_lens"] == [3]


def test_query_ranges_may_be_given_or_follow_from_ranges() -> None:
    entry = MASKS["same_range"].given(("query_ranges", "cu_seqlens_q"))
    derived = environment(entry, {"ranges": [[2, 5]]}, 2, 6)
    given = environment(entry, {"query_ranges": [[2, 5], [2, 5]]}, 2, 6)
    assert derived["query_ranges"].tolist() == given["query_ranges"].tolist()
    assert derived["cu_seqlens_q"].tolist() == [0, 2]
    with pytest.raises(SpecError, match="no value for the table query_ranges"):
        environment(entry, {}, 2, 6)
    with pytest.raises(SpecError, match="query_ranges are not what it must hold: first and last"):
        environment(entry, {"query_ranges": [[5, 2], [2, 5]]}, 2, 6)


def test_a_mask_that_reads_outside_its_table_is_refused() -> None:
    with pytest.raises(SpecError, match="reads a table beyond its ends"):
        shown(mask("document_ids[q + 1] == 0"), {}).grid()
    with pytest.raises(SpecError, match="read at a negative index"):
        shown(mask("document_ids[q] == 0"), {}, 9, 3).grid()
