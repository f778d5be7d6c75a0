"""receipt.json: what a reader needs to trust a run, and to reproduce it."""

import contextlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed import is_nccl_available

import accel_ft
from accel_ft.errors import ConfigError
from accel_ft.runtime.files import write_whole
from accel_ft.runtime.logging import warned
from accel_ft.runtime.memory import malloc_in_use
from accel_ft.settings import read_receipt

OF_STRATEGY = ("FSDP_", "ACCELERATE_DYNAMO_")
PACKAGES = (
    "torch", "accelerate", "transformers", "tokenizers", "datasets", "evaluate", "safetensors",
    "numpy", "peft",
)  # fmt: skip


def write_receipt(path: Path, accelerator: Accelerator, about_run: dict[str, Any]) -> None:
    """Write the receipt; a resumed run appends an entry to the list of its starts.

    Args:
        accelerator: knows the strategy that really runs.
        about_run: fingerprints, hash of the sample order, position.
    """
    starts = []
    with contextlib.suppress(ConfigError):
        if about_run["step"] > 0:
            starts = read_receipt(path.parent)["starts"]
    strategy, machine = about_strategy(accelerator), about_machine(accelerator.device)
    program = about_program()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    begun = {"time": now, "step": about_run["step"], "num_steps": about_run["num_steps"]}
    identity = {key: value for key, value in about_run["identity"].items() if key != "labels"}
    starts.append(begun | strategy | {"machine": machine, "identity": identity} | program)
    receipt = {
        **program,
        "strategy": strategy,
        "strategy_settings": strategy_settings(),
        "machine": machine,
        **{key: value for key, value in about_run.items() if key != "step"},
        "warnings": list(dict.fromkeys(warned)),
        "starts": starts,
    }
    write_whole(path, json.dumps(receipt, indent=1) + "\n")


def about_strategy(accelerator: Accelerator) -> dict[str, Any]:
    """Return the strategy that a job really runs under."""
    return {
        "distributed_type": accelerator.distributed_type.value,
        "num_processes": accelerator.num_processes,
        "device": str(accelerator.device.type),
        "mixed_precision": accelerator.mixed_precision,
        "compile": accelerator.state.dynamo_plugin.backend.value,
    }


def strategy_settings() -> dict[str, str]:
    """Return the environment variables through which accelerate passes a strategy's settings."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(OF_STRATEGY)}


def about_machine(device: torch.device) -> dict[str, Any]:
    """Return the system, the device, its libraries' versions, the CPU threads and the allocator."""
    nccl = torch.cuda.nccl.version() if is_nccl_available() else None  # type: ignore[no-untyped-call]
    return {
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": nccl and ".".join(map(str, nccl)),
        "threads": torch.get_num_threads(),
        "malloc": malloc_in_use(),
    }


def about_program() -> dict[str, Any]:
    """Return the versions of accel_ft, Python and PACKAGES, and accel_ft's commit."""
    return {
        "accel_ft": accel_ft.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of PACKAGES; None for those that are not installed."""
    return {name: _version(name) for name in PACKAGES}


def git_commit() -> str | None:
    """Return accel_ft's own commit, with "-dirty" if files differ; None outside its checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=Path(accel_ft.__file__).parent, capture_output=True, text=True,
            timeout=10, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails in another project's checkout
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    """The processor's name; platform.processor() is empty on most Linux systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
