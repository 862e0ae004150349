"""`sparseforge plan`: memory and hours of a run, before anything is downloaded or rented."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from sparseforge_ds.checkpoint.disk import measurements_text
from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.config.strict import LARGEST

if TYPE_CHECKING:
    from sparseforge_ds.config.arguments import RunArguments
    from sparseforge_ds.extras.planner.plan import Plan
    from sparseforge_ds.train.spec import RunSpec

_EPILOG = """\
exit code: 0 a configuration fits; 1 none of those given fits; 2 an error, printed as one line

Nothing is allocated: memory and operations are derived from the shapes of the model on torch's meta device.
The reserve, the peak of the GPU and the utilisation (--reserve, --gpu, --mfu) are assumptions; state yours.

example:
  sparseforge plan --model Qwen/Qwen3-14B --gpus 8 --gpu h100 --deepspeed ds_configs/zero3.json --tokens 5B
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge plan`."""
    parser = commands.add_parser(
        "plan",
        help="estimate memory and hours of a run from its configuration, and what to change when it does not fit",
        description="Estimate the needs of a run on every GPU, without weights, and name the setting to change when it "
        "does not fit.",
        epilog=_EPILOG,
    )
    # The models and the hardware.
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "PATTERN", "action": "extend", "default": []}
    add("--model", required=True, metavar="MODEL", help="a model folder, a config.json, or a hub id")
    add("--teacher", metavar="MODEL", help="dense model to distil from (default: the same as --model)")
    add("--gpus", required=True, type=int, metavar="N", help="GPUs of the run")
    add("--gpu_memory", type=_positive, metavar="GIB", help="memory of one GPU (default: that of --gpu, or 80)")
    # The run, as for the launcher.
    files = 'DeepSpeed configurations with a "sparseforge" block; each is planned'
    add("--deepspeed", required=True, nargs="+", metavar="JSON", help=files)
    add("--seq_length", type=int, metavar="N", help="tokens of a sequence (default: 4096, or the model's positions)")
    add("--sequence_parallel", type=int, metavar="N", help="GPUs that share one sequence (default: the JSON's, or 1)")
    add("--micro_batch", type=int, metavar="N", help="sequences of a GPU at a time (default: the JSON's)")
    add("--global_batch", type=int, metavar="N", help="sequences of a step on all GPUs (default: the JSON's)")
    add("--activation_checkpointing", action="store_true", help="as for the launcher")
    dense = "as for the launcher: linear weights that the family table does not know may stay dense"
    add("--allow_dense", **several, help=dense)
    add("--any_family", action="store_true", help="as for the launcher: prune a family that the table does not know")
    add("--max_steps", type=int, metavar="N", help="steps of the run (default: the JSON's)")
    add("--tokens", type=_tokens, metavar="N", help="tokens of the run, like 5B; in place of --max_steps")
    # Assumptions about the hardware.
    peak = (
        "a100 (80 GiB), b200 (180), h100 (80), h200 (141), l40s (48) or v100 (32), or its peak in TFLOPS in the dtype "
        "of the run (default: h100)"
    )
    add("--gpu", metavar="NAME", default="h100", help=peak)
    add("--mfu", type=float, default=0.4, metavar="SHARE", help="share of the peak that is reached (default: 0.4)")
    reserve = "memory of a GPU for the driver, communication buffers and fragmentation (default: 4)"
    add("--reserve", type=float, default=4.0, metavar="GIB", help=reserve)
    add("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan every configuration, print the plans, and return 1 where none fits."""
    import contextlib
    import sys
    import warnings

    # DeepSpeed prints to stdout, while it is imported, that there is no GPU.
    with contextlib.redirect_stdout(sys.stderr), large_imports():
        import transformers

        from sparseforge_ds.config.arguments import RunArguments
        from sparseforge_ds.extras.planner.dry_run import find_config_only, plan_run
        from sparseforge_ds.extras.planner.machine import GIB, GPUS, Machine
        from sparseforge_ds.model.registration import positions_of
        from sparseforge_ds.train.banner import layout_rows, spec_rows
        from sparseforge_ds.train.spec import Hardware, make_spec

    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)

    # Check the flags, and settle the hardware.
    if args.tokens is not None and args.max_steps is not None:
        raise ValueError(
            f"--tokens {args.tokens} and --max_steps {args.max_steps} both set the length; give one of them"
        )
    gpu = GPUS.get(args.gpu.lower())
    if gpu is None:
        try:
            peak = _positive(args.gpu)
        except (ValueError, argparse.ArgumentTypeError):
            raise ValueError(f"--gpu {args.gpu}: known are {', '.join(GPUS)}; or give its TFLOPS") from None
        gpu = GPUS["h100"]._replace(half=peak, single=peak)
    memory = args.gpu_memory or gpu.memory
    if not 1e-3 <= args.mfu <= 1:
        raise ValueError(f"--mfu {args.mfu} is not valid: use a share from 0.001 to 1")
    if not 0 <= args.reserve < memory:
        raise ValueError(f"--reserve {args.reserve} is not valid: use less than --gpu_memory {memory:g}")

    # Plan every configuration as the launcher's flags would run it.
    run_flags = {field.name for field in dataclasses.fields(RunArguments)} - {"deepspeed"}
    values = {name: value for name, value in vars(args).items() if name in run_flags and value is not None}
    config = find_config_only(args.model, "--model").config
    values.setdefault("seq_length", min(4096, positions_of(config) or 4096))
    values["output_dir"] = "/sparseforge_plan"  # nothing is written or read there; it lies in no model's folder
    plans = {}
    for path in args.deepspeed:
        arguments = RunArguments(deepspeed=path, dry_run=True, **values)
        if args.tokens is not None:
            steps = math.ceil(args.tokens / (_global_batch(arguments, args.gpus) * arguments.seq_length))
            arguments = dataclasses.replace(arguments, max_steps=steps)
        spec = make_spec(arguments, args.gpus, find_config_only, Hardware(bf16=gpu is not GPUS["v100"]))
        machine = Machine(int(memory * GIB), int(args.reserve * GIB), gpu.peak(spec.dtype), args.mfu)
        plans[path] = spec, plan_run(spec, machine)

    # Print.
    if args.json:
        print(measurements_text([_to_dict(spec, plan) for spec, plan in plans.values()], indent=2))
    else:
        for spec, plan in plans.values():
            rows = [row for row in spec_rows(spec) if row[0] not in ("memory", "output")]
            print(f"{spec.arguments.deepspeed}, {spec.world_size} GPUs\n{layout_rows(rows)}\n")
            print(f"{layout_rows(plan.memory_lines())}\n\n{layout_rows(plan.other_lines())}\n")
        if len(plans) > 1:
            fitting = [path for path, (_, plan) in plans.items() if plan.fits]
            print(f"{', '.join(fitting) or 'none of them'} {'fits' if len(fitting) < 2 else 'fit'}")
    return 0 if any(plan.fits for _, plan in plans.values()) else 1


def _global_batch(arguments: RunArguments, gpus: int) -> int:
    """Return the sequences of a step, by the JSON and the flags."""
    from sparseforge_ds.config.batch import batch_arithmetic, sequence_ranks, with_batch
    from sparseforge_ds.config.deepspeed_config import read_deepspeed_json

    content = with_batch(read_deepspeed_json(arguments.deepspeed), arguments.global_batch, arguments.micro_batch)
    return batch_arithmetic(content, gpus, sequence_ranks(content, arguments, gpus))["train_batch_size"]


def _to_dict(spec: RunSpec, plan: Plan) -> dict[str, Any]:
    """Return a plan as plain JSON types."""
    model = {"name": spec.model.name, "model_type": spec.model.config.model_type, "linear": spec.coverage.linear}
    model |= {"parameters": spec.sizes.total, "active": spec.sizes.active, "masked": spec.sizes.masked}
    settings: dict[str, Any] = {
        name: value for name, value in vars(spec.memory_settings).items() if isinstance(value, int)
    }
    settings["dtype"] = str(spec.dtype).removeprefix("torch.")
    return {"deepspeed": spec.arguments.deepspeed, "model": model, "settings": settings, **plan.to_dict()}


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-3 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0.001 to {LARGEST:g}")
    return value


def _tokens(text: str) -> int:
    """Read a number of tokens, such as 5B, 300M or 5e9."""
    power = " KMBT".find(text[-1:].upper())
    try:
        value = float(text[:-1] if power > 0 else text) * 1000 ** max(power, 0)
    except ValueError:
        value = math.nan
    if not 1 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens; write 5B, 300M or 5e9")
    return round(value)
