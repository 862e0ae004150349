"""Texts of token ids through the launcher's body on two ranks: the run of their text, resumed, and refused."""

import json
import shutil

import datasets
import pyarrow
import pyarrow.parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.test_stream import train
from tests.end_to_end.test_train import differences, flags_of, states
from tests.tiny_folders import byte_tokenizer, deepspeed_json
from tests.token_files import write_megatron


def write_both(folder):
    """Write three texts, and the ids of each: in parquet, in Megatron's files, and as a saved dataset."""
    tokenizer = byte_tokenizer()
    texts = {name: [f"Document {i} of {name} counts {i * i} things." for i in range(120)] for name in "abc"}
    ids = {name: [[256, *tokenizer(text)["input_ids"]] for text in documents] for name, documents in texts.items()}
    for name, documents in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    padded = [[*document, 0, 0] for document in ids["a"]]
    masks = [[*[1] * len(document), 0, 0] for document in ids["a"]]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": padded, "attention_mask": masks}), folder / "a.parquet")
    write_megatron(folder / "b", [[document] for document in ids["b"]])
    datasets.Dataset.from_dict({"input_ids": ids["c"]}).save_to_disk(folder / "c")


def flags_in(folder, run, first, second, held_out):
    flags = flags_of(folder, deepspeed_json(stage=2), output_dir=folder / run, keep_checkpoints=0, log_every=1)
    flags = [flag for flag in flags if not flag.startswith("--dataset")]
    evaluation = ["--eval_dataset", str(folder / held_out), "--eval_split", "train", "--eval_every", "4"]
    return [*flags, *evaluation, "--dataset", f"{folder / first}=0.75", f"stream:{folder / second}=0.25"]


def scalars(run, *tags):
    log = EventAccumulator(str(run / "tensorboard")).Reload()
    return [[(event.step, event.value) for event in log.Scalars(tag)] for tag in tags]


def test_ids_train_as_their_text_does_and_a_resumed_run_equals_one_in_one_go(tmp_path, capfd):
    write_both(tmp_path)
    train(*flags_in(tmp_path, "text", "a.jsonl", "b.jsonl", "c.jsonl"))
    flags = flags_in(tmp_path, "ids", "a.parquet", "b.idx", "c")
    train(*flags)
    of_text, of_ids = (scalars(tmp_path / run, "loss/total", "eval/perplexity") for run in ("text", "ids"))
    assert of_text == of_ids and len(of_text[0]) == 8 and len(of_text[1]) == 3

    straight = states(tmp_path / "ids" / "checkpoints" / "step_000008")
    shutil.rmtree(tmp_path / "ids" / "checkpoints" / "step_000008")
    train(*flags, "--resume")
    assert "resumed from" in capfd.readouterr().out
    assert differences(straight, states(tmp_path / "ids" / "checkpoints" / "step_000008")) == []

    index = tmp_path / "b.idx"
    index.write_bytes(index.read_bytes()[:-1])
    train(*flags_in(tmp_path, "broken", "a.parquet", "b.idx", "c"), exit_code=1)
    output = capfd.readouterr().out
    assert output.count("error: ") == 1 and "and its header asks for" in output
