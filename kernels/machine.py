"""Machine integers as terms: what each operation on words of 1 to 64 bits means, exactly.

A word is a number or a row of bits, whichever the code treats it as, and turns into the other on
demand without loss. `Num(term)` is the word read as a signed integer. Wrapping arithmetic gives
the unbounded result and notes it: the term equals the word wherever every noted value fits its
width. What an operation needs besides (a divisor that is not zero) is noted as a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kernels.simplify import (
    ZERO,
    at_most,
    both,
    choose,
    either,
    exclusive,
    floordiv,
    floormod,
    less,
    minus,
    negation,
    number_of,
    plus,
    same,
    signed_range,
    span,
    times,
    truncdiv,
    truncmod,
)
from spec.term import FALSE, TRUE, Term, const


class CannotLift(Exception):
    """Code outside the lifter's vocabulary; the message is `location: operation: reason`."""


class Notes(Protocol):
    """Where an operation leaves what its result depends on."""

    def fits(self, value: Term, width: int) -> None: ...
    def needs(self, claim: Term) -> None: ...


@dataclass(frozen=True, slots=True)
class Num:
    term: Term
    width: int


@dataclass(frozen=True, slots=True)
class Bits:
    """Lowest bit first. A truth value is a word of one bit."""

    bits: tuple[Term, ...]

    @property
    def width(self) -> int:
        return len(self.bits)


Word = Num | Bits


def constant(value: int, width: int) -> Num:
    low, _ = signed_range(width)
    return Num(const((value - low) % (1 << width) + low), width)


def number(word: Word) -> Term:
    """The word as a signed integer."""
    if isinstance(word, Num):
        return word.term
    top = word.width - 1
    return _weighted(word.bits, lambda i: -(1 << i) if i == top else 1 << i)


def unsigned(word: Word) -> Term:
    if isinstance(word, Bits):
        return _weighted(word.bits, lambda i: 1 << i)
    wrapped = plus(word.term, const(1 << word.width))
    return choose(less(word.term, ZERO), wrapped, word.term)


def _weighted(bits: tuple[Term, ...], weight: Callable[[int], int]) -> Term:
    total = ZERO
    for i, bit in enumerate(bits):
        total = plus(total, choose(bit, const(weight(i)), ZERO))
    return total


def bits_of(word: Word) -> tuple[Term, ...]:
    if isinstance(word, Bits):
        return word.bits
    value, zeros = word.term, 0
    factor = number_of(value.args[1]) if value.op == "mul" else None
    if factor and (clear := _mask_length(factor - 1)) is not None:
        value, zeros = value.args[0], min(clear, word.width)
    return (FALSE,) * zeros + tuple(
        same(floormod(floordiv(value, const(1 << i)), const(2)), const(1))
        for i in range(word.width - zeros)
    )


def from_unsigned(value: Term, width: int) -> Num:
    sign = const(1 << width - 1)
    return Num(choose(less(value, sign), value, minus(value, const(1 << width))), width)


def truth(bit: Term) -> Bits:
    return Bits((bit,))


def row_like(word: Word) -> bool:
    """Whether a word is bits, or as well bits as a number."""
    return isinstance(word, Bits) or word.term.op == "const"


def _wrapped(notes: Notes, value: Term, width: int) -> Num:
    if (known := number_of(value)) is not None:
        return constant(known, width)
    notes.fits(value, width)
    return Num(value, width)


def add(notes: Notes, a: Word, b: Word) -> Word:
    if isinstance(a, Bits) and isinstance(b, Bits):
        pairs = list(zip(a.bits, b.bits, strict=True))
        if all(FALSE in pair for pair in pairs):
            return Bits(tuple(map(either, pairs)))
    x, y = number(a), number(b)
    if x.op == "truncdiv" and number_of(y) == -1:
        # The first half of rounding down: only the smallest integer divided by 1 leaves no room.
        least = const(signed_range(a.width)[0])
        notes.needs(either((less(least, x.args[0]), negation(same(x.args[1], const(1))))))
        return Num(plus(x, y), a.width)
    return _wrapped(notes, plus(x, y), a.width)


def sub(notes: Notes, a: Word, b: Word) -> Word:
    x, y = number(a), number(b)
    if y.op == "truncmod" and y.args[0] is x:
        # Between zero and the dividend.
        return Num(minus(x, y), a.width)
    return _wrapped(notes, minus(x, y), a.width)


