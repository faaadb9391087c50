"""Where a kernel finds the numbers of a tensor that is the same along every diagonal.

Such a tensor has one number for each difference ``d = kv_idx - q_idx``. It is captured as [..., ROWS, columns]: with
``row = q_idx % ROWS``, ``base = q_idx - row`` and ``last`` the base of the last query, the number of a score lies at
``[..., row, kv_idx - base + last]``. Column 0 of row 0 has the difference ``-last``. The rows are one and the same vector,
each shifted by one, so that a tile of scores is a tile of this tensor, which TMA can load (its columns start at a multiple
of 16 bytes), and it takes ROWS * (q_len + kv_len) numbers of memory instead of q_len * kv_len.
"""

from __future__ import annotations

from fa_inductor.expr import KV_IDX, Q_IDX, Q_LEN, Const, Expr, Load, call

#: No tile of a kernel has more queries.
ROWS = 128

ROW: Expr = call("mod", Q_IDX, Const(ROWS))
LAST: Expr = call("mul", call("floordiv", call("sub", Q_LEN, Const(1)), Const(ROWS)), Const(ROWS))
COLUMN: Expr = call("add", call("sub", KV_IDX, call("sub", Q_IDX, ROW)), LAST)


def is_diagonal(load: Load) -> bool:
    """Whether ``load`` reads a tensor of the form above."""
    return load.index[-2:] == (ROW, COLUMN)
