import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import run

from accel_ft import errors
from accel_ft.config import (
    DoctorConfig,
    EvaluateConfig,
    ExportConfig,
    PredictConfig,
    SearchConfig,
    TrainConfig,
)
from accel_ft.errors import ConfigError
from accel_ft.settings import (
    _is_the_trainers,
    meant,
    parse,
    run_settings,
    settings_to_reproduce,
)

ROOT = Path(__file__).parents[2]


def train_config(*words: str) -> TrainConfig:
    return parse(TrainConfig, words, "train")


def fault(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        train_config(*words)
    return str(caught.value)


def write(folder: Path, text: str) -> str:
    path = folder / "job.yaml"
    path.write_text(text)
    return str(path)


def test_file_sets_and_word_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, "learning_rate: 2e-5\nseed: 7\nsave_total_limit: null\n")
    config = train_config("--config", file, "--seed", "8", "--load_best_model_at_end")
    assert config.learning_rate == 2e-5  # YAML itself reads 2e-5 as a string
    assert config.seed == 8
    assert config.save_total_limit is None
    assert config.load_best_model_at_end is True
    assert train_config("--save_total_limit=none").save_total_limit is None
    file = write(tmp_path, "report_to: html,tensorboard\nclass_weights: balanced\n")
    config = train_config("--config", file)
    assert config.report_to == ("html", "tensorboard")
    assert config.class_weights == "balanced"
    assert train_config("--config", write(tmp_path, "report_to: [html]\n")).report_to == ("html",)


def test_invalid_values_in_yaml(tmp_path: Path) -> None:
    assert "class_weights" in fault("--config", write(tmp_path, "class_weights: [1, yes, 3, 4]\n"))
    assert "true given" in fault("--config", write(tmp_path, "class_weights: [1, yes, 3, 4]\n"))
    for key in ("output_dir", "reproduce", "model_name_or_path"):
        assert "is not a path" in fault("--config", write(tmp_path, f'{key}: "a\\0b"\n'))


def test_off_is_not_false(tmp_path: Path) -> None:
    """YAML reads an unquoted `off` as false, but preflight has the value off."""
    assert train_config("--config", write(tmp_path, "preflight: off\n")).preflight == "off"
    assert "preflight" in fault("--config", write(tmp_path, "preflight: on\n"))


def test_seeds_leave_room_for_ranks_and_updates() -> None:
    """numpy's seeds end at 2^32, and the rank or the update number is added to them."""
    assert train_config("--seed", str(2**31 - 1)).seed == 2**31 - 1
    assert "seed=2147483648" in fault("--seed", str(2**31))
    assert "max_steps=1000000000000: must be less than" in fault("--max_steps", "1000000000000")


def test_keys_of_the_trainer_are_known_by_its_source() -> None:
    import dataclasses

    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert [name for name in names if not _is_the_trainers(name)] == []
    assert not _is_the_trainers("lerning_rate")
    assert "output" in meant("output_dir", PredictConfig.model_fields)  # a key of `train`
    assert meant("model_name_or_path", PredictConfig.model_fields) == " Fix: --checkpoint"
    assert "checkpoint" not in meant("model_name_or_path", SearchConfig.model_fields)


