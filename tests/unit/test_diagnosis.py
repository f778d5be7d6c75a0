"""The doctor's checks, on one process: each on a program with a real-world fault, and on the repaired program."""

import contextlib
import gc
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel_ft.config import TrainConfig
from accel_ft.diagnosis import (
    accumulation,
    curve,
    fit,
    learning,
    machine,
    order,
    postmortem,
    replicas,
    resume,
    sampling,
    tensors,
)
from accel_ft.diagnosis.finding import Finding, line
from accel_ft.model import memory
from accel_ft.model.adapters import choose_trained

ROWS = TensorDataset(torch.arange(40.0).reshape(20, 2) / 40, torch.arange(20) % 2)


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def caught(finding: Finding, *words: str) -> None:
    assert finding.verdict in ("FAIL", "WARN"), finding
    assert finding.mend
    for word in words:
        assert word in finding.measured, finding


def well(finding: Finding) -> None:
    assert finding.verdict == "PASS", finding
    assert not finding.mend


def test_lines() -> None:
    assert line(Finding("a", "PASS", "1")) == f"{'a':32}  PASS  1"
    assert line(Finding("bcd", "FAIL", "2", "do this")).splitlines() == [
        f"{'bcd':32}  FAIL  2", f"{'':32}        Fix: do this",
    ]  # fmt: skip


# 3. Order of construction.


def test_loader_before_the_process_group(tmp_path: Path) -> None:
    def build(loader_first: bool) -> Finding:
        with order.construction() as log:
            if loader_first:
                DataLoader(ROWS, batch_size=2)
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/{loader_first}", rank=0, world_size=1
            )
            if not loader_first:
                DataLoader(ROWS, batch_size=2)
        try:
            return order.construction_order(log, num_ranks=2)
        finally:
            torch.distributed.destroy_process_group()

    caught(build(True), "1 DataLoader built before the process group, on rank 0")
    well(build(False))
    assert order.construction_order([], 1).verdict == "SKIP"


def test_optimizer_before_wrapping() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for module in model:  # as FSDP does: new parameters under the same names
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    finding = order.optimizer_holds_model(model, optimizer)
    caught(
        finding,
        "holds 4 tensors the model no longer has, and not: 0.weight, 0.bias, 2.weight, and 1 more",
    )
    well(order.optimizer_holds_model(model, torch.optim.SGD(model.parameters(), 0.1)))


# 4. Parameters without a gradient.


def test_unused_parameters() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "forgotten": nn.Linear(2, 2)})
    finding = replicas.used_parameters(model, lambda: model["used"](ROWS[:4][0]).sum())
    caught(finding, "2 of 4 get no gradient: forgotten.weight, forgotten.bias")
    model["forgotten"].requires_grad_(False)
    well(replicas.used_parameters(model, lambda: model["used"](ROWS[:4][0]).sum()))


# 7. Tensors that do not belong.


class Encoded(Dataset):
    """Rows that the data set encodes with a module of its own, or keeps on a device."""

    def __init__(self, encoder=None, device: str = "cpu") -> None:
        self.encoder, self.rows = encoder, torch.zeros(4, 2, device=device)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int):
        return {"x": self.rows[row]}


def test_device_tensors_in_workers() -> None:
    """The device "meta" stands for CUDA: any device that is not the CPU."""
    loader = DataLoader(Encoded(device="meta"), num_workers=2)
    caught(tensors.dataset_tensors(loader), "a row holds a tensor [2] on meta", "with 2 workers")
    assert tensors.dataset_tensors(loader).verdict == "FAIL"
    assert tensors.dataset_tensors(DataLoader(Encoded(device="meta"))).verdict == "WARN"
    well(tensors.dataset_tensors(DataLoader(Encoded(), num_workers=2)))


