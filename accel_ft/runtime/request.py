"""Read what accelerate's YAML, its command line or the environment asks for; refuse what accelerate
would silently change.

`accelerate launch` passes only part of its settings to its workers. The rest (use_cpu of a
multi-process YAML, the number of processes of a launch that fell back to one) is read from the
launcher's command line.
"""

import contextlib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import parse_flag_from_env

from accel_ft import errors
from accel_ft.errors import LaunchError, nearest
from accel_ft.runtime import fsdp
from accel_ft.runtime.compiled import compiles_layers, dynamo_settings, is_compiled

YES = ("y", "yes", "t", "true", "on", "1")  # as accelerate reads it
OF_JOB = {
    "gradient_accumulation_steps": "--gradient_accumulation_steps or --global_batch_size",
    "gradient_clipping": "--max_grad_norm",
}
FOREIGN = {"TPU", "DeepSpeed", "Megatron-LM", "FP8", "AWS", "ParallelismConfig"}
UNHEARD = {  # YAML keys that accelerate ignores
    "rdzv_backend", "main_training_function", "enable_cpu_affinity", "downcast_bf16", "tpu_name",
    "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env",
}  # fmt: skip
OF_COMMAND = ("rdzv_backend", "enable_cpu_affinity")  # honoured as options of `accelerate launch`
KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OF_DYNAMO = [
    f"ACCELERATE_DYNAMO_USE_{word}" for word in ("DYNAMIC", "FULLGRAPH", "REGIONAL_COMPILATION")
]
ENVIRONMENT = "the environment"  # the source if no parent is `accelerate launch`
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish", "ash", "busybox"}


@dataclass(frozen=True)
class Request:
    """The settings that the user requested.

    Attributes:
        source: the YAML, the command or ENVIRONMENT, for messages.
        num_processes: world size, over all machines; None if unspecified.
        use_cpu: whether the CPU was requested; None if unspecified.
        distributed_type: accelerate's name, such as MULTI_GPU or FSDP; "NO" if unspecified.
        mixed_precision: no, bf16, fp16 or fp8.
        is_eager: whether the command line forbids compilation, whatever the YAML says.
    """

    source: str
    num_processes: int | None
    use_cpu: bool | None
    distributed_type: str
    mixed_precision: str
    is_eager: bool = False


