"""Algorithm 1 of SparseForge (arXiv 2605.06402) on this rank's shards of a DeepSpeed engine.

Legend of shape suffixes: G groups, M members of a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.compensate import switch_on_branches
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.estimate import ESTIMATORS, Shards
from sparseforge_ds.health import CURVATURE_DECADES, Health, histogram_counts
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.curvature import accumulate, token_rate
from sparseforge_ds.mask.gate import gate, move_mask
from sparseforge_ds.mask.importance import (
    MOMENTS,
    magnitude_moments,
    scalings,
    score_moments,
    standardized_score,
)
from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.mask.quench import effective_mask, publish
from sparseforge_ds.model.families import Coverage, PrunableWeight, coverage, prunable_weights
from sparseforge_ds.model.low_rank import branches
from sparseforge_ds.zero.edges import Edges, Missing, Piece
from sparseforge_ds.zero.expert_load import ExpertLoad
from sparseforge_ds.zero.moments import Matrices
from sparseforge_ds.zero.probe import Closure, Probe
from sparseforge_ds.zero.publish import Publication
from sparseforge_ds.zero.refuse import refuse_unsupported
from sparseforge_ds.zero.restore import restore
from sparseforge_ds.zero.shard import Layout, Shard

STATE_VERSION = 1


class ForgeError(RuntimeError):
    """The run cannot go on as it is: a call is missing, or a mask would be formed without its curvature."""


class SparseForge:
    """Trains a soft N:M mask beside the weights of an engine, hardens it, projects it and keeps it frozen.

    Call `step` after every `engine.step`. The mask, the dense weights and the curvature are state of the engine's
    optimizer; this object holds the step count and what can be recomputed.
    """

    def __init__(self, engine: DeepSpeedEngine, config: SparseForgeConfig) -> None:
        """Attach to an engine. Collective; changes no weight.

        Args:
            engine: from `deepspeed.initialize` with `model_parameters=param_groups(model, config)`.
            config: the same as was given to `prepare` and `param_groups`.

        Raises:
            ValueError: the engine or the model cannot be used, with the setting to change.
        """
        refuse_unsupported(engine)
        self.engine = engine
        self.config = config
        self.schedule = config.resolved_schedule
        self.pattern = config.parsed_pattern
        self.weights: list[PrunableWeight] = prunable_weights(engine.module, config)
        self.coverage: Coverage = coverage(engine.module, self.weights)
        self.step_count = 0
        """Optimizer steps that were applied."""
        self.refreshes = 0
        """Curvature refreshes so far, for the bias correction."""
        self.lost_refreshes = 0
        """Refreshes that overflowed in fp16 since this object was made; the masks then move by the older curvature."""
        self.metrics: dict[str, float] = {}
        """Of the last mask update, reduced over all ranks."""
        self._weight = {weight.name: weight for weight in self.weights}
        self._layout = Layout(engine)
        self._shards = self._layout.wholly(weight.name for weight in self.weights)
        self._layout.check(self._shards)
        spans = {weight.name: self.pattern.span(weight.shape, weight.input_axis) for weight in self.weights}
        self._edges = Edges(self._layout, self._shards, spans)
        self._matrices = Matrices(self._layout, self._shards, {w.name: w.matrices for w in self.weights})
        # A magnitude needs no tokens, and counts none.
        routed = [weight for weight in self.weights if weight.experts and config.importance != "magnitude"]
        self._load = ExpertLoad(self._matrices, {w.name: (*w.place, w.experts) for w in routed})
        self._by_magnitude: set[int] = set()
        build = ESTIMATORS[config.importance]
        self._publication = Publication(self._layout, self._shards, self._publish_shard, build is not None)
        self._probe = Probe(self._layout, self._publication)
        self._estimator = None
        if build is not None:
            fused = {w.module: engine.module.get_submodule(w.module) for w in routed if len(w.shape) == 3}
            shards = Shards(self._probe, self._matrices, self._edges, self._linear_layers(), self._load, fused)
            self._estimator = build(shards, config)
        self._mask_edges: Missing = {}
        self._health = Health(self._matrices, self.pattern)
        self._hard_now = False
        self._ready = self.schedule.freeze_step > 0
        self._exchange_mask_edges()  # hardening may begin before the first update

    # -- what a training loop calls -----------------------------------------------------------------------------------

    def start(self, probe: Closure | None = None) -> None:
        """Before the first step of a fresh run: fixes the mask when hardening ends at step 0, else does nothing.

        Args:
            probe: as in `step`; needed unless the importance is `magnitude`.
        """
        if self._ready or self.step_count:
            return
        self._refresh_curvature(probe)
        self._require_refreshed()
        self._move_masks(fix=True)
        self._ready = True
        self._switch_on_branches(0)
        self._republish()

    def step(self, probe: Closure | None = None) -> bool:
        """After `engine.step`: curvature, gates and masks when an update is due; otherwise next to nothing. Collective.

        Args:
            probe: runs the engine's forward on one micro-batch and returns the scalar loss, for example
                `lambda: engine(**batch).loss`. It is called only when an update is due, and leaves no trace.

        Returns:
            Whether masks were updated.

        Raises:
            ForgeError: an engine step was not followed by this call, or the curvature of a weight is missing.
        """
        begun, self._publication.steps_begun = self._publication.steps_begun, 0
        if begun == 0:
            return False  # accumulating, or an fp16 overflow skipped the step
        if begun > 1:
            raise ForgeError(f"{begun} optimizer steps since the last forge.step; call it after every engine.step")
        if not self._ready:
            raise ForgeError("hardening ends at step 0: call forge.start(probe) before the first engine.step")
        self.step_count += 1
        updated = False
        if self.schedule.is_update(self.step_count):
            self._refresh_curvature(probe)
            if self.refreshes or self._estimator is None:
                self._move_masks()
                updated = True
        elif self.schedule.is_projection(self.step_count):
            self._project()
            updated = True
        started = self._switch_on_branches(self.step_count)
        if updated or started:
            self._republish()
        return updated

    def finish(self) -> None:
        """At the end of a run: raises if the mask of some weight was formed without its curvature, or never frozen."""
        if self._estimator is not None and not self.refreshes:
            raise ForgeError(
                f"the curvature of {len(self.weights)} weights was never refreshed, {self.weights[0].name} among them: "
                "every probe overflowed or none was due; use bf16, or lower schedule.update_every"
            )
        if self.step_count < self.schedule.freeze_step:
            raise ForgeError(
                f"the run ended at step {self.step_count}, before the mask is frozen at {self.schedule.freeze_step}"
            )

    @property
    def dials(self) -> Dials:
        """The annealed numbers after the steps so far."""
        return self.schedule.dials(self.step_count)

    @property
    def idle_experts(self) -> list[str]:
        """Experts that no token of the last refresh went to; they kept the curvature that they had."""
        return self._load.idle

    @property
    def unseen_experts(self) -> list[str]:
        """Experts that no token of any refresh gave a curvature: their mask is that of the largest weights."""
        return list(self._load.unseen)

    def soft_to_hard_gap(self, probe: Closure) -> float:
        """Loss with the mask hardened now minus the loss as it is, averaged over ranks. Two forwards; collective."""
        losses = [self._probe.loss(probe)]
        self._hard_now = True
        try:
            self._republish()
            losses.append(self._probe.loss(probe))
        finally:
            self._hard_now = False
            self._republish()
        gap = (losses[1] - losses[0]).to(self._layout.device)
        dist.all_reduce(gap)
        return gap.item() / self._layout.world_size

    def histograms(self, bins: int = 20) -> dict[str, tuple[list[int], list[float]]]:
        """Counts and bin edges of every mask, and of log10 |H| of every curvature. Collective."""
        table = torch.zeros(len(self._shards), 2 * bins, dtype=torch.float64, device=self._layout.device)
        for row, shard in enumerate(self._shards.values()):
            _, curvature = self._dense_and_curvature(shard)
            corrected = None if curvature is None else curvature / self._correction(shard.name)
            table[row] = histogram_counts(self._publication.of(shard, "mask"), corrected, bins)
        counts = self._matrices.reduce(table).long().tolist()
        low, high = CURVATURE_DECADES
        mask_edges = [i / bins for i in range(bins + 1)]
        curvature_edges = [low + (high - low) * i / bins for i in range(bins + 1)]
        result = {}
        for name, row_counts in zip(self._shards, counts, strict=True):
            result[f"mask/{name}"] = (row_counts[:bins], mask_edges)
            if self._estimator is not None:
                result[f"curvature_log10/{name}"] = (row_counts[bins:], curvature_edges)
        return result

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint's client state must carry; plain JSON types. Tensors are optimizer state already."""
        state = {
            "version": STATE_VERSION,
            "config": self.config.to_dict(),
            "weights": [
                {"name": weight.name, "shape": list(weight.shape), "input_axis": weight.input_axis}
                for weight in self.weights
            ],
            "groups": self._layout.groups,
            "step": self.step_count,
            "refreshes": self.refreshes,
        }
        if self._load.names:
            state["experts"] = self._load.state_dict()
        return state

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue a run in this engine, however many ranks, which ZeRO stage and which offload saved it. Collective.

        Takes the place of `engine.load_checkpoint` and `load_state_dict`: masters, every optimizer state, frozen
        weights, buffers, loss scale, counters and low-precision weights are what they were, bit for bit on the same
        layout, and no pickle is executed. `checkpoint.check_bytes` finds damaged bytes beforehand.

        Raises:
            ValueError: the checkpoint was made with another configuration, model or optimizer, or cannot be read; all
                ranks raise it, and nothing was changed.
        """
        state = checkpoint.client_state.get("sparseforge")
        if state is None:
            raise ValueError(
                f"{checkpoint.folder}: was not saved by SparseForge; "
                'save with client_state={"sparseforge": forge.state_dict()}'
            )
        try:
            self._check_saved(state)
        except ValueError as error:
            raise ValueError(f"{checkpoint.folder}: {error}") from None
        restore(self._layout, self._publication, checkpoint, begun=state["step"] > 0)
        self._continue(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run; call it after `engine.load_checkpoint`. Collective.

        Raises:
            ValueError: the checkpoint was made with another configuration or for other weights.
        """
        self._check_saved(state)
        if state["step"] and not self._publication.complete:
            raise ValueError(
                "the optimizer states, masks among them, were not loaded: call engine.load_checkpoint without "
                "load_module_only or load_optimizer_states=False before forge.load_state_dict"
            )
        self._continue(state)

    def _check_saved(self, state: dict[str, Any]) -> None:
        """Whether a saved state is of a run like this one."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the checkpoint has sparseforge state version {state.get('version')}, this is {STATE_VERSION}: "
                "resume with the release that wrote it"
            )
        for key, kind in (("config", dict), ("weights", list), ("step", int), ("refreshes", int)):
            if not isinstance(state.get(key), kind):
                raise ValueError(f"the checkpoint's sparseforge state has a damaged {key!r}: {state.get(key)!r:.100}")
        _same("sparseforge", _without_monitor(state["config"]), _without_monitor(self.config.to_dict()))
        _same("weights", state["weights"], self.state_dict()["weights"])
        if self._load.names:
            self._load.check(state.get("experts"))

    def _continue(self, state: dict[str, Any]) -> None:
        self.step_count, self.refreshes = state["step"], state["refreshes"]
        if self._load.names:
            self._load.load_state_dict(state["experts"])
        self._publication.steps_begun = 0
        self._ready = self.step_count > 0 or self.schedule.freeze_step > 0
        self._health.forget_targets()
        for name, branch in branches(self.engine.module).items():
            branch.enabled = self.step_count >= self.config.branch_step and name in self._shards
        self._exchange_mask_edges()

    # -- attaching ----------------------------------------------------------------------------------------------------

    def _linear_layers(self) -> dict[str, nn.Module]:
        layers = {weight.name: self.engine.module.get_submodule(weight.module) for weight in self.weights}
        return {name: layer for name, layer in layers.items() if isinstance(layer, (nn.Linear, Conv1D))}

    # -- publication --------------------------------------------------------------------------------------------------

    def _publish_shard(self, shard: Shard, dense: Tensor, mask: Tensor, out: Tensor) -> None:
        step = self.step_count + self._publication.in_step  # the one that publishes is counted by `step`, later
        x = 0.0 if self._hard_now else self.schedule.dials(step).x
        binary = step > self.schedule.freeze_step
        if x < 1.0 and not binary and self._formed:
            mask = effective_mask(mask, self._hard(shard, mask), x)
        publish(dense, mask, out)

    @property
    def _formed(self) -> bool:
        """Whether masks have moved yet: while all are 1, every group is a tie and its top N an accident of order."""
        return self.step_count >= self.schedule.update_every and (self._estimator is None or self.refreshes > 0)

    def _removed(self, shard: Shard) -> Tensor:
        """(numel of the shard,) fp32 (1 - m_eff) W at the present step."""
        dense, mask = self._publication.of(shard, "dense"), self._publication.of(shard, "mask")
        published = torch.empty_like(dense)
        self._publish_shard(shard, dense, mask, published)
        return dense - published

    def _hard(self, shard: Shard, mask: Tensor) -> Tensor:
        """(numel of the shard,) bool: the top N of the mask in every group, cut groups included."""
        weight = self._weight[shard.name]
        wide = self._edges.widen(shard.name, mask, self._mask_edges)
        group_GM = self.pattern.to_groups(wide, weight.shape, weight.input_axis)
        hard = self.pattern.from_groups(top_n(group_GM, self.pattern.kept), weight.shape, weight.input_axis)
        return self._edges.own(shard.name, hard)

    def _republish(self) -> None:
        """Make the present masks visible to the next forward."""
        self._publication.write_masters()
        self._layout.push()

    def _exchange_mask_edges(self) -> None:
        def read(piece: Piece) -> Tensor:
            shard = self._shards[piece.name]
            return self._publication.of(shard, "mask")[piece.start - shard.start : piece.stop - shard.start]

        self._mask_edges = self._edges.exchange(read)

    # -- one update ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _refresh_curvature(self, probe: Closure | None) -> None:
        if self._estimator is None:
            return
        if probe is None:
            raise ValueError(
                f'importance "{self.config.importance}" needs a probe: '
                "call forge.step(probe=lambda: engine(**batch).loss)"
            )
        part = self.config.curvature
        with torch.enable_grad():
            sample = self._estimator.refresh(
                probe, self.step_count, part.probes if self.refreshes else part.first_probes
            )
        if sample is None:
            self.lost_refreshes += 1
            return  # keep the average as it is
        rates = self._load.fade(lambda tokens, recent: token_rate(tokens, recent, part.decay))
        for name, shard in self._shards.items():
            average = self._publication.of(shard, "curvature")
            if name in self._load.rows:
                self._accumulate_experts(name, average, sample[name], rates)
                continue
            self._health.add_refresh(average, sample[name])
            accumulate(average, sample[name], part.decay)
        self.refreshes += 1

    def _accumulate_experts(self, name: str, average: Tensor, sample: Tensor, rates: list[float]) -> None:
        """Average by tokens; an expert that saw none keeps what it has."""
        for part in self._matrices.parts[name]:
            row = self._load.of_matrix[part.row]
            assert row is not None
            if rates[row]:
                inside = slice(part.start, part.stop)
                self._health.add_refresh(average[inside], sample[inside])
                average[inside].lerp_(sample[inside], rates[row])

    @torch.no_grad()
    def _move_masks(self, fix: bool = False) -> None:
        """Scores, gates and masks of all weights (eqs. 3 to 9); `fix` takes the target as the mask at once."""
        dials = self.schedule.dials(self.step_count)
        moments = self._matrices.table(MOMENTS)
        for name, shard in self._shards.items():
            dense, curvature = self._dense_and_curvature(shard)
            for part in self._matrices.parts[name]:
                inside = slice(part.start, part.stop)
                moments[part.row] += score_moments(dense[inside], None if curvature is None else curvature[inside]).to(
                    moments.device
                )
        self._matrices.reduce(moments)
        self._by_magnitude = self._require_curvature(moments[:, 1].tolist())
        if self._by_magnitude:
            rows = torch.tensor(sorted(self._by_magnitude), device=moments.device)
            moments[rows] = magnitude_moments(moments[rows])
        # With optimizer offload the shards are on the host: one copy for all matrices, not one each.
        scaling = scalings(moments, self.config.curvature.damping).to(self._layout.flats[0].device)
        missing = self._edges.exchange(
            lambda piece: self._score(self._shards[piece.name], scaling, piece.start, piece.stop)
        )
        for name, shard in self._shards.items():
            if not shard.numel:
                continue
            weight = self._weight[name]
            mask = self._publication.of(shard, "mask")
            score = self._score(shard, scaling, shard.start, shard.stop)
            score_GM = self.pattern.to_groups(self._edges.widen(name, score, missing), weight.shape, weight.input_axis)
            chosen = gate(score_GM, self.pattern.kept, dials.temperature, self.config.threshold)
            soft, target = (
                self._edges.own(name, self.pattern.from_groups(value_GM, weight.shape, weight.input_axis))
                for value_GM in chosen
            )
            mask.copy_(target if fix else move_mask(mask, soft, target, dials))
            self._add_update(shard, mask, target)
        self._exchange_mask_edges()
        self._report()
        self.metrics |= self._load.metrics()

    def _dense_and_curvature(self, shard: Shard) -> tuple[Tensor, Tensor | None]:
        dense = self._publication.of(shard, "dense")
        return dense, None if self._estimator is None else self._publication.of(shard, "curvature")

    def _score(self, shard: Shard, scaling: Tensor, start: int, stop: int) -> Tensor:
        """s~ of the weight's elements start..stop, all of them on this rank."""
        dense, curvature = self._dense_and_curvature(shard)
        scores = []
        for part in self._matrices.parts[shard.name]:
            inside = slice(max(part.start, start - shard.start), min(part.stop, stop - shard.start))
            if inside.start < inside.stop:
                part_curvature = None if curvature is None or part.row in self._by_magnitude else curvature[inside]
                scores.append(standardized_score(dense[inside], part_curvature, scaling[part.row]))
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    @torch.no_grad()
    def _project(self) -> None:
        """m <- hard(m), eq. 11."""
        self._require_refreshed()
        hard = {name: self._hard(shard, self._publication.of(shard, "mask")) for name, shard in self._shards.items()}
        for name, shard in self._shards.items():
            mask = self._publication.of(shard, "mask")
            mask.copy_(hard[name])
            if shard.numel:
                self._add_update(shard, mask, hard[name])
        self._exchange_mask_edges()
        self._report()

    def _add_update(self, shard: Shard, mask: Tensor, target: Tensor) -> None:
        _, curvature = self._dense_and_curvature(shard)
        self._health.add_update(self._weight[shard.name], shard, mask, target, curvature, self._correction(shard.name))

    def _correction(self, name: str) -> float:
        """By which the running mean of a weight's curvature is to be divided; experts' means have no bias."""
        return 1.0 if name in self._load.rows else 1 - self.config.curvature.decay ** max(self.refreshes, 1)

    def _report(self) -> None:
        self.metrics = self._health.report(self._estimator is not None)
        if self._load.names:
            self.metrics["experts/unseen"] = float(len(self._load.unseen))
        if self.lost_refreshes:
            self.metrics["curvature/lost_refreshes"] = float(self.lost_refreshes)

    def _require_refreshed(self) -> None:
        if self._estimator is not None and not self.refreshes:
            raise ForgeError(
                f"the mask is due to freeze at step {self.step_count}, but the curvature of {self.weights[0].name} and "
                f"{len(self.weights) - 1} others was never refreshed: every probe overflowed; "
                "use bf16, or lower fp16.initial_scale_power"
            )

    def _require_curvature(self, sums: list[float]) -> set[int]:
        """Stop when some matrix has no curvature to speak of; `sums` are the totals of max(H, 0).

        Returns:
            Matrices of experts without any, where other experts of their layer have one: no token has reached them.
        """
        unseen = self._load.without(sums)
        bad = [
            name
            for matrix, (name, total) in enumerate(zip(self._matrices.names, sums, strict=True))
            if not 0 < total < math.inf and matrix not in unseen
        ]
        if bad:
            raise ForgeError(
                f"no usable curvature for {len(bad)} of {len(sums)} matrices at step {self.step_count}: "
                f"{', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}. Their layers took no part in the probe's loss, "
                "or it is not finite; use all of the model in the probe, or exclude these weights"
            )
        return unseen

    # -- SLoRB --------------------------------------------------------------------------------------------------------

    def _switch_on_branches(self, step: int) -> bool:
        """At its step: start every B from what the mask removes now, and switch the branches on."""
        if step != self.config.branch_step:
            return False
        switch_on_branches(self.engine.module, self._layout, self._weight, self._removed)
        return True


def _without_monitor(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "monitor"}


def _same(where: str, saved: Any, present: Any) -> None:
    """Raise with the first place where two JSON values differ."""
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in sorted(saved.keys() | present.keys()):
            _same(f"{where}.{key}", saved.get(key), present.get(key))
    elif saved != present:
        short = [text if len(text) < 200 else text[:200] + " ..." for text in (str(saved), str(present))]
        raise ValueError(
            f"the checkpoint was made with {where} = {short[0]}, this run has {short[1]}: "
            "resume with the saved settings, or start a fresh run in another output_dir"
        )
