"""The command line is an interface: this table changes only on purpose."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from sparseforge_ds.config.arguments import NOT_OF_A_RUN, RunArguments, flags
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.config.flag_names import ALIASES
from tests.distributed import PATIENCE, ROOT

PINNED = {
    "deepspeed": dataclasses.MISSING,
    "model": "stdlib_llama",
    "teacher": None,
    "teacher_logits": None,
    "dataset": [],
    "split": "train",
    "text_field": "text",
    "sample_by": "document",
    "loss_on": "all",
    "document_frame": "auto",
    "document_attention": False,
    "max_steps": None,
    "epochs": None,
    "global_batch": None,
    "micro_batch": None,
    "gradient_accumulation_steps": None,
    "seq_length": 256,
    "sequence_parallel": None,
    "output_dir": "runs/stdlib_llama",
    "learning_rate": None,
    "warmup": 0.03,
    "min_lr_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": None,
    "weight_decay": None,
    "save_every": 500,
    "keep_checkpoints": 2,
    "eval_dataset": None,
    "eval_split": "validation",
    "eval_sequences": 512,
    "eval_every": 500,
    "keep_best": False,
    "log_every": 10,
    "report_to": [],
    "project": "sparseforge_ds",
    "seed": 0,
    "resume": False,
    "resume_other_data": False,
    "allow_dense": [],
    "any_family": False,
    "attn_implementation": None,
    "activation_checkpointing": False,
    "config": None,
    "print_config": False,
    "dry_run": False,
    "gpus": None,
    "gpu_memory": 80.0,
    "local_rank": -1,
}


def test_the_command_line_is_pinned():
    assert {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(RunArguments)
    } == PINNED


def test_without_a_dataset_the_embedded_text_is_read():
    assert parse_arguments(["--deepspeed", "a.json"]).dataset == ["stdlib"]
    assert parse_arguments(["--deepspeed", "a.json"]).report_to == ["tensorboard"]


def test_a_home_folder_behind_an_equals_sign_is_found(monkeypatch):
    """Shells leave `--model=~/m` as it is, and a run file has no shell."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--model=~/m", "--output_dir=~", "--dataset", "~/a=0.5", "stream:~/b", "owner/c~d", "--teacher=~none/t"]
    arguments = parse_arguments(["--deepspeed", "~/a.json", *words])
    assert arguments.deepspeed == "/home/me/a.json"
    assert (arguments.model, arguments.output_dir) == ("/home/me/m", "/home/me")
    assert arguments.dataset == ["/home/me/a=0.5", "stream:/home/me/b", "owner/c~d"]
    assert arguments.teacher == "~none/t", "a user that does not exist"


def test_the_best_checkpoint_needs_a_text_to_be_best_on():
    with pytest.raises(ValueError, match="--keep_best True is not valid: it needs --eval_dataset, by whose perplexity"):
        parse_arguments(["--deepspeed", "a.json", "--keep_best"])


@pytest.mark.parametrize(
    ("flag", "value"), [([], False), (["--resume"], True), (["--resume", "auto"], "auto"), (["--resume=auto"], "auto")]
)
def test_resume_has_three_values(flag, value):
    assert parse_arguments(["--deepspeed", "a.json", *flag]).resume == value


def test_every_flag_is_parsed():
    line = (
        "--local_rank=1 --deepspeed a.json --model m --teacher t --teacher_logits l --dataset d=1 --dataset e=2 f=3 "
        "--split test --text_field body --sample_by line --loss_on completion --document_frame both "
        "--document_attention "
        "--max_steps 7 --global_batch 16 --micro_batch 2 --gradient_accumulation_steps 8 "
        "--seq_length 64 --sequence_parallel 4 --output_dir o "
        "--learning_rate 1e-4 "
        "--warmup 0.1 --min_lr_ratio 0.2 --lr_scheduler_type warmup_stable_decay "
        '--lr_scheduler_kwargs {"num_decay_steps":2} '
        "--weight_decay 0.01 --save_every 5 --keep_checkpoints 3 --log_every 1 "
        "--eval_dataset h --eval_split dev --eval_sequences 8 --eval_every 6 --keep_best --report_to wandb mlflow "
        "--project p "
        "--seed 9 --resume --resume_other_data --allow_dense *.a *.b "
        "--any_family --attn_implementation sdpa --activation_checkpointing --allow_dense *.c "
        "--dry_run --gpus 64 --gpu_memory 40"
    )
    arguments = parse_arguments(line.split())
    assert arguments == RunArguments(
        "a.json",
        "m",
        "t",
        "l",
        ["d=1", "e=2", "f=3"],
        "test",
        "body",
        "completion",
        "line",
        "both",
        True,
        7,
        None,
        16,
        2,
        8,
        64,
        4,
        "o",
        1e-4,
        0.1,
        0.2,
        "warmup_stable_decay",
        '{"num_decay_steps":2}',
        0.01,
        5,
        3,
        "h",
        "dev",
        8,
        6,
        True,
        1,
        ["wandb", "mlflow"],
        "p",
        9,
        True,
        True,
        ["*.a", "*.b", "*.c"],
        True,
        "sdpa",
        True,
        None,
        False,
        True,
        64,
        40.0,
        1,
    )
    assert set(flags(arguments)) == set(PINNED) - set(NOT_OF_A_RUN)


