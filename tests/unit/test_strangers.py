"""Programs that the checks were not written for: unusual faults, and healthy programs that look faulty. A check must
leave no trace.
"""

import copy
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from conftest import ROOT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from accel_ft.diagnosis import (
    accumulation,
    learning,
    order,
    postmortem,
    replicas,
    sampling,
    tensors,
)
from accel_ft.diagnosis.finding import Finding

X, Y = torch.arange(40.0).reshape(20, 2) / 40, torch.arange(20) % 2


def small_model(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), *more, nn.Linear(8, 2))


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X), Y)


def is_well(finding: Finding) -> bool:
    return finding.verdict == "PASS"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Which rank reads which rows.


class Used(IterableDataset):
    """Its iterator is made once: the second epoch is empty."""

    def __init__(self) -> None:
        self.rows = iter(range(20))

    def __iter__(self) -> Iterator[int]:
        yield from self.rows


class Unsplit(IterableDataset):
    """Each worker reads all rows."""

    def __iter__(self) -> Iterator[int]:
        yield from range(20)


def test_an_epoch_that_is_used_up() -> None:
    finding = sampling.training_sampling(DataLoader(Used(), 4), 20, torch.Tensor.tolist)
    assert finding.verdict == "FAIL"
    assert "in the second epoch 20 rows are never read" in finding.measured
    assert "a new iterator in __iter__" in finding.mend


def test_workers_that_read_the_same_rows() -> None:
    loader = DataLoader(Unsplit(), 4, num_workers=2)
    finding = sampling.training_sampling(loader, 20, torch.Tensor.tolist)
    assert finding.verdict == "FAIL"
    assert "20 times a rank reads a row again" in finding.measured
    assert "get_worker_info" in finding.mend


class Split(IterableDataset):
    """Each worker reads its share."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        yield from range(worker.id, 1018, worker.num_workers)


def test_workers_that_each_drop_their_last_batch() -> None:
    loader = DataLoader(Split(), 16, num_workers=2, drop_last=True)
    finding = sampling._coverage(sampling._read(loader, torch.Tensor.tolist), 1018, loader)
    assert finding.verdict == "PASS", finding


class SecondEpochAgain(IterableDataset):
    """From the second epoch on, some rows come twice and others never."""

    def __init__(self) -> None:
        self.epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from range(40) if self.epoch == 0 else [*range(30), *range(10)]


def test_a_second_epoch_that_is_worse() -> None:
    finding = sampling.training_sampling(DataLoader(SecondEpochAgain(), 4), 40, torch.Tensor.tolist)
    assert finding.verdict == "WARN"
    assert "in the second epoch 10 times a rank reads a row again" in finding.measured


def test_a_few_rows_may_come_in_the_same_order() -> None:
    for seed in range(8):  # with two rows, half of all pairs of epochs agree
        torch.manual_seed(seed)
        assert is_well(sampling.training_sampling(DataLoader(range(2), 1, True), 2, iter))


def test_checks_of_rows_draw_nothing() -> None:
    before = torch.get_rng_state()
    for judge in (sampling.training_sampling, sampling.evaluation_sampling):
        judge(DataLoader(range(40), 4, shuffle=True), 40, iter)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("views", [False, True])
def test_gradients_in_the_buckets_of_ddp(group: None, views: bool) -> None:
    """The check's backward passes overwrite the gradients in DDP's buckets; it must restore them."""
    model = nn.parallel.DistributedDataParallel(small_model(), gradient_as_bucket_view=views)

    def parts() -> None:
        for _ in range(4):
            loss_of(model).backward()

    for factor in (1, 3):  # DDP rebuilds its buckets after the first pass
        (factor * loss_of(model)).backward()
    before = [p.grad.clone() for p in model.parameters()]
    finding = accumulation.accumulated_gradient(model, parts, lambda: loss_of(model).backward())
    assert "4.0000 times" in finding.measured
    now = [p.grad for p in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))


def test_unused_parameters_of_a_wrapped_model(group: None) -> None:
    """The check's pass must not leave DDP waiting for their gradients in the next one."""

    class HalfIdle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = nn.parallel.DistributedDataParallel(HalfIdle())
    for _ in range(2):
        finding = replicas.used_parameters(model, lambda: model(torch.ones(1, 2)).sum())
        assert "2 of 4 get no gradient" in finding.measured


def test_a_scaler_that_is_called_by_name() -> None:
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    with accumulation.recording() as events:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer=optimizer)
        scaler.update()
    assert events == ["backward", "step"]


