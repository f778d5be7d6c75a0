"""The keys that can be set, their defaults and their rules. `settings.py` reads them.

Keys are flat, and named as in `transformers.TrainingArguments` where that has the same key. Mixed
precision, strategy, number of processes and compile belong to accelerate's YAML, not here.
"""

import errno
import math
import os
import re
import typing
import warnings
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FilePath,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from accel_ft.errors import nearest

DATA_FILE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")

SPLITS = ("train", "validation", "test")
SPLIT_KEYS = {f"{split}_split_name" for split in SPLITS}
FILE_KEYS = {f"{split}_file" for split in SPLITS}
ROW_KEYS = SPLIT_KEYS | FILE_KEYS | {"dataset_name", "dataset_config_name"}
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
DEFAULT_DATASET = "fancyzhx/ag_news"  # where no rows are named
METRICS = {
    "single_label_classification": (
        "accuracy", "f1_macro", "matthews_correlation", "roc_auc", "loss",
    ),
    "multi_label_classification": ("f1_macro", "f1_micro", "accuracy", "roc_auc", "loss"),
    "regression": ("rmse", "mae", "pearson", "spearmanr", "r2", "loss"),
}  # fmt: skip
LOWER_IS_BETTER = ("loss", "rmse", "mae")
IDENTITY_KEYS = {
    "model_name_or_path", "max_seq_length", "global_batch_size", "seed", "learning_rate",
    "lr_scaling", "lr_reference_batch_size", "lr_scheduler_type", "warmup_steps", "weight_decay",
    "max_grad_norm", "problem_type", "class_weights", "label_smoothing_factor", "oversampling",
    "freeze", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "layerwise_lr_decay",
    "train_sampling_strategy",
}  # fmt: skip
# What a resume compares between the checkpoint and the job.
COMPARED = IDENTITY_KEYS | {"labels", "train_data", "pretrained", "mixed_precision"}
FIXED = {"freeze", "lora_r", "lora_target_modules"}  # allow_changed does not accept these
CHOOSES = ("load_best_model_at_end", "early_stopping_patience")
NEEDS = {  # key -> others; the key has no effect unless one of them is set
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_target_modules"), ("lora_r",)),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), CHOOSES),
    "early_stopping_threshold": ("early_stopping_patience",),
    **dict.fromkeys(("hub_model_id", "hub_private_repo"), ("push_to_hub",)),
    "lr_reference_batch_size": ("lr_scaling",),
}
IDLE_UNDER = (  # key, other, values: the key has no effect where other is one of values
    ("warmup_steps", "lr_scheduler_type", ("constant",)),
    ("layerwise_lr_decay", "freeze", ("encoder",)),
    ("gradient_checkpointing", "freeze", ("encoder",)),
    ("label_separator", "problem_type", ("single_label_classification", "regression")),
)
CLASS_METRIC = re.compile(r"per_class\.(.+)\.(precision|recall|f1)")


def _expanded(value: Any) -> Any:
    """Expand `~`; refuse an empty value, which an unset shell variable leaves."""
    if not isinstance(value, str | os.PathLike):
        return value
    if value == "":
        raise ValueError("is empty")
    path = os.path.expanduser(value)
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError("is too long a name") from error
    except ValueError as error:  # a null character in it
        raise ValueError("is not a path") from error
    return path


EXPANDED = BeforeValidator(_expanded)
File = Annotated[Path, EXPANDED]
Existing = Annotated[FilePath, EXPANDED]
Place = Annotated[str, EXPANDED]  # a path, a Hub id, or - for a standard stream


def _cut_at_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _names(value: Any) -> Any:
    is_none = value is None or (isinstance(value, str) and value.lower() in ("none", "null", ""))
    cut = () if is_none else _cut_at_commas(value)
    return [name for name in cut if name] if isinstance(value, str) else cut


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_names)]
Weight = Annotated[float, Field(gt=1e-9, lt=1e9)]
Weights = Annotated[tuple[Weight, ...], BeforeValidator(_cut_at_commas)]
Fault = tuple[tuple[str, ...], str]  # the keys it touches, the message


