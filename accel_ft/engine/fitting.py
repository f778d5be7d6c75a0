"""The largest micro-batch that fits, and what a rank needs for one: measured, not tried out, since
a rank that runs out of memory leaves the others waiting.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from accel_ft.config import TrainConfig
from accel_ft.data.loader import Padding
from accel_ft.data.splits import Split
from accel_ft.engine.step import forward, weighted_loss
from accel_ft.errors import ConfigError
from accel_ft.model.memory import RESERVE, Need, device_bytes, need
from accel_ft.runtime.watch import Watch

logger = logging.getLogger(__name__)

COUNTED_ROWS, MEASURED_ROWS = 1_000_000, 4


def measured_need(accelerator: Accelerator, model: Any, split: Split, pad: Padding) -> Need:
    """Measure a forward pass over rows as long as the longest of all, the worst that can come.

    Args:
        model: not wrapped, on its device, in training mode.
        split: the training rows.
    """
    known = np.arange(min(len(split.store), COUNTED_ROWS), dtype=np.int64)
    text = np.resize(split.store.tokens(0)[:1], (1, int(split.store.lengths(known).max())))
    label = split.labels(np.zeros(1, np.int64))

    def loss(count: int) -> torch.Tensor:
        batch = pad([text] * count)
        batch["attention_mask"][-1, 1:] = 0  # as padding is: a mask needs memory, too
        batch["labels"] = torch.from_numpy(np.repeat(label, count, axis=0))
        batch["weights"] = torch.ones(count)
        batch = {key: value.to(accelerator.device) for key, value in batch.items()}
        with accelerator.autocast():
            logits = forward(model, batch)
        return weighted_loss(logits, batch["labels"], batch["weights"], 0.0)

    return need(model, loss, MEASURED_ROWS)


def strategy_name(accelerator: Accelerator) -> str:
    """Return `model.memory`'s name of the strategy."""
    policy = getattr(getattr(accelerator.state, "fsdp_plugin", None), "cpu_offload", None)
    offloads = isinstance(policy, CPUOffloadPolicy) or getattr(policy, "offload_params", False)
    names = {DistributedType.NO: "none", DistributedType.FSDP: "offload" if offloads else "fsdp"}
    return names.get(accelerator.distributed_type, "ddp")


def largest_micro_batch(
    config: TrainConfig,
    accelerator: Accelerator,
    watch: Watch,
    load_model: Callable[[], Any],
    split: Split,
    pad: Padding,
    rows: int,
) -> int:
    """Return the most samples of a micro-batch that fit on every rank, the same on all. Collective.

    Args:
        load_model: gives a model, not wrapped.
        rows: samples of an update that a rank has in all; more are not needed.

    Raises:
        ConfigError: not one fits.
    """
    capacity = device_bytes(accelerator.device)  # before the model has its share of it
    model = load_model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if min(watch.tell(capacity)) < 2 * whole:
        raise ConfigError(
            f"per_device_train_batch_size=auto: the whole model, {whole / 2**20:,.0f} MiB, has no "
            "room on a device to be measured on. Fix: a number; `accel_ft.doctor` counts"
        )
    model.to(accelerator.device).train()
    wanted = measured_need(accelerator, model, split, pad)
    held = wanted.on_rank(strategy_name(accelerator), accelerator.num_processes, 0)
    free = int(capacity * (1 - RESERVE)) - held
    found = int(min(*watch.tell(free // max(wanted.per_row, 1)), rows))
    if found < 1:
        raise ConfigError(
            f"per_device_train_batch_size=auto: not one sample of {config.max_seq_length} tokens "
            f"fits: {-free / 2**20:,.0f} MiB are missing. Fix: a shorter max_seq_length, lora_r, "
            "gradient_checkpointing, or FSDP, as `accel_ft.doctor` advises"
        )
    logger.info("per_device_train_batch_size: %d samples at once", found)
    return found
