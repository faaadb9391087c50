"""exp2 as a polynomial, for a share of a tile's scores: text of the device functions and their coefficients.

The special function units compute 16 exponentials an SM and cycle (32 on sm_103), the multiply-add units 128 products.
"""

from __future__ import annotations

#: Degree -> coefficients of 1, f, f^2, ... that minimise the largest relative error of 2^f on [-1/2, 1/2], rounded to
#: float32: 7.48e-5 and 2.72e-6 with float32 arithmetic. FlashAttention-4 (arXiv 2603.05451) has 8.8e-5 and 3.1e-6.
COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (0.9999280571937561, 0.6932610273361206, 0.24261116981506348, 0.05517134070396423),
    4: (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.055917877703905106, 0.0095701077952981),
}

# 2^x = 2^n * 2^f with the integer n nearest to x: a sum with 1.5 * 2^23 is rounded to n and has it in its lowest bits (Cody and
# Waite's reduction, exact in base 2). No inline assembly, so that it runs in Triton's interpreter.
_TEXT = """
@triton.jit
def {name}(x):
    # x <= 127. Below -126.5, -inf included, the result is 0; NaN stays NaN.
    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    p = {polynomial}
    return p * ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
"""


def _horner(coefficients: tuple[float, ...]) -> str:
    text = repr(coefficients[-1])
    for c in coefficients[-2::-1]:
        text = f"({text}) * f + {c!r}" if "f" in text else f"{text} * f + {c!r}"
    return text


#: Name -> text of each function, float32 -> float32, any shape.
FUNCTIONS = {
    name_of: _TEXT.format(name=name_of, polynomial=_horner(c))
    for name_of, c in ((f"_exp2_poly{degree}", c) for degree, c in COEFFICIENTS.items())
}
