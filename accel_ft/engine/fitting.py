"""Find the largest micro-batch that fits in memory. The need is measured, not found by trial and
error: a rank that runs out of memory would leave the others waiting.
"""

import gc
import logging
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from accel_ft.config import TrainConfig
from accel_ft.data.loader import Padding
from accel_ft.data.splits import Split, Splits
from accel_ft.engine.step import forward, weighted_loss
from accel_ft.errors import ConfigError
from accel_ft.model.memory import RESERVE, Need, device_bytes, need
from accel_ft.model.plain import plain_model
from accel_ft.runtime.watch import Watch
from accel_ft.settings import is_run, read_receipt, read_settings, run_folder

logger = logging.getLogger(__name__)

DEFAULT_GLOBAL_BATCH_SIZE = 32
COUNTED_ROWS, MEASURED_ROWS = 1_000_000, 4


def longest(split: Split) -> int:
    """Return the number of tokens of the longest row, among the first `COUNTED_ROWS`."""
    known = np.arange(min(len(split.store), COUNTED_ROWS), dtype=np.int64)
    return int(split.store.lengths(known).max())


def measured_need(accelerator: Accelerator, model: Any, split: Split, pad: Padding) -> Need:
    """Measure a forward pass over rows that are all as long as the longest, the worst case.

    Args:
        model: not wrapped, on its device, in training mode.
        split: the training rows.
    """
    text = np.resize(split.store.tokens(0)[:1], (1, longest(split)))
    label = split.labels(np.zeros(1, np.int64))

    def loss(count: int) -> torch.Tensor:
        batch = pad([text] * count)
        # One token is padding: a mask takes memory, but the model may skip more padding.
        batch["attention_mask"][-1, 1:][-1:] = 0
        batch["labels"] = torch.from_numpy(np.repeat(label, count, axis=0))
        batch["weights"] = torch.ones(count)
        batch = {key: value.to(accelerator.device) for key, value in batch.items()}
        with accelerator.autocast():
            logits = forward(model, batch)
        return weighted_loss(logits, batch["labels"], batch["weights"], 0.0)

    return need(model, loss, MEASURED_ROWS)


def strategy_name(accelerator: Accelerator) -> str:
    """Return the strategy as `Need.on_rank` names it."""
    policy = getattr(getattr(accelerator.state, "fsdp_plugin", None), "cpu_offload", None)
    offloads = isinstance(policy, CPUOffloadPolicy) or getattr(policy, "offload_params", False)
    names = {DistributedType.NO: "none", DistributedType.FSDP: "offload" if offloads else "fsdp"}
    return names.get(accelerator.distributed_type, "ddp")


def fit_micro_batch(
    config: TrainConfig,
    accelerator: Accelerator,
    watch: Watch,
    splits: Splits,
    tokenizer: Any,
    pad: Padding,
) -> TrainConfig:
    """Resolve per_device_train_batch_size: auto to the largest micro-batch that fits on every rank;
    this loads the model an additional time. Collective.

    Raises:
        ConfigError: not even one sample fits.
    """
    capacity = min(watch.all_gather(device_bytes(accelerator.device)))  # before the model is loaded
    model, _ = plain_model(config, accelerator.device, splits.label_names, tokenizer)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if capacity < 2 * whole:
        raise ConfigError(
            f"per_device_train_batch_size=auto: the whole model, {whole / 2**20:,.0f} MiB, and its "
            "gradients must fit on one device. Fix: a number, and FSDP (accelerate_configs)"
        )
    model.to(accelerator.device).train()
    wanted = measured_need(accelerator, model, splits.train, pad)
    del model
    gc.collect()  # its layers are in reference cycles
    torch.cuda.empty_cache()  # NCCL allocates from the device, not from torch's cache
    usable = int(capacity * (1 - RESERVE))
    size = config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    rows = -(-size // accelerator.num_processes)  # per rank and update: the most that are needed
    strategy = strategy_name(accelerator), accelerator.num_processes
    found = int(min(*watch.all_gather(wanted.largest(*strategy, usable, rows)), rows))
    if found < 1:
        length = longest(splits.train)
        missing = wanted.on_rank(*strategy, 1, rows > 1) - usable
        raise ConfigError(
            f"per_device_train_batch_size=auto: not one sample of {length} tokens (the longest "
            f"row's) fits: {missing / 2**20:,.0f} MiB are missing. Fix: a max_seq_length below "
            f"{length}, lora_r, gradient_checkpointing, or FSDP (accelerate_configs)"
        )
    (earlier, *_) = watch.all_gather(_earlier_micro_batch(config, accelerator.num_processes))
    found = min(found, earlier or found)
    logger.info("per_device_train_batch_size: %d samples at once", found)
    return config.resolved(per_device_train_batch_size=found, global_batch_size=size)


def _earlier_micro_batch(config: TrainConfig, num_processes: int) -> int | None:
    """Return what `auto` found before, if this resumes a run with as many ranks: dropout masks
    depend on the split into micro-batches.
    """
    wanted = config.resume_from_checkpoint
    run = config.output_dir if wanted == "latest" else run_folder(wanted or "")
    if wanted is None or run is None or not is_run(run):  # killed before it wrote its receipt
        return None
    if read_receipt(run)["strategy"]["num_processes"] != num_processes:
        return None
    return int(read_settings(run / "config.yaml")["per_device_train_batch_size"])
