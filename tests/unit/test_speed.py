"""Faster code for a training step must not change what it computes."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from accel_ft.engine.clip import clip
from accel_ft.model import dropout as fast
from accel_ft.model.embedding import fill_gradient, make_sparse
from accel_ft.runtime import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_dropout(p: float, dtype: torch.dtype) -> None:
    """The share of zeros, the scale and mean of the rest, and the same mask in the backward pass."""
    torch.manual_seed(0)
    values = torch.ones(1001, 999, dtype=dtype, requires_grad=True)
    out = fast.dropout(values, p, True)
    out.sum().backward()
    kept = out != 0
    dropped = (~kept).float().mean().item()
    assert dropped == pytest.approx(p, abs=1 / 256 + 0.002)
    assert out[kept].unique().tolist() == pytest.approx([1 / (1 - dropped)], rel=1e-2)
    assert torch.equal(values.grad, out.detach())
    if dtype == torch.float32:
        assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    for axis in (0, 1):  # no row or column is favoured: within 6 standard deviations
        shares = kept.float().mean(axis)
        assert (shares - (1 - dropped)).abs().max() < 6 * (p * (1 - p) / 999) ** 0.5


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 255 / 256])
def test_the_probability_is_rounded_up_or_down_and_right_on_average(p: float) -> None:
    """It is a multiple of 1/256, and kept elements are scaled for the rounded value."""
    torch.manual_seed(0)
    dropped = []
    for _ in range(3000):
        kept, scale = fast.draw_mask(torch.Size((9,)), p, fast.seeded())
        assert (kept is None) == (scale == 1.0)
        dropped.append(256 * (1 - 1 / scale))
    levels = {round(each) for each in dropped}
    assert dropped == pytest.approx([round(each) for each in dropped])
    assert levels == {int(p * 256), -int(-p * 256 // 1)}
    assert sum(dropped) / 3000 == pytest.approx(p * 256, abs=4 * 0.5 / 3000**0.5)


def test_a_second_derivative_of_dropout_is_refused() -> None:
    """Its backward pass multiplies bits as integers, which autograd does not record."""
    values = torch.ones(99, requires_grad=True)
    out = fast.dropout(values * values, 0.1, True).square().sum()
    (first,) = torch.autograd.grad(out, values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_byte_of_each_element_is_kept_for_the_backward_pass() -> None:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fast.dropout(torch.ones(1001, requires_grad=True), 0.1, True)
    assert [tensor.nbytes for tensor in kept] == [1001]


def test_neighbours_are_dropped_independently() -> None:
    """Elements of the same 64-bit draw, eight bytes, and of different draws are uncorrelated."""
    torch.manual_seed(0)
    kept = (fast.dropout(torch.ones(4_000_000), 0.5, True) != 0).float() * 2 - 1
    for distance in (1, 2, 3, 4, 5, 8, 64):
        assert abs((kept[:-distance] * kept[distance:]).mean().item()) < 0.003


def test_dropout_follows_torchs_generator() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (fast.dropout(torch.ones(101), 0.5, True) for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(fast.dropout(torch.ones(101), 0.5, True), first)
    assert not torch.equal(first, second)


def test_what_is_left_to_torch() -> None:
    values = torch.randn(7)
    assert fast.dropout(values, 0.5, training=False) is values
    assert torch.equal(fast.dropout(values, 0.0, True), values)
    assert not fast.dropout(values, 1.0, True).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        fast.dropout(values, 1.5, True)
    kept = values.clone()
    assert fast.dropout(kept, 0.5, True, inplace=True) is kept


def test_layers_and_attention_use_it_while_it_lasts(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a BERT each of the 2 layers drops attention weights and two outputs; embeddings and head drop one each."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, attn_implementation="eager"
    )
    calls = []
    plain = fast._Dropout.apply
    monkeypatch.setattr(fast._Dropout, "apply", lambda *a: calls.append(a[0].shape) or plain(*a))
    torch_dropout = F.dropout
    with fast.on_cpu(torch.device("cpu")):
        model.train()(input_ids=torch.ones(2, 5, dtype=torch.long))
    assert sorted(map(tuple, calls)) == sorted([(2, 2, 5, 5)] * 2 + [(2, 5, 32)] * 5 + [(2, 32)])
    assert F.dropout is torch_dropout
    with fast.on_cpu(torch.device("meta")):
        assert F.dropout is torch_dropout
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")  # dynamo cannot trace ours
    with fast.on_cpu(torch.device("cpu")):
        assert F.dropout is torch_dropout


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e3, float("inf")])
def test_clipping_in_the_step_is_clipping(max_norm: float, bias: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(30, 20, bias), nn.Linear(30, 20, bias)
    theirs.load_state_dict(ours.state_dict())
    # With a large epsilon a step depends on the gradient's size and does not amplify rounding.
    a, b = (
        torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0, fused=True)
        for model in (ours, theirs)
    )
    accelerator: Any = SimpleNamespace(scaler=None)
    for _ in range(3):
        inputs = torch.randn(8, 30)
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs).square().sum().backward()
        norm = clip(accelerator, ours, SimpleNamespace(optimizer=a), max_norm)
        usual = float(clip_grad_norm_(theirs.parameters(), max_norm))
        assert float(norm) == pytest.approx(usual, rel=1e-6)
        a.step()
        b.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)


class Reader(nn.Module):
    """Word embedding, position embedding, head."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.words, self.places, self.head = embedding, nn.Embedding(16, 8), nn.Linear(8, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head((self.words(ids) + self.places.weight).tanh().mean(1))


