"""Who reads what: every rank the same rows, the same order each epoch, rows counted twice.

What you see: N GPUs, no faster per epoch and no better than one; or an accuracy that changes with
the number of ranks. What it is: a DataLoader that was not given a distributed sampler (or was built
before the process group, when there was but one rank), so that each rank reads all rows; a sampler
whose `set_epoch` is never called; rows that a distributed sampler repeats to make the ranks even,
counted in an evaluation. It is measured by what the loader yields, not by how it is built.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accel_ft.diagnosis.finding import Finding, Verdict, failed, gather, listed, passed, warned

TRAINING, EVALUATION = "training rows", "evaluation rows"
SHARD = (
    "accelerator.prepare(loader), or DataLoader(sampler=DistributedSampler(dataset)), after the "
    "process group exists"
)


def row_ids(batch: Any) -> list[Any]:
    """Return a hash of each row of a batch of tensors, however nested; equal rows, equal hashes."""
    tensors = list(_tensors(batch))
    rows = len(tensors[0]) if tensors else 0
    return [
        hashlib.blake2b(
            b"".join(tensor[row].cpu().numpy().tobytes() for tensor in tensors), digest_size=8
        ).hexdigest()
        for row in range(rows)
    ]


def _tensors(batch: Any) -> Iterable[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


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
        FAIL where ranks read the same rows or rows are missing, or both epochs have one order.
    """
    epochs = []
    for epoch in range(2):
        before_epoch(epoch)
        epochs.append(gather([name for batch in loader for name in ids(batch)]))
    finding = _coverage(TRAINING, epochs[0], num_samples)
    same_order = epochs[0] == epochs[1] and num_samples > len(epochs[0])
    if finding.verdict is not Verdict.FAIL and same_order:
        return failed(
            TRAINING,
            "both epochs have one order",
            "loader.sampler.set_epoch(epoch) before each epoch, or shuffle=True",
        )
    return finding


def evaluation_sampling(
    loader: Iterable[Any], num_samples: int, ids: Callable[[Any], list[Any]] = row_ids
) -> Finding:
    """Read an evaluation loader once: each row must be counted once. Collective.

    Args:
        loader: what this rank's evaluation iterates over.
        num_samples: rows of the whole data set.
        ids: names of the rows of a batch whose predictions are counted.
    """
    ranks = gather([name for batch in loader for name in ids(batch)])
    finding = _coverage(EVALUATION, ranks, num_samples)
    counted = sum(map(len, ranks))
    if finding.verdict is not Verdict.FAIL and counted > num_samples:
        return failed(
            EVALUATION,
            f"{counted} predictions are counted of {num_samples} rows: what makes the ranks even "
            f"counts twice ({finding.measured})",
            "give each row its number, gather (number, prediction), and count each number once",
        )
    return finding


def _coverage(check: str, ranks: list[list[Any]], num_samples: int) -> Finding:
    sizes = [len(rank) for rank in ranks]
    counts = Counter(name for rank in ranks for name in rank)
    owners = Counter(name for rank in ranks for name in set(rank))
    shared = [name for name, count in owners.items() if count > 1]
    twice = sum(counts.values()) - len(counts)
    about = f"rows of each rank {listed(sizes, 8)}; {len(counts)} different ones of {num_samples}"
    if len(ranks) > 1 and len(shared) > max(len(ranks), num_samples // 10):
        return failed(
            check, f"the ranks read the same rows: {len(shared)} on more than one; {about}", SHARD
        )
    if len(counts) < num_samples:
        return failed(
            check,
            f"{num_samples - len(counts)} rows are never read, or equal another; {about}",
            "drop_last=False, and a sampler that covers the data set; rows that are equal: "
            "give them ids",
        )
    if twice:
        return warned(
            check, f"{twice} rows are read twice to make the ranks even; {about}", "give them "
            "weight 0; in an evaluation count each row once",
        )  # fmt: skip
    return passed(check, about)