@pytest.mark.parametrize("kind", [list, tuple, dict.fromkeys, set, np.array])
def test_copies_of_many_objects(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an object changes its reference count: each forked worker copies the page it is on."""
    monkeypatch.setattr(tensors, "LONG_LIST", 1000)
    rows = Encoded()
    numbers = [bytes([number % 256, number // 256]) for number in range(1100)]
    rows.texts = kind(numbers) if kind is not np.array else np.array(numbers, object)
    named = f"a {type(rows.texts).__name__} of 1,100"
    caught(tensors.dataset_tensors(DataLoader(rows, num_workers=2)), f"2 workers copies {named}")
    well(tensors.dataset_tensors(DataLoader(rows)))
    if kind is np.array:
        rows.texts = np.array(numbers)  # bytes in the array itself, not objects
        well(tensors.dataset_tensors(DataLoader(rows, num_workers=2)))


def test_copies_in_spawned_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "LARGE_BYTES", 16)
    rows = Encoded()
    loader = DataLoader(rows, num_workers=2, multiprocessing_context="spawn")
    well(tensors.dataset_tensors(loader))  # torch shares a tensor between workers
    rows.array = np.memmap(tmp_path / "rows", shape=32, mode="w+")  # pickled whole for each worker
    caught(tensors.dataset_tensors(loader), "each of 2 workers copies an array of 0 MiB")
    well(tensors.dataset_tensors(DataLoader(rows, num_workers=2)))

    class Mapped:
        """It pickles no array: each worker maps the file itself."""

        def __init__(self) -> None:
            self.array = rows.array

        def __reduce__(self):
            return Mapped, ()

    own = Encoded()
    own.store = Mapped()
    well(tensors.dataset_tensors(DataLoader(own, num_workers=2, multiprocessing_context="spawn")))


def test_encoder_in_data_set_and_model() -> None:
    import copy

    encoder = nn.Linear(2, 2)
    model = nn.Sequential(encoder, nn.Linear(2, 2))
    caught(
        tensors.shared_modules(Encoded(encoder), model),
        "2 of the model's parameters: 0.weight, 0.bias",
    )
    well(tensors.shared_modules(Encoded(copy.deepcopy(encoder)), model))


def test_views_and_ties() -> None:
    views, ties = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    views[1].weight = nn.Parameter(views[0].weight.data.T)
    caught(tensors.aliased_parameters(views), "views of the same memory: 0.weight = 1.weight")
    ties[1].weight = ties[0].weight
    well(tensors.aliased_parameters(ties))
    caught(tensors.aliased_parameters(ties, sharded=True), "tied: 0.weight = 1.weight")
    well(tensors.aliased_parameters(small_model()))
    flat = torch.zeros(8)  # cuDNN's layout of an LSTM's weights: one storage, no byte shared
    halves = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    well(tensors.aliased_parameters(halves))
    whole = torch.zeros(2, 8)  # column slices interleave in memory, but share nothing
    for start, share in ((4, well), (3, lambda found: caught(found, "0 = 1"))):
        parts = (nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, start:]))
        share(tensors.aliased_parameters(nn.ParameterList(parts)))
    # Parameter 1 begins between 0 and 2, which overlap, but shares nothing with them.
    grid = torch.zeros(3, 3)
    parts = (nn.Parameter(grid[:, :2]), nn.Parameter(grid[:, 2:]), nn.Parameter(grid[1:, 1:2]))
    caught(tensors.aliased_parameters(nn.ParameterList(parts)), "0 = 2")


def test_in_place() -> None:
    x = ROWS[:4][0]

    class Sick(nn.Module):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where, self.linear = where, nn.Linear(2, 2)

        def forward(self, x):
            if self.where == "parameter":
                with torch.no_grad():
                    self.linear.weight.mul_(0.9)
            y = self.linear(x).exp()
            if self.where == "activation":
                y += 1
            if self.where == "mended":
                y = y + 1
            return y

    def finding(where: str) -> Finding:
        model = Sick(where)
        return tensors.in_place(model, lambda: model(ROWS[:4][0]).sum())

    with pytest.warns(UserWarning, match="Error detected"):
        caught(finding("activation"), "modified by an inplace operation")
    caught(finding("parameter"), "changes parameters: linear.weight")
    well(finding("mended"))
    teacher = Sick("parameter").requires_grad_(False)  # for example an EMA of the weights
    student = nn.ModuleList([nn.Linear(2, 2), teacher])

    def distance() -> torch.Tensor:
        return (student[0](x) - teacher(x)).sum()

    well(tensors.in_place(student, distance))


# 8. Accumulation.


def epoch(
    num_batches: int, k: int, schedule_each: bool = False, flush: bool = False, clear: bool = True
) -> list[str]:
    """Return the events of a loop over `num_batches` that steps after every k-th batch."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with accumulation.recording() as events:
        for number in range(1, num_batches + 1):
            loss_of(model, ROWS[number : number + 2]).backward()
            if schedule_each:
                scheduler.step()
            if number % k == 0 or (flush and number == num_batches):
                optimizer.step()
                if not schedule_each:
                    scheduler.step()
                if clear:
                    optimizer.zero_grad()
    return events


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_what_a_loop_calls() -> None:
    well(accumulation.accumulation_calls(epoch(8, 4), 4))
    caught(
        accumulation.accumulation_calls(epoch(9, 4), 4), "ends with 1 backward passes and no step",
    )  # fmt: skip
    caught(
        accumulation.accumulation_calls(epoch(8, 1), 4),
        "8 updates of 1 micro-batches instead of 4",
    )
    well(accumulation.accumulation_calls(epoch(2, 2), 4))  # an epoch shorter than an update
    caught(accumulation.accumulation_calls(["backward"] * 3, 4), "no step in 3 calls")
    short = accumulation.accumulation_calls(epoch(9, 4, flush=True), 4)
    caught(short, "3 updates of 1, 4 micro-batches: a short last block")
    off_by_one = ["backward", "step", *(["backward"] * 4 + ["step"]) * 2]  # number % 4 == 0
    caught(
        accumulation.accumulation_calls(off_by_one, 4),
        "3 updates of 1, 4 micro-batches: a short first block",
    )
    caught(
        accumulation.accumulation_calls(epoch(8, 4, schedule_each=True), 4),
        "the scheduler is stepped 4 times an update",
    )
    caught(
        accumulation.accumulation_calls(epoch(8, 4, clear=False), 4),
        "1 updates begin with the gradients of the update before",
    )


def test_a_prepared_scheduler_steps_for_each_process() -> None:
    """accelerate steps a prepared scheduler `num_processes` times an update."""
    events = ["backward", "step", "clear", "schedule", "schedule"] * 3
    caught(accumulation.accumulation_calls(events, 1), "stepped 2 times an update")


def test_accumulated_gradient() -> None:
    model = small_model()
    micro = [ROWS[start : start + 4] for start in (0, 4, 8, 12)]

    def in_the_manner_of_trainer() -> None:
        for batch in micro:
            loss_of(model, batch).backward()

    def mended() -> None:
        for batch in micro:
            (loss_of(model, batch) * len(batch[0]) / 16).backward()

    def whole() -> None:
        loss_of(model, ROWS[:16]).backward()

    finding = accumulation.accumulated_gradient(model, in_the_manner_of_trainer, whole)
    caught(finding, "4.0000 times that of the whole batch")
    well(accumulation.accumulated_gradient(model, mended, whole))
    uneven = [ROWS[:6], ROWS[6:8]]

    def mean_of_means() -> None:
        for batch in uneven:
            (loss_of(model, batch) / 2).backward()

    finding = accumulation.accumulated_gradient(
        model, mean_of_means, lambda: loss_of(model, ROWS[:8]).backward()
    )
    caught(finding, "in another direction")
    assert all(p.grad is None for p in model.parameters())


# 9. A checkpoint that does not come back.


class Job:
    """A training loop with all parts that a checkpoint needs; `fault` names one that it loses."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.epoch, self.batch = fault, 0, 0
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        self.parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def step(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
        rows = order[4 * self.batch : 4 * self.batch + 4]
        x, y = ROWS[rows]
        x = nn.functional.dropout(x, 0.5)
        self.scaler.scale(loss_of(self.model, (x, y))).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.epoch, self.batch = divmod(5 * self.epoch + self.batch + 1, 5)
        return rows.tolist()

    def save(self, folder: Path) -> None:
        state = {name: part.state_dict() for name, part in self.parts.items() if name != self.fault}
        if self.fault != "random numbers":
            state["random"] = resume.random_state()
        torch.save(state | {"epoch": self.epoch, "batch": self.batch}, folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=False)
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])
        if "random" in state:
            random.setstate(state["random"]["python"])
            np.random.set_state(state["random"]["numpy"])
            torch.set_rng_state(state["random"]["torch"])
        self.epoch, self.batch = state["epoch"], state["batch"]
        if self.fault == "position in the data":  # skips to the next epoch
            self.epoch, self.batch = self.epoch + 1, 0


def test_random_numbers_that_an_update_does_not_draw(tmp_path: Path) -> None:
    """Python's and numpy's states are not restored, but never used; torch's is, and dropout uses it."""

    class Forgetful(Job):
        def load(self, folder: Path) -> None:
            state = torch.load(folder / "state.pt", weights_only=False)
            other = {
                "python": random.Random(7).getstate(),
                "numpy": np.random.RandomState(7).get_state(),
            }
            torch.save(state | {"random": state["random"] | other}, folder / "state.pt")
            super().load(folder)

    findings = {finding.check: finding for finding in resume.resume(Forgetful, tmp_path)}
    assert findings["resume: random numbers"].verdict == "WARN"
    assert findings["resume: the next update"].verdict == "PASS"


def test_rows_that_ranks_share() -> None:
    def verdict(rows: list[list[int]], batch: int, of: int) -> str:
        return sampling._coverage([(numbers, batch, 1) for numbers in rows], of).verdict

    draw = np.random.default_rng(0).integers(1000, size=(2, 500)).tolist()
    assert verdict(draw, 16, 1000) == "WARN"  # drawn with replacement, each rank its own share
    assert verdict([draw[0] + draw[1]] * 2, 16, 1000) == "FAIL"  # each rank draws both shares
    drawn = [np.random.default_rng(rank).integers(40, size=20).tolist() for rank in range(2)]
    assert verdict(drawn, 4, 40) == "WARN"  # few rows: about a batch of them is shared
    assert verdict([list(range(1000))] * 2, 16, 1000) == "FAIL"
    assert verdict([list(range(64))] * 2, 32, 64) == "FAIL"  # as few as padding may repeat
    assert (
        verdict([[0, 1, 2], [0, 1, 2]], 4, 3) == "PASS"
    )  # one batch: there is nothing to share out
    assert verdict([list(range(0, 64, 2)), list(range(1, 64, 2))], 32, 64) == "PASS"
    assert verdict([list(range(64))], 4, 63) == "FAIL"  # ids that are not those of the rows
    assert verdict([[], []], 0, 63) == "FAIL"


def test_rows_drawn_with_replacement() -> None:
    """With a sampler that declares replacement, repeats are normal; but ranks must not draw the same rows."""
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 40, 20)
    loader = DataLoader(range(40), sampler=sampler)
    draws = np.random.default_rng(0).integers(40, size=(3, 20)).tolist()

    def judged(*ranks: list[int]):
        return sampling._coverage([(numbers, 4, 5) for numbers in ranks], 40, loader)

    well(judged(draws[0], draws[1]))
    caught(judged(draws[0], draws[1], draws[0]), "ranks draw the same rows")
    caught(judged([number % 12 for number in draws[0]], draws[1][:3]), "rows are never drawn")


