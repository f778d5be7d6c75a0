"""Tensors where they do not belong; found by inspecting objects and by running code."""

import builtins
import contextlib
import dis
import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_ft.diagnosis.finding import Finding, Verdict, check
from accel_ft.diagnosis.gradients import gradients_of, untouched
from accel_ft.engine.agreement import digest
from accel_ft.errors import listed
from accel_ft.runtime.guest import own_random_numbers

LARGE_BYTES = 64 * 2**20
LONG_LIST = 1_000_000
PICKLING = ("__reduce__", "__getstate__")


def _held(value: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors, arrays, modules and long collections that an object refers to."""
    seen = {id(vars(builtins))} if seen is None else seen
    if id(value) in seen or depth > 8 or len(seen) > LONG_LIST:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor | nn.Module | np.ndarray):
        yield value
    elif not isinstance(value, type | ModuleType):
        are_alike = isinstance(value, list | tuple | dict | set)
        if are_alike and len(value) > LONG_LIST:
            yield value
        parts = gc.get_referents(value)
        if isinstance(value, FunctionType):  # only the globals it reads
            around, code = value.__globals__, dis.get_instructions(value)
            seen.add(id(around))
            read = {each.argval for each in code if each.opname == "LOAD_GLOBAL"}
            parts += [around[name] for name in read & around.keys()]
        if any(isinstance(vars(type(value)).get(name), FunctionType) for name in PICKLING):
            # A class with pickling of its own decides what workers get: its arrays do not count.
            own = [*parts, *getattr(value, "__dict__", {}).values()]
            seen |= {id(each) for each in own if isinstance(each, np.ndarray)}
        for each in parts[:128] if are_alike else parts:
            yield from _held(each, seen, depth + 1)


def _tensors(parts: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among `parts`, and the parameters of the modules among them."""
    for part in parts:
        if isinstance(part, nn.Module):
            yield from part.parameters()
        elif isinstance(part, torch.Tensor):
            yield part


@check("tensors of the data set")
def dataset_tensors(loader: DataLoader[Any]) -> Finding:
    """Look for accelerator tensors, and for data that each worker would copy, in what a loader's
    data set yields and holds, and in what its `collate_fn` makes of one row; the row is read here,
    from a stream the first.
    """
    dataset, workers, batches = loader.dataset, loader.num_workers, loader.batch_sampler
    keys = loader.sampler if batches is None else chain.from_iterable(batches)
    is_stream = isinstance(dataset, IterableDataset)
    rows: Any = dataset if is_stream else map(dataset.__getitem__, keys)
    far = []
    with own_random_numbers():
        for row in islice(rows, 1):
            far += _far("a row", _held(row))
            with contextlib.suppress(Exception):  # it may want more rows
                far += _far("a batch", _held(loader.collate_fn([row])))
    held = list(_held(dataset))
    far += _far("the data set", held)
    if far and workers > 0:
        return Verdict.FAIL(
            f"{listed(far)}, with {workers} workers: they cannot use the parent's device",
            "yield tensors on the CPU and move each batch (accelerate's loader does), or "
            "num_workers=0",
        )
    # Asked only if there are workers: it fixes the process's start method.
    copied = [words for part in held if (words := _copied(part, loader))] if workers > 0 else []
    if copied:
        return Verdict.WARN(
            f"each of {workers} workers copies {listed(copied)}",
            "a tensor, or a memory-mapped file (numpy.memmap, Arrow) that each worker opens itself",
        )
    far += _far("collate_fn", _held(loader.collate_fn))  # it may leave them unused
    if far:
        return Verdict.WARN(listed(far), "yield tensors on the CPU: else each row is copied alone")
    return Verdict.PASS(
        f"a row, a batch and what the data set holds are on the CPU; {workers} workers"
    )


def _far(owner: str, held: Iterable[Any]) -> list[str]:
    """Describe the tensors among `held`, what `owner` holds, that are not on the CPU."""
    far = [tensor for tensor in _tensors(held) if tensor.device.type != "cpu"]
    return [f"{owner} holds a tensor {list(each.shape)} on {each.device}" for each in far]


def _copied(part: Any, loader: DataLoader[Any]) -> str:
    """Describe what a worker copies, if anything: collections of objects (reference counts defeat
    copy-on-write), and arrays unless it is forked; torch puts tensors into shared memory.
    """
    has_objects = isinstance(part, np.ndarray) and part.dtype == object and part.size > LONG_LIST
    if isinstance(part, list | tuple | dict | set) or has_objects:
        return f"a {type(part).__name__} of {len(part):,}"
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    copies = isinstance(part, np.ndarray) and part.nbytes > LARGE_BYTES and method != "fork"
    return f"an array of {part.nbytes / 2**20:.0f} MiB" if copies else ""


@check("data set and model")
def shared_modules(dataset: Any, model: nn.Module) -> Finding:
    """Look for parameters that a data set and a model both hold."""
    inside = {tensor.data_ptr() for tensor in _tensors(_held(dataset)) if _has_memory(tensor)}
    shared = [n for n, p in model.named_parameters() if _has_memory(p) and p.data_ptr() in inside]
    if shared:
        return Verdict.FAIL(
            f"the data set holds {len(shared)} of the model's parameters: {listed(shared)}; its "
            "workers keep the weights from when they were forked, and wrapping replaces them",
            "encode in the model's forward pass, or give the data set a frozen copy "
            "(copy.deepcopy(encoder).eval().requires_grad_(False))",
        )
    return Verdict.PASS("they share no parameter")


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not hasattr(tensor, "to_local")
    return plain and tensor.numel() > 0 and tensor.data_ptr() != 0  # 0: meta, or freed


@check("views and ties")
def aliased_parameters(model: nn.Module, sharded: bool = False) -> Finding:
    """Look for different parameters that share memory, and for tied ones.

    Args:
        model: not wrapped yet.
        sharded: whether it will be: tied parameters must then be in the same FSDP unit.
    """
    named = model.named_parameters(remove_duplicate=False)
    held = sorted((p.data_ptr(), name, p) for name, p in named if _has_memory(p))
    views: list[str] = []
    ties: list[str] = []
    for number, (_, one, first) in enumerate(held, start=1):
        _, end = byte_bounds(_place(first))
        for start, other, second in held[number:]:
            if start >= end:
                break
            if first is second:
                ties.append(f"{one} = {other}")
            elif np.shares_memory(_place(first), _place(second)):
                views.append(f"{one} = {other}")
    if views:
        return Verdict.FAIL(
            f"views of the same memory: {listed(views)}: sharding separates them, and they drift "
            "apart",
            "one nn.Parameter used in both places (module_b.weight = module_a.weight)",
        )
    if ties and sharded:
        return Verdict.WARN(
            f"tied: {listed(ties)}",
            "under FSDP both must be in the same wrapped unit: keep them in the root",
        )
    return Verdict.PASS(f"tied: {listed(ties)}" if ties else "each parameter has its own memory")


def _place(tensor: torch.Tensor) -> NDArray[np.void]:
    """Return an array over a tensor's memory on any device, to compare addresses, not to read."""
    width = tensor.element_size()
    interface = {
        "data": (tensor.data_ptr(), False), "typestr": f"|V{width}", "shape": tuple(tensor.shape),
        "strides": tuple(width * stride for stride in tensor.stride()), "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


@check("operations in place")
def in_place(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Finding:
    """Find in-place changes of parameters, or of what the backward pass needs."""
    try:
        with untouched(model), torch.autograd.set_detect_anomaly(True, check_nan=False):
            trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            before = [(n, p, digest(p)) for n, p in trained]  # an EMA teacher may change
            value = loss()
            changed = [name for name, p, content in before if digest(p) != content]
            gradients_of(model, lambda: torch.autograd.backward(value))
    except (RuntimeError, ValueError) as error:
        if "inplace" not in str(error) and "in-place" not in str(error):
            return Verdict.SKIP(f"parameters or loss could not be read: {error}")
        return Verdict.FAIL(
            str(error).split(". Hint")[0].strip(),
            "write x = x + y in place of x += y there; anomaly mode prints the line",
        )
    if changed:
        return Verdict.FAIL(
            f"the forward pass changes parameters: {listed(changed)}",
            "compute with a copy: only the optimizer's step may change parameters",
        )
    return Verdict.PASS(f"{len(before)} parameters and all saved activations are as they were")
