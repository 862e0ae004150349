"""What a run says of its steps: progress bar or log lines on rank 0, and TensorBoard."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from deepspeed.accelerator import get_accelerator
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.train.banner import readable_bytes

_LOG = logging.getLogger(__name__)


class Monitor:
    """Progress and metrics of rank 0; a silent object on every other rank.

    Args:
        folder: the run folder, or None on ranks that say nothing.
        start: steps already done.
        max_steps: steps of the whole run.
        tokens_per_step: tokens of a global batch.
        every: steps between log lines.
    """

    def __init__(self, folder: Path | None, start: int, max_steps: int, tokens_per_step: int, every: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.every = every
        self.max_steps = max_steps
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1) if folder is not None else None
        self._bar = None
        if folder is not None and sys.stderr.isatty():
            self._bar = tqdm(total=max_steps, initial=start, unit="step", dynamic_ncols=True, file=sys.stderr)
        self._clock = time.perf_counter()
        self._clock_step = start
        self._rate = 0.0

    def step(self, step: int, scalars: Mapping[str, float], phase: str, dials: Dials | None) -> None:
        """Show and log one finished optimizer step; `scalars` are already reduced over ranks and tagged."""
        if self._writer is None:
            return
        due = step % self.every == 0 or step == self.max_steps
        if due:
            now = time.perf_counter()
            self._rate = (step - self._clock_step) * self.tokens_per_step / max(now - self._clock, 1e-9)
            self._clock, self._clock_step = now, step
            more = {"train/tokens_per_second": self._rate, "train/memory_gib": memory_in_use() / 2**30}
            self.write(step, {**scalars, **more, **dial_scalars(dials)})
        loss = f"loss {scalars['loss/total']:.4f}"
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_description(phase)
            self._bar.set_postfix_str(f"{loss}, {self._rate:,.0f} tokens/s")
        elif due:
            parts = [loss]
            if "loss/kl" in scalars:
                parts += [f"ce {scalars['loss/cross_entropy']:.4f}", f"kl {scalars['loss/kl']:.4f}"]
            parts += [f"lr {scalars['train/learning_rate']:.2e}", f"{self._rate:,.0f} tokens/s", phase]
            parts += [readable_bytes(memory_in_use())]
            _LOG.info(f"step {step}/{self.max_steps}  " + "  ".join(parts))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log scalars that belong to one step."""
        if self._writer is not None:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)

    def histograms(self, step: int, histograms: Mapping[str, tuple[list[int], list[float]]]) -> None:
        """Log counts between edges."""
        if self._writer is None:
            return
        for tag, (counts, edges) in histograms.items():
            centre = (np.asarray(edges[:-1]) + np.asarray(edges[1:])) / 2
            count = np.asarray(counts, dtype=np.float64)
            self._writer.add_histogram_raw(
                tag,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=int(count.sum()),
                sum=float((count * centre).sum()),
                sum_squares=float((count * centre**2).sum()),
                bucket_limits=[float(edge) for edge in edges[1:]],
                bucket_counts=count.tolist(),
                global_step=step,
            )

    def close(self) -> None:
        """Write everything out."""
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            self._writer.close()


def dial_scalars(dials: Dials | None) -> dict[str, float]:
    """The annealed numbers, as they are logged; none of methods that anneal none."""
    if dials is None:
        return {}
    return {
        "dials/temperature": dials.temperature,
        "dials/beta": dials.beta,
        "dials/lambda_mid": dials.mid_penalty,
        "dials/x": dials.x,
    }


def memory_in_use() -> float:
    """Peak bytes of this process: on the accelerator, or resident in main memory on a CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return float(accelerator.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