@pytest.mark.parametrize(
    "fault",
    ["", "model", "optimizer", "scheduler", "scaler", "random numbers", "position in the data"],
)
def test_resume(tmp_path: Path, fault: str) -> None:
    findings = {finding.check: finding for finding in resume.resume(lambda: Job(fault), tmp_path)}
    parts = ("model", "optimizer", "scheduler", "scaler", "random numbers", "position in the data")
    for part in parts:
        assert (findings[f"resume: {part}"].verdict == "FAIL") == (part == fault), findings
    assert (findings["resume: the next update"].verdict == "PASS") == (fault == ""), findings
    if fault:
        caught(findings[f"resume: {fault}"])
    if fault == "position in the data":
        assert re.search(r"sample\[0\] \d+ instead of \d+", findings[f"resume: {fault}"].measured)


def test_a_resume_where_sums_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU kernels add in any order: what is loaded is right, but the next update differs in its last bits."""

    class Unsteady(Job):
        def step(self) -> list[int]:
            ids = super().step()
            with torch.no_grad():
                next(iter(self.parts["model"].parameters())).add_(torch.rand(()) * 0 + next(noise))
            return ids

    for has_gpu, verdict in ((False, "FAIL"), (True, "WARN")):
        noise = iter(range(1, 99))
        device = SimpleNamespace(is_available=lambda has_gpu=has_gpu: has_gpu)
        # Patched in this check only: a CUDA build of torch would look for its driver.
        monkeypatch.setattr(
            resume, "torch", SimpleNamespace(**{**vars(torch), "accelerator": device})
        )
        folder = tmp_path / verdict
        folder.mkdir()
        findings = resume.resume(lambda: Unsteady(""), folder)
        assert [f.verdict for f in findings] == ["PASS"] * (len(findings) - 1) + [verdict]


# 10. Learning at all.


def test_initial_loss() -> None:
    well(learning.initial_loss(1.39, 4))
    caught(learning.initial_loss(44.4, 4), "44.4000, ln(4) is 1.3863")  # a sum in place of a mean
    caught(learning.initial_loss(math.nan, 4))
    caught(learning.initial_loss(0.01, 4))
    well(learning.initial_loss(0.01, 4, is_fresh=False))


def test_gradient_norms() -> None:
    model = small_model()
    caught(learning.gradient_norms(model), "no parameter has a gradient")
    loss_of(model, ROWS[:8]).backward()
    well(learning.gradient_norms(model))
    model[2].requires_grad_(False)
    assert "; 2 are frozen, the last one 2.bias" in learning.gradient_norms(model).measured
    model[2].requires_grad_(True)
    model[0].weight.grad.zero_()
    caught(learning.gradient_norms(model), "zero: 0.weight")
    model[2].bias.grad.fill_(math.inf)
    caught(learning.gradient_norms(model), "not finite: 2.bias")
    for parameter in model.parameters():
        parameter.grad.zero_()
    caught(learning.gradient_norms(model), "all are zero")


def test_overfits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(learning, "time", SimpleNamespace(monotonic=lambda: now))

    def lasting(seconds: float, losses: Iterator[float]) -> Callable[[], float]:
        def step() -> float:
            nonlocal now
            now += seconds
            return next(losses)

        return step

    def trained(rate: float, shuffled: bool) -> Finding:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        generator = torch.Generator().manual_seed(0)

        def step() -> float:
            x, y = ROWS[:8][0], torch.arange(8) // 4
            if shuffled:  # the labels of other rows
                y = y[torch.randperm(8, generator=generator)]
            loss = loss_of(model, (10 * x, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return learning.overfits(step, steps=300)

    well(trained(0.1, shuffled=False))
    slow = learning.overfits(lasting(0.1, iter([1.0, 0.8, 0.45])), seconds=0.25)
    assert "below half is enough" in slow.measured
    slow = learning.overfits(lasting(0.1, repeat(1.0)), seconds=0.25)
    assert (slow.verdict, "too slow a device" in slow.measured) == ("SKIP", True)
    falling = (0.98**n for n in range(100))  # slow, as adapters are on a busy machine
    slow = learning.overfits(lasting(0.01, falling), seconds=0.3)
    assert (slow.verdict, "too slow a device" in slow.measured) == ("SKIP", True)
    caught(learning.overfits(lasting(0.01, repeat(0.9)), seconds=0.4), "not below 0.1")
    caught(trained(1e-6, shuffled=False), "not below 0.1")
    caught(trained(0.1, shuffled=True), "in 300 updates")
    assert trained(0.1, shuffled=True).verdict == "FAIL"
    for last, verdict in ((0.7, "WARN"), (0.9, "FAIL")):  # e.g. near ln 2, with four labels
        stuck = lasting(0.0, iter([2.0, 0.4, *[last] * 8]))
        assert learning.overfits(stuck, steps=10, chance=math.log(4)).verdict == verdict
    assert learning.overfits(lasting(0.0, iter([2.0, *[0.7] * 9])), steps=10).verdict == "FAIL"


def test_varied_texts() -> None:
    rows = [np.array([[1, 2, number]], np.int32) for number in range(9)]
    well(learning.varied_texts(rows))
    caught(learning.varied_texts(rows[:3] * 3), "3 different ones in 9 rows")
    well(learning.varied_texts(rows[:3] * 2))  # too few rows to judge


def test_varied_predictions() -> None:
    well(learning.varied_predictions(torch.eye(4).repeat(4, 1)))
    caught(learning.varied_predictions(torch.tensor([[1.0, 0.0]] * 9)), "[9, 0]: one class for all")
    caught(learning.varied_predictions(torch.eye(2).fill_(math.nan)), "logits are not finite")


# 12. Will it fit.


def test_activations_are_counted() -> None:
    """Saved are tanh's output [rows, 8], cross-entropy's input [rows, 2] and the first layer's input [rows, 2]."""
    model = small_model()

    def loss(rows: int) -> torch.Tensor:
        return loss_of(model, (torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64)))

    need = memory.need(model, loss, 16)
    assert 4 * (8 + 2 + 2) <= need.per_row <= 2 * 4 * (8 + 2 + 2)
    assert need.fixed < 100
    assert need.moments == 2 * need.parameters == 2 * need.gradients


