"""A mask of one's own: what a file may hold, and what names a mask on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec import from_file as module
from spec.from_file import from_file, resolve
from spec.masks import EVERY_MASK, MASKS, mask
from spec.show import shown
from spec.term import SpecError
from spec.to_picture import rows
from spec.to_text import to_text

STRIDED = "\n".join(line.strip() for line in (module.__doc__ or "").split("\n")[2:8])


def written(path: Path, text: str) -> str:
    file = path / "mine.toml"
    file.write_text(text)
    return str(file)


def test_the_example_of_the_module_is_a_mask(tmp_path: Path) -> None:
    made = from_file(written(tmp_path, STRIDED))
    assert made.name == "strided"
    assert to_text(made.formula) == (
        "kv <= q and ((q - kv) % stride == 0 or group_ids[q] == group_ids[kv])"
    )
    assert (made.params["stride"].low, made.params["stride"].high) == (1, 64)
    assert made.tables["group_ids"].meaning == "group of each position"
    assert [to_text(fact) for fact in made.assume] == ["seqlen_q <= seqlen_k"]
    grid = shown(made, {"stride": 2, "group_ids": [0, 0, 1, 1]}, 4, 4).grid()
    assert rows(grid).split("\n") == ["#...", "##..", "#.#.", ".###"]


def test_five_lines_are_enough(tmp_path: Path) -> None:
    made = from_file(written(tmp_path, 'name = "mine"\nmask = "window & document"\n'))
    assert made.formula is mask("window & document").formula
    assert made.params.keys() == {"window"}
    assert made.assume == MASKS["document"].assume
    assert made.settles["window"] == MASKS["window"].settles["window"]


def test_a_file_may_narrow_a_parameter_of_the_catalogue(tmp_path: Path) -> None:
    text = 'name = "short"\nmask = "window"\nparams.window = {low = 2, high = 9}\n'
    made = from_file(written(tmp_path, text))
    assert (made.params["window"].low, made.params["window"].high) == (2, 9)
    assert made.formula is MASKS["window"].formula


def test_a_file_may_have_facts_and_an_example(tmp_path: Path) -> None:
    made = from_file(written(tmp_path, """
        name = "first_keys"
        sentence = "A query sees the first keys of its sequence."
        mask = "kv < first[b]"
        [tables.first]
        dims = "num_seqs"
        facts = ["1 <= first[b]"]
        [example]
        seqlen_q = 2
        seqlen_k = 4
        first = 3
    """))
    assert rows(shown(made, {}).grid()) == "###.\n###."
    with pytest.raises(SpecError, match=r"first .* must satisfy `1 <= first\[b\]`"):
        shown(made, {"first": 0}).grid()


def test_dims_are_text_or_a_list(tmp_path: Path) -> None:
    text = 'name = "x"\nmask = "t[b, 0] <= kv"\ntables.t = {dims = %s}'
    made = [from_file(written(tmp_path, text % dims)).tables["t"]
            for dims in ('"num_seqs, 2"', '["num_seqs", 2]', '["num_seqs", "2"]')]
    assert made[0] == made[1] == made[2] and made[0].shape == "t[num_seqs, 2]"


def test_what_is_turned_around_settles_nothing_of_its_own() -> None:
    assert MASKS["causal"].settles.keys() > EVERY_MASK.keys()
    for text in ("~causal", "window | ~ causal", "not (causal or kv < 3)"):
        assert resolve(text).settles == EVERY_MASK
    assert (~MASKS["causal"]).settles == EVERY_MASK
    assert "frame" in resolve("causal & ~(kv == 3)").settles


HEAD = 'name = "x"\n'


@pytest.mark.parametrize("text, why", [
    ("x =", "not a TOML file"),
    ("\x00", "not a TOML file"),
    ('mask = "causal"', "the file lacks 'name'"),
    (HEAD, "the file lacks 'mask'"),
    ('name = ""\nmask = "causal"', "cannot be the name"),
    ('name = "a\\nb"\nmask = "causal"', "cannot be the name"),
    (HEAD + "mask = 3", "'mask' of the file must be text, not 3"),
    (HEAD + 'mask = "causal"\nmeaning = "x"', "unknown key 'meaning'; it may have name, mask"),
    (HEAD + 'mask = "causl"', "did you mean 'causal'?"),
    (HEAD + 'mask = "kv <= q & window"', "put each comparison in parentheses"),
    (HEAD + 'mask = """kv <=\n"""', "invalid syntax"),
    (HEAD + 'mask = "kv <= qq"', "`qq` is neither a coordinate nor a declared parameter"),
    (HEAD + 'mask = "kv <= t[b]"', "`t` is neither a coordinate nor a declared parameter"),
    (HEAD + 'mask = "causal"\nassume = "q < 3"', "'assume' of the file must be a list"),
    (HEAD + 'mask = "causal"\nassume = [1]', "'assume' must be a list of texts"),
    (HEAD + 'mask = "causal"\nassume = ["q <"]', "invalid syntax"),
    (HEAD + 'mask = "causal"\nassume = ["q < z"]', "`z` is neither"),
    (HEAD + 'mask = "causal"\nparams = 3', "'params' of the file must be a table"),
    (HEAD + 'mask = "causal"\nparams.a = 3', "the parameter 'a' must be a table"),
    (HEAD + 'mask = "causal"\nparams.a = {low = 1}', "the parameter 'a' lacks 'high'"),
    (HEAD + 'mask = "causal"\nparams.a = {low = true, high = 2}', "whole number, not True"),
    (HEAD + 'mask = "causal"\nparams.a = {low = 3, high = 2}', "low <= high"),
    (HEAD + 'mask = "causal"\nparams.a = {low = 3, high = 2147483648}', "32-bit"),
    (HEAD + 'mask = "causal"\nparams.a = {low = 3, high = 4}', "`a` is declared and not used"),
    (HEAD + 'mask = "causal"\nparams.q = {low = 3, high = 4}', "'q' is a coordinate"),
    (HEAD + 'mask = "causal"\nparams.kv_idx = {low = 3, high = 4}', "'kv_idx' is a coordinate"),
    (HEAD + 'mask = "causal"\nparams.for = {low = 3, high = 4}', "'for' cannot be a name"),
    (HEAD + 'mask = "causal"\nparams."a b" = {low = 3, high = 4}', "'a b' cannot be a name"),
    (HEAD + 'mask = "causal"\ntables.t = {}', "the table 't' lacks 'dims'"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = "q < 1"}', "a number is needed here"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = ""}', "'t' has an empty dimension"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = []}', "'t' has an empty dimension"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = "q,"}', "'t' has an empty dimension"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = [true]}', "list of texts and whole numbers"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = [1.5]}', "list of texts and whole numbers"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = 3}', "must be text, as in 'num_seqs, 2', or a"),
    (HEAD + 'mask = "causal"\nexample.seqlen = 3', "unknown name 'seqlen'; it may have seqlen_q"),
    ('name = "window"\nmask = "causal"', "the catalogue has a mask 'window'"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = "q", facts = ["t["]}', "was never closed"),
    (HEAD + 'mask = "t[q] == 1"\ntables.t = {dims = "q", facts = ["t[q] < z"]}', "`z` is neither"),
])
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        from_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert why in message
    assert len(message.splitlines()) == 1


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        from_file(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="Is a directory"):
        from_file(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not a TOML file"):
        from_file(tmp_path / "bytes.toml")


def test_resolve_takes_all_three_forms(tmp_path: Path) -> None:
    assert resolve("causal") is MASKS["causal"]
    assert resolve("causal & document").formula is mask("causal & document").formula
    assert resolve(written(tmp_path, STRIDED)).name == "strided"
    with pytest.raises(SpecError, match="No such file"):
        resolve("none.toml")
    with pytest.raises(SpecError, match="cannot parse"):
        resolve("causal & (" + "kv < 1 | " * 200)


def test_a_catalogue_name_is_not_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "causal").write_text("not a mask")
    monkeypatch.chdir(tmp_path)
    assert resolve("causal") is MASKS["causal"]
