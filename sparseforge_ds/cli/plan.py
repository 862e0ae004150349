"""`sparseforge plan`: what a run will need, before anything is downloaded or rented."""

from __future__ import annotations

import argparse
import json
from typing import Any

_EPILOG = """\
exit code: 0 a configuration fits; 1 none of those given fits; 2 an error, said in one line

Nothing is allocated: memory, traffic and operations are derived from the shapes of the model on torch's meta device.
The reserve, the peak of the GPU and the utilisation (--reserve, --peak_tflops, --mfu) are assumptions; state yours.

example:
  sparseforge plan --model Qwen/Qwen3-14B --gpus 8 --gpu h100 --deepspeed ds_configs/zero3.json --tokens 5B
"""


def register(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="memory, traffic and hours of a run from its configuration alone, and what to change when it does not fit",
        description="Say what a run will need on every GPU, without weights, and which setting to change when it does "
        "not fit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="a model folder, a config.json, or a hub id")
    add("--teacher", metavar="MODEL", help="dense model to distil from (default: the same as --model)")
    add("--gpus", required=True, type=_count, metavar="N", help="GPUs of the run")
    add("--gpu_memory", "--gpu-memory", type=_positive, default=80.0, metavar="GIB", help="of one GPU (default: 80)")
    add(
        "--deepspeed",
        "--ds_config",
        "--ds-config",
        required=True,
        nargs="+",
        metavar="JSON",
        help='DeepSpeed configurations with a "sparseforge" block; each is planned',
    )
    add("--seq_length", type=_count, metavar="N", help="tokens of a sequence (default: 4096, or what the model can)")
    add("--micro_batch", type=_count, metavar="N", help="sequences of a GPU at a time (default: the JSON's)")
    add("--global_batch", type=_count, metavar="N", help="sequences of a step on all GPUs (default: the JSON's)")
    add("--activation_checkpointing", action="store_true", help="as for the launcher")
    add(
        "--allow_dense",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="as for the launcher: linear weights that the family table does not know may stay dense",
    )
    add("--max_steps", type=_count, metavar="N", help="steps of the run (default: the JSON's)")
    add("--tokens", type=_tokens, metavar="N", help="tokens of the run, like 5B (default: max_steps times a step's)")
    add("--gpu", metavar="NAME", default="h100", help="a100, b200, h100, h200, l40s or v100: its peak (default: h100)")
    add("--peak_tflops", type=_positive, metavar="X", help="of one GPU in this precision, instead of --gpu")
    add("--mfu", type=_share, default=0.4, metavar="SHARE", help="of the peak that is reached (default: 0.4)")
    add(
        "--reserve",
        type=_not_negative,
        default=4.0,
        metavar="GIB",
        help="of a GPU for the driver, communication buffers and fragmentation (default: 4)",
    )
    add("--host_memory", type=_positive, metavar="GIB", help="of the host, for each GPU (default: any amount)")
    add("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan every configuration, print, and say in the exit code whether one fits."""
    import contextlib
    import sys
    import warnings

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed says, while it is imported, that there is no GPU
        import transformers

        from sparseforge_ds.planning.duration import PEAK_TFLOPS
        from sparseforge_ds.planning.report import report
        from sparseforge_ds.planning.study import GIB, Machine, Request, study, to_dict

    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    gpu = args.gpu.lower()
    if gpu not in PEAK_TFLOPS and args.peak_tflops is None:
        raise ValueError(f"--gpu {args.gpu}: known are {', '.join(PEAK_TFLOPS)}; give --peak_tflops for another one")
    machine = Machine(
        ranks=args.gpus,
        device=int(args.gpu_memory * GIB),
        host=None if args.host_memory is None else int(args.host_memory * GIB),
        reserve=int(args.reserve * GIB),
        tflops=args.peak_tflops or PEAK_TFLOPS[gpu],
        mfu=args.mfu,
        bf16=gpu != "v100",
    )
    request = Request(
        model=args.model,
        teacher=args.teacher,
        seq_length=args.seq_length,
        checkpointing=args.activation_checkpointing,
        micro_batch=args.micro_batch,
        global_batch=args.global_batch,
        max_steps=args.max_steps,
        tokens=args.tokens,
        allow_dense=tuple(args.allow_dense),
    )
    studies = [study(path, request, machine) for path in args.deepspeed]
    if args.json:
        print(json.dumps([to_dict(each) for each in studies], indent=2))
    else:
        print("\n\n".join(report(each) for each in studies))
        if len(studies) > 1:
            fitting = [each.settings.name for each in studies if each.fits]
            print(
                f"\n{', '.join(fitting) or 'none of them'} fits" if len(fitting) < 2 else f"\n{', '.join(fitting)} fit"
            )
    return 0 if any(each.fits for each in studies) else 1


def _tokens(text: str) -> int:
    """5000, 5e9, 1.25B or 300M."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper(), 1.0)
    value = _number(text if unit == 1.0 else text[:-1]) * unit
    if not 1 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens; write 5B, 300M or 5e9")
    return round(value)


def _count(text: str) -> int:
    value = _number(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return int(value)


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number >= 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share, 0 < share <= 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


if __name__ == "__main__":
    raise SystemExit("error: this module is run as `sparseforge plan`")