def test_flags_of_transformers_stand_for_ours():
    """Users of its Trainer, and of DeepSpeed's scripts, begin with these words."""
    line = (
        "--deepspeed_config=a.json --model_name_or_path m --per_device_train_batch_size 2 --lr 1e-4 --warmup-ratio=0.1 "
        "--gradient_accumulation_steps 4 --num_train_epochs 2 --logging_steps=5 --save_steps 7 --save_total_limit 1 "
        "--gradient_checkpointing --dataset_name d --lr_scheduler linear --resume_from_checkpoint"
    )
    ours = "--deepspeed a.json --model m --micro_batch 2 --learning_rate 1e-4 --warmup 0.1"
    ours += " --gradient_accumulation_steps 4 --epochs 2 --log_every 5 --save_every 7 --keep_checkpoints 1"
    ours += " --activation_checkpointing --dataset d --lr_scheduler_type linear --resume"
    assert parse_arguments(line.split()) == parse_arguments(ours.split())


def test_every_alias_stands_for_a_flag_and_is_no_flag():
    assert set(ALIASES.values()) <= set(PINNED) and not set(ALIASES) & set(PINNED)


def test_gpus_are_the_launchers_unless_the_run_is_dry():
    for flag in ("--eval_every 5", "--eval_sequences 8", "--eval_split dev", "--gpu_memory 40"):
        with pytest.raises(ValueError, match=f"{flag}.* is not valid: it belongs to --(eval_dataset|dry_run); give"):
            parse_arguments(["--deepspeed", "a.json", *flag.split()])
    with pytest.raises(ValueError, match="--gpus 8 .* belongs to --dry_run"):
        parse_arguments(["--deepspeed", "a.json", "--gpus", "8"])


def test_a_project_needs_a_tracker_that_has_some():
    for trackers in ("", "--report_to tensorboard", "--report_to none"):
        with pytest.raises(ValueError, match="--project p is not valid: no tracker of --report_to has projects"):
            parse_arguments(f"--deepspeed a.json --project p {trackers}".split())
    line = "--deepspeed a.json --project p --report_to tensorboard mlflow"
    assert parse_arguments(line.split()).project == "p"


def test_other_data_is_accepted_only_when_resuming():
    line = ["--deepspeed", "a.json", "--resume_other_data"]
    with pytest.raises(ValueError, match="--resume_other_data .*it belongs to --resume"):
        parse_arguments(line)
    assert parse_arguments([*line, "--resume", "auto"]).resume_other_data