def test_checkpointing_keeps_less_and_nothing_fixed() -> None:
    """Recomputed layers save only their inputs; bytes that do not depend on the number of rows stay as few."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).train()

    def loss(rows: int) -> torch.Tensor:
        return model(torch.ones(rows, 16, dtype=torch.int64)).logits.sum()

    plain = memory.need(model, loss, 4)
    layer = sum(p.nbytes for p in model.bert.encoder.layer[0].parameters())
    num_layers = len(model.bert.encoder.layer)
    assert plain.gathered == plain.parameters + (2 - num_layers) * layer  # embeddings and head too
    choose_trained(model, TrainConfig(gradient_checkpointing=True))
    saving = memory.need(model, loss, 4)
    assert saving.per_row < plain.per_row / 2
    assert saving.fixed <= plain.fixed + 1000


def test_will_it_fit() -> None:
    wanted = memory.Need(400, 400, 800, per_row=100, fixed=0, gathered=100)
    well(fit.will_it_fit(wanted, "ddp", 2, capacity=4000, rows=8))
    finding = fit.will_it_fit(wanted, "ddp", 2, capacity=2000, rows=8)
    caught(finding, "largest micro-batch 2")
    assert finding.mend.startswith("FSDP2 (DDP does not fit): 0 MiB")
    finding = fit.will_it_fit(wanted, "none", 1, capacity=2000, rows=32)
    assert "one process with per_device_train_batch_size 2" in finding.mend
    assert "not one row fits" in fit.will_it_fit(wanted, "ddp", 2, capacity=100, rows=8).mend
    needy = memory.Need(
        parameters=4000, gradients=4000, moments=8000, per_row=1, fixed=0, gathered=10
    )
    assert fit.will_it_fit(needy, "none", 1, capacity=9000, rows=8).mend.startswith(
        "FSDP2 with offload"
    )
    assert "not one row fits" in fit.will_it_fit(needy, "none", 1, 9000, 8, on_cpu=True).mend
    finding = fit.will_it_fit(wanted, "fsdp", 2, capacity=4000, rows=8)
    assert "choice: DDP (the simplest)" in finding.measured


def test_fsdp_keeps_whole_gradients_while_they_accumulate() -> None:
    wanted = memory.Need(400, 400, 800, per_row=100, fixed=0, gathered=100)
    assert wanted.on_rank("fsdp", 2, 0, accumulates=True) == 800 + 100 + 400
    assert wanted.on_rank("offload", 2, 0, accumulates=True) == 100 + 400
    assert wanted.on_rank("ddp", 2, 0, accumulates=True) == wanted.on_rank("ddp", 2, 0)
    assert wanted.largest("fsdp", 2, usable=1700, update=8) == 8
    assert wanted.largest("fsdp", 2, usable=1699, update=8) == 3  # 7 without whole gradients
    caught(fit.will_it_fit(wanted, "fsdp", 2, capacity=1800, rows=4, update=8), "micro-batch 3")
    well(fit.will_it_fit(wanted, "fsdp", 2, capacity=1800, rows=4))


# 13. The machine.


def test_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    well(machine.versions())
    well(machine.devices(cpu, "no"))
    assert machine.links(cpu).verdict == machine.clocks().verdict == "SKIP"
    well(machine.disk(tmp_path / "run", 1))
    caught(machine.disk(tmp_path / "run", 2**60), "MiB free")
    monkeypatch.setattr(machine, "hub_reachable", lambda: False)
    away = machine.hub()
    assert (away.verdict, "rank 0 cannot reach it" in away.measured) == ("SKIP", True)
    monkeypatch.setattr(machine, "hub_reachable", lambda: True)
    well(machine.hub())
    monkeypatch.setattr(machine, "gather", lambda reached: [reached, False])
    assert machine.hub().measured.startswith("rank 1 cannot reach it")
    monkeypatch.undo()
    monkeypatch.setattr(machine, "OPEN_FILES", 2**60)
    caught(machine.limits(), "open files")
    assert machine.product_time(cpu, "no") == 1.0
    assert machine.product_time(cpu, "bf16") > 0
    # Clock: the start; then start and end for each dtype, and the check of the time limit.
    first, late = [0, 0, 9, 0, 9], machine.TIMED_SECONDS + 1
    for ticks in (
        [*first, *[0, 6, 0, 2, 0] * (machine.TIMED_PRODUCTS - 1)],
        [*first, 0, 6, 0, 2, late],
    ):
        now = iter(ticks)
        with monkeypatch.context() as patch:
            patch.setattr(machine.time, "perf_counter", lambda now=now: next(now))
            assert machine.product_time(cpu, "bf16") == 3.0
        assert not list(now)
    for times, judge in ((0.1, well), (2.04, caught)):
        monkeypatch.setattr(machine, "product_time", lambda *_, times=times: times)
        finding = machine.devices(cpu, "bf16")
        judge(finding)
        assert f"in bf16 takes {times:.2f} times as long" in finding.measured


def test_loader_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two batches, during which workers start, are not measured."""
    now, cpu = 0.0, torch.device("cpu")

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    def batches(*times: tuple[float, float]) -> Iterator[float]:
        for to_come, to_compute in times:
            work(to_come)
            yield to_compute

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now)
    slow, quick = (0.020, 0.002), (0.002, 0.020)
    starved = machine.loader_speed(batches(quick, quick, slow, slow), work, cpu)
    caught(starved, "a batch takes 20.0 ms to come and 2.0 ms to compute")
    well(machine.loader_speed(batches(slow, slow, quick, quick), work, cpu))