def test_keys_of_the_trainer_in_a_locale_without_utf8() -> None:
    """Its source is not ASCII."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = ("python", "-m", "accel_ft.train", "--eval_accumulation_steps", "4")
    told = run(*command, check=False, env=ascii_only).stderr
    assert told.startswith(
        "error: --eval_accumulation_steps: unknown key. TrainingArguments has it"
    )


def test_options_of_the_launcher_are_told() -> None:
    assert "--mixed_precision: unknown key. Fix: give it to `accelerate launch`" in fault(
        "--mixed_precision", "no"
    )


def test_keys_of_the_trainer_that_are_said_otherwise_here(tmp_path: Path) -> None:
    assert "--bf16: unknown key. Fix: --mixed_precision bf16 before -m" in fault("--bf16", "true")
    assert "--adam_beta1: unknown key. It is always 0.9" in fault("--adam_beta1", "0.9")
    assert "--num_labels: unknown key. Fix: leave it out" in fault("--num_labels", "4")
    for key, fix in (
        ("per_device_batch_size", "per_device_train_batch_size, or per_device_eval_batch_size"),
        ("eval_batch_size", "per_device_eval_batch_size"),
        ("validation_split_percentage", "validation_file"),
        ("model_revision", "hf download"),
        ("attn_implementation", "leave it out"),
    ):
        assert f"--{key}: unknown key. Fix: {fix}" in fault(f"--{key}", "1")
    # No other key is matched by spelling: `gradient_accumulation_steps` would mean something else.
    other = "--eval_accumulation_steps: unknown key. TrainingArguments has it, accel_ft does not"
    assert other in fault("--eval_accumulation_steps", "4")
    assert "Fix: train_sampling_strategy; group_by_length" in fault("--group_by_length", "true")
    assert "Did you mean `f1_macro`? Allowed" in fault("--metric_for_best_model", "f1")
    for kind in ("single_label_classification", "multi_label_classification"):
        keys = ("--load_best_model_at_end", "--metric_for_best_model", "roc_auc")
        assert train_config("--problem_type", kind, *keys).best_metric == "roc_auc"
    message = fault("--config", write(tmp_path, "eval_strategy: steps\nmixed_precision: bf16\n"))
    assert "eval_strategy" in message
    assert "unknown key. Fix: eval_steps" in message
    assert "unknown key. Fix: give it to `accelerate launch`, before -m" in message


def test_all_faults_at_once_with_their_places(tmp_path: Path) -> None:
    file = write(
        tmp_path, "sed: 3\nnum_train_epochs: lots\nlogging_steps: true\ntrain_file: no/rows.csv\n"
    )
    message = fault(
        "--config",
        file,
        "--lerning_rate",
        "1",
        "--seed",
        "--weight_decay",
        "-1",
        "--max_steps",
        "0",
    )
    assert message.startswith("8 faults")
    assert "--lerning_rate: unknown key. Did you mean `learning_rate`?" in message
    assert f"sed ({file}, line 1): unknown key. Did you mean `seed`?" in message
    assert "--zz: unknown key. --help lists the keys" in fault("--zz", "1")
    assert f"num_train_epochs=lots ({file}, line 2)" in message
    assert f"logging_steps ({file}, line 3): true given. Allowed: INT" in message
    lost = "train_file=no/rows.csv: there is no such file."
    assert f"{lost} (train_file: {file}, line 4)" in message
    assert "run was started in" not in message
    assert "seed: no value given. Allowed: INT" in message
    assert "weight_decay=-1: must be greater than or equal to 0\n" in message
    assert "max_steps=0: must be greater than or equal to 1" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: [1\n", "cannot be read"),
        ("- seed\n", "must be a mapping"),
        ("seed: 1\nseed: 2\n", r"line 2\): set twice, first in line 1"),
        ("seed: !!python/object/apply:os.system ['true']\n", "cannot be read"),
        ("learning_rate: .nan\n", "finite"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train_config("--config", write(tmp_path, text))


def test_rules_between_keys(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.touch()
    assert "keep one of the two" in fault(
        "--global_batch_size", "8", "--gradient_accumulation_steps", "2"
    )
    assert "keep one of the two" in fault("--dataset_name", "x", "--train_file", str(rows))
    assert "given without dataset_name" in fault("--dataset_config_name", "mrpc")
    assert "given without dataset_name" in fault("--test_split_name", "test_matched")
    for words in (
        ["--test_split_name", "train"],
        ["--test_split_name", "a", "--validation_split_name", "a"],
    ):
        assert "is named twice (train_split_name defaults to train)" in fault(
            "--dataset_name", "x", *words
        )
    words = ["--checkpoint", "m", "--dataset_name", "x", "--test_split_name", "train"]
    parse(EvaluateConfig, words, "evaluate")  # it does not train
    (tmp_path / "link.csv").symlink_to("gone.csv")
    told = "link.csv: is a link to gone.csv, which is not there"
    assert told in fault("--train_file", str(tmp_path / "link.csv"))
    assert "without training rows" in fault("--test_file", str(rows))
    (tmp_path / "rows.xls").touch()
    assert "unknown format. Allowed: .csv" in fault("--train_file", str(tmp_path / "rows.xls"))
    assert "it is a folder" in fault("--train_file", str(tmp_path))
    os.mkfifo(tmp_path / "pipe.csv")
    assert "it is no regular file" in fault("--train_file", str(tmp_path / "pipe.csv"))
    assert "Did you mean `rows.csv`?" in fault("--train_file", str(tmp_path / "row.csv"))
    gone = fault("--resume_from_checkpoint", "true")  # the Trainer accepts `true`
    assert gone == "resume_from_checkpoint=true: there is no such folder. Allowed: latest|FOLDER"
    (tmp_path / "step_00000010").mkdir()
    gone = fault("--resume_from_checkpoint", str(tmp_path / "step_00000001"))
    assert "there is no such folder. Did you mean `step_00000010`?" in gone


def test_paths_from_python_have_a_home_too() -> None:
    """Otherwise a folder named `~` would be made, which is dangerous to remove."""
    assert TrainConfig(output_dir=Path("~/a b")).output_dir == Path.home() / "a b"


def test_a_job_to_search_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="job=.: is a folder. Fix: a file"):
        parse(SearchConfig, ["--job", ".", "--space", __file__], "search")
    with pytest.raises(ConfigError, match="job=no.yaml: there is no such file. Allowed: PATH"):
        parse(SearchConfig, ["--job", "no.yaml", "--space", __file__], "search")


def test_loose_words_are_refused() -> None:
    assert "3: is not an option" in fault("3")


def test_a_list_is_written_with_commas_or_blanks() -> None:
    for words in (["wandb,tensorboard"], ["wandb", "tensorboard"]):
        config = train_config("--report_to", *words, "--seed", "1")
        assert config.report_to == ("wandb", "tensorboard")
    assert train_config("--class_weights", "1", "2.5").class_weights == (1.0, 2.5)
    assert train_config("--class_weights", "none").class_weights is None
    assert train_config("--allow_changed", "none", "--report_to", "none").allow_changed == ()
    assert "report_to" in fault("--report_to")
    spaced = train_config("--lora_target_modules", "query, value", "--report_to", "html,", "wandb")
    assert spaced.lora_target_modules == ("query", "value")
    assert spaced.report_to == ("html", "wandb")
    assert train_config("--class_weights", "1,", "2.5", ",").class_weights == (1.0, 2.5)
    assert "class_weights=" in fault("--class_weights", "1,,2")  # a missing weight
    for words in (["query", ",", "value"], ["query,", ",value"], ["query,,value,"]):
        assert train_config("--lora_target_modules", *words).lora_target_modules == (
            "query",
            "value",
        )


def test_paths_of_the_home_folder_and_of_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train_config("--output_dir=~/run").output_dir == tmp_path / "run"
    with pytest.raises(ConfigError, match="output_dir=.* is not UTF-8: no checkpoint could"):
        train_config(f"--output_dir={os.fsdecode(b'latin' + bytes([0xE9]))}")
    for key in ("output_dir", "dataset_name", "model_name_or_path"):  # from an unset shell variable
        assert f"{key}=: Value error, is empty" in fault(f"--{key}", "")
        assert "is too long a name" in fault(f"--{key}", "n" * 300)
    config = parse(PredictConfig, ["--checkpoint", "~/x", "--text", "~/x"], "predict")
    assert (config.checkpoint, config.text) == (str(tmp_path / "x"), "~/x")
    (tmp_path / "x.yaml").write_text("")
    files = [word for key in ("job", "space", "config_file") for word in (f"--{key}", "~/x.yaml")]
    search = parse(SearchConfig, files, "search")
    assert search.config_file == search.job == tmp_path / "x.yaml"
    assert train_config("--label_separator", "~").label_separator == "~"


def test_help_has_a_line_for_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    for config_class in (
        TrainConfig, EvaluateConfig, PredictConfig, ExportConfig, SearchConfig, DoctorConfig,
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            parse(config_class, ["--help"], "train")
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        for key, field in config_class.model_fields.items():
            assert f"--{key} " in shown
            assert field.description, key
            if field.default in (False, 0):
                assert re.search(rf"--{key} .*?\(default:\s+{field.default}\)", shown, re.DOTALL)
        # Lists and None must look as they do on a command line.
        assert not re.search(r"default:\s+(\(|None)", shown)


def test_print_config_feeds_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_config("--learning_rate", "2e-5", "--print_config")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert set(yaml.safe_load(shown)) == set(TrainConfig.model_fields)
    assert train_config("--config", write(tmp_path, shown)) == train_config(
        "--learning_rate", "2e-5"
    )


def test_a_union_is_told_what_is_wrong_with_what_was_meant() -> None:
    """class_weights is `balanced` or numbers: if numbers are given, the message is about numbers."""
    message = fault("--class_weights", "1,0,1")
    assert "greater than 0" in message
    assert "balanced" not in message.partition("Allowed")[0]


def test_rows_are_not_replaced_and_pairs_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # on every rank
    rows = tmp_path / "rows.csv"
    rows.touch()
    words = ["--checkpoint", "m", "--test_file", str(rows), "--output", str(rows)]
    with pytest.raises(ConfigError, match="would overwrite the rows"):
        parse(EvaluateConfig, words, "evaluate")
    with pytest.raises(ConfigError, match="would overwrite the rows"):
        parse(DoctorConfig, ["--train_file", str(rows), "--json", str(rows)], "doctor")
    with pytest.raises(ConfigError, match="json=-: is no file; findings are printed anyway"):
        parse(DoctorConfig, ["--json", "-"], "doctor")
    words = ["--checkpoint", "m", "--input", str(rows), "--text_pair", "x"]
    with pytest.raises(ConfigError, match="text_pair=x: given without text"):
        parse(PredictConfig, words, "predict")


def test_home_folders_of_nobody(tmp_path: Path) -> None:
    """`~user` of an unknown user is an error message, not a traceback."""
    with pytest.raises(ConfigError, match="there is no such file"):
        train_config("--config", "~nobody-of-that-name/job.yaml")
    assert run_settings({"checkpoint": "~nobody-of-that-name/run"}) == {}
    with pytest.raises(ConfigError, match="holds no run"):
        settings_to_reproduce({"reproduce": "~nobody-of-that-name/run"})


def test_what_is_reproduced_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="reproduce: no value given"):
        parse(TrainConfig, ["--reproduce"], "train", settings_to_reproduce)
    assert settings_to_reproduce({"reproduce": 2024}) == {}


def test_the_folder_of_a_reproduction_is_not_from_the_run(tmp_path: Path) -> None:
    for folder in ("run", "run_again"):
        (tmp_path / folder).touch()
    base = {"output_dir": tmp_path / "run_again", "test_file": tmp_path / "run"}
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, [], "train", lambda _: base | {"train_file": None})
    kind, folder, alone = str(caught.value).splitlines()[1:]
    assert kind.endswith("parquet (test_file: from the run's config.yaml)")
    assert folder.endswith("is a file. Fix: another name")
    assert alone.endswith("or dataset_name (test_file: from the run's config.yaml)")


def test_a_run_is_told_by_two_files(tmp_path: Path) -> None:
    """A receipt.json that happens to lie in the folder does not make it a run."""
    (tmp_path / "receipt.json").write_text("{}")
    (tmp_path / "models/bert").mkdir(parents=True)
    assert run_settings({"checkpoint": str(tmp_path / "models/bert")}) == {}


def test_more_epochs_than_can_be_counted() -> None:
    with pytest.raises(ConfigError, match="num_train_epochs=1e18: must be less than or equal to"):
        train_config("--num_train_epochs", "1e18")


def test_no_arguments_is_the_ag_news_job() -> None:
    """examples/ag_news.yaml spells out the job that runs if no key is set."""
    from accel_ft.config import DEFAULT_DATASET
    from accel_ft.engine.build import DEFAULT_GLOBAL_BATCH_SIZE

    file = train_config("--config", str(ROOT / "examples/ag_news.yaml"))
    meant = {"dataset_name": DEFAULT_DATASET, "global_batch_size": DEFAULT_GLOBAL_BATCH_SIZE}
    assert file == train_config().resolved(**meant)


def test_a_run_does_not_say_where_commands_write(tmp_path: Path) -> None:
    """The run may be another person's: its config.yaml must not name files to write."""
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "receipt.json").touch()
    (run / "config.yaml").write_text("output: ~/.bashrc\njson: ~/.bashrc\nseed: 1\n")
    assert run_settings({"checkpoint": str(run)}) == {"seed": 1}
    again = settings_to_reproduce({"reproduce": str(run)})
    assert again == {"seed": 1, "output_dir": tmp_path / "run_again"}


