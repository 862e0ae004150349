"""Tensors in a model's files that are no part of it."""

from __future__ import annotations

from sparseforge_ds.export.unused import divide


def test_layers_behind_the_last_one_are_those_of_the_half_that_has_so_many() -> None:
    names = {f"model.{part}.layers.{number}.w": number for part in ("language_model", "visual") for number in range(4)}
    text = {"num_hidden_layers": 3}
    assert divide(names, {"text_config": text})[1] == ["model.language_model.layers.3.w"]
    assert divide({"model.layers.2.w": 0, "model.layers.3.w": 0}, text) == (
        {"model.layers.2.w": 0},
        ["model.layers.3.w"],
    )
    assert divide({"h.11.w": 0, "h.12.w": 0}, {"n_layer": 12})[1] == ["h.12.w"]
    assert divide(names, {}) == (names, [])


def test_halves_of_a_model_have_numbers_of_layers_of_their_own() -> None:
    """transformers reads the encoder's as num_hidden_layers."""
    names = {f"model.{half}.layers.{number}.w": number for half in ("encoder", "decoder") for number in range(4)}
    config = {"num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 4}
    assert divide(names, config) == (names, [])
    assert divide({**names, "layers.2.w": 0}, config)[1] == ["layers.2.w"]
    assert len(divide(names, {"num_hidden_layers": 3})[1]) == 2, "a decoder alone, like OPT's"


def test_what_sees_is_no_part_of_a_text_model() -> None:
    names = {"model.visual.w": 0, "vision_model.w": 1, "multi_modal_projector.w": 2, "model.language_model.w": 3}
    assert divide(names, {"model_type": "llama4_text"}) == ({"model.language_model.w": 3}, list(names)[:3])
    assert divide(names, {"model_type": "llama4", "text_config": {}}) == (names, [])
