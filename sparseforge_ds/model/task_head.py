"""Kinds of heads, by what a label stands for: the one place that decides whether a loss shifts labels."""

from __future__ import annotations

from enum import Enum
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES


class TaskHead(Enum):
    """Kind of a model's head: what its logits predict, and at which position the label stands."""

    NEXT_TOKEN = "causal"
    """Logits at a token predict the next one: the loss shifts labels. Causal language models."""
    TOKEN = "token"
    """Logits at a token predict its own label: masked language models and token classification."""
    SEQUENCE = "sequence"
    """One label for each sequence, (B,), and logits (B, classes)."""
    DECODER = "decoder"
    """Logits at a position of the decoder predict the label at that position: sequence to sequence. The model itself
    shifts the labels that the decoder reads."""


def task_head(model: Any) -> TaskHead | None:
    """Return the kind of a model's head, or None if its loss is no cross-entropy of classes, or is not known.

    Args:
        model: of transformers, whose classes name their loss by `loss_type`.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    config: Any = model.config
    loss = getattr(model, "loss_type", None)
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return TaskHead.DECODER
    if loss in ("ForMaskedLM", "ForTokenClassification"):
        return TaskHead.TOKEN
    if loss == "ForSequenceClassification":
        classes = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
        return TaskHead.SEQUENCE if classes else None
    if loss not in (None, "ForCausalLM", "ForConditionalGeneration") or getattr(config, "is_encoder_decoder", False):
        return None
    if type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():  # XLM and Flaubert have no loss_type
        return TaskHead.TOKEN
    return TaskHead.NEXT_TOKEN if model.can_generate() else None


def require_task_head(model: Any, feature: str) -> TaskHead:
    """Return the kind of a model's head.

    Args:
        model: of transformers.
        feature: name of what needs labels of a known kind, for the message.

    Raises:
        ValueError: `task_head` does not know the head.
    """
    if (head := task_head(model)) is None:
        number = getattr(getattr(model, "config", None), "num_labels", None)
        labels = f" with {number} label" if number == 1 else ""
        raise ValueError(
            f"{feature} beside {type(model).__name__}{labels}: it works on the logits of causal, masked and sequence-"
            "to-sequence language models, and of classifications with one label each. This model's loss is another (a "
            f"reward, a regression, several labels, spans of answers); leave {feature} out"
        )
    return head


def is_classification(model: Any) -> bool:
    """Return True if logits are of classes, and not of the vocabulary."""
    return str(getattr(model, "loss_type", None)).endswith("Classification")


def check_same_classes(student: Any, teacher: Any) -> None:
    """Raise ValueError unless two configs of classifications have the same number of classes."""
    if student.num_labels != teacher.num_labels:
        raise ValueError(
            f"the teacher has {teacher.num_labels} classes and the student {student.num_labels}; distillation compares "
            "them one by one: give a teacher that was trained on the same labels"
        )