def test_a_yaml_that_grows_in_the_reading(tmp_path: Path) -> None:
    """Nested aliases (ten lists of ten lists of ...): a message that printed the value would fill the memory."""
    lines = [
        "a0: &a0 x",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)),
    ]
    for value in ("*a29", "[[[[[[[[*a29]]]]]]]]"):
        (tmp_path / "job.yaml").write_text("\n".join([*lines, f"seed: {value}"]))
        with pytest.raises(ConfigError, match=r"seed=a list \(.*job.yaml, line 31\): "):
            train_config("--config", str(tmp_path / "job.yaml"))


def test_evaluate_takes_the_rest_from_the_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.touch()
    run = tmp_path / "run"
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    (run / "model").mkdir()
    (run / "receipt.json").touch()
    (run / "config.yaml").write_text(
        f"text_column: body\nmax_seq_length: 64\ntest_file: {rows}\nseed: 1\n"
    )
    for folder in (run, run / "model", run / "checkpoints/step_00000001"):
        words = ["--checkpoint", str(folder), "--max_seq_length", "32"]
        config = parse(EvaluateConfig, words, "evaluate", run_settings)
        assert (config.text_column, config.max_seq_length, config.test_file) == ("body", 32, rows)
    (run / "config.yaml").write_text("max_eval_samples: 7\ntest_file: null\n")
    found = [
        parse(EvaluateConfig, ["--checkpoint", str(run), *words], "evaluate", run_settings)
        for words in ([], ["--validation_file", str(rows)])
    ]
    # The run's max_eval_samples applies only to the run's own rows.
    assert [config.max_eval_samples for config in found] == [7, None]
    (run / "config.yaml").write_text(f"text_column: body\ntest_file: {rows}\n")
    rows.rename(tmp_path / "moved.csv")
    words = ["--checkpoint", str(run), "--validation_file", str(tmp_path / "moved.csv")]
    config = parse(EvaluateConfig, words, "evaluate", run_settings)
    assert (config.text_column, config.test_file) == ("body", None)


