"""What one process of ``test_distributed.py`` runs: a small decoder trained eager and compiled under a kind of parallelism.

    RANK=0 WORLD_SIZE=2 python -m tests.integration.distributed_worker FOLDER [SCENARIO...]
    torchrun --nproc-per-node 2 -m tests.integration.distributed_worker --device cuda FOLDER [SCENARIO...]

Ranks meet through a file in FOLDER and pick their own ports. Each scenario becomes ``FOLDER/SCENARIO.RANK.json``. On GPUs, over
NCCL, every scenario is compiled with the default options and code generation.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fa_inductor.config import Options
from fa_inductor.graph_pass import AttentionPass
from fa_inductor.report import FusionReport, collecting, record_graph
from tests.compiling import Fusing

#: A layer has more than the MiB that DDP's first bucket holds at least, so that every layer gets a bucket.
VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, BATCH, LENGTH, STEPS = 17, 192, 8, 4, 2, 2, 24, 3


#: Set by the command line.
DEVICE = "cpu"


# ---- the model -----------------------------------------------------------------------------------------------------------
class Attention(nn.Module):
    """Causal, grouped heads, spelled out. The number of heads follows from the projections, which may be sharded."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dim, self.dropout = WIDTH // HEADS, dropout
        self.q = nn.Linear(WIDTH, HEADS * self.dim, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * self.dim, bias=False) for _ in range(2))
        self.o = nn.Linear(HEADS * self.dim, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, self.dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = q @ k.transpose(-2, -1) / self.dim**0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)  # a DTensor where the scores are one
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        if self.dropout:
            weights = F.dropout(weights, self.dropout, self.training)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.attention = Attention(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout, checkpointed) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- kinds of parallelism ------------------------------------------------------------------------------------------------
def repeating(options: Options) -> Callable[..., Any]:
    """A backend without code generation whose random numbers repeat when a checkpoint is recomputed.

    Inductor's final graphs, run op by op, draw new ones, with us or without: only its generated code keeps the seeds.
    """

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        result = AttentionPass(options)(gm)
        record_graph(result.sites, result.seconds)
        return aot_eager(gm, inputs)

    return backend


@dataclass(frozen=True)
class Scenario:
    """One way to train.

    Attributes:
        kind: ddp, fsdp (sharded layers that are compiled one by one), fsdp_whole (the sharded model compiled), tensor, or
            dtensor (tensor parallel with q, k and v as DTensors).
        options: of the backend ``fa_inductor``.
        generated: with Inductor's code generation, else the final graphs run op by op.
        accumulate: batches whose gradients are summed before a step of the optimizer; only the last is synchronised.
        fused: the optimizer's argument.
    """

    kind: str
    options: dict[str, Any]
    generated: bool = False
    dropout: float = 0.0
    checkpointed: bool = False
    accumulate: int = 1
    fused: bool = False

    def backend(self) -> dict[str, Any]:
        """Keyword arguments of torch.compile."""
        if DEVICE == "cuda":
            return {"backend": "fa_inductor"}
        if self.generated:
            return {"backend": "fa_inductor", "options": self.options}
        options = Options(**self.options)
        return {"backend": repeating(options) if self.dropout else Fusing(options)}

    def wrap(self, model: Decoder, compiling: dict[str, Any] | None) -> nn.Module:
        """The module to call; eager where ``compiling`` is None."""
        whole: Callable[[nn.Module], Any] = lambda m: m if compiling is None else torch.compile(m, **compiling)  # noqa: E731
        if self.kind == "ddp":
            return whole(DistributedDataParallel(model, bucket_cap_mb=1))  # Dynamo makes one graph of each bucket
        if self.kind in ("tensor", "dtensor"):
            columns = ColwiseParallel(use_local_output=self.kind == "tensor")
            plan: dict[str, Any] = {f"attention.{name}": columns for name in "qkv"}
            plan |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
            for layer in model.layers:
                parallelize_module(layer, mesh, plan)
            return whole(model)
        for layer in model.layers:
            if self.kind == "fsdp" and compiling is not None:
                layer.compile(**compiling)
            fully_shard(layer)
        fully_shard(model)
        return whole(model) if self.kind == "fsdp_whole" else model

    def synchronised(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one batch."""
        if self.kind == "ddp" and not last:
            return getattr(module, "_orig_mod", module).no_sync()
        if self.kind.startswith("fsdp"):
            getattr(module, "_orig_mod", module).set_requires_gradient_sync(last)
        return nullcontext()


REFERENCE, ATEN = {"kernel": "reference"}, {"min_seqlen": 0}
SCENARIOS = {
    "ddp": Scenario("ddp", ATEN),
    "ddp_everything": Scenario("ddp", REFERENCE, checkpointed=True, accumulate=2, fused=True),
    "fsdp_everything": Scenario("fsdp", ATEN, checkpointed=True, accumulate=2, fused=True),
    "fsdp_whole": Scenario("fsdp_whole", REFERENCE, accumulate=2),
    "tensor": Scenario("tensor", ATEN),
    # The fused optimizer takes no mixture of DTensors and plain tensors.
    "tensor_everything": Scenario("tensor", REFERENCE, checkpointed=True, accumulate=2),
    "dtensor": Scenario("dtensor", REFERENCE),
    "fsdp_dropout": Scenario("fsdp", REFERENCE, dropout=0.2, checkpointed=True),
    "fsdp_generated": Scenario("fsdp", ATEN, generated=True),
}
#: Half a minute or more of C++ each, for code that has its own tests: run where DISTRIBUTED_TESTS=all.
LONG_SCENARIOS = {
    "ddp_generated": Scenario("ddp", ATEN, generated=True),
    "tensor_generated": Scenario("tensor", REFERENCE, generated=True, dropout=0.2, checkpointed=True),
}
if os.environ.get("DISTRIBUTED_TESTS") == "all":
    SCENARIOS |= LONG_SCENARIOS


# ---- training ------------------------------------------------------------------------------------------------------------
def train(scenario: Scenario, compiled: bool) -> dict[str, Any]:
    """Losses of every batch and the gradients of the first step, by parameter; what the pass reported."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder(scenario.dropout, scenario.checkpointed).to(DEVICE)
    compiling = scenario.backend() if compiled else None
    module = scenario.wrap(model, compiling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=scenario.fused)
    shared = scenario.kind in ("tensor", "dtensor")  # all ranks work on one batch
    g = torch.Generator().manual_seed(100 if shared else 100 + dist.get_rank())
    torch.manual_seed(7)
    losses, gradients = [], {}
    with collecting() as report:
        for step in range(STEPS):
            for micro in range(scenario.accumulate):
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=g).to(DEVICE)
                with scenario.synchronised(module, micro == scenario.accumulate - 1):
                    loss = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    (loss / scenario.accumulate).backward()
                losses.append(loss.item())
            if step == 0:
                gradients = {n: whole_tensor(p.grad) for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, "report": compiling and report}


