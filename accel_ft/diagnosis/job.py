"""Runs the checks on an accel_ft job, with a few of its rows, under the strategy it launches with.

`examine` is the doctor's whole examination; `preflight` the part that every run begins with.
"""

import contextlib
import gc
import logging
import math
import secrets
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from accel_ft.checkpoint.transaction import list_published
from accel_ft.config import TrainConfig
from accel_ft.data.loader import Batch, Batches, collate, make_loader
from accel_ft.diagnosis import (
    accumulation,
    curve,
    fit,
    learning,
    machine,
    order,
    replicas,
    resume,
    sampling,
    strides,
    tensors,
)
from accel_ft.diagnosis.finding import Finding, Verdict, agreed, gather
from accel_ft.diagnosis.sample import write_sample
from accel_ft.engine.build import build
from accel_ft.engine.fitting import measured_need, strategy_name
from accel_ft.engine.graphs import Graphs
from accel_ft.engine.loop import train, update
from accel_ft.engine.run import Run
from accel_ft.engine.start import checkpoint_bytes, start_or_resume
from accel_ft.engine.step import forward, weighted_loss
from accel_ft.errors import DOCTOR, LaunchError, Preempted, RankError, UserError
from accel_ft.model import dropout
from accel_ft.model.memory import device_bytes
from accel_ft.model.optim import make_optimizer, make_scheduler, scaled_learning_rate
from accel_ft.model.plain import plain_model
from accel_ft.runtime import trackers
from accel_ft.runtime.launch import make_training_accelerator
from accel_ft.runtime.logging import progress_bar, read_events
from accel_ft.runtime.watch import Watch

logger = logging.getLogger(__name__)

UPDATES = 4
LIMIT_SECONDS, KEPT = 60, 2
ROWS, EVAL_ROWS = 256, 64
LEARNT_ROWS, LEARNT_TOKENS = 64, 16
FP16 = "fp16: gradients mean nothing without the loss scaler"
TOLERANCE = {"no": 1e-4, "bf16": 0.05}


def preflight(run: Run) -> None:
    """Make the cheap checks of a run that is about to start. Collective.

    Raises:
        LaunchError: naming what is wrong.
    """
    findings = (
        machine.versions(),
        machine.devices(run.accelerator.device, run.accelerator.mixed_precision),
        machine.limits(run.config.dataloader_num_workers),
        order.optimizer_holds_model(run.model, run.optimizer),
        replicas.same_weights(run.model),
        replicas.same_buffers(run.model),
    )
    faults = []
    for found in map(agreed, findings):
        if found.verdict is Verdict.FAIL:
            faults.append(f"{found.check}: {found.measured}. Fix: {found.mend}")
        elif found.verdict is Verdict.WARN and run.accelerator.is_main_process:
            logger.warning("%s: %s. Fix: %s", found.check, found.measured, found.mend)
    if faults:
        faults.append(f"({DOCTOR}; --preflight off skips these checks)")
        raise LaunchError("\n  ".join(faults))


def examine(config: TrainConfig) -> Iterator[Finding]:
    """Yield the findings of the whole examination, the same on every rank. Collective.

    Args:
        config: the job; if it names neither model nor rows, the doctor's own sample job is used.
            Runs of a few updates are written into its output_dir, or beside it where it does not
            exist yet, and removed.
    """
    limit = _limit_seconds(config)
    with order.construction() as log:
        accelerator = make_training_accelerator(limit)
        place = config.output_dir.absolute()
        # Inside if it exists: it may be the only writable folder.
        name, is_there = gather((f".doctor-{secrets.token_hex(4)}", place.is_dir()))[0]
        folder = (place if is_there else place.parent) / name
        rank, num_ranks = accelerator.process_index, accelerator.num_processes

        def clean_up(keeps_logs: bool) -> None:
            for _ in range(2) if rank == 0 else ():  # twice: a heartbeat may come meanwhile
                shutil.rmtree(folder / "probe" if keeps_logs else folder, ignore_errors=True)

        names_log = False
        try:
            watched = Watch(folder / "ranks", rank, num_ranks, limit, clean_up=clean_up)
            with watched as watch:  # covers `agreed`, too
                yield from map(
                    agreed, _on_the_job(config, accelerator, log, watch, folder / "probe")
                )
                watch.barrier()
        except Exception as error:
            is_told = isinstance(error, UserError | OSError | Preempted)
            names_log = isinstance(error, RankError) or not is_told
            raise
        finally:
            clean_up(names_log)