def test_a_config_beside_a_hub_id_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub id belongs to no run, even if the working directory is a run's folder."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    assert run_settings({"checkpoint": "some/model"}) == {}
    (tmp_path / "receipt.json").write_text("{}")
    assert run_settings({"checkpoint": "some/model"}) == {}
    (tmp_path / "config.yaml").write_text("dataset_name: glue\ndataset_config_name: mnli\n")
    other = run_settings({"checkpoint": ".", "validation_split_name": "b", "test_file": None})
    assert other == {"dataset_name": "glue", "dataset_config_name": "mnli"}
    assert run_settings({"checkpoint": ".", "test_file": "x.csv"}) == {}


def test_updates_of_a_fraction_of_an_epoch() -> None:
    """In floating point 0.07 x 100 exceeds 7: that must not add an update."""
    assert 0.07 * 100 > 7
    assert train_config("--num_train_epochs", "0.07").updates(100) == 7
    assert train_config("--num_train_epochs", "0.071").updates(100) == 8
    assert train_config("--max_steps", "3").updates(100) == 3


def test_predict_needs_one_source() -> None:
    with pytest.raises(ConfigError, match="exactly one is needed"):
        parse(PredictConfig, ["--checkpoint", "x"], "predict")
    with pytest.raises(ConfigError, match="checkpoint: is required. Fix: --checkpoint TEXT"):
        parse(PredictConfig, ["--text", "x"], "predict")
    with pytest.raises(
        ConfigError, match="output=a.CSV: it gets JSON lines. Fix: a name ending in"
    ):
        parse(PredictConfig, ["--checkpoint", "x", "--text", "x", "--output", "a.CSV"], "predict")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_alpha": 32}, "lora_alpha has no effect on training without lora_r"),
        ({"hub_model_id": "me/x"}, "hub_model_id has no effect on training without push_to_hub"),
        ({"lora_alpha": 32, "lora_r": 8}, None),
        ({"early_stopping_threshold": 0.1}, "without early_stopping_patience"),
        ({"metric_for_best_model": "loss"}, "without load_best_model_at_end or early_stopping"),
        ({"metric_for_best_model": "loss", "early_stopping_patience": 2}, None),
        ({"lr_reference_batch_size": 64}, "without lr_scaling"),
        ({"lr_reference_batch_size": 64, "lr_scaling": "sqrt"}, None),
        ({"warmup_steps": 100}, "the run has 100 updates, and never reaches learning_rate"),
        ({"warmup_steps": 99}, None),
        ({"warmup_steps": 99.6}, "the run has 100 updates, and never reaches learning_rate"),
        ({"early_stopping_patience": 3}, "=3: the run has 4 evaluations, and cannot stop before"),
        (
            {"early_stopping_patience": 3, "eval_steps": 100},
            "=3: the run has 1 evaluation, and cannot stop before",
        ),
        ({"load_best_model_at_end": True}, None),
        ({"load_best_model_at_end": True, "eval_steps": 100}, "the run has one evaluation"),
        ({"gradient_checkpointing": True, "freeze": "encoder"}, "no effect under freeze=encoder"),
        (
            {"warmup_steps": 500, "lr_scheduler_type": "constant"},
            "warmup_steps has no effect under lr_scheduler_type=constant",
        ),
        ({"layerwise_lr_decay": 0.5, "freeze": "encoder"}, "no effect under freeze=encoder"),
        ({"label_separator": "|"}, "no effect under problem_type=single_label_classification"),
        ({"label_separator": "|", "problem_type": "multi_label_classification"}, None),
    ],
)
def test_keys_without_effect_are_told(
    settings: dict[str, object], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    from accel_ft.engine.build import _warn_of_idle_keys

    _warn_of_idle_keys(TrainConfig(**settings), 100, 25)
    assert [told in record.getMessage() for record in caplog.records] == [True] * bool(told)


def test_a_share_of_warmup_leaves_an_update(caplog: pytest.LogCaptureFixture) -> None:
    from accel_ft.engine.build import _warn_of_idle_keys

    _warn_of_idle_keys(TrainConfig(warmup_steps=0.6), 1, 1)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--text_column", "label"], "label_column=label: is the column of text_column too"),
        (["--text_pair_column", "text"], "text_column=text: is the column of text_pair_column too"),
        (["--report_to", "html,none"], "report_to=html,none: none excludes others"),
        (["--class_weights", "1e300,1"], "class_weights=1e300"),
        (["--allow_changed", "freeze"], "allow_changed=freeze: cannot be allowed to differ."),
        (["--allow_changed", "lora_r"], "allow_changed=lora_r: cannot be allowed to differ."),
        (["--allow_changed", "lora_target_modules"], "cannot be allowed to differ."),
        (["--max_steps", "-1"], "must be greater than or equal to 1. Fix: leave it out"),
        (["--logging_steps", "0.1"], "logging_steps=0.1: is not a whole number. Allowed: INT"),
        (["--config", "."], "config=.: is a folder. Fix: a YAML file"),
        (["--config", "a", "--config", "b"], "config=a, b: one file can be given. Fix: keep one"),
        (["--metric_for_best_model", ""], "metric_for_best_model=: is no metric of"),
        (["--metric_for_best_model", "eval_"], "metric_for_best_model=eval_: is no metric of"),
        (["--train_split_name", ""], "train_split_name=: String should have at least 1 character"),
        (["--dropout", "0"], "--dropout: unknown key. Fix: set it in the model's config.json"),
    ],
)
def test_keys_that_contradict_each_other(words: list[str], told: str) -> None:
    assert told in fault(*words)


