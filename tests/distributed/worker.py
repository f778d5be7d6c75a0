"""Ranks for `on_ranks`, forked from this process, which has imported the libraries and runs nothing itself. They get
the environment that `accelerate launch` would make from a YAML, without a launch, half of which is imports.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import GradientState
from accelerate.utils import gather_object
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from ranks import IMPORTED, Ranks, end_with_parent, import_what_ranks_import
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from accel_ft import doctor, fit, train
from accel_ft.config import TrainConfig
from accel_ft.engine import loop
from accel_ft.engine.build import build
from accel_ft.engine.run import Run
from accel_ft.engine.step import forward
from accel_ft.errors import ConfigError
from accel_ft.model import load
from accel_ft.runtime import launch
from accel_ft.runtime.launch import make_accelerator
from accel_ft.runtime.watch import Watch
from accel_ft.settings import parse


def allow_fsdp1_on_the_cpu() -> None:
    """Let FSDP1 train on gloo, which the launch checks refuse: gathering its full state into host memory, as a run does
    once, at its end, crashes the process on the CPU."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # accelerate assumes a GPU for FSDP1
    launch.refuse_impossible = lambda *_: None
    kind = FullyShardedDataParallel

    def whole_state(_: Any, model: Any) -> Any:
        with kind.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            return model.state_dict()

    Accelerator.get_state_dict = whole_state


SCALER: dict[str, Any] = {}  # the loss scaler's settings, from a task


def allow_fp16_on_the_cpu() -> None:
    """Give the `Accelerator` what it has on a GPU: autocast, and the kind of loss scaler used there."""
    launch.refuse_impossible = lambda *_: None
    make = launch.make_accelerator
    kind = ShardedGradScaler if os.environ.get("FSDP_VERSION") == "1" else torch.amp.GradScaler

    def with_scaler(**kwargs: Any) -> Accelerator:
        accelerator = make(**kwargs)
        accelerator.native_amp, accelerator.scaler = True, kind("cpu", **SCALER)
        return accelerator

    launch.make_accelerator = with_scaler


def scaled(task: dict[str, Any]) -> list[Any]:
    """Loss scale, AdamW's step count and a digest of the weights, by update and rank; then the result of `curve`."""
    SCALER.update(task.get("scaler", {}))
    after, seen = Run.after_update, []

    def watched(run: Run) -> None:
        moments = run.optimizer.optimizer.state.values()
        steps = {float(each["step"]) for each in moments}
        weights = [getattr(p, "_local_tensor", p).detach() for p in run.model.parameters()]
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights)).hexdigest()
        seen.append(gather_object([[run.accelerator.scaler.get_scale(), *steps, digest]]))
        after(run)

    Run.after_update = watched
    logs = curve(task)
    Run.after_update = after
    SCALER.clear()
    return [seen, logs]


def built(words: list[str], accelerator: Any) -> Run:
    """Build a run without starting it."""
    config = parse(TrainConfig, words, "train")
    ranks = config.output_dir / "ranks"
    watch = Watch(ranks, accelerator.process_index, accelerator.num_processes, 60)
    return build(config, accelerator, watch)


def sample_ids(task: dict[str, Any]) -> list[list[list[int]]]:
    """Sample ids by epoch and rank, from the training loop's own loader."""
    accelerator = make_accelerator()
    run = built(task["words"], accelerator)
    epochs = []
    run.start()
    batches = run.batches
    for _ in range(2):
        per_epoch = run.plan.steps_per_epoch * run.accumulation_steps
        epochs.append(
            [p for _ in range(per_epoch) for p in next(batches)["places"].tolist() if p >= 0]
        )
    assert next(batches, None) is None
    ranks = gather_object([epochs])
    return [[rank[epoch] for rank in ranks] for epoch in range(2)]


def curve(task: dict[str, Any]) -> list[list[float]]:
    """Loss and gradient norm of every update of a run."""
    GradientState()._set_sync_gradients(False)  # as left by an interrupted `fit`
    train.main(task["words"])
    output_dir = Path(task["words"][task["words"].index("--output_dir") + 1])
    return logged(output_dir)


def fitted(task: dict[str, Any]) -> list[int]:
    """Micro-batch size of each rank under `auto`, if the last rank has memory for only two rows."""
    from accel_ft.engine import fitting

    accelerator, measure, needs = make_accelerator(), fitting.measured_need, []
    is_last = accelerator.process_index == accelerator.num_processes - 1

    def keep(*args: Any) -> Any:
        needs.append(measure(*args))
        return needs[-1]

    def room(_: Any) -> int:
        if not needs or not is_last:
            return 2**40
        two = needs[-1].on_rank("ddp", accelerator.num_processes, 0) + 2 * needs[-1].per_row
        return int(two / (1 - fitting.RESERVE)) + 1000

    fitting.measured_need, fitting.device_bytes = keep, room
    words = [*task["words"], "--per_device_train_batch_size", "auto"]
    built(words, accelerator)  # with unlimited memory; `keep` notes what rows need
    run = built(words, accelerator)
    return gather_object([run.config.per_device_train_batch_size])