def read_request() -> Request:
    """Read the request from the launcher's command line, or else from the environment."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    world_size = os.environ.get("WORLD_SIZE")
    launcher = find_launcher()
    if launcher is None:
        asked_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or None
        kind = "FSDP" if fsdp.is_asked_for() else "NO"
        return Request(
            ENVIRONMENT, int(world_size) if world_size else None, asked_cpu, kind, precision
        )
    words, folder = launcher
    parser = launch_command_parser()
    args = parser.parse_args(words)
    has_default = os.path.isfile(default_config_file) and not args.cpu  # as the launcher does
    file = args.config_file or (default_config_file if has_default else None)
    path = Path(folder, Path(file).expanduser()) if file else None
    yaml: Any = load_config_from_file(str(path)) if path else None
    words_say = "FSDP" if args.use_fsdp else "MULTI_GPU" if args.multi_gpu else None
    kind = words_say or (str(yaml.distributed_type.value) if yaml else "NO")
    asked_precision = args.mixed_precision or (yaml and yaml.mixed_precision)
    if kind in KINDS and asked_precision != "fp8":  # `refuse_impossible` refuses others
        _refuse_unheard_options(parser, args, kind)
        if yaml:
            _refuse_unheard_keys(str(file), yaml, kind, args)
    processes = args.num_processes or (yaml and yaml.num_processes)
    source = file or "accelerate launch"
    machines = int(args.num_machines or (yaml and yaml.num_machines) or 1)
    is_alone = kind == "NO" and world_size in (None, "1")
    if machines > 1 and (is_alone or int(processes or machines) % machines):
        raise LaunchError(
            f"{source}: num_machines: {machines}, num_processes: {processes}, distributed_type: "
            f"{kind}. Fix: equally many processes per machine, and MULTI_GPU or FSDP, as in "
            "accelerate_configs/multi_node_ddp.yaml"
        )
    yaml_says = bool(yaml) and str(yaml.use_cpu).lower() in YES
    return Request(
        source,
        None if processes is None else int(processes),
        args.cpu or yaml_says if yaml else args.cpu or (False if words_say else None),
        kind,
        str(asked_precision or "no"),
        args.dynamo_backend == "no",
    )


def _refuse_unheard_options(parser: Any, args: Any, kind: str) -> None:
    """Refuse options of the launcher that belong to another strategy than the job's.

    Raises:
        LaunchError: names one.
    """
    for option in ("tpu", "use_deepspeed", "use_megatron_lm", "use_parallelism_config"):
        if getattr(args, option):
            raise LaunchError(
                f"accelerate launch --{option}: accel_ft does not support it. Fix: leave it out"
            )
    usual = vars(parser.parse_args(["script"]))
    for group in parser._action_groups:
        strategy = str(group.title).removesuffix(" Arguments")
        if strategy not in FOREIGN and (strategy != "FSDP" or kind == "FSDP"):
            continue
        for option in [action.dest for action in group._group_actions]:
            if getattr(args, option) != usual[option]:
                instead = f"; after -m, {OF_JOB[option]}" if option in OF_JOB else ""
                instead = "; or --use_fsdp" if strategy == "FSDP" else instead
                raise LaunchError(
                    f"accelerate launch --{option}: is for {strategy} only. Fix: leave it "
                    f"out{instead}"
                )


def _refuse_unheard_keys(file: str, yaml: Any, kind: str, args: Any) -> None:
    """Refuse a section of the YAML that accelerate ignores, an unknown key in one that it reads,
    and an ignored key if the command line does not repeat its value.

    Raises:
        LaunchError: names it.
    """
    usual = {field.name: field.default for field in fields(yaml)}
    for key, value in vars(yaml).items():
        is_said = getattr(args, key, None) == value
        if key in UNHEARD and not is_said and value not in (usual[key], None, False, "no", []):
            # If an option of the launcher has a default, the YAML's value is not read.
            fix = f", or `accelerate launch --{key}`" * (key in OF_COMMAND)
            raise LaunchError(f"{file}: {key}: {value} has no effect. Fix: leave it out{fix}")
        is_heeded = key == "mpirun_config" or (key == "parallelism_config" and kind != "NO")
        if not key.endswith("_config") or value in (None, {}) or is_heeded:
            continue
        if not isinstance(value, dict):
            raise LaunchError(f"{file}: {key}: {value} is no mapping. Fix: keys under it")
        if key != "dynamo_config" and (key, kind) != ("fsdp_config", "FSDP"):
            raise LaunchError(
                f"{file}: its {key} has no effect under distributed_type: {kind}. Fix: leave "
                "it out" + ", or distributed_type: FSDP" * (key == "fsdp_config")
            )
        prefix = key.removesuffix("config")
        for each in value:
            name = each if each.startswith(prefix) else prefix + each
            if not hasattr(args, name):
                raise LaunchError(f"{file}: {key} has no {each}.{nearest(name, vars(args))}")


def own_launcher() -> int | None:
    """Return the pid of this process's parent if that is a launcher, with which its ranks end;
    None for a shell or any other parent.
    """
    pid, command = errors.parent
    is_shell = os.path.basename((command or [""])[0]).lstrip("-") in SHELLS
    is_elastic = "TORCHELASTIC_RUN_ID" in os.environ and not is_shell
    return pid if is_elastic or launcher_words(command) is not None else None


def find_launcher() -> tuple[list[str], str] | None:
    """Return the arguments of the nearest parent process that is `accelerate launch`, and its
    working directory.
    """
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):
                if (found := launcher_words(parent.cmdline())) is not None:
                    return found, parent.cwd()
    return None


def launcher_words(command: list[str]) -> list[str] | None:
    """Return the arguments of an `accelerate launch` command line; None for another command."""
    start = 0
    if command and os.path.basename(command[0]).startswith("python"):
        start = 1
        while command[start : start + 1] and command[start].startswith("-"):
            if command[start].startswith("-m"):
                joined = command[start][2:]
                command = [*command[:start], *[joined] * bool(joined), *command[start + 1 :]]
                break
            start += 2 if command[start] in ("-X", "-W") else 1
    program, *words = command[start:] or [""]
    name = os.path.basename(program)
    if program.endswith("accelerate/commands/launch.py"):
        return words
    if name == "accelerate" or program == "accelerate.commands.accelerate_cli":
        return words[1:] if words[:1] == ["launch"] else None
    is_launch = name == "accelerate-launch" or program == "accelerate.commands.launch"
    return words if is_launch else None


def refuse_impossible(request: Request, on_cpu: bool) -> None:
    """Refuse a request that accelerate would ignore in part, silently change, or crash on."""
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        raise LaunchError(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is set and would override the accumulation "
            "steps of the job. Fix: unset it; set global_batch_size or gradient_accumulation_steps "
            "in the job"
        )
    kind, precision = request.distributed_type, request.mixed_precision
    version, (backend, mode) = os.environ.get("FSDP_VERSION", "1"), dynamo_settings()
    is_fsdp2 = kind == "FSDP" and version == "2"
    is_fsdp1 = kind == "FSDP" and not is_fsdp2
    sharding = os.environ.get("FSDP_SHARDING_STRATEGY", "full_shard").upper()
    reshards = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), torch.accelerator.device_count()

    def asks_fsdp(key: str, *values: str) -> bool:
        return kind == "FSDP" and os.environ.get(f"FSDP_{key}", "").lower() in (values or YES)

    def is_yes(variable: str) -> bool:
        return os.environ.get(variable, "").lower() in YES

    offloads = is_fsdp2 and asks_fsdp("OFFLOAD_PARAMS")
    for is_asked, words in (
        (kind not in KINDS,
         f"distributed_type: {kind}, which accel_ft does not support. "
         "Allowed: NO, MULTI_GPU, FSDP"),
        (is_yes("ACCELERATE_USE_FSDP") and not fsdp.is_asked_for(),
         "FSDP, for which accelerate accepts only true. Fix: ACCELERATE_USE_FSDP=true"),
        (kind == "FSDP" and request.source == ENVIRONMENT and "RANK" not in os.environ,
         "FSDP, but no launcher started this process. Fix: accelerate launch, or torchrun"),
        (kind == "FSDP" and not fsdp.is_asked_for(),
         "FSDP, which the launcher did not pass on, as with --cpu. Fix: leave out --cpu, and set "
         "use_cpu: true in the YAML"),
        (kind != "FSDP" and fsdp.is_asked_for(),
         f"distributed_type: {kind}, but the environment sets ACCELERATE_USE_FSDP. Fix: keep one "
         "of the two"),
        (kind == "FSDP" and version not in ("1", "2"),
         f"fsdp_version: {version}. Allowed: 2, or 1"),
        (kind == "FSDP" and bool(os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"))
         and not asks_fsdp("AUTO_WRAP_POLICY", "transformer_based_wrap"),
         "fsdp_transformer_layer_cls_to_wrap, which only another policy uses. Fix: "
         "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
        (not is_compiled() and not request.is_eager
         and (mode != "default" or any(map(parse_flag_from_env, OF_DYNAMO))),
         "a dynamo_mode, or a dynamo_use_..., without a dynamo_backend: nothing is compiled. Fix: "
         "dynamo_backend: INDUCTOR, or leave it out"),
        (mode not in DYNAMO_MODES, f"dynamo_mode: {mode}. Allowed: {', '.join(DYNAMO_MODES)}"),
        (is_compiled() and mode != "default" and backend != "INDUCTOR",
         f"dynamo_mode: {mode}, which {backend} ignores. Fix: leave it out, or use INDUCTOR"),
        (is_compiled() and on_cpu and (backend == "CUDAGRAPHS" or mode == "reduce-overhead"),
         "CUDA graphs (dynamo_backend: CUDAGRAPHS, dynamo_mode: reduce-overhead) on the CPU. Fix: "
         "leave it out"),
        (kind != "FSDP" and world_size() > 1 and not compiles_layers()
         and is_compiled() and parse_flag_from_env("ACCELERATE_DYNAMO_USE_FULLGRAPH"),
         "dynamo_use_fullgraph under DDP, whose forward pass dynamo cannot trace. Fix: false"),
        (any(is_yes(f"ACCELERATE_USE_{engine}") for engine in ("DEEPSPEED", "MEGATRON_LM")),
         "DeepSpeed or Megatron (--use_..., ACCELERATE_USE_...), which accel_ft does not support. "
         "Fix: leave it out"),
        (is_yes("ACCELERATE_USE_PARALLELISM_CONFIG"),
         "a parallelism_config, which accel_ft does not support: ranks would read other rows than "
         "they should. Fix: leave it out"),
        (precision not in ("no", "bf16", "fp16"),
         f"mixed_precision: {precision}. Allowed: no, bf16, fp16"),
        (request.use_cpu is False and on_cpu,
         "an accelerator (use_cpu: false), but torch finds none here. "
         "Fix: accelerate_configs/cpu.yaml or cpu_ddp.yaml, or a torch build for your device"),
        (not on_cpu and ranks > devices,  # accelerate's barriers use the local rank as device index
         f"{ranks} processes on this machine, but this one sees only {devices} devices. "
         "Fix: --num_processes, one per device; under srun let each see all (no --gpus-per-task)"),
        (precision == "fp16" and on_cpu,
         "mixed_precision: fp16, which is silently switched off on the CPU. "
         "Allowed there: no, bf16. Fix: --mixed_precision bf16"),
        (is_fsdp1 and on_cpu,
         "FSDP1 on the CPU, where saving its full state crashes the process. "
         "Fix: fsdp_version: 2 in fsdp_config, as in accelerate_configs/cpu_fsdp2.yaml"),
        (asks_fsdp("CPU_RAM_EFFICIENT_LOADING"),
         "fsdp_cpu_ram_efficient_loading (accelerate's default), under which only rank 0 has an "
         "initialized head. Fix: fsdp_cpu_ram_efficient_loading: false in fsdp_config, as in "
         "accelerate_configs/"),
        (is_fsdp1 and not asks_fsdp("USE_ORIG_PARAMS"),
         "FSDP1 without fsdp_use_orig_params: the optimizer would hold none of the model's "
         "parameters. Fix: fsdp_use_orig_params: true, as in accelerate_configs/fsdp1.yaml"),
        (is_fsdp1 and reshards not in ("TRUE", sharding),
         f"fsdp_reshard_after_forward: {reshards}, which FSDP1 ignores. Fix: leave it out; for "
         "false, use fsdp_sharding_strategy: SHARD_GRAD_OP"),
        (is_fsdp2 and sharding not in ("FULL_SHARD", "1", "NONE"),
         f"fsdp_sharding_strategy: {sharding}, which FSDP2 ignores. "
         "Fix: leave it out; for SHARD_GRAD_OP, use fsdp_reshard_after_forward: false"),
        (is_fsdp2 and (asks_fsdp("FORWARD_PREFETCH")
                       or asks_fsdp("BACKWARD_PREFETCH", "backward_post", "no_prefetch", "2", "3")),
         "fsdp_forward_prefetch or fsdp_backward_prefetch, which FSDP2 ignores. "
         "Fix: leave it out"),
        (is_fsdp2 and asks_fsdp("AUTO_WRAP_POLICY", "size_based_wrap"),
         "fsdp_auto_wrap_policy: SIZE_BASED_WRAP, which FSDP2 cannot do with lists of layers. "
         "Fix: TRANSFORMER_BASED_WRAP"),
        (asks_fsdp("ACTIVATION_CHECKPOINTING"),
         "fsdp_activation_checkpointing, which draws new dropout masks in the backward pass "
         "(FSDP2) and renames parameters (FSDP1). Fix: leave it out; gradient_checkpointing: true "
         "in the job"),
        (offloads and on_cpu, "fsdp_offload_params on the CPU, where they are already. Fix: false"),
        (offloads and precision == "fp16",
         "fsdp_offload_params with mixed_precision: fp16, whose loss scale FSDP2 reads on the CPU "
         "before it has been copied. Fix: bf16, or no"),
    ):  # fmt: skip
        if is_asked:
            raise LaunchError(f"{request.source} asks for {words}")


def world_size() -> int:
    """Return the number of ranks that the launcher put into the environment, else 1."""
    return int(os.environ.get("WORLD_SIZE") or 1)