def test_the_norm_of_no_gradient() -> None:
    accelerator: Any = SimpleNamespace(scaler=None)
    model = nn.Linear(2, 2)
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()))
    assert clip(accelerator, model, optimizer, 1.0) == 0


@pytest.mark.parametrize("parts", [(1, 1, 1, 1), (3, 3, 3, 3), (3, 1, 1, 3)])
def test_a_sparse_gradient_of_the_words_is_the_whole_one(parts: tuple[int, ...]) -> None:
    """Four updates give the weights of dense gradients: bit for bit with one micro-batch each, else up to rounding."""
    ids = torch.randint(0, 50, (4, 12, 2), generator=torch.Generator().manual_seed(0)).repeat(
        1, 1, 8
    )
    accelerator: Any = SimpleNamespace(scaler=None)
    weights = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = Reader(nn.Embedding(50, 8, padding_idx=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        if sparse:
            make_sparse(model)
        for batch, count in zip(ids, parts, strict=True):
            for part in batch.chunk(count):
                model(part).square().sum().backward()
                if count == 1:
                    assert model.words.weight.grad.is_sparse is sparse
                fill_gradient(model)
                assert not model.words.weight.grad.is_sparse
            assert not model.words.weight.grad[0].any()
            usual = float(get_total_norm([p.grad for p in model.parameters()]))
            norm = clip(accelerator, model, SimpleNamespace(optimizer=optimizer), float("inf"))
            assert float(norm) == pytest.approx(usual, rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.words.weight.detach())
    assert torch.equal(*weights) if set(parts) == {1} else torch.allclose(*weights, atol=1e-4)


def test_a_batch_that_is_written_over() -> None:
    """The row numbers are copied: the next batch may overwrite the tensor of ids."""
    model, ids = Reader(nn.Embedding(50, 8)), torch.arange(16)[None]
    make_sparse(model)
    for _ in range(2):
        model.zero_grad()
        model(ids).sum().backward()
        fill_gradient(model)
        read = ids.clone()
        ids += 16
    assert model.words.weight.grad.any(1).nonzero().flatten().tolist() == read[0].tolist()


def test_embeddings_that_cannot_be_sparse_are_left_alone() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, self.weight) * 2

    frozen, tied, own, none = (Reader(nn.Embedding(50, 8)) for _ in range(4))
    frozen.words.weight.requires_grad_(False)
    tied.out = nn.Linear(8, 50)
    tied.out.weight = tied.words.weight
    own.words = Scaled(50, 8)
    none.get_input_embeddings = lambda: None
    for model in (frozen, tied, own, none, nn.Linear(2, 2)):
        make_sparse(model)
        assert not any(getattr(module, "sparse", False) for module in model.modules())


MALLOC = {"LD_PRELOAD", "GLIBC_TUNABLES"}


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in MALLOC} | more


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_is_kept(kept: bool) -> None:
    """Blocks of 48 MiB, allocated and freed 20 times: 12,288 page faults each, or none once the heap has grown."""
    code = f"""
import resource, torch
from accel_ft.runtime.memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(12 * 2**20)
before = faults()
for _ in range(20):
    torch.ones(12 * 2**20)
print(faults() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (int(done.stdout) < 12_288) is kept, done.stdout + done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "doctor"])
def test_a_command_starts_anew_with_the_allocator(command: str) -> None:
    """Before it parses its arguments; but not if the user chose an allocator, in another program, or in a debugger."""
    code = f"""
