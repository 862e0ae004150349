"""A permutation found for a model: what it counts, and what it is kept as."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.basis.permutation.channel_table import CHANNELS
from sparseforge_ds.extras.basis.permutation.find import SearchSettings, find_permutation
from sparseforge_ds.extras.basis.permutation.input_squares import input_squares
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.extras.basis.permutation.reordering import Reordering
from sparseforge_ds.model.basis import basis_of
from sparseforge_ds.model.families import prunable_weights
from tests.tiny_models import BUILDERS, token_batch
from tests.unit.extras.basis.permutation.test_channels import logits, randomized, shapes_of


def find(
    model: PreTrainedModel,
    dimensions: str = "all",
    squares: dict[str, torch.Tensor] | None = None,
    rows: int = 2048,
    **block: object,
) -> Permutation:
    parameters = dict(model.named_parameters())
    config = SparseForgeConfig.from_dict(block)
    return find_permutation(
        lambda name: parameters[name].detach(),
        shapes_of(parameters),
        prunable_weights(model, config),
        model.config.model_type,
        model.config.get_text_config(),
        SearchSettings(config.parsed_pattern, dimensions, rows),  # type: ignore[arg-type]
        squares,
    )


@pytest.mark.parametrize("family", CHANNELS)
def test_kept_share_of_every_family_rises(family: str) -> None:
    model = randomized(BUILDERS[family]())
    parameters = dict(model.named_parameters())
    weights = prunable_weights(model, SparseForgeConfig())
    squares = input_squares(model, weights, [token_batch()["input_ids"]])
    assert {name: value.shape[-1] for name, value in squares.items()} == {
        w.name: w.shape[w.input_axis] for w in weights
    }
    before = logits(model)
    for permutation in (find(model, squares=squares), find(model)):
        assert {"mlp", "heads", "residual"} == set(permutation.facts["kept_score"])
        for part in permutation.facts["kept_score"].values():
            assert part["after"] > part["before"]
    reorder = Reordering(permutation, family, model.config.get_text_config(), shapes_of(parameters))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(reorder(name, parameter))
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=2e-5)


def test_input_squares_are_those_of_the_inputs() -> None:
    model = BUILDERS["llama"]()
    weights = prunable_weights(model, SparseForgeConfig())
    records = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _m, args: records.append(args[0]))
    batches = [token_batch(seed=0)["input_ids"], token_batch(seed=1)["input_ids"]]
    squares = input_squares(model, weights, batches)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(squares, torch.cat(records).square().mean((0, 1)))


def test_a_weight_that_stays_dense_does_not_count() -> None:
    model = BUILDERS["llama"]()
    permutation = find(model, "mlp", exclude=("*.layers.0.mlp.down_proj.weight",))
    order = permutation.index_BC["layers.0.mlp"]
    assert torch.equal(order[0], torch.arange(64)) and not torch.equal(permutation.index_BC["layers.1.mlp"], order)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    model = BUILDERS["llama"]()
    name = "model.layers.1.mlp.down_proj.weight"
    model.get_parameter(name).data[0, 0] = value
    with pytest.raises(ValueError, match=f"permute: {name}, or its inputs, are not finite"):
        find(model)


def test_a_sample_of_rows_gains_too() -> None:
    model = BUILDERS["llama"](hidden_size=64, intermediate_size=128)
    permutation = find(model, rows=24)
    assert permutation.facts["rows"] == 24
    assert all(part["after"] > part["before"] for part in permutation.facts["kept_score"].values())


@pytest.mark.parametrize("pattern", ["block16", "2:4"])
def test_refused_where_groups_are_not_neighbours_of_a_block(pattern: str) -> None:
    model = BUILDERS["llama"](head_dim=6) if pattern == "2:4" else BUILDERS["llama"]()
    with pytest.raises(ValueError, match="is no n:m pattern" if pattern == "block16" else "blocks of 6"):
        find(model, "mlp+heads", pattern=pattern)


def test_refused_where_no_weight_to_prune_reads_what_may_move() -> None:
    """Else OUT would be MODEL, and pass for permuted."""
    with pytest.raises(ValueError, match=r"12 weights that the pattern prunes, such as .*\.q_proj\.weight, reads"):
        find(BUILDERS["llama"](), "mlp", exclude=("*.down_proj.weight",))


def test_what_is_kept_of_it_beside_the_model(tmp_path: Path) -> None:
    permutation = find(BUILDERS["qwen3_moe"]())
    permutation.save(tmp_path)
    kept = json.loads((tmp_path / "permutation.json").read_text())
    assert basis_of(tmp_path) == {"permutation.json": permutation.sha256}
    assert kept == {"format": 1, "dimensions": "all", "sha256": permutation.sha256, **permutation.facts}


def test_another_model_is_refused() -> None:
    permutation = find(BUILDERS["llama"](), "mlp")
    other = BUILDERS["llama"](intermediate_size=32)
    shapes = shapes_of(dict(other.named_parameters()))
    with pytest.raises(ValueError, match="of another model"):
        Reordering(permutation, "llama", other.config, shapes)


def test_an_order_that_leaves_a_channel_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0 is no order of channels"):
        Permutation("mlp", {"layers.0": torch.tensor([[1, 0, 3, 2], [0, 0, 2, 3]])}, {})