def mul(notes: Notes, a: Word, b: Word) -> Word:
    x, y = number(a), number(b)
    if x.op == "truncdiv" and x.args[1] is y:
        # Between zero and the dividend.
        return Num(times(x, y), a.width)
    return _wrapped(notes, times(x, y), a.width)


def _signed_division(operator: Callable[[Term, Term], Term]) -> Rule:
    def rule(notes: Notes, a: Word, b: Word) -> Word:
        x, y = number(a), number(b)
        least = const(signed_range(a.width)[0])
        notes.needs(negation(same(y, ZERO)))
        notes.needs(either((less(least, x), negation(same(y, const(-1))))))
        return Num(operator(x, y), a.width)

    return rule


def _unsigned_division(operator: Callable[[Term, Term], Term]) -> Rule:
    def rule(notes: Notes, a: Word, b: Word) -> Word:
        x, y = unsigned(a), unsigned(b)
        notes.needs(negation(same(y, ZERO)))
        return from_unsigned(operator(x, y), a.width)

    return rule


def _mask_length(value: int | None) -> int | None:
    """k where `value` is 2**k - 1."""
    if value is not None and value >= 0 and value & (value + 1) == 0:
        return value.bit_length()
    return None


def and_(notes: Notes, a: Word, b: Word) -> Word:
    if isinstance(a, Num) and isinstance(b, Num):
        x, y = (b.term, a.term) if a.term.op == "const" else (a.term, b.term)
        mask = number_of(y)
        if (kept := _mask_length(mask)) is not None:
            return Num(floormod(x, const(1 << kept)), a.width)
        if mask is not None and (cleared := _mask_length(-1 - mask)) is not None:
            unit = const(1 << cleared)
            return Num(times(floordiv(x, unit), unit), a.width)
    return _bitwise(a, b, both)


def or_(notes: Notes, a: Word, b: Word) -> Word:
    for word, other in ((a, b), (b, a)):
        if isinstance(word, Num) and word.term is ZERO:
            return other
    return _bitwise(a, b, either)


def xor(notes: Notes, a: Word, b: Word) -> Word:
    if isinstance(a, Num) and isinstance(b, Num) and number_of(b.term) == -1:
        return Num(minus(const(-1), a.term), a.width)
    return _bitwise(a, b, lambda pair: exclusive(*pair))


def _bitwise(a: Word, b: Word, operator: Callable[[tuple[Term, ...]], Term]) -> Word:
    bits = tuple(map(operator, zip(bits_of(a), bits_of(b), strict=True)))
    values = [bit.value for bit in bits if bit.op == "const"]
    if len(values) == len(bits) > 1:
        return constant(sum(bit << i for i, bit in enumerate(values)), a.width)
    return Bits(bits)


def moved(word: Word, shift: Term, source: Callable[[int, int], int | None]) -> Bits:
    """Bits shifted by an amount that is not a constant, by cases; zero beyond the word's width.

    Bit `i` of the result, for a shift by `n`, is bit `source(i, n)` of the word.
    """
    bits = bits_of(word)
    low, high = max(span(shift)[0], 0), min(span(shift)[1], word.width - 1)

    def bit(i: int) -> Term:
        sources = {n: source(i, n) for n in range(low, high + 1)}
        values = {n: bits[j] for n, j in sources.items() if j is not None}
        runs = _runs(n for n, value in values.items() if value is TRUE)
        return either(
            [both((at_most(const(a), shift), at_most(shift, const(b)))) for a, b in runs]
            + [both((same(shift, const(n)), v)) for n, v in values.items() if v is not TRUE]
        )

    return Bits(tuple(map(bit, range(word.width))))


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = runs[-1][0], n
        else:
            runs.append((n, n))
    return runs


def _left(width: int) -> Callable[[int, int], int | None]:
    return lambda i, n: i - n if i >= n else None


def _right(width: int) -> Callable[[int, int], int | None]:
    return lambda i, n: i + n if i + n < width else None


def _right_signed(width: int) -> Callable[[int, int], int | None]:
    return lambda i, n: min(i + n, width - 1)


def _shift(
    source: Callable[[int], Callable[[int, int], int | None]],
    by_number: Callable[[Notes, Word, int], Word],
    clamps: bool,
) -> Rule:
    def rule(notes: Notes, a: Word, b: Word) -> Word:
        amount = number(b)
        known = number_of(amount)
        if not clamps:
            notes.needs(both((at_most(ZERO, amount), less(amount, const(a.width)))))
        if known == 0:
            return a
        if known is not None and 0 < known < a.width and not isinstance(a, Bits):
            return by_number(notes, a, known)
        return moved(a, amount, source(a.width))

    return rule