def test_what_is_no_path_is_told_in_a_line() -> None:
    from accel_ft.settings import checked

    for table in (np.zeros((20, 20)), np.zeros((2, 2))):  # a short one has several lines too
        with pytest.raises(ConfigError, match=r"^train_file=a ndarray: .*Allowed: PATH$"):
            checked(TrainConfig, {"train_file": table})
    frame = SimpleNamespace(to_csv=None)
    with pytest.raises(
        ConfigError, match=r"is not a path. Allowed: PATH. Fix: save it with to_csv, give its path$"
    ):
        checked(TrainConfig, {"train_file": frame})


def test_invalid_numbers_get_a_short_message(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("logging_steps: 0.5\n")  # a share, as the Trainer accepts it
    assert "line 1): is not a whole number. Allowed: INT" in fault("--config", str(file))
    assert "learning_rate=x: is not a number. Allowed: FLOAT" in fault("--learning_rate", "x")


def test_help_of_what_a_run_decides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PredictConfig, ["--help"], "predict")
    told = " ".join(capsys.readouterr().out.split())
    assert "(default: the run's, else text)" in told
    assert "or - for standard output. (default: -)" in told


def test_a_receipt_of_another_shape(tmp_path: Path) -> None:
    from accel_ft.settings import read_receipt

    sound = {"identity": {"labels": []}, "data": {"train": ""}, "strategy": {"device": "cpu"}}
    shapes = [json.dumps(sound | {"starts": starts}) for starts in (3, [3], [{}])]
    for text in ("[]", "{}", json.dumps(sound), "null", *shapes):
        (tmp_path / "receipt.json").write_text(text)
        with pytest.raises(ConfigError, match="receipt.json: is no receipt of accel_ft"):
            read_receipt(tmp_path)


