"""The smallest kernel that hands numbers from a warp to another through shared memory and mbarriers: a control for racecheck.

What racecheck says of it is of the tool and of Triton's ``warp_specialize``, not of an attention kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def receive(out, number, full, empty, COUNT: gl.constexpr):
    for i in range(COUNT):
        mbarrier.wait(full, i & 1)
        x = gl.max(number.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(empty)
        gl.store(out + i, x)


@gluon.jit
def send(number, full, empty, COUNT: gl.constexpr):
    for i in range(COUNT):
        mbarrier.wait(empty, (i & 1) ^ 1)
        number.store(gl.full([1], i * 3, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(full)


@gluon.jit
def fa_hand_over(out, COUNT: gl.constexpr):
    """out [2 * COUNT] int32: 0, 3, 6, ... twice. Launched with one program of 4 warps, which are one of two that receive."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=2)
    gl.warp_specialize([
        (receive, (out, number, full, empty, COUNT)),
        (receive, (out + COUNT, number, full, empty, COUNT)),
        (send, (number, full, empty, COUNT)),
    ], [4, 1], [24, 24])  # fmt: skip
