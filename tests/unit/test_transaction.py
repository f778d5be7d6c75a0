import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from torch.distributed.checkpoint import save as save_shards

from accel_ft.checkpoint import convert, state, transaction
from accel_ft.checkpoint import open as opening
from accel_ft.checkpoint.open import model_folder
from accel_ft.engine.run import Run
from accel_ft.errors import CheckpointError
from accel_ft.runtime import files
from accel_ft.runtime.launch import make_accelerator


def publish(root: Path, step: int) -> Path:
    final = transaction.checkpoint_folder(root, step)
    staging = transaction.start(final)
    (staging / "weights").write_bytes(bytes(range(256)))
    (staging / "weights").chmod(0o600)
    (staging / "inner").mkdir()
    (staging / "inner" / "shard").write_bytes(b"x" * step)
    transaction.publish(final)
    return final


def test_published_whole_and_verified(tmp_path: Path) -> None:
    final = publish(tmp_path, 500)
    assert final.name == "step_00000500"
    assert not transaction.staging_folder(final).exists()
    transaction.verify(final)
    manifest = json.loads((final / transaction.MANIFEST).read_text())["files"]
    assert {name: entry["bytes"] for name, entry in manifest.items()} == {
        "weights": 256, "inner/shard": 500,
    }  # fmt: skip
    assert (final / "weights").stat().st_mode & 0o777 == final.stat().st_mode & 0o666
    assert transaction.list_published(tmp_path) == [(500, final)]


def test_a_folder_that_is_written(tmp_path: Path) -> None:
    """It works if the parent folder is missing, and if a killed process has left a staging folder."""
    final = tmp_path / "not/yet/model"
    for text in ("one", "another"):
        with transaction.writing(final) as staging:
            (staging / "weights").write_text(text)
        left = transaction.staging_folder(final)
        left.mkdir()
        (left / "of a killed process").touch()
    assert [(path.name, path.read_text()) for path in final.iterdir()] == [("weights", "another")]
    with pytest.raises(RuntimeError), transaction.writing(final):
        raise RuntimeError
    assert (final / "weights").read_text() == "another"
    assert not left.exists()


def test_a_folder_is_written_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two exports to one folder would publish half of each, and both report success."""
    final = tmp_path / "model"
    with transaction.writing(final) as staging:
        (staging / "weights").write_text("one")
        with (
            pytest.raises(CheckpointError, match="model: another process is writing it"),
            transaction.writing(final) as other,
        ):
            (other / "weights").write_text("another")
    assert [(path.name, path.read_text()) for path in final.iterdir()] == [("weights", "one")]
    assert list(tmp_path.iterdir()) == [final]
    transaction.staging_folder(final).symlink_to(final)  # made by somebody else
    with transaction.writing(tmp_path / "model") as staging:
        assert (final / "weights").read_text() == "one"
        (staging / "weights").write_text("another")
    assert (final / "weights").read_text() == "another"
    flock = transaction.fcntl.flock

    def late(*given: int) -> None:  # meanwhile another process published it and began anew
        staging.rename(tmp_path / "published")
        staging.mkdir()
        flock(*given)

    monkeypatch.setattr(transaction.fcntl, "flock", late)
    with (
        pytest.raises(CheckpointError, match="another process is writing it"),
        transaction.writing(final),
    ):
        pass
    assert staging.is_dir()


def _write(path: Path, text: str) -> None:
    with files.writing(str(path)) as file:
        file.write(text)


@pytest.mark.parametrize("write", [files.write_whole, _write])
def test_somebody_elses_link_in_the_place_of_what_is_written(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    """The staging file's name can be guessed; where others may write, a link of that name must not be followed."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / f".out{files.STAGED}{os.getpid()}").symlink_to("mine")
    write(tmp_path / "out", "new")
    found = {path.name: (path.read_text(), path.is_symlink()) for path in tmp_path.iterdir()}
    assert found == {"mine": ("precious", False), "out": ("new", False)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_tensor_that_is_not_whole(tmp_path: Path) -> None:
    """Parts that no shard fills would hold whatever was in memory."""
    shards = tmp_path / convert.SHARDED_WEIGHTS
    save_shards({"model": {"w": torch.ones(4)}}, checkpoint_id=shards, no_dist=True)
    assert state.read_weights(tmp_path)["w"].tolist() == [1, 1, 1, 1]
    metadata = pickle.loads((shards / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].chunks.clear()
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="model.w is incomplete"):
        state.read_weights(tmp_path)


def test_what_a_killed_write_has_left_goes(tmp_path: Path) -> None:
    """A staging file left by a killed process might be uploaded with the model."""
    write, left = files.os.fsync, tmp_path / "README.md"

    def kill(_: int) -> None:
        os._exit(9)

    child = os.fork()
    if child == 0:
        files.os.fsync = kill
        files.write_whole(left, "one")
    os.waitpid(child, 0)
    assert (files.os.fsync, len(list(tmp_path.iterdir()))) == (write, 1)
    others = {tmp_path / f".living.md{files.STAGED}{os.getpid()}", tmp_path / ".notes.999999"}
    for path in others:  # of a live process, and a user's own
        path.touch()
    files.remove_unfinished(tmp_path)
    assert set(tmp_path.iterdir()) == others
    for path in others:
        path.unlink()
    files.write_whole(left, "another")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("README.md", "another")
    ]