def whole_tensor(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of one parameter's gradient, relative to its norm."""
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


class EagerFails(Exception):
    """Without torch.compile the scenario does not run either; no result is written."""


def run(scenario: Scenario) -> dict[str, Any]:
    """Eager beside compiled. With dropout, whose random numbers differ, also compiled without checkpointing."""
    start = time.monotonic()
    try:
        eager = train(scenario, compiled=False)
    except RuntimeError as e:
        raise EagerFails(f"eager code fails with torch {torch.__version__}: {str(e).splitlines()[0]}") from e
    ours = train(scenario, compiled=True)
    report: FusionReport = ours["report"]
    result = {
        "losses": [eager["losses"], ours["losses"]],
        "gradients": difference(ours["gradients"], eager["gradients"]),
        "sites": [[site.status, site.form, site.reason] for site in report.sites],
        "graphs": report.graphs,
    }
    if scenario.dropout:
        kept = train(replace(scenario, checkpointed=False), compiled=True)
        result["kept"] = {
            "losses": kept["losses"],
            "gradients": difference(ours["gradients"], kept["gradients"]),
        }
    return {**result, "seconds": time.monotonic() - start}


def told(name: str, result: dict[str, Any]) -> str:
    """One line about a scenario."""
    eager, ours = result["losses"]
    apart = max(abs(a - b) / abs(a) for a, b in zip(eager, ours, strict=True))
    fused = sum(status == "fused" for status, _, _ in result["sites"])
    text = f"{name}: {fused}/{len(result['sites'])} fused in {result['graphs']} graphs, losses {apart:.1e} apart"
    text += f", gradients {result['gradients']:.1e}"
    if "kept" in result:
        text += f", gradients with and without checkpointing {result['kept']['gradients']:.1e}"
    return f"{text}, {result['seconds']:.0f} s"


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    rank, world, DEVICE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.device
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[DEVICE], init_method=f"file://{options.folder.resolve()}/rendezvous",
        rank=rank, world_size=world, timeout=timedelta(seconds=180),  # of one collective: the ranks compile side by side
    )  # fmt: skip
    for name in options.scenarios:
        try:
            result = run(SCENARIOS[name])
        except EagerFails as e:  # DTensors of this form need torch 2.13
            print(f"rank {rank}, {name}: {e}", flush=True)
            continue
        scratch = options.folder / f"{name}.{rank}.part"
        scratch.write_text(json.dumps(result))
        scratch.replace(options.folder / f"{name}.{rank}.json")
        if rank == 0:
            print(told(name, result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
