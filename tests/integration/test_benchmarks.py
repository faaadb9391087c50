"""The benchmarks' own parts: the zoo builds and runs, and the site finder counts what is there."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import _coverage_child, _gpu_models, _turns, zoo
from benchmarks._coverage_child import Outcome, Seen, build, call, compare, run_eagerly, watch
from benchmarks.sitefinder import attention_sites

SAMPLE = (
    "divide_by_root",
    "baddbmm_alpha",
    "grouped_einsum",
    "grown_cache",
    "no_batch",
    "causal_buffer",
    "padding_and_causal",
    "gathered_bias_and_shift",
    "sinks_concatenated",
    "weights_returned",
    "sparsemax",
    "mha_causal_padded",
    "call_grouped",
    "plain_gpt",
)
LIBRARY_FREE = [name for name in zoo.names() if not zoo.get(name).needs]


def sites_in_graphs(name: str, mode: str) -> Seen:
    """What the hooks count in Inductor's plain pipeline."""
    from torch._inductor.compile_fx import compile_fx

    model, train, seen = zoo.get(name), mode == "train", Seen()
    built = build(model, torch.float32, train)
    torch._dynamo.reset()
    with watch(seen):
        compiled = torch.compile(
            built[0],
            backend=lambda gm, inputs: compile_fx(gm, inputs, inner_compile=run_eagerly),
            dynamic=model.dynamic,
        )
        call(compiled, built, model, train)
    return seen


def test_registry_is_large_and_mixed():
    counted = [model for model in zoo.REGISTRY.values() if model.kind in ("pos", "sdpa")]
    lookalikes = [model for model in zoo.REGISTRY.values() if model.kind == "neg"]
    assert len(counted) >= 120
    assert len(lookalikes) >= 20
    assert {"transformers", "timm", "diffusers", "x-transformers", "open_clip", "torch.nn", "spelled"} <= {
        model.family for model in counted
    }


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered twice"):
        zoo.base.register("divide_by_root", "spelled", lambda: None)


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_builds_and_runs(name: str):
    model = zoo.get(name)
    for train in (False, True):
        outcome = call((built := build(model, torch.float32, train))[0], built, model, train)
        assert outcome.outputs
        assert all(tensor.isfinite().all() for tensor in outcome.outputs.values())
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in outcome.gradients.values())


def test_same_seed_gives_the_same_model():
    model = zoo.get("bucketed_bias")
    first, second = (build(model, torch.float32, train=False) for _ in range(2))
    outputs = [call(built[0], built, model, train=False).outputs["0"] for built in (first, second)]
    assert torch.equal(*outputs)


def test_every_library_free_model_can_be_constructed():
    for name in LIBRARY_FREE:
        module, args, _ = zoo.get(name).build()
        assert isinstance(module, torch.nn.Module), name
        assert args, name


def test_missing_library_is_reported_as_unavailable():
    with pytest.raises(zoo.Unavailable, match="a_library_that_is_not_there"):
        zoo.base.require("a_library_that_is_not_there")


@pytest.mark.parametrize(
    ("name", "mode", "sites"),
    [
        ("divide_by_root", "infer", 1),
        ("divide_by_root", "train", 1),
        ("softmax_by_logsumexp", "train", 1),
        ("softmax_by_log_softmax", "infer", 1),
        ("softmax_divided_last", "train", 1),
        ("difference_of_two", "train", 2),
        ("query_blocks", "infer", 3),
        ("no_batch", "train", 1),
        ("values_on_the_left", "infer", 1),
        ("sinks_concatenated", "train", 1),
        ("alibi_baddbmm", "infer", 1),
        ("plain_gpt", "train", 2),
        ("linear_elu", "train", 0),
        ("linear_two_softmaxes", "infer", 0),
        ("sigmoid_weights", "infer", 0),
        ("sparsemax", "train", 0),
        ("softmax_of_one_matrix", "infer", 0),
    ],
)
def test_site_finder_counts(name: str, mode: str, sites: int):
    assert sites_in_graphs(name, mode).sites == sites


def test_site_finder_ignores_the_loss():
    """The gradient of a cross entropy is a softmax that meets a product in the backward graph: no attention."""

    def loss(x, weight, target):
        return torch.nn.functional.cross_entropy((x @ x.mT).flatten(0, 1) @ weight, target)

    seen = Seen()
    with watch(seen):
        from torch._inductor.compile_fx import compile_fx

        torch._dynamo.reset()
        compiled = torch.compile(loss, backend=lambda gm, inputs: compile_fx(gm, inputs, inner_compile=run_eagerly))
        x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(5, 7, requires_grad=True)
        compiled(x, weight, torch.randint(0, 7, (10,))).backward()
    assert seen.graphs == 1
    assert seen.sites == 0