def test_a_write_that_fails_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error does not: fsync gets a file descriptor, not a name."""

    def is_full(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(files.os, "fsync", is_full)
    with pytest.raises(OSError, match=r"Disk quota exceeded: '.*receipt\.json'"):
        files.write_whole(tmp_path / "receipt.json", "{}")


def test_unpublished_is_never_listed(tmp_path: Path) -> None:
    transaction.start(transaction.checkpoint_folder(tmp_path, 1))
    assert transaction.list_published(tmp_path) == []
    assert state.newest_sound(tmp_path) is None
    transaction.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write(root: Path, step: int) -> Path:
    final = transaction.checkpoint_folder(root, step)
    (transaction.start(final) / "weights").write_bytes(bytes(step))
    transaction.seal(final)
    return final


def test_sealed_is_published_by_the_next_process(tmp_path: Path) -> None:
    """A kill loses the checkpoint that is being written, not one that was written completely."""
    final = write(tmp_path, 7)
    transaction.start(transaction.checkpoint_folder(tmp_path, 8))
    assert transaction.list_published(tmp_path) == []
    transaction.publish_sealed(tmp_path)
    transaction.verify(final)
    assert transaction.list_published(tmp_path) == [(7, final)]
    transaction.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [final]


def test_killed_between_manifest_and_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = write(tmp_path, 7)
    fsync = transaction.fsync

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transaction, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        transaction.publish(final)
    monkeypatch.setattr(transaction, "fsync", fsync)
    transaction.publish_sealed(tmp_path)
    transaction.verify(final)


def test_what_cannot_be_published_stays_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full; the next start tries again."""
    final = write(tmp_path, 7)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            transaction.publish_sealed(tmp_path)
    transaction.publish_sealed(tmp_path)
    transaction.verify(final)


@pytest.mark.parametrize("lack", ["a file", "a half", "the manifest", "nothing"])
def test_a_part_of_what_was_sealed_is_not_published(tmp_path: Path, lack: str) -> None:
    """A copy of a live run may hold part of a checkpoint; it must not replace a complete one."""
    final = write(tmp_path, 7)
    transaction.publish(final)
    sealed = transaction.sealed_folder(write(tmp_path, 7))
    (sealed / "weights").write_bytes(b"1234567")
    if lack == "a file":
        (sealed / "weights").unlink()
    elif lack == "a half":
        (sealed / "weights").write_bytes(b"123")
    elif lack == "the manifest":
        (sealed / transaction.MANIFEST).unlink()
    (sealed / (transaction.MANIFEST + transaction.NEW)).write_text("{")  # killed while writing it
    transaction.publish_sealed(tmp_path)
    transaction.verify(final)
    assert (final / "weights").read_bytes() == (b"1234567" if lack == "nothing" else bytes(7))
    transaction.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [final]


