"""Estimates the memory that a job needs on each rank's device, in bytes by purpose.

Parameters, gradients and AdamW's moments are counted; activations are measured on micro-batches of
the longest rows, and grow with the number of rows.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

RESERVE = 0.1  # share of the device for allocator, workspace and other processes
AT_WORK = 1.5  # peak / saved activations: their gradients, fragmentation; 1.4 was measured


@dataclass(frozen=True)
class Need:
    """Bytes on one rank.

    Attributes:
        parameters: of trainable and frozen ones; gradients, moments: of trainable ones.
        per_row: of activations, for one row of the longest length.
        fixed: of activations, whatever the number of rows (weights cast by autocast).
        gathered: of parameters that FSDP holds unsharded while in use: two layers, and all outside
            the layers, such as embeddings.
    """

    parameters: int
    gradients: int
    moments: int
    per_row: int
    fixed: int
    gathered: int

    def on_rank(self, strategy: str, num_ranks: int, rows: int, accumulates: bool = False) -> int:
        """Return the bytes a rank needs on its device.

        Args:
            strategy: "none", "ddp", "fsdp" or "offload".
            num_ranks: N.
            rows: of a micro-batch.
            accumulates: whether gradients add up over several; FSDP keeps them unsharded meanwhile.
        """
        activations = self.fixed + self.per_row * rows
        states = self.parameters + self.gradients + self.moments
        if strategy in ("none", "ddp"):
            return states + activations
        shard = states // num_ranks if strategy == "fsdp" else 0
        return shard + self.gathered + self.gradients * accumulates + activations

    def largest(self, strategy: str, num_ranks: int, usable: int, update: int) -> int:
        """Return the largest micro-batch, in rows, that fits on a rank; below 1, none fits.

        Args:
            strategy, num_ranks: as for `on_rank`.
            usable: bytes of the rank's device.
            update: rows of a whole update on a rank; if fewer fit, it accumulates gradients.
        """
        for accumulates in (False, True):
            room = usable - self.on_rank(strategy, num_ranks, 0, accumulates)
            found = room // max(self.per_row, 1)
            if found >= update:
                break
        return found


def activation_bytes(loss: Callable[[], torch.Tensor], model: nn.Module) -> int:
    """Return the bytes that a forward pass saves for the backward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters() if p.device.type != "meta"}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and not hasattr(tensor, "to_local"):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # not itself: an output would form a reference cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(kept.values())


def need(model: nn.Module, loss: Callable[[int], torch.Tensor], rows: int) -> Need:
    """Count a model's bytes, and measure the activations of micro-batches of two sizes.

    Args:
        model: unsharded, in training mode.
        loss: maps a number of rows, each of the greatest length, to their micro-batch's loss.
        rows: of the larger micro-batch, at least 2.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {module for layers in lists for layer in layers for module in layer.modules()}
    outermost = [layer for layers in lists if layers not in inside for layer in layers]
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in outermost]
    in_layers = sum(p.nbytes for p in {p for layer in outermost for p in layer.parameters()})
    parameters = sum(p.nbytes for p in model.parameters())

    def measure() -> tuple[int, int]:
        few, many = (activation_bytes(partial(loss, n), model) for n in (rows // 2, rows))
        per_row = max(many - few, 0) // (rows - rows // 2)
        return per_row, max(many - per_row * rows, 0)

    per_row, fixed = measure()
    checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    if checkpointed:  # backward recomputes the activations of one layer at a time
        for module in checkpointed:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        whole, _ = measure()
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        per_row += whole // max(map(len, lists), default=1)
    return Need(
        parameters=parameters,
        gradients=sum(p.nbytes for p in trainable),
        moments=sum(8 * p.numel() for p in trainable),  # AdamW's two, in float32
        per_row=int(AT_WORK * per_row),
        fixed=fixed,
        gathered=parameters - in_layers + 2 * max(layers, default=0),
    )


def device_bytes(device: torch.device) -> int:
    """Return the bytes that a rank can still allocate on its device; on a CPU, its equal share."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    free = min(psutil.virtual_memory().available, _container_bytes())
    return free // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _container_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes a container or scheduler job may still allocate, by its cgroup v2 limits."""
    room = sys.maxsize
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::/")[2]
        for group in (root / own, *(root / own).parents):
            with contextlib.suppress(OSError, ValueError):
                limit = int((group / "memory.max").read_text())  # raises if "max": no limit
                lines = (group / "memory.stat").read_text().splitlines()
                stat = {name: int(count) for name, _, count in (s.partition(" ") for s in lines)}
                cached = stat["active_file"] + stat["inactive_file"]  # reclaimed when needed
                room = min(room, limit - int((group / "memory.current").read_text()) + cached)
    return max(room, 0)
