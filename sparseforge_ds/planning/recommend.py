"""What to change when a run does not fit: settings that cost little first, and none that is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from sparseforge_ds.planning.memory import Memory
from sparseforge_ds.planning.settings import Settings

Estimate = Callable[[Settings], Memory]

_MOST_RANKS = 1024


@dataclass(frozen=True)
class Advice:
    """The way from a run that does not fit to one that does."""

    lines: list[str]
    """What to write, for people."""
    settings: Settings
    memory: Memory
    fits: bool
    """False when nothing that is known here is enough; then it is what comes closest."""


def advise(settings: Settings, estimate: Estimate, device: int, host: int | None = None) -> Advice:
    """The cheapest changes that make a run fit; leave one of them out, and it does not. A GPU has `device` bytes.
    Offloading is not advised beyond `host` bytes a rank, where they are known."""
    options = list(_options(settings))
    chosen = next((changed for changed in options if fits(estimate(changed), device, host)), None)
    found = chosen or min(options, key=lambda changed: estimate(changed).peak)
    says = {
        "checkpointing": "--activation_checkpointing",
        "micro_batch": f'"train_micro_batch_size_per_gpu": {found.micro_batch} and "gradient_accumulation_steps": '
        f"{found.accumulation}",
        "stage": f'"stage": {found.stage} in zero_optimization',
        "optimizer_on_host": '"offload_optimizer": {"device": "cpu"} in zero_optimization',
        "weights_on_host": '"offload_param": {"device": "cpu"} in zero_optimization',
    }
    lines = [text for name, text in says.items() if getattr(found, name) != getattr(settings, name)]
    return Advice(lines, found, estimate(found), chosen is not None)


def _options(now: Settings) -> Iterator[Settings]:
    """The run with less memory and the same batch, dearest changes last; a change is not made before it is needed."""
    smaller = [n for n in range(now.micro_batch, 0, -1) if now.micro_batch % n == 0]
    for weights, optimizer, stage, micro, again in product(
        dict.fromkeys((now.weights_on_host, True)),
        dict.fromkeys((now.optimizer_on_host, True)),
        range(now.stage, 4 if now.ranks > 1 else now.stage + 1),
        smaller,
        dict.fromkeys((now.checkpointing, True)),
    ):
        if (stage or not optimizer) and (stage == 3 or not weights):
            yield replace(
                now,
                weights_on_host=weights,
                optimizer_on_host=optimizer,
                stage=stage,
                overlapped=now.overlapped if stage == now.stage else stage == 3,
                micro_batch=micro,
                accumulation=now.accumulation * now.micro_batch // micro,
                checkpointing=again,
            )


def fits(memory: Memory, device: int, host: int | None = None) -> bool:
    """Whether a rank finds room in `device` bytes, and in `host` bytes of the host's memory where that is known."""
    return memory.peak <= device and (host is None or memory.host_total <= host)


def fewest_ranks(settings: Settings, estimate: Estimate, device: int, host: int | None = None) -> int | None:
    """The fewest ranks on which it fits as it is, of the present number times 1, 2, 4 ...; None beyond 1024."""
    ranks = settings.ranks
    while ranks <= _MOST_RANKS and not fits(estimate(replace(settings, ranks=ranks)), device, host):
        ranks *= 2
    return ranks if ranks <= _MOST_RANKS else None
