"""How keys are read from YAML, command line and earlier runs; all faults are reported at once."""

import argparse
import importlib.util
import json
import os
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from accel_ft.config import (
    FILE_KEYS,
    HUB_KEYS,
    ROW_KEYS,
    Config,
    DataConfig,
    TrainConfig,
    type_name,
)
from accel_ft.errors import LONGEST, ConfigError, beside, nearest

LAUNCH_OPTIONS = (
    "mixed_precision", "num_processes", "num_machines", "config_file", "cpu", "multi_gpu",
    "dynamo_backend", "main_process_port", "use_fsdp", "gpu_ids",
)  # fmt: skip
TO_LAUNCH = "Fix: give it to `accelerate launch`, before -m"
KNOWN_ELSEWHERE = dict.fromkeys(LAUNCH_OPTIONS, TO_LAUNCH) | {
    "bf16": "Fix: --mixed_precision bf16 before -m, accelerate's YAML, or in a script "
    "ACCELERATE_MIXED_PRECISION=bf16; for false leave it out",
    "fp16": "Fix: --mixed_precision fp16 before -m, accelerate's YAML, or in a script "
    "ACCELERATE_MIXED_PRECISION=fp16; for false leave it out",
    "torch_compile": "Fix: --dynamo_backend inductor before -m, or accelerate's YAML",
    "eval_strategy": "Fix: eval_steps; left out, each epoch is evaluated",
    "evaluation_strategy": "Fix: eval_steps; left out, each epoch is evaluated",
    "overwrite_output_dir": "Fix: another output_dir, or resume_from_checkpoint: latest",
    "auto_find_batch_size": "Fix: per_device_train_batch_size: auto",
    "save_strategy": "Fix: save_steps",
    "logging_strategy": "Fix: logging_steps",
    "warmup_ratio": "Fix: warmup_steps below 1 is a share of all updates",
    "group_by_length": "Fix: train_sampling_strategy; group_by_length is its default",
    "pad_to_max_length": "Fix: leave it out; batches are as wide as their longest row",
    "remove_unused_columns": "Fix: leave it out; text_column and label_column are read",
    "shuffle_train_dataset": "Fix: leave it out; each epoch is shuffled again",
    "ddp_find_unused_parameters": "Fix: leave it out; it is set where needed",
    "full_determinism": "Fix: leave it out; a CPU run is deterministic",
    "use_cpu": "Fix: accelerate_configs/cpu.yaml as accelerate's YAML",
    "no_cuda": "Fix: accelerate_configs/cpu.yaml as accelerate's YAML",
    "fsdp": "Fix: accelerate_configs/fsdp2.yaml as accelerate's YAML",
    "deepspeed": "It is not supported. Fix: accelerate_configs/fsdp2.yaml as accelerate's YAML",
    "hub_token": "Fix: `hf auth login`, or HF_TOKEN",
    "token": "Fix: `hf auth login`, or HF_TOKEN",
    "cache_dir": "Fix: HF_HOME",
    "trust_remote_code": "It is always off: a model's own code is never run",
    "compute_metrics": "It is not supported; predictions.npz has the logits",
    "do_regression": "Fix: problem_type: regression",
    "metric_name": "Fix: metric_for_best_model; all metrics are computed",
    "device": "Fix: CUDA_VISIBLE_DEVICES, or accelerate's YAML",
    "batch_size": "Fix: per_device_train_batch_size, or per_device_eval_batch_size",
    "per_device_batch_size": "Fix: per_device_train_batch_size, or per_device_eval_batch_size",
    "eval_batch_size": "Fix: per_device_eval_batch_size",
    "validation_split_percentage": "Fix: validation_file; without it, a tenth of the training rows "
    "is held out, 2,000 at most",
    "optim": "It is always AdamW, fused",
    "adam_beta1": "It is always 0.9",
    "adam_beta2": "It is always 0.999",
    "adam_epsilon": "It is always 1e-8",
    "logging_dir": "Fix: leave it out; trackers' files lie in output_dir",
    "dataloader_pin_memory": "Fix: leave it out; it is on with a GPU",
    "lr": "Fix: learning_rate",
    "epochs": "Fix: num_train_epochs",
    "do_train": "Fix: leave it out; it always trains",
    "do_eval": "Fix: leave it out; it always evaluates",
    "do_predict": "Fix: leave it out; test rows are always predicted, into predictions.npz",
    "dropout": "Fix: set it in the model's config.json, often as hidden_dropout_prob",
    "revision": "Fix: hf download ID --revision R --local-dir FOLDER, and use that folder",
    "model_revision": "Fix: hf download ID --revision R --local-dir FOLDER, and use that folder",
    "attn_implementation": "Fix: leave it out; device and model decide",
    "tokenizer_name": "Fix: leave it out; the model's own is used",
    "run_name": "Fix: leave it out; trackers call a run by its output_dir",
    "data_seed": "Fix: seed, which decides the order of rows, too",
    "dataloader_drop_last": "Fix: leave it out; the loss of a short last batch is averaged over it",
    "num_labels": "Fix: leave it out; they are counted in the rows",
}
GROUPS = {  # sections of --help: first key of each -> title
    "dataset_name": "rows",
    "model_name_or_path": "model, output and length of training",
    "learning_rate": "optimizer and schedule",
    "class_weights": "loss and labels",
    "freeze": "what is trained",
    "seed": "logging, evaluation and checkpoints",
    "resume_from_checkpoint": "resume and faults",
    "report_to": "reports and trackers",
    "profile": "speed",
    "push_to_hub": "the Hub",
    "checkpoint": "what and where",
    "json": "findings",
}
NO_FILE = "there is no such file"
OF_RUN = "from the run's config.yaml"
C = TypeVar("C", bound=Config)


