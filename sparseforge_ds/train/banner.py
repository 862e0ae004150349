"""What a run is about to do, on one screen: model, coverage, schedule, batch and memory per rank."""

from __future__ import annotations

from sparseforge_ds.train.mixed_windows import Mixed
from sparseforge_ds.train.packing import Packed
from sparseforge_ds.train.plan import Plan
from sparseforge_ds.train.streaming import Streamed

_BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


def banner(plan: Plan, text: Packed | Streamed | Mixed) -> str:
    """The start banner."""
    config, arguments, coverage = plan.config, plan.arguments, plan.coverage
    steps, schedule = config.max_steps, config.resolved_schedule
    hardening = schedule.hardening
    batch = plan.deepspeed
    rate = plan.learning_rate
    lines = [
        ("model", f"{plan.model.name} ({plan.model.config.model_type}, {coverage.total:,} parameters)"),
        ("teacher", plan.teacher.name if plan.teacher else "none"),
        (
            "pruned",
            f"{config.pattern} in {coverage.weights} weights: {coverage.of_prunable:.1f}% of the prunable and "
            f"{coverage.of_all:.1f}% of all parameters under a mask",
        ),
        *(("not covered", f"{line}: stays dense; no row of the family table names it") for line in plan.uncovered),
        ("mask", f"importance {config.importance}, an update every {schedule.update_every} steps"),
        (
            "schedule",
            ", ".join(
                f"{name} {start}-{stop}"
                for name, start, stop in (
                    ("heating", 0, hardening[0]),
                    ("hardening", *hardening),
                    ("frozen", hardening[1], steps),
                )
                if stop > start
            ),
        ),
        *_low_rank_line(plan),
        (
            "rate",
            f"{rate.peak:g} after {round(rate.warmup * steps)} warm-up steps, cosine to {rate.peak * rate.floor:g}",
        ),
        (
            "batch",
            f"{batch['train_batch_size']} x {arguments.seq_length} tokens = {batch['train_micro_batch_size_per_gpu']}"
            f" a rank x {batch['gradient_accumulation_steps']} accumulated x {plan.world_size} ranks",
        ),
        (
            "text",
            f"{plan.documents.name}: {text.summary(steps * plan.tokens_per_step)}",
        ),
        ("deepspeed", f"ZeRO-{plan.stage}, {str(plan.dtype).removeprefix('torch.')}"),
        ("memory", _memory_line(memory_per_rank(plan))),
        ("output", str(plan.folder)),
    ]
    width = max(len(name) for name, _ in lines)
    below = "\n" + " " * (width + 4)
    return "\n".join(f"  {name:<{width}}  {content}".replace("\n", below) for name, content in lines)


def _low_rank_line(plan: Plan) -> list[tuple[str, str]]:
    if plan.config.low_rank is None:
        return []
    parameters, flops = plan.low_rank_share
    cost = f"{parameters:.1%} more parameters, {flops:.1%} more FLOPs in the pruned layers"
    return [("low rank", f"SLoRB over runs of {plan.config.low_rank.k} inputs: {cost}")]


def memory_per_rank(plan: Plan) -> dict[str, float]:
    """Estimated bytes of model states on one rank, without activations and gathered weights.

    `refresh` is the new sample of the curvature, which lives during a mask update only. ZeRO divides optimizer states
    from stage 1 on, gradients from stage 2 on and weights at stage 3. What an offload option moves to the host is
    counted all the same: it is the host's memory of that rank then.
    """
    low, total, masked = _BYTES[str(plan.dtype)], plan.coverage.total, plan.coverage.masked
    ranks = plan.world_size
    states = ranks if plan.stage >= 1 else 1
    needs_master = plan.stage >= 1 or low < 4
    per_masked = {"dense": 4, "mask": 4, "curvature": 0 if plan.config.importance == "magnitude" else 4}
    refresh = {"magnitude": 0, "wanda": 4, "hutchinson": 4, "fisher": 4, "gauss_newton": 4}[plan.config.importance]
    memory = {
        "weights": low * total / (ranks if plan.stage >= 3 else 1),
        "gradients": low * total / (ranks if plan.stage >= 2 else 1),
        "master": (4 if needs_master else 0) * total / states,
        "moments": 8 * total / states,
        **{name: size * masked / states for name, size in per_masked.items()},
        "refresh": refresh * masked / states,
    }
    if plan.teacher is not None and plan.config.distillation is not None:
        partitioned = plan.config.distillation.hold == "zero3"
        memory["teacher"] = low * total / (ranks if partitioned else 1)
    return {name: size for name, size in memory.items() if size}


def readable_bytes(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _memory_line(memory: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {readable_bytes(size)}" for name, size in memory.items())
    return f"about {readable_bytes(sum(memory.values()))} a rank before activations: {parts}"
