"""A constructor that simplifies gives what the plain operator gives, inside the span it states."""

from collections.abc import Callable, Mapping
from random import Random

import numpy as np
import pytest

from kernels import simplify
from spec.term import INT, TRUE, Term, const, eq, ite, max_, min_, not_, sym, truncdiv, truncmod
from spec.to_numpy import to_numpy

VALUES = np.array([-(2**31), -7, -3, -2, -1, 0, 1, 2, 3, 4, 9, 2**31 - 1])
ENV = {name: axis.ravel() for name, axis in zip("xyz", np.meshgrid(*[VALUES] * 3), strict=True)}

Make = Callable[..., Term]
ARITHMETIC: Mapping[str, tuple[Make, Make]] = {
    "plus": (simplify.plus, Term.__add__),
    "minus": (simplify.minus, Term.__sub__),
    "least": (min_, min_),
    "most": (max_, max_),
}
# By a number that is not zero, as compiled code has them.
BY_NUMBER: Mapping[str, tuple[Make, Make]] = {
    "times": (simplify.times, Term.__mul__),
    "floordiv": (simplify.floordiv, Term.__floordiv__),
    "floormod": (simplify.floormod, Term.__mod__),
    "truncdiv": (simplify.truncdiv, truncdiv),
    "truncmod": (simplify.truncmod, truncmod),
}
COMPARISONS: Mapping[str, tuple[Make, Make]] = {
    "less": (simplify.less, Term.__lt__),
    "at_most": (simplify.at_most, Term.__le__),
    "same": (simplify.same, eq),
}
Pair = tuple[Term, Term]


def draw_int(random: Random, depth: int) -> Pair:
    if depth == 0 or random.random() < 0.1:
        leaf = random.choice([sym("x"), sym("y"), sym("z"), const(random.choice([-3, 0, 1, 4]))])
        return leaf, leaf
    kind = random.choice(["arithmetic", "number", "choice", "rounding"])
    a, plain_a = draw_int(random, depth - 1)
    if kind == "number":
        simple, plain = random.choice(list(BY_NUMBER.values()))
        number = const(random.choice([-3, -1, 1, 2, 4]))
        return simple(a, number), plain(plain_a, number)
    if kind == "rounding":
        divide, by = random.choice([truncdiv, Term.__floordiv__]), const(random.choice([-3, 2]))
        quotient, plain = divide(a, by), divide(plain_a, by)
        return simplify.minus(a, simplify.times(quotient, by)), plain_a - plain * by
    b, plain_b = draw_int(random, depth - 1)
    if kind == "arithmetic":
        simple, plain = random.choice(list(ARITHMETIC.values()))
        return simple(a, b), plain(plain_a, plain_b)
    c, plain_c = draw_bool(random, depth - 1)
    return simplify.choose(c, a, b), ite(plain_c, plain_a, plain_b)


def draw_bool(random: Random, depth: int) -> Pair:
    kind = random.choice(["comparison", "comparison", "junction", "negation", "choice", "other"])
    if depth == 0 or kind == "comparison":
        simple, plain = random.choice(list(COMPARISONS.values()))
        (a, plain_a), (b, plain_b) = (draw_int(random, max(depth - 1, 0)) for _ in range(2))
        return simple(a, b), plain(plain_a, plain_b)
    (a, plain_a), (b, plain_b) = (draw_bool(random, depth - 1) for _ in range(2))
    if kind == "negation":
        return simplify.negation(a), not_(plain_a)
    if kind == "other":
        return simplify.exclusive(a, b), ite(plain_a, not_(plain_b), plain_b)
    c, plain_c = draw_bool(random, depth - 1)
    if kind == "choice":
        return simplify.choose(c, a, b), ite(plain_c, plain_a, plain_b)
    if random.random() < 0.5:
        return simplify.both((a, b, TRUE, c)), plain_a & plain_b & plain_c
    return simplify.either((a, c, b)), plain_a | plain_b | plain_c


@pytest.mark.parametrize("seed", range(40))
def test_simplified_is_plain(seed: int) -> None:
    random = Random(seed)
    for _ in range(25):
        for simple, plain in (draw_int(random, 4), draw_bool(random, 4)):
            value = np.broadcast_to(to_numpy(plain, ENV), len(ENV["x"]))
            assert np.array_equal(np.broadcast_to(to_numpy(simple, ENV), len(value)), value)
            if simple.sort == INT:
                low, high = simplify.span(simple)
                assert low <= value.min() and value.max() <= high


def test_the_compilers_rounding_is_read_back() -> None:
    x, y = sym("x"), sym("y")
    quotient = truncdiv(x, y)
    floor = simplify.choose(
        simplify.rounds_down(x, y), simplify.plus(quotient, const(-1)), quotient
    )
    assert floor is x // y
    assert simplify.minus(x, simplify.times(x // y, y)) is x % y
    assert simplify.minus(x, simplify.times(quotient, y)) is truncmod(x, y)


def test_parts_that_decide_nothing_go() -> None:
    x, y = sym("x"), sym("y")
    assert simplify.both((x < y, TRUE, x < y)) is (x < y)
    assert simplify.both((x < y, y <= x)).value is False
    assert simplify.choose(x < y, x, y) is min_(x, y)
    assert simplify.at_most(max_(x, 0), const(5)) is (x <= 5)
    assert simplify.less(x % 8, const(8)) is TRUE
    assert simplify.choose(x <= 0, y < 3, (y < 3) & (x < y)) is (y < 3) & ((x <= 0) | (x < y))
