#!/usr/bin/env python3
r"""Train the demo's language model and its tokenizer from scratch on the documentation of the standard library.

    python launch/train_demo_model.py --output_dir sparseforge_ds/assets/stdlib_llama
    python launch/train_demo_model.py --continue_from sparseforge_ds/assets/stdlib_llama --experts 4 \
        --steps 1200 --output_dir runs/mixture

The second line makes a mixture of experts of it, for `studies/mixture.json`: small, but trained. With
`--hold_back 3` every third document is not read, so that a run under a mask can have text that is new to the model.
`--text TRAIN HELDOUT` reads two files instead of the documentation.

Plain PyTorch in one process, on a GPU where there is one; the README of the shipped model names the two commands that
made it. The model is small and trained for long, because an undertrained model is pruned for free and would show
nothing. At the end it prints the held-out perplexity of the dense model and of its one-shot magnitude 2:4 projection.
The result is a Hugging Face folder with the tokenizer beside the weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from launch.demo_tokenizer import BOS, EOS, copy_tokenizer, encode, train_tokenizer
from sparseforge_ds.evaluate.scored_text import read_documents

# Shapes: N tokens of a split, B sequences of a batch, T tokens of a sequence, V vocabulary, O x I a weight, G groups of
# M neighbours.

Model: TypeAlias = LlamaForCausalLM | MixtralForCausalLM
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads")
"""Flags of a model that is made anew."""


def main(arguments: list[str] | None = None) -> None:
    """Train the demo's tokenizer and model, and save them."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        train, heldout = map(read_documents, args.text)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    args.output_dir.mkdir(parents=True, exist_ok=True)

    if args.hold_back is not None:
        unread = train[:: args.hold_back]
        del train[:: args.hold_back]
        for name, documents in (("read.jsonl", train), ("unread.jsonl", unread)):
            (args.output_dir / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    if args.continue_from is None:
        train_tokenizer(train, args.vocab_size, args.output_dir)
        model = build_model(args)
    else:
        copy_tokenizer(args.continue_from, args.output_dir)
        model = LlamaForCausalLM.from_pretrained(args.continue_from, dtype=torch.float32, trust_remote_code=False)
        model = model if args.experts is None else mixture_of(model, args.experts)
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.set_float32_matmul_precision("high")  # by TF32, several times as fast
    model.to(device)
    train_N, heldout_N = (encode(documents, args.output_dir).to(device) for documents in (train, heldout))
    # A pass begins anywhere in the first sequence, so that one more than a batch is needed.
    for name, tokens_N, sequences, cure in (
        (args.text[0], train_N, args.batch_size + 1, "--batch_size or --sequence_length"),
        (args.text[1], heldout_N, 1, "--sequence_length"),
    ):
        if tokens_N.numel() < sequences * args.sequence_length:
            raise SystemExit(
                f"error: --text {name}: has {tokens_N.numel()} tokens, and {sequences} x {args.sequence_length} are "
                f"needed; give more text, or lower {cure}"
            )
    prunable = sum(weight.numel() for weight in prunable_weights(model))
    total = sum(parameter.numel() for parameter in model.parameters())
    for split, documents, tokens_N in (("train", train, train_N), ("held-out", heldout, heldout_N)):
        print(f"{split} text: {tokens_N.numel():,} tokens in {len(documents)} documents")
    print(f"model: {total:,} parameters, {prunable:,} of them prunable ({prunable / total:.0%})", flush=True)

    seconds = fit(model, train_N, heldout_N, args)
    save_model(model, args.output_dir)
    dense = perplexity(model, heldout_N, args.sequence_length)
    pruned = perplexity(magnitude_2_4(model), heldout_N, args.sequence_length)
    print(f"{args.steps * args.batch_size * args.sequence_length:,} tokens in {seconds / 60:.1f} minutes")
    print(f"held-out perplexity per token: dense {dense:.3f}, one-shot magnitude 2:4 {pruned:.3f}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo's model and tokenizer on the documentation of the standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the finished model and tokenizer")
    parser.add_argument("--continue_from", type=Path, help="folder of an earlier result, for one more cosine cycle")
    parser.add_argument("--experts", type=positive, help="of every MLP of --continue_from, two of which a token takes")
    parser.add_argument(
        "--text",
        nargs=2,
        metavar=("TRAIN", "HELDOUT"),
        default=("stdlib:train", "stdlib:heldout"),
        help="what is read and what measures it, as `sparseforge evaluate --text` takes it",
    )
    parser.add_argument(
        "--hold_back", type=positive, help="of the documents every N-th is not read; both parts go to --output_dir"
    )
    parser.add_argument("--steps", type=positive, default=7000, help="optimizer steps")
    parser.add_argument("--batch_size", type=positive, default=4, help="sequences per step")
    parser.add_argument("--sequence_length", type=positive, default=512, help="tokens per sequence")
    parser.add_argument("--muon_learning_rate", type=float, default=0.02, help="peak, of the prunable matrices")
    parser.add_argument("--expert_learning_rate", type=float, default=2e-3, help="peak, of experts, by AdamW")
    parser.add_argument("--adam_learning_rate", type=float, default=6e-3, help="peak, of the embedding and the norms")
    parser.add_argument("--warmup_steps", type=int, default=200, help="linear warm-up; then cosine to zero")
    parser.add_argument("--weight_decay", type=float, default=0.02, help="of the prunable matrices only")
    parser.add_argument("--vocab_size", type=positive, default=1024, help="pieces of the tokenizer")
    parser.add_argument("--hidden_size", type=positive, default=64, help="a multiple of 16")
    parser.add_argument("--intermediate_size", type=positive, default=192, help="a multiple of 16")
    parser.add_argument("--layers", type=positive, default=5, help="decoder layers")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads")
    parser.add_argument("--kv_heads", type=positive, default=2, help="key and value heads")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the text")
    parser.add_argument("--threads", type=positive, default=1, help="threads of PyTorch")
    parser.add_argument("--report_every", type=positive, default=1000, help="steps between reports and saved models")
    args = parser.parse_args(arguments)
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"this script needs torch 2.9 or newer for torch.optim.Muon; found {torch.__version__}")
    if args.experts is not None and (args.continue_from is None or args.experts < 2):
        parser.error(f"--experts {args.experts} needs --continue_from, and 2 or more")
    # Flags that nothing reads in this run, with what they need.
    needs = {} if args.experts is not None else {"expert_learning_rate": "--experts"}
    if args.continue_from is not None:
        needs |= dict.fromkeys(_SIZES, "a new model: --continue_from has sizes of its own")
    for name, needed in needs.items():
        if (value := getattr(args, name)) != parser.get_default(name):
            parser.error(f"--{name} {value} needs {needed}")
    if args.hold_back == 1:
        parser.error("--hold_back 1 leaves no document to read; use 2 or more")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(args, name) % 16:
            parser.error(f"--{name} {getattr(args, name)} must be a multiple of 16, so that every pattern divides it")
    return args


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


