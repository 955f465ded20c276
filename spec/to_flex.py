"""A mask as a FlexAttention `mask_mod(b, h, q_idx, kv_idx)`: its source text, and the function.

The text calls torch where a part depends on an index or a table, and is plain Python elsewhere:
lengths and parameters are ints that the function closes over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from spec.domain import BOTTOM_RIGHT, Frame
from spec.environment import sizes
from spec.masks import Mask
from spec.term import OPS, Rule, SpecError, Term, fold, postorder, symbols, tables
from spec.to_text import ATOM, COMPARE, TERNARY, Piece, call, wrap
from spec.to_text import RULES as TEXT

LENGTHS = frozenset({"seqlen_q", "seqlen_k", "cu_seqlens_q"})

# Defined in the text where it calls them.
HELPERS = {
    "any_of": """\
def any_of(q_idx, found):
    seen = torch.zeros_like(q_idx, dtype=torch.bool)
    for each in found:
        seen = seen | each
    return seen
""",
    # A quotient by zero is 0, and the remainder the dividend.
    "floordiv": """\
def floordiv(a, b):
    return a // (b + (b == 0)) * (b != 0)
""",
    "floormod": """\
def floormod(a, b):
    return a - b * floordiv(a, b)
""",
    "truncdiv": """\
def truncdiv(a, b):
    size = floordiv(abs(a), abs(b))
    return size - 2 * size * ((a < 0) != (b < 0))
""",
    "truncmod": """\
def truncmod(a, b):
    return a - b * truncdiv(a, b)
