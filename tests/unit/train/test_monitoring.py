"""Messages of a run."""

from __future__ import annotations

import logging
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.train.console import set_up_console
from sparseforge_ds.train.monitoring import Monitor, memory_in_use
from sparseforge_ds.train.tracking import Trackers

DIALS = SoftMaskConfig().schedule(100).dials(20)
SCALARS = {
    "loss/total": 3.25,
    "loss/cross_entropy": 2.25,
    "loss/kl": 1.0,
    "train/learning_rate": 1e-4,
    "train/grad_norm": 0.5,
}


def events(folder):
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_everything(tmp_path):
    monitor = Monitor(
        Trackers(["tensorboard"], tmp_path, "project", 0), start=0, max_steps=20, tokens_per_step=2048, every=10
    )
    for step in range(1, 21):
        monitor.step(step, SCALARS, "hardening", DIALS)
    monitor.write(20, {"mask/undecided": 0.1})
    monitor.histograms(20, {"mask/layer": ([1, 0, 3], [0.0, 0.25, 0.75, 1.0])})
    monitor.close()
    log = events(tmp_path)
    tags = set(log.Tags()["scalars"])
    assert tags == {*SCALARS, "mask/undecided", "train/tokens_per_second", "train/memory_gib"} | {
        f"dials/{name}" for name in ("temperature", "beta", "lambda_mid", "x")
    }
    assert [event.step for event in log.Scalars("loss/total")] == [10, 20]
    assert log.Scalars("dials/x")[0].value == pytest.approx(DIALS.x)
    histogram = log.Histograms("mask/layer")[0].histogram_value
    assert histogram.num == 4
    assert list(histogram.bucket) == [1, 0, 3]


def test_a_resumed_run_hides_what_it_repeats(tmp_path):
    for start, stop in ((0, 20), (10, 20)):
        monitor = Monitor(
            Trackers(["tensorboard"], tmp_path, "project", start), start=start, max_steps=20, tokens_per_step=1, every=5
        )
        for step in range(start + 1, stop + 1):
            monitor.step(step, {**SCALARS, "loss/total": float(start)}, "hardening", DIALS)
        monitor.close()
    values = [(event.step, event.value) for event in events(tmp_path).Scalars("loss/total")]
    assert values == [(5, 0.0), (10, 0.0), (15, 10.0), (20, 10.0)]


@pytest.fixture
def console(monkeypatch):
    """Set up the console's loggers, and undo that after the test."""
    logger = logging.getLogger("sparseforge_ds")
    before = logger.level, logger.handlers
    yield lambda rank: (monkeypatch.setenv("RANK", str(rank)), set_up_console())
    logger.setLevel(before[0])
    logger.handlers = before[1]


def test_rank_0_says_everything_and_the_others_what_is_wrong(console, capsys):
    logger = logging.getLogger("sparseforge_ds.data.somewhere")
    for rank in (0, 3):
        console(rank)
        logger.info("100% of it")
        logger.warning("a thing of %s", "mine")
        logger.error("no such file")
    message = capsys.readouterr()
    assert message.out == "100% of it\nwarning: a thing of mine\nwarning: on rank 3: a thing of mine\n"
    assert message.err == "error: no such file\nerror: on rank 3: no such file\n"


def test_a_rank_that_learns_its_number_late_is_silent_from_then_on(console, capsys, monkeypatch):
    console(0)
    monkeypatch.setenv("RANK", "2")  # as DeepSpeed sets it for mpirun's processes
    logging.getLogger("sparseforge_ds").info("a line")
    logging.getLogger("sparseforge_ds").warning("mine")
    assert capsys.readouterr().out == "warning: on rank 2: mine\n"


def test_lines_stand_above_the_bar(console, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console(0)
    monitor = Monitor(
        Trackers(["tensorboard"], tmp_path, "project", 0), start=0, max_steps=7, tokens_per_step=2048, every=5
    )
    monitor.step(1, SCALARS, "hardening", DIALS)
    capsys.readouterr()
    logging.getLogger("sparseforge_ds").info("a line")
    message = capsys.readouterr()
    monitor.close()
    assert message.out == "a line\n"
    assert message.err.startswith("\r ") and "1/7" in message.err.split("\r")[-1], "the bar is cleared, and drawn again"


def test_without_a_terminal_there_is_a_line_now_and_then(console, tmp_path, capsys):
    console(0)
    monitor = Monitor(
        Trackers(["tensorboard"], tmp_path, "project", 0), start=0, max_steps=7, tokens_per_step=2048, every=5
    )
    for step in range(1, 8):
        monitor.step(step, SCALARS, "hardening", DIALS)
    monitor.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 5/7", "step 7/7"]
    assert "loss 3.2500  ce 2.2500  kl 1.0000  lr 1.00e-04" in lines[0]
    assert "tokens/s" in lines[0]
    assert "hardening" in lines[0]


def test_other_ranks_are_silent(console, tmp_path, capsys):
    console(1)
    monitor = Monitor(None, start=0, max_steps=2, tokens_per_step=1, every=1)
    monitor.step(1, SCALARS, "hardening", DIALS)
    monitor.write(1, SCALARS)
    monitor.histograms(1, {})
    monitor.close()
    assert capsys.readouterr().out == ""


def test_the_memory_in_use_is_measured():
    assert 2**25 < memory_in_use() < 2**40
