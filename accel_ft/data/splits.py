"""The job's rows: training, validation and test split, all with the same labels.

A split is a range of a token store's rows under a fixed random permutation. A validation split cut
off the training rows, or a `max_train_samples` draw, costs no memory and is the same in every run.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray

from accel_ft.config import DEFAULT_DATASET, DataConfig, TrainConfig
from accel_ft.data.plan import Ids, combine_key, permute
from accel_ft.data.sources import Source, file_source, hub_sources, used_columns
from accel_ft.data.targets import are_amounts, cut, output_names, targets
from accel_ft.data.tokenize import TokenStore, tokenize
from accel_ft.errors import ConfigError, DataError, counted, listed

logger = logging.getLogger(__name__)

VALIDATION_SHARE = 0.1
VALIDATION_MAX = 2000
FEW_ROWS = 100
ENOUGH_ROWS = 50  # to judge the number of labels by
RARE = 10
LARGE = 10.0  # mean or standard deviation of values to predict
COMPARED_TEXTS = 1_000_000
PROBED_TEXTS, MUCH_UNKNOWN = 1000, 0.3
LABELS_TOLD = 20
MANY_REPEATS = 5  # times the rows, from which an oversampled epoch is warned of
WHOLE = re.compile(r"-?[0-9]+\.0")
SEPARATORS = "|;,/"
SPLIT_KEY = combine_key(0xACCE1F7)  # fixed: all seeds train on the same rows


class Split:
    """Some rows of a token store. A sample's place is its number in the split, 0..n-1; its id is
    its row in the store.

    Args:
        store: all rows.
        targets: target of each label code of the store, as `targets` in targets.py returns them.
        start, stop: range in the permuted order of the store's rows.
    """

    def __init__(
        self, store: TokenStore, targets: NDArray[Any] | None, start: int, stop: int
    ) -> None:
        self.store, self.targets, self.start, self.stop = store, targets, start, stop
        self.class_weights: NDArray[np.float64] | None = None
        self.repeated: Ids | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.repeated is None else len(self.repeated)

    def oversample(self) -> None:
        """Repeat rows of rarer labels until all that occur are equally frequent; 8 bytes for each
        row and each repeat.
        """
        # Shuffled: a file's first rows, which the last partial repeat takes, may be alike.
        places = permute(np.arange(len(self), dtype=np.int64), len(self), SPLIT_KEY)
        labels = self.labels(places)
        _, counts = np.unique(labels, return_counts=True)
        by_label = np.split(places[labels.argsort(kind="stable")], counts.cumsum()[:-1])
        most, factor = counts.max(), len(counts) * counts.max() / len(places)
        if factor > MANY_REPEATS:
            logger.warning(
                "oversampling=balanced: an epoch is %.0f times as long as without it. Fix: "
                "max_steps, or class_weights in its place", factor,
            )  # fmt: skip
        self.repeated = np.concatenate([np.resize(rows, most) for rows in by_label])

    def ids(self, places: Ids) -> Ids:
        """Return the sample ids at places 0..n-1 of this split, int64 [k]."""
        if self.repeated is not None:
            places = self.repeated[places]
        if self.stop - self.start == len(self.store):
            return places
        return permute(places + self.start, len(self.store), SPLIT_KEY)

    def lengths(self, places: Ids) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, int64 [k]."""
        return self.store.lengths(self.ids(places))

    def labels(self, places: Ids) -> NDArray[Any]:
        """Return label ids, int64 [k]; multi-label, float32 [k, C]; regression, float32 [k]."""
        codes: NDArray[Any] = self.store.label_codes[self.ids(places)]
        if self.targets is None:
            return codes
        labels: NDArray[Any] = self.targets[codes]
        return labels if labels.ndim == 1 else labels.astype(np.float32)

    def weights(self, places: Ids) -> NDArray[np.float64]:
        """Return the weight of each sample in the loss, float64 [k]."""
        if self.class_weights is None:
            return np.ones(len(places))
        weights: NDArray[np.float64] = self.class_weights[self.labels(places)]
        return weights

    def tokens(self, places: Ids) -> list[NDArray[np.int32]]:
        """Return the token ids of each sample, int32 [1, T_i], or [2, T_i] with their types."""
        return [self.store.tokens(row) for row in self.ids(places)]

    def label_ids(self) -> Ids:
        """Return the ids of the labels that occur, int64 [<= C]; not for regression."""
        labels = self.labels(np.arange(len(self), dtype=np.int64))
        return np.unique(labels if labels.ndim == 1 else labels.nonzero()[1])

    def fingerprint(self) -> str:
        """Return an identifier of the samples: content hash, range, and number if oversampled."""
        times = "" if self.repeated is None else f" as {len(self)}"
        return f"{self.store.fingerprint[:16]}[{self.start}:{self.stop}]{times}"

    def warn_if_trained_on(self, *trained: str) -> None:
        """Warn unless this split, cut off the front of its store, ends before the rows of every
        fingerprint in `trained`.
        """
        for content, _, start in (fingerprint.partition("[") for fingerprint in trained):
            is_same = self.store.fingerprint.startswith(content)
            if not is_same or self.stop > int(start.partition(":")[0]):
                logger.warning(
                    "the validation rows are split off other training rows than those of the run "
                    "(or with another max_seq_length): it may have trained on some of them. Fix: a "
                    "validation_file"
                )
                return