def test_rows_drawn_by_weights() -> None:
    weights = [1.0 if row % 10 == 0 else 0.01 for row in range(200)]
    loader = DataLoader(range(200), 4, sampler=WeightedRandomSampler(weights, 200))
    assert sampling.training_sampling(loader, 200, torch.Tensor.tolist).verdict == "WARN"
    prepared = Accelerator(cpu=True).prepare(loader)
    assert sampling.training_sampling(prepared, 200, torch.Tensor.tolist).verdict == "WARN"
    drawn = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for rows in ([*range(100), *range(100)], drawn):
        again = DataLoader(rows, 4, shuffle=True)
        assert sampling.training_sampling(again, 200, torch.Tensor.tolist).verdict == "FAIL"


def test_row_ids_of_any_kind() -> None:
    """Elements of a tensor hash by identity, so ids become plain numbers; strings are used as they are."""
    names = DataLoader([str(row) for row in range(20)], 4, shuffle=True)
    assert is_well(sampling.training_sampling(names, 20, list))
    loader = DataLoader(range(20), 4, shuffle=True)
    assert is_well(sampling.training_sampling(loader, 20, lambda batch: batch))
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)  # the order follows the epoch
    prepared = Accelerator(cpu=True, dataloader_config=seedable).prepare(loader)
    assert is_well(sampling.training_sampling(prepared, 20, lambda batch: batch))
    half = DataLoader([*range(50)] * 2, 4, shuffle=True)
    assert "50 rows are never read" in sampling.training_sampling(half, 100, iter).measured
    less = DataLoader(range(50), 4, shuffle=True)
    found = sampling.training_sampling(less, 100, iter)
    assert (found.verdict, "50 rows are never read" in found.measured) == ("FAIL", True)
    dropping = DataLoader(range(103), 4, shuffle=True, drop_last=True)
    assert is_well(sampling.training_sampling(dropping, 103, iter))
    assert "drop_last" in sampling.evaluation_sampling(dropping, 103, iter).mend


def test_a_row_that_is_counted_in_the_place_of_another() -> None:
    swapped = DataLoader([*range(18), 17], 4)
    finding = sampling.evaluation_sampling(swapped, 19, iter)
    assert (finding.verdict, "18 different ones of 19" in finding.measured) == ("FAIL", True)
    swapped.gradient_state = None  # as accelerate's loaders have, which drop padding rows
    assert sampling.evaluation_sampling(swapped, 19, iter).verdict == "FAIL"
    assert is_well(sampling.evaluation_sampling(DataLoader(range(19), 4), 19, iter))


def test_padding_that_accelerate_drops() -> None:
    """A check of the loader cannot see whether the loop uses `gather_for_metrics`: WARN, not FAIL."""
    padded = DataLoader([*range(19), 0], 4)
    assert sampling.evaluation_sampling(padded, 19, iter).verdict == "FAIL"
    padded.gradient_state = None  # as accelerate's loaders have
    finding = sampling.evaluation_sampling(padded, 19, iter)
    assert (finding.verdict, "gather_for_metrics" in finding.mend) == ("WARN", True)


# Tensors where they do not belong.


class Slotted:
    __slots__ = ("encoder",)

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder


class Held(torch.utils.data.Dataset):
    def __init__(self, transform: object) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: object) -> torch.Tensor:
        return torch.zeros(2)


@pytest.mark.parametrize(
    "hide",
    [
        lambda encoder: lambda row: encoder(row) + 1,
        lambda encoder: partial(torch.add, alpha=encoder),
        lambda encoder: encoder.forward,
        Slotted,
        lambda encoder: [{"steps": Slotted(encoder)}],
    ],
)
def test_a_module_that_is_well_hidden(hide) -> None:
    model = small_model()
    held = torch.utils.data.Subset(Held(hide(model[0])), [0])
    assert "2 of the model's parameters" in tensors.shared_modules(held, model).measured
    apart = Held(hide(copy.deepcopy(model[0])))
    assert is_well(tensors.shared_modules(apart, model))