def test_sealed_before_the_machine_went_down_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be truncated: they were not fsynced."""
    write(tmp_path, 7)
    monkeypatch.setattr(transaction, "_boot", lambda: "another")
    transaction.publish_sealed(tmp_path)
    assert transaction.list_published(tmp_path) == []
    transaction.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        "flip",
        "cut",
        "remove",
        "add",
        "link",
        "pipe",
        "manifest",
        "deep manifest",
        "manifest a pipe",
    ],
)
def test_damage_is_found_and_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = publish(tmp_path, 9), publish(tmp_path, 10)
    file = newer / "inner" / "shard"
    if damage == "flip":
        file.write_bytes(b"x" * 9 + b"y")
    elif damage == "cut":
        file.write_bytes(b"x" * 9)
    elif damage == "remove":
        file.unlink()
    elif damage == "add":
        (newer / "more").touch()
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        file.unlink()
        os.mkfifo(file)  # reading it would block
    elif damage == "manifest a pipe":
        (newer / "manifest.json").unlink()
        os.mkfifo(newer / "manifest.json")
    else:
        (newer / "manifest.json").write_text("{" if damage == "manifest" else "[" * 100_000)
    told = {"flip": r"shard is damaged \(SHA-256", "cut": r"shard is damaged \(size"}
    with pytest.raises(CheckpointError, match=f"{newer}.*{told.get(damage, '')}"):
        transaction.verify(newer)
    with caplog.at_level("WARNING"):
        assert state.newest_sound(tmp_path) == older
    (older / "weights").unlink()
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged. Fix"):
        state.newest_sound(tmp_path)


@pytest.mark.parametrize("name", [".DS_Store", "._weights", ".nfs0000000300000001"])
def test_what_a_file_system_leaves_is_no_damage(tmp_path: Path, name: str) -> None:
    folder = publish(tmp_path, 9)
    (folder / "inner" / name).touch()
    transaction.verify(folder)
    (folder / "inner" / ".metadata").touch()  # torch would read it
    with pytest.raises(CheckpointError, match="inner/.metadata is not in manifest.json"):
        transaction.verify(folder)


def test_what_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad sector is damage; transient errors and missing permissions are not, and are raised."""
    older, newer = publish(tmp_path, 9), publish(tmp_path, 10)
    sha256 = transaction.sha256

    def failing(kind: type[OSError], number: int) -> Any:
        def read(path: Path) -> str:
            if path == newer / "weights":
                raise kind(number, "Input/output error")
            return sha256(path)

        return read

    monkeypatch.setattr(transaction, "sha256", failing(OSError, errno.EIO))
    assert state.newest_sound(tmp_path) == older
    assert "step_00000010: weights cannot be read (Input/output error)" in caplog.text
    for number in (errno.EACCES, errno.ESTALE, errno.EMFILE):
        monkeypatch.setattr(transaction, "sha256", failing(OSError, number))
        with pytest.raises(OSError, match=f"{newer}/weights"):
            state.newest_sound(tmp_path)


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9, 100_000_000):
        publish(tmp_path, step)
    transaction.prune(tmp_path, keep=2, protected=(1, None))
    assert [step for step, _ in transaction.list_published(tmp_path)] == [1, 10, 100_000_000]


def test_published_again_over_a_damaged_one(tmp_path: Path) -> None:
    final = publish(tmp_path, 5)
    (final / "weights").unlink()
    transaction.verify(publish(tmp_path, 5))