""",
}


def helpers(body: str) -> str:
    """What `body` calls, and what that calls, before it is called."""
    texts: list[str] = []
    for name in reversed(HELPERS):
        if any(f"{name}(" in text for text in (body, *texts)):
            texts.insert(0, HELPERS[name])
    return "".join(f"\n\n{text}" for text in texts)


def varying(root: Term, indices: Collection[str]) -> set[Term]:
    """The parts of `root` that are tensors: an index, a read, an `any`, and what holds one."""
    found: set[Term] = set()
    for t in postorder(root):
        index = t.op == "sym" and t.value in indices
        if index or t.op in ("read", "any") or not found.isdisjoint(t.args):
            found.add(t)
    return found


def never_zero(divisor: Term, tensors: Collection[Term]) -> bool:
    """A number, or a parameter: `mask_mod` refuses one that is 0."""
    return divisor.op == "sym" and divisor not in tensors or (
        divisor.op == "const" and divisor.value != 0
    )


def rules(tensors: Collection[Term]) -> Mapping[str, Rule]:
    """Term to Python text, where `tensors` are the parts that are torch tensors."""

    def connect(sign: str) -> Rule:
        def rule(node: Term, *args: Piece) -> Piece:
            return f" {sign} ".join(wrap(a, ATOM) for a in args), COMPARE

        return rule

    def bounded(name: str, side: str) -> Rule:
        def rule(node: Term, a: Piece, b: Piece) -> Piece:
            if node not in tensors:
                return f"{name}({a[0]}, {b[0]})", ATOM
            if node.args[0] not in tensors:
                a, b = b, a
            return f"torch.clamp({a[0]}, {side}={b[0]})", ATOM

        return rule

    def divided(name: str) -> Rule:
        def rule(node: Term, *args: Piece) -> Piece:
            plain = TEXT if never_zero(node.args[1], tensors) else {}
            return plain.get(name, call(name))(node, *args)

        return rule

    def negated(node: Term, a: Piece) -> Piece:
        return (f"~{wrap(a, ATOM)}" if node in tensors else f"(not {wrap(a, ATOM)})"), ATOM

    def chosen(node: Term, c: Piece, a: Piece, b: Piece) -> Piece:
        if node not in tensors:
            return TEXT["ite"](node, c, a, b)
        test = c[0]
        if node.args[0] not in tensors:
            test = f"torch.full_like(q_idx, {test}, dtype=torch.bool)"
        return f"torch.where({test}, {a[0]}, {b[0]})", ATOM

    # FlexAttention indexes a table under `vmap` only where every index is a tensor: numbers first.
    def element(node: Term, *index: Piece) -> Piece:
        pairs = [(text, arg in tensors) for (text, _), arg in zip(index, node.args, strict=True)]
        by_tensor = [text for text, tensor in pairs if tensor]
        if len(by_tensor) < len(pairs):
            first = ", ".join(":" if tensor else text for text, tensor in pairs)
            first = f"{node.value}[{first}]"
        else:
            first = node.value
        return first + (f"[{', '.join(by_tensor)}]" if by_tensor else ""), ATOM

    def some(node: Term, count: Piece, body: Piece) -> Piece:
        if node.args[0] in tensors:
            raise SpecError("FlexAttention needs a count that is the same in every row")
        return f"any_of(q_idx, ({wrap(body, TERNARY)} for {node.value} in range({count[0]})))", ATOM

    return {
        **TEXT,
        "floordiv": divided("floordiv"),
        "floormod": divided("floormod"),
        "truncdiv": call("truncdiv"),
        "truncmod": call("truncmod"),
        "min": bounded("min", "max"),
        "max": bounded("max", "min"),
        "and": connect("&"),
        "or": connect("|"),
        "not": negated,
        "ite": chosen,
        "read": element,
        "any": some,
    }


assert rules(()).keys() == OPS.keys()


def source(formula: Term, frame: Frame = BOTTOM_RIGHT, sentence: str = "") -> str:
    """Python text that defines `mask_mod`; what it closes over is named in its first comment."""
    indices = {"b", "h", "q_idx", "kv_idx"}
    absolute = {name: part for name, part in
                (("q", frame.q), ("kv", frame.kv), ("token", frame.token))
                if name in symbols(formula)}
    framed = frame(formula)
    names = sorted(symbols(framed) - indices) + sorted(f"{t} (a tensor)" for t in tables(framed))
    body = _text(formula, indices | {"q", "kv", "token"})
    if not varying(framed, indices):
        body = f"torch.full_like(q_idx, {body}, dtype=torch.bool)"
    quoted = sentence.replace("\\", r"\\").replace('"', r"\"")
    lines = [f'    """{quoted}"""'] if sentence else []
    lines += [f"    {name} = {_text(part, indices)}" for name, part in absolute.items()]
    head = f"# closes over {', '.join(names)}\n" if names else ""
    return (f"{head}import torch\n{helpers(body)}\n\ndef mask_mod(b, h, q_idx, kv_idx):\n"
            + "\n".join([*lines, f"    return {body}"]) + "\n")


def _text(part: Term, indices: Collection[str]) -> str:
    return fold(part, rules(varying(part, indices)))[0]


def mask_mod(
    formula: Term, values: Mapping[str, Any], frame: Frame = BOTTOM_RIGHT, sentence: str = ""
) -> Callable[..., Any]:
    """The function that `source` defines, over `values`: ints, and a tensor for each table."""
    names = symbols(frame(formula)) - {"b", "h", "q_idx", "kv_idx"} | tables(frame(formula))
    for name in sorted(names - values.keys()):
        raise SpecError(f"no value for {name!r}")
    for t in postorder(formula):
        if t.op in ("floordiv", "floormod") and values.get(t.args[1].value, 1) == 0:
            raise SpecError(f"{t.args[1].value} is 0 and divides")
    scope = dict(values)
    exec(compile(source(formula, frame, sentence), "<mask_mod>", "exec"), scope)
    return scope["mask_mod"]


def to_flex(mask: Mask, frame: Frame = BOTTOM_RIGHT, **values: Any) -> Callable[..., Any]:
    """`mask` for `torch.nn.attention.flex_attention.create_block_mask`.

    `values`: ints `seqlen_q` and `seqlen_k`, an int for each parameter, and for each table an
    integer tensor of its whole shape, on the device of the attention. `num_ranges` follows from
    `ranges`. A sequence is the batch index `b`. Raises SpecError for a value that is missing,
    unknown or out of range; the facts about tables are the caller's to keep.
    """
    for name in sorted(values.keys() - {*mask.params, *mask.tables, *LENGTHS}):
        raise SpecError(f"{mask.name} has no parameter or table {name!r}")
    values = {**sizes(mask, values), **values}
    for name, param in mask.params.items():
        if name in values:
            param.check(values[name])
    return mask_mod(mask.formula, values, frame, mask.sentence)
