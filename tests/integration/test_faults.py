"""Trouble around the compiler: broken caches, killed compilers, forks, threads. Right values or a clear error, and never a hang."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import graph_pass, lowering
from fa_inductor.report import collecting
from tests.compiling import Fusing, agree, fuse, normal

ROOT = Path(__file__).parents[2]
SECONDS = 150  # no test may hang: a process of its own gets this long, on the slowest machine

#: In a cache folder of one's own, probing for vector units and precompiling headers takes ten seconds.
QUICK = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}

COMMON = textwrap.dedent(
    """
    import json, os, sys
    import torch
    from torch._dynamo.utils import counters
    from fa_inductor.backend import fa_inductor as backend
    from fa_inductor.report import collecting

    OPTIONS = {"kernel": "reference"}

    def attention(q, k, v):
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    def with_kernel(q, k, v):  # Inductor writes C++ for what follows the attention
        return attention(q, k, v) * 2.0 + 1.0

    def check(fn, compiled, n=8):
        q, k, v = (torch.randn(2, 2, n, 8) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), fn(q, k, v))

    def compiled(fn):
        torch._dynamo.reset()
        return torch.compile(fn, backend=backend, options=OPTIONS)
    """
)


class Process:
    """A Python process that runs ``COMMON`` and then ``body``; what it prints last is a JSON value."""

    def __init__(self, body: str, cache: Path, **environment: str) -> None:
        more = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(cache), **QUICK, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMON + textwrap.dedent(body)],
            env={**os.environ, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, line: str = "") -> Any:
        """The value; ``line`` is what the process reads."""
        try:
            out, err = self.process.communicate(line, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert self.process.returncode == 0, err[-3000:]
        return json.loads(out.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------- caches
ONE_COMPILE = """
    with collecting() as report:
        check(with_kernel, compiled(with_kernel))
    found = counters["aot_autograd"]
    print(json.dumps([len(report.fused), found["autograd_cache_hit"], found["autograd_cache_miss"]]))