# Cases that a check once judged wrongly.


def test_no_number_is_never_well() -> None:
    model = small_model()

    def nan() -> None:
        (loss_of(model, ROWS[:4]) * math.nan).backward()

    def sound() -> None:
        loss_of(model, ROWS[:4]).backward()

    caught(accumulation.accumulated_gradient(model, nan, sound))
    caught(accumulation.accumulated_gradient(model, nan, nan))
    nothing = accumulation.accumulated_gradient(model, lambda: None, lambda: None)
    caught(nothing, "the whole batch leaves no gradient")
    caught(curve.same_curve([(1.0, math.nan)], [(1.0, 2.0)]), "update 1")
    caught(curve.same_curve([(math.nan, 1.0)], [(math.nan, 1.0)]), "on one process, too")
    well(curve.same_curve([(1.0, 2.0)], [(1.0, 2.0)]))


def test_one_curve_but_for_what_rounding_explains() -> None:
    alone = [(1.4, 1.0), (1.3, 0.5), (1.2, 0.01)]
    close = [*alone[:2], (1.2, 0.0108)]  # the norm is small, as gradients nearly cancel
    well(curve.same_curve(close, alone, 0.05))
    caught(curve.same_curve([*alone[:2], (1.2, 0.02)], alone, 0.05), "update 3: loss 1.2")
    caught(curve.same_curve([alone[0], (1.3, 0.53), alone[2]], alone, 0.05), "update 2: loss 1.3")
    far = [(1.4, 1.0), (9.0, 40.0), (230.0, 38.0)]
    diverged = curve.same_curve([*far[:2], (230.0, 45.0)], far)
    assert (diverged.verdict, "grows from 1.400 to 230" in diverged.measured) == ("SKIP", True)
    well(curve.same_curve(far, far))
    caught(curve.same_curve([(1.4, 2.0), *far[1:]], far), "update 1: loss 1.4")  # before it grows
    caught(curve.same_curve([(0.02, 1.0), (0.1, 1.0)], [(0.01, 1.0), (0.05, 1.0)]), "update 1")


