from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest

from sparseforge_ds.compare.training import DivergedError, StoppedError, Trainer, _wait_for, current_step
from sparseforge_ds.train.loop import _diverged


def test_how_a_run_ended(tmp_path: Path) -> None:
    trainer, log = Trainer(2, 1, None), tmp_path / "run.log"
    trainer._judge([0, 0], "run", log)
    with pytest.raises(ValueError, match=r"the run run failed: its processes ended with -9, 0 \(-9: killed"):
        trainer._judge([-9, 0], "run", log)
    log.write_text("step 1/9  loss 1\nerror: --seq_length 4096 is too long\nmore\n")
    with pytest.raises(ValueError, match="the run run failed: --seq_length 4096 is too long; its log is .*run.log"):
        trainer._judge([1, 1], "run", log)
    log.write_text(f"error: {_diverged('the loss is nan', 3, 1.0)}\n")
    with pytest.raises(DivergedError, match="^the loss is nan, at step 3 with learning rate 1;"):
        trainer._judge([1, 1], "run", log)
    with pytest.raises(StoppedError):
        trainer._judge([143, 143], "run", log)
    trainer.stop()
    with pytest.raises(StoppedError):
        trainer._judge([1, -15], "run", log)


def test_the_step_a_log_is_at(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert current_step(folder) == 0
    (tmp_path / "run.log").write_text("  output step 7/9\n")
    assert current_step(folder) == 0
    (tmp_path / "run.log").write_text(
        "x" * 9000 + "\nstep 10/400  loss 5\nsaved step_000010: 1 MiB\nstep 20/400  loss 4\n"
    )
    assert current_step(folder) == 20


def test_an_earlier_start_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    _wait_for(lock, 0.0)  # no such file: nobody works there
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="a process of an earlier start still works there"):
            _wait_for(lock, 0.0)
        threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        began = time.monotonic()
        _wait_for(lock, 30.0)
        assert 0.2 < time.monotonic() - began < 20