def sick_curve(task: dict[str, Any]) -> list[list[float]]:
    """Curve of a run in which the last rank's 5th micro-batch has a NaN loss."""
    accelerator, weighted_loss, calls = make_accelerator(), loop.weighted_loss, 0

    def sick_loss(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        sick = calls == 5 and accelerator.process_index == accelerator.num_processes - 1
        return weighted_loss(*args) * (float("nan") if sick else 1.0)

    loop.weighted_loss = sick_loss
    curve(task)
    loop.weighted_loss = weighted_loss
    output_dir = Path(task["words"][task["words"].index("--output_dir") + 1])
    return logged(output_dir)


def logged(output_dir: Path) -> list[list[float]]:
    """Loss and gradient norm of the train events."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [[event["loss"], event["grad_norm"]] for event in events if event["event"] == "train"]


def resume_everywhere(task: dict[str, Any]) -> None:
    """Train without interruption, then resume after each of `steps`, in folders beside it."""
    accelerator = make_accelerator()
    whole = Path(task["folder"]) / "whole"
    train.main([*task["words"], "--output_dir", str(whole)])
    for step in task["steps"]:
        run = Path(task["folder"]) / f"resumed_{step}"
        if accelerator.is_main_process:
            for number in range(1, step + 1):
                name = f"step_{number:08d}"
                shutil.copytree(whole / "checkpoints" / name, run / "checkpoints" / name)
            shutil.copy(whole / "metrics.jsonl", run / "metrics.jsonl")
            ahead = (run / "metrics.jsonl").read_text().splitlines()[:-1]  # without the "end" event
            (run / "metrics.jsonl").write_text("\n".join(ahead) + "\n")
        accelerator.wait_for_everyone()
        train.main([*task["words"], "--output_dir", str(run), "--resume_from_checkpoint", "latest"])


def resume_from(task: dict[str, Any]) -> list[list[float]]:
    """Losses and gradient norms of the updates after a resume from another run's checkpoint."""
    accelerator = make_accelerator()
    output_dir = Path(task["words"][task["words"].index("--output_dir") + 1])
    train.main([*task["words"], "--resume_from_checkpoint", task["checkpoint"]])
    accelerator.wait_for_everyone()
    return logged(output_dir)


def told_of_another_model(task: dict[str, Any]) -> list[str]:
    """The error of each rank if the last one finds another folder under the model's name."""
    accelerator, resolve = make_accelerator(), load.resolve
    name = task["job"]["model_name_or_path"]

    def resolved(asked: Any, *more: Any) -> Any:
        is_other = accelerator.is_last_process and asked == name
        return task["other"] if is_other else resolve(asked, *more)

    load.resolve = resolved
    try:
        fit(**task["job"])
    except ConfigError as error:
        return gather_object([str(error)])
    return []


def examined(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The doctor's findings."""
    found = Path(task["json"])
    with contextlib.suppress(SystemExit):
        doctor.main([*task["words"], "--json", str(found)])
    return json.loads(found.read_text()) if make_accelerator().is_main_process else []


def shares(task: dict[str, Any]) -> dict[str, Any]:
    """Bytes of parameters and optimizer state on each rank after one update; and which forward passes of accel_ft the
    model's modules have, with attention as on a GPU.
    """
    load_as_it_is = partial(load.load_for_training, device=None)
    with mock.patch.object(load, "load_for_training", lambda *given: load_as_it_is(*given[:2])):
        run = built(task["words"], make_accelerator())
    run.start()
    batch = next(run.batches)
    run.accelerator.backward(forward(run.model, batch).sum())
    run.optimizer.step()
    parameters = list(run.model.parameters())
    moments = [v for state in run.optimizer.state.values() for v in state.values() if v.ndim > 0]
    local = [sum(t.to_local().nbytes for t in tensors) for tensors in (parameters, moments)]
    whole = [
        sum(t.numel() * t.element_size() for t in tensors) for tensors in (parameters, moments)
    ]
    kinds = sorted({type(t).__name__ for t in parameters + moments})
    forwards = [vars(module).get("forward") for module in run.model.modules()]
    ours = sorted({each.func.__name__ for each in forwards if isinstance(each, partial)})
    return {"kinds": kinds, "whole": whole, "local": gather_object([local]), "ours": ours}


def environment_of(words: list[str]) -> tuple[dict[str, str], bool]:
    """The environment `accelerate launch` gives its ranks, and whether it starts them as a group."""
    args = launch_command_parser().parse_args([*words, __file__])
    args, _, _ = _validate_launch_command(args)
    if args.use_fsdp or args.multi_gpu:
        return prepare_multi_gpu_env(args), True
    return prepare_simple_launcher_cmd_env(args)[1], False


def do_tasks(tasks: list[dict[str, Any]], result: Path) -> None:
    """Run the tasks on one rank; rank 0 writes their results."""
    torch.set_num_threads(1)
    if os.environ.get("FSDP_VERSION") == "1":
        allow_fsdp1_on_the_cpu()
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        allow_fp16_on_the_cpu()
    results = [globals()[task["do"]](task) for task in tasks]
    if make_accelerator().is_main_process:
        result.write_text(json.dumps(results))


def main() -> None:
    """Answer each line of tasks from standard input with a line of results."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        log, result = Path(asked["log"]), Path(asked["log"]).with_suffix(".json")
        environment, is_group = environment_of(asked["words"])
        ranks = Ranks(
            partial(do_tasks, asked["tasks"], result), asked["num_ranks"], log,
            before=lambda _, new=environment: os.environ.update(new), is_group=is_group,
        )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            ranks.wait(asked["seconds"], grace=15)  # like a launcher, end the others
        codes = [ranks.codes[pid] for pid in ranks.pids]
        found = json.loads(result.read_text()) if not any(codes) else None
        print(json.dumps({"codes": codes, "found": found}), file=answers, flush=True)
        if IMPORTED.exists():
            import_what_ranks_import()


if __name__ == "__main__":
    main()
