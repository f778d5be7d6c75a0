"""Fine-tune a text classifier: accelerate launch --config_file STRATEGY.yaml -m accel_ft.train
--config JOB.yaml.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_ft.config import TrainConfig, parse
from accel_ft.errors import CheckpointError, ConfigError, run_command

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accel_ft.data.plan import Plan
    from accel_ft.engine.run import Run

logger = logging.getLogger("accel_ft.train")  # run with -m, its name is __main__

DEFAULT_GLOBAL_BATCH_SIZE = 32
ORDER_HASH_STEPS = 256
IDENTITY_KEYS = {
    "model_name_or_path",
    "max_seq_length",
    "global_batch_size",
    "seed",
    "learning_rate",
    "lr_scaling",
    "lr_reference_batch_size",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "class_weights",
    "label_smoothing_factor",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Read the configuration, train or resume, and say where the model is."""
    config = parse(TrainConfig, argv, "train")
    fit(config)


def fit(config: TrainConfig) -> None:
    """Run the job; every rank calls it.

    Raises:
        UserError: for what the user can mend, before the model is loaded where it can be known
            before.
    """
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs

    from accel_ft.engine.loop import train
    from accel_ft.runtime.launch import make_accelerator
    from accel_ft.runtime.logging import read_events, setup_logging

    accelerator = make_accelerator(
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    setup_logging(accelerator.process_index)
    _check_output_dir(config)
    run = build(config, accelerator)
    if is_finished(run):
        logger.info("%s is finished: nothing to do", config.output_dir)
    else:
        start_or_resume(run)
        train(run)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _say_farewell(run, list(read_events(run.events.path)))


def build(config: TrainConfig, accelerator: Accelerator) -> Run:
    """Make the parts of a run: data, plan, model, optimizer, schedule, loaders."""
    from accelerate.utils import set_seed

    from accel_ft.data.loader import Batches, Padding, train_places
    from accel_ft.data.plan import Plan
    from accel_ft.data.splits import class_weights, load_splits
    from accel_ft.engine.evaluation import make_eval_loader
    from accel_ft.engine.run import Run
    from accel_ft.model.load import (
        check_max_seq_length,
        load_for_training,
        load_model_config,
        load_tokenizer,
        position_limit,
        resolve,
    )
    from accel_ft.model.optim import make_optimizer, make_scheduler, scaled_learning_rate
    from accel_ft.runtime import fsdp
    from accel_ft.runtime.launch import check_granted
    from accel_ft.runtime.logging import EventLog

    folder = resolve(config.model_name_or_path)
    tokenizer = load_tokenizer(folder)
    check_max_seq_length(
        config.max_seq_length, position_limit(load_model_config(folder), tokenizer)
    )
    # One rank of a machine tokenises, the others find its cache.
    with accelerator.local_main_process_first():
        splits = load_splits(config, tokenizer, config.max_train_samples)
    splits.train.class_weights = class_weights(
        config.class_weights, splits.train, splits.label_names
    )
    config, accumulation_steps = _resolve_batch(config, accelerator.num_processes)
    assert config.global_batch_size is not None
    accelerator.gradient_accumulation_steps = accumulation_steps
    num_micro_batches = accumulation_steps * accelerator.num_processes
    plan = Plan(len(splits.train), config.global_batch_size, config.seed, splits.train.lengths)
    num_steps = config.max_steps or math.ceil(config.num_train_epochs * plan.steps_per_epoch)

    set_seed(config.seed)  # the same new head on every rank
    labels = dict(enumerate(splits.label_names))
    model_config = load_model_config(
        folder,
        id2label=labels,
        label2id={label: label_id for label_id, label in labels.items()},
        pad_token_id=tokenizer.pad_token_id,
    )
    model = load_for_training(folder, model_config, accelerator.device)
    optimizer = make_optimizer(model, scaled_learning_rate(config), config.weight_decay)
    scheduler = make_scheduler(config, optimizer, num_steps)
    fsdp.configure(accelerator, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    check_granted(accelerator, model)
    set_seed(config.seed, device_specific=True)  # other dropout on every rank

    def eval_loader(split: Any) -> Any:
        return make_eval_loader(accelerator, split, config.per_device_eval_batch_size, tokenizer)

    return Run(
        config=config,
        accelerator=accelerator,
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=scheduler,
        train_batches=Batches(
            splits.train,
            Padding(tokenizer, accelerator.device),
            num_steps * num_micro_batches,
            partial(train_places, plan, num_micro_batches),
        ),
        validation_loader=eval_loader(splits.validation),
        test_loader=None if splits.test is None else eval_loader(splits.test),
        splits=splits,
        plan=plan,
        num_steps=num_steps,
        accumulation_steps=accumulation_steps,
        identity={
            "labels": splits.label_names,
            "train_data": splits.train.fingerprint(),
            **config.model_dump(mode="json", include=IDENTITY_KEYS),
        },
        events=EventLog(config.output_dir / "metrics.jsonl", writes=accelerator.is_main_process),
    )


def is_finished(run: Run) -> bool:
    """Return whether the folder holds this very run, finished.

    Raises:
        CheckpointError: it holds another job's.
    """
    from accel_ft.checkpoint.state import check_same_run
    from accel_ft.runtime.logging import read_events

    ends = [event["step"] for event in read_events(run.events.path) if event["event"] == "end"]
    if run.config.resume_from_checkpoint != "latest" or not ends or ends[-1] < run.num_steps:
        return False
    receipt = json.loads((run.output_dir / "receipt.json").read_text(encoding="utf-8"))
    check_same_run(run.output_dir, receipt["identity"], run.identity)
    return True


def start_or_resume(run: Run) -> None:
    """Load the checkpoint asked for, if there is one, and write what describes the run."""
    from accel_ft.checkpoint import state, transaction
    from accel_ft.runtime.receipt import write_receipt

    config, accelerator = run.config, run.accelerator
    folder = state.find(accelerator, run.checkpoints, config.resume_from_checkpoint)
    if folder is not None:
        run.resume(folder)
        logger.info("resumed from %s: %d of %d updates done", folder, run.step, run.num_steps)
    elif config.resume_from_checkpoint is not None:
        logger.info("no checkpoint in %s yet: starting from the beginning", run.checkpoints)
    later = [path for step, path in transaction.list_published(run.checkpoints) if step > run.step]
    if later and config.resume_from_checkpoint != "latest":
        raise CheckpointError(
            f"resume_from_checkpoint={config.resume_from_checkpoint}: {run.checkpoints} holds "
            "later "
            f"ones, up to {later[-1].name}. Fix: another output_dir, or remove them yourself"
        )
    if accelerator.is_main_process:
        transaction.remove_leftovers(run.checkpoints, later)
        run.events.rewind(run.step)
        if run.step > 0:
            run.events.write("resume", step=run.step, num_processes=accelerator.num_processes)
        settings = run.config.resolved(resume_from_checkpoint=None)
        (run.output_dir / "config.yaml").write_text(settings.to_yaml(), encoding="utf-8")
        splits = run.splits
        fingerprints = {"train": splits.train, "validation": splits.validation, "test": splits.test}
        about = {
            "step": run.step,
            "num_steps": run.num_steps,
            "accumulation_steps": run.accumulation_steps,
            "identity": run.identity,
            "data": {
                key: None if split is None else split.fingerprint()
                for key, split in fingerprints.items()
            },
            "num_samples": {
                key: None if split is None else len(split) for key, split in fingerprints.items()
            },
            "sample_order_sha256": sample_order_sha256(run.plan),
        }
        write_receipt(run.output_dir / "receipt.json", accelerator, about)
    accelerator.wait_for_everyone()


def sample_order_sha256(plan: Plan) -> str:
    """Return a hash of the order of samples in the first epoch (its first 256 updates): equal for
    equal orders.
    """
    digest = hashlib.sha256()
    for step in range(min(plan.steps_per_epoch, ORDER_HASH_STEPS)):
        digest.update(plan.global_batch(step).tobytes())
    return digest.hexdigest()


def _check_output_dir(config: TrainConfig) -> None:
    """Make the run's folder; one that holds a run is only touched by a resume."""
    from accel_ft.checkpoint.transaction import list_published

    folder = config.output_dir
    holds_run = (folder / "metrics.jsonl").exists() or list_published(folder / "checkpoints")
    if holds_run and config.resume_from_checkpoint is None:
        raise ConfigError(
            f"output_dir={folder}: already holds a run. "
            "Fix: --resume_from_checkpoint latest to continue it, or another --output_dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={folder}: cannot be made: {error.strerror}") from error


def _resolve_batch(config: TrainConfig, num_processes: int) -> tuple[TrainConfig, int]:
    """Settle global batch size and accumulation steps; each follows from the other."""
    one_pass = config.per_device_train_batch_size * num_processes
    if config.gradient_accumulation_steps is not None:
        size, steps = (
            one_pass * config.gradient_accumulation_steps,
            config.gradient_accumulation_steps,
        )
    else:
        size = config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
        steps = math.ceil(size / one_pass)
    if size < num_processes:
        raise ConfigError(
            f"global_batch_size={size}: {num_processes} processes need {num_processes} or more"
        )
    return config.resolved(global_batch_size=size, gradient_accumulation_steps=None), steps


def _say_farewell(run: Run, events: list[dict[str, Any]]) -> None:
    """Print accuracy, the model's path, and the command that predicts with it."""
    model_step = events[-1]["model_step"]
    for name, words in (("eval", "validation"), ("test", "test")):
        for event in events:
            if event["event"] == name and (name == "test" or event["step"] == model_step):
                print(f"accuracy on the {words} rows: {event[name + '_accuracy']:.4f}")
    model = run.output_dir / "model"
    print(f"model: {model}")
    print(f'predict: python -m accel_ft.predict --checkpoint {model} --text "..."')


if __name__ == "__main__":
    run_command(main)
