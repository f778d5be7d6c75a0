"""Tensors that do not belong where they are.

What you see: "Cannot re-initialize CUDA in forked subprocess", memory that grows with each worker,
weights that train twice or not at all under sharding, "modified by an inplace operation". What it
is: a data set that yields tensors of the GPU or holds a model, one module in the data set and in
the model, parameters that are views of one memory, operations in place on what the backward pass
needs.
All of it is found by looking at the objects and by running, never by reading the source.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_ft.diagnosis.finding import Finding, failed, listed, passed, skipped, warned

LARGE_BYTES = 64 * 2**20


def _parts(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and modules that hang below an object, with the way to each."""
    if isinstance(value, torch.Tensor | nn.Module):
        yield path, value
    elif isinstance(value, dict):
        for key, each in list(value.items())[:64]:
            yield from _parts(each, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value[:64]):
            yield from _parts(each, f"{path}[{number}]", depth + 1)
    elif depth < 3 and hasattr(value, "__dict__"):
        for key, each in vars(value).items():
            yield from _parts(each, f"{path}.{key}", depth + 1)


def dataset_tensors(loader: DataLoader[Any]) -> Finding:
    """Look for tensors of an accelerator, and for large ones that each worker would copy, in what a
    loader's data set yields and holds.
    """
    check = "tensors of the data set"
    dataset = loader.dataset
    first = next(iter(dataset)) if not hasattr(dataset, "__getitem__") else dataset[0]
    yielded = list(_parts(first, "sample"))
    held = list(_parts(dataset, "dataset"))
    far = [
        f"{path} on {part.device}"
        for path, part in [*yielded, *held]
        if isinstance(part, torch.Tensor) and part.device.type != "cpu"
    ]
    workers = f"{loader.num_workers} workers"
    if far and loader.num_workers > 0:
        return failed(
            check,
            f"{listed(far)}, with {workers}: a worker cannot use the parent's device",
            "yield tensors on the CPU and move each batch (accelerate's loader does), or "
            "num_workers=0",
        )
    large = [
        f"{path}, {part.nbytes / 2**20:.0f} MiB"
        for path, part in held
        if isinstance(part, torch.Tensor) and part.nbytes > LARGE_BYTES and not part.is_shared()  # type: ignore[no-untyped-call]
    ]
    if large and loader.num_workers > 0 and loader.multiprocessing_context is not None:
        return warned(
            check,
            f"{listed(large)} is copied into each of {workers}",
            "tensor.share_memory_(), or a memory-mapped file that each worker opens",
        )
    if far:
        return warned(check, listed(far), "yield tensors on the CPU: each row is a copy of its own")
    return passed(check, f"{len(yielded)} a sample, all on the CPU; {workers}")


def shared_modules(dataset: Any, model: nn.Module) -> Finding:
    """Look for parameters that a data set and a model both hold."""
    check = "data set and model"
    inside = {
        p.data_ptr()
        for _, part in _parts(dataset, "dataset")
        for p in (part.parameters() if isinstance(part, nn.Module) else [part])
        if p.numel() > 0 and p.device.type != "meta"
    }
    shared = [name for name, p in model.named_parameters() if p.data_ptr() in inside]
    if shared:
        return failed(
            check,
            f"the data set holds {len(shared)} of the model's parameters: {listed(shared)}; its "
            "workers see the weights of the moment they were forked, and wrapping moves them away",
            "encode in the model's forward pass, or give the data set a frozen copy "
            "(copy.deepcopy(encoder).eval().requires_grad_(False))",
        )
    return passed(check, "they share no parameter")


def aliased_parameters(model: nn.Module) -> Finding:
    """Look for parameters that are different objects in the same memory, and for tied ones."""
    check = "views and ties"
    memory = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.numel() > 0 and p.device.type != "meta" and not hasattr(p, "to_local"):
            memory[p.untyped_storage().data_ptr()].append((name, id(p)))
    views = [[n for n, _ in group] for group in memory.values() if len({i for _, i in group}) > 1]
    ties = [[n for n, _ in group] for group in memory.values() if len(group) > 1]
    if views:
        return failed(
            check,
            f"views of one memory: {listed([' = '.join(group) for group in views])}: sharding "
            "gives each a share of its own, and they drift apart",
            "one nn.Parameter used in both places (module_b.weight = module_a.weight)",
        )
    if ties:
        return warned(
            check,
            f"tied: {listed([' = '.join(group) for group in ties])}",
            "under FSDP both must be in the same wrapped unit: leave them to the root",
        )
    return passed(check, "each parameter has its own memory")


def in_place(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Finding:
    """Run forward and backward and see whether anything the backward pass needs, or a parameter,
    was changed in place.
    """
    check = "operations in place"
    versions = {name: p._version for name, p in model.named_parameters()}
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            value = loss()
            changed = [n for n, p in model.named_parameters() if p._version != versions[n]]
            inputs = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(value, inputs, allow_unused=True)
    except RuntimeError as error:
        if "inplace operation" not in str(error) and "in-place operation" not in str(error):
            return skipped(check, f"the loss could not be computed: {error}")
        return failed(
            check,
            str(error).split(". Hint")[0].strip(),
            "write x = x + y in place of x += y there; anomaly mode prints the line",
        )
    if changed:
        return failed(
            check,
            f"the forward pass changes parameters: {listed(changed)}",
            "compute with a copy: parameters change in the optimizer's step alone",
        )
    return passed(check, f"{len(versions)} parameters and all saved activations are as they were")