def test_another_jobs_checkpoint_is_refused(tmp_path: Path) -> None:
    saved = {"model": "a", "seed": 1}
    state.check_same_run(tmp_path, saved, dict(saved))
    by_itself = {"train_sampling_strategy": "group_by_length"}  # for a checkpoint without the key
    state.check_same_run(tmp_path, saved, saved | by_itself)
    with pytest.raises(CheckpointError, match="strategy: 'group_by_length' in the checkpoint, 'ra"):
        state.check_same_run(tmp_path, saved, saved | {"train_sampling_strategy": "random"})
    with pytest.raises(CheckpointError, match="seed: 1 in the checkpoint, 2 in this job"):
        state.check_same_run(tmp_path, saved, {"model": "a", "seed": 2})
    other = {"train_data": "a", "seed": 2}
    with pytest.raises(CheckpointError, match="or --allow_changed train_data,seed to accept"):
        state.check_same_run(tmp_path, saved, other)
    with pytest.raises(CheckpointError) as caught:  # it would be refused with that, too
        state.check_same_run(tmp_path, saved, other | {"freeze": "encoder"})
    assert "--allow_changed" not in str(caught.value)


def test_what_a_user_calls_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        model_folder(str(run))
    newest = publish(run / "checkpoints", 3)
    assert model_folder(str(run)) == str(newest) == model_folder(str(newest))
    (run / "model").mkdir()
    (run / "model" / "config.json").touch()
    assert model_folder(str(run)) == str(run / "model")
    assert model_folder("some/hub-id") == "some/hub-id"
    (newest / "weights").unlink()
    with pytest.raises(CheckpointError, match="weights is missing"):
        model_folder(str(newest))


def test_what_is_no_folder_is_damaged(tmp_path: Path) -> None:
    """It still exists, so it was not pruned while it was read."""
    (tmp_path / "step_00000003").touch()
    (tmp_path / "step_00000006").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        state.newest_sound(tmp_path)