@pytest.mark.parametrize(
    ("flag", "value", "cure"),
    [
        ("max_steps", "-1", "integer >= 0"),
        ("epochs", "1 --max_steps 5 --dry_run", "without --max_steps, which is 5; give one of them"),
        ("epochs", "1 --dry_run", "give --max_steps instead"),
        ("global_batch", "0", "integer >= 1"),
        ("micro_batch", "-1", "integer >= 1"),
        ("gradient_accumulation_steps", "0", "integer >= 1"),
        ("gpu_memory", "0", "GiB > 0"),
        ("gpu_memory", "1e308", "at most 1e+06"),
        ("seq_length", "1", "integer >= 2"),
        ("learning_rate", "0", "value > 0"),
        ("learning_rate", "inf", "value > 0"),
        ("warmup", "1.0", "share"),
        ("min_lr_ratio", "1.5", "share"),
        ("min_lr_ratio", "0.2 --lr_scheduler_type linear", "linear has no floor; leave it out, or use one of cosine"),
        ("warmup", "0.1 --lr_scheduler_type constant", "use constant_with_warmup"),
        ("lr_scheduler_kwargs", "[1] --lr_scheduler_type linear", "use a JSON object"),
        ("lr_scheduler_kwargs", "{ --lr_scheduler_type linear", "use a JSON object"),
        *(
            ("lr_scheduler_kwargs", f'{{"num_cycles":{number}}} --lr_scheduler_type linear', "finite numbers, like")
            for number in ("NaN", "[-Infinity]", "1e400")
        ),
        ("lr_scheduler_kwargs", "{}", "--lr_scheduler_type cosine takes none"),
        ("lr_scheduler_kwargs", "{} --lr_scheduler_type constant", "--lr_scheduler_type constant takes none"),
        ("lr_scheduler_kwargs", "{} --lr_scheduler_type constant_with_warmup", "takes none; leave it out"),
        ("weight_decay", "-1", ">= 0"),
        ("save_every", "-1", ">= 0"),
        ("keep_checkpoints", "-1", ">= 0"),
        ("log_every", "0", ">= 1"),
        ("seed", "-1", "2^32"),
        ("output_dir", "", "leave the flag out"),
        *((name, "", "leave the flag out") for name in ("dataset", "teacher", "teacher_logits", "eval_dataset")),
        ("split", "", "several joined by +"),
        ("split", "train[:10%]", "several joined by +"),
        ("split", "train+", "several joined by +"),
    ],
)
def test_impossible_values_name_flag_and_cure(flag, value, cure):
    with pytest.raises(ValueError, match=f"--{flag} .*not valid") as caught:
        parse_arguments(["--deepspeed", "a.json", f"--{flag}", *(value.split() or [""])])
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--deepspeed is missing: give the DeepSpeed JSON, for example --deepspeed ds_configs/zero3.json"),
        ("--resume maybe", "--resume: invalid choice: 'maybe'; give --resume, --resume auto, or leave it out"),
        ("--max_stepz 3", "--max_stepz: unknown flag; did you mean --max_steps?"),
        ("--max_stepz=3", "--max_stepz: unknown flag; did you mean --max_steps?"),
        ("--seq-lenght=64", "--seq-lenght: unknown flag; did you mean --seq_length?"),
        ("--Max_Steps 3", "--Max_Steps: unknown flag; did you mean --max_steps?"),
        ("--max 3", "--max: unknown flag; --help lists the flags"),
        ("--batch_size 8", "--batch_size: unknown flag; did you mean --global_batch?"),
        ("--logging_stepz 8", "--logging_stepz: unknown flag; did you mean --log_every?"),
        ("--bf16 true", '--bf16: not a flag, but a key of the DeepSpeed JSON: "bf16"'),
        (
            "--pattern 2:4",
            '--pattern: not a flag, but a key of the "sparseforge" block of the DeepSpeed JSON: "pattern"',
        ),
        (
            "--zero_optimization x",
            '--zero_optimization: not a flag, but a key of the DeepSpeed JSON: "zero_optimization"',
        ),
        ("--num_gpus 2", "--num_gpus: the deepspeed launcher has this flag: write it before the script"),
        ("--model my model", "'model' belongs to no flag; quote a value that has spaces"),
        ("stray --seed 1", "'stray' belongs to no flag"),
        ("--max_steps abc", "--max_steps: not an integer: 'abc'"),
        ("--learning_rate=fast", "--learning_rate: not a number: 'fast'"),
        ("--max_steps", "--max_steps: expected one argument"),
        ("--document_frame bs", "--document_frame: invalid choice: 'bs' (choose from"),
    ],
)
def test_a_wrong_command_line_is_one_line(line, message, capsys):
    start = ["--deepspeed", "a.json"] if line else []
    with pytest.raises(ValueError) as raised:
        parse_arguments([*start, *line.split()])
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    assert "HfArgumentParser" not in str(raised.value)
    assert capsys.readouterr().err == "", "every rank would print it"


def test_help_reads_well():
    run = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), "--help"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stderr
    for name in set(PINNED) - {"local_rank"}:
        assert run.stdout.count(f"  --{name} ") >= 1
        assert f"--{name.replace('_', '-')} " not in run.stdout.replace(f"--{name} ", "")
    assert "--local_rank" not in run.stdout
    assert "None" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 115
    assert "deepspeed launch/train.py --deepspeed ds_configs/zero3.json" in run.stdout
    assert "SIGTERM" in run.stdout and "exit code 143" in run.stdout