def _limit_seconds(config: TrainConfig) -> float:
    """Return the job's ddp_timeout if it is set, else the doctor's shorter limit."""
    return config.ddp_timeout if "ddp_timeout" in config.model_fields_set else LIMIT_SECONDS


def _is_empty(config: TrainConfig) -> bool:
    """Whether neither rows nor a model are named: then the doctor brings its own."""
    names_rows = config.train_file is not None or config.dataset_name is not None
    return not names_rows and "model_name_or_path" not in config.model_fields_set


def _probe(config: TrainConfig, folder: Path, watch: Watch) -> TrainConfig:
    """Return the job cut to few rows and updates, in a folder of its own."""
    if _is_empty(config):
        with watch.first(watch.rank == 0):
            if watch.rank == 0:
                write_sample(folder)
        config = config.resolved(
            model_name_or_path=str(folder / "model"),
            train_file=folder / "rows.csv",
        )
    at_once, rows = config.per_device_train_batch_size, ROWS
    if at_once != "auto":  # room for two micro-batches a rank, if the job accumulates
        rows = max(rows, 2 * at_once * watch.num_ranks)
    return config.resolved(
        output_dir=folder / "run", max_steps=UPDATES, logging_steps=1, save_steps=UPDATES,
        max_train_samples=min(config.max_train_samples or rows, rows), test_file=None,
        max_eval_samples=min(config.max_eval_samples or EVAL_ROWS, EVAL_ROWS), preflight="off",
        resume_from_checkpoint=None, load_best_model_at_end=False, profile=False, report_to=(),
        save_total_limit=KEPT, early_stopping_patience=None, on_nonfinite="stop",
        class_weights=None if config.class_weights == "balanced" else config.class_weights,
        oversampling=None, metric_for_best_model=None,  # the few rows may have no rare label
    )  # fmt: skip


def _on_the_job(
    config: TrainConfig, accelerator: Accelerator, log: list[bool], watch: Watch, folder: Path
) -> Iterator[Finding]:
    yield machine.versions()
    yield machine.devices(accelerator.device, accelerator.mixed_precision)
    yield machine.limits(config.dataloader_num_workers)
    yield machine.clocks()
    yield machine.hub()
    yield machine.links(accelerator.device)
    yield _keys(config)
    job = _probe(config, folder, watch)
    capacity = device_bytes(accelerator.device)  # before the run takes memory
    run = _quiet(build(job, accelerator, watch))
    yield order.construction_order(log, watch.num_ranks)
    yield order.optimizer_holds_model(run.model, run.optimizer)
    yield _disk(run, config)
    yield from _on_the_data(run)
    if _has_room(run):
        yield from _on_a_plain_model(run, config, capacity)
    else:
        reason = "the whole model, its gradients and moments do not fit on a rank beside the run"
        yield Finding("the model alone", Verdict.SKIP, reason)
    with dropout.on_cpu(accelerator.device):  # as training does
        yield from _on_the_loop(run)
        yield from _on_the_replicas(run)  # after the updates
        job = run.config  # with the micro-batch size that `auto` found: no second search
        _let_go(run)  # `resume` needs its memory, and the disk space below
        if accelerator.is_main_process:
            shutil.rmtree(job.output_dir)
        watch.barrier()
        with contextlib.closing(_jobs(job, watch, folder)) as jobs:
            yield from resume.resume(partial(next, jobs), folder, steps=1)


def _keys(config: TrainConfig) -> Finding:
    """Find keys that are set without effect."""
    trackers.check(config.report_to)
    idle = [words for _, _, words in config.idle_keys()]
    if idle:
        return Finding("keys", Verdict.WARN, "; ".join(idle), "leave them out")
    return Finding("keys", Verdict.PASS, "all that are set have an effect")


