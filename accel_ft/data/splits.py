"""The job's rows: training, validation and test split, all with the same labels.

A split is a range of a store's rows under a fixed random permutation: a validation split that is
cut off and a `max_train_samples` draw cost no memory, and are the same rows in every run.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_ft.config import DataConfig
from accel_ft.data.plan import Ids, combine_key, permute
from accel_ft.data.sources import Source, file_source, hub_sources
from accel_ft.data.tokenize import TokenStore, tokenize
from accel_ft.errors import ConfigError, DataError, nearest

logger = logging.getLogger(__name__)

DEFAULT_DATASET = "fancyzhx/ag_news"
VALIDATION_SHARE = 0.1
VALIDATION_MAX = 2000
COMPARED_TEXTS = 5_000_000
HASHES_AT_ONCE = 1_000_000
SPLIT_KEY = combine_key(0xACCE1F7)  # fixed: other seeds train on the same rows


class Split:
    """Some rows of a store. A sample's place is its number in the split, 0..n-1; its id, its row in
    the store.

    Args:
        store: all rows.
        label_ids: label id of each of the store's label codes.
        start, stop: places in the permuted order of rows.
    """

    def __init__(
        self, store: TokenStore, label_ids: NDArray[np.int64], start: int, stop: int
    ) -> None:
        self.store, self.label_ids, self.start, self.stop = store, label_ids, start, stop
        self.class_weights = np.ones(label_ids.max() + 1)

    def __len__(self) -> int:
        return self.stop - self.start

    def ids(self, places: Ids) -> Ids:
        """Sample ids at places 0..n-1 of this split, int64 [k]."""
        if len(self) == len(self.store):
            return places
        return permute(places + self.start, len(self.store), SPLIT_KEY)

    def lengths(self, places: Ids) -> NDArray[np.int64]:
        """Numbers of tokens, int64 [k]."""
        return self.store.lengths(self.ids(places))

    def labels(self, places: Ids) -> NDArray[np.int64]:
        """Label ids, int64 [k]."""
        labels: NDArray[np.int64] = self.label_ids[self.store.label_codes(self.ids(places))]
        return labels

    def weights(self, places: Ids) -> NDArray[np.float64]:
        """What each sample counts in the loss, float64 [k]."""
        weights: NDArray[np.float64] = self.class_weights[self.labels(places)]
        return weights

    def text_hashes(self, places: Ids) -> NDArray[np.uint64]:
        """Hashes of the texts, uint64 [k]."""
        return self.store.text_hashes(self.ids(places))

    def tokens(self, places: Ids) -> list[NDArray[np.int32]]:
        """Token ids of each, int32 [T_i]."""
        return [self.store.tokens(row) for row in self.ids(places)]

    def fingerprint(self) -> str:
        """What the samples are, in words: content hash and range."""
        return f"{self.store.fingerprint[:16]}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Splits:
    """The job's rows and its label names, in the order of their ids."""

    label_names: list[str]
    train: Split
    validation: Split
    test: Split | None


def open_sources(config: DataConfig) -> dict[str, Source]:
    """Find the rows of each split that is given: keys among train, validation, test."""
    named = {
        "train": config.train_file,
        "validation": config.validation_file,
        "test": config.test_file,
    }
    files = {split: file_source(path) for split, path in named.items() if path is not None}
    if config.train_file is None and (config.dataset_name is not None or not files):
        return hub_sources(config.dataset_name or DEFAULT_DATASET, config.label_column) | files
    return files


def load_splits(config: DataConfig, tokenizer: Any, max_train_samples: int | None) -> Splits:
    """Read, check and tokenise the training, validation and test rows of a job.

    Raises:
        DataError, ConfigError: for what is wrong with them.
    """
    sources = open_sources(config)
    stores = {split: _store(source, config, tokenizer) for split, source in sources.items()}
    names = label_names(stores["train"])
    if len(names) < 2:
        raise DataError(
            f"{stores['train'].name}: every row has the label {names[0]!r}. Needed: two labels or "
            "more"
        )
    encoded = {split: (store, encode_labels(store, names)) for split, store in stores.items()}
    train, validation = _cut(encoded, config.max_eval_samples)
    train.stop = min(train.stop, train.start + (max_train_samples or len(train)))
    seen = len(set(validation.labels(np.arange(len(validation), dtype=np.int64)).tolist()))
    if seen < len(names):
        logger.warning(
            "the %d validation rows hold %d of the %d labels: their metrics say little",
            len(validation), seen, len(names),
        )  # fmt: skip
    test = Split(*encoded["test"], 0, len(stores["test"])) if "test" in encoded else None
    _warn_of_look_alikes(names)
    for name, split in (("validation", validation), ("test", test)):
        shared = 0 if split is None else count_shared_texts(train, split)
        if split is not None and shared:
            logger.warning(
                "%d of the %d %s texts are among the training texts too: their metrics flatter",
                shared, len(split), name,
            )  # fmt: skip
    return Splits(names, train, validation, test)


def count_shared_texts(train: Split, other: Split) -> int:
    """Return how many texts of `other` are among the (first five million) texts of `train`."""
    wanted = other.text_hashes(np.arange(len(other), dtype=np.int64))
    found = np.zeros(len(wanted), bool)
    for start in range(0, min(len(train), COMPARED_TEXTS), HASHES_AT_ONCE):
        stop = min(start + HASHES_AT_ONCE, len(train))
        found |= np.isin(wanted, train.text_hashes(np.arange(start, stop, dtype=np.int64)))
    return int(found.sum())


