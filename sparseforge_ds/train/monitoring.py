"""Progress of a run on rank 0: a bar or log lines, and metrics for its trackers."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.train.banner import readable_bytes
from sparseforge_ds.train.tracking import Trackers

_LOG = logging.getLogger(__name__)


class Monitor:
    """Progress and metrics of rank 0; a silent object on every other rank.

    Args:
        trackers: receivers of metrics, or None on silent ranks; closed with this object.
        start: steps already done.
        max_steps: steps of the whole run.
        tokens_per_step: tokens of a global batch.
        every: steps between log lines.
        engine_monitor: DeepSpeed's own monitor, which gets the metrics too where its JSON switches it on.
    """

    def __init__(
        self,
        trackers: Trackers | None,
        start: int,
        max_steps: int,
        tokens_per_step: int,
        every: int,
        engine_monitor: Any = None,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.every = every
        self.max_steps = max_steps
        self._trackers = trackers
        self._engine_monitor = engine_monitor if engine_monitor is not None and engine_monitor.enabled else None
        self._bar = None
        if trackers is not None and sys.stderr.isatty():
            self._bar = tqdm(total=max_steps, initial=start, unit="step", dynamic_ncols=True, file=sys.stderr)
        self._clock = time.perf_counter()
        self._clock_step = start
        self._rate = 0.0
        self._left = "?"

    def step(
        self,
        step: int,
        scalars: Mapping[str, float],
        phase: str,
        dials: Dials | None,
        end_time: float | None = None,
    ) -> None:
        """Show and log one finished optimizer step.

        Args:
            step: its number.
            scalars: metrics by tag, already reduced over ranks.
            phase: name of the phase after it.
            dials: annealed numbers after it.
            end_time: `time.perf_counter` at its end; None takes the present.
        """
        if self._trackers is None:
            return
        # At intervals, measure the speed since the last one, and log all metrics.
        due = step % self.every == 0 or step == self.max_steps
        if due:
            now = time.perf_counter() if end_time is None else end_time
            seconds = max(now - self._clock, 1e-9) / max(1, step - self._clock_step)
            self._rate = self.tokens_per_step / seconds
            self._left = tqdm.format_interval(seconds * (self.max_steps - step))
            self._clock = now
            self._clock_step = step
            more = {"train/tokens_per_second": self._rate, "train/memory_gib": memory_in_use() / 2**30}
            self.write(step, {**scalars, **more, **dial_scalars(dials)})
        # Show the step: on a terminal in the bar, elsewhere as a line at the same intervals.
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
            parts += [readable_bytes(memory_in_use()), f"{self._left} left"]
            _LOG.info(f"step {step}/{self.max_steps}  " + "  ".join(parts))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log scalars of one step to all trackers."""
        if self._trackers is None:
            return
        self._trackers.log(step, scalars)
        if self._engine_monitor is not None:
            self._engine_monitor.write_events([(tag, value, step) for tag, value in scalars.items()])

    def histograms(self, step: int, histograms: Mapping[str, tuple[list[int], list[float]]]) -> None:
        """Log histograms by tag, as (counts, edges)."""
        if self._trackers is None:
            return
        for tag, (counts, edges) in histograms.items():
            self._trackers.histogram(step, tag, counts, edges)

    @contextmanager
    def paused_clock(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of steps."""
        start_time = time.perf_counter()
        yield
        self._clock += time.perf_counter() - start_time

    def close(self) -> None:
        """Write everything out."""
        if self._bar is not None:
            self._bar.close()
        if self._trackers is not None:
            self._trackers.close()


def dial_scalars(dials: Dials | None) -> dict[str, float]:
    """Return the annealed numbers by tag; none for a method that anneals none."""
    if dials is None:
        return {}
    return {
        "dials/temperature": dials.temperature,
        "dials/beta": dials.beta,
        "dials/lambda_mid": dials.mid_penalty,
        "dials/x": dials.x,
    }


def memory_in_use() -> float:
    """Return the peak bytes of this process: on the accelerator, or resident in main memory on a CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return float(accelerator.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
