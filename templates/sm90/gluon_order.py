"""Additions of several programs to one tile of memory in a fixed order, for Gluon kernels for Hopper.

``turns`` is int32, zero at the start: first a counter of tickets, then a number for each tile, of the program whose turn it
is. A program waits only for programs of the same head that are before it in the order, whose tickets are lower too: they
have started, so they end, and nobody waits for ever in whatever order the device starts programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ticket(turns):
    """How many programs started before this one."""
    return gl.atomic_add(turns, 1, sem="relaxed")


@gluon.jit
def wait_for_turn(turn, number):
    """Wait until ``turn`` is at least ``number``; then TMA sees what :func:`pass_turn` waited for. For one warp."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred waits;
        .reg .s32 found;
        again:
        ld.acquire.gpu.global.s32 found, [$1];
        setp.lt.s32 waits, found, $2;
        @waits bra again;
        bar.warp.sync 0xffffffff;
        fence.proxy.async.global;
        mov.s32 $0, found;
        }""",
        "=r,l,r", [turn.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_turn(turn, number):
    """Wait until what this warp has sent by TMA is in memory, then set ``turn`` to ``number``."""
    # Gluon's wait is for the end of reading shared memory. One thread has sent and waits, and the others wait for it. The
    # end of the wait is a fence for what TMA did; fence.proxy.async without a state space would be one of the whole GPU.
    gl.inline_asm_elementwise(
        """{
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        st.release.gpu.global.s32 [$1], $2;
        mov.s32 $0, 0;
        }""",
        "=r,l,r", [turn.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