def test_a_gradient_that_is_missing() -> None:
    model = small_model()

    def half() -> None:
        model[2].requires_grad_(False)
        loss_of(model, ROWS[:4]).backward()
        model[2].requires_grad_(True)

    caught(
        accumulation.accumulated_gradient(model, half, lambda: loss_of(model, ROWS[:4]).backward())
    )


def test_loops_of_others() -> None:
    """Two optimizers, a module's zero_grad, a scaler that skips, a scheduler that overrides `step`."""
    model = small_model()
    halves = [
        torch.optim.SGD(model[0].parameters(), 0.1),
        torch.optim.SGD(model[2].parameters(), 0.1),
    ]
    with accumulation.recording() as events:
        for _ in range(3):
            loss_of(model, ROWS[:4]).backward()
            for optimizer in halves:
                optimizer.step()
            model.zero_grad()
    well(accumulation.accumulation_calls(events, 1))
    for forgets in (False, True):  # two models in turn, each with its own zero_grad
        pair = [(small_model(n), n) for n in range(2)]
        pair = [(each, torch.optim.SGD(each.parameters(), 0.1), n) for each, n in pair]
        with accumulation.recording() as events:
            for _ in range(3):
                for each, optimizer, n in pair:
                    if not (forgets and n):
                        optimizer.zero_grad()
                    loss_of(each, ROWS[:4]).backward()
                    optimizer.step()
        assert events.count("left") == 2 * forgets
    for forgets in (False, True):  # adversarial: the generator's loss goes through the judge
        made, judge = nn.Linear(2, 2), small_model()
        theirs, its = (torch.optim.SGD(each.parameters(), 0.1) for each in (made, judge))
        with accumulation.recording() as events:
            for _ in range(3):
                if not forgets:
                    its.zero_grad()
                fake = made(ROWS[:4][0])
                loss_of(judge, (fake.detach(), ROWS[:4][1])).backward()
                its.step()
                theirs.zero_grad()
                loss_of(judge, (fake, ROWS[:4][1])).backward()
                theirs.step()
        assert events.count("left") == 2 * forgets
    # Two passes each; those of the generator leave gradients in the judge, which are cleared at once.
    with accumulation.recording() as events:
        for _ in range(3):
            for number, optimizer in enumerate((its, theirs)):
                for start in (0, 4):
                    inputs, labels = ROWS[start : start + 4]
                    loss_of(judge, (made(inputs) if number else inputs, labels)).backward()
                    its.zero_grad() if number else None
                optimizer.step()
            theirs.zero_grad()
    well(accumulation.accumulation_calls(events, 2))
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    masters = torch.optim.SGD(copies, 0.1)
    with accumulation.recording() as events:  # master weights: gradients are assigned, not added
        for _ in range(3):
            loss_of(model, ROWS[:4]).backward()
            for copied, p in zip(copies, model.parameters(), strict=True):
                copied.grad = p.grad.clone()
            masters.step()
            model.zero_grad()
    well(accumulation.accumulation_calls(events, 1))
    closed = torch.optim.LBFGS(model.parameters())
    with accumulation.recording() as events:
        for _ in range(3):
            closed.step(lambda: loss_of(model, ROWS[:4]))
    skipped = accumulation.accumulation_calls(events, 1)
    assert (skipped.verdict, skipped.measured[:7]) == ("SKIP", "3 steps")
    scaler = torch.amp.GradScaler("cpu")
    with accumulation.recording() as events:
        for _ in range(3):
            scaler.scale(loss_of(model, ROWS[:4]) * math.inf).backward()
            scaler.step(halves[0])
            scaler.update()
            model.zero_grad()
    well(accumulation.accumulation_calls(events, 1))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(halves[0], 5)
    with accumulation.recording() as events:
        for _ in range(3):
            loss_of(model, ROWS[:4]).backward()
            halves[0].step()
            model.zero_grad()
            for _ in range(3):
                scheduler.step()
    caught(accumulation.accumulation_calls(events, 1), "the scheduler is stepped 3 times")