def _times_power(notes: Notes, a: Word, amount: int) -> Word:
    return _wrapped(notes, times(number(a), const(1 << amount)), a.width)


def _clamped_times_power(notes: Notes, a: Word, amount: int) -> Word:
    if number(a).op == "const":
        return _times_power(notes, a, amount)
    return moved(Bits(bits_of(a)), const(amount), _left(a.width))


def _over_power(notes: Notes, a: Word, amount: int) -> Word:
    return from_unsigned(floordiv(unsigned(a), const(1 << amount)), a.width)


def _signed_over_power(notes: Notes, a: Word, amount: int) -> Word:
    return Num(floordiv(number(a), const(1 << amount)), a.width)


def _ordered(
    operator: Callable[[Term, Term], Term], read: Callable[[Word], Term]
) -> Callable[[Word, Word], Term]:
    return lambda a, b: operator(read(a), read(b))


def equal(a: Word, b: Word) -> Term:
    if isinstance(a, Bits) or isinstance(b, Bits):
        pairs = zip(bits_of(a), bits_of(b), strict=True)
        return both(negation(exclusive(x, y)) for x, y in pairs)
    return same(a.term, b.term)


# In the order of LLVM's predicate numbers.
PREDICATES: tuple[Callable[[Word, Word], Term], ...] = (
    equal,
    lambda a, b: negation(equal(a, b)),
    _ordered(less, number),
    _ordered(at_most, number),
    _ordered(lambda x, y: less(y, x), number),
    _ordered(lambda x, y: at_most(y, x), number),
    _ordered(less, unsigned),
    _ordered(at_most, unsigned),
    _ordered(lambda x, y: less(y, x), unsigned),
    _ordered(lambda x, y: at_most(y, x), unsigned),
)


def icmp(notes: Notes, a: Word, b: Word, *, predicate: int) -> Word:
    return truth(PREDICATES[predicate](a, b))


def select(notes: Notes, c: Word, a: Word, b: Word) -> Word:
    (condition,) = bits_of(c)
    return merged(condition, a, b)


def merged(condition: Term, a: Word, b: Word) -> Word:
    if isinstance(a, Num) and isinstance(b, Num) or not (row_like(a) and row_like(b)):
        return Num(choose(condition, number(a), number(b)), a.width)
    pairs = zip(bits_of(a), bits_of(b), strict=True)
    return Bits(tuple(choose(condition, x, y) for x, y in pairs))


def sext(notes: Notes, a: Word, *, width: int) -> Word:
    if isinstance(a, Bits):
        return Bits(a.bits + a.bits[-1:] * (width - a.width))
    return Num(a.term, width)


def zext(notes: Notes, a: Word, *, width: int) -> Word:
    if isinstance(a, Bits):
        return Bits(a.bits + (FALSE,) * (width - a.width))
    return Num(unsigned(a), width)


def trunc(notes: Notes, a: Word, *, width: int) -> Word:
    if isinstance(a, Bits) or width < 32:
        return Bits(bits_of(a)[:width])
    return _wrapped(notes, a.term, width)


Rule = Callable[..., Word]

# Operation -> what it does to words. A vector operation does it to each lane.
RULES: dict[str, Rule] = {
    "llvm.add": add,
    "llvm.sub": sub,
    "llvm.mul": mul,
    "llvm.sdiv": _signed_division(truncdiv),
    "llvm.srem": _signed_division(truncmod),
    "llvm.udiv": _unsigned_division(floordiv),
    "llvm.urem": _unsigned_division(floormod),
    "llvm.and": and_,
    "llvm.or": or_,
    "llvm.xor": xor,
    "llvm.shl": _shift(_left, _times_power, clamps=False),
    "llvm.lshr": _shift(_right, _over_power, clamps=False),
    "llvm.ashr": _shift(_right_signed, _signed_over_power, clamps=False),
    "shl.b32": _shift(_left, _clamped_times_power, clamps=True),
    "shr.u32": _shift(_right, _over_power, clamps=True),
    "llvm.icmp": icmp,
    "llvm.select": select,
    "llvm.sext": sext,
    "llvm.zext": zext,
    "llvm.trunc": trunc,
}
