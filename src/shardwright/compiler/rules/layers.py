"""Rules of layers and reductions: products, convolutions, normalisations, attention, embeddings, losses, random draws.

Operators whose row says ``draws`` draw by global position, so that a mask does not depend on how the tensor is split.
One that draws from the device's generator would differ from rank to rank: `refuse_drawing` refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from shardwright.compiler.rules.notation import Operand, OpRule, Shape, replicated_rule
from shardwright.compiler.rules.row import Operator, term
from shardwright.errors import StrategyError


def matmul(op: Operator) -> OpRule:
    """Matmul of operands with one dim and more."""
    a, b = (len(shape) for shape in op.operands)
    batch = "* " if max(a, b) > 2 else ""
    left = "k+" if a == 1 else f"{batch}m k+"
    right = "k+" if b == 1 else f"{batch}k+ n"
    result = batch + ("m " if a > 1 else "") + ("n" if b > 1 else "")
    return op.bind(f"~ {left}, {right} -> ~ {result}")


def einsum(op: Operator) -> OpRule:
    """Return the rule that the equation of einsum states; diagonals are not split."""
    left, arrow, right = op["equation"].replace(" ", "").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = "..." * ("." in left) + "".join(once)
    terms = [_einsum_dims(text, len(shape)) for text, shape in zip(left.split(","), op.operands, strict=True)]
    result = _einsum_dims(right, len(op.results[0]))
    if any(len(set(names)) < len(names) for names in terms):
        return replicated_rule(op.operands, op.results)
    named = [list(zip(names, shape, strict=True)) for names, shape in zip(terms, op.operands, strict=True)]
    split = {name for pairs in named for name, size in pairs if size > 1}
    words = [
        term(name + "+" * (name not in result) if size > 1 or name not in split else "." for name, size in pairs)
        for pairs in named
    ]
    return op.bind(f"~ {', '.join(words)} -> {term(result, linear=True)}")


def _einsum_dims(text: str, ndim: int) -> list[str]:
    """The letters of a term of an equation; the dims of its ellipsis are e0, e1, ... from the last one on."""
    before, dots, behind = text.partition("...")
    inner = range(ndim - len(before) - len(behind)) if dots else ()
    return [*before, *(f"e{i}" for i in reversed(inner)), *behind]


def cosine_similarity(op: Operator) -> OpRule:
    """Return the rule of cosine_similarity: its dim stays whole, and tensors that broadcast are not split."""
    a, b = op.operands
    if a != b:
        return replicated_rule(op.operands, op.results)
    dim = op.dim()
    left = term(f"d{i}^" if i == dim else f"d{i}" for i in range(len(a)))
    return op.bind(f"{left}, {left} -> {term(f'd{i}' for i in range(len(a)) if i != dim)}")


def instance_norm(op: Operator) -> OpRule:
    """Every image and channel alone, unless running statistics join the images."""
    if op["running_mean"] is not None:
        return replicated_rule(op.operands, op.results)
    dots = " .".join([""] * (len(op.operands[0]) - 1))
    affine = ", c" * (len(op.operands) - 1)
    return op.bind(f"n c{dots}{affine} -> n c{dots}")


def addmm(op: Operator) -> OpRule:
    """Bias + a @ b, batched or not; the bias broadcasts, and joins once where the sum over k is split."""
    names = ["b", "m", "n"][-len(op.results[0]) :]
    result = op.results[0]
    bias = op.operands[0]
    new = len(result) - len(bias)
    left = term(names[new + i] if size == result[new + i] else "." for i, size in enumerate(bias))
    batch = "b " if len(result) == 3 else ""
    return op.bind(f"! {left}, ~ {batch}m k+, {batch}k+ n -> ~ {batch}m n")


def convolution(*, transposed: bool = False) -> Callable[[Operator], OpRule]:
    """The rule of a convolution over any spatial dims, which need their neighbours, grouped or not.

    An argument ``transposed`` of the operator counts more than ``transposed`` here.
    """

    def write(op: Operator) -> OpRule:
        spatial = len(op.operands[1]) - 2
        dots = " .".join([""] * (spatial + 1))
        n = "n " if len(op.operands[0]) == spatial + 2 else ""
        spreads = op.arguments.get("transposed", transposed)
        groups = op["groups"]
        if groups == 1:
            weight = "c+ o" if spreads else "o c+"
            return op.bind(f"~ {n}c+{dots}, {weight}{dots}, ! o -> ~ {n}o{dots}")
        sizes = {
            "g": groups, "i": op.operands[0][-spatial - 1] // groups, "o": op.results[0][-spatial - 1] // groups,
        }  # fmt: skip
        weight = "(g i^) o^" if spreads else "(g o^) i^"
        return op.bind(f"~ {n}(g i^){dots}, {weight}{dots}, ! (g o^) -> ~ {n}(g o^){dots}", **sizes)

    return write


def batch_norm(op: Operator) -> OpRule:
    """Training merges the statistics of all parts inside the operator."""
    if not op["training"]:
        return batch_norm_in_evaluation(op)
    statistics = ", c" * (len(op.results) - 1)
    return op.bind(f"n& c *&, c, c, c, c -> n c *{statistics}")


def batch_norm_in_evaluation(op: Operator) -> OpRule:
    """The statistics come in, and those that are returned are empty."""
    if any(math.prod(shape) for shape in op.results[1:]):
        return replicated_rule(op.operands, op.results)
    return op.bind(f"n+ c+ *+, c, c, c, c -> n c *{', .' * (len(op.results) - 1)}")


def batch_norm_per_replica(op: Operator) -> OpRule:
    """Every part of the batch has statistics of its own; the running ones are averaged over the parts."""
    return op.bind(f"n& c *^{', c' * (len(op.operands) - 1)} -> n c *^{', c' * (len(op.results) - 1)}")


def layer_norm(op: Operator) -> OpRule:
    """layer_norm, rms_norm and their native forms, which return statistics too."""
    inner = [f"d{i}^" for i in range(len(op["normalized_shape"]))]
    parameters = " ".join(inner)
    statistics = f", * {' '.join(['.'] * len(inner))}" * (len(op.results) - 1)
    return op.bind(f"* {parameters}, {parameters}, {parameters} -> * {parameters}{statistics}")


def group_norm(op: Operator) -> OpRule:
    r"""Group norm (n, c, \*) and its native form; groups of channels may be split, channels within one may not."""
    x = op.operands[0]
    groups = op["num_groups"] if "num_groups" in op.arguments else op["group"]
    dots = " .".join([""] * (len(x) - 1))
    sizes = {"g": groups, "c": x[1] // groups}
    statistics = ", n g" * (len(op.results) - 1)
    return op.bind(f"n (g c^){dots}, (g c^), (g c^) -> n (g c^){dots}{statistics}", **sizes)


def attention(op: Operator) -> OpRule:
    """Scaled dot product attention: batch, heads and queries may be split, and keys along with the queries.

    With fewer heads of keys than of queries, ``h = g · r``: the groups g may be split. Queries that are causal take a
    mask where they are split, which not every kernel can: they stay whole where the step has chosen its kernels. Keys
    that are split go round the ranks, which have the columns of a mask for all keys.
    """
    query, key, _ = op.operands[:3]
    grouped = bool(op["enable_gqa"]) and query[-3] != key[-3]
    sizes = {"g": key[-3], "r": query[-3] // key[-3]} if grouped else {}
    heads, shared = ("* (g r^)", "* g") if grouped else ("*", "*")
    rows = "l^" if op.arguments.get("backends") and op["is_causal"] else "l"
    keys = "s^" if op.arguments.get("backends") else "s&l"
    terms = [f"{heads} {rows} e^", f"{shared} {keys} e^", f"{shared} {keys} f^"]
    if isinstance(op["attn_mask"], Operand):
        mask = op.operands[op["attn_mask"].index]
        terms.append(_mask_term(mask, (*query[:-1], key[-2]), ["(g r^)"] * grouped + [rows, "t^"]))
    return op.bind(f"{', '.join(terms)} -> {heads} {rows} f^", **sizes)


def _mask_term(mask: Shape, scores: Shape, names: list[str]) -> str:
    """The mask broadcasts to the scores (batch, heads, queries, keys): a dim of size 1 is never split."""
    count = min(len(mask), len(names))
    named = zip(names[-count:], mask[-count:], scores[-count:], strict=True)
    words = [name if size == full else "." for name, size, full in named]
    return " ".join(["*"] * (len(mask) > count) + words)


def pooling(spatial: int, *, linear: bool = False) -> Callable[[Operator], OpRule]:
    """The rule of an operator on images (n, c, spatial dims) or (c, spatial dims): the spatial dims stay whole."""

    def write(op: Operator) -> OpRule:
        n = len(op.operands[0]) - spatial
        dims = term([f"d{i}" for i in range(n)] + ["."] * spatial, linear=linear)
        return op.bind(f"{dims} -> {', '.join([dims] * len(op.results))}")

    return write


def fractional_pooling(spatial: int) -> Callable[[Operator], OpRule]:
    """The rule of a fractional max pooling of images (n, c, spatial dims), or of one (c, spatial dims).

    Its windows come from random numbers (n, c, spatial), which are an operand.
    """

    def write(op: Operator) -> OpRule:
        batched = len(op.operands[0]) == spatial + 2
        dots = " ." * spatial
        images = f"{'n ' if batched else ''}c{dots}"
        return op.bind(f"{images}, {'n' if batched else '.'} c . -> {images}, {images}")

    return write


def windows(op: Operator) -> OpRule:
    """im2col: images (n, c, spatial dims) or (c, spatial dims) to (n, c times the kernel, windows)."""
    c, k = op.operands[0][-3], math.prod(op["kernel_size"])
    n = "n " if len(op.operands[0]) == 4 else ""
    return op.bind(f"~ {n}c . . -> ~ {n}(c k^) .", c=c, k=k)


def joined_windows(op: Operator) -> OpRule:
    """col2im: the sums of windows, back to images."""
    c, k = op.results[0][-3], math.prod(op["kernel_size"])
    n = "n " if len(op.operands[0]) == 3 else ""
    return op.bind(f"~ {n}(c k^) . -> ~ {n}c . .", c=c, k=k)


def weight_norm(op: Operator) -> OpRule:
    """_weight_norm_interface(v, g, dim): g times v over its norm, which is taken over all dims but one."""
    dim, n = op.dim(), len(op.operands[0])
    v = term(f"d{i}" if i == dim else f"d{i}^" for i in range(n))
    g = term(f"d{i}" if i == dim else "." for i in range(n))
    return op.bind(f"{v}, {g} -> {v}, {g}")


def embedding(op: Operator) -> OpRule:
    """A lookup in rows. Scaling gradients by how often a row is used needs every index: then only d is split."""
    return op.bind("~ v^ d, *^ -> ~ * d" if op["scale_grad_by_freq"] else "~ v+ d, * -> ~ * d")


def recurrent(op: Operator) -> OpRule:
    """LSTM, GRU, RNN over a sequence: only the batch may be split; without a batch nothing may."""
    batched = len(op.operands[0]) == 3
    x = ("b . ." if op["batch_first"] else ". b .") if batched else ". ."
    state = ". b ." if batched else ". ."
    rest = [state if len(shape) == 3 else term(["."] * len(shape)) for shape in op.operands[1:]]
    return op.bind(f"{', '.join([x, *rest])} -> {', '.join([x] + [state] * (len(op.results) - 1))}")


Written = Callable[[Operator], OpRule]
NONE, MEAN, SUM = 0, 1, 2  # the numbers that operators use for reduction="none", "mean", "sum"


def reduced(mark: str, *, linear: bool = False, dims: str = "dim") -> Written:
    """The rule of a reduction over the dims in the argument ``dims``, which carry ``mark``."""

    def write(op: Operator) -> OpRule:
        over = op.dims(dims) if dims in op.arguments else range(len(op.operands[0]))
        keepdim = op.arguments.get("keepdim", False)
        left = [f"d{i}{mark if i in over else ''}" for i in range(len(op.operands[0]))]
        right = ["." if i in over else f"d{i}" for i in range(len(op.operands[0])) if keepdim or i not in over]
        passes = linear and op.keeps_sums
        results = ", ".join([term(right, linear=passes)] * len(op.results))
        return op.bind(f"{term(left, linear=passes)} -> {results}")

    return write


def along(dim: str = "dim", *, linear: bool = False) -> Written:
    """The rule of an operator that keeps the shape and needs the dim in the argument ``dim`` whole (softmax, sort)."""

    def write(op: Operator) -> OpRule:
        whole = op.dims(dim)
        dims = term(
            (f"d{i}^" if i in whole else f"d{i}" for i in range(len(op.operands[0]))), linear=linear and op.keeps_sums
        )
        return op.bind(f"{dims} -> {', '.join([dims] * len(op.results))}")

    return write


def resized(*names: str, linear: bool = False) -> Written:
    """The rule of an operator that changes the sizes of the dims in the arguments ``names`` (sort of the first k)."""

    def write(op: Operator) -> OpRule:
        changed = {dim for name in names for dim in op.dims(name)}
        dims = term(("." if i in changed else f"d{i}" for i in range(len(op.operands[0]))), linear=linear)
        return op.bind(f"{dims} -> {', '.join([dims] * len(op.results))}")

    return write


def counted(op: Operator) -> OpRule:
    """histc(x, bins, min, max): counts are sums over the elements, where the bins do not depend on these."""
    mark = "+" if op["min"] < op["max"] else "^"
    return op.bind(f"*{mark} -> .")


def pointwise_loss(op: Operator) -> OpRule:
    """A loss of every element, summed or not. A mean over a local count would be wrong: whole."""
    mark = {NONE: "", SUM: "+", MEAN: "^"}[op["reduction"]]
    operands = ", ".join([f"*{mark}"] * len(op.operands))
    return op.bind(f"{operands} -> {'*' if op['reduction'] == NONE else ''}")


def cross_entropy_loss(op: Operator) -> OpRule:
    r"""Cross entropy of logits (c) or (n, c, \*) with class indices (n, \*) or with probabilities like the logits."""
    mark = "^" if op["reduction"] == MEAN else "+"
    n = f"n{mark} " if len(op.operands[0]) > 1 else ""
    indices = f"{n}*{mark}"
    target = f"{n}c^ *{mark}" if op.operands[0] == op.operands[1] else indices
    return op.bind(f"{n}c^ *{mark}, {target}, c^ -> {indices if op['reduction'] == NONE else ''}")


def nll_loss(op: Operator) -> OpRule:
    r"""The sum of the chosen log-probabilities (n, c, \*), and the sum of the weights of their classes."""
    mark = "^" if op["reduction"] == MEAN else "+"
    n = f"n{mark} " if len(op.operands[0]) > 1 else ""
    losses = f"{n}*{mark}" if op["reduction"] == NONE else ""
    return op.bind(f"{n}c^ *{mark}, {n}*{mark}, c^ -> {losses}" + ", " * (len(op.results) - 1))


def cross_entropy_sum(op: Operator) -> OpRule:
    r"""The summed cross entropy of logits (n, c, \*), with the weights of the classes behind the target, if any.

    The classes may be split where the target holds indices of them, nothing weighs them, and nothing is smoothed.
    """
    logits, target = op.operands[:2]
    weights, smoothing = op.operands[2:], op.args[4] if len(op.args) > 4 else 0.0
    if logits == target or weights or smoothing:
        targets = "n+ c^ *+" if logits == target else "n+ *+"
        return op.bind(f"n+ c^ *+, {targets}{', c^' * len(weights)} -> ")
    return op.bind("n+ c& *+, n+ *+ -> ")


def cross_entropy_count(op: Operator) -> OpRule:
    r"""The summed weights of the classes of a target (n, \*)."""
    return op.bind(f"*+{', c^' * (len(op.operands) - 1)} -> ")


def draws(op: str) -> bool:
    """Return whether torch says of an operator that it draws random numbers."""
    operator: object = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def refuse_drawing(op: str, where: str = "") -> None:
    """Refuse an operator, of which no row says that it draws, where torch says that it does.

    ``where`` is the user's line, where there is one.

    Raises:
        StrategyError: where ``op`` is such an operator.
    """
    if draws(op):
        raise StrategyError(
            f"{op} draws random numbers from each device's own generator, so that ranks would disagree"
            f"{', at ' * bool(where)}{where}\n"
            "Draw them outside of the loss function and pass them in with the batch, or by one of torch's operators "
            "that are drawn by global position, such as torch.rand, randn, randint, bernoulli, multinomial or poisson."
        )


def normal(op: Operator) -> OpRule:
    """Return the rule of normal: of tensors that broadcast, of a tensor and a number, or of two numbers and a size."""
    return op.bind(f"{', '.join(['*'] * len(op.operands))} -> *")


def multinomial(op: Operator) -> OpRule:
    """Choices among the last dim of the weights, which are independent of each other with replacement."""
    rows = "b " if len(op.operands[0]) == 2 else ""
    return op.bind(f"{rows}c^ -> {rows}{'s' if op['replacement'] else '.'}")
