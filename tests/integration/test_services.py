"""Trackers, read back; the Hub, as a local cache and as a stand-in server that keeps what is sent."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import cut_off, events_of

from accel_ft import train
from accel_ft.errors import ConfigError
from accel_ft.runtime.card import require_repo
from accel_ft.runtime.trackers import Trackers


def test_tensorboard_reads_what_was_logged(words: list[str], tmp_path: Path) -> None:
    """Also after a resume: values that are logged again replace the earlier ones."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words += ["--report_to", "tensorboard"]
    train.main(words)
    cut_off(tmp_path / "run", 5)
    train.main([*words, "--resume_from_checkpoint", "latest"])
    read = EventAccumulator(str(tmp_path / "run/trackers/accel_ft"))
    read.Reload()
    expected = {e["step"]: e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"}
    found = {scalar.step: scalar.value for scalar in read.Scalars("train/loss")}
    assert found == pytest.approx(expected)
    assert len(read.Scalars("train/loss")) == 12
    assert [scalar.step for scalar in read.Scalars("eval/accuracy")] == [6, 12]
    assert [scalar.step for scalar in read.Scalars("test/accuracy")] == [12]


def test_trackio_reads_what_was_logged(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    script = tmp_path / "read.py"
    script.write_text(
        "import json, sys\n"
        "from accel_ft import train\n"
        "train.main(sys.argv[1:])\n"
        "import trackio\n"
        "api = trackio.Api()\n"
        "(run,) = api.runs('accel_ft')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "rows = SQLiteStorage.get_logs('accel_ft', run.name)\n"
        "print(json.dumps([row['train/loss'] for row in rows if 'train/loss' in row]))\n"
    )
    from conftest import run

    done = run(
        "python",
        script,
        *words,
        "--report_to",
        "trackio",
        env={"TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    losses = [e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert json.loads(line) == pytest.approx(losses)


def test_a_new_start_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    """Otherwise the service would continue the old run, and drop the steps that it has already."""
    from types import SimpleNamespace

    from accel_ft.config import TrainConfig
    from accel_ft.runtime.trackers import Trackers

    pytest.importorskip("tensorboard")
    seen = []
    accelerator = SimpleNamespace(
        is_main_process=True, trackers=[], init_trackers=lambda *told: seen.append(told[2])
    )
    job = TrainConfig(output_dir=tmp_path, report_to=("tensorboard",))
    for step in (0, 5, 0):
        Trackers(accelerator).start(job, step)
    (tmp_path / "trackers").rename(tmp_path / "moved-trackers")
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved-trackers").rename(tmp_path / "moved/trackers")
    Trackers(accelerator).start(job.resolved(output_dir=tmp_path / "moved"), 5)
    first, again, other, moved = (options["wandb"]["id"] for options in seen)
    assert first == again != other == moved
    names = [options["trackio"]["name"] for options in seen]
    assert names[0] == names[1] != names[2] == names[3]
    assert [options["tensorboard"]["purge_step"] for options in seen] == [1, 6, 1, 6]


def test_a_tracker_that_is_down_ends_no_run_that_has_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from types import SimpleNamespace

    from accel_ft.config import TrainConfig
    from accel_ft.runtime.trackers import Trackers

    def fail(*_: object) -> None:
        raise OSError("the service is down")

    pytest.importorskip("tensorboard")
    accelerator = SimpleNamespace(is_main_process=True, trackers=["half"], init_trackers=fail)
    job = TrainConfig(output_dir=tmp_path, report_to=("tensorboard",))
    with pytest.raises(ConfigError, match="report_to=tensorboard: cannot be started: the service"):
        Trackers(accelerator).start(job, 0)
    Trackers(accelerator).start(job, 5)
    assert "is down. The run continues without trackers, with metrics.jsonl" in caplog.text
    assert accelerator.trackers == []


def test_a_tracker_that_is_not_there(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="report_to=tensorbord: no such tracker. Did you mean"):
        train.main([*words, "--report_to", "tensorbord"])
    with pytest.raises(ConfigError, match="report_to=clearml: is not installed"):
        train.main([*words, "--report_to", "clearml"])


def test_a_tracker_that_fails_ends_nothing(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor does it keep events from the trackers that come after it."""
    from accelerate.tracking import TensorBoardTracker

    heard: list[int] = []

    class Deaf(TensorBoardTracker):
        name = "deaf"

        def log(self, *_: object, **__: object) -> None:
            raise OSError("the service is down")

    pytest.importorskip("tensorboard")
    start = Trackers.start

    def start_both(self: Trackers, *args: Any) -> None:
        start(self, *args)
        (healthy,) = self.accelerator.trackers
        self.accelerator.trackers.insert(0, Deaf("deaf", tmp_path))
        monkeypatch.setattr(healthy, "log", lambda values, step: heard.append(step))

    monkeypatch.setattr(Trackers, "start", start_both)
    train.main([*words, "--report_to", "tensorboard"])
    assert events_of(tmp_path / "run")[-1]["event"] == "end"
    assert set(heard) == set(range(1, 13))
    assert capsys.readouterr().err.count("deaf failed, metrics.jsonl is still written") == 1


def test_a_model_of_the_hub(words: list[str], tmp_path: Path, tiny_model: Path) -> None:
    """From the Hub's local cache, as a download leaves it."""
    from huggingface_hub import constants

    commit, place = "0123456789" * 4, Path(constants.HF_HUB_CACHE) / "models--some--model"
    shutil.copytree(tiny_model, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(commit)
    train.main([*words, "--model_name_or_path", "some/model", "--max_steps", "1"])
    receipt = json.loads((tmp_path / "run/receipt.json").read_text())
    assert receipt["pretrained"] == {"commit": commit}
    assert "base_model: some/model" in (tmp_path / "run/model/README.md").read_text()


# The Hub


class Hub:
    """A stand-in for the Hub: keeps what is committed."""

    def __init__(self) -> None:
        import http.server
        import threading

        self.files: dict[str, bytes] = {}
        self.repos: list[dict] = []
        self.refuses = False
        self.of_write = 200  # status of a check for write access
        self.private = True
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = 404 if hub.refuses else 200
                if self.path.endswith("/auth-check/write"):
                    status = hub.of_write
                if status != 200:
                    self.send_error(status)
                    return
                self.answer(
                    {
                        "id": "me/x",
                        "private": hub.private,
                        "type": "user",
                        "name": "me",
                        "auth": {"type": "access_token", "accessToken": {"role": "write"}},
                    }
                )

            do_HEAD = do_GET  # noqa: N815

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if hub.refuses:
                    self.send_error(403, "Forbidden")
                elif self.path.endswith("/api/repos/create"):
                    hub.repos.append(json.loads(body))
                    self.answer({"url": f"{hub.url}/me/{json.loads(body)['name']}", "id": "me/x"})
                elif "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    self.answer(
                        {
                            "files": [
                                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                                for f in files
                            ]
                        }
                    )
                elif "/commit/" in self.path:
                    import base64

                    for line in body.splitlines():
                        item = json.loads(line)
                        if item["key"] == "file":
                            hub.files[item["value"]["path"]] = base64.b64decode(
                                item["value"]["content"]
                            )
                    self.answer(
                        {"commitUrl": f"{hub.url}/me/x/commit/1", "commitOid": "1", "success": True}
                    )
                else:
                    self.answer({})

            def answer(self, what: dict) -> None:
                text = json.dumps(what).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    from accel_ft.runtime import card

    hub = Hub()
    # Only the address differs from the real calls.
    monkeypatch.setattr(
        card, "HfApi", lambda: __import__("huggingface_hub").HfApi(endpoint=hub.url, token="hf_x")
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_push_to_hub(
    words: list[str], tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole model is pushed, with a card that holds the results, at the end of a run and by `export`."""
    from huggingface_hub import ModelCard

    from accel_ft import export

    train.main([*words, "--push_to_hub", "--hub_model_id", "me/x", "--hub_private_repo"])
    (repo,) = hub.repos[:1]
    assert repo.get("visibility") == "private" or repo.get("private")  # before huggingface_hub 2
    model = tmp_path / "run/model"
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert "model.safetensors" in hub.files
    card = ModelCard(hub.files["README.md"].decode())
    results = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert results["accuracy"] == pytest.approx(
        events_of(tmp_path / "run")[-2]["test_accuracy"], abs=1e-6
    )
    measured = {"accuracy", "f1_macro", "matthews_correlation", "roc_auc", "loss"}
    assert measured == set(results)
    card.data.validate() if hasattr(card.data, "validate") else None
    hub.files.clear()
    export.main(
        [
            "--checkpoint",
            str(tmp_path / "run"),
            "--output",
            str(tmp_path / "out"),
            "--push_to_hub",
            "--hub_model_id",
            "me/x",
        ]
    )
    assert "model.safetensors" in hub.files
    exported = ModelCard(hub.files["README.md"].decode())
    assert exported.data.eval_results == card.data.eval_results
    assert {result.dataset_split for result in exported.data.eval_results} == {"test"}
    for text in (card.content, exported.content):
        assert str(tmp_path) not in text  # no local paths
        assert 'pipeline("text-classification", model="me/x", truncation=True' in text


def test_a_card_pushed_later_names_its_repository(
    words: list[str], tmp_path: Path, hub: Hub
) -> None:
    train.main(words)
    push = ["--push_to_hub", "--hub_model_id", "me/x", "--resume_from_checkpoint", "latest"]
    train.main([*words, *push])
    assert 'pipeline("text-classification", model="me/x"' in hub.files["README.md"].decode()
    card = tmp_path / "run/model/README.md"
    card.write_text("# Mine")  # a user's own card is pushed as it is
    train.main([*words, *push])
    assert hub.files["README.md"] == b"# Mine"
    hub.files.clear()
    model = card.parent
    (model / "onnx").mkdir()
    (model / "onnx" / "id_rsa").symlink_to(__file__)  # somebody else's run may hold such links
    with pytest.raises(ConfigError, match="model/onnx/id_rsa: is a link to .*Fix: remove it"):
        train.main([*words, *push])
    model.rename(tmp_path / "mine")
    model.symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="run/model: is a link to .*Fix: remove it"):
        train.main([*words, *push])
    assert not hub.files


def test_no_repository_is_made_for_what_is_not_there(tmp_path: Path, hub: Hub) -> None:
    from accel_ft import export

    words = ["--checkpoint", str(tmp_path / "typo"), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="hub_model_id=me/x: has no effect without push_to_hub"):
        export.main([*words, "--hub_model_id", "me/x"])
    with pytest.raises(ConfigError, match="hub_model_id="):  # as from an empty shell variable
        export.main([*words, "--push_to_hub", "--hub_model_id", ""])
    with pytest.raises(ConfigError, match="there is no such folder"):
        export.main([*words, "--push_to_hub", "--hub_model_id", "me/x"])
    assert not hub.repos


def test_a_hub_that_is_away_is_no_matter_of_tokens() -> None:
    with pytest.raises(
        ConfigError, match="cannot be reached: .*offline.* variable. Fix: check the network"
    ) as told:
        require_repo("me/x", private=False)
    assert "auth login" not in str(told.value)
    with pytest.raises(ConfigError, match="my run: the Hub refuses: .*Fix: --hub_model_id NAME"):
        require_repo("my run", private=False)  # the name of an output_dir


@pytest.mark.parametrize("is_there", [False, True])
def test_a_hub_that_refuses_is_met_before_the_training(
    is_there: bool, words: list[str], tmp_path: Path, hub: Hub
) -> None:
    """Also if the repository exists, and may be read."""
    hub.refuses, hub.of_write = not is_there, 403
    with pytest.raises(
        ConfigError, match="hub_model_id=me/x: the Hub refuses: .*403.*Fix: `hf auth login`"
    ):
        train.main([*words, "--push_to_hub", "--hub_model_id", "me/x"])
    assert not (tmp_path / "run/checkpoints").exists()


def test_what_is_to_be_private_is_not_pushed_to_what_is_public(
    words: list[str], tmp_path: Path, hub: Hub
) -> None:
    push = [*words, "--push_to_hub", "--hub_model_id", "me/x"]
    hub.private = False
    with pytest.raises(ConfigError, match="hub_private_repo: me/x exists already, and is public"):
        train.main([*push, "--hub_private_repo"])
    assert not (tmp_path / "run/checkpoints").exists()
    hub.of_write = 404  # a mirror without this check
    require_repo("me/x", private=False)
    assert not {"private", "visibility"} & hub.repos[-1].keys()  # the account's default counts
