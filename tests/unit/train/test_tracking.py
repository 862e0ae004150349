"""Trackers: found before anything else is done, and given what a run says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import tracking as of_accelerate
from accelerate.tracking import GeneralTracker, get_available_trackers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter

from sparseforge_ds.train import tracking
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.tracking import Trackers, check_trackers, flatten


class Notebook(GeneralTracker):
    """A tracker of the kind that accelerate lets anybody add."""

    name = "notebook"
    requires_logging_directory = True
    written: list[Any] = []

    def __init__(self, project: str, folder: Path) -> None:
        super().__init__()
        self.written.append((project, folder))

    @property
    def tracker(self) -> list[Any]:
        return self.written

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.written.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.written.append((step, values))

    def finish(self) -> None:
        self.written.append("finished")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setitem(of_accelerate.LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    Notebook.written.clear()
    return Notebook.written


def test_a_tracker_gets_settings_scalars_and_its_end(tmp_path, notebook):
    check_trackers(["notebook", "tensorboard"])
    trackers = Trackers(["notebook"], tmp_path / "run", "project", 0)
    trackers.settings({"seed": 3, "dataset": ["a", "b"], "teacher": None}, "text", 0)
    monitor = Monitor(trackers, start=0, max_steps=4, tokens_per_step=1, every=1)
    monitor.write(2, {"mask/undecided": 0.5})
    monitor.histograms(2, {"mask/a": ([1, 2], [0.0, 0.5, 1.0])})
    monitor.close()
    expected = {"seed": 3, "dataset": "['a', 'b']", "teacher": "None"}
    assert notebook == [("project", tmp_path / "run"), expected, (2, {"mask/undecided": 0.5}), "finished"]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_unknown_and_missing_trackers_are_named():
    with pytest.raises(ValueError, match=r"--report_to tensorbord: no such tracker; use aim, .*tensorboard.*, none"):
        check_trackers(["tensorbord"])
    with pytest.raises(ValueError, match="none stands alone"):
        check_trackers(["none", "tensorboard"])
    missing = next(name for name in ("aim", "clearml", "dvclive", "mlflow") if name not in get_available_trackers())
    with pytest.raises(ValueError, match=f"--report_to {missing}: it is not installed; install it, or leave it out"):
        check_trackers([missing])
    check_trackers(["none"])


def test_without_a_tracker_nothing_is_written(tmp_path):
    trackers = Trackers(["none"], tmp_path / "run", "project", 0)
    trackers.settings({"seed": 3}, "  model  a", 0)
    trackers.log(1, {"loss": 1.0})
    trackers.histogram(1, "mask/a", [1, 2], [0.0, 0.5, 1.0])
    trackers.close()
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_be_started_is_named(tmp_path, monkeypatch, notebook):
    def start(self: Notebook) -> None:
        raise ConnectionError("no server at that address\nand a second line")

    monkeypatch.setattr(Notebook, "start", start)
    with pytest.raises(
        ValueError, match=r"--report_to notebook: it cannot be started \(no server at that address\); log"
    ):
        Trackers(["notebook"], tmp_path / "run", "project", 0)


def test_a_trackers_own_errors_are_told_and_end_no_training(tmp_path, monkeypatch, notebook, caplog):
    """wandb's and mlflow's errors are none of Python's classes."""

    class OwnError(Exception):
        pass

    def fail(self: Notebook, *_: Any, **__: Any) -> None:
        raise OwnError("not logged in")

    monkeypatch.setitem(sys.modules, "notebook_package", SimpleNamespace(Error=OwnError))
    monkeypatch.setitem(tracking.OWN_ERRORS, "notebook", "notebook_package.Error")
    trackers = Trackers(["notebook", "tensorboard"], tmp_path / "run", "project", 0)
    monkeypatch.setattr(Notebook, "log", fail)
    for step in (1, 2):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert caplog.text.count("--report_to notebook: failed at step 1 (not logged in); it gets no more") == 1
    scalars = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("loss")
    assert [event.step for event in scalars] == [1, 2]
    # Its settings and its end are told alike.
    for name, moment in (("store_init_configuration", "with the settings"), ("finish", "at the end")):
        with monkeypatch.context() as patch:
            patch.setattr(Notebook, name, fail)
            trackers = Trackers(["notebook"], tmp_path / "run", "project", 0)
            trackers.settings({"seed": 1}, "text", 0)
            trackers.close()
        assert f"--report_to notebook: failed {moment} (not logged in)" in caplog.text

    # Histograms too: TensorBoard's thread that writes tells a full disk at the next call.
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_histogram_raw", full)
        trackers = Trackers(["tensorboard"], tmp_path / "full", "project", 0)
        for _ in range(2):
            trackers.histogram(3, "mask/a", [1], [0.0, 1.0])
        trackers.close()
    assert caplog.text.count("--report_to tensorboard: failed at step 3 (No space left on device)") == 1
    monkeypatch.setattr(Notebook, "start", fail)
    with pytest.raises(ValueError, match=r"--report_to notebook: it cannot be started \(not logged in\); log in"):
        Trackers(["notebook"], tmp_path / "run", "project", 0)


def test_tensorboard_has_settings_and_histograms(tmp_path):
    trackers = Trackers(["tensorboard"], tmp_path, "project", 0)
    trackers.settings({"seed": 3, "model": "a"}, "  model  a\n  batch  b", 0)
    monitor = Monitor(trackers, start=0, max_steps=4, tokens_per_step=1, every=1)
    for step in (1, 2, 3):
        monitor.write(step, {"mask/flip_rate": 0.1 / step})
        monitor.histograms(
            step, {"mask/a": ([step, 0, 9 - step], [0.0, 0.3, 0.6, 1.0]), "curvature_log10/a": ([1], [0.0, 1.0])}
        )
    monitor.close()
    log = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    log.Reload()
    (event,) = log.Tensors("run/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "      model  a" in text and "| seed | 3 |" in text
    assert [event.step for event in log.Histograms("mask/a")] == [1, 2, 3]
    start = plugin_data_pb2.HParamsPluginData.FromString(
        log.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    assert dict(start.session_start_info.hparams)["seed"].number_value == 3
    assert [path.name for path in tmp_path.rglob("events*")] == [
        path.name for path in (tmp_path / "tensorboard").iterdir()
    ]


def test_nested_settings_are_named_by_their_path():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}
