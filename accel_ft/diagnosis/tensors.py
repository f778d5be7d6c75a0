"""Tensors where they do not belong; found by looking at objects and by running."""

import contextlib
import dis
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, pairwise
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_ft.diagnosis.finding import Finding, Verdict, check, listed
from accel_ft.diagnosis.gradients import gradients_of, own_random_numbers, untouched
from accel_ft.diagnosis.replicas import digest

LARGE_BYTES = 64 * 2**20
LONG_LIST = 1_000_000
PICKLING = ("__reduce__", "__getstate__")


def _parts(
    value: Any, path: str, seen: set[int] | None = None, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield tensors, arrays, modules and long lists below an object, with the way to each."""
    seen = set() if seen is None else seen
    if id(value) in seen or depth > 6 or len(seen) > LONG_LIST:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor | nn.Module | np.ndarray):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in islice(value.items(), 64):
            yield from _parts(each, f"{path}[{key!r}]", seen, depth + 1)
    elif isinstance(value, list | tuple):
        if len(value) > LONG_LIST:
            yield path, value
        for number, each in enumerate(value[:64]):
            yield from _parts(each, f"{path}[{number}]", seen, depth + 1)
    elif not isinstance(value, type | ModuleType):
        about = vars(type(value))  # it may say itself what of its arrays a worker gets
        says = any(isinstance(about.get(name), FunctionType) for name in PICKLING)
        for key, each in _attributes(value):
            if not (says and isinstance(each, np.ndarray)):
                yield from _parts(each, f"{path}.{key}", seen, depth + 1)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds by name; of a function, what it took along."""
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    names = [*getattr(value, "__dict__", ()), *slots]
    if isinstance(value, partial):
        names += ["func", "args", "keywords"]
    elif isinstance(value, MethodType):
        names.append("__self__")
    elif isinstance(value, FunctionType):
        code, around = value.__code__, value.__globals__
        read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
        yield from ((name, around[name]) for name in sorted(read & around.keys()))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # of what is not defined yet
                yield name, cell.cell_contents
    for name in names:
        with contextlib.suppress(Exception):  # a property of somebody's
            yield name, getattr(value, name)


def _tensors(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among parts, and the parameters of the modules."""
    for path, part in parts:
        if isinstance(part, nn.Module):
            yield from ((f"{path}.{name}", p) for name, p in part.named_parameters())
        elif isinstance(part, torch.Tensor):
            yield path, part


@check("tensors of the data set")
def dataset_tensors(loader: DataLoader[Any]) -> Finding:
    """Look for tensors of an accelerator, and for what each worker would copy, in what a loader's
    data set yields and holds, and in what its `collate_fn` makes of a row: one row is read, of a
    stream the first.
    """
    dataset, workers = loader.dataset, loader.num_workers
    yielded: list[tuple[str, Any]] = []
    with own_random_numbers(loader):
        for row in islice(_rows(loader), 1):
            yielded += _parts(row, "sample")
            with contextlib.suppress(Exception):  # a collate_fn that wants more rows
                yielded += _parts(loader.collate_fn([row]), "batch")
    held = list(_parts(dataset, "dataset"))
    far = _far([*yielded, *held])
    if far and workers > 0:
        return Verdict.FAIL(
            f"{listed(far)}, with {workers} workers: they cannot use the parent's device",
            "yield tensors on the CPU and move each batch (accelerate's loader does), or "
            "num_workers=0",
        )
    copied = [words for path, part in held if (words := _copied(path, part, loader))]
    if copied and workers > 0:
        return Verdict.WARN(
            f"each of {workers} workers copies {listed(copied)}",
            "a tensor, or a memory-mapped file (numpy.memmap, Arrow) that each worker opens itself",
        )
    far += _far(_parts(loader.collate_fn, "collate_fn"))  # which may leave it alone
    if far:
        return Verdict.WARN(listed(far), "yield tensors on the CPU: each row is a copy of its own")
    return Verdict.PASS(
        f"a row, a batch and what the data set holds are on the CPU; {workers} workers"
    )


def _far(parts: Iterable[tuple[str, Any]]) -> list[str]:
    """The tensors among parts that are not on the CPU."""
    return [f"{name} on {t.device}" for name, t in _tensors(parts) if t.device.type != "cpu"]


def _rows(loader: DataLoader[Any]) -> Iterator[Any]:
    """The rows of a loader's data set, by the keys that its sampler gives."""
    if isinstance(loader.dataset, IterableDataset):
        yield from loader.dataset
    elif loader.batch_sampler is None:
        yield from (loader.dataset[key] for key in loader.sampler)
    else:
        yield from (loader.dataset[key] for batch in loader.batch_sampler for key in batch)


def _copied(path: str, part: Any, loader: DataLoader[Any]) -> str:
    """What a worker copies: lists (reference counts), and arrays where it is not forked; tensors
    torch puts into shared memory.
    """
    if isinstance(part, list | tuple):
        return f"{path}, a list of {len(part):,}"
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    copies = isinstance(part, np.ndarray) and part.nbytes > LARGE_BYTES and method != "fork"
    return f"{path}, {part.nbytes / 2**20:.0f} MiB" if copies else ""


@check("data set and model")
def shared_modules(dataset: Any, model: nn.Module) -> Finding:
    """Look for parameters that a data set and a model both hold."""
    held = _tensors(_parts(dataset, "dataset"))
    inside = {tensor.data_ptr() for _, tensor in held if _has_memory(tensor)}
    shared = [n for n, p in model.named_parameters() if _has_memory(p) and p.data_ptr() in inside]
    if shared:
        return Verdict.FAIL(
            f"the data set holds {len(shared)} of the model's parameters: {listed(shared)}; its "
            "workers see the weights of the moment they were forked, and wrapping moves them away",
            "encode in the model's forward pass, or give the data set a frozen copy "
            "(copy.deepcopy(encoder).eval().requires_grad_(False))",
        )
    return Verdict.PASS("they share no parameter")


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not hasattr(tensor, "to_local")
    return plain and tensor.numel() > 0 and tensor.data_ptr() != 0  # 0: meta, or freed


@check("views and ties")
def aliased_parameters(model: nn.Module, sharded: bool = False) -> Finding:
    """Look for parameters that are different objects in the same bytes, and for tied ones.

    Args:
        model: not wrapped yet.
        sharded: whether it is to be, which tied parameters must be fit for.
    """
    named = model.named_parameters(remove_duplicate=False)
    held = [(p.data_ptr(), name, p) for name, p in named if _has_memory(p)]
    views: list[str] = []
    ties: list[str] = []
    for (_, one, first), (_, other, second) in pairwise(sorted(held, key=lambda each: each[:2])):
        if first is second:
            ties.append(f"{one} = {other}")
        elif np.shares_memory(_place(first), _place(second)):
            views.append(f"{one} = {other}")
    if views:
        return Verdict.FAIL(
            f"views of one memory: {listed(views)}: sharding gives each a share of its own, and "
            "they drift apart",
            "one nn.Parameter used in both places (module_b.weight = module_a.weight)",
        )
    if ties and sharded:
        return Verdict.WARN(
            f"tied: {listed(ties)}",
            "under FSDP both must be in the same wrapped unit: leave them to the root",
        )
    return Verdict.PASS(f"tied: {listed(ties)}" if ties else "each parameter has its own memory")


def _place(tensor: torch.Tensor) -> NDArray[np.void]:
    """The bytes of a tensor on any device, as numpy compares places: its content is not read."""
    width = tensor.element_size()
    interface = {
        "data": (tensor.data_ptr(), False), "typestr": f"|V{width}", "shape": tuple(tensor.shape),
        "strides": tuple(width * stride for stride in tensor.stride()), "version": 3,
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _content(p: torch.Tensor) -> str:
    with contextlib.suppress(Exception):  # it has none, or in no layout that is known
        return digest(p)
    return ""


@check("operations in place")
def in_place(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Finding:
    """Find what changes parameters, or what the backward pass needs, in place."""
    try:
        with untouched(model), torch.autograd.set_detect_anomaly(True, check_nan=False):
            trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            before = [(n, p, p._version, _content(p)) for n, p in trained]  # no teacher of means
            value = loss()
            changed = [  # through .data, the version stays
                name
                for name, p, version, content in before
                if p._version != version or _content(p) != content
            ]
            gradients_of(model, lambda: torch.autograd.backward(value))
    except RuntimeError as error:
        if "inplace" not in str(error) and "in-place" not in str(error):
            return Verdict.SKIP(f"the loss could not be computed: {error}")
        return Verdict.FAIL(
            str(error).split(". Hint")[0].strip(),
            "write x = x + y in place of x += y there; anomaly mode prints the line",
        )
    if changed:
        return Verdict.FAIL(
            f"the forward pass changes parameters: {listed(changed)}",
            "compute with a copy: parameters change in the optimizer's step alone",
        )
    return Verdict.PASS(f"{len(before)} parameters and all saved activations are as they were")