def parse(
    config_class: type[C],
    argv: Sequence[str] | None,
    prog: str,
    base: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {},
) -> C:
    """Read `--config FILE` and `--key value` overrides into a checked configuration.

    Args:
        config_class: defines the keys that are allowed.
        argv: the command line without the program; None for sys.argv.
        prog: the command's name, for --help.
        base: given the values that are set, returns values for the other keys; unknown keys in
            them are ignored.

    Raises:
        ConfigError: listing all faults.
        SystemExit: 0 after --help or --print_config.
    """
    parser = _parser(config_class, prog)
    options, unknown = parser.parse_known_args(argv)
    given = vars(options)
    config_files, print_config = given.pop("config", []), given.pop("print_config", False)
    if len(config_files) > 1:
        raise ConfigError(f"config={', '.join(config_files)}: one file can be given. Fix: keep one")
    faults: list[str] = []
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for config_file in config_files:
        for key, value, line in _read_yaml(Path(os.path.expanduser(config_file))):
            values[key], origin[key] = value, f"{config_file}, line {line}"
    for key, value in given.items():
        values[key], origin[key] = _from_text(key, config_class.model_fields[key], value), ""
    for word in unknown:
        if word.startswith("--"):
            key = word.removeprefix("--").split("=")[0]
            faults.append(f"--{key}: unknown key.{meant(key, config_class.model_fields)}")
        elif not any(fault.startswith("--") for fault in faults):
            faults.append(f"{word}: is not an option. Allowed: --key value")
    config = checked(config_class, values, base(values), origin, faults)
    if print_config:
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(config.to_yaml())
        raise SystemExit(0)
    return config


def meant(key: str, known: Collection[str]) -> str:
    """Return a hint for a key that is not `known`."""
    if key in KNOWN_ELSEWHERE:
        return f" {KNOWN_ELSEWHERE[key]}"
    if key == "model_name_or_path" and "checkpoint" in known:
        return " Fix: --checkpoint"
    if key not in TrainConfig.model_fields and _is_the_trainers(key):
        return " TrainingArguments has it, accel_ft does not. --help lists the keys"
    return nearest(key, known) or " --help lists the keys"


