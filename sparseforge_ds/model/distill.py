"""Knowledge distillation from the frozen dense model (design eq. 12): the loss, and the teacher that feeds it.

    L = l_task * CE(student, labels) + l_KL * T^2 * KL(softmax(teacher / T) || softmax(student / T))

Vocabularies are large: the fp32 log-probabilities of one sequence can outweigh the model. Both terms and their gradient
are therefore formed a chunk of tokens at a time. Shape suffixes: B sequences, S positions, T tokens (of a chunk, or all
B * S), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_modules_by_name
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as hf_deepspeed

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.model.experts import leaf_modules
from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.registration import register_families

IGNORED = -100
"""Label of a position that is not trained on, as in transformers."""


class DistillationLoss(NamedTuple):
    """Scalars in fp32, each the mean over the tokens that are not ignored."""

    total: Tensor
    """task_weight * cross_entropy + weight * kl; the only one with a gradient."""
    cross_entropy: Tensor
    """Next-token cross-entropy, for the log."""
    kl: Tensor
    """KL from the teacher, times the squared temperature, for the log."""


def distillation_loss(
    student_logits_BSV: Tensor, teacher_logits_BSV: Tensor, labels_BS: Tensor, config: DistillationConfig
) -> DistillationLoss:
    """The training loss, with the shift by one of transformers' causal models inside: logits at s predict label s + 1.

    The gradient is formed in the backward pass, chunk by chunk in fp32, times whatever scale comes from above, and then
    stored in the dtype of the logits: fp16 loss scaling protects it. A non-finite logit gives a non-finite loss; a
    batch in which every label is ignored gives NaN, like `torch.nn.functional.cross_entropy`.

    Args:
        student_logits_BSV: (B, S, V) in any floating dtype.
        teacher_logits_BSV: (B, S, V), no gradient flows to it.
        labels_BS: (B, S) unshifted token ids, the same ids at the same places as the inputs; -100 is ignored.
        config: weights, temperature and the tokens of a chunk.

    Raises:
        ValueError: shapes that do not belong together, above all two different vocabularies.
    """
    B, S, V = student_logits_BSV.shape
    if teacher_logits_BSV.shape[-1] != V:
        raise ValueError(
            f"the teacher's vocabulary has {teacher_logits_BSV.shape[-1]} entries and the student's {V}; distillation "
            "compares them entry by entry, so use a teacher with the same tokenizer and the same padding of its head"
        )
    if teacher_logits_BSV.shape != (B, S, V) or labels_BS.shape != (B, S):
        raise ValueError(
            f"student logits {(B, S, V)}, teacher logits {tuple(teacher_logits_BSV.shape)} and labels "
            f"{tuple(labels_BS.shape)} do not belong together; give (B, S, V), (B, S, V) and (B, S) of one batch"
        )
    # Shifting the labels instead of the logits: every chunk of logits is then a view.
    next_BS = F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
    total, cross_entropy, kl = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        student_logits_BSV.reshape(-1, V), teacher_logits_BSV.detach().reshape(-1, V), next_BS.reshape(-1), config
    )
    return DistillationLoss(total, cross_entropy, kl)


def task_loss(logits_BSV: Tensor, labels_BS: Tensor, chunk_tokens: int = 1024) -> Tensor:
    """() fp32 next-token cross-entropy without a teacher, a chunk of tokens at a time like `distillation_loss`.

    Args:
        logits_BSV: (B, S, V) in any floating dtype.
        labels_BS: (B, S) unshifted token ids, the same ids at the same places as the inputs; -100 is ignored.
        chunk_tokens: tokens whose fp32 log-probabilities exist at a time.
    """
    config = DistillationConfig(weight=0.0, task_weight=1.0, chunk_tokens=chunk_tokens)
    next_BS = F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED)
    total, _, _ = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        logits_BSV.flatten(0, 1), None, next_BS.reshape(-1), config
    )
    return total  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    """Equation 12 on flat tokens; never more than one fp32 [chunk, vocabulary] set of tensors."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, student_TV: Tensor, teacher_TV: Tensor | None, next_T: Tensor, config: DistillationConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = torch.promote_types(student_TV.dtype, torch.float32)
        kl_T = torch.empty(len(next_T), dtype=exact, device=student_TV.device)
        cross_entropy_T = torch.empty_like(kl_T)
        for chunk in _chunks(len(next_T), config.chunk_tokens):
            kl_T[chunk], cross_entropy_T[chunk] = _token_losses(
                student_TV[chunk], _part(teacher_TV, chunk), next_T[chunk], config.temperature, exact
            )
        trained_T = next_T != IGNORED
        tokens = trained_T.sum()
        kl = kl_T.where(trained_T, 0.0).sum() / tokens
        cross_entropy = cross_entropy_T.where(trained_T, 0.0).sum() / tokens
        total = config.task_weight * cross_entropy + config.weight * kl
        ctx.save_for_backward(student_TV, teacher_TV, next_T, tokens)  # type: ignore[arg-type]
        ctx.config = config  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(cross_entropy, kl)
        return total, cross_entropy, kl

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is formed here in place would be missing from the graph
            raise ValueError(
                "distillation_loss has no second derivative; call backward without create_graph=True, or use "
                "torch.nn.functional.cross_entropy and kl_div where a double backward is wanted"
            )
        student_TV, teacher_TV, next_T, tokens = ctx.saved_tensors
        exact = torch.promote_types(student_TV.dtype, torch.float32)
        scale = of_total / tokens
        gradient_TV = torch.empty_like(student_TV)
        for chunk in _chunks(len(next_T), ctx.config.chunk_tokens):
            gradient_TV[chunk] = _token_gradients(
                student_TV[chunk], _part(teacher_TV, chunk), next_T[chunk], ctx.config, scale, exact
            )
        return gradient_TV, None, None, None