"""


def test_two_processes_on_one_cache_and_what_they_left_broken(tmp_path: Path) -> None:
    both = [Process("sys.stdin.readline()\n" + textwrap.dedent(ONE_COMPILE), tmp_path) for _ in range(2)]
    for process in both:  # each has imported what it needs by the time that it reads this line, or soon after
        assert process.process.stdin is not None
        process.process.stdin.write("go\n")
        process.process.stdin.flush()
    for process in both:
        fused, hits, misses = process.result()
        assert fused == 1
        assert hits + misses == 1
    assert Process(ONE_COMPILE, tmp_path).result() == [1, 1, 0], "the cache they filled serves a third"

    broken = [p for p in tmp_path.rglob("*") if p.is_file() and {"fxgraph", "aotautograd"} & set(p.parts)]
    assert len(broken) >= 2
    for i, path in enumerate(broken):
        whole = path.read_bytes()
        path.write_bytes((b"", b"no pickle", whole[: len(whole) // 2])[i % 3])
    assert Process(ONE_COMPILE, tmp_path).result()[:2] == [1, 0], "nothing broken may be served"


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """As plain torch.compile: an error that names the folder."""
    (tmp_path / "file").write_text("in the way")
    body = """
        ours, plain = compiled(with_kernel), torch.compile(with_kernel)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.stdin.readline().strip()  # torch itself needs a folder for its import
        errors = []
        for each in (ours, plain):
            try:
                check(with_kernel, each)
                errors.append("")
            except Exception as e:
                errors.append(f"{type(e).__name__}: {e}")
        print(json.dumps(errors))
    """
    ours, plain = Process(body, tmp_path / "cache").result(str(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file") in ours
    assert ours.split(":")[0] == plain.split(":")[0]


# ------------------------------------------------------------------------------------------------- compilers and workers
def test_a_killed_compiler_and_a_killed_worker(tmp_path: Path) -> None:
    """The call fails by name, the next compile works. A dead pool of workers holds nothing up."""
    script = tmp_path / "c++"
    marker = tmp_path / "allowed"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ -e {marker} ] || kill -9 $$\nexec g++ "$@"\n')
    script.chmod(0o755)
    body = f"""
        import signal
        from torch._inductor.async_compile import AsyncCompile
        pool = AsyncCompile.process_pool()
        AsyncCompile.wakeup()
        killed = 0
        for process in (getattr(pool, "process", None), *getattr(pool, "_processes", {{}}).values()):
            if process is not None:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
        try:
            check(with_kernel, compiled(with_kernel))
            error = ""
        except Exception as e:
            error = f"{{type(e).__name__}} {{e}}"
        open({str(marker)!r}, "w").close()
        with collecting() as report:
            check(with_kernel, compiled(with_kernel), 12)  # what has failed once, torch remembers
        print(json.dumps([error, killed, len(report.fused)]))
        sys.stdout.flush()
        os._exit(0)  # the pool is dead: torch's own exit handler would wait for it
    """
    error, killed, fused = Process(body, tmp_path / "cache", CXX=str(script), TORCHINDUCTOR_COMPILE_THREADS="2").result()
    assert "CppCompileError" in error or "C++ compile error" in error, error
    assert killed >= 1
    assert fused == 1


def test_a_fork_after_a_compile(tmp_path: Path) -> None:
    """The child runs what its parent compiled, and compiles on its own."""
    body = """
        function = compiled(attention)
        check(attention, function)
        child = os.fork()
        if child == 0:
            try:
                check(attention, function)
                with collecting() as report:
                    check(with_kernel, compiled(with_kernel))
                os._exit(40 + len(report.fused))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        check(attention, function)
        print(json.dumps(os.waitstatus_to_exitcode(status)))
    """
    assert Process(body, tmp_path).result() == 41


# ---------------------------------------------------------------------------------------------------- threads and nesting
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.transpose(-2, -1) * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def test_threads_that_compile_at_once() -> None:
    barrier, failures, seen = threading.Barrier(4), [], {}

    def work(number: int) -> None:
        try:
            fn = (attention, causal)[number % 2]
            compiled = torch.compile(lambda q, k, v: fn(q, k, v) * (number + 1.0), backend=Fusing())
            barrier.wait(timeout=60)
            with collecting() as report:
                for n in (8, 8 + number, 24):
                    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
                    out = compiled(q, k, v)
                    torch.testing.assert_close(out, fn(q, k, v) * (number + 1.0))
                    got = torch.autograd.grad(out.sum(), (q, k, v))
                    expected = torch.autograd.grad((fn(q, k, v) * (number + 1.0)).sum(), (q, k, v))
                    torch.testing.assert_close(got, expected)
            seen[number] = report.counts()
        except BaseException as e:
            failures.append(f"thread {number}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not failures
    assert all(counts["fused"] >= 1 and counts["rejected"] == 0 for counts in seen.values()), seen


def test_compiles_inside_compiles() -> None:
    """Ours in ours, behind a graph break, and a compile that starts while another's graph runs."""
    inner, inner_backend = fuse(causal)
    started: list[Tensor] = []

    @torch.compiler.disable
    def behind_a_break(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, backend = fuse(lambda q, k, v: attention(q, k, v) + causal(q, k, v))
        started.append(own(q, k, v))
        assert backend.fused == 2
        return started[-1]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = attention(q, k, v)
        q = inner(q, k, v)
        return attention(behind_a_break(q, k, v), k, v)

    q, k, v = (normal(2, 2, 8, 8) for _ in range(3))
    compiled, backend = fuse(fn)
    out = compiled(q, k, v)
    expected = causal(attention(q, k, v), k, v)
    expected = attention(attention(expected, k, v) + causal(expected, k, v), k, v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q))
    assert len(started) == 1
    assert backend.fused + inner_backend.fused == 3