def test_what_is_reproduced_with_rows_that_moved(tmp_path: Path) -> None:
    """Files that the command does not name stay those of the run."""
    (tmp_path / "config.yaml").write_text(
        "train_file: a.csv\nvalidation_file: b.csv\nmax_eval_samples: 5\ndataset_name: null\n"
        "push_to_hub: true\nhub_model_id: me/x\nhub_private_repo: true\n"
    )
    (tmp_path / "receipt.json").write_text("{}")
    here = {"reproduce": tmp_path}
    moved = settings_to_reproduce(here | {"train_file": "c.csv"})
    assert (moved["validation_file"], moved["max_eval_samples"]) == ("b.csv", 5)
    assert not moved.keys() & {"push_to_hub", "hub_model_id", "hub_private_repo"}
    assert "validation_file" not in settings_to_reproduce(here | {"dataset_name": "x/y"})
    assert "dataset_name" not in moved
    (tmp_path / "config.yaml").write_text("dataset_name: x/y\ntest_split_name: held\n")
    assert settings_to_reproduce(here | {"test_file": "d.csv"})["dataset_name"] == "x/y"
    assert "test_split_name" not in settings_to_reproduce(here | {"test_file": "d.csv"})


def test_few_rows_take_few_passes_however_the_batch_is_given() -> None:
    """config.yaml holds only the global batch size, which must resolve to the same micro-batches."""
    from accel_ft.engine.build import _resolve_batch

    given = TrainConfig(gradient_accumulation_steps=4, per_device_train_batch_size=2)
    resolved, steps = _resolve_batch(given, 1, 5)
    assert (resolved.global_batch_size, steps) == (8, 3)
    assert _resolve_batch(resolved, 1, 5) == (resolved, 3)
    assert _resolve_batch(given, 1, 50)[1] == 4
    few = TrainConfig(global_batch_size=2)
    with pytest.raises(ConfigError, match="global_batch_size=2: .* Allowed: 3 or more"):
        _resolve_batch(few, 3, 50)