def _disk(run: Run, config: TrainConfig) -> Finding:
    """Check the disk space for the checkpoints of the whole job, not of the probe."""
    per_epoch = math.ceil(_num_rows(run, config) / run.plan.global_batch_size)
    checkpoints = config.output_dir / "checkpoints"  # may be a link to another disk
    there, left = len(list_published(checkpoints)), range(1, config.updates(per_epoch) + 1)
    saves_first = config.on_nonfinite == "rollback" and not there
    wanted = checkpoint_bytes(run, config, left, per_epoch, there, saves_first)
    return machine.disk(checkpoints, wanted)


def _num_rows(run: Run, config: TrainConfig) -> int:
    """Return the number of training rows of the whole job."""
    return min(len(run.splits.train.store), config.max_train_samples or sys.maxsize)


def _quiet(run: Run) -> Run:
    run.bar = progress_bar(0, run.num_steps, False)
    run.test_loader = None  # a data set may bring a large test split
    return run


def _on_the_data(run: Run) -> Iterator[Finding]:
    loader = make_loader(run.accelerator, run.train_batches, 0, run.config.dataloader_num_workers)
    yield tensors.dataset_tensors(loader)
    split = run.splits.train
    yield learning.varied_texts(split.tokens(np.arange(len(split), dtype=np.int64)))
    per_epoch = run.plan.steps_per_epoch * run.num_micro_batches
    twice = Batches(
        run.train_batches.split, run.train_batches.pad, 2 * per_epoch, run.train_batches.places
    )
    batches = iter(make_loader(run.accelerator, twice))
    share = per_epoch // run.accelerator.num_processes

    class Epoch:
        def __iter__(self) -> Iterator[Batch]:
            return islice(batches, share)

    if run.plan.steps_per_epoch > 1:
        yield sampling.training_sampling(Epoch(), len(run.splits.train), _places)
    else:  # sorted by length, its order may not change
        yield Finding("training rows", Verdict.SKIP, "an epoch is one update")
    yield sampling.evaluation_sampling(run.validation_loader, len(run.splits.validation), _places)


def _places(batch: Batch) -> list[int]:
    return [place for place in batch["places"].tolist() if place >= 0]


def _has_room(run: Run) -> bool:
    """Whether every rank has room for a second whole model, with gradients and moments."""
    free = min(gather(device_bytes(run.accelerator.device)))
    return bool(free > 5 * 4 * run.num_parameters)


def _on_a_plain_model(run: Run, config: TrainConfig, capacity: int) -> Iterator[Finding]:
    """Check the model, its loss and its rows, without any strategy.

    Args:
        config: of the whole job, not of the probe.
        capacity: bytes of a rank's device.
    """
    device = run.accelerator.device
    model, drawn = plain_model(run.config, device, run.splits.label_names, run.tokenizer)
    model.to(device).train()
    yield _fit(run, config, model, capacity)
    _without_dropout(model)
    yield tensors.aliased_parameters(model, replicas.is_sharded(run.model))
    yield tensors.shared_modules(run.train_batches, model)
    parts = [part for part in run.plan.micro_batches(0, run.num_micro_batches) if len(part)]
    longest = _batch(run, parts[-1])

    loss = partial(_loss, run, model, longest)
    yield replicas.used_parameters(model, loss)
    yield strides.gradient_strides(model, loss)
    yield tensors.in_place(model, loss)
    first = _backward(run, model, 0, parts)
    if run.config.problem_type == "regression":
        yield Finding("initial loss", Verdict.SKIP, "a regression has no usual one")
    else:  # multi-label: each label is a choice of two
        several = run.config.problem_type == "multi_label_classification"
        num_labels = 2 if several else len(run.splits.label_names)
        yield learning.initial_loss(first, num_labels, bool(drawn))
    yield learning.gradient_norms(model)
    model.zero_grad()
    yield _loader_speed(run, model)
    yield from _learning(run, model)


def _fit(run: Run, config: TrainConfig, model: nn.Module, capacity: int) -> Finding:
    accelerator = run.accelerator
    size = min(run.plan.global_batch_size, _num_rows(run, config))  # of the job, not the probe
    each = math.ceil(size / accelerator.num_processes)
    rows = math.ceil(each / math.ceil(each / run.config.micro_batch_size))
    wanted = measured_need(accelerator, model, run.splits.train, run.train_batches.pad)
    strategy, on_cpu = strategy_name(accelerator), accelerator.device.type == "cpu"
    num_ranks = accelerator.num_processes
    return fit.will_it_fit(wanted, strategy, num_ranks, capacity, rows, on_cpu, each)