# Text


def batches(train_N: Tensor, batch_size: int, sequence_length: int, seed: int) -> Iterator[Tensor]:
    """Yield (B, T) batches without end; every pass cuts the stream at another offset and shuffles the sequences."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(sequence_length, (1,), generator=generator))
        count = (train_N.numel() - offset) // sequence_length
        sequences = train_N[offset : offset + count * sequence_length].view(count, sequence_length)
        order = torch.randperm(count, generator=generator)
        for indices in order[: count // batch_size * batch_size].split(batch_size):
            yield sequences[indices]


# Model


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Build the model with random weights."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=max(512, args.sequence_length),
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def mixture_of(dense: LlamaForCausalLM, experts: int) -> MixtralForCausalLM:
    """Return the same function as a mixture with copies of the MLP: sparse upcycling (arXiv 2212.05055)."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    shared = {name: getattr(dense.config, name) for name in (*sizes, *more, "bos_token_id", "eos_token_id")}
    model = MixtralForCausalLM(MixtralConfig(**shared, num_local_experts=experts, num_experts_per_tok=2))
    model.load_state_dict(dense.state_dict(), strict=False)  # all but the MLPs
    with torch.no_grad():
        for layer, source in zip(model.model.layers, dense.model.layers, strict=True):
            layer.mlp.experts.gate_up_proj[:] = torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])
            layer.mlp.experts.down_proj[:] = source.mlp.down_proj.weight
    return model