def _is_the_trainers(key: str) -> bool:
    """Whether `TrainingArguments` has a key; searches its source, as importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    source = Path(str(spec.origin)).with_name("training_args.py")
    text = source.read_text(encoding="utf-8")
    return re.search(rf"^    {re.escape(key)}: ", text, re.MULTILINE) is not None


def checked(
    config_class: type[C],
    values: dict[str, Any],
    base: dict[str, Any] | None = None,
    origin: dict[str, str] | None = None,
    faults: Sequence[str] = (),
) -> C:
    """Build a configuration from `values` and check it.

    Args:
        values: by key.
        base: values for the other keys; unknown keys in it are ignored.
        origin: where each value was set, by key, for messages.
        faults: messages of faults found earlier.

    Raises:
        ConfigError: listing all faults.
    """
    fields, origin, listed, faulty = config_class.model_fields, origin or {}, list(faults), set()
    taken = {
        key: value for key, value in (base or {}).items() if key in fields and key not in values
    }
    origin = dict.fromkeys(taken.keys() - {"output_dir"}, OF_RUN) | origin
    values = taken | values
    try:
        config = config_class.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            key = str(item["loc"][0])
            if key in faulty:
                continue
            faulty.add(key)
            where = f" ({origin[key]})" if origin.get(key) else ""
            allowed = type_name(fields[key].annotation) if key in fields else ""
            if item["type"] == "extra_forbidden":
                listed.append(f"{key}{where}: unknown key.{meant(key, fields)}")
            elif item["type"] == "missing":
                listed.append(f"{key}: is required. Fix: --{key} {allowed}")
            elif item["type"] == "bool":
                found = "no value given" if origin.get(key) == "" else item["msg"]
                listed.append(f"{key}{where}: {found}. Allowed: {allowed}")
            else:
                listed.append(f"{key}={_told(item)}{where}: {_why(item, fields[key])}")
        # Rules between sound keys still run; __file__ stands in for a missing text or file.
        sound = {key: value for key, value in values.items() if key not in faulty}
        required = {key: __file__ for key, field in fields.items() if field.is_required()}
        config = config_class.model_validate(required | sound)
    for keys, message in config.rules():
        if not faulty & set(keys):
            told = {key: origin.get(key) for key in keys if values.get(key) is not None}
            where = "; ".join(f"{key}: {place}" for key, place in told.items() if place)
            fix = ". Fix: start from the folder the run was started in, or another path"
            is_lost = NO_FILE in message and OF_RUN in told.values()
            listed.append(message + f" ({where})" * bool(where) + fix * is_lost)
    if listed:
        many = f"{len(listed)} faults in the configuration:\n  " if len(listed) > 1 else ""
        raise ConfigError(many + "\n  ".join(listed))
    return config


def _told(item: Any) -> Any:
    """Return a faulty value as messages show it: a large one by its type alone."""
    given = item["input"]
    is_short = isinstance(given, str) or (
        # Checked first: YAML aliases may expand to any size and depth.
        not (isinstance(given, list | dict) and "..." in reprlib.repr(given))
        and len(str(given)) <= LONGEST
        and "\n" not in str(given)
    )
    return given if is_short else f"a {type(given).__name__}"


def _why(item: Any, field: FieldInfo) -> str:
    """Return what is wrong with a value, in clearer words than pydantic's."""
    words: str = {
        "path_type": "is not a path",
        "path_not_file": NO_FILE,
        "literal_error": "is not one of its choices",
        "int_parsing": "is not a whole number",
        "int_from_float": "is not a whole number",
        "float_parsing": "is not a number",
    }.get(item["type"], item["msg"].replace("Input should be", "must be"))
    if item["type"].startswith(("greater_than", "less_than")):
        return words + ". Fix: leave it out" * (field.default is None)
    if words == NO_FILE and Path(item["input"]).is_dir():
        return "is a folder. Fix: a file"
    words += f". Allowed: {type_name(field.annotation)}"
    return words + ". Fix: save it with to_csv, give its path" * hasattr(item["input"], "to_csv")


def read_settings(path: Path, name: str = "config") -> dict[str, Any]:
    """Read the keys of a YAML file, unchecked; messages call the file `name`.

    Raises:
        ConfigError: it cannot be read, is no mapping, or sets a key twice.
    """
    return {key: value for key, value, _ in _read_yaml(path, name)}


def run_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that `values["checkpoint"]` belongs to; {} if there is none.

    If `values` name any rows, the run's row keys and its max_eval_samples are left out.
    """
    run = run_folder(str(values.get("checkpoint", "")))
    if run is None:
        return {}
    settings = read_settings(run / "config.yaml")
    replaced = ROW_KEYS | {"max_eval_samples"} if _named_rows(values) else set()
    known = TrainConfig.model_fields.keys() - replaced  # not where a command writes (its `output`)
    return {key: value for key, value in settings.items() if key in known}


def settings_to_reproduce(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run to reproduce, with an output_dir beside the run's."""
    if not isinstance(values.get("reproduce"), str | os.PathLike):  # `checked` reports it
        return {}
    folder = Path(os.path.expanduser(values["reproduce"])).resolve()
    if not is_run(folder):
        raise ConfigError(f"reproduce={folder}: holds no run")
    settings = read_settings(folder / "config.yaml")
    named = _named_rows(values)  # for example because the files were moved
    dropped = HUB_KEYS | {name.replace("_file", "_split_name") for name in named}
    if "train_file" in named:
        dropped |= ROW_KEYS - FILE_KEYS
    if "dataset_name" in named:
        dropped |= FILE_KEYS
    output_dir = folder.with_name(f"{folder.name}_again")
    known = TrainConfig.model_fields.keys() - dropped  # not where the doctor writes (its `json`)
    kept = {key: value for key, value in settings.items() if key in known}
    return kept | {"output_dir": output_dir}


