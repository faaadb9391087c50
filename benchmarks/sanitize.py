"""The attention kernels under NVIDIA's compute-sanitizer: out-of-bounds accesses, shared memory hazards, barriers.

    python -m benchmarks.sanitize                                  # memcheck, racecheck, synccheck, initcheck
    python -m benchmarks.sanitize --tools memcheck --kernels gluon # the Gluon kernels for Hopper alone
    python -m benchmarks.sanitize --tools racecheck --kernels control  # what the tool says of the smallest hand-over there is

Small launches of the Gluon forward, backward (in any and in a fixed order) and wide backward, and of the general forward,
dkdv and dq. Processes of their own compile them; then one process a tool launches them again, and kernels of ours alone are
checked (by initcheck all). The whole output goes to ``--log``. racecheck does not know all that orders asynchronous copies
(TMA, wgmma, mbarriers): its hazards are to be judged one by one, beside those of ``control`` (:mod:`benchmarks._hand_over`). A
tool that takes longer than ``--timeout`` seconds is killed, and named.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks._common import worker_command

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: (kernels, head dim, what is added up in a fixed order)
LAUNCHES = [
    ("gluon", 64, False), ("gluon", 128, False), ("gluon", 256, False),
    ("gluon", 64, True), ("gluon", 128, True), ("gluon", 256, True), ("general", 128, True),
    ("control", 0, False),
]  # fmt: skip
#: [B, Hq, Hkv, M, N]: no multiples of tiles, several tiles of each kind.
SHAPE = (1, 2, 1, 300, 333)
#: Functions whose launches are checked.
NAMES = ("flash_forward", "flash_backward", "row_statistics", "scale_sum", "fa_")


def launch(kernels: str, dim: int, deterministic: bool) -> None:
    """Forward and backward of a causal and of a windowed attention."""
    import torch

    from fa_inductor.spec import AttentionSpec
    from fa_inductor.templates import direct
    from fa_inductor.templates.sm90 import backward_launch
    from fa_inductor.templates.sm90 import launch as forward_launch

    if kernels == "control":
        from benchmarks._hand_over import fa_hand_over

        numbers = torch.zeros(18, dtype=torch.int32).cuda()
        fa_hand_over[(1,)](numbers, 9, num_warps=4)
        assert numbers.tolist() == [3 * i for i in range(9)] * 2, numbers
        return
    b, hq, hkv, m, n = SHAPE
    q, k, v, grad = (
        torch.randn(b, heads, length, dim, dtype=torch.bfloat16).cuda() for heads, length in ((hq, m), (hkv, n), (hkv, n), (hq, m))
    )
    for keep in ("kv_idx <= q_idx", "(kv_idx <= q_idx + n0) & (kv_idx >= q_idx - n0)"):
        program = f"attention(score=where({keep}, score * 0.1, -inf), dead_rows='zero')"
        if kernels == "general":
            spec = AttentionSpec.parse(program)
            tiles = direct.choose_all(spec, direct.problem_of(q, k, v, [], [100], [grad]), 90)
            out, lse = direct.forward(q, k, v, [], [100], spec, tiles)
            direct.backward(grad, q, k, v, out, lse, [], [100], spec, [True, True, True], tiles)
        else:
            out, lse = forward_launch.attention(q, k, v, [100], program)
            args = (grad, q, k, v, out)
            backward_launch.prepare(*args, [100], program, deterministic)(*args, lse)
    torch.cuda.synchronize()


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(found):
        raise SystemExit("compute-sanitizer is not on PATH (it comes with the CUDA toolkit)")
    return found


def summary(output: str) -> list[str]:
    """The tool's own summaries, and each different kind of finding with how often it came."""
    lines = [re.sub(r"^=+ ?", "", line).rstrip() for line in output.splitlines() if line.startswith("=====")]
    kinds: Counter[str] = Counter()
    for line in lines:
        if re.match(r"(Error|Warning|Invalid|Barrier|Uninitialized|Program hit|Race reported|Potential|Internal)", line):
            kinds[re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d+", "#", line)] += 1
    return [line for line in lines if "SUMMARY" in line] + [f"{count} x {kind}" for kind, count in kinds.most_common(12)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--kernels", default="gluon,general")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each tool")
    parser.add_argument("--log", default="sanitize.log")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [x for x in LAUNCHES if x[0] in args.kernels.split(",")]
    if args.child:
        for x in chosen:
            launch(*x)
        return 0
    tool_path = sanitizer()
    with multiprocessing.get_context("spawn").Pool(len(chosen)) as pool:
        pool.starmap(launch, chosen)
    bad = 0
    with open(args.log, "w") as log:
        for tool in args.tools.split(","):
            command = [tool_path, "--tool", tool, "--error-exitcode", "99", "--print-limit", "200"]
            if tool != "initcheck":  # which must see every kernel that writes
                command += [x for name in NAMES for x in ("--kernel-name", f"kernel_substring={name}")]
            command += worker_command("benchmarks.sanitize", "--child", "--kernels", args.kernels)
            try:
                # Inside one large allocation, as torch keeps it, no access is out of bounds.
                env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
                done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=env, check=False)
                output, code = done.stdout + done.stderr, done.returncode
            except subprocess.TimeoutExpired as e:
                text = e.stdout or b""
                output, code = text.decode(errors="replace") if isinstance(text, bytes) else text, None
            log.write(f"$ {' '.join(command)}\n{output}\n")
            print(f"{tool}: " + ("killed after --timeout" if code is None else f"exit code {code}"))
            print("".join(f"  {line}\n" for line in summary(output)), end="")
            bad += code != 0
    print(f"output: {Path(args.log).resolve().name}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
