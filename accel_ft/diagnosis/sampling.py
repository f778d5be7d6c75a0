"""Who reads what: every rank the same rows, the same order each epoch, rows counted twice; measured
by what the loader yields, not by how it is built.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler

from accel_ft.diagnosis.finding import Finding, Verdict, check, gather, listed
from accel_ft.diagnosis.gradients import holders, own_random_numbers
from accel_ft.diagnosis.replicas import digest, leaves

DRAWN_WITH_REPLACEMENT = 0.45  # share of the rows that is left out, and some more: 1 / e
SHARD = (
    "accelerator.prepare(loader), or DataLoader(sampler=DistributedSampler(dataset)), after the "
    "process group exists"
)


def row_ids(batch: Any) -> list[Any]:
    """Return a hash of each row of a batch of tensors, however nested; equal rows, equal hashes.

    Padding that an attention_mask tells is left out. Rows that are augmented, or padded without
    one, have another hash each time: give the loader's rows numbers and pass `ids`.
    """
    parts = [part for _, part in leaves(batch, "")]
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.ndim > 0]
    rows = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor):
        padded = [tensor.shape == mask.shape for tensor in rows]
        return [
            "".join(digest(p[m.bool()] if cut else p) for p, cut in zip(row, padded, strict=True))
            for m, *row in zip(mask, *rows, strict=True)
        ]
    return ["".join(map(digest, row)) for row in zip(*rows, strict=True)]


class _Read(NamedTuple):
    """What one rank read: names of its rows, and its largest batch; or why it could not."""

    names: list[Any]
    batch: int = 0
    error: str = ""


def _read(loader: Iterable[Any], ids: Callable[[Any], list[Any]]) -> list[_Read]:
    """Read a loader to its end on every rank. Collective, also where a rank cannot."""
    names: list[Any] = []
    largest, fault = 0, ""
    try:
        for batch in loader:
            found = [name.tolist() if hasattr(name, "tolist") else name for name in ids(batch)]
            names += found
            largest = max(largest, len(found))
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return gather(_Read(names, largest, fault))


@check("training rows")
def training_sampling(
    loader: Iterable[Any],
    num_samples: int,
    ids: Callable[[Any], list[Any]] = row_ids,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> Finding:
    """Read two epochs of a training loader and compare the ranks. Collective.

    Args:
        loader: what this rank's loop iterates over.
        num_samples: rows of the whole data set.
        ids: gives the rows of a batch names that tell them apart.
        before_epoch: what the loop itself does first in each epoch, such as `set_epoch`.

    Returns:
        FAIL where ranks read the same rows, rows are missing, or both epochs have one order.
        The worse of the two epochs; the random numbers are as before, the epoch is 0.
        Rows that are left out or repeated at the end of an epoch, fewer than one batch of all
        ranks, are no fault.
    """
    epochs = []
    with own_random_numbers(loader):
        for epoch in range(2):
            before_epoch(epoch)
            epochs.append(_read(loader, ids))
        before_epoch(0)
    finding = _coverage(epochs[0], num_samples, loader)
    first, second = ([rank.names for rank in epoch] for epoch in epochs)
    empty = [rank for rank, names in enumerate(second) if first[rank] and not names]
    if empty:
        return Finding.failed(
            f"the second epoch has no rows on rank {listed(empty)}",
            "an iterator or generator is used up: make a new one in __iter__",
        )
    again = _coverage(epochs[1], num_samples, loader)
    if again.verdict is Verdict.FAIL and finding.verdict is not Verdict.FAIL:
        mend = f"set_epoch(epoch) on every rank; else {again.mend}"
        return Finding.failed(f"in the second epoch {again.measured}", mend)
    different = len({name for names in (*first, *second) for name in names})
    if finding.verdict is Verdict.PASS and different > num_samples:
        return Finding.skipped(
            f"rows change from epoch to epoch ({different} different ones of {num_samples}), as "
            "padded ones do: pass ids=, numbers of the rows"
        )
    if finding.verdict is Verdict.PASS and first == second and num_samples > len(first):
        return Finding.failed(
            "both epochs have one order",
            "loader.sampler.set_epoch(epoch) before each epoch, or shuffle=True; a stream: another "
            "order in each __iter__",
        )
    return finding


@check("evaluation rows")
def evaluation_sampling(
    loader: Iterable[Any], num_samples: int, ids: Callable[[Any], list[Any]] = row_ids
) -> Finding:
    """Read an evaluation loader once: each row must be counted once. Collective.

    Args:
        loader: what this rank's evaluation iterates over.
        num_samples: rows of the whole data set.
        ids: names of the rows of a batch whose predictions are counted.
    """
    ranks = _read(loader, ids)
    finding = _coverage(ranks, num_samples)
    counted = sum(len(rank.names) for rank in ranks)
    if finding.verdict is not Verdict.PASS or counted == num_samples:
        return finding
    about = f"{counted} predictions are counted of {num_samples} rows ({finding.measured})"
    if counted < num_samples:
        return Finding.failed(about, "drop_last=False")
    if hasattr(loader, "gradient_state"):  # accelerate's
        mend = "accelerator.gather_for_metrics(...) drops those that make the ranks even, inside "
        mend += "the loop and with batches of one size; else count each row's number once"
        return Finding.warned(about, mend)
    mend = "give each row its number, gather (number, prediction), and count each number once"
    return Finding.failed(about, mend)


def _coverage(  # noqa: PLR0911
    ranks: list[_Read], num_samples: int, loader: Any = None
) -> Finding:
    errors = [f"rank {n}: {rank.error}" for n, rank in enumerate(ranks) if rank.error]
    rows = [Counter(rank.names) for rank in ranks]  # how often each rank reads each
    readers = Counter(name for read in rows for name in read)  # how many ranks do
    shared = sum(count > 1 for count in readers.values())
    sizes = [read.total() for read in rows]
    total, different = sum(sizes), len(readers)
    room = sum(rank.batch for rank in ranks)  # what evening out, or dropping the end, may cost
    about = f"rows of each rank {listed(sizes, 8)}; {different} different ones of {num_samples}"
    if errors:
        return Finding.failed(f"cannot be read to the end: {listed(errors)}", "see the message")
    if total == 0:
        return Finding.skipped(
            "no tensors in the batches: pass ids=, the numbers of a batch's rows"
        )
    all_read_all = len(ranks) > 1 and total - num_samples > max(room, num_samples // 10)
    if len(ranks) > 1 and num_samples > max(rank.batch for rank in ranks):
        all_read_all |= all(len(read) == num_samples for read in rows)
    times = {count for read in rows for count in read.values()}
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_stream and not shared and len(times) == 1 < max(times) and total > num_samples + room:
        return Finding.failed(
            f"each rank reads its rows {max(times)} times an epoch; {about}",
            "each worker of an IterableDataset its share (torch.utils.data.get_worker_info())",
        )
    drawn_again = total - sum(map(len, rows)) > room
    much_shared = shared > max(room, num_samples // 10)
    if all_read_all or (much_shared and not drawn_again):
        return Finding.failed(
            f"the ranks read the same rows: {shared} on more than one; {about}", SHARD
        )
    if different > num_samples:
        return Finding.skipped(
            f"rows change each time they are read ({about}): pass ids=, numbers of the rows"
        )
    missing = num_samples - different
    by_weight = any(isinstance(each, WeightedRandomSampler) for each in holders(loader))
    is_drawn = by_weight and drawn_again and total >= num_samples  # any share may be left out
    is_much = total < num_samples - room or missing > DRAWN_WITH_REPLACEMENT * num_samples
    if missing > room and is_much and not is_drawn:
        return Finding.failed(
            f"{missing} rows are never read; {about}",
            "a sampler that covers the data set; rows that are equal: pass ids=, their numbers",
        )
    if missing > room:
        return Finding.warned(
            f"{missing} rows are never read, or equal another; {about}",
            "drawn with replacement? rows that are equal: pass ids=, numbers of the rows",
        )
    return Finding.passed(about)
