"""Three real models, compiled with and without fa_inductor: what was fused, time, peak memory, difference to eager."""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import MissingDependencyError, OptionError
from .report import FusionReport, collecting, tabulate

LAYERS = 2
HEADS = 8
WIDTH = 512
VOCAB = 1024

TOLERANCE = 1e-3
"""Largest difference to eager the demo accepts: outputs are of order 1, float32 sums over up to 2048 keys."""


class CausalSelfAttention(nn.Module):
    """Attention as it is taught: a product, a triangular mask, a softmax, a product."""

    def __init__(self, width: int, heads: int, max_len: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(max_len, max_len)).view(1, 1, max_len, max_len))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = torch.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class PlainGPT(nn.Module):
    """A small GPT in plain PyTorch, no library."""

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(max_len, WIDTH)
        self.attention = nn.ModuleList(CausalSelfAttention(WIDTH, HEADS, max_len) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x)


@dataclass(frozen=True)
class Model:
    """One model of the demo: how it is called, and the tensor in its output that is compared."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    output: Callable[[Any], Tensor]


def models(seqlen: int, device: str) -> list[Model]:
    """A Llama decoder, a BERT encoder with padding and a plain GPT, eager attention, random weights."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError(
            f"the demo runs models of transformers, which cannot be imported ({error}). "
            "Install it with `pip install transformers`, or run `make demo`."
        ) from error
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH}
    sizes.update(num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    sizes.update(intermediate_size=2 * WIDTH, max_position_embeddings=seqlen, attn_implementation="eager")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))
    bert = transformers.BertModel(transformers.BertConfig(**sizes))
    ids = torch.randint(VOCAB, (1, seqlen))
    two = torch.randint(VOCAB, (2, seqlen))
    # The second sequence of the encoder's batch is padded by a quarter.
    keep = (torch.arange(seqlen) < torch.tensor([[seqlen], [seqlen - seqlen // 4]])).long()
    made = [
        Model("Llama decoder, GQA 8:2", llama, {"input_ids": ids}, lambda out: out.logits),
        Model(
            "BERT encoder, padding mask",
            bert,
            {"input_ids": two, "attention_mask": keep},
            lambda out: out.last_hidden_state,
        ),
        Model("plain GPT", PlainGPT(seqlen), {"ids": ids}, lambda out: out),
    ]
    for model in made:
        model.module.eval().to(device)
        model.inputs.update({name: tensor.to(device) for name, tensor in model.inputs.items()})
    return made


@dataclass(frozen=True)
class Measured:
    """Median seconds of one forward, peak bytes it allocates beyond weights and inputs, and its output."""

    seconds: float
    peak_bytes: int
    output: Tensor


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Most bytes alive at once among those allocated while `run` runs."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # The process's resident size would count the compiler; the allocator's own events count tensors alone.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    alive = peak = 0
    for _, nbytes in events:
        alive += nbytes
        peak = max(peak, alive)
    return peak


def measure(call: Callable[[], Any], output: Callable[[Any], Tensor], device: str, repeats: int = 5) -> Measured:
    """Compile (the first call), warm up, time `repeats` forwards without gradients, then measure memory once."""

    def synchronize() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        result = output(call()).clone()
        call()
        times = []
        for _ in range(repeats):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times.append(time.perf_counter() - start)
        return Measured(statistics.median(times), peak_bytes(call, device), result)


def demo(seqlen: int = 2048, device: str = "cpu") -> int:
    """Print the demo. Returns 1 if a model compiled with fa_inductor differs from eager by over `TOLERANCE`, else 0."""
    if seqlen < 4:
        raise OptionError.invalid("--seqlen", seqlen, "at least 4 tokens")
    from . import __version__

    print(f"fa_inductor {__version__}, torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    print(f"Models of {LAYERS} layers, {seqlen} tokens, float32, random weights, eager attention. Forward pass.\n", flush=True)
    rows = []
    worst = 0.0
    for model in models(seqlen, device):
        eager, plain, ours, report = _three_ways(model, device)
        difference = (ours.output.double() - eager.output.double()).abs().max().item()
        without = (plain.output.double() - eager.output.double()).abs().max().item()
        # `not <=` so that a NaN counts as a difference.
        worst = max(worst, difference) if difference <= TOLERANCE else math.inf
        print(f"{model.name}\n{report}\n", flush=True)
        rows.append(
            [
                model.name,
                f"{eager.seconds * 1e3:.0f}",
                f"{plain.seconds * 1e3:.0f}",
                f"{ours.seconds * 1e3:.0f}",
                f"{plain.seconds / ours.seconds:.2f}x",
                f"{plain.peak_bytes / 2**20:.0f}",
                f"{ours.peak_bytes / 2**20:.0f}",
                f"{without:.1e}",
                f"{difference:.1e}",
            ]
        )
    headers = ["forward", "eager\nms", "compile\nms", "+ fa_inductor\nms", "speed-up", "compile\npeak MiB"]
    headers += ["+ fa_inductor\npeak MiB", "compile\nmax diff", "+ fa_inductor\nmax diff"]
    print(tabulate(rows, headers))
    print("\nTimes are medians. Peaks leave out weights and inputs. Differences are to eager, largest element.")
    if worst > TOLERANCE:
        print(f"FAILED: a model compiled with fa_inductor differs from eager by more than {TOLERANCE:g}.")
        return 1
    return 0


def _three_ways(model: Model, device: str) -> tuple[Measured, Measured, Measured, FusionReport]:
    measured: list[Measured] = []
    reports: list[FusionReport] = []
    for backend in (None, "inductor", "fa_inductor"):
        if sys.stdout.isatty():
            print(f"{model.name}: {backend or 'eager'} ...\x1b[K", end="\r", flush=True)
        torch._dynamo.reset()
        run = model.module if backend is None else torch.compile(model.module, backend=backend)
        with collecting() as report:
            measured.append(measure(lambda run=run: run(**model.inputs), model.output, device))  # type: ignore[misc]
        reports.append(report)
        if sys.stdout.isatty():
            print("\x1b[K", end="\r")
    torch._dynamo.reset()
    return measured[0], measured[1], measured[2], reports[-1]
