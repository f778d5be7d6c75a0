"""Build the parts of a run from its configuration."""

import logging
import math
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed

from accel_ft.config import IDENTITY_KEYS, TrainConfig
from accel_ft.data.loader import Batches, Padding, collate, train_places
from accel_ft.data.plan import Plan
from accel_ft.data.splits import Split, Splits, class_weights, load_splits
from accel_ft.data.tokenize import INPUTS
from accel_ft.engine.agreement import refuse_other_jobs, refuse_other_models, refuse_other_rows
from accel_ft.engine.evaluation import make_eval_loader
from accel_ft.engine.fitting import DEFAULT_GLOBAL_BATCH_SIZE, fit_micro_batch, longest
from accel_ft.engine.graphs import Graphs, can_record
from accel_ft.engine.run import Run
from accel_ft.engine.step import forward, unreached
from accel_ft.errors import ConfigError, LaunchError, counted, listed, nearest
from accel_ft.model import load
from accel_ft.model.embedding import make_sparse, why_unshardable
from accel_ft.model.optim import (
    allocate_state,
    make_optimizer,
    make_scheduler,
    scaled_learning_rate,
)
from accel_ft.model.plain import plain_model
from accel_ft.runtime import fsdp
from accel_ft.runtime.compiled import (
    can_record_compiled,
    compiles_each_width,
    is_compiled,
    refuse_cuda_graphs,
)
from accel_ft.runtime.launch import check_granted
from accel_ft.runtime.logging import EventLog
from accel_ft.runtime.trackers import Trackers
from accel_ft.runtime.watch import Watch

logger = logging.getLogger(__name__)

# Limits of the padding probe, which runs on a CPU, possibly on a single thread.
PROBED_ROWS, PROBED_TOKENS, PROBED_PARAMETERS = 1000, 600, 5 * 10**8


def build(config: TrainConfig, accelerator: Accelerator, watch: Watch) -> Run:
    """Make the parts of a run: data, plan, model, optimizer, schedule, loaders. Collective."""
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if is_fsdp and not accelerator.is_fsdp2 and config.lora_r is not None:
        raise ConfigError(
            f"lora_r={config.lora_r}: is not supported by FSDP1. Fix: fsdp_version: 2"
        )
    if accelerator.num_processes > 1:
        refuse_other_jobs(config, accelerator, watch)
    tokenizer, splits = _load_rows(config, accelerator, watch)
    pad = Padding(tokenizer, config.max_seq_length, accelerator.device, compiles_each_width())
    if config.per_device_train_batch_size == "auto":
        config = fit_micro_batch(config, accelerator, watch, splits, tokenizer, pad)
    num_ranks = accelerator.num_processes
    config, accumulation_steps = _resolve_batch(config, num_ranks, len(splits.train))
    assert config.global_batch_size is not None
    accelerator.gradient_accumulation_steps = accumulation_steps
    if accumulation_steps > 1:
        refuse_cuda_graphs(accelerator.device)
    num_micro_batches = accumulation_steps * num_ranks
    plan = Plan(
        len(splits.train), config.global_batch_size, config.seed, splits.train.lengths,
        groups=config.train_sampling_strategy == "group_by_length",
    )  # fmt: skip
    places = partial(train_places, plan, num_micro_batches)
    num_steps = config.updates(plan.steps_per_epoch)
    _warn_of_idle_keys(config, num_steps, plan.steps_per_epoch)
    watch.stage("model")
    model, counts, optimizer, scheduler = _build_model(
        config, accelerator, watch, splits, tokenizer, pad, num_steps
    )
    identity = {
        "labels": splits.label_names,
        "train_data": splits.train.fingerprint(),
        **config.model_dump(mode="json", include=IDENTITY_KEYS),
    }
    if config.lora_r is not None:  # LoRA checkpoints do not hold the pretrained weights
        is_main = accelerator.is_main_process
        found = load.provenance(config.model_name_or_path) if is_main else None
        identity["pretrained"] = watch.all_gather(found)[0]
    trackers = Trackers(accelerator)

    def eval_loader(split: Split) -> Any:
        return make_eval_loader(accelerator, split, config.per_device_eval_batch_size, pad)

    return Run(
        config=config,
        accelerator=accelerator,
        watch=watch,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=scheduler,
        train_batches=Batches(splits.train, pad, num_steps * num_micro_batches, places),
        validation_loader=eval_loader(splits.validation),
        test_loader=None if splits.test is None else eval_loader(splits.test),
        splits=splits,
        plan=plan,
        num_parameters=sum(counts),
        num_trained=counts[True],
        num_steps=num_steps,
        accumulation_steps=accumulation_steps,
        identity=identity,
        events=EventLog(
            config.output_dir / "metrics.jsonl",
            accelerator.is_main_process,
            trackers.log,
            watch.check_folder,
        ),
        trackers=trackers,
        graphs=_graphs(config, accelerator, model, pad, splits.train),
    )


