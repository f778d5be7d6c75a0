"""Label texts with a checkpoint: python -m accel_ft.predict --checkpoint runs/ag_news --input FILE
--output FILE, or the same under `accelerate launch` on several devices.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from accel_ft.config import DATA_FILE_SUFFIXES, PredictConfig
from accel_ft.errors import ConfigError, DataError, counted, run_command
from accel_ft.runtime.files import writing
from accel_ft.runtime.memory import restart_with_better_malloc
from accel_ft.settings import parse, run_settings

logger = logging.getLogger("accel_ft.predict")  # under -m, __name__ is "__main__"

Text = str | tuple[str, str]  # or a pair of texts
NAME = re.compile(r"[^\s.!?]*")  # fits a column's name, not a sentence
CHUNK_ROWS = 2048  # per rank: read, sorted by length, labelled, written at once; bounds the memory


def main(argv: Sequence[str] | None = None) -> None:
    """Label one text, a file or standard input: a JSON object a line, in the input's order."""
    config = parse(PredictConfig, argv, "predict", run_settings)
    is_main = os.environ.get("RANK", "0") == "0"
    rows = open_rows(config) if is_main else iter(())  # one rank reads; the input may be a pipe

    from accel_ft.checkpoint.open import same_folder
    from accel_ft.runtime.launch import make_accelerator
    from accel_ft.runtime.logging import setup_logging

    accelerator = make_accelerator()
    setup_logging(accelerator.is_main_process)
    predictor = Predictor(config, accelerator, same_folder(config.checkpoint, accelerator))
    second = config.text_pair_column if config.text is None else config.text_pair
    predictor.classifier.check_pairs(second is not None)
    output: Any
    count = 0
    with writing(config.output) if is_main else nullcontext() as output:
        for lines in predictor.label(rows):
            if is_main:
                for line in lines:
                    output.write(json.dumps(line, ensure_ascii=False) + "\n")
                    count += 1
                output.flush()
    if predictor.num_cut:
        logger.info(
            "%d of %d texts are cut at max_seq_length=%d tokens",
            predictor.num_cut, count, predictor.max_seq_length,
        )  # fmt: skip
    if is_main and config.output != "-":
        logger.info("%s labelled: %s", counted(count, "text"), config.output)


@dataclass(frozen=True)
class Alone:
    """Stands in for an Accelerator in one process. A real one shares global state, and the process
    may be training something else in another precision at the same time.
    """

    device: Any
    precision: str
    num_processes = 1
    process_index = 0

    def autocast(self) -> Any:
        """Return a context that computes in `precision`."""
        import torch

        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return nullcontext() if kind is None else torch.autocast(self.device.type, kind)


def devices() -> Any:
    """Return what a Predictor inside another program runs on: this process's device; in a script
    that was launched with several ranks, an Accelerator.
    """
    import torch

    from accel_ft.runtime.guest import as_a_guest
    from accel_ft.runtime.launch import asked_for, make_accelerator
    from accel_ft.runtime.request import world_size

    if world_size() > 1:
        with as_a_guest():
            return make_accelerator()
    request, on_cpu = asked_for()
    device = None if on_cpu else torch.accelerator.current_accelerator()
    return Alone(device or torch.device("cpu"), request.mixed_precision)