def test_help_says_once_what_a_key_is_when_it_is_left_out(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(TrainConfig, ["--help"], "train")
    told = " ".join(capsys.readouterr().out.split())
    assert "left out: at the end of each epoch. --save_steps" in told
    assert "Updates between checkpoints; the last update is always saved. (default: 500)" in told
    assert "0 for no clipping. (default: 1.0)" in told


def test_last_words_of_two_threads_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher reads the file as JSON, and fails if it cannot."""
    file, replace = tmp_path / "error.json", os.replace
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def late(*names: str) -> None:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=errors.leave_last_words, args=("a longer word",))
            other.start(), other.join()
        replace(*names)

    monkeypatch.setattr(os, "replace", late)
    errors.leave_last_words("a word")
    assert json.loads(file.read_text())["message"] == "a word"
    assert list(tmp_path.iterdir()) == [file]


def test_no_guess_takes_minutes() -> None:
    """`nearest` suggests nothing for very long names, or among very many."""
    assert errors.nearest("lable", ["label", "text"]) == " Did you mean `label`?"
    assert errors.nearest("negative", ["POSITIVE", "NEGATIVE"]) == " Did you mean `NEGATIVE`?"
    assert not errors.nearest("x" * 100, ["x" * 101])
    assert not errors.nearest("lable", [f"label{n}" for n in range(1001)])
    assert not errors.nearest("x" * 101, ["x" * 100])
