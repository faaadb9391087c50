"""Attention that cannot be replaced: gradients cut, operands overwritten, other dtypes, sizes, devices, transforms."""

from __future__ import annotations

import torch

from tests.patterns.forms import HEADS, scores
from tests.patterns.lookalikes.base import lookalike

INTEGERS = "the product of queries and keys is of dtype torch.int64"
TRANSFORM = "inside a torch.func transform"


# ------------------------------------------------------------------------------------------------ gradients and writes
@lookalike("gradient is cut between the scores and the softmax")
def detached_scores(q, k, v):
    return scores(q, k).detach().softmax(-1) @ v


@lookalike("gradient is cut between the softmax and the product with V")
def detached_weights(q, k, v):
    return scores(q, k).softmax(-1).detach() @ v


@lookalike("gradient does not flow through matmul")
def scores_without_gradient(q, k, v):
    with torch.no_grad():
        s = scores(q, k)
    return s.softmax(-1) @ v


@lookalike("gradient does not flow through p ")
def weights_without_gradient(q, k, v):
    s = scores(q, k)
    with torch.no_grad():
        p = s.softmax(-1)
    return p @ v


@lookalike("gradient is cut between the scores and the softmax")
def data_of_the_scores(q, k, v):
    return scores(q, k).data.softmax(-1) @ v


@lookalike("masked after the softmax, otherwise")
def slice_written_into_weights(q, k, v):
    p = scores(q, k).softmax(-1) * 1.0
    p[..., 0] = 0.0
    return p @ v


@lookalike("overwritten in place before the product with V")
def input_overwritten_after_use(q, k, v):
    s = scores(q, k)
    k.detach().mul_(2.0)
    return s.softmax(-1) @ v


@lookalike("overwritten in place before the product with V")
def input_overwritten_through_data(q, k, v):
    s = scores(q, k)
    k.data.mul_(2.0)
    return s.softmax(-1) @ v


# ------------------------------------------------------------------------------------------------------------ operands
@lookalike("view_as_real between the scores and the softmax", lambda d: (d.normal(2, 8, 8).to(torch.complex128),) * 2)
def complex_scores(q, v):
    return (q @ q.mT).real.softmax(-1) @ v.real


@lookalike("size 0", lambda d: (d.normal(2, 2, 4, 8), d.normal(2, 2, 0, 8), d.normal(2, 2, 0, 8)))
def no_keys(q, k, v):
    return scores(q, k).softmax(-1) @ v


@lookalike("size 0", lambda d: (d.normal(2, 2, 0, 8), d.normal(2, 2, 4, 8), d.normal(2, 2, 4, 8)))
def no_queries(q, k, v):
    return scores(q, k).softmax(-1) @ v


@lookalike("the product with V is not in this graph")
def indexed_keys_by_data(q, k, v):
    keep = k[0, 0, :, 0] > 0
    return scores(q, k[:, :, keep]).softmax(-1) @ v[:, :, keep]


@lookalike(INTEGERS, lambda d: tuple(d.integers(9, 2, HEADS, 8, 8) for _ in range(3)))
def integer_operands(q, k, v):
    return (q @ k.mT).softmax(-1, dtype=torch.float32) @ v.float()


@lookalike(INTEGERS, lambda d: tuple(d.integers(3, 2, HEADS, 8, 8) for _ in range(3)))
def integer_scores(q, k, v):
    return (q @ k.mT).float().softmax(-1) @ v.float()


# ---------------------------------------------------------------------------------------------------------- transforms
@lookalike(TRANSFORM)
def mapped(q, k, v):
    return torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v)


@lookalike(TRANSFORM)
def gradient_inside(q, k, v):
    return torch.func.grad(lambda q: ((q @ k.mT).softmax(-1) @ v).sum())(q)


@lookalike(TRANSFORM)
def jvp_inside(q, k, v):
    return torch.func.jvp(lambda q: (q @ k.mT).softmax(-1) @ v, (q,), (q,))[1]