def _batch(run: Run, places: Any) -> Batch:
    return collate(run.splits.train, places, run.train_batches.pad)


def _loss(run: Run, model: nn.Module, batch: Batch, smoothing: float | None = None) -> torch.Tensor:
    """Return the summed loss of a batch, as the loop computes it."""
    batch = send_to_device(batch, run.accelerator.device)
    with run.accelerator.autocast():
        logits = forward(model, batch)
    if smoothing is None:
        smoothing = run.config.label_smoothing_factor
    return weighted_loss(logits, batch["labels"], batch["weights"], smoothing)


def _backward(run: Run, model: nn.Module, step: int, parts: Iterable[Any]) -> float:
    """Accumulate the gradients of update `step` over `parts`; return its loss."""
    total = 0.0
    for places in parts:
        loss = _loss(run, model, _batch(run, places)) / run.global_weight(step)
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def _without_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, also those that attention layers hold as floats."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _loader_speed(run: Run, model: nn.Module) -> Finding:
    loader = make_loader(run.accelerator, run.train_batches, 0, run.config.dataloader_num_workers)

    def step(batch: Batch) -> None:
        torch.autograd.backward(_loss(run, model, batch))
        model.zero_grad()

    finding = machine.loader_speed(loader, step, run.accelerator.device)
    loader.end()  # not read to its end, it would stay registered
    return finding


def _learning(run: Run, model: nn.Module) -> Iterator[Finding]:
    """Overfit the beginnings of a few distinct rows, on this process alone."""
    is_part = run.config.freeze is not None or run.config.lora_r is not None
    rate = scaled_learning_rate(run.config)
    yield learning.usual_rate(rate, 1.0 if is_part else learning.HIGHEST_RATE)
    is_frozen = run.config.freeze is not None
    if is_frozen or run.accelerator.mixed_precision == "fp16":
        why = "a frozen encoder cannot memorize rows" if is_frozen else FP16
        yield Finding("overfits", Verdict.SKIP, why)
        return
    split = run.splits.train
    # Encoder-decoders (BART, T5) look for a text's end token: their rows are not cut.
    tokens = None if getattr(model.config, "is_encoder_decoder", False) else LEARNT_TOKENS
    places = np.arange(min(len(split), 100 * LEARNT_ROWS), dtype=np.int64)
    rows = [row[..., :tokens] for row in split.tokens(places)]
    different = {row.tobytes(): place for place, row in enumerate(rows)}
    most = LEARNT_ROWS if tokens else run.config.micro_batch_size  # uncut rows may be long
    chosen = np.array(list(different.values())[: min(LEARNT_ROWS, most)])
    batch = run.train_batches.pad([rows[place] for place in chosen])
    batch |= {"labels": torch.from_numpy(split.labels(chosen)), "weights": torch.ones(len(chosen))}
    batch = send_to_device(batch, run.accelerator.device)
    size = getattr(model.config, "hidden_size", None) or 384
    rate = 0.1 / size  # 1e-4 at 1,024; more for smaller models, and for adapters, which start at 0
    if run.config.lora_r is not None:
        rate = min(10 * rate, learning.HIGHEST_RATE)
    optimizer = make_optimizer(model, rate, 0.0)

    losses: list[float] = []

    def step() -> float:
        loss = _loss(run, model, batch, smoothing=0.0) / len(chosen)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return losses[-1]

    one_label = run.config.problem_type == "single_label_classification"
    goal, chance = None, 0.0
    if one_label:
        goal, shares = 0.1, batch["labels"].bincount() / len(chosen)
        chance = float(torch.special.entr(shares).sum())
    learnt = learning.overfits(step, goal=goal, chance=chance)
    falls = min(losses) < losses[0] and math.isfinite(losses[-1])
    if learnt.verdict == Verdict.FAIL and falls and run.config.lora_r is not None:
        learnt = replace(learnt, verdict=Verdict.WARN)  # adapters may have too little capacity
    yield learnt
    labels = batch["labels"]
    if not one_label or bool((labels == labels[0]).all()):
        one = "the rows that were learnt have one label"
        why = one if one_label else f"{run.config.problem_type}: none is a class"
        yield Finding("predictions", Verdict.SKIP, why)
        return
    with torch.no_grad(), run.accelerator.autocast():
        yield learning.varied_predictions(forward(model, batch))