import os, runpy, sys
from accel_ft.runtime import memory
memory.GPU_NODES = ()
os.execve = lambda *words: sys.exit(f"anew: {{words[1][3:]}}")
if "traced" in sys.argv:
    sys.settrace(lambda *_: None)
sys.argv[1:] = ["--help"]
runpy.run_module("accel_ft.{command}", run_name="__main__")
"""

    def told(*words: str, **variables: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env=environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.stdout, done.stderr

    out, err = told(f"accel_ft.{command}", "--help")
    assert "'--help']" in err, err
    assert not out
    name = f"accel_ft.{command}"
    for out, err in (told(name, LD_PRELOAD=""), told(), told(name, "traced")):
        assert "usage:" in out, err


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
@pytest.mark.parametrize("what", ["", "lost", "no python"])
def test_started_anew(what: str, tmp_path: Path) -> None:
    """Process id, arguments and input stay. It happens once, even without the variable; if exec fails, nothing changes."""
    code = f"""
import os, sys
from accel_ft import errors
from accel_ft.runtime import memory
memory.GPU_NODES, memory.FOLDERS = (), ("{tmp_path}",)
if memory.STARTED_ANEW not in sys._xoptions:
    errors.parent = 7, ["its", "first one"]  # which may be gone by then
if "{what}" == "lost":
    os.environ.pop("GLIBC_TUNABLES", None)
if "{what}" == "no python":
    sys.executable = "{tmp_path}/python"
memory.restart_with_better_malloc("a b")
print(os.getpid(), sys.argv[1:], sys.stdin.read(), memory.malloc_in_use(), errors.parent, errors.PARENT in os.environ, sep="|")
"""
    words = [sys.executable, "-c", code, "a b", "--x=*"]
    process = subprocess.Popen(
        words, env=environment(), cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        out, _ = process.communicate("rows", timeout=60)
    finally:
        process.kill()
    malloc = "glibc" if what else "glibc glibc.malloc.tcache_count=0"
    assert (
        out.strip()
        == f"{process.pid}|['a b', '--x=*']|rows|{malloc}|(7, ['its', 'first one'])|False"
    )


def test_which_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MALLOC:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory, "GPU_NODES", (tmp_path / "gpu",))
    monkeypatch.setattr(memory, "FOLDERS", (str(tmp_path / "lib"), str(tmp_path)))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    without = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    assert memory.better_malloc() == without
    tcmalloc = tmp_path / "libtcmalloc_minimal.so.4"
    tcmalloc.touch()
    assert memory.better_malloc() == {"LD_PRELOAD": str(tcmalloc)}
    spaced = tmp_path / "a b"
    spaced.mkdir()
    tcmalloc.rename(spaced / tcmalloc.name)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "FOLDERS", (str(spaced),))
        assert memory.better_malloc() == without
    for name in MALLOC:
        with monkeypatch.context() as patch:
            patch.setenv(name, "")
            assert memory.better_malloc() == {}
    with monkeypatch.context() as patch:
        patch.setattr(platform, "libc_ver", lambda: ("", ""))
        assert memory.better_malloc() == {}
    (tmp_path / "gpu").touch()
    assert memory.better_malloc() == {}