def _load_rows(config: TrainConfig, accelerator: Accelerator, watch: Watch) -> tuple[Any, Splits]:
    """Return the tokenizer, and the tokenised rows, checked against the model. Collective."""
    folder = load.resolve(config.model_name_or_path)
    tokenizer = load.load_tokenizer(folder)
    base = load.load_model_config(folder)
    load.check_trainable(base)
    load.check_max_seq_length(config.max_seq_length, load.position_limit(base, tokenizer))
    watch.stage("data")
    with watch.first(accelerator.is_local_main_process):  # it tokenises; others read its cache
        splits = load_splits(config, tokenizer, load.labels_of(base))
    refuse_other_rows(watch.all_gather({n: s.fingerprint() for n, s in splits.given.items()}))
    stores = [split.store for split in splits.given.values()]
    load.check_tokens(max(store.greatest_id for store in stores), tokenizer, base)
    names, best = splits.label_names, config.best_label
    _warn_of_other_labels(config, names, load.labels_of(base))
    present = [names[number] for number in splits.validation.label_ids()] if best else []
    if best not in (None, *present):
        raise ConfigError(
            f"metric_for_best_model={config.best_metric}: no validation row has that label."
            f"{nearest(str(best), present)} Allowed: {listed(present, 20)}"
        )
    splits.train.class_weights = class_weights(config.class_weights, splits.train, names)
    if config.oversampling == "balanced":
        splits.train.oversample()
    return tokenizer, splits


def _graphs(
    config: TrainConfig, accelerator: Accelerator, model: Any, pad: Padding, split: Split
) -> Graphs:
    """Return the runner of micro-batches: with CUDA graphs if one GPU trains a supported model."""
    alone = accelerator.device.type == "cuda" and fsdp.strategy_of(model) == "one process"
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    plain = getattr(plain, "get_base_model", lambda: plain)()
    if not (config.cuda_graphs and alone and can_record_compiled() and can_record(plain)):
        return Graphs()
    most_tokens = config.micro_batch_size * int(pad.widths(np.array([longest(split)]))[0])
    accumulates = accelerator.gradient_accumulation_steps > 1
    return Graphs(model.parameters(), most_tokens, accumulates)


def _warn_of_other_labels(config: TrainConfig, names: list[str], known: list[str]) -> None:
    if len(known) == len(names) and known != names and config.problem_type != "regression":
        pairs = [f"{a} -> {b}" for a, b in zip(known, names, strict=True) if a != b]
        logger.warning(
            "the head of %s is kept, though it was trained for other labels: %s",
            config.model_name_or_path, listed(pairs, 10),
        )  # fmt: skip


