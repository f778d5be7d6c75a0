"""Check that all ranks agree. Each machine has its own command, files and environment: with
different learning rates, or different rows, replicas would diverge silently.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator

from accel_ft.config import FILE_KEYS, HUB_KEYS, TrainConfig
from accel_ft.errors import ConfigError, DataError, listed
from accel_ft.runtime.receipt import about_strategy, strategy_settings
from accel_ft.runtime.watch import Watch

PACKAGE = Path(__file__).parents[1]
# Keys that may differ between machines, or that only rank 0 uses.
OF_ONE_MACHINE = FILE_KEYS | HUB_KEYS | {
    "model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "reproduce",
    "dataloader_num_workers", "report_to",
}  # fmt: skip
COMPUTE = ("torch", "accelerate", "transformers", "numpy")  # libraries that decide the numbers


def refuse_other_jobs(config: TrainConfig, accelerator: Accelerator, watch: Watch) -> None:
    """Refuse ranks whose configuration, strategy, environment or code differs from rank 0's.
    Collective.

    Raises:
        ConfigError: naming what differs, and where.
    """
    job = config.model_dump(mode="json", exclude=OF_ONE_MACHINE) | about_strategy(accelerator)
    job |= strategy_settings() | {name: version(name) for name in COMPUTE}
    resumed = config.resume_from_checkpoint
    job["resume_from_checkpoint"] = resumed if resumed in (None, "latest") else "a folder"
    code = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    job["code of accel_ft (SHA-256)"] = hashlib.sha256(code).hexdigest()
    first, *others = watch.all_gather(job)
    faults = [
        f"{key}: {first.get(key)} on rank 0, {other.get(key)} on rank {rank}"
        for rank, other in enumerate(others, 1)
        for key in sorted(first | other)
        if first.get(key) != other.get(key)
    ]
    if faults:
        raise ConfigError(
            "the ranks were started for different jobs. Fix: the same command, files, environment "
            "and versions on every machine\n  " + listed(faults, 10, "\n  ")
        )


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and bits; of a DTensor, of this rank's shard."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
        return digest(tensor.indices()) + digest(tensor.values())
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    hashed = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    hashed.update(flat.numpy().data)
    return hashed.hexdigest()


def refuse_other_models(model: Any, labels: list[str], watch: Watch) -> None:
    """Refuse ranks that have loaded a different model than rank 0: each machine has its own files.
    Collective.

    Args:
        model: not wrapped yet.
        labels: names, in the order of their ids.

    Raises:
        ConfigError: naming what differs, and a rank.
    """
    about = {f"config.json's {key}": value for key, value in model.config.to_dict().items()}
    about |= {name: (digest(p), p.requires_grad) for name, p in model.named_parameters()}
    about["labels"] = labels
    about.pop("config.json's _name_or_path", None)
    first, *others = watch.all_gather(about)
    for rank, other in enumerate(others, 1):
        names = [name for name in first | other if first.get(name) != other.get(name)]
        if names:
            raise ConfigError(
                f"rank {rank} has loaded another model than rank 0: {listed(names, 5)} differ. "
                "Fix: the same files on every machine"
            )


def refuse_other_rows(fingerprints: list[dict[str, Any]]) -> None:
    """Refuse ranks that read different rows than rank 0.

    Args:
        fingerprints: for each rank, the fingerprints of its splits by name.

    Raises:
        DataError: naming the split, and a rank.
    """
    first = fingerprints[0]
    for rank, others in enumerate(fingerprints):
        for name in sorted(first | others):
            if first.get(name) != others.get(name):
                raise DataError(
                    f"rank {rank} reads other {name} rows than rank 0, or has another tokenizer. "
                    "Fix: the same files on every machine"
                )
