"""Runs that read a teacher's stored logits, on two ranks, on one, and resumed."""

from __future__ import annotations

import shutil

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparseforge_ds.cli.main import main as sparseforge
from tests.distributed import run_distributed
from tests.end_to_end.test_stream import main_on_small_chunks, train
from tests.end_to_end.test_train import differences, flags_of, states
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import tiny_llama


def losses(run):
    log = EventAccumulator(str(run / "tensorboard")).Reload()
    return [event.value for event in log.Scalars("loss/kl")]


def main_with_damage(command_line, at_read):
    """Run the launcher's body; on rank 1 the logits of one window are not as they were written."""
    import torch.distributed

    from sparseforge_ds.data.teacher_logits import TeacherLogits
    from sparseforge_ds.train.trainer import main

    read = TeacherLogits.read
    reads = []

    def read_or_refuse(self, window):
        reads.append(window)
        if len(reads) == at_read and torch.distributed.get_rank() == 1:
            raise ValueError(f"window {window} has other bytes than were written")
        return read(self, window)

    TeacherLogits.read = read_or_refuse
    return main(command_line)


def test_stored_logits_train_as_the_teacher_does_on_any_ranks_and_after_a_resume(tmp_path, capfd):
    """Store all entries but one of a mixture of two texts, read twice, so that the loss is the full one."""
    ids = {"vocab_size": BYTE_VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    teacher = write_model(tmp_path / "teacher", tiny_llama(seed=5, initializer_range=0.4, **ids))
    content = deepspeed_json(stage=2, max_steps=8)
    flags = [flag for flag in flags_of(tmp_path, content, log_every=1) if not flag.startswith(("--dataset", "--out"))]
    # Two texts at 3 to 1, and the teacher's logits of both.
    names = [str(write_text(tmp_path / f"{name}.jsonl", documents=12 + number)) for number, name in enumerate("ab")]
    flags += ["--dataset", f"{names[0]}=0.75", f"{names[1]}=0.25"]
    top = ["--top_k", str(BYTE_VOCABULARY - 1), "--seq_length", "32", "--output", str(tmp_path / "logits")]
    assert sparseforge(["teach", str(teacher), "--text", *names, *top]) == 0
    stored = [*flags, "--teacher_logits", str(tmp_path / "logits")]

    # The teacher beside the student, stored logits on two ranks, and stored ones on one rank.
    train(*flags, f"--output_dir={tmp_path / 'beside'}", "--teacher", str(teacher))
    train(*stored, f"--output_dir={tmp_path / 'stored'}", "--keep_checkpoints=0")
    assert run_distributed(main_on_small_chunks, 1, [*stored, f"--output_dir={tmp_path / 'one'}"], None) == [0]
    beside = losses(tmp_path / "beside")
    assert len(beside) == 8 and min(beside) > 0.1
    for run in ("stored", "one"):
        for step, (value, expected) in enumerate(zip(losses(tmp_path / run), beside, strict=True)):
            assert abs(value - expected) < 0.01 * expected, (run, step, value, expected)

    # Logits that are damaged for one rank end the run on all, behind the steps that it has made.
    damaged = [*stored, f"--output_dir={tmp_path / 'damaged'}", "--save_every=500"]
    assert run_distributed(main_with_damage, 2, damaged, 8) == [1, 1]
    assert "on rank 1: window" in capfd.readouterr().out
    assert [path.name for path in (tmp_path / "damaged" / "checkpoints").glob("step_*")] == ["step_000003"]

    # A resumed run has the same bits.
    straight = states(tmp_path / "stored" / "checkpoints" / "step_000008")
    shutil.rmtree(tmp_path / "stored" / "checkpoints" / "step_000008")
    train(*stored, f"--output_dir={tmp_path / 'stored'}", "--keep_checkpoints=0", "--resume")
    assert "resumed from" in capfd.readouterr().out
    assert differences(straight, states(tmp_path / "stored" / "checkpoints" / "step_000008")) == []