def _reads_padding(model: Any, split: Split, pad: Padding) -> bool:
    """Return whether padding changes logits: whether rows in a batch get other logits than alone.
    FNet has no attention mask; ConvBERT, CANINE and others apply one in some layers only.
    """
    places = np.arange(min(len(split), PROBED_ROWS))
    places = places[np.argsort(split.lengths(places), kind="stable")]
    places = places[[len(places) // 4, len(places) // 3, len(places) // 2]]
    lengths = split.lengths(places)
    if len(places) * lengths[-1] > PROBED_TOKENS:
        return False
    batch = collate(split, places, pad)
    batch = {name: tensor for name, tensor in batch.items() if name in INPUTS}
    ends = [slice(-size, None) if pad.left else slice(size) for size in lengths]
    model.eval()
    try:
        with torch.no_grad():
            together = forward(model, batch)
            alone = [
                forward(model, {name: tensor[[row], end] for name, tensor in batch.items()})
                for row, end in enumerate(ends)
            ]
    except Exception:  # the model may not run on a CPU; only a warning depends on it
        logger.debug("padding could not be tried", exc_info=True)
        return False
    return not torch.allclose(torch.cat(alone), together, 1e-3, 1e-3, equal_nan=True)


def _build_model(
    config: TrainConfig,
    accelerator: Accelerator,
    watch: Watch,
    splits: Splits,
    tokenizer: Any,
    pad: Padding,
    num_steps: int,
) -> tuple[Any, list[int], Any, Any]:
    """Return the prepared model, its numbers of frozen and of trained parameters, the prepared
    optimizer, and the schedule.
    """
    model, new_parameters = plain_model(config, accelerator.device, splits.label_names, tokenizer)
    if accelerator.num_processes > 1:
        refuse_other_models(model, splits.label_names, watch)
    if new_parameters:
        logger.info(
            "newly initialized, as the pretrained model lacks them, or has them for another number "
            "of labels (a resume loads them): %s", ", ".join(new_parameters),
        )  # fmt: skip
    counts = [0, 0]
    for parameter in model.parameters():  # now: under FSDP1 each rank will see only a shard
        counts[parameter.requires_grad] += parameter.numel()
    is_probed = accelerator.is_main_process and sum(counts) < PROBED_PARAMETERS
    if is_probed and _reads_padding(model, splits.train, pad):
        plain = getattr(model, "get_base_model", lambda: model)()
        logger.warning(
            "padding changes the outputs of %s: they depend on which rows share a batch, and the "
            "loss curve on the split into micro-batches", type(plain).__name__,
        )  # fmt: skip
    optimizer = make_optimizer(
        model, scaled_learning_rate(config), config.weight_decay, config.layerwise_lr_decay
    )
    fsdp.leave_overflows_to_the_scaler(accelerator, optimizer)
    scheduler = make_scheduler(config, optimizer, num_steps)
    watch.stage("wrap")
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if is_fsdp and accelerator.is_fsdp2 and (why := why_unshardable(model)):
        raise LaunchError(f"FSDP2: accelerate cannot shard {type(model).__name__}: {why}. Fix: DDP")
    fsdp.configure(accelerator, model)
    filler = collate(splits.train, np.empty(0, np.int64), pad)
    on_cpu = accelerator.device.type == "cpu" and not (is_fsdp or is_compiled())
    if on_cpu and accelerator.scaler is None:  # a scaler's NaN would stay in rows no batch reads
        is_sent = accelerator.distributed_type != DistributedType.NO
        if not is_sent or (
            dist.get_backend() == "gloo" and accelerator.gradient_accumulation_steps == 1
        ):
            make_sparse(model)  # NCCL, MPI and DDP's accumulation need dense gradients
    if accelerator.num_processes > 1 and not is_fsdp:
        idle = unreached(model, forward(model, filler))
        if idle:
            logger.info(
                "parameters without gradients: %s; DDP runs with find_unused_parameters",
                ", ".join(idle),
            )
            accelerator.ddp_handler.find_unused_parameters = True
    model, optimizer = accelerator.prepare(model, optimizer)
    check_granted(accelerator, model)
    if is_fsdp:
        fsdp.leave_embedding_sharded(model)
        allocate_state(optimizer.optimizer)
    if accelerator.num_processes > 2 and fsdp.strategy_of(model) == "DDP":
        # DDP rebuilds its gradient buckets after the first backward pass, and sums over three or
        # more ranks depend on them. Without this pass, a resumed run would sum in another order.
        inputs = {name: value.to(accelerator.device) for name, value in filler.items()}
        forward(model, inputs).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.optimizer.zero_grad()  # accelerate's is a no-op if a `fit` was cut short
    set_seed(config.seed, device_specific=True)  # different dropout on each rank
    return model, counts, optimizer, scheduler


def _resolve_batch(
    config: TrainConfig, num_processes: int, num_rows: int
) -> tuple[TrainConfig, int]:
    """Resolve global batch size and accumulation steps; each follows from the other."""
    at_once, steps = config.micro_batch_size, config.gradient_accumulation_steps
    one_pass = at_once * num_processes
    size = one_pass * steps if steps else config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    steps = math.ceil(min(size, num_rows) / one_pass)
    needed = math.ceil(size / num_processes)
    usual = TrainConfig.model_fields["per_device_train_batch_size"].default
    if at_once > needed and at_once != usual:
        logger.warning(
            "per_device_train_batch_size=%d is not reached: an update of global_batch_size=%d "
            "samples has only %d per rank. Fix, in a new run: --global_batch_size %d",
            at_once, size, needed, one_pass,
        )  # fmt: skip
    if size < num_processes:
        raise ConfigError(
            f"global_batch_size={size}: one sample per process is needed. Allowed: {num_processes} "
            "or more"
        )
    return config.resolved(global_batch_size=size, gradient_accumulation_steps=None), steps


def _warn_of_idle_keys(config: TrainConfig, num_steps: int, steps_per_epoch: int) -> None:
    """Warn about keys that are set but have no effect in this job."""
    for _, _, words in config.idle_keys():
        logger.warning(words)
    is_share = config.warmup_steps < 1  # a share leaves at least one update
    never = not is_share and num_steps <= round(config.warmup_steps)
    if never and config.lr_scheduler_type != "constant":
        logger.warning(
            "warmup_steps=%g: the run has %s, and never reaches learning_rate. Fix: fewer",
            config.warmup_steps, counted(num_steps, "update"),
        )  # fmt: skip
    evaluations = math.ceil(num_steps / (config.eval_steps or steps_per_epoch))
    patience = config.early_stopping_patience
    if patience is not None and evaluations <= patience + 1:
        logger.warning(
            "early_stopping_patience=%d: the run has %s, and cannot stop before its end. Fix: a "
            "smaller eval_steps",
            patience, counted(evaluations, "evaluation"),
        )  # fmt: skip
    if config.load_best_model_at_end and evaluations == 1:
        logger.warning(
            "load_best_model_at_end: the run has one evaluation, at its end%s",
            f". Fix: eval_steps below {num_steps}" * (num_steps > 1),
        )