class Predictor:
    """A loaded classifier that scores texts."""

    def __init__(self, config: PredictConfig, accelerator: Any, folder: str | None = None) -> None:
        import torch

        from accel_ft.checkpoint.open import open_classifier
        from accel_ft.data.loader import Padding

        self.config, self.accelerator = config, accelerator
        self.classifier = open_classifier(folder or config.checkpoint, accelerator.device)
        self.max_seq_length = self.classifier.max_seq_length(config.max_seq_length)
        self.num_cut = 0  # texts that were truncated
        self.pad = Padding(self.classifier.tokenizer, self.max_seq_length, accelerator.device)
        transforms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "single_label_classification": partial(torch.softmax, dim=-1),  # can be pickled
            "multi_label_classification": torch.sigmoid,
            "regression": torch.clone,
        }
        self.transform = transforms[self.classifier.problem_type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the device again: an unpickling process may have other devices."""
        self.__dict__.update(state)
        self.accelerator = devices()

    def predict(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """Return {"label", "score"} for each text (or pair); multi-label: {"labels"}; regression:
        {"score"}; plus "scores" where all_scores is set. Collective.
        """
        if isinstance(texts, str | Mapping) or hasattr(texts, "columns"):  # yields letters or keys
            told = "not one text, and not a table. Fix: [text], or one of its columns"
            raise TypeError(f"texts: must be a list of texts, {told}")
        wanted = [tuple(text) if isinstance(text, list) else text for text in texts]
        pairs = self.config.text_pair_column is not None or isinstance((wanted or "?")[0], tuple)
        if wanted:
            self.classifier.check_pairs(pairs)
        for number, text in enumerate(wanted):
            parts = text if isinstance(text, tuple) else (text,)
            if len(parts) != 1 + pairs or not all(isinstance(part, str) for part in parts):
                why = "trained on pairs" if self.config.text_pair_column else "began with one"
                meant = f"a pair of texts ({why})" if pairs else "a text"
                from accel_ft.data.targets import cut

                raise DataError(f"texts[{number}]: is {cut(repr(text))}, not {meant}")
            _refuse_halves(f"texts[{number}]", parts)
        size = CHUNK_ROWS * self.accelerator.num_processes
        chunks = (wanted[start : start + size] for start in range(0, len(wanted), size))
        return [self.describe(row) for chunk in chunks for row in self.scores(chunk)]

    def label(self, rows: Iterator[Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the output for the rows that rank 0 reads, a chunk at a time; each row is described
        only as it is written. Collective.
        """
        from accelerate.utils import broadcast_object_list

        size = CHUNK_ROWS * self.accelerator.num_processes
        while chunk := broadcast_object_list([list(islice(rows, size))])[0]:
            scores = self.scores([text for _, _, text in chunk])
            yield (
                {key: value} | self.describe(row)
                for (key, value, _), row in zip(chunk, scores, strict=True)
            )

    def scores(self, texts: list[Text]) -> Any:
        """Return the probability of each label (for a regression, its value), float64
        [len(texts), C], in the order of `texts`; each rank scores its share. Collective.
        """
        import numpy as np
        import torch
        from accelerate.utils import gather_object

        from accel_ft.data.tokenize import token_ids
        from accel_ft.engine.step import forward
        from accel_ft.model.load import check_tokens

        device, tokenizer = self.accelerator.device, self.classifier.tokenizer
        rank, num_ranks = self.accelerator.process_index, self.accelerator.num_processes
        sizes = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
        by_length = np.argsort(sizes, kind="stable")
        mine = [texts[row] for row in by_length[rank::num_ranks]]
        rows, num_cut = token_ids(tokenizer, mine, self.max_seq_length) if mine else ([], 0)
        found = np.empty((len(mine), len(self.classifier.label_names)))
        lengths = np.array([row.shape[-1] for row in rows], np.int64)
        greatest = max((int(row[0].max()) for row in rows), default=0)
        check_tokens(greatest, tokenizer, self.classifier.model.config, "checkpoint")
        # The caller's autocast is off. One context for all batches: weights are cast once.
        with (
            torch.inference_mode(),
            torch.autocast(device.type, enabled=False),
            self.accelerator.autocast(),
        ):
            for batch in self.pad.eval_batches(lengths, self.config.per_device_eval_batch_size):
                inputs = self.pad([rows[row] for row in batch])
                moved = {key: value.to(device) for key, value in inputs.items()}
                logits = forward(self.classifier.model, moved)
                logits = logits.cpu().double()
                logits[~logits.isfinite().all(dim=1)] = torch.nan  # else some would look valid
                found[batch] = self.transform(logits).numpy()
        scores = np.empty((len(texts), found.shape[1]))
        told = [(found, num_cut)]
        for share, (values, count) in enumerate(told if num_ranks == 1 else gather_object(told)):
            scores[by_length[share::num_ranks]] = values
            self.num_cut += count
        sick = int((~np.isfinite(scores).all(axis=1)).sum())
        if sick:
            logger.warning(
                "%s: texts whose results are null, as logits are NaN or infinite: %d",
                self.config.checkpoint, sick,
            )  # fmt: skip
        return scores

    def describe(self, scores: Any) -> dict[str, Any]:
        """Return the output object for one text's scores [C]."""
        import numpy as np

        names, kind = self.classifier.label_names, self.classifier.problem_type
        values = [float(f"{score:.9g}") for score in scores.tolist()]  # float32's precision
        best, described = int(scores.argmax()), dict[str, Any]()
        if kind == "multi_label_classification":
            thresholds = self.classifier.thresholds
            chosen = scores >= (0.5 if thresholds is None else thresholds)
            described["labels"] = [name for name, is_so in zip(names, chosen, strict=True) if is_so]
        elif kind == "single_label_classification":
            described = {"label": names[best], "score": values[best]}
        elif len(names) == 1:
            described["score"] = values[0]
        if self.config.all_scores or not described:  # a regression with several outputs
            described["scores"] = dict(zip(names, values, strict=True))
        # The argmax of NaN is the first label, which would mean nothing.
        return described if np.isfinite(scores).all() else dict.fromkeys(described)


def open_rows(config: PredictConfig) -> Iterator[tuple[str, Any, Text]]:
    """Return an iterator over (name, value, text) of each row to label; name is "id", or what value
    counts: "line", "item" or "row". A file is first read to its end, to find its faults; of an
    input that can be read only once, the first row is checked.
    """
    if config.text is not None:
        pair = config.text_pair
        _refuse_halves("text", (config.text, pair or ""))
        return iter([("line", 1, config.text if pair is None else (config.text, pair))])
    from accel_ft.data.sources import sound_rows

    name = "standard input" if config.input == "-" else str(config.input)
    if config.input != "-" and Path(name).is_file():
        deque(sound_rows(name, _read_rows(config, name)), maxlen=0)  # finds all faults
    rows = sound_rows(name, _read_rows(config, name), most=1)
    first = list(islice(rows, 1))
    return chain(first, rows)


def _refuse_halves(name: str, parts: Sequence[str]) -> None:
    from accel_ft.data.targets import is_encodable

    if not all(map(is_encodable, parts)):
        raise DataError(f"{name}: has an unpaired surrogate, which is no valid UTF-8")


def _read_rows(
    config: PredictConfig, name: str
) -> Iterator[tuple[tuple[str, Any, Text], str | None]]:
    """Yield rows as `open_rows` does, each with its fault, or None."""
    from accel_ft.data.sources import (
        check_columns,
        read_records,
        read_text,
        used_columns,
        whose_columns,
    )

    path, kind = str(config.input), str(config.input_format)
    if path == "-" and sys.stdin is None:
        raise ConfigError("input=-: standard input is closed")
    if kind == "auto":
        kind = _guess_format(path, config.text_column)
    if kind == "lines":
        config = config.resolved(text_column="text")
    for place, record in read_records(path, kind, used_columns(config) | {"id"}):
        kind_of_place, _, number = place.partition(" ")
        if isinstance(record, str):
            yield (kind_of_place, int(number), ""), f"{place}: {record}"
            continue
        check_columns(whose_columns(name, place, kind), record, config)
        text, fault = read_text(record, config.text_column, config.text_pair_column)
        row: tuple[str, Any, Text] = (kind_of_place, int(number), text)
        id_column = config.id_column or ("id" if "id" in record else None)
        if id_column is not None:
            value = json.dumps(record[id_column], default=str)
            row = ("id", json.loads(value, parse_constant=lambda _: None), text)  # JSON has no NaN
        yield row, fault and f"{place}: {fault}"


def _guess_format(path: str, text_column: str) -> str:
    """Return the format that a file's name, or the first bytes, suggest."""
    from accel_ft.data.sources import suffix_of

    suffix, start = suffix_of(Path(path)), b""
    if f".{suffix}" in DATA_FILE_SUFFIXES:
        return suffix
    if path == "-":
        standard_input: Any = sys.stdin.buffer
        seen = standard_input.peek(64)
        start = seen.removeprefix(BOM_UTF8).strip()
        if start == b"[" or (seen and not start):  # what follows has not arrived yet
            raise ConfigError("input=-: may be lines or JSON. Fix: --input_format lines, or json")
        if start == b"[]" or re.match(rb"\[\s*\{", start):
            return "json"
        if start[:1] == b"{":
            return "jsonl"
    elif suffix in ("", "txt") and Path(path).is_file():  # a pipe can be read only once
        with open(path, "rb") as file:
            start = file.read(4096).removeprefix(BOM_UTF8)
        if re.match(rb"\s*(\{|\[\s*\{)", start):
            raise ConfigError(
                f"input={path}: begins like JSON. Fix: --input_format jsonl, json or lines"
            )
    elif suffix != "txt":
        raise ConfigError(
            f"input={path}: unknown format. Fix: --input_format lines, csv, tsv, json, jsonl or "
            "parquet"
        )
    cells = re.split(r"[,;|\t]", start.decode(errors="replace").partition("\n")[0])
    header = [cell.strip(' \r"') for cell in cells]
    known = {text_column, "label", "id"}.intersection(header)
    are_names = len(header) > 1 and text_column in header and all(map(NAME.fullmatch, header))
    if len(known) > 1 or are_names:
        raise ConfigError(
            f"input={path}: begins with a table's header. Fix: --input_format csv, tsv or lines"
        )
    return "lines"


if __name__ == "__main__":
    restart_with_better_malloc("accel_ft.predict")
    for number in (signal.SIGTERM, signal.SIGHUP):  # to clean up; several ranks would hang
        is_heeded = signal.getsignal(number) != signal.SIG_IGN  # nohup ignores SIGHUP
        if is_heeded and os.environ.get("WORLD_SIZE", "1") == "1":
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    run_command(main)