def test_gradients_left_under_fsdp2(tmp_path: Path) -> None:
    """FSDP2 writes to the local shard of a gradient, below the tensor that the optimizer sees."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(small_model(), mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for clears in (True, False):
            with accumulation.recording(model) as events:
                for _ in range(3):
                    loss_of(model, ROWS[:4]).backward()
                    optimizer.step()
                    if clears:
                        optimizer.zero_grad()
            assert events.count("left") == 2 * (not clears)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_the_head() -> None:
    model = small_model()
    head = torch.optim.SGD(model[2].parameters(), 0.1)
    assert order.optimizer_holds_model(model, head).verdict == "WARN"
    well(order.optimizer_holds_model(model, head, torch.optim.SGD(model[0].parameters(), 0.1)))


def test_activations_are_let_go() -> None:
    """A saved output that the pack hook returns itself would form a reference cycle, and never be freed."""
    model, x = small_model(), torch.zeros(500, 2)
    before = sum(type(o) is torch.Tensor for o in gc.get_objects())
    for _ in range(3):
        memory.activation_bytes(lambda: model(x).exp().tanh().sum(), model)
    gc.collect()
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) <= before + 2


def test_rows_without_numbers() -> None:
    """Their numbers can be added to the data set (StackDataset)."""
    for judge in (sampling.training_sampling, sampling.evaluation_sampling):
        numbered = torch.utils.data.StackDataset(ROWS, range(20))
        well(judge(DataLoader(numbered, 4, shuffle=True), 20, lambda batch: batch[1]))
        collate = lambda rows: ([row for row, _ in rows], [number for _, number in rows])  # noqa: E731
        well(judge(DataLoader(numbered, 4, True, collate_fn=collate), 20, lambda batch: batch[1]))


def test_a_data_set_that_is_iterable() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (torch.zeros(2) for _ in range(4))

    well(tensors.dataset_tensors(DataLoader(Stream())))
    held = Encoded(nn.Linear(2, 2, device="meta"))
    found = tensors.dataset_tensors(DataLoader(held, num_workers=1))
    caught(found, "the data set holds a tensor [2, 2] on meta")
    moving = DataLoader(Encoded(), num_workers=1, collate_fn=lambda rows: rows[0]["x"].to("meta"))
    caught(tensors.dataset_tensors(moving), "a batch holds a tensor [2] on meta")
    encoder = nn.Linear(2, 2, device="meta")
    holding = DataLoader(Encoded(), num_workers=1, collate_fn=lambda rows: (encoder, rows)[1])
    found = tensors.dataset_tensors(holding)
    caught(found, "collate_fn holds a tensor [2, 2] on meta")
    assert found.verdict == "WARN"  # it may use nothing but the encoder's configuration


def test_a_resume_compares_bits_and_ids(tmp_path: Path) -> None:
    class Odd(Job):
        """A part with an array and a NaN; rows are one long tensor, which differs only in its middle."""

        def __init__(self, broken: bool) -> None:
            super().__init__()
            self.extra, self.broken = np.array([0.3, math.nan]), broken
            self.words = np.array(["a", "b"])  # no tensor can hold strings
            self.parts["extra"] = self

        def load_state_dict(self, state) -> None:
            pass

        def state_dict(self):
            return {"values": self.extra, "best": math.nan, "words": self.words}

        def step(self):
            rows = torch.arange(3000)
            rows[1500] += 1000 * self.epoch
            super().step()
            return UserDict(rows=rows, parts=[torch.zeros(2)])  # as a tokenizer returns

        def load(self, folder: Path) -> None:
            super().load(folder)
            if self.broken:
                self.extra, self.epoch = np.array([0.7, math.nan]), self.epoch + 1

    for broken in (False, True):
        (tmp_path / str(broken)).mkdir()
        findings = {
            f.check: f for f in resume.resume(lambda b=broken: Odd(b), tmp_path / str(broken))
        }
        for part in ("extra", "position in the data"):
            assert (findings[f"resume: {part}"].verdict == "FAIL") == broken, findings


def leave(folder: Path, rank: int, stage: str, at: float, log: str = "", error: str = "") -> None:
    """Write what a rank leaves whose last stage began at `at`; a log is faulthandler's, of ten seconds later."""
    path = folder / postmortem.FILE.format(rank)
    path.write_text(json.dumps({"stage": stage, "at": at, "error": error, "stack": ""}))
    path.with_suffix(".log").write_text(log)
    os.utime(path.with_suffix(".log"), (at, at + 10 * bool(log)))


def test_a_post_mortem_reads_codes_and_names(tmp_path: Path) -> None:
    caught(postmortem.post_mortem(tmp_path, 2), "rank 0 never started")
    for rank in range(2):
        with postmortem.Stages(tmp_path, rank, 60), contextlib.suppress(SystemExit):
            raise SystemExit(0)
    well(postmortem.post_mortem(tmp_path, 2))
    caught(
        postmortem.post_mortem(tmp_path, 2, {0: 0, 1: -11}),
        "rank 1 at stage end: ended by SIGSEGV; ended well before: rank 0 after stage start",
    )
    with (
        contextlib.suppress(ValueError, OSError),
        postmortem.Stages(tmp_path, 1, 60) as stage,
    ):
        stage("rows")
        stage.path.with_suffix(".new").mkdir()  # makes writing fail, as a full disk does
        stage("model")
    caught(postmortem.post_mortem(tmp_path, 2), "rank 1 at stage rows: ended without a message")


def test_an_exception_is_told_with_its_stage_and_its_own_frame(tmp_path: Path) -> None:
    with contextlib.suppress(ValueError), postmortem.Stages(tmp_path, 0, 60) as stage:
        stage("rows")
        json.loads("{")
    found = postmortem.post_mortem(tmp_path, 1)
    caught(found, "rank 0 at stage rows at File", "test_diagnosis.py", "JSONDecodeError: Expecting")
    assert "/json/" not in found.measured


