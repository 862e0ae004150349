"""`sparseforge generate`: the continuation of a prompt by any exported model."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from sparseforge_ds.cli.export import DTYPES
from sparseforge_ds.cli.given_model import register_packed24, require_model
from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.cli.printing import printable

_EPILOG = """\
The text goes to stdout as it comes, everything else to stderr. Without --temperature the most likely token is taken
each time, so that two exports of one model can be compared. From generation_config.json come only the ids of special
tokens, such as those that end a text: no penalties, beams, top_k or top_p.

On CUDA the model has a static cache and is compiled for it, with CUDA graphs, where transformers can do that. The
first tokens wait for the compiler, up to a minute, which the printed speed leaves out; --eager does without it.

exit code: 0 done; 1 the model computes NaN or infinity; 2 an error, printed as one line

examples:
  sparseforge generate models/qwen3_14b_packed24 "The capital of France is"
  sparseforge generate models/qwen3_14b_2to4 "Tell me about lions." --chat --temperature 0.7 --seed 3
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge generate`."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt with any exported model, on the screen",
        description="Load a model (hf, packed24, or any causal language model of transformers), on the GPU where "
        "there is one, and continue PROMPT.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a Hugging Face model")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "--max_new_tokens", type=int, metavar="N", help="stop after N (default: 128, or the positions that are left)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sample from all tokens at T; 0 takes the likeliest (default: 0)",
    )
    parser.add_argument("--seed", type=int, help="with --temperature: seed of the samples (default: 0)")
    parser.add_argument("--chat", action="store_true", help="put PROMPT into the model's chat template")
    parser.add_argument("--eager", action="store_true", help="on CUDA: start at once, and wait for the host each token")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="dtype of the weights (default: as saved)")
    parser.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter (default: the model's own); none: no adapter")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load a model, continue the prompt, and print the speed."""
    # Check the flags.
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens {args.max_new_tokens}: use 1 or more")
    if args.temperature and not 1e-3 <= args.temperature < math.inf:  # below, logits over it leave their dtype
        raise ValueError(f"--temperature {args.temperature}: use 0, or a number like 0.7, at least 0.001")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}: use 0 or more, below 2^63")
    if args.seed is not None and not args.temperature:
        raise ValueError(f"--seed {args.seed}: without --temperature nothing is drawn; give that too, or leave it out")
    require_model(args.model)
    with large_imports():
        import torch
        from transformers import GenerationConfig, TextStreamer

        from sparseforge_ds.evaluate.finished_model import (
            check_embeddings_for,
            find_adapter,
            load_model,
            load_tokenizer,
        )
        from sparseforge_ds.model.sound_weights import why_not_finite
        from sparseforge_ds.packed_format.packing import has_packed_weights

    # Fit the new tokens into the model's positions, and load it.
    register_packed24(args.model)
    adapter = find_adapter(args.model, args.adapter)
    tokenizer = load_tokenizer(args.model)
    inputs = _tokens(args, tokenizer)
    new = _new_tokens(args, inputs["input_ids"].shape[1])
    model: Any = load_model(args.model, args.dtype, adapter)
    check_embeddings_for(model, inputs["input_ids"].flatten().tolist())

    # Replace the model's own settings, which would fill in whatever other settings leave open.
    own = model.generation_config
    cache = {} if args.eager else cache_settings(model)
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if end is None else end,  # nothing is padded; transformers warns without
        max_new_tokens=new,
        do_sample=args.temperature > 0,
        **({"temperature": args.temperature, "top_k": 0} if args.temperature else {}),
        **cache,
    )
    if model.device.type == "cpu" and any(map(has_packed_weights, model.modules())):
        from sparseforge_ds.extras.packed24.cpu_kernel import load_cpu_kernel

        load_cpu_kernel()  # now, since compiling it is no part of the model's speed

    # Continue the prompt.
    torch.manual_seed(args.seed or 0)
    times = [time.perf_counter()]

    def record_time(_: Any, scores: Any) -> Any:
        times.append(time.perf_counter())
        return scores

    try:
        model.generate(
            **inputs.to(model.device),
            generation_config=model.generation_config,
            logits_processor=[_refuse_not_finite, record_time],  # the first waits for the device
            streamer=TextStreamer(tokenizer, skip_prompt=args.chat, skip_special_tokens=True),
        )
    except _NoNumberError:
        cause = why_not_finite(model)
        print()  # behind the prompt
        print(
            f"error: {printable(args.model)}: its logits are no finite numbers, so that no token is likelier: {cause}",
            file=sys.stderr,
        )
        return 1
    print(f"{describe_speed(times, compiles=bool(cache))}, on {model.device}", file=sys.stderr)
    return 0


_FEWEST_COMPILED = 16
"""Tokens of a text whose median surely waits for no compiler."""


def describe_speed(times: Sequence[float], compiles: bool) -> str:
    """Describe the speed of a text, without the tokens that wait for a compiler.

    Args:
        times: seconds on a clock, at the start and when each token was known.
        compiles: transformers compiles inside the first tokens, and records CUDA graphs.
    """
    count = len(times) - 1
    seconds = times[-1] - times[0]
    if not compiles:
        return f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} a second"
    # Compiled tokens follow the prompt's, the compiler's and that of the recording: their median is one of the others.
    taken = [end - start for start, end in zip(times, times[1:], strict=False)]
    rate = f"; compiled, {1 / median(taken):.1f} a second" if count >= _FEWEST_COMPILED else ""
    return f"{count} tokens in {seconds:.1f} s, compiling included{rate}"


class _NoNumberError(Exception):
    """Logits of a model that are NaN or infinite."""


def _refuse_not_finite(tokens: Any, scores: Any) -> Any:
    """Return the logits of one step, as a logits processor must; raise where the largest is no finite number.

    transformers would take token 0 of NaN, and could not draw a sample.
    """
    if not scores.amax(-1).isfinite().all():
        raise _NoNumberError
    return scores


def cache_settings(model: Any) -> dict[str, Any]:
    """Return the generation settings that let transformers compile decoding of `model` on CUDA, or none elsewhere."""
    compiles = model.device.type == "cuda" and getattr(model, "_can_compile_fullgraph", False)
    return {"cache_implementation": "static"} if compiles else {}


def _new_tokens(args: argparse.Namespace, length: int) -> int:
    """Return the most tokens to write behind a prompt of `length`.

    Raises:
        ValueError: the model has too few positions.
    """
    from sparseforge_ds.model.registration import load_config, positions_of

    positions = positions_of(load_config(args.model, args.model)) or math.inf
    if length >= positions:
        raise ValueError(f"PROMPT: takes {length} tokens, and {args.model} has {positions} positions; shorten it")
    if args.max_new_tokens is None:
        return int(min(128, positions - length))
    if length + args.max_new_tokens > positions:
        raise ValueError(
            f"--max_new_tokens {args.max_new_tokens}: PROMPT takes {length} of the {positions} positions of "
            f"{args.model}; give {positions - length} or less, or shorten PROMPT"
        )
    return int(args.max_new_tokens)


def _tokens(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the prompt as inputs of the model, (1, tokens)."""
    from sparseforge_ds.model.chat_template import render_chat
    from sparseforge_ds.model.tokenizer import run_tokenizer

    if args.chat and tokenizer.chat_template is None:
        raise ValueError(f"{args.model}: its tokenizer has no chat template; leave out --chat")
    turns = [{"role": "user", "content": args.prompt}]
    try:
        text = render_chat(tokenizer, turns, is_today=True, add_generation_prompt=True) if args.chat else args.prompt
        options = {"return_tensors": "pt", "return_token_type_ids": False}
        inputs = run_tokenizer(tokenizer, text, add_special_tokens=not args.chat, **options)
    except ValueError as error:
        raise ValueError(f"{args.model}: {error}") from None
    if inputs["input_ids"].numel() == 0:
        raise ValueError("PROMPT: gives no tokens, and the tokenizer no beginning of a text; write at least a word")
    return inputs
