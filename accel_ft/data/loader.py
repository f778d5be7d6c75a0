"""Places in a split -> padded tensors, through a DataLoader that Accelerate shards.

Legend: B samples of a micro-batch, T tokens per row, padding included.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from multiprocessing import get_start_method, resource_tracker
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from accel_ft.data.plan import Ids, Plan, eval_batches
from accel_ft.data.splits import Split
from accel_ft.errors import stop_signals_blocked

Batch = dict[str, torch.Tensor]


class Batches(Dataset[Batch]):
    """A split's micro-batches, indexed by number.

    Args:
        split: source of the samples.
        pad: pads a micro-batch's rows to one width.
        count: number of micro-batches.
        places: maps the number of a micro-batch, from 0, to its places in the split; picklable.
    """

    def __init__(
        self, split: Split, pad: "Padding", count: int, places: Callable[[int], Ids]
    ) -> None:
        self.split, self.pad, self.count, self.places = split, pad, count, places

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Batch:
        return collate(self.split, self.places(number), self.pad)


def train_places(plan: Plan, num_micro_batches: int, number: int) -> Ids:
    """Return the places of a run's micro-batch; they are numbered by (step, micro-step, rank)."""
    return plan.micro_batch(*divmod(number, num_micro_batches), num_micro_batches)


class Padding:
    """Pads rows of token ids to one width: with the pad token, on its side, to an allowed width.

    Args:
        tokenizer: of the model.
        longest: upper bound of the tokens in a row; the greatest width.
        device: decides the widths. An accelerator gets multiples of 8, which suit its matrix units.
            A CPU gets finer ones for short rows (multiples of 2 up to 32 tokens, of 4 up to 64, of
            8 beyond), but not every one: its library caches some MB of kernels per width. The least
            is 8: Funnel and CANINE, which pool neighbouring tokens, fail on fewer than 5.
        few: allow only two widths per power of two, because each new width costs a compilation.
    """

    def __init__(
        self, tokenizer: Any, longest: int, device: torch.device, few: bool = False
    ) -> None:
        self.token_id = int(tokenizer.pad_token_id)
        self.left = tokenizer.padding_side == "left"
        text = tokenizer("")["input_ids"] or [self.token_id]
        self.empty_text = np.array([text, [0] * len(text)], np.int32)
        self.eval_batch_size = 16 if device.type == "cpu" else 64
        steps = np.arange(8, longest + 8, 8, dtype=np.int64)
        if device.type == "cpu":
            steps = np.concatenate([steps, np.arange(8, 32, 2), np.arange(32, 64, 4)])
        if few:
            powers = 2 ** np.arange(4, max(longest, 16).bit_length() + 1)
            steps = np.concatenate([powers, powers // 2 * 3])
        self._widths = np.unique(np.minimum(steps, longest))

    def widths(self, lengths: NDArray[np.integer]) -> Ids:
        """Return the smallest allowed width for each length [k], int64 [k]."""
        return self._widths[np.searchsorted(self._widths, lengths)]

    def eval_batches(
        self, lengths: NDArray[np.integer], batch_size: int | None, num_ranks: int = 1
    ) -> list[Ids]:
        """Cut samples of these lengths into batches; see `eval_batches` in plan.py. The default
        batch size depends on the device, and shrinks for texts beyond 512 tokens.
        """
        widths = self.widths(lengths)
        at_once = self.eval_batch_size * 512 // max(512, int(widths.max(initial=1)))
        return eval_batches(widths, batch_size or max(at_once, 1), num_ranks)

    def __call__(self, rows: list[NDArray[np.int32]]) -> Batch:
        """Pad rows of token ids [1, T_i], or ids and types [2, T_i], to attention_mask, input_ids
        and, where there are types, token_type_ids, int64 [B, T].
        """
        width = int(self.widths(np.array([max(ids.shape[1] for ids in rows)]))[0])
        padded = np.zeros((1 + len(rows[0]), len(rows), width), np.int64)
        padded[1] = self.token_id
        for row, ids in enumerate(rows):
            length = ids.shape[1]
            where = slice(width - length, None) if self.left else slice(length)
            padded[0, row, where] = 1
            padded[1:, row, where] = ids
        names = ("attention_mask", "input_ids", "token_type_ids")[: len(padded)]
        tensors = torch.from_numpy(padded)
        return {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}


def collate(split: Split, places: Ids, pad: Padding) -> Batch:
    """Make the tensors of one micro-batch.

    An empty micro-batch keeps ranks in step: it becomes one empty text, weight 0 and place -1.

    Returns:
        input_ids, attention_mask: int64 [B, T]; labels: as `Split.labels` returns them; weights:
            float32 [B], the weight of each sample in the loss; places: int64 [B].
    """
    real = places if len(places) else np.zeros(1, np.int64)
    rows, labels, weights = split.tokens(real), split.labels(real), split.weights(real)
    if len(places) == 0:
        rows, labels, weights = [pad.empty_text[: len(rows[0])]], 0 * labels, 0 * weights
        places = np.full(1, -1)
    return pad(rows) | {
        "labels": torch.from_numpy(labels),
        "weights": torch.from_numpy(weights.astype(np.float32)),
        "places": torch.from_numpy(np.array(places)),
    }


def make_loader(
    accelerator: Accelerator, batches: Batches, start: int = 0, num_workers: int = 0
) -> Any:
    """Return a prepared loader of `batches` from number `start` on: rank r of N gets every N-th.

    By default a DataLoader's iterator draws its seed from torch's default generator. This loader
    has its own generator, so that creating it at a resume does not shift the dropout masks.
    """
    on_gpu = accelerator.device.type == "cuda"
    # NCCL runs threads by then; a fork copies the locks they hold, but not the threads.
    forks_badly = num_workers > 0 and on_gpu and accelerator.num_processes > 1
    loader = DataLoader(
        batches,
        batch_size=1,  # an item is a micro-batch; accelerate shards the batch sampler
        sampler=range(start, len(batches)),
        collate_fn=itemgetter(0),
        num_workers=num_workers,
        pin_memory=on_gpu,
        generator=torch.Generator(),
        multiprocessing_context="spawn" if forks_badly else None,
    )
    return accelerator.prepare_data_loader(loader)


def read(loader: Any) -> Generator[Batch]:
    """Yield a loader's batches. Stop signals do not kill its workers: an update would be lost."""
    spawns = loader.multiprocessing_context is not None or get_start_method() != "fork"
    if loader.num_workers and spawns:
        resource_tracker.ensure_running()  # first: its start unblocks SIGINT and SIGTERM
    with closing(iter(loader)) as batches:
        with stop_signals_blocked():
            first = list(islice(batches, 1))  # starts the workers
        yield from first
        yield from batches