def test_a_crash_is_told_of_the_thread_that_crashed(tmp_path: Path) -> None:
    other = (
        'Thread 0x2 [loader] (most recent call first):\n  File "rows.py", line 7 in prefetch\n\n'
    )
    crashed = (
        'Current thread 0x1 (most recent call first):\n  File "train.py", line 8 in forward\n\n'
    )
    for words in (other + crashed, crashed + other):
        log = f"Fatal Python error: Segmentation fault\n\n{words}Extension modules: numpy\n"
        leave(tmp_path, 0, "step 1", 5.0, log)
        where = 'rank 0 at stage step 1 at File "train.py", line 8 in forward: '
        caught(postmortem.post_mortem(tmp_path, 1, {0: -11}), f"{where}ended by SIGSEGV")
        caught(
            postmortem.post_mortem(tmp_path, 1), f"{where}Fatal Python error: Segmentation fault"
        )


def test_a_hang_that_ends_others(tmp_path: Path) -> None:
    """One rank reaches its time limit; the other then loses its connection, or the launcher ends it."""
    hung = 'Timeout (0:00:10)!\nThread 0x1 (most recent call first):\n  File "train.py", line 7 in step'
    peer = "RuntimeError: Connection closed by peer"
    words = 'a hang: rank 0 at stage step 5 at File "train.py"', "rank 1 at stage step 5"
    leave(tmp_path, 0, "step 5", 2.0, hung)
    leave(tmp_path, 1, "step 5", 12.1, error=peer)
    caught(postmortem.post_mortem(tmp_path, 2), *words)
    leave(tmp_path, 1, "step 5", 1.0)
    caught(postmortem.post_mortem(tmp_path, 2, {0: 1, 1: -15}), *words)


def test_a_death_is_told_before_the_hang_it_makes(tmp_path: Path) -> None:
    """On NCCL the others do not notice the death: they wait for the time limit of a stage that began earlier."""
    leave(tmp_path, 0, "step 5", 1.0, "Timeout (0:00:10)!\nThread 0x1 (most recent call first):")
    leave(tmp_path, 1, "step 5", 1.5)
    found = postmortem.post_mortem(tmp_path, 2)
    assert found.measured.startswith("rank 1 at stage step 5: ended without a message"), found


def test_ranks_are_told_in_the_order_in_which_they_ended(tmp_path: Path) -> None:
    """Ranks ended by the launcher come last, whatever the time; of many ranks, eight are listed."""
    times = {0: 7.0, 1: 3.0, 2: 5.0, 3: 1.0}
    for rank, at in times.items():
        leave(tmp_path, rank, "step 5", at, error="" if rank == 3 else f"RuntimeError: of {rank}")
    told = postmortem.post_mortem(tmp_path, 4, {0: 1, 1: 1, 2: 1, 3: -15}).measured
    assert re.findall(r"rank (\d) at", told) == ["1", "2", "0", "3"]
    assert "of 1, rank 2 at" in told
    for rank in range(12):
        leave(tmp_path, rank, "step 5", 20.0 - rank, error="RuntimeError: of one")
    told = postmortem.post_mortem(tmp_path, 12).measured
    assert re.findall(r"rank (\d+) at", told) == [str(rank) for rank in range(11, 3, -1)]


def test_the_worst_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_ft.diagnosis import finding

    well_, ill = Finding("a", "PASS", "1"), Finding("a", "FAIL", "2", "x")
    monkeypatch.setattr(finding, "gather", lambda value: [value, ill])
    assert finding.agreed(well_) == Finding("a", "FAIL", "on rank 1: 2", "x")


def test_a_job_with_a_rare_label_is_examined(tmp_path: Path) -> None:
    """The few rows that the doctor uses may not have that label: settings that need it are dropped."""
    from accel_ft.diagnosis.job import _limit_seconds, _probe

    watch = SimpleNamespace(num_ranks=1)
    job = TrainConfig(model_name_or_path="m", dataset_name="d", class_weights="balanced")
    assert _probe(job, tmp_path, watch).class_weights is None
    weighed = TrainConfig(model_name_or_path="m", dataset_name="d", class_weights=(1, 2))
    assert _probe(weighed, tmp_path, watch).class_weights == (1, 2)
    rare = {"oversampling": "balanced", "metric_for_best_model": "per_class.rare.f1"}
    probe = _probe(TrainConfig(model_name_or_path="m", dataset_name="d", **rare), tmp_path, watch)
    assert (probe.oversampling, probe.metric_for_best_model) == (None, None)
    assert _limit_seconds(job) == 60
    assert _limit_seconds(TrainConfig(ddp_timeout=900)) == 900


def test_the_doctors_own_rows_have_labels_of_their_own(tmp_path: Path) -> None:
    """A metric of one of the job's labels would be an error on the doctor's sample rows."""
    from accel_ft.diagnosis import job

    watch = SimpleNamespace(rank=0, num_ranks=1, first=lambda _: contextlib.nullcontext())
    wanted = TrainConfig(metric_for_best_model="per_class.World.f1", output_dir=tmp_path)
    assert job._probe(wanted, tmp_path, watch).metric_for_best_model is None


def test_a_look_at_a_loader_leaves_the_start_method_open() -> None:
    """The program may still choose spawn afterwards."""
    code = (
        "import multiprocessing, torch\n"
        "from torch.utils.data import DataLoader\n"
        "from accel_ft.diagnosis import tensors\n"
        "tensors.dataset_tensors(DataLoader([torch.ones(2)] * 4))\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