def test_data_sets_of_any_key() -> None:
    class Named(Held):
        def __getitem__(self, key: object) -> torch.Tensor:
            return {"a": torch.zeros(2), "b": torch.zeros(2)}[key]

    class Batched(Held):
        def __getitem__(self, keys: list[int]) -> torch.Tensor:
            return X[keys]

    class Empty(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from ()

    assert is_well(tensors.dataset_tensors(DataLoader(Named(0), sampler=["a", "b"])))
    batches = BatchSampler(range(4), 2, drop_last=False)
    assert is_well(tensors.dataset_tensors(DataLoader(Batched(0), None, sampler=batches)))
    assert is_well(tensors.dataset_tensors(DataLoader(Empty())))


def test_operations_in_place_of_other_kinds() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.clamp_(-0.01, 0.01)  # does not change the version counter
            return super().forward(x)

    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                view = super().forward(x).view(-1)
            return view.mul_(self.bias.sum())

    for kind, words in ((Clamped, "changes parameters: weight"), (Hooked, "modified inplace")):
        model = kind(2, 2)
        finding = tensors.in_place(model, lambda model=model: model(X).sum())
        assert (finding.verdict, words in finding.measured) == ("FAIL", True), finding


# Loops.


def test_an_optimizer_that_steps_within_the_backward_pass() -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for p, optimizer in optimizers.items():
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with accumulation.recording() as events:
        loss_of(model).backward()
    finding = accumulation.accumulation_calls(events, 1)
    assert (finding.verdict, finding.measured[:7]) == ("SKIP", "4 steps")


def test_a_scheduler_that_accelerate_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each rank: correct if the steps were counted before `prepare`, as in accelerate's examples."""
    events = ["backward", "step", "schedule 1", "schedule 1"] * 3
    assert accumulation.accumulation_calls(events, 1).verdict == "FAIL"
    monkeypatch.setattr(accumulation, "num_ranks", lambda: 2)
    finding = accumulation.accumulation_calls(events, 1)
    assert finding.verdict == "WARN"
    assert "2 times an update, once for each rank" in finding.measured
    events = ["backward", "schedule 1", "backward", "step", "schedule 1"] * 3
    assert accumulation.accumulation_calls(events, 2).verdict == "FAIL"


def test_adapters_by_any_name() -> None:
    model = nn.ModuleDict({"lora_embedding_A": nn.Linear(2, 2, False), "head": nn.Linear(2, 2)})
    model["lora_embedding_A"].weight.grad = torch.zeros(2, 2)
    model["head"].weight.grad = torch.ones(2, 2)
    assert is_well(learning.gradient_norms(model))


def test_one_logit_and_rates() -> None:
    assert learning.varied_predictions(torch.ones(9, 1)).verdict == "SKIP"
    for rate, highest, verdict in (
        (2e-5, 0.01, "PASS"), (5.0, 0.01, "WARN"), (2e-9, 0.01, "WARN"), (0.1, 1.0, "PASS"), (math.nan, 0.01, "WARN"),
    ):  # fmt: skip
        assert learning.usual_rate(rate, highest).verdict == verdict


# No trace.


def random_state() -> list[object]:
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    return [python, numpy, torch.get_rng_state().tolist()]


def test_random_numbers_buffers_and_gradients_stay() -> None:
    model = small_model(nn.BatchNorm1d(8), nn.Dropout(0.5))
    loss_of(model).backward()
    before = random_state(), {n: b.clone() for n, b in model.named_buffers()}
    gradients = [p.grad for p in model.parameters()]
    assert is_well(tensors.in_place(model, lambda: loss_of(model)))
    assert is_well(replicas.used_parameters(model, lambda: loss_of(model)))
    epochs: list[int] = []
    loader = DataLoader(range(20), 4, shuffle=True)
    assert is_well(sampling.training_sampling(loader, 20, torch.Tensor.tolist, epochs.append))
    assert is_well(tensors.dataset_tensors(loader))
    assert epochs == [0, 1, 0]
    assert random_state() == before[0]
    assert all(torch.equal(before[1][n], b) for n, b in model.named_buffers())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.usefixtures("group")
def test_fsdp2_after_an_evaluation() -> None:
    """It leaves the root gathered, with other parameter objects than those that the optimizer holds."""
    model = fully_shard(small_model(), mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def evaluate() -> None:
        with torch.no_grad():
            model(X)

    loss_of(model).backward()
    evaluate()
    assert is_well(order.optimizer_holds_model(model, optimizer))
    assert is_well(tensors.in_place(model, lambda: loss_of(model)))
    evaluate()
    assert is_well(replicas.used_parameters(model, lambda: loss_of(model)))
    assert all(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    halves = [lambda part=part: (loss_of(model) / part).backward() for part in (1, 2)]
    assert is_well(accumulation.accumulated_gradient(model, halves[0], halves[0]))
    assert "0.5000 times" in accumulation.accumulated_gradient(model, halves[1], halves[0]).measured
    assert is_well(learning.gradient_norms(model))


@pytest.mark.usefixtures("group")
def test_buffers_of_wrapped_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two DDPs in one module, and a compiled DDP: each broadcasts its own buffers."""
    monkeypatch.setattr(replicas, "num_ranks", lambda: 2)
    parts = [nn.parallel.DistributedDataParallel(small_model(nn.BatchNorm1d(8))) for _ in "ab"]
    for model in (nn.ModuleList(parts), torch.compile(parts[0], backend="eager")):
        assert "DDP broadcasts rank 0's" in replicas.same_buffers(model).measured
    with torch.no_grad():  # after such a pass DDP skips the next broadcast
        parts[0](X)
    assert not parts[0].will_sync_module_buffers()
    assert "DDP broadcasts rank 0's" in replicas.same_buffers(parts[0]).measured
    parts[1].forward_sync_buffers = parts[1].broadcast_buffers = False
    assert "3 tensors have the same bits" in replicas.same_buffers(parts[1]).measured
    apart = nn.ModuleList([parts[0], nn.BatchNorm1d(8)])
    assert "3 tensors have the same bits" in replicas.same_buffers(apart).measured


def test_the_rank_that_differs_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "num_ranks", lambda: 3)
    for others, odd in (("aa", "1, 2"), ("wa", 2), ("aw", 1), ("ab", "1, 2")):
        ranks = [{"x": "w"}, *({"x": value} for value in others)]
        monkeypatch.setattr(replicas, "gather", lambda _, ranks=ranks: ranks)
        found = replicas.same_weights(nn.Linear(1, 1))
        assert found.measured == f"1 of 1 differ from rank 0's, on rank {odd}; the first is x"


# Ends.


def test_a_launcher_that_ends_the_others_is_no_cause(tmp_path: Path) -> None:
    """Rank 1 is killed, then rank 0 is ended by SIGTERM: rank 1 is named first, although rank 0's stage is older."""
    program = (
        "import sys, time; from pathlib import Path; from accel_ft.diagnosis.postmortem import Stages\n"
        f"with Stages(Path({str(tmp_path)!r}), int(sys.argv[1]), 60) as stage:\n"
        "    time.sleep(int(sys.argv[1])); stage('work'); print('up', flush=True); time.sleep(60)"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    for process, how in reversed(list(zip(ranks, (signal.SIGTERM, signal.SIGKILL), strict=True))):
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(how)
        assert process.wait(60) == -how
        process.stdout.close()
    finding = postmortem.post_mortem(tmp_path, 2)
    first, _, second = finding.measured.partition(", rank 0 at stage work")
    assert first.startswith("rank 1 at stage work: ended without a message"), finding
    assert second.endswith("in <module>: ended by SIGTERM"), finding


def test_signals_that_are_none_of_the_launchers(tmp_path: Path) -> None:
    """SIGTERM for a worker leaves no stack in the rank's log; the program's own SIGTERM handler stays."""
    program = (
        "import multiprocessing, os, signal, time; from pathlib import Path\n"
        "from accel_ft.diagnosis.postmortem import Stages\n"
        f"with Stages(Path({str(tmp_path)!r}), 0, 60) as stage:\n"
        "    worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "    worker.start(); time.sleep(1); worker.terminate(); worker.join()\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "heard\n"), done
    assert (tmp_path / postmortem.FILE.format(0)).with_suffix(".log").read_text() == ""
    assert is_well(postmortem.post_mortem(tmp_path, 1))


def test_buffers_of_any_kind_come_back() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("later", torch.empty(2, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean * 0.9 + x.mean(0)
            return self.linear(x)

    model = Mean()
    assert is_well(replicas.used_parameters(model, lambda: model(X).sum()))
    assert model.mean.tolist() == [0.0, 0.0]


def test_names_that_a_function_does_not_read() -> None:
    """The attribute `row.encoder` is not the global `encoder`, and a function holds only globals that it reads."""
    for reads, verdict in (("row.encoder", "PASS"), ("encoder(row)", "FAIL")):
        around: dict[str, object] = {"encoder": nn.Linear(2, 2)}
        exec(f"def transform(row): return {reads}", around)
        model = nn.Sequential(around["encoder"])
        assert tensors.shared_modules(Held(around["transform"]), model).verdict == verdict


def test_a_rank_that_is_ended_while_it_says_its_last_words(tmp_path: Path) -> None:
    """It failed first and waits for rank 0's message when the launcher ends it: still the cause."""
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from accel_ft.diagnosis.postmortem import Stages\n"
        "rank = int(sys.argv[1])\n"
        "try:\n"
        f"    with Stages(Path({str(tmp_path)!r}), rank, 60) as stage:\n"
        "        stage('download')\n"
        "        raise TimeoutError('Timeout (of 5 s)') if rank else RuntimeError('Connection closed by peer')\n"
        "except Exception: print(flush=True)\n"
        "time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = []
    for rank in (1, 0):
        command = [sys.executable, "-c", program, str(rank)]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        assert ranks[-1].stdout is not None
        ranks[-1].stdout.readline()
    for process in reversed(ranks):
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        process.stdout.close()
    for codes in (None, {0: -15, 1: -15}):
        finding = postmortem.post_mortem(tmp_path, 2, codes)
        assert finding.measured.startswith("rank 1 at stage download at File"), finding
        assert "TimeoutError: Timeout (of 5 s), rank 0 at stage download" in finding.measured