@dataclass(frozen=True)
class Splits:
    """The job's splits, their sources, and its label names by id."""

    label_names: list[str]
    train: Split
    validation: Split
    test: Split | None
    sources: dict[str, Source]

    @property
    def given(self) -> dict[str, Split]:
        """The splits that exist, by name."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Split)}


def open_sources(config: DataConfig, needs_train: bool = True) -> dict[str, Source]:
    """Open the source of each split that is configured: keys among train, validation, test."""
    files = {split: file_source(path, used_columns(config)) for split, path in config.files.items()}
    if config.train_file is None and (config.dataset_name is not None or not files):
        return hub_sources(config, config.dataset_name or DEFAULT_DATASET, needs_train) | files
    return files


def load_splits(config: TrainConfig, tokenizer: Any, model_labels: Sequence[str] = ()) -> Splits:
    """Read, check and tokenise the training, validation and test rows of a job.

    Args:
        model_labels: of a model that is already a classifier. If the rows have the same labels,
            they keep the model's order, so that its head keeps its meaning.

    Raises:
        DataError, ConfigError: the rows, or the keys that name them, are faulty.
    """
    sources = open_sources(config)
    stores = _tokenized(sources, config, tokenizer)
    names = output_names(stores["train"], config)
    if config.problem_type == "single_label_classification":
        _check_number_of_labels(stores["train"], names, config)
    if sorted(names) == sorted(model_labels):
        names = list(model_labels)
    splits = _split(stores, names, config)
    train, validation = splits["train"], splits["validation"]
    train.stop = min(train.stop, train.start + (config.max_train_samples or len(train)))
    is_regression = config.problem_type == "regression"
    seen = len(names) if is_regression else len(validation.label_ids())
    if seen < len(names):
        logger.warning(
            "the validation rows (%d) hold %d of the %d labels: their metrics are not reliable",
            len(validation), seen, len(names),
        )  # fmt: skip
    if len(validation) < FEW_ROWS:
        spread = f": an accuracy on them is uncertain by up to {0.98 / len(validation) ** 0.5:.2f}"
        is_share = config.problem_type == "single_label_classification"
        rows = counted(len(validation), "validation row")
        logger.warning("only %s%s", rows, spread * is_share)
    elif config.problem_type == "single_label_classification":
        _warn_of_rare(validation, names)
    if is_regression:
        _tell_values(train, has_new_head=len(model_labels) != 1)
    else:
        _tell_labels(train, names)
        _warn_of_look_alikes(names)
    if train.targets is not None and train.targets.ndim == 2:
        _warn_of_separators(train.targets, names, config.label_separator)
    _tell_repeats(train)
    for name in [name for name in splits if name != "train"]:
        shared = count_shared_texts(train, splits[name])
        if shared:
            logger.warning(
                "%d of the %d %s texts are training texts too: metrics are too optimistic",
                shared, len(splits[name]), name,
            )  # fmt: skip
    return Splits(names, train, validation, splits.get("test"), sources)


def _check_number_of_labels(store: TokenStore, names: list[str], config: TrainConfig) -> None:
    """Warn if a label has fewer than two rows on average: probably another column was meant.

    Raises:
        DataError: in that case, there is also only one text for ten labels.
    """
    if len(store) < ENOUGH_ROWS or 2 * len(names) <= len(store) or are_amounts(names):
        return
    about = f"label_column={config.label_column}: {len(names)} labels in {len(store)} rows"
    num_texts = len(np.unique(store.text_hashes))
    if 10 * num_texts < len(names):
        raise DataError(
            f"{about}, but far fewer texts in text_column={config.text_column}: {num_texts}. "
            "Fix: exchange the two columns, or name other ones"
        )
    logger.warning(
        "%s, fewer than two rows for each. Fix, if that is not meant: another label_column; for "
        "values to predict --problem_type regression", about,
    )  # fmt: skip


def _tokenized(
    sources: dict[str, Source], config: DataConfig, tokenizer: Any
) -> dict[str, TokenStore]:
    """Open the token store of each source; the faults of all sources are raised together."""
    stores, faults = {}, []
    for name, source in sources.items():
        try:
            stores[name] = store = tokenize(source, config, tokenizer)
        except DataError as error:
            faults.append(str(error))
            continue
        if store.num_empty_texts:
            logger.warning(
                "%s: %d of %d texts are empty; they are kept",
                source.name, store.num_empty_texts, len(store),
            )  # fmt: skip
        if store.num_cut_texts:
            logger.info(
                "%s: %d of %d texts are cut at max_seq_length=%d tokens",
                source.name, store.num_cut_texts, len(store), config.max_seq_length,
            )  # fmt: skip
        if (share := _share_unknown(store, tokenizer)) > MUCH_UNKNOWN:
            logger.warning(
                "%s: %.0f %% of the tokens (first texts) are %s: words the tokenizer does not "
                "know. Fix: a model for this language or script",
                source.name, 100 * share, tokenizer.unk_token,
            )  # fmt: skip
    if faults:
        raise DataError("\n".join(dict.fromkeys(faults)))  # a file may be given twice
    return stores


def _share_unknown(store: TokenStore, tokenizer: Any) -> float:
    """Return the share of unknown tokens in the first texts."""
    unknown = tokenizer.unk_token_id
    marks = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id}
    if unknown is None or unknown in marks:  # GPT-2 has one token for all four
        return 0.0
    rows = [store.tokens(place)[0] for place in range(min(len(store), PROBED_TEXTS))]
    return float((np.concatenate(rows) == unknown).mean())


def _split(stores: dict[str, TokenStore], names: list[str], config: DataConfig) -> dict[str, Split]:
    """Return the splits; where no validation rows are given, they are cut off the training rows.

    Args:
        stores: token stores of the given splits, by name.
        names: label names, by id.
    """
    splits = {
        name: Split(store, targets(store, names, config), 0, len(store))
        for name, store in stores.items()
    }
    if "validation" not in splits and "train" in splits:
        train = splits["train"]
        size = min(VALIDATION_MAX, max(1, round(len(train) * VALIDATION_SHARE)))
        if size == len(train):
            raise DataError(f"{train.store.name}: one row cannot be split. Fix: a validation_file")
        logger.info(
            "no validation rows given: %d of the %d training rows held out", size, len(train)
        )
        splits["validation"] = Split(train.store, train.targets, 0, size)
        train.start = size
    if "validation" in splits:
        validation = splits["validation"]
        validation.stop = min(validation.stop, config.max_eval_samples or validation.stop)
    return splits


def count_shared_texts(train: Split, other: Split) -> int:
    """Return how many texts of `other` are among the (first million) texts of `train`."""
    ids = train.ids(np.arange(min(len(train), COMPARED_TEXTS), dtype=np.int64))
    known = train.store.text_hashes[ids]
    hashes = other.store.text_hashes[other.ids(np.arange(len(other), dtype=np.int64))]
    return int(np.isin(hashes, known, kind="sort").sum())  # "table" overflows in numpy 2.0


def _tell_labels(train: Split, names: list[str]) -> None:
    """Log the number of training rows of each label, among at most a million drawn at random: a
    mistyped label shows up as a class of its own.
    """
    places = np.arange(min(len(train), COMPARED_TEXTS), dtype=np.int64)
    if len(places) < len(train):
        places = permute(places, len(train), SPLIT_KEY)
    assert train.targets is not None  # not a regression
    codes = np.bincount(train.store.label_codes[train.ids(places)], minlength=len(train.targets))
    is_one = train.targets.ndim == 1
    counts = (
        np.bincount(train.targets, codes, len(names))
        if is_one
        else np.einsum("k,kc->c", codes, train.targets)  # `@` would copy the table as int64
    )
    rarest = np.argsort(counts, kind="stable")
    told = listed([f"{cut(names[n])} {counts[n]:.0f}" for n in rarest], LABELS_TOLD, "; ")
    drawn = " of a million rows" * (len(places) < len(train))
    logger.info("%d labels, rarest first%s: %s", len(names), drawn, told)
    missing = [cut(names[number]) for number in np.flatnonzero(counts == 0)]
    if missing and not drawn:
        told = listed(missing, LABELS_TOLD, "; ")
        logger.warning("labels without a training row, which cannot be learnt: %s", told)


def _tell_values(train: Split, has_new_head: bool) -> None:
    """Log the range of the (first million) values to predict; warn if they are all the same, or of
    a size that a new head, whose outputs are near 0, takes long to reach.
    """
    places = np.arange(min(len(train), COMPARED_TEXTS), dtype=np.int64)
    values = train.labels(places).astype(np.float64)
    low, high, mean, spread = values.min(), values.max(), values.mean(), values.std()
    logger.info("values: %g to %g, mean %g, standard deviation %g", low, high, mean, spread)
    if low == high:
        logger.warning("every training row has the value %g: there is nothing to learn", low)
    elif has_new_head and max(abs(mean), spread) > LARGE:
        logger.warning(
            "the values are large: a new head, which begins near 0, needs many updates to reach "
            "them. Fix: scale them to about 0 to 1"
        )


def _warn_of_rare(validation: Split, names: list[str]) -> None:
    labels = validation.labels(np.arange(len(validation), dtype=np.int64))
    counts = np.bincount(labels, minlength=len(names))
    rare = [number for number in np.argsort(counts, kind="stable") if 0 < counts[number] < RARE]
    if rare:
        told = listed([f"{cut(names[n])} {counts[n]}" for n in rare], LABELS_TOLD, "; ")
        logger.warning("labels with few validation rows, so with unreliable metrics: %s", told)


def _tell_repeats(train: Split) -> None:
    """Log how many of the (first million) training rows repeat the text of another row; warn if
    such a text has several labels.
    """
    ids = train.ids(np.arange(min(len(train), COMPARED_TEXTS), dtype=np.int64))
    texts, labels = train.store.text_hashes[ids], train.store.label_codes[ids]
    order = np.lexsort((labels, texts))
    texts, labels = texts[order], labels[order]
    again = texts[1:] == texts[:-1]
    unlike = len(np.unique(texts[1:][again & (labels[1:] != labels[:-1])]))
    if again.any():
        logger.log(
            logging.WARNING if unlike else logging.INFO,
            "training rows that repeat the text of another: %d; texts with different labels: %d",
            again.sum(), unlike,
        )  # fmt: skip


def _warn_of_separators(targets: NDArray[np.bool_], names: list[str], separator: str) -> None:
    """Warn if no row has several labels; suggest a separator if a label looks like several."""
    if targets.sum(axis=1).max(initial=0) > 1:
        return
    joined = next(((name, sign) for name in names for sign in SEPARATORS if sign in name), None)
    advice = ""
    if joined is not None:
        advice = f". Fix, if {cut(joined[0])!r} means several: --label_separator {joined[1]!r}"
    logger.warning("no row has more than one label, with label_separator %r%s", separator, advice)


def _warn_of_look_alikes(names: list[str]) -> None:
    """Warn of labels that differ only in case, spaces, invisible characters or a `.0` (probably one
    label), and of numbers with fractions (probably not labels).
    """
    if are_amounts(names):
        logger.warning(
            "the labels are numbers (%s, ...), and each counts as a class. Fix, if they are values "
            "to predict: --problem_type regression", names[0],
        )  # fmt: skip
    elif all(map(WHOLE.fullmatch, names)):
        logger.warning(
            "the labels are integers written as floats (%s, ...), as pandas does where a cell is "
            "empty; the label names keep the .0. Fix: a column of integers", names[0],
        )  # fmt: skip
    seen: dict[str, str] = {}
    for name in names:
        number = name.removesuffix(".0") if WHOLE.fullmatch(name) else name
        shown = "".join(sign for sign in normalize("NFKC", number) if category(sign) != "Cf")
        twin = seen.setdefault(" ".join(shown.casefold().split()), name)
        if twin != name:
            logger.warning("the labels %r and %r count as two; are they meant as one?", twin, name)


def load_eval_split(
    config: DataConfig, tokenizer: Any, names: list[str], wanted: str | None
) -> tuple[str, Split, bool]:
    """Read the rows to evaluate a finished model on.

    Args:
        names: label names of the model, by id.
        wanted: "test", "validation" or None for the first of these that exists.

    Returns:
        The split's name, the split, and whether it was cut off the training rows (it then has the
        same rows as in training).
    """
    only = wanted or ("test" if "test" in config.files else None)
    if only in config.files:  # the others, which may be large, are not needed
        others = {f"{split}_file": None for split in config.files if split != only}
        config = config.resolved(**others, dataset_name=None)
    sources = open_sources(config, needs_train=False)
    wanted = wanted or ("test" if "test" in sources else "validation")
    given = "train" if wanted == "validation" and wanted not in sources else wanted
    if given not in sources:
        raise ConfigError(
            f"split={wanted}: the job names no {wanted} rows with labels. Fix: --{wanted}_file, or "
            f"--{wanted}_split_name of a data set"
        )
    stores = _tokenized({given: sources[given]}, config, tokenizer)
    return wanted, _split(stores, names, config)[wanted], given != wanted


def class_weights(
    wanted: str | tuple[float, ...] | None, train: Split, names: list[str]
) -> NDArray[np.float64] | None:
    """Return the weight of each label in the loss, float64 [C]; None for 1 each.

    Args:
        wanted: one weight per label, "balanced" for n / (C x rows of the label), as in
            scikit-learn, or None.

    Raises:
        ConfigError: the number of weights is not the number of labels.
    """
    if wanted is None:
        return None
    if wanted == "balanced":
        labels = train.labels(np.arange(len(train), dtype=np.int64))
        counts = np.bincount(labels, minlength=len(names))
        weights = np.where(counts, len(train) / (len(names) * np.maximum(counts, 1.0)), 0.0)
    elif len(wanted) == len(names):
        weights = np.array(wanted, np.float64)
    else:
        raise ConfigError(
            f"class_weights={wanted}: {counted(len(wanted), 'weight')} for {len(names)} labels. "
            f"Fix: one for each of: {listed(names, LABELS_TOLD)}"
        )
    pairs = [f"{name} {weight:.3g}" for name, weight in zip(names, weights, strict=True)]
    logger.info("weights in the loss: %s", listed(pairs, LABELS_TOLD))
    return weights
