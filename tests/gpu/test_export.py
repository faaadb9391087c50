"""Packages of AOTInductor on the GPU: the generated Triton kernels are in them, and they run without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fa_inductor
from fa_inductor.report import collecting

pytestmark = pytest.mark.gpu

RUN = """
import sys, torch
path, inputs, out = sys.argv[1:]
model = torch._inductor.aoti_load_package(path)
print("loaded", flush=True)
result = model(*torch.load(inputs))
torch.cuda.synchronize()
print("ran", flush=True)
torch.save(result, out)
print("saved", flush=True)
assert not any(name.startswith("fa_inductor") for name in sys.modules)
"""


class Model(nn.Module):
    """Causal with softcap, then a bias per head, over run-time lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        s = torch.tanh(q @ k.mT * 0.125 / 20.0) * 20.0
        q = s.masked_fill(at[None, :] > at[:, None], float("-inf")).softmax(-1) @ v
        s = q @ k.mT * 0.125 + (self.slopes * (at[None, :] - at[:, None])).to(q.dtype)
        return s.softmax(-1) @ v


def exported(model: nn.Module, args: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    n = torch.export.Dim("n", min=2, max=4096)
    with torch.no_grad():
        return torch.export.export(model, args, dynamic_shapes=({2: n},) * 3)


def run(path: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Loads the package in a process of its own and runs it on ``inputs.pt``."""
    command = [sys.executable, "-X", "faulthandler", "-c", RUN, path, str(folder / "inputs.pt"), str(folder / "out.pt")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_package_holds_the_kernels(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Model().to("cuda", dtype).eval()
    args = tuple(torch.randn(2, 4, 300, 64, device="cuda", dtype=dtype) for _ in range(3))
    with collecting() as report:
        path = fa_inductor.aoti_compile_and_package(exported(model, args), package_path=str(tmp_path / "model.pt2"))
    assert [s.status for s in report.sites] == ["fused", "fused"], str(report)
    for length in (300, 77):
        given = tuple(x[:, :, :length].contiguous() for x in args)
        torch.save(given, tmp_path / "inputs.pt")
        done = run(path, tmp_path)
        if done.returncode < 0:
            # With torch 2.11.0+cu130 on an H200 a package without us died of the same signal, before it was loaded.
            plain = torch._inductor.aoti_compile_and_package(exported(model, args), package_path=str(tmp_path / "plain.pt2"))
            if run(plain, tmp_path).returncode == done.returncode:
                pytest.skip(f"a package by Inductor alone dies of signal {-done.returncode} here too")
        said = f"exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        got = torch.load(tmp_path / "out.pt")
        with torch.no_grad():
            eager, exact = model(*given), Model.forward(model.double(), *(x.double() for x in given))
            model.to(dtype)
        worst = (eager.double() - exact).abs().max()
        assert (got.double() - exact).abs().max() <= 2 * worst + torch.finfo(dtype).eps * exact.abs().max()