def type_name(kind: Any) -> str:
    """Return a key's type as --help and messages show it."""
    origin = typing.get_origin(kind)
    parts = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is typing.Annotated:
        return type_name(parts[0])
    if origin is tuple:
        return f"{type_name(parts[0])},..."
    if parts:
        return "|".join(map(type_name, parts))
    return {"Path": "PATH", "str": "TEXT"}.get(kind.__name__, str(kind.__name__).upper())


class Config(BaseModel):
    """Base of every command's keys: flat, typed, documented, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for any other type: pydantic would read it as a number."""
        kinds = type_name(cls.model_fields[str(info.field_name)].annotation).split("|")
        if value is False and "off" in kinds:
            return "off"  # YAML reads `off` as false
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, bool) and kinds != ["BOOL"]:
                raise PydanticCustomError("bool", "{found} given", {"found": str(each).lower()})
        return value

    @field_validator("*")
    @classmethod
    def _fits_an_int(cls, value: Any) -> Any:
        """Refuse integers above int32: some libraries that receive them take no more."""
        if isinstance(value, int) and value >= 2**31:
            raise PydanticCustomError("less_than", "must be less than 2147483648")
        return value

    def rules(self) -> Iterator[Fault]:
        """Yield faults between keys, or between a key and the disk."""
        yield from ()

    def _fault(self, words: str, *keys: str) -> Fault:
        """Build a fault of `keys`; its message shows the value of the first one."""
        value = getattr(self, keys[0])
        told = ",".join(map(str, value)) if isinstance(value, tuple) else value
        return keys, f"{keys[0]}={told}: {words}"

    def _to_write(self, key: str, *read: Path | None) -> Iterator[Fault]:
        """Check a file to be written: its folder exists, and it is none of the files `read`."""
        path = Path(getattr(self, key) or "-")
        if path.is_file() and path.resolve() in [each.resolve() for each in read if each]:
            yield self._fault("would overwrite the rows. Fix: another file", key)
        if os.environ.get("RANK", "0") != "0":
            return  # only rank 0 writes
        if path.is_dir():
            yield self._fault("is a folder. Fix: a file in it", key)
        elif not path.parent.is_dir():
            yield self._fault(f"there is no folder {path.parent}", key)

    def _not_both(self, one: str, other: str) -> Iterator[Fault]:
        if getattr(self, one) is not None and getattr(self, other) is not None:
            found = f"given together with {other}={getattr(self, other)}"
            yield self._fault(f"{found}. Fix: keep one of the two", one, other)

    def resolved(self, **changes: Any) -> Self:
        """Return a copy with `changes`."""
        return self.model_copy(update=changes)

    def to_yaml(self) -> str:
        """Return every key as YAML; feeding it back gives the same configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class DataConfig(Config):
    """Where the rows come from."""

    dataset_name: Place | None = None
    """Data set on the Hub, or a folder that `datasets` can load; left out, and no file given:
    fancyzhx/ag_news."""
    dataset_config_name: Name | None = None
    """Configuration of dataset_name, such as mrpc of nyu-mll/glue."""
    train_split_name: Name | None = None
    """Split of dataset_name with the training rows; left out: train."""
    validation_split_name: Name | None = None
    """Split of dataset_name with the validation rows, such as mnli's validation_matched. Left out:
    validation; if there is none, or another key names it, rows are held out of the training rows.
    """
    test_split_name: Name | None = None
    """Split of dataset_name with the test rows; left out: test, where there is one that no other
    key names."""
    train_file: File | None = None
    """Training rows: csv, tsv, json, jsonl or parquet."""
    validation_file: File | None = None
    """Validation rows, for the evaluations during training; left out: a tenth of the training rows
    is held out, 2,000 at most."""
    test_file: File | None = None
    """Test rows, which the final model is measured on."""
    text_column: str = "text"
    """Column with the text."""
    text_pair_column: str | None = None
    """Column with a second text, for tasks on pairs of texts."""
    label_column: str = "label"
    """Column with the label: text or integer; a list of them; or a number (see problem_type)."""
    problem_type: ProblemType = "single_label_classification"
    """One label per row; several labels per row; or a number."""
    label_separator: str = Field(",", min_length=1)
    """Multi-label: separator of the labels, where a file holds them as one text."""
    max_seq_length: int = Field(128, ge=2)
    """Texts are truncated to this many tokens."""
    max_eval_samples: int | None = Field(None, ge=1)
    """Use this many validation rows, drawn at random (always the same ones)."""
    per_device_eval_batch_size: int | None = Field(None, ge=1)
    """Samples in an evaluation batch of the longest texts, on one rank; batches of shorter texts
    have more samples, up to the same number of tokens. Left out: 16 on a CPU, else 64; fewer for
    texts beyond 512 tokens."""

    @property
    def files(self) -> dict[str, Path]:
        """The row files that are set, by split."""
        named = {split: getattr(self, f"{split}_file") for split in SPLITS}
        return {split: path for split, path in named.items() if path is not None}

    def rules(self) -> Iterator[Fault]:
        """Check that named files exist and have a known format."""
        yield from super().rules()
        for split, path in self.files.items():
            key = f"{split}_file"
            if path.is_symlink() and not path.exists():
                yield self._fault(f"is a link to {path.readlink()}, which is not there", key)
            elif not path.exists():
                siblings = [each.name for each in path.parent.glob("*")]
                yield self._fault(f"there is no such file.{nearest(path.name, siblings, 0.8)}", key)
            elif not path.is_file():
                kind = "a folder" if path.is_dir() else "no regular file, and rows are read twice"
                yield self._fault(f"it is {kind}", key)
            elif path.suffix.lower() not in DATA_FILE_SUFFIXES:
                yield self._fault(f"unknown format. Allowed: {', '.join(DATA_FILE_SUFFIXES)}", key)
        yield from self._not_both("dataset_name", "train_file")
        columns = ("label_column", "text_column", "text_pair_column")
        for one, other in combinations(columns, 2):
            if getattr(self, one) == getattr(self, other):
                yield self._fault(f"is the column of {other} too. Fix: another column", one, other)
        for key in ("dataset_config_name", *sorted(SPLIT_KEYS)):
            if getattr(self, key) is not None and self.dataset_name is None:
                words = "given without dataset_name. Fix: add it, or leave this out"
                yield self._fault(words, key, "dataset_name")
        for split in ("validation", "test"):
            yield from self._not_both(f"{split}_file", f"{split}_split_name")


class HubConfig(Config):
    """Whether and where a model is uploaded."""

    push_to_hub: bool = False
    """Upload the model to the Hub at the end."""
    hub_model_id: Place | None = None
    """Repository on the Hub to upload to; left out: the name of the folder, in your own account."""
    hub_private_repo: bool = False
    """Create the repository as private; one that exists already must be private."""

    def repo_id(self, folder: Path) -> str:
        """Return the repository that the model in `folder` is pushed to."""
        return self.hub_model_id or folder.absolute().name


HUB_KEYS = set(HubConfig.model_fields)


class TrainConfig(HubConfig, DataConfig):
    """Train a text classifier. With no key set: AG News with DistilBERT, both from the Hub."""

    model_name_or_path: Place = "distilbert/distilbert-base-uncased"
    """Hub id, folder, or package://PYTHON_PACKAGE/PATH for weights in an installed package
    (#sha256=HEX at the end: the hash that its model.safetensors must have)."""
    output_dir: File = Path("runs/ag_news")
    """Folder the run is written to."""
    max_train_samples: int | None = Field(None, ge=1)
    """Use this many training rows, drawn at random (always the same ones)."""
    num_train_epochs: float = Field(3.0, gt=0, le=1e6)
    """Passes over the training rows; may be a fraction."""
    max_steps: int | None = Field(None, ge=1)
    """Updates to train for, in place of num_train_epochs."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples of one update over all ranks and accumulation steps, whose number follows from it.
    Left out: 32, or as gradient_accumulation_steps determines."""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    """Sets global_batch_size, which must be left out, to per_device_train_batch_size x ranks x
    this."""
    per_device_train_batch_size: PositiveInt | Literal["auto"] = 32
    """Samples of one forward and backward pass on one rank; fewer if the global batch needs no
    more. auto: as many as fit into the device's memory; global_batch_size stays the same.
    """
    train_sampling_strategy: Literal["group_by_length", "random"] = "group_by_length"
    """Which rows share an update: rows of similar length (faster), or random ones, which may learn
    better where length correlates with the label, above all with few rows."""
    learning_rate: float = Field(5e-5, gt=0)
    """Peak learning rate of AdamW, before lr_scaling."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """linear: multiply the rate by global batch / lr_reference_batch_size; sqrt: by its square
    root."""
    lr_reference_batch_size: int = Field(32, ge=1)
    """Global batch the learning rate was chosen for."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay; biases and norms have none."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """Schedule of the learning rate, by updates."""
    warmup_steps: float = Field(0.06, ge=0)
    """Updates of linear warmup, rounded; below 1: a fraction of all updates."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 for no clipping."""
    class_weights: Weights | Literal["balanced"] | None = None
    """Weight of each label in the loss: numbers in the order of label ids (YAML list, or 1,2,0.5 on
    the command line), or balanced: rows / (labels x rows with that label)."""
    label_smoothing_factor: float = Field(0.0, ge=0, lt=1)
    """Share of the target spread evenly over all labels."""
    oversampling: Literal["balanced"] | None = None
    """balanced: rows of rarer labels are repeated in an epoch, so that every label of the training
    rows occurs equally often."""
    freeze: Literal["encoder"] | None = None
    """encoder: train the classifier head alone."""
    lora_r: int | None = Field(None, ge=1)
    """Train LoRA adapters of this rank and the head, all other weights frozen; checkpoints hold
    only what is trained, model/ is the merged model."""
    lora_alpha: float = Field(16, gt=0)
    """Adapters are scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in front of the adapters."""
    lora_target_modules: Names = ()
    """Names of the linear layers that get adapters, such as query,value; left out: all."""
    layerwise_lr_decay: float | None = Field(None, gt=0, le=1)
    """Multiply the learning rate by this once more for each layer below the head."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    cuda_graphs: bool = True
    """On a single GPU, run micro-batches as CUDA graphs, one per shape, if the model is supported:
    faster, same results (up to rounding if compiled), more memory."""
    seed: int = Field(42, ge=0)
    """Seed of the new head, the sample order and dropout."""
    logging_steps: int = Field(20, ge=1)
    """Updates between train events in metrics.jsonl; with early_stopping_patience, there is one
    at each evaluation, too."""
    eval_steps: int | None = Field(None, ge=1)
    """Updates between evaluations; left out: at the end of each epoch."""
    save_steps: int = Field(500, ge=1)
    """Updates between checkpoints; the last update is always saved."""
    save_total_limit: int | None = Field(2, ge=2)
    """Newest checkpoints kept, at least 2, in case one is damaged; none keeps all."""
    load_best_model_at_end: bool = False
    """Save at each new best evaluation, never prune that checkpoint, and end with its model."""
    metric_for_best_model: str | None = None
    """Metric on the validation rows that decides which model is best, with or without `eval_`; for
    one label per_class.LABEL.f1 (precision, recall). Left out: accuracy; multi-label f1_macro;
    regression rmse."""
    greater_is_better: bool | None = None
    """Whether a higher value of that metric is better; left out: yes, except for loss, rmse and
    mae."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a better metric_for_best_model."""
    early_stopping_threshold: float = Field(0.0, ge=0)
    """How much better the metric must get to count."""
    resume_from_checkpoint: Annotated[Literal["latest"] | str | None, EXPANDED] = None
    """`latest` (starts from the beginning if there is no checkpoint yet), or a checkpoint's folder.
    """
    allow_changed: Names = ()
    """Differences between checkpoint and job that a resume accepts; it refuses all others:
    train_data, labels, mixed_precision (also for `reproduce`), or keys that affect training, such
    as learning_rate; for an unknown name the error lists all."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """If loss or gradients are NaN or infinite: stop; skip the update; or rollback: load the last
    checkpoint and leave out that batch (the second time in a row: an earlier checkpoint, leaving
    out the update before, too). fp16 overflows do not count: such an update is skipped, with a
    warning, whatever is set here."""
    ddp_timeout: int = Field(300, ge=5)
    """Seconds to wait for a rank before it counts as lost. There is no limit while rank 0
    tokenises or saves; under FSDP, where each rank writes its share, a save may take half a minute
    more than this."""
    preflight: Literal["auto", "off"] = "auto"
    """Check versions, device, limits, optimizer and replicas before the first update."""
    report_to: Names = ("html",)
    """html: write report.html at the end; also any experiment trackers of Accelerate, such as
    tensorboard,wandb,trackio,mlflow; or none."""
    reproduce: File | None = None
    """Folder of a run: train it again, with its settings, and compare update by update."""
    profile: bool = False
    """Write a torch.profiler trace of updates 6 to 10 of this start to <output_dir>/profile."""
    dataloader_num_workers: int = Field(0, ge=0)
    """Processes on each rank that prepare batches; 0 does it in the training process."""

    def without_this_start(self) -> Self:
        """Return the run's settings without the keys that concern one start only."""
        return self.resolved(
            resume_from_checkpoint=None, allow_changed=(), profile=False, reproduce=None
        )

    @property
    def micro_batch_size(self) -> int:
        """per_device_train_batch_size, once `auto` is resolved."""
        assert self.per_device_train_batch_size != "auto"
        return self.per_device_train_batch_size

    def updates(self, steps_per_epoch: int) -> int:
        """Return how many updates to train for."""
        wanted = math.ceil(round(self.num_train_epochs * steps_per_epoch, 6))
        return self.max_steps or max(wanted, 1)

    @property
    def best_metric(self) -> str:
        """The metric that decides what is best; left out: the problem type's first one."""
        if self.metric_for_best_model is None:
            return METRICS[self.problem_type][0]
        return self.metric_for_best_model.removeprefix("eval_")

    @property
    def best_label(self) -> str | None:
        """The label in `best_metric`, if that is a per_class metric."""
        of_one = CLASS_METRIC.fullmatch(self.best_metric)
        return None if of_one is None else of_one[1]

    def best_value(self, scores: dict[str, Any], prefix: str = "") -> float:
        """Return the value of `best_metric` among scores whose names begin with `prefix`."""
        of_one = CLASS_METRIC.fullmatch(self.best_metric)
        if of_one is None:
            value = scores[prefix + self.best_metric]
        else:
            value = scores[f"{prefix}per_class"][of_one[1]][of_one[2]]
        return math.nan if value is None else float(value)  # null in a file is NaN

    @property
    def takes_highest(self) -> bool:
        """Whether the highest value of `best_metric` is the best."""
        usual = self.best_metric not in LOWER_IS_BETTER
        return usual if self.greater_is_better is None else self.greater_is_better

    @property
    def best_rule(self) -> str:
        """How the best model is chosen: the metric, with its direction where `greater_is_better`
        reverses the usual one.
        """
        if self.takes_highest == (self.best_metric not in LOWER_IS_BETTER):
            return self.best_metric
        return f"{self.best_metric}, the {'highest' if self.takes_highest else 'lowest'}"

    def idle_keys(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield each key set without effect, the keys that cause this, and a message."""

        def is_set(key: str) -> bool:
            return bool(getattr(self, key) != TrainConfig.model_fields[key].default)

        for key, needed in NEEDS.items():
            if is_set(key) and all(getattr(self, each) in (None, False, "none") for each in needed):
                words = f"{key} has no effect on training without {' or '.join(needed)}"
                yield key, needed, words
        for key, other, values in IDLE_UNDER:
            if is_set(key) and getattr(self, other) in values:
                words = f"{key} has no effect under {other}={getattr(self, other)}"
                yield key, (other,), words

    def rules(self) -> Iterator[Fault]:
        """Check the keys against each other."""
        yield from super().rules()
        named = [self.train_split_name or "train", self.validation_split_name, self.test_split_name]
        twice = [name for name in named if name is not None and named.count(name) > 1]
        if twice:
            fault = f"the split {twice[0]} is named twice (train_split_name defaults to train)"
            yield tuple(sorted(SPLIT_KEYS)), f"{', '.join(sorted(SPLIT_KEYS))}: {fault}"
        yield from self._not_both("global_batch_size", "gradient_accumulation_steps")
        if self.per_device_train_batch_size == "auto":
            yield from self._not_both("per_device_train_batch_size", "gradient_accumulation_steps")
        wanted, is_regression = self.best_metric, self.problem_type == "regression"
        of_one = () if is_regression else ("per_class.LABEL.f1 (precision, recall)",)
        if wanted not in METRICS[self.problem_type] and (is_regression or self.best_label is None):
            allowed = ", ".join((*METRICS[self.problem_type], *of_one))
            longer = [name for name in METRICS[self.problem_type] if name.startswith(wanted)]
            near = f" Did you mean `{longer[0]}`?" if longer else ""
            words = f"is no metric of {self.problem_type}.{near} Allowed: {allowed}"
            yield self._fault(words, "metric_for_best_model", "problem_type")
        for key in ("class_weights", "oversampling", "label_smoothing_factor"):
            if getattr(self, key) and self.problem_type != "single_label_classification":
                words = f"is for single_label_classification only, not {self.problem_type}"
                yield self._fault(words, key, "problem_type")
        may_differ = sorted(COMPARED - FIXED)
        for name in sorted(set(self.allow_changed) - set(may_differ)):
            near = nearest(name, may_differ)
            told = f"allow_changed={name}: cannot be allowed to differ.{near}"
            yield ("allow_changed",), f"{told} Allowed: {', '.join(may_differ)}"
        if self.output_dir.is_file():
            yield self._fault("is a file. Fix: another name", "output_dir")
        if re.search("[\ud800-\udfff]", str(self.output_dir)):
            yield self._fault(
                "is not UTF-8: no checkpoint could be saved there. Fix: another name", "output_dir"
            )
        path = Path(self.resume_from_checkpoint or "latest")
        if self.resume_from_checkpoint not in (None, "latest") and not path.is_dir():
            there = [other.name for other in path.parent.glob("*")] + ["latest"]
            words = f"there is no such folder.{nearest(path.name, there)} Allowed: latest|FOLDER"
            yield self._fault(words, "resume_from_checkpoint")
        yield from self._not_both("freeze", "lora_r")
        if "none" in self.report_to and len(self.report_to) > 1:
            yield self._fault("none excludes others. Fix: none alone, or leave it out", "report_to")
        yield from self._not_both("oversampling", "class_weights")
        if self.train_file is None and self.dataset_name is None:
            for split in self.files:
                words = "given without training rows. Fix: add train_file or dataset_name"
                yield self._fault(words, f"{split}_file", "train_file", "dataset_name")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # `json` shadows a deprecated pydantic method

    class DoctorConfig(TrainConfig):
        """Check a set-up before training; without rows and model, on a small built-in job."""

        json: File | None = None  # type: ignore[assignment]
        """Write the findings to this JSON file."""

        def rules(self) -> Iterator[Fault]:
            """Check that the findings can be written."""
            if str(self.json) == "-":
                yield self._fault("is no file; findings are printed anyway. Fix: a file", "json")
            yield from super().rules()
            yield from self._to_write("json", *self.files.values())


class EvaluateConfig(DataConfig):
    """Evaluate a model. Keys that are left out have the values of the checkpoint's run."""

    checkpoint: Place
    """A run's folder, a checkpoint of any strategy, or any Hugging Face text classifier: folder,
    Hub id or package://."""
    split: Literal["test", "validation"] | None = None
    """Which rows; left out: the test rows where there are any, else the validation rows."""
    output: File | None = None
    """Write the metrics to this JSON file too."""
    max_seq_length: int | None = Field(None, ge=2)  # type: ignore[assignment]
    """Texts are cut at this many tokens; without a run: the model's limit, up to 512."""
    max_eval_samples: int | None = Field(None, ge=1)
    """Use this many of the rows, drawn at random (always the same ones)."""

    def rules(self) -> Iterator[Fault]:
        """Refuse to overwrite the rows with the metrics."""
        yield from super().rules()
        yield from self._to_write("output", *self.files.values())


class ExportConfig(HubConfig):
    """Write a checkpoint as a Hugging Face folder, with ONNX if asked for."""

    checkpoint: Place
    """A run's folder, a checkpoint of any strategy, or any Hugging Face text classifier: folder,
    Hub id or package://."""
    output: File
    """Folder to write, new or empty."""
    format: Literal["transformers", "onnx"] = "transformers"
    """onnx: write model.onnx too, checked against the model."""

    def rules(self) -> Iterator[Fault]:
        """Refuse Hub keys without push_to_hub."""
        yield from super().rules()
        for key in ("hub_model_id", "hub_private_repo"):
            if getattr(self, key) and not self.push_to_hub:
                yield self._fault("has no effect without push_to_hub", key)


class SearchConfig(Config):
    """Vary keys of a job over many trials of it, and keep the best."""

    job: Existing
    """YAML of the job, as `accel_ft.train --config` takes it."""
    space: Existing
    """YAML of the keys to vary: {low: A, high: B, log: true}, or a list to choose from."""
    output_dir: File = Path("runs/search")
    """Folder of the study and its trials; best.yaml is the job that is found."""
    config_file: Existing | None = None
    """accelerate's YAML, which decides the strategy of each trial."""
    num_trials: int = Field(20, ge=1)
    """Trials in all, those of earlier starts of the same study included, unless they failed."""
    parallel_trials: int = Field(1, ge=1)
    """Trials at the same time; GPUs are shared out among them."""


class PredictConfig(Config):
    """Label texts: one JSON line for each."""

    checkpoint: Place
    """A run's folder, a checkpoint of any strategy, or any Hugging Face text classifier: folder,
    Hub id or package://."""
    input: Place | None = None
    """File to label (csv, tsv, json, jsonl, parquet, or plain lines), or - for standard input."""
    input_format: Literal["auto", "csv", "tsv", "json", "jsonl", "parquet", "lines"] = "auto"
    """Format of the input; auto: by the file's name; standard input that begins with { is jsonl,
    with [{ json, else lines."""
    text: str | None = None
    """One text to label, in place of input; --text=... where it begins with a dash."""
    text_pair: str | None = None
    """Second text of a pair, given with text."""
    output: Place = "-"
    """File for the JSON lines, or - for standard output."""
    text_column: str = "text"
    """Column with the text (not for plain lines)."""
    text_pair_column: str | None = None
    """Column with the second text of a pair."""
    id_column: str | None = None
    """Column whose value is copied as "id"; left out: the column `id` where there is one."""
    all_scores: bool = False
    """Add every label's score."""
    max_seq_length: int | None = Field(None, ge=2)
    """Texts are cut at this many tokens; without a run: the model's limit, up to 512."""
    per_device_eval_batch_size: int | None = Field(None, ge=1)
    """Samples in a batch of the longest texts, on one rank; batches of shorter texts have more
    samples, up to the same number of tokens. Left out: 16 on a CPU, else 64; fewer for texts beyond
    512 tokens."""

    def rules(self) -> Iterator[Fault]:
        """Check that exactly one source of texts is given, and that it exists."""
        yield from super().rules()
        path = None if self.input in (None, "-") else Path(str(self.input))  # or a pipe: <(command)
        yield from self._to_write("output", path)
        if Path(self.output).suffix.lower() in (".csv", ".tsv", ".parquet"):
            yield self._fault("it gets JSON lines. Fix: a name ending in .jsonl", "output")
        if (self.input is None) == (self.text is None):
            words = "input, text: exactly one is needed. Fix: --input FILE (or -), or --text '...'"
            yield ("input", "text"), words
        if self.input == "-" and self.input_format == "parquet":
            yield self._fault("standard input cannot be parquet. Fix: a file", "input_format")
        if path is not None and (path.is_dir() or not path.exists()):
            yield self._fault(
                "it is a folder" if path.is_dir() else "there is no such file", "input"
            )
        if self.text_pair is not None and self.text is None:
            words = "given without text. Fix: add it; for a file, text_pair_column"
            yield self._fault(words, "text_pair", "text")
        if self.text is not None and self.id_column is not None:
            yield self._fault("given with text, which has no columns", "id_column", "text")
        if self.text is not None and self.input_format != "auto":
            yield self._fault("given with text, which is no file", "input_format", "text")
