"""Load a checkpoint of one strategy under another, or read only its weights, in one process.

One process and DDP write model.safetensors and optimizer.bin. FSDP writes two torch distributed
checkpoints, of the model and of the optimizer. A shard records its place in the whole tensor, so
shards load into any number of ranks, or without torch.distributed.
"""

import logging
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state
from accelerate.utils import SCALER_NAME, DistributedType
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from accel_ft.model import load

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.bin"
SHARDED_WEIGHTS = "pytorch_model_fsdp_0"
SHARDED_OPTIMIZER = "optimizer_0"
SHARDS = (SHARDED_WEIGHTS, SHARDED_OPTIMIZER)


def makes_shards(accelerator: Accelerator) -> bool:
    """Return whether a save writes shards."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def is_sharded(folder: Path) -> bool:
    """Return whether a checkpoint holds shards."""
    return (folder / SHARDED_WEIGHTS).is_dir()


def load_any(accelerator: Accelerator, folder: Path) -> None:
    """Load a verified checkpoint, saved under any strategy, into the prepared model and optimizer.
    Collective.

    Shards stay shards. If FSDP loads an unsharded checkpoint, rank 0 reads and broadcasts it.
    """
    scaler, has_scale = accelerator.scaler, (folder / SCALER_NAME).is_file()
    if scaler is not None:
        # torch creates both again on demand; under FSDP2, accelerate's load needs them unset.
        scaler._scale = scaler._growth_tracker = None
        if not has_scale:  # saved without fp16
            logger.info("%s holds no fp16 loss scale: it is initialized", folder)
    with mock.patch.object(accelerator, "scaler", scaler if has_scale else None):
        _load_parts(accelerator, folder)


def _load_parts(accelerator: Accelerator, folder: Path) -> None:
    under_fsdp = makes_shards(accelerator)
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    if under_fsdp:  # through compile's wrapper, torch would demand frozen parameters too
        model = getattr(model, "_orig_mod", model)
    if is_sharded(folder) == under_fsdp:
        with mock.patch.object(accelerator, "_models", [model]):
            accelerator.load_state(str(folder))
        return
    if under_fsdp:
        _broadcast_whole(accelerator, folder, model, optimizer.optimizer)
    else:
        _read_shards(folder, accelerator.unwrap_model(model), optimizer.optimizer)
    # The files of the random states and the loss scaler are the same under every strategy.
    load_accelerator_state(
        str(folder), [], [], [], [], accelerator.process_index, accelerator.scaler
    )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return a verified checkpoint's weights by name, on the CPU, in one process."""
    if not is_sharded(folder):
        return load_file(folder / WEIGHTS)
    reader = FileSystemReader(folder / SHARDED_WEIGHTS)
    weights = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise ValueError(f"{name} is incomplete: a shard is missing")
            kind = entry.properties.dtype  # zeros: gaps must not hold old memory
            weights[name.removeprefix("model.")] = torch.zeros(entry.size, dtype=kind)
    _load_shards({"model": weights}, folder / SHARDED_WEIGHTS)
    return weights


def _load_shards(state: dict[str, Any], folder: Path) -> None:
    """Fill `state` from a distributed checkpoint, in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        load_shards(state, storage_reader=FileSystemReader(folder), no_dist=True)


def _broadcast_whole(accelerator: Accelerator, folder: Path, model: Any, optimizer: Any) -> None:
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    if accelerator.is_main_process:
        weights = load_file(folder / WEIGHTS)
        saved = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        name_of = {id(p): load.plain_name(name) for name, p in model.named_parameters()}
        names = [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        states = {names[number]: values for number, values in saved["state"].items()}
        for name in set(names) - states.keys():  # had no gradient yet, so no state; FSDP needs one
            zero = torch.zeros_like(weights[name])
            states[name] = {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero.clone()}
        moments = {
            "state": states,
            "param_groups": [
                group | {"params": [names[number] for number in group["params"]]}
                for group in saved["param_groups"]
            ],
        }
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)


def _read_shards(folder: Path, model: Any, optimizer: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    _load_shards({"model": weights}, folder / SHARDED_WEIGHTS)
    _load_shards({"optimizer": moments}, folder / SHARDED_OPTIMIZER)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