def test_an_interrupt_inside_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the user, who can go on: the next call compiles, and garbage is collected as before."""
    original, calls = graph_pass.recognise, []

    def interrupted(view: Any) -> Any:
        calls.append(view)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(view)

    monkeypatch.setattr(graph_pass, "recognise", interrupted)
    assert gc.isenabled()
    compiled, backend = fuse(attention)
    inputs = [normal(2, 2, 8, 8) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        compiled(*inputs)
    assert gc.isenabled()
    torch.testing.assert_close(compiled(*inputs), attention(*inputs))
    assert backend.fused == 1


def test_a_backend_that_fails_behind_us_leaves_nothing_behind() -> None:
    """Inductor fails with our op in the graph: the error is the caller's, and the next compile is as good as the first."""

    def broken(graph: torch.fx.Graph) -> None:
        raise ZeroDivisionError("behind our pass")

    inputs = [normal(2, 2, 8, 8) for _ in range(3)]
    failing = torch.compile(
        attention, backend="fa_inductor", options={"kernel": "reference", "post_grad_custom_post_pass": broken}
    )
    with pytest.raises(Exception, match="behind our pass"):
        failing(*(x.detach() for x in inputs))
    torch._dynamo.reset()
    agree(attention, *inputs)


# --------------------------------------------------------------------------------------------------------------- templates
class Choice:
    def __init__(self, config: str, fails: bool) -> None:
        self.config, self.fails = config, fails

    def precompile(self) -> None:
        if self.fails:
            raise RuntimeError(f"ptxas: {self.config} does not compile")


def choices_of(monkeypatch: pytest.MonkeyPatch, candidates: list[str], broken: set[str], every: bool) -> list[str]:
    class Template:
        def __init__(self, name: str, text: str) -> None:
            self.config = text

        @staticmethod
        def of(name: str, text: str) -> Template:
            return Template(name, text)

        def maybe_append_choice(self, made: list[Choice], **_: Any) -> None:
            if self.config != "refused":  # by Inductor, before anything is compiled
                made.append(Choice(self.config, self.config in broken))

    def render(config: str) -> Any:
        constants = {"BLOCK": 64}
        return SimpleNamespace(
            name=config, text=config, arguments=["Q"], outputs=[], num_warps=4, num_stages=2, constants=constants
        )

    monkeypatch.setattr(lowering, "_template_class", lambda: Template)
    grid: Callable[[Any], Any] = lambda config: (1, 1, "BLOCK")  # noqa: E731
    call = lowering._Call("forward", render, {"Q": "q"}, None, grid, [])  # type: ignore[arg-type]
    found, nodes = lowering._choices(call, candidates, every)  # type: ignore[arg-type]
    assert nodes == ["q"]
    return [c.config for c in found]


def test_templates_that_do_not_compile_are_dropped_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    candidates = ["refused", "large", "middle", "small"]
    with caplog.at_level(logging.WARNING, "fa_inductor"):
        assert choices_of(monkeypatch, candidates, {"large"}, every=False) == ["middle"]
    assert "configuration large dropped: RuntimeError: ptxas: large does not compile" in caplog.text
    assert choices_of(monkeypatch, candidates, {"large", "small"}, every=True) == ["middle"]
    assert choices_of(monkeypatch, candidates, {"large", "middle", "small"}, every=True) == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("illegal memory access")])
def test_tuning_that_fails_takes_the_default(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operands do not fit in memory once more, or a candidate takes the benchmark with it."""
    tried = []

    def tune(name: str, choices: list[str], nodes: list[Any], layout: Any, **_: Any) -> Any:
        tried.append(list(choices))
        if len(choices) > 1:  # one alone is not timed
            raise error
        return choices[0], None

    monkeypatch.setattr("torch._inductor.select_algorithm.autotune_select_algorithm", tune)
    call = lowering._Call("forward", None, {}, None, None, [])  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fa_inductor"):
        assert lowering._fastest(call, ["default", "large"], []) == "default"
    assert tried == [["default", "large"], ["default"]]
    assert f"forward kernel: no timing, the default configuration is taken: {type(error).__name__}: {error}" in caplog.text
