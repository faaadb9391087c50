"""Counts softmax attentions in an ATen graph by data flow alone, without matching any form.

A *site* is a set of positive weights, normalised by their sum, that was computed from a batched product (the scores)
and goes into another product (the values). Anything may stand between the two products except a further product, a
reduction, a normalisation layer, a convolution or an embedding. That is looser than any matcher can be: look-alikes
(weights over the wrong axis, mixed heads) are counted as well, so the count is an upper bound for a matcher.

The graph is the joint forward-backward graph, or the inference graph, that Inductor's passes receive: functional ATen
ops after decomposition, where ``softmax`` has become ``amax, sub, exp, sum, div``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
prims = torch.ops.prims

BATCHED_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
FLAT_PRODUCTS = {aten.mm.default, aten.addmm.default}
PRODUCTS = BATCHED_PRODUCTS | FLAT_PRODUCTS
WHOLE_SOFTMAX = {aten._softmax.default, aten._safe_softmax.default, aten.softmax.int}
REDUCTIONS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.var_mean.correction}
BARRIERS = PRODUCTS | {
    aten.convolution.default,
    aten.embedding.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.var_mean.correction,
}
"""Where a walk from the softmax stops: the tensor on the other side is a hidden state, not a score or a weight."""

LIGHT = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}
"""Ops that only move or cast values."""


@dataclass(frozen=True)
class Site:
    """One attention: the score product, the node that makes the weights positive, the value product."""

    scores: Node
    weights: Node
    values: Node


def attention_sites(graph: Graph) -> list[Site]:
    """Attentions of the forward part of ``graph`` in graph order, one an exponential (or whole softmax node)."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    backward = backward_nodes(graph)
    sites = []
    for node in graph.nodes:
        if node in backward or not is_normalised(node):
            continue
        scores = [found for found in walk(node, upward, lambda n: n in BARRIERS) if is_product_of_activations(found)]
        values = [
            found
            for found in walk(node, downward, lambda n: n in BARRIERS or n in REDUCTIONS)
            if found.target in PRODUCTS and found not in backward
        ]
        if all(found.target in FLAT_PRODUCTS for found in scores):
            # scores without a batch dimension meet values without one; a linear layer in front of a softmax does not
            values = [found for found in values if found.target in FLAT_PRODUCTS]
        if scores and values:
            sites.append(Site(max(scores, key=position.__getitem__), node, min(values, key=position.__getitem__)))
    return sites


def fused_calls(graph: Graph, fragment: str) -> int:
    """Calls in ``graph`` of forward ops whose qualified name contains ``fragment``."""
    calls = 0
    for node in graph.nodes:
        if node.op == "call_function":
            name = str(node.target)
            calls += fragment in name and "backward" not in name
    return calls


def backward_nodes(graph: Graph) -> set[Node]:
    """Nodes that depend on a tangent, the placeholders that AOTAutograd adds for the gradients of the outputs."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target).startswith("tangents"):
                found.add(node)
        elif node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def is_normalised(node: Node) -> bool:
    """Whether ``node`` holds softmax weights, or exponentials that are divided by their sum somewhere."""
    if node.op != "call_function":
        return False
    if node.target in WHOLE_SOFTMAX:
        return True
    if node.target is not aten.exp.default:
        return False
    if any(use.target is aten.sum.dim_IntList for use in light_uses(node)):
        return True
    # exp(x - log(sum(exp(x)))), as log_softmax().exp() and logsumexp leave it
    shifted = node.args[0]
    while isinstance(shifted, Node) and shifted.target in LIGHT:
        shifted = shifted.args[0]
    if not isinstance(shifted, Node) or shifted.target is not aten.sub.Tensor:
        return False
    return isinstance(shifted.args[1], Node) and has_log_of_sum(shifted.args[1])


def has_log_of_sum(node: Node) -> bool:
    """Whether ``node`` is a logarithm of a sum, up to pointwise terms (the row maximum that is added back)."""

    def stop(target: object) -> bool:
        return target in REDUCTIONS or target in BARRIERS or target is aten.amax.default

    seen = [node, *walk(node, upward, stop)]
    return any(n.target is aten.log.default for n in seen) and any(n.target is aten.sum.dim_IntList for n in seen)


def is_product_of_activations(node: Node) -> bool:
    """A product of two activations.

    A plain ``mm`` is nearly always a linear layer: one side is a graph input (the weight), the other is not. The scores
    of an attention without a batch have both sides or neither among the inputs.
    """
    if node.target in BATCHED_PRODUCTS:
        return True
    if node.target is not aten.mm.default:
        return False
    left, right = (is_input(source) for source in node.args[:2])
    return left == right


def is_input(node: object) -> bool:
    while isinstance(node, Node) and node.op == "call_function" and node.target in LIGHT:
        node = node.args[0]
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def upward(node: Node) -> Iterable[Node]:
    return node.all_input_nodes


def downward(node: Node) -> Iterable[Node]:
    return node.users


def walk(start: Node, step: Callable[[Node], Iterable[Node]], stop: Callable[[object], bool]) -> list[Node]:
    """Nodes reached from ``start`` by ``step``; a node whose target satisfies ``stop`` is listed but not passed."""
    seen, queue, found = {start}, [start], []
    while queue:
        for neighbour in step(queue.pop(0)):
            if neighbour in seen or neighbour.op != "call_function":
                continue
            seen.add(neighbour)
            found.append(neighbour)
            if not stop(neighbour.target):
                queue.append(neighbour)
    return found


def light_uses(node: Node) -> list[Node]:
    """Users of ``node``, looking through ops that only move or cast values."""
    found = []
    queue = [node]
    while queue:
        for use in queue.pop().users:
            found.append(use)
            if use.target in LIGHT:
                queue.append(use)
    return found