def _part(teacher_TV: Tensor | None, chunk: slice) -> Tensor | None:
    return None if teacher_TV is None else teacher_TV[chunk]


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _tempered(logits_TV: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    """At temperature 1 the logits themselves: the softmax that follows reads 16 bits and writes 32 in one kernel."""
    return logits_TV if temperature == 1.0 else logits_TV.to(exact) / temperature


def _token_losses(
    student_TV: Tensor, teacher_TV: Tensor | None, next_T: Tensor, temperature: float, exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """KL (0 without a teacher) and cross-entropy of each token, both (T,); meaningless where the label is ignored."""
    log_student_TV = F.log_softmax(_tempered(student_TV, temperature, exact), dim=-1, dtype=exact)
    target_T1 = next_T.where(next_T != IGNORED, 0)[:, None]
    if temperature == 1.0:
        cross_entropy_T = -log_student_TV.gather(1, target_T1)[:, 0]
    else:
        cross_entropy_T = student_TV.to(exact).logsumexp(-1) - student_TV.gather(1, target_T1)[:, 0]
    if teacher_TV is None:
        return torch.zeros_like(cross_entropy_T), cross_entropy_T
    log_teacher_TV = F.log_softmax(_tempered(teacher_TV, temperature, exact), dim=-1, dtype=exact)
    kl_T = log_student_TV.neg_().add_(log_teacher_TV).mul_(log_teacher_TV.exp_()).sum(-1)
    return kl_T * temperature**2, cross_entropy_T


def _token_gradients(
    student_TV: Tensor,
    teacher_TV: Tensor | None,
    next_T: Tensor,
    config: DistillationConfig,
    scale: Tensor,
    exact: torch.dtype,
) -> Tensor:
    """d total / d student, (T, V) in `exact`; zero rows where the label is ignored.

    d KL / d student = (softmax(student / T) - softmax(teacher / T)) / T, and T^2 of the loss makes that a factor T.
    """
    temperature, kl_weight, task_weight = config.temperature, config.weight * config.temperature, config.task_weight
    gradient_TV = F.softmax(_tempered(student_TV, temperature, exact), dim=-1, dtype=exact)
    if temperature == 1.0:
        gradient_TV.mul_(kl_weight + task_weight)
    else:
        gradient_TV.mul_(kl_weight).add_(F.softmax(student_TV, dim=-1, dtype=exact), alpha=task_weight)
    if teacher_TV is not None:
        gradient_TV.sub_(F.softmax(_tempered(teacher_TV, temperature, exact), dim=-1, dtype=exact), alpha=kl_weight)
    ignored_T1 = (next_T == IGNORED)[:, None]
    target_T1 = next_T[:, None].masked_fill(ignored_T1, 0)
    gradient_TV.scatter_add_(1, target_T1, gradient_TV.new_full(target_T1.shape, -task_weight))
    return gradient_TV.mul_(scale).masked_fill_(ignored_T1, 0.0)


class Teacher:
    """A frozen dense model that answers with logits.

        teacher = Teacher.from_pretrained("path", config.distillation, ds_config)
        loss = distillation_loss(engine(**batch).logits, teacher(batch["input_ids"]), batch["labels"], ...)

    `hold="zero3"` partitions it over the ranks by an engine of its own without an optimizer, whatever the stage of the
    student; `hold="replicated"` keeps it whole on every rank. It never trains, drops nothing and keeps no cache.
    """

    def __init__(self, model: PreTrainedModel, config: DistillationConfig, ds_config: dict[str, Any]) -> None:
        """Freeze `model` and place it; collective with `hold="zero3"`.

        Args:
            model: a causal language model, partitioned by ZeRO-3 already or not.
            config: its `hold` is used.
            ds_config: the student's DeepSpeed configuration, with no "auto" left: the teacher computes in its dtype.

        Raises:
            ValueError: a partitioned model that is to be replicated, or a dtype that is still "auto".
        """
        model.requires_grad_(False)
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._module: nn.Module
        if config.hold == "zero3":
            if model.config.model_type in FAMILIES:  # a dense teacher may be of any other
                set_z3_leaf_modules_by_name(model, leaf_modules(model))
            self._module, *_ = deepspeed.initialize(model=model, config=teacher_ds_config(ds_config))
        else:
            if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
                raise ValueError(
                    'distillation.hold = "replicated", but the teacher was partitioned by ZeRO-3 as it was loaded; '
                    'load it with Teacher.from_pretrained, or set "hold": "zero3"'
                )
            for parameter in model.parameters():  # not buffers: rotary frequencies stay fp32, as DeepSpeed keeps them
                parameter.data = parameter.data.to(_dtype(ds_config))
            self._module = model.to(get_accelerator().current_device_name())
        self._module.eval()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, config: DistillationConfig, ds_config: dict[str, Any], **kwargs: Any
    ) -> Teacher:
        """Load a teacher the way it will be held: partitioned as it loads with `hold="zero3"`, whole otherwise.

        An `HfDeepSpeedConfig` of the student that is alive keeps its effect on later loads, and has none on this one.

        Args:
            path: folder or hub id.
            config: its `hold` is used.
            ds_config: the student's DeepSpeed configuration.
            **kwargs: for `AutoModelForCausalLM.from_pretrained`; `dtype` is the student's unless given,
                and no code of the teacher's own is run.
        """
        register_families()
        kwargs.setdefault("dtype", _dtype(ds_config))
        with _loading_as(teacher_ds_config(ds_config) if config.hold == "zero3" else None):
            try:
                model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **kwargs)
            except ValueError as error:
                raise ValueError(f"teacher {path}: cannot be loaded ({reason(error)})") from None
        return cls(model, config, ds_config)

    def check_student(self, student: PreTrainedModel) -> None:
        """Raise a ValueError now, rather than at the first loss, if `student` has another vocabulary."""
        vocabulary = int(student.config.get_text_config().vocab_size)
        if vocabulary != self.vocabulary:
            raise ValueError(
                f"the teacher's vocabulary has {self.vocabulary} entries and the student's {vocabulary}; use a teacher "
                "with the same tokenizer and the same padding of its head, or set distillation to null"
            )

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, S) token ids -> (B, S, V) logits without a gradient; collective with `hold="zero3"`."""
        output = self._module(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits: Tensor = output.logits
        return logits


_ZERO3_KEYS = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "overlap_comm",
    "offload_param",
    "leaf_module",
    "zero_quantized_nontrainable_weights",
)
"""What a teacher takes over from the student's `zero_optimization`: how weights are partitioned and gathered."""


def teacher_ds_config(ds_config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed configuration of a teacher under ZeRO-3 inference: the student's dtype and gathering, no optimizer."""
    zero = {
        key: value
        for key, value in ds_config.get("zero_optimization", {}).items()
        if key in _ZERO3_KEYS and value != "auto"
    }
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    dtype = _dtype(ds_config)
    if dtype != torch.float32:
        config["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    return config


def _dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """The dtype in which DeepSpeed computes under this configuration."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        enabled = ds_config.get(key, {}).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ValueError(f"{key}.enabled = {enabled!r} in the DeepSpeed configuration: set it to true or false")
        if enabled:
            return dtype
    return torch.float32


@contextmanager
def _loading_as(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """`from_pretrained` inside partitions as it loads under `ds_config`, or loads whole tensors without one."""
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    outer = None if reference is None else reference()
    inner = None if ds_config is None else HfDeepSpeedConfig(ds_config)  # only its being alive counts
    if inner is None:
        hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        del inner
        if outer is None:
            hf_deepspeed.unset_hf_deepspeed_config()
        else:
            hf_deepspeed.set_hf_deepspeed_config(outer)