def test_site_names_both_products():
    graphs = []

    def backend(gm, inputs):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda g, _: graphs.append(g) or g.forward)(gm, inputs)

    model = zoo.get("values_on_the_left")
    built = build(model, torch.float32, train=False)
    torch._dynamo.reset()
    call(torch.compile(built[0], backend=backend), built, model, train=False)
    (site,) = attention_sites(graphs[0].graph)
    order = list(graphs[0].graph.nodes)
    assert order.index(site.scores) < order.index(site.weights) < order.index(site.values)


def test_a_wrong_value_is_called_wrong():
    exact = {"out": torch.linspace(-1, 1, 50, dtype=torch.float64)}
    eager = {"out": exact["out"].float()}
    assert compare(eager, exact, {"out": eager["out"] * (1 + 1e-7)}, torch.float32)["ratio"] <= 1
    assert compare(eager, exact, {"out": eager["out"] * (1 + 1e-4)}, torch.float32)["ratio"] > 1
    assert compare(eager, exact, {"out": eager["out"].clone().fill_(float("nan"))}, torch.float32)["ratio"] > 1
    assert compare(eager, exact, {"out": None}, torch.float32)["ratio"] > 1
    assert compare(eager, exact, {"out": eager["out"][:49]}, torch.float32)["ratio"] > 1


def test_a_row_of_the_table(monkeypatch):
    """The built-in pass on one model, values and gradients against float64."""
    (row,) = _coverage_child.measure("divide_by_root", "train", "fp32", ("builtin",))
    assert row["status"] == "ok"
    assert row["sites"] == 1
    assert row["gradient"]["ratio"] <= 1

    real = _coverage_child.call

    def spoiled(function, built, model, train):
        outcome = real(function, built, model, train)
        if function is not built[0]:
            outcome = Outcome({key: value + 1e-2 for key, value in outcome.outputs.items()}, outcome.gradients)
        return outcome

    monkeypatch.setattr(_coverage_child, "call", spoiled)
    (row,) = _coverage_child.measure("divide_by_root", "train", "fp32", ("builtin",))
    assert row["status"] == "wrong"


def test_coverage_tables_count_what_the_rows_say():
    from benchmarks.coverage import sites_seen, summary

    head = {"model": "m", "family": "spelled", "kind": "pos", "mode": "infer", "dtype": "fp32"}
    rows = [
        {**head, "side": "builtin", "status": "ok", "fused": 1, "sites": 3, "torch_ops": 0, "our_ops": 0},
        {
            **head,
            "side": "fa_inductor",
            "status": "wrong",
            "fused": 2,
            "sites": 1,
            "torch_ops": 0,
            "our_ops": 2,
            "value": {"error": 0.5, "ratio": 7.0, "worst": "0"},
            "declined": [{"status": "rejected", "reason": "used elsewhere"}],
        },
    ]
    assert sites_seen(rows) == {("m", "infer", "fp32"): 3}
    text = summary(rows)
    assert "1/3" in text
    assert "2/3" in text
    assert "7 x budget" in text
    assert "used elsewhere" in text


def test_line_fit_recovers_a_line():
    from benchmarks.compile_time import line_fit

    intercept, slope, r_squared = line_fit([(n, 0.5 + 0.25 * n) for n in (4, 8, 16, 24)])
    assert (intercept, slope, r_squared) == pytest.approx((0.5, 0.25, 1.0))
    assert line_fit([(4, 1.0), (8, 2.0)]) is None