def _warn_of_look_alikes(names: list[str]) -> None:
    """Warn of labels that differ in case or spaces only: probably one label."""
    seen: dict[str, str] = {}
    for name in names:
        twin = seen.setdefault(" ".join(name.casefold().split()), name)
        if twin != name:
            logger.warning("the labels %r and %r are two; are they meant to be one?", twin, name)


def load_eval_split(
    config: DataConfig, tokenizer: Any, names: list[str], wanted: str | None
) -> tuple[str, Split]:
    """Read the rows to evaluate a finished model on.

    Args:
        names: label names of the model, by id.
        wanted: "test", "validation" or None for the first there is.

    Returns:
        The split's name and the split; a validation split is the same rows as in training.
    """
    sources = open_sources(config)
    if wanted is None:
        wanted = "test" if "test" in sources else "validation"
    if wanted == "test":
        if "test" not in sources:
            raise ConfigError(
                "split=test: the job names no test rows. Fix: --test_file FILE, or --split "
                "validation"
            )
        store = _store(sources["test"], config, tokenizer)
        return wanted, Split(store, encode_labels(store, names), 0, len(store))
    given = "validation" if "validation" in sources else "train"
    if given not in sources:
        raise ConfigError("split=validation: the job names none. Fix: --validation_file FILE")
    store = _store(sources[given], config, tokenizer)
    return wanted, _cut({given: (store, encode_labels(store, names))}, config.max_eval_samples)[1]


def _store(source: Source, config: DataConfig, tokenizer: Any) -> TokenStore:
    store = tokenize(
        source, config.text_column, config.label_column, tokenizer, config.max_seq_length
    )
    if store.num_empty_texts:
        empty, total = store.num_empty_texts, len(store)
        logger.warning("%s: %d of %d texts are empty; they are kept", source.name, empty, total)
    if store.num_cut_texts:
        logger.info(
            "%s: %d of %d texts are cut at max_seq_length=%d tokens",
            source.name, store.num_cut_texts, len(store), config.max_seq_length,
        )  # fmt: skip
    return store


def _cut(
    encoded: dict[str, tuple[TokenStore, NDArray[np.int64]]], max_eval_samples: int | None
) -> tuple[Split, Split]:
    """Training and validation split; the latter cut off the former where there is no source of its
    own.
    """
    if "train" not in encoded:
        store, label_ids = encoded["validation"]
        train = Split(store, label_ids, 0, 0)
    else:
        store, label_ids = encoded["train"]
        train = Split(store, label_ids, 0, len(store))
    if "validation" in encoded:
        store, label_ids = encoded["validation"]
        validation = Split(store, label_ids, 0, len(store))
    else:
        size = min(VALIDATION_MAX, max(1, round(len(train) * VALIDATION_SHARE)))
        if size == len(train):
            raise DataError(f"{train.store.name}: one row is too few to cut a validation split off")
        validation, train.start = Split(store, label_ids, 0, size), size
        logger.info("no validation rows given: %d cut off the %d training rows", size, len(store))
    validation.stop = min(validation.stop, max_eval_samples or validation.stop)
    return train, validation


def class_weights(
    wanted: str | tuple[float, ...] | None, train: Split, names: list[str]
) -> NDArray[np.float64]:
    """Return the weight of each label in the loss, float64 [C].

    Args:
        wanted: a weight each, "balanced" for n / (C x rows of the label), as scikit-learn has it,
            or None for 1 each.

    Raises:
        ConfigError: for another number of weights than labels, or a label without rows.
    """
    if wanted is None:
        return np.ones(len(names))
    if wanted == "balanced":
        labels = train.labels(np.arange(len(train), dtype=np.int64))
        counts = np.bincount(labels, minlength=len(names))
        if not counts.all():
            lost = [name for name, count in zip(names, counts, strict=True) if count == 0]
            raise ConfigError(f"class_weights=balanced: no training row has the label {lost[0]!r}")
        return len(train) / (len(names) * counts.astype(np.float64))
    if len(wanted) != len(names):
        raise ConfigError(
            f"class_weights={wanted}: {len(wanted)} weights for {len(names)} labels, "
            f"in this order: {', '.join(names)}"
        )
    return np.array(wanted, np.float64)


def label_names(store: TokenStore) -> list[str]:
    """All labels of the training rows in the order of their ids: integers by value, text by
    alphabet.
    """
    numeric = all(label.isascii() and label.isdigit() for label in store.labels)
    by_value: Callable[[str], tuple[int, str]] = lambda label: (int(label), label)  # noqa: E731
    return sorted(store.labels, key=by_value) if numeric else sorted(store.labels)


def encode_labels(store: TokenStore, names: list[str]) -> NDArray[np.int64]:
    """Label id of each of the store's label codes, int64 [number of codes].

    Raises:
        DataError: for a label that is not among `names`, with its first place.
    """
    id_of = {name: label_id for label_id, name in enumerate(names)}
    faults = [
        f"{place}: label {label!r} does not occur among the training rows.{nearest(label, id_of)}"
        for label, place in zip(store.labels, store.label_places, strict=True)
        if label not in id_of
    ]
    if faults:
        allowed = ", ".join(list(id_of)[:20]) + (", ..." if len(id_of) > 20 else "")
        shown = "\n  ".join(faults[:10])
        raise DataError(f"{store.name}: unknown labels. Allowed: {allowed}\n  {shown}")
    return np.array([id_of[label] for label in store.labels], np.int64)
