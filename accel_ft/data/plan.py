"""The plan: which sample is in which global batch, at any position of a run, for any number of
ranks.

It is a pure function of (seed, epoch, lengths, global batch size). It does not depend on ranks or
processes, keeps at most two windows in memory, and computes any position directly: a resume is an
index, not a replay.

Legend: n samples, G global batch size, S steps (updates) per epoch = ceil(n / G), M micro-batches
    per update = ranks x accumulation steps. Each epoch shuffles 0..n-1 with a keyed permutation.
    The first floor(n / G) * G places are cut into windows of `WINDOW_STEPS` global batches. Each
    window is sorted by length and cut into global batches of G neighbours (little padding); the
    order of these batches is shuffled. The remaining n mod G samples are the short last batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

WINDOW_STEPS = 64  # sorted together: 64 x 32 samples leave 2 % padding, before width rounding
FEISTEL_ROUNDS = 8


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit words, any shape (finalizer of SplitMix64; Steele, Lea, Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=256)
def combine_key(*parts: int) -> np.uint64:
    """Hash integers, in order, to one 64-bit key."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        word = np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64)
        key = mix(key + np.uint64(0x9E3779B97F4A7C15) ^ mix(word + np.uint64(0x9E3779B97F4A7C15)))
    return np.uint64(key[0])


def permute(index: Ids, size: int, key: np.uint64) -> Ids:
    """Map `index` through a keyed random permutation of 0..size-1, without building the whole
    permutation.

    Args:
        index: int64 [k], each in 0..size-1.
        size: of the permuted range, at least 1.
        key: different keys give unrelated permutations.

    Returns:
        int64 [k].

    Source: a balanced Feistel network on the next even number of bits, repeated until the value is
        in range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    out = np.asarray(index).astype(np.uint64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_number in range(FEISTEL_ROUNDS):
            round_key = combine_key(int(key), round_number)
            left, right = right, left ^ (mix(right + round_key) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out.astype(np.int64)


@dataclass(eq=False)
class Plan:
    """Sample ids of every global batch of a run.

    Args:
        num_samples: n, at least 1.
        global_batch_size: G, samples of one update over all ranks.
        seed: decides every order.
        lengths: maps sample ids [k] to token counts [k], for example an array's `__getitem__`.
        groups: True puts samples of similar length into an update; False does not sort windows, so
            that an update has samples of any length.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    lengths: Callable[[Ids], NDArray[np.integer]]
    groups: bool = True

    def __post_init__(self) -> None:
        if min(self.num_samples, self.global_batch_size) < 1:
            raise ValueError("num_samples and global_batch_size must be at least 1")
        self.num_full_steps = self.num_samples // self.global_batch_size  # per epoch
        self.steps_per_epoch = -(-self.num_samples // self.global_batch_size)
        self._window = lru_cache(maxsize=2)(self._make_window)

    def __reduce__(self) -> tuple[type["Plan"], tuple[object, ...]]:
        return Plan, tuple(getattr(self, field.name) for field in fields(self))

    def global_batch(self, step: int) -> Ids:
        """Return the sample ids of update `step` (0, 1, ... over the whole run), shortest text
        first.

        Returns:
            int64 [G], or [n mod G] for the short last batch of an epoch.
        """
        epoch, step = divmod(step, self.steps_per_epoch)
        window, row = divmod(step, WINDOW_STEPS)
        if step < self.num_full_steps:
            ids: Ids = self._window(epoch, window)[row]
            return ids
        start = self.num_full_steps * self.global_batch_size
        return self._by_length(epoch, start, self.num_samples)

    def micro_batches(self, step: int, num_micro_batches: int) -> list[Ids]:
        """Split update `step` into M micro-batches of similar lengths and nearly equal size. Some
        may be empty.

        The list is in (micro-step, rank) order: with N ranks, rank r takes numbers r, r + N,
        r + 2N, ...
        """
        numbers = range(num_micro_batches)
        return [self.micro_batch(step, number, num_micro_batches) for number in numbers]

    def micro_batch(self, step: int, number: int, num_micro_batches: int) -> Ids:
        """Return one of an update's micro-batches, int64 [k]."""
        ids = self.global_batch(step)
        size, rest = divmod(len(ids), num_micro_batches)  # the first `rest` get one more
        start = number * size + min(number, rest)
        return ids[start : start + size + (number < rest)]

    def _by_length(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the ids at places start..stop-1 of the epoch's permutation, sorted by length."""
        places = np.arange(start, stop, dtype=np.int64)
        ids = permute(places, self.num_samples, combine_key(self.seed, epoch))
        return ids[np.argsort(self.lengths(ids), kind="stable")]

    def _make_window(self, epoch: int, window: int) -> Ids:
        """Return a window's global batches, int64 [<= WINDOW_STEPS, G], in shuffled order."""
        size, first = self.global_batch_size, window * WINDOW_STEPS
        stop = min(first + WINDOW_STEPS, self.num_full_steps)
        if not self.groups:
            steps = range(first, stop)
            return np.stack(
                [self._by_length(epoch, step * size, (step + 1) * size) for step in steps]
            )
        batches = self._by_length(epoch, first * size, stop * size).reshape(-1, size)
        numbers = np.arange(len(batches), dtype=np.uint64)
        sort_keys = mix(numbers + combine_key(self.seed, epoch, window))
        return batches[np.argsort(sort_keys, kind="stable")]


def eval_batches(lengths: NDArray[np.integer], batch_size: int, multiple: int) -> list[Ids]:
    """Cut all samples into batches of similar length, longest first, for one pass whose order does
    not matter.

    Args:
        lengths: tokens of each sample, padded to an allowed width, [n].
        batch_size: samples in a batch of the longest texts; a batch of shorter texts holds more
            samples, up to the same number of tokens.
        multiple: empty batches are appended until the count is divisible by it, so that all ranks
            run equally many.

    Returns:
        list of int64 [k]; `multiple` changes neither the other batches nor their order.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    budget = batch_size * int(lengths.max(initial=1))
    batches, start = [], 0
    while start < len(order):
        size = budget // max(int(lengths[order[start]]), 1)
        batches.append(order[start : start + size])
        start += size
    return batches + [order[:0]] * (-len(batches) % multiple)