def test_peak_memory_sees_a_tensor_that_is_freed_again():
    from benchmarks._memory import peak_of

    size = 64 * 2**20
    peak, method = peak_of(lambda: torch.ones(size // 4).sum())
    assert method
    assert 0.9 * size < peak < 1.5 * size


def test_geometric_mean():
    from benchmarks._common import geometric_mean

    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None


@pytest.mark.parametrize("name", list(_gpu_models.MODELS))
def test_gpu_model_agrees_in_both_spellings_and_every_layer_is_fused(name: str):
    from fa_inductor import testing

    model = _gpu_models.MODELS[name]
    config = model.tiny
    ((length, batch),) = config.batch.items()
    weights = _gpu_models.build(name, config, "eager", "cpu", torch.float32)
    inputs = _gpu_models.draw(name, config, length, batch, "cpu", torch.float32)
    wanted = weights(*inputs)
    assert wanted.shape == (batch, length, config.hidden)
    if model.sdpa:
        other = _gpu_models.share(name, weights, config, "sdpa")
        assert all(a is b for a, b in zip(other.parameters(), weights.parameters(), strict=True))
        torch.testing.assert_close(other(*inputs), wanted, rtol=1e-4, atol=1e-5)
    backend, fused = testing.make(inner_compile=run_eagerly)
    out = torch.compile(_gpu_models.share(name, weights, config, "eager"), backend=backend, dynamic=False)(*inputs)
    assert fused() == config.layers
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_full_size_gpu_models_can_be_built():
    for name, model in _gpu_models.MODELS.items():
        with torch.device("meta"):
            for spelling in ("eager", "sdpa") if model.sdpa else ("eager",):
                built = model.make(model.config, spelling)
                for length, batch in model.config.batch.items():
                    assert built(*model.inputs(model.config, length, batch)).shape == (batch, length, model.config.hidden), name


def test_workers_take_turns_and_failures_become_results():
    program = "from benchmarks._turns import give, wait_for_turn; wait_for_turn(); give({'it': 1})"
    results: dict[int, object] = {}
    commands = [[sys.executable, "-c", text] for text in (program, "raise ValueError('no')", "import time; time.sleep(60)")]
    _turns.run(commands, 3, results.__setitem__, prepare_timeout=8)
    assert results[0] == {"it": 1}
    assert results[1] == {"error": "compiling: ValueError: no"}
    assert results[2] == {"error": "compiling: more than 8 s"}


def test_stress_references_are_the_dense_one(monkeypatch):
    """With the dense reference in the kernels' place every launch is right, and a band that is off by one is not."""
    from benchmarks import _stress, stress
    from fa_inductor import reference
    from fa_inductor.spec import AttentionSpec
    from fa_inductor.templates.sm90 import backward_launch, launch

    off = 0

    def dense(function, *tensors, sizes, program, more=()):
        sizes = [sizes[0], sizes[1] + off]
        return function(*(t.double() for t in tensors), [], sizes, AttentionSpec.parse(program), *more)

    def forward(q, k, v, sizes, program):
        out, lse = dense(reference.attention, q, k, v, sizes=sizes, program=program)
        return out.to(q.dtype), lse.float()

    def backward(grad, q, k, v, out, lse, sizes, program):
        wanted = [True, True, True]
        grads = dense(reference.attention_grads, grad, q, k, v, sizes=sizes, program=program, more=(wanted,))
        return tuple(t.to(q.dtype) for t in grads)

    monkeypatch.setattr(_stress, "DEVICE", "cpu")
    monkeypatch.setattr(launch, "attention", forward)
    monkeypatch.setattr(backward_launch, "attention_backward", backward)
    small = [i for i in range(200) if math.prod(stress.drawn(0, 140, i).shape[d] for d in (0, 1, 3, 4)) < 2e5]
    assert {stress.drawn(0, 140, i).variant.backward for i in small} == {False, True}
    assert all(stress.drawn(0, 140, i).run() <= 1 for i in small)
    off = 1
    assert sum(bool(stress.drawn(0, 140, i).run() > 1) for i in small) > len(small) // 4


def test_stress_references_of_fp8(monkeypatch):
    """The same of the FP8 forward, of operands that were cast."""
    from benchmarks import _stress, stress
    from fa_inductor import fp8, reference
    from fa_inductor.spec import AttentionSpec
    from fa_inductor.templates import quantise
    from fa_inductor.templates.sm90 import fp8_launch

    off = 0

    def forward(q, k, v, sizes, program, format):
        small = (t.double() for t in fp8.rounded(q, k, v, format))
        out, lse = reference.attention(*small, [], [sizes[0], sizes[1] + off], AttentionSpec.parse(program))
        return out.to(q.dtype), lse.float()

    monkeypatch.setattr(_stress, "DEVICE", "cpu")
    monkeypatch.setattr(quantise, "quantise", fp8.cast_operands)
    monkeypatch.setattr(fp8_launch, "attention", forward)
    drawn = [stress.drawn(0, 140, i, fp8=True) for i in range(300)]
    small = [i for i, x in enumerate(drawn) if math.prod(x.shape[d] for d in (0, 1, 3, 4)) < 2e5]
    assert {stress.drawn(0, 140, i, fp8=True).variant.format for i in small} == set(quantise.FORMATS)
    assert all(stress.drawn(0, 140, i, fp8=True).run() <= 0.5 for i in small)
    off = 1
    assert sum(bool(stress.drawn(0, 140, i, fp8=True).run() > 1) for i in small) > len(small) // 4


def test_summary_of_a_sanitizer_counts_kinds():
    from benchmarks import sanitize

    line = "========= Error: Race reported between Write access at flash_backward+0x{:x}0 in gluon_backward.py:{}"
    output = "\n".join([*(line.format(i, 10 + i) for i in range(1, 4)), "========= RACECHECK SUMMARY: 3 hazards displayed"])
    first, second = sanitize.summary(output)
    assert first.startswith("RACECHECK SUMMARY")
    assert second.startswith("3 x Error: Race reported")