def _on_the_replicas(run: Run) -> Iterator[Finding]:
    batch = _batch(run, run.plan.global_batch(0)[:8])
    yield replicas.same_weights(run.model)
    yield replicas.same_buffers(run.model)
    yield replicas.same_loss(lambda shared: _loss(run, run.model.eval(), shared), batch)


def _on_the_loop(run: Run) -> Iterator[Finding]:
    """Compare a few updates of the real loop with the same updates on this process alone."""
    _without_dropout(run.model)
    start_or_resume(run)
    run.graphs = Graphs()  # none: a replayed graph makes no calls to record
    with accumulation.recording(run.model) as events:
        train(run)
    yield accumulation.accumulation_calls(events, run.accumulation_steps)
    has_room = _has_room(run)
    if run.accelerator.mixed_precision == "fp16" or not has_room:
        yield Finding(
            "one against many", Verdict.SKIP, FP16 if has_room else "no room for a whole model"
        )
        return
    ours = [(e["loss"], e["grad_norm"]) for e in read_events(run.events.path, "train")]
    alone = _alone(run)
    yield curve.same_curve(ours, alone, TOLERANCE[run.accelerator.mixed_precision])


def _alone(run: Run) -> list[tuple[float, float]]:
    """Return loss and gradient norm of the run's updates, on one process. Micro-batches are split
    in another way, to expose a loss that depends on the split; a whole update might not fit.
    """
    config, device = run.config, run.accelerator.device
    model, _ = plain_model(config, device, run.splits.label_names, run.tokenizer)
    _without_dropout(model.to(device).train())
    optimizer = make_optimizer(
        model, scaled_learning_rate(config), config.weight_decay, config.layerwise_lr_decay
    )
    scheduler = make_scheduler(config, optimizer, run.num_steps)
    seen = []
    for step in range(run.num_steps):
        whole = run.plan.global_batch(step)
        num_parts = min(run.num_micro_batches, len(whole))
        parts = [whole[start::num_parts] for start in range(num_parts)]
        loss = _backward(run, model, step, parts)
        limit = config.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen.append((loss, norm.item()))
    return seen


class _Job:
    """A run of accel_ft, built but not started, as a `resume.Job`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.parts: dict[str, Any] = {
            "model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler,
        }  # fmt: skip
        if run.accelerator.scaler is not None:
            self.parts["scaler"] = run.accelerator.scaler

    def step(self) -> list[int]:
        """Do one update; return the places of the samples that this rank read."""
        if self.run.batches is None:
            if self.run.step == 0:
                start_or_resume(self.run)
            self.run.model.train()
            self.run.start()
        batches = self.run.batches
        read = list(islice(batches, self.run.accumulation_steps))
        self.run.batches = iter(read)
        try:
            update(self.run)
        finally:
            self.run.batches = batches
        return [place for batch in read for place in _places(batch)]

    def save(self, folder: Path) -> None:
        self.run.save()
        self.run.wait_for_publication()

    def load(self, folder: Path) -> None:
        self.run.config = self.run.config.resolved(resume_from_checkpoint="latest")
        start_or_resume(self.run)


def _jobs(config: TrainConfig, watch: Watch, folder: Path) -> Generator[_Job]:
    """Yield the job, built anew each time in the same folder, after freeing the last one."""
    job = config.resolved(output_dir=folder / "resume", max_steps=1000, save_steps=1000)
    while True:
        run = _quiet(build(job, make_training_accelerator(_limit_seconds(config)), watch))
        try:
            yield _Job(run)
        finally:
            _let_go(run)


def _let_go(run: Run) -> None:
    """Free a run's model and moments; what accelerate prepares has reference cycles."""
    run.close()
    run.accelerator.free_memory()
    run.model = run.optimizer = run.scheduler = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