def prunable_weights(model: Model) -> list[Tensor]:
    """Return the (O, I) matrices inside the decoder layers, and a layer's experts as one (E, O, I).

    Embedding, head, routers and norms stay dense.
    """
    layers = model.model.layers
    fused = [weight for weight in layers.parameters() if weight.dim() == 3]
    return [module.weight for module in layers.modules() if isinstance(module, nn.Linear)] + fused


@torch.no_grad()
def magnitude_2_4(model: Model) -> Model:
    """Return a copy that keeps the two largest magnitudes of every four neighbours along the input axis."""
    pruned = copy.deepcopy(model)
    for weight in prunable_weights(pruned):
        group_GM = weight.view(-1, 4)
        kept_G2 = group_GM.abs().topk(2, dim=1).indices
        group_GM.mul_(torch.zeros_like(group_GM).scatter_(1, kept_G2, 1.0))
    return pruned


def save_model(model: Model, folder: Path) -> None:
    """Save the model in the format of transformers."""
    model.save_pretrained(folder)


# Training and evaluation


def fit(model: Model, train_N: Tensor, heldout_N: Tensor, args: argparse.Namespace) -> float:
    """Train in place, and return the seconds that it took."""
    optimizers = build_optimizers(model, args)
    source = batches(train_N, args.batch_size, args.sequence_length, args.seed)
    start = time.perf_counter()
    model.train()
    progress = tqdm(range(args.steps), unit="step", mininterval=2, disable=None)
    for step in progress:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * rate_factor(step, args.steps, args.warmup_steps)
        batch_BT = next(source)
        loss = token_losses(model, batch_BT).mean()
        if not torch.isfinite(loss):
            raise SystemExit(f"the loss is not finite at step {step}: lower the learning rates")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % args.report_every == 0:
            seconds = time.perf_counter() - start
            ppl = perplexity(model, heldout_N, args.sequence_length)
            pruned = perplexity(magnitude_2_4(model), heldout_N, args.sequence_length)
            tqdm.write(
                f"step {step + 1}: loss {loss.item():.3f}, held-out perplexity {ppl:.3f}, "
                f"one-shot magnitude 2:4 {pruned:.3f}, {seconds:.0f} s"
            )
            sys.stdout.flush()
            save_model(model, args.output_dir)
    return time.perf_counter() - start


def build_optimizers(model: Model, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Build Muon for the prunable matrices, and AdamW for the embedding, the routers and the norms.

    Muon's orthogonal updates use every direction of a small matrix: per step it learns more than AdamW, and it leaves
    less to prune for free.
    """
    prunable = prunable_weights(model)
    others = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in prunable)]
    matrices = [weight for weight in prunable if weight.dim() == 2]
    experts = [weight for weight in prunable if weight.dim() == 3]  # which torch's Muon does not take
    return [
        torch.optim.Muon(matrices, lr=args.muon_learning_rate, weight_decay=args.weight_decay),
        *([torch.optim.AdamW(experts, lr=args.expert_learning_rate, betas=(0.9, 0.95), fused=True)] if experts else []),
        torch.optim.AdamW(others, lr=args.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return the learning rate as a share of its peak: linear warm-up, then cosine to zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def token_losses(model: Model, batch_BT: Tensor) -> Tensor:
    """Return the cross-entropy of every token but each sequence's first, as one flat tensor."""
    logits_BTV = model(input_ids=batch_BT, use_cache=False).logits
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), batch_BT[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def perplexity(model: Model, tokens_N: Tensor, sequence_length: int) -> float:
    """Return exp of the mean loss over windows that do not overlap; a window's first token is context only."""
    model.eval()
    usable = tokens_N.numel() // sequence_length * sequence_length
    windows = tokens_N[:usable].view(-1, sequence_length)
    losses = torch.cat([token_losses(model, batch_BT) for batch_BT in windows.split(8)])
    model.train()
    return math.exp(losses.double().mean().item())


if __name__ == "__main__":
    main()
