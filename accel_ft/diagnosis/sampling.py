"""Sampling faults: ranks that read the same rows, epochs of one order, rows counted twice; measured
by what the loader yields, not by how it is built.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from torch.utils.data import IterableDataset

from accel_ft.diagnosis.finding import Finding, Verdict, check, gather
from accel_ft.errors import listed
from accel_ft.runtime.guest import own_random_numbers

Ids = Callable[[Any], Iterable[Any]]
# For each rank: the ids of its rows, the size of its largest batch, its number of batches.
Ranks = list[tuple[list[Any], int, int]]
FEW_ROWS = 8  # on a rank: too few to judge the order
DRAWN_WITH_REPLACEMENT = 0.45  # share of rows left out: 1 / e, and a margin
SHARD = (
    "accelerator.prepare(loader), or DataLoader(sampler=DistributedSampler(dataset)), after the "
    "process group exists; and one seed on all ranks"
)


def _read(loader: Iterable[Any], ids: Ids) -> Ranks:
    """Read a loader to its end on every rank. Collective."""
    batches = [[n.tolist() if hasattr(n, "tolist") else n for n in ids(b)] for b in loader]
    return gather(([*chain(*batches)], max(map(len, batches), default=0), len(batches)))


@check("training rows")
def training_sampling(
    loader: Iterable[Any],
    num_samples: int,
    ids: Ids,
    before_epoch: Callable[[int], None] = lambda epoch: None,
) -> Finding:
    """Read two epochs of a training loader and compare the ranks. Collective.

    Args:
        loader: what this rank's loop iterates over.
        num_samples: rows of the whole data set.
        ids: returns the ids of a batch's rows: a tensor, or any hashable values.
        before_epoch: what the loop itself does first in each epoch, such as `set_epoch`.

    Returns:
        FAIL where ranks read the same rows, rows are missing, every rank reads each of its rows
        more than once, or both epochs have one order (of more than 8 rows a rank); WARN where some
        rows are read again, or a rank has more batches than another. Up to one batch a rank may be
        left out or repeated at the end of an epoch. A sampler that draws with replacement: FAIL
        where ranks draw the same rows, WARN where over 45 % are never drawn. The random state is
        restored and the epoch is 0, except the loader's own generator and accelerate's epoch count.
    """
    epochs = []
    with own_random_numbers():
        for epoch in range(2):
            before_epoch(epoch)
            epochs.append(_read(loader, ids))
        before_epoch(0)
    first, second = (_coverage(ranks, num_samples, loader) for ranks in epochs)
    severity = list(Verdict).index
    if severity(second.verdict) > severity(first.verdict):
        mend = f"set_epoch(epoch) on every rank, a new iterator in __iter__; else {second.mend}"
        return replace(second, measured=f"in the second epoch {second.measured}", mend=mend)
    # With few rows, an order may repeat by chance.
    is_many = num_samples > FEW_ROWS * len(epochs[0])
    if first.verdict is Verdict.PASS and epochs[0] == epochs[1] and is_many:
        return Verdict.FAIL(
            "both epochs have the same order",
            "loader.sampler.set_epoch(epoch) before each epoch, or shuffle=True; a stream: a new "
            "order in each __iter__",
        )
    counts = [batches for *_, batches in epochs[0]]
    if first.verdict is Verdict.PASS and len(set(counts)) > 1:
        return Verdict.WARN(
            f"batches of each rank {listed(counts, 8)}; {first.measured}",
            "use the same number on each, or ranks with more hang, or pair with the others' next "
            "epoch: drop the last ones, or repeat rows (DistributedSampler, accelerator.prepare); "
            "accelerator.join_uneven_inputs allows it",
        )
    return first


@check("evaluation rows")
def evaluation_sampling(loader: Iterable[Any], num_samples: int, ids: Ids) -> Finding:
    """Read an evaluation loader once: each row must be counted once. Collective.

    Args:
        loader: what this rank's evaluation iterates over.
        num_samples: rows of the whole data set.
        ids: returns the ids of a batch's rows whose predictions are counted: this rank's, or all
            ranks' if each counts the gathered ones. Identical ranks are judged as one.
    """
    with own_random_numbers():
        ranks = _read(loader, ids)
    are_alike = len(ranks) > 1 and all(rank == ranks[0] for rank in ranks)
    ranks = ranks[:1] if are_alike else ranks
    finding = _coverage(ranks, num_samples)
    if are_alike:
        finding = replace(finding, measured=f"all ranks count the same; {finding.measured}")
    counted = sum(len(numbers) for numbers, *_ in ranks)
    rows = {number for numbers, *_ in ranks for number in numbers}
    if finding.verdict is not Verdict.PASS or counted == num_samples == len(rows):
        return finding
    about = f"{counted} predictions are counted of {num_samples} rows ({finding.measured})"
    if counted < num_samples:
        return Verdict.FAIL(about, "drop_last=False")
    mend = "give each row its number, gather (number, prediction), and count each number once"
    if counted > num_samples and hasattr(loader, "gradient_state"):  # accelerate's
        gathers = "accelerator.gather_for_metrics(...) drops the rows that even out the ranks, "
        return Verdict.WARN(
            about, f"{gathers}if called in the loop, batches of one size; else {mend}"
        )
    return Verdict.FAIL(about, f"use a sampler that covers the data set once; else {mend}")


def _holders(loader: Any) -> Iterator[Any]:
    """Yield a loader and its samplers, those that Accelerate has wrapped as well."""
    if loader is not None:
        yield loader
        for name in ("sampler", "batch_sampler"):
            yield from _holders(getattr(loader, name, None))


def _coverage(  # noqa: PLR0911
    ranks: Ranks, num_samples: int, loader: Any = None
) -> Finding:
    rows = [Counter(numbers) for numbers, *_ in ranks]  # per rank: how often it reads each row
    readers = Counter(number for read in rows for number in read)  # how many ranks read each row
    shared = sum(count > 1 for count in readers.values())
    sizes, missing = [read.total() for read in rows], num_samples - len(readers)
    again = sum(sizes) - sum(map(len, rows))
    largest = [batch for _, batch, _ in ranks]
    room = sum(largest)  # rows that padding may repeat, or drop_last leave out
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        room *= max(getattr(loader, "num_workers", 0), 1)  # each worker has a last batch of its own
    about = f"rows of each rank {listed(sizes, 8)}; {len(readers)} different ones of {num_samples}"
    if any(getattr(each, "replacement", False) for each in _holders(loader)):
        if len({tuple(numbers) for numbers, *_ in ranks}) < len(ranks):
            mend = "accelerator.prepare(loader), or another seed of its sampler on each rank"
            return Verdict.FAIL(f"ranks draw the same rows; {about}", mend)
        if missing <= DRAWN_WITH_REPLACEMENT * num_samples:
            return Verdict.PASS(f"drawn with replacement; {about}")
        return Verdict.WARN(f"{missing} rows are never drawn; {about}", "check for weights of 0")
    is_whole = min(map(len, rows)) == num_samples > max(largest) and len(rows) > 1
    if is_whole or (shared > room and (again == 0 or sum(sizes) > num_samples + room)):
        return Verdict.FAIL(
            f"the ranks read the same rows: {shared} on more than one; {about}", SHARD
        )
    seems_drawn = 10 * again > num_samples and abs(sum(sizes) - num_samples) <= room < missing
    if (again > room or seems_drawn) and missing <= DRAWN_WITH_REPLACEMENT * num_samples:
        alike = all(min(read.values(), default=0) > 1 for read in rows)
        return (Verdict.FAIL if alike else Verdict.WARN)(
            f"{again} times a rank reads a row again, {missing} are never read; {about}",
            "normal if drawn with replacement; else give each worker of an IterableDataset its "
            "share (torch.utils.data.get_worker_info())",
        )
    if missing > room:
        return Verdict.FAIL(
            f"{missing} rows are never read; {about}",
            "a sampler that covers the data set, and only one that shards it: DistributedSampler "
            "(or the stream itself) or accelerator.prepare, not both",
        )
    if missing < 0:
        return Verdict.FAIL(about, "keep each row's id the same, and count all in num_samples")
    return Verdict.PASS(about)