def _named_rows(values: dict[str, Any]) -> set[str]:
    return {key for key in FILE_KEYS | {"dataset_name"} if values.get(key) is not None}


def run_folder(checkpoint: str) -> Path | None:
    """Return the folder of the run that a checkpoint or model belongs to, or None."""
    folder = Path(os.path.expanduser(checkpoint)).resolve()
    if not folder.exists():  # a Hub id: its parents would be the current folder's
        return None
    candidates = (folder, folder.parent, folder.parent.parent)  # a run, its model, its checkpoint
    return next((path for path in candidates if is_run(path)), None)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run that has begun to train."""
    return all((folder / name).is_file() for name in ("config.yaml", "receipt.json"))


def read_receipt(run: Path) -> dict[str, Any]:
    """Read the receipt.json of a run's folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = run / "receipt.json"
    try:
        receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        receipt["identity"]["labels"], receipt["data"]["train"], receipt["strategy"]["device"]
        [start["step"] for start in receipt["starts"]]
    except (FileNotFoundError, NotADirectoryError) as error:
        whole = run_folder(str(run))
        near = f" Fix: {whole}" if whole else beside(run) * (not run.exists())
        raise ConfigError(f"{run}: holds no run of accel_ft (no receipt.json).{near}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no receipt of accel_ft: {error}") from error
    return receipt


def trained_on(run: Path) -> set[str]:
    """Return the fingerprints of the rows that a run was trained on, in its last start and in the
    earlier ones.

    Raises:
        ConfigError: as `read_receipt`.
    """
    receipt = read_receipt(run)
    of_starts = (start.get("identity", {}).get("train_data") for start in receipt["starts"])
    return {receipt["data"]["train"], *filter(None, of_starts)}


def _parser(config_class: type[Config], prog: str) -> argparse.ArgumentParser:
    """Make one option for each key, with its docstring and default as help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m accel_ft.{prog}",
        usage="%(prog)s [--config FILE] [--key value ...]",
        description=(config_class.__doc__ or prog).splitlines()[0],
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML with any of the keys below; --key value overrides it",
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print every key as it would be used, and stop"
    )
    group = parser.add_argument_group("keys")
    of_run = "checkpoint" in config_class.model_fields
    for key, field in config_class.model_fields.items():
        if key in GROUPS:
            group = parser.add_argument_group(GROUPS[key])
        about = " ".join((field.description or "").split()).replace("%", "%%")
        value = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        value = "none" if value in (None, "") else value
        default = " (required)" if field.is_required() else f" (default: {value})"
        if of_run and key in DataConfig.model_fields:
            default = " (default: the run's" + f", else {value}" * (value != "none") + ")"
        elif value == "none" and "left out:" in about.lower():
            default = ""
        metavar, words = type_name(field.annotation), about + default
        if ",..." in metavar:  # a,b or a b
            group.add_argument(f"--{key}", nargs="*", metavar=metavar, help=words)
        else:
            group.add_argument(f"--{key}", nargs="?", const=True, metavar=metavar, help=words)
    return parser


def _from_text(key: str, field: FieldInfo, value: Any) -> Any:
    """Convert a command-line value; `none` and `null` mean None where the key allows it."""
    if isinstance(value, list):
        words = (word.strip(",") for word in value)
        value = ",".join(word for word in words if word) or True  # True: no value given
    is_none = isinstance(value, str) and value.lower() in ("none", "null")
    is_none = is_none and key not in ("text", "text_pair")  # "none" can be a text
    return None if is_none and type(None) in typing.get_args(field.annotation) else value


def _read_yaml(path: Path, name: str = "config") -> Iterator[tuple[str, Any, int]]:
    """Yield key, value and line of each top-level YAML entry; plain data only, no tags."""
    if not path.is_file():
        what = "is a folder. Fix: a YAML file" if path.is_dir() else NO_FILE
        raise ConfigError(f"{name}={path}: {what}")
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name}={path}: cannot be read: {reason}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name}={path}: must be a mapping. Allowed: lines of the form `key: value`"
        )
    seen: dict[str, int] = {}
    for key_node, _ in root.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                f"{key} ({path}, line {line}): set twice, first in line {seen[key]}. Fix: keep one"
            )
        seen[key] = line
        yield key, values.get(key), line
