"""Claims about tiles say what counting the cells of small tiles says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from spec.domain import BOTTOM_RIGHT
from spec.term import Term, and_, const, max_, min_, sym
from spec.tiles import BUILTIN, SPLIT, SPLITS, Tile, Visit, coverage, interior_unmasked
from spec.tiles import splits_partition as partition
from spec.to_numpy import to_numpy

TILE = Tile(6, 2, 2)
TURN = sym("turn_0")
SEQLEN_Q, SEQLEN_K, M_BLOCK = sym("seqlen_q"), sym("seqlen_k"), sym("m_block")
LAST_QUERY = ((M_BLOCK + 1) * TILE.tile_m - 1) // TILE.pack
CAUSAL_END = min_(SEQLEN_K, LAST_QUERY + 1 + SEQLEN_K - SEQLEN_Q)
HIGH = max_((CAUSAL_END + TILE.tile_n - 1) // TILE.tile_n, 0)
LOOP = HIGH - 2 - TURN


def visits(masked: bool = True, first: Term = HIGH - 1, count: Term = HIGH - 1) -> list[Visit]:
    """The last tile, masked with seqlen_k, and then down to tile 0."""
    return [Visit(first, True, True), Visit(LOOP, masked, False, turn=TURN, count=count)]


VISITS = {
    "right": visits(), "a tile short": visits(count=HIGH - 2), "unmasked": visits(masked=False),
    "the last tile twice": visits(first=HIGH - 2), "a tile too many": visits(count=HIGH),
}


def blocks() -> Iterator[dict[str, int]]:
    for seqlen_q, seqlen_k, m_block in itertools.product(range(1, 5), range(8), range(4)):
        if m_block * TILE.tile_m < seqlen_q * TILE.pack:
            yield {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "m_block": m_block}


def cells(block: dict[str, int]) -> dict[str, Any]:
    """Every real row, any key, any tile and turn."""
    first = block["m_block"] * TILE.tile_m
    rows = np.arange(first, min(first + TILE.tile_m, block["seqlen_q"] * TILE.pack))
    axes = np.meshgrid(rows, np.arange(10), np.arange(-1, 6), np.arange(6), indexing="ij")
    row, kv, n, turn = (axis.ravel() for axis in axes)
    return {**block, "row": row, "q_idx": row // TILE.pack, "kv_idx": kv, "n_block": n,
            "turn_0": turn}


def computed(chosen: list[Visit], block: dict[str, int]) -> list[tuple[int, bool, bool]]:
    found = []
    for visit in chosen:
        turns = 1 if visit.count is None else int(to_numpy(visit.count, block))
        for turn in range(turns):
            tile = int(to_numpy(visit.n_block, {**block, "turn_0": turn}))
            found.append((tile, visit.masked, visit.seqlen))
    return found


def visible(block: dict[str, int], row: int, kv: int) -> bool:
    return kv <= row // TILE.pack + block["seqlen_k"] - block["seqlen_q"]


def counted(chosen: list[Visit], block: dict[str, int]) -> tuple[bool, bool]:
    """Coverage and interior-unmasked, by counting."""
    tiles = computed(chosen, block)
    rows = set(cells(block)["row"].tolist())
    numbers = [tile for tile, *_ in tiles]
    covered = len(set(numbers)) == len(numbers) and all(
        t <= 0 or t * TILE.tile_n < block["seqlen_k"] for t in numbers
    ) and all(t >= 0 for t in numbers[1:]) and all(
        kv // TILE.tile_n in numbers
        for row in rows for kv in range(block["seqlen_k"]) if visible(block, row, kv)
    )
    inside = True
    for tile, masked, seqlen in tiles:
        for row, kv in itertools.product(rows, range(tile * TILE.tile_n, (tile + 1) * TILE.tile_n)):
            seen, real = visible(block, row, kv), kv < block["seqlen_k"]
            inside &= seqlen or (not seen or real if masked else seen and real)
    return covered, inside


@pytest.mark.parametrize("name", VISITS)
def test_claims_agree_with_counting(name: str) -> None:
    chosen = VISITS[name]
    mask = BOTTOM_RIGHT(BUILTIN["causal"])
    claims = coverage(mask, TILE, chosen), interior_unmasked(mask, TILE, chosen)
    outcome = set()
    for block in blocks():
        at = cells(block)
        assumed = to_numpy(and_(*TILE.domain), at)
        said = tuple(bool((~assumed | to_numpy(claim, at)).all()) for claim in claims)
        assert said == counted(chosen, block), block
        outcome.add(said)
    assert (outcome == {(True, True)}) == (name == "right")


def test_a_partition_is_told_from_an_overlap_and_a_gap() -> None:
    total, per = sym("total"), sym("per")

    def holds(low: Term, high: Term, env: dict[str, int]) -> bool:
        return bool(to_numpy(partition(low, high, const(0), total), env))

    for n, splits in itertools.product(range(9), range(1, 5)):
        size = -(-n // splits)
        for split in range(splits):
            env = {"total": n, "per": size, SPLIT.value: split, SPLITS.value: splits}
            low = SPLIT * per
            assert holds(low, min_(low + per, total), env)
            if size and split < splits - 1 and low_of(env) + size < n:
                assert not holds(low, min_(low + per + 1, total), env)
                assert not holds(low, min_(low + per - 1, total), env)


def low_of(env: dict[str, int]) -> int:
    return env[SPLIT.value] * env["per"]
