from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from sparseforge_ds.extras.studies.training import DivergedRunError, StoppedError, Trainer, read_result, wait_for_lock


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    trainer = Trainer(1, 1, None)
    log = tmp_path / "run.log"
    trainer.check_outcome([0, 0], {}, log, 0)
    with pytest.raises(ValueError, match=r"the run run failed: its processes ended with -9, 0 \(-9: killed"):
        trainer.check_outcome([-9, 0], {}, log, 0)
    log.write_text("step 1/9  loss 1\nerror: --seq_length 4096 is too long\nmore\n")
    with pytest.raises(ValueError, match="the run run failed: --seq_length 4096 is too long; its log is .*run.log"):
        trainer.check_outcome([1, 1], {}, log, 0)
    # What an earlier try said does not explain this one.
    with pytest.raises(ValueError, match="the run run failed: its processes ended with 1, 1"):
        trainer.check_outcome([1, 1], {}, log, log.stat().st_size)
    with pytest.raises(DivergedRunError, match="^the loss is nan, at step 3"):
        trainer.check_outcome([1, 1], {"diverged": "the loss is nan, at step 3"}, log, 0)
    with pytest.raises(StoppedError):
        trainer.check_outcome([143, 143], {}, log, 0)
    # A rank that fails has the others stopped.
    with pytest.raises(ValueError, match=r"the run run failed: its processes ended with -9, 143 \(-9: killed"):
        trainer.check_outcome([-9, 143], {}, log, log.stat().st_size)
    trainer.stop()
    with pytest.raises(StoppedError):
        trainer.check_outcome([1, -15], {}, log, 0)


def test_a_token_cache_that_was_removed_is_made_again(tmp_path: Path) -> None:
    trainer = Trainer(1, 1, tmp_path / "data")
    trainer.stop()  # so that it starts no process
    folder = tmp_path / "runs" / "run"
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(StoppedError):
            trainer.train(folder, [], 0)
        assert (folder / "data").resolve() == tmp_path / "data" and (folder / "data").is_dir()
        (tmp_path / "data").rmdir()


def test_the_result_of_a_run(tmp_path: Path) -> None:
    assert read_result(tmp_path) == {}
    (tmp_path / "result.json").write_text('{"seconds": 3}')
    assert read_result(tmp_path) == {"seconds": 3}


def test_an_earlier_start_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / ".lock"
    wait_for_lock(lock)  # no such file: nobody works there
    with lock.open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        released = threading.Event()

        def release() -> None:
            released.set()
            fcntl.flock(locked, fcntl.LOCK_UN)

        threading.Timer(0.3, release).start()
        wait_for_lock(lock)
        assert released.is_set()
    assert "an earlier launch of this run is still saving" in capsys.readouterr().out


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="ranks = 2: every rank needs a GPU of its own, and there are 1"):
        Trainer(2, 1, None)