def test_a_run_goes_on_while_its_newest_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prunes the checkpoint that is being read, or writes its final model: neither is damage."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    publish(root, 3)
    verify = transaction.verify

    def pruned(folder: Path) -> None:
        if folder.name.endswith("3"):
            shutil.rmtree(folder)
            publish(root, 6)
        verify(folder)

    monkeypatch.setattr(transaction, "verify", pruned)
    assert model_folder(str(tmp_path)) == str(root / "step_00000006")

    def ended(folder: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").touch()
        (tmp_path / "metrics.jsonl").write_text('{"event": "end", "step": 6}\n')

    monkeypatch.setattr(transaction, "verify", ended)
    assert model_folder(str(tmp_path)) == str(tmp_path / "model")


@pytest.mark.parametrize("told", ["runs/x/step_00000006", CheckpointError("none is left")])
def test_all_ranks_open_what_rank_0_finds(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """While a run goes on, a rank that looks later may find a newer checkpoint."""
    sent: list[Any] = []

    def find(_: str) -> str:
        if isinstance(told, str):
            return told
        raise told

    monkeypatch.setattr(opening, "model_folder", find)
    monkeypatch.setattr(opening, "broadcast_object_list", sent.extend)
    ranks = [SimpleNamespace(process_index=rank, num_processes=2) for rank in (0, 1)]
    wanted = (
        nullcontext() if isinstance(told, str) else pytest.raises(CheckpointError, match="none")
    )
    with wanted:
        assert opening.same_folder("runs/x", ranks[0]) == told
    monkeypatch.setattr(opening, "model_folder", pytest.fail)

    def hear(found: list[Any]) -> None:
        found[:] = sent

    monkeypatch.setattr(opening, "broadcast_object_list", hear)
    with wanted:
        assert opening.same_folder("runs/x", ranks[1]) == told


def test_a_checkpoint_without_a_loss_scale_loads_under_fp16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would look for its file. The scale starts anew; the accelerator keeps its scaler."""
    seen = []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    accelerator = SimpleNamespace(scaler=scaler)
    monkeypatch.setattr(convert, "_load_parts", lambda a, folder: seen.append(a.scaler))
    scaler.update(2.0)
    convert.load_any(accelerator, tmp_path)
    assert scaler.get_scale() == 8.0
    (tmp_path / "scaler.pt").touch()
    convert.load_any(accelerator, tmp_path)
    assert (seen, accelerator.scaler) == ([None, scaler], scaler)


def test_a_loss_scale_can_be_loaded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume and the best model at the end load it twice. Under FSDP2, accelerate creates the scaler's tensors after
    each load, which torch allows only if it has none."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    saved = scaler.state_dict() | {"scale": 4.0, "_growth_tracker": 3}

    def load(accelerator: Any, _: Path) -> None:  # as `Accelerator.load_state` does
        accelerator.scaler.load_state_dict(saved)
        accelerator.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    monkeypatch.setattr(convert, "_load_parts", load)
    (tmp_path / "scaler.pt").touch()
    accelerator: Any = SimpleNamespace(scaler=scaler, is_fsdp2=True)
    scaler.scale(torch.ones(()))
    for _ in range(2):
        convert.load_any(accelerator, tmp_path)
        assert scaler.state_dict() == saved


def test_random_numbers_of_another_kind_of_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They cannot be restored: the run says so and seeds them again."""
    monkeypatch.setattr(convert, "load_any", lambda *_: torch.manual_seed(1))
    accelerator = make_accelerator()
    for device in ("cpu", "cuda"):
        with caplog.at_level("INFO", logger="accel_ft"):
            saved = {"step": 3, "num_processes": 1, "device": device, "devices": [0]}
            state.load(accelerator, tmp_path, saved, 42, [0])
        assert (torch.initial_seed() == 1) == (device == "cpu")
    assert "saved by 1 processes (cuda), resumed by 1 (cpu)" in caplog.text
    assert "saved by 1 processes (cpu)" not in caplog.text
    with caplog.at_level("INFO", logger="accel_ft"):  # GPU states are saved by device index
        state.load(accelerator, tmp_path, saved | {"device": "cpu", "devices": [5]}, 42, [0])
    assert "resumed on other devices: [0] for [5]" in caplog.text


@pytest.mark.parametrize("there", [True, False])
def test_random_numbers_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, there: bool
) -> None:
    """accelerate swallows the error, but dropout would differ: the run logs it and seeds again."""

    def load_any(accelerator: Any, folder: Path) -> None:
        load_accelerator_state(str(folder), [], [], [], [], 0)

    monkeypatch.setattr(convert, "load_any", load_any)
    accelerator = make_accelerator()
    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    save_accelerator_state(str(tmp_path), [], [], [], [], 0, 0)
    if not there:
        (tmp_path / "random_states_0.pkl").write_bytes(b"of another version")
    saved = {"step": 3, "num_processes": 1, "device": "cpu", "devices": [0]}
    state.load(accelerator, tmp_path, saved, 42, [0])
    assert torch.equal(torch.get_rng_state(), drawn) == there
    assert ("rank 0 cannot read its random states: weights" in caplog.text) != there
    assert torch.initial_seed() == (7 if there else 45)


@pytest.mark.parametrize("text", ['{"step": 3}', "[]", "null", "{", None])
def test_a_trainer_state_that_is_none_of_ours(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / state.TRAINER_STATE).write_text(text)
    with pytest.raises(CheckpointError, match=r"no readable trainer_state\.json"):
        state.read_trainer_state(tmp_path)


def test_what_cannot_be_pruned_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint just published is complete."""
    run: Any = SimpleNamespace(checkpoints=tmp_path)
    run.watch = SimpleNamespace(check_folder=lambda: None)
    run.prune = lambda *_: Run.prune(run, 2, None)
    final = transaction.checkpoint_folder(tmp_path, 3)
    (transaction.start(final) / "weights").touch()

    def stale(_: Path) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(transaction, "list_published", stale)
    Run._publish(run, final, 2, None)
    transaction.verify(final)
    assert "older checkpoints could not be removed: " in caplog.text


def test_of_many_labels_those_that_differ_are_told(tmp_path: Path) -> None:
    names = [f"label {n}" for n in range(9000)]
    other = {"labels": [*names[:7], "new", *names[8:]]}
    with pytest.raises(CheckpointError, match="differ in 'new' was 'label 7'$"):
        state.check_same_run(tmp_path, {"labels": names}, other)
    more = {"labels": [*names, "new"]}
    with pytest.raises(CheckpointError, match="9000 in .*, 9001 in .* differ in new "):
        state.check_same_run(tmp_path, {"labels": names}, more)
