"""Places in a split -> padded tensors, through a DataLoader that Accelerate shards.

Legend: B samples of a micro-batch, T tokens of its longest.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from accel_ft.data.plan import Ids, Plan
from accel_ft.data.splits import Split

Batch = dict[str, torch.Tensor]


class TrainBatches(Dataset[Batch]):
    """The micro-batches of a whole run, numbered in (step, micro step, rank) order."""

    def __init__(
        self, split: Split, plan: Plan, num_micro_batches: int, num_steps: int, pad: "Padding"
    ) -> None:
        self.split, self.plan, self.pad = split, plan, pad
        self.num_micro_batches, self.num_steps = num_micro_batches, num_steps

    def __len__(self) -> int:
        return self.num_steps * self.num_micro_batches

    def __getitem__(self, number: int) -> Batch:
        step, micro_batch = divmod(number, self.num_micro_batches)
        return collate(
            self.split, self.plan.micro_batches(step, self.num_micro_batches)[micro_batch], self.pad
        )


class EvalBatches(Dataset[Batch]):
    """The batches of one pass over a split."""

    def __init__(self, split: Split, batches: list[Ids], pad: "Padding") -> None:
        self.split, self.batches, self.pad = split, batches, pad

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return collate(self.split, self.batches[number], self.pad)


class Padding:
    """How token ids become a rectangle: pad token, side, and what the width is a multiple of."""

    def __init__(self, tokenizer: Any, multiple: int) -> None:
        self.token_id = int(tokenizer.pad_token_id)
        self.left = tokenizer.padding_side == "left"
        self.multiple = multiple

    def __call__(self, rows: list[Any]) -> Batch:
        """Pad rows of token ids to input_ids and attention_mask, int64 [B, T]."""
        width = -(-max(map(len, rows)) // self.multiple) * self.multiple
        input_ids = np.full((len(rows), width), self.token_id, np.int64)
        attention_mask = np.zeros((len(rows), width), np.int64)
        for row, ids in enumerate(rows):
            where = slice(width - len(ids), None) if self.left else slice(len(ids))
            input_ids[row, where] = ids
            attention_mask[row, where] = 1
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
        }


def collate(split: Split, places: Ids, pad: Padding) -> Batch:
    """Make the tensors of one micro-batch.

    An empty one, which keeps all ranks in step, becomes the split's first sample with weight 0 and
    place -1.

    Returns:
        input_ids, attention_mask: int64 [B, T]; labels: int64 [B]; weights: float32 [B], what a
            sample counts in the loss; places: int64 [B].
    """
    filler = len(places) == 0
    real = np.zeros(1, np.int64) if filler else places
    batch = pad(split.tokens(real))
    batch["labels"] = torch.from_numpy(split.labels(real))
    batch["weights"] = torch.full((len(real),), 0.0 if filler else 1.0)
    batch["places"] = torch.from_numpy(np.full(1, -1) if filler else np.array(places))
    return batch


def make_loader(
    batches: Dataset[Batch], start: int, num_workers: int, pin_memory: bool
) -> DataLoader[Batch]:
    """Return a loader of `batches` from number `start` on, one at a time, for `Accelerator.prepare`
    to shard.

    Its own generator keeps it from drawing on torch's: an iterator made at a resume leaves
    dropout's numbers alone.
    """
    numbers: Any = range(start, len(batches))  # type: ignore[arg-type]
    first: Callable[[list[Batch]], Batch] = itemgetter(0)
    return DataLoader(
        batches,
        batch_size=1,
        sampler=numbers,
        collate_fn=first,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )
