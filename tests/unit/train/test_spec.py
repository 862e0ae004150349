"""A spec is made in a moment, without a weight in memory, and finds what is wrong with a run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.block_sections import CurvatureConfig
from sparseforge_ds.config.method_config import MethodConfig
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.model.architecture import bare_model
from sparseforge_ds.model.pretrained import find_model, load_pretrained
from sparseforge_ds.train import spec as spec_module
from sparseforge_ds.train.banner import banner, readable_bytes
from sparseforge_ds.train.lasting_memory import lasting
from sparseforge_ds.train.spec import find_texts, make_spec
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, deepspeed_json, write_json, write_model, write_text
from tests.tiny_models import tiny_llama


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def arguments(tmp_path, model):
    def build(content=None, **flags):
        path = write_json(tmp_path / "ds.json", content or deepspeed_json())
        text = write_text(tmp_path / "text.jsonl")
        defaults = {"model": str(model), "dataset": [str(text)], "seq_length": 32, "output_dir": str(tmp_path / "run")}
        return RunArguments(deepspeed=str(path), **{**defaults, **flags})

    return build


def test_a_plan_knows_the_run(arguments):
    spec = make_spec(arguments(max_steps=20), world_size=2)
    assert spec.config.max_steps == 20
    assert (spec.stage, spec.dtype, spec.tokens_per_step) == (3, torch.float32, 4 * 32)
    assert spec.teacher is spec.model
    assert len(spec.weights) == spec.coverage.weights == 14
    assert spec.coverage.dense == {}
    assert next(bare_model(spec.model.config).parameters()).is_meta
    assert "leaf_module" not in spec.deepspeed["zero_optimization"]


def test_the_seed_of_a_run_is_that_of_its_method_unless_the_block_names_one(arguments):
    assert make_spec(arguments(seed=7), world_size=1).config.seed == 7
    assert make_spec(arguments(deepspeed_json(seed=3), seed=7), world_size=1).config.seed == 3


def test_loaded_weights_are_those_of_the_file(arguments, model):
    spec = make_spec(arguments(), world_size=1)
    expected = load_file(model / "model.safetensors")
    loaded = load_pretrained(spec.model.folder, "--model", torch.bfloat16, None).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name].bfloat16()) for name in expected)


def test_layers_that_cannot_be_measured_are_refused_before_weights_are_read(arguments, tmp_path):
    """Mamba's `dt_proj` is a linear layer that is never called; `include` and `exclude` can be pasted."""
    sizes = {"vocab_size": BYTE_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    folder = tmp_path / "mamba"
    MambaForCausalLM(MambaConfig(**sizes, time_step_rank=4)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)

    def spec(**block):
        return make_spec(arguments(deepspeed_json(**block), model=str(folder)), 1)

    # The message ends in keys that cover the rest of the model.
    with pytest.raises(
        ValueError, match=r"are not covered: .* paste what it stands for into the sparseforge block"
    ) as raised:
        spec()
    keys = json.loads("{" + str(raised.value)[str(raised.value).index('"include": ') :] + "}")
    # The layer that cannot be measured has a message of its own, also to be pasted.
    with pytest.raises(ValueError, match=r'paste "exclude": ') as raised:
        spec(**keys)
    keys["exclude"] = ["backbone.layers.*.mixer.dt_proj.weight"]
    assert json.dumps(keys["exclude"]) in str(raised.value)
    assert keys["allow_dense"] == ["backbone.layers.*.mixer.A_log", "backbone.layers.*.mixer.conv1d.weight"]
    # With both the run is accepted, and these weights stay dense.
    dense = spec(**keys).coverage.dense
    assert set(dense) == {*keys["allow_dense"], "backbone.layers.*.mixer.dt_proj.weight"}
    # `include` alone is refused with the same cure.
    everything = {"include": ["*"], "allow_dense": keys["allow_dense"]}
    cure = '"exclude": ["backbone.layers.*.mixer.dt_proj.weight"]'
    with pytest.raises(ValueError, match=rf"mixer.dt_proj.weight \(2 of 8 .*{re.escape(cure)}"):
        spec(**everything)
    assert spec(**everything, exclude=["backbone.layers.*.mixer.dt_proj.weight"]).coverage.dense == dense


@pytest.mark.parametrize(
    ("params", "muon", "adam"),
    [
        ({"lr": 0.02, "adam_lr": 3e-3}, 0.02, 3e-3),
        ({"lr": 1e-3, "muon_lr": 0.02}, 0.02, 1e-3),
        ({"muon_lr": 0.02, "adam_lr": 3e-3}, 0.02, 3e-3),
        ({"lr": "auto", "muon_lr": 0.02, "adam_lr": 3e-3}, 0.02, 3e-3),
        ({"lr": 0.02}, 0.02, 0.02),
    ],
)
def test_the_rate_of_a_run_of_muon_is_that_of_its_matrices(arguments, params, muon, adam):
    content = {**deepspeed_json(stage=0), "optimizer": {"type": "Muon", "params": params}}
    spec = make_spec(arguments(content), 1)
    assert spec.learning_rate.peak == muon and re.search(rf"rate +{muon:g} after", banner(spec, TEXT))
    shares = [spec.share_of_rate(group) for group in ({"use_muon": True}, {"use_muon": False}, {})]
    assert shares == [1.0, pytest.approx(adam / muon), 1.0]


def test_a_rate_at_which_nothing_trains_is_refused(arguments):
    params = {"muon_lr": 0.02, "adam_lr": 3e-3}
    content = {**deepspeed_json(stage=0), "optimizer": {"type": "Muon", "params": params}}
    with pytest.raises(ValueError, match=r"--learning_rate 0.001 has no effect: .* leave the flag out, or"):
        make_spec(arguments(content, learning_rate=1e-3), 1)
    del params["muon_lr"]
    spec = make_spec(arguments(content, learning_rate=1e-3), 1)
    assert spec.learning_rate.peak == 1e-3 and spec.share_of_rate({"use_muon": False}) == pytest.approx(3.0)


TEXT = "text.jsonl: 40 documents"


def test_the_banner_says_what_will_happen(arguments):
    spec = make_spec(arguments(max_steps=100, learning_rate=1e-3), world_size=2)
    text = banner(spec, TEXT)
    for part in (
        "llama",
        "2:4 in 14 weights: 100.0% of the linear weights between embedding and head and ",
        "heating 0-25, hardening 25-75, frozen 75-100",
        "0.001 after 3 warm-up steps, cosine to 0.0001",
        "4 x 32 tokens = 2 a rank x 1 accumulated x 2 ranks",
        "text       text.jsonl: 40 documents",
        "ZeRO-3, float32",
        "a rank before activations",
    ):
        assert part in text


@pytest.mark.parametrize(("frame", "line"), [("auto", "<s> ..."), ("eos", "... </s>"), ("both", "<s> ... </s>")])
def test_the_banner_says_where_documents_end(arguments, frame, line):
    text = banner(make_spec(arguments(document_frame=frame), world_size=1), TEXT)
    assert re.search(rf"^ *documents +each as {re.escape(line)}$", text, re.MULTILINE)


def test_a_frame_that_the_tokenizer_does_not_have_is_found_at_once(arguments, model):
    byte_tokenizer(bos=False).save_pretrained(model)
    with pytest.raises(ValueError, match="--document_frame both: the tokenizer has no BOS"):
        make_spec(arguments(document_frame="both"), world_size=1)


def test_the_banner_says_what_low_rank_branches_cost(arguments):
    spec = make_spec(arguments(deepspeed_json(3, low_rank={"k": 8})), world_size=1)
    assert "SLoRB, a number for 8 inputs of a pruned weight's output" in banner(spec, TEXT)
    learned = make_spec(arguments(deepspeed_json(3, low_rank={"k": 8, "learned": True})), world_size=1)
    assert "a learned branch, a number for 8 weights" in banner(learned, TEXT)
    assert "low rank" not in banner(make_spec(arguments(), world_size=1), TEXT)


def test_memory_is_divided_as_zero_divides_it(arguments):
    total = make_spec(arguments(), world_size=1).coverage.total
    masked = make_spec(arguments(), world_size=1).coverage.masked

    def memory(stage, world_size, **block):
        spec = make_spec(arguments(deepspeed_json(stage, **block)), world_size)
        return lasting(spec.sizes, spec.memory_settings, spec.teacher_sizes)

    first = memory(3, 1)
    four = memory(3, 4)
    assert first == {name: 4 * size for name, size in four.items()}
    assert first["dense"] + first["mask"] == 6 * masked and first["curvature sums"] < masked
    assert memory(3, 1, curvature={"factored": False})["curvature"] == 4 * masked
    assert memory(1, 4)["weights"] == memory(1, 4)["gradients"] == 4 * total
    assert memory(2, 4)["gradients"] == total
    assert "master" not in memory(0, 1)
    assert "curvature" not in memory(3, 1, importance="magnitude")
    assert "teacher" not in memory(3, 1, distillation=None)
    assert memory(3, 4, distillation={"hold": "replicated"})["teacher"] == 4 * total
    assert readable_bytes(1536) == "1.5 KiB"


@pytest.mark.parametrize(
    ("block", "flags", "message"),
    [
        ({"patern": "2:4"}, {}, r"sparseforge\.patern: unknown key; did you mean sparseforge\.pattern"),
        ({"pattern": "2:5"}, {}, r"layers\.0\.self_attn\.q_proj\.weight .* cannot be 2:5: .*\"exclude\": "),
        ({"exclude": ["nothing.*"]}, {}, "nothing"),
        ({"distillation": None}, {"teacher": "x"}, "--teacher x: .*distillation null"),
        ({}, {"seq_length": 65}, "--seq_length 65: --model .* has 64 positions"),
        ({}, {"model": "./missing"}, r"--model \./missing: no such folder"),
        ({}, {"teacher": "./missing"}, r"--teacher \./missing: no such folder"),
        ({}, {"teacher_logits": "./missing"}, r"--teacher_logits \./missing: no such folder; make it by sparseforge"),
        ({}, {"dataset": ["./missing.txt"]}, r"--dataset \./missing.txt: no such file"),
        ({"low_rank": {"k": 7}}, {}, "7"),
        (
            {"curvature": {"sequences": 3}},
            {},
            r"curvature.sequences = 3: 2 ranks .* read 4 at a time; use a multiple of that, or null",
        ),
        ({"include": ["*.embed_tokens.*"]}, {}, "only model.embed_tokens.weight, which stays dense"),
        (
            {"include": ["q_proj"]},
            {},
            r"'q_proj' matches no .*example 'model\.layers\.\*\.self_attn\.q_proj\.weight'",
        ),
        ({"method": {}}, {"max_steps": 1}, "max_steps = 1 .*use at least 2 steps"),
    ],
)
def test_settings_that_do_not_fit_are_named(arguments, block, flags, message):
    with pytest.raises(ValueError, match=message):
        make_spec(arguments(deepspeed_json(**block), **flags), world_size=2)


def test_unknown_keys_inside_deepspeed_blocks_are_errors(arguments):
    content = deepspeed_json()
    content["zero_optimization"]["stagee"] = 2
    with pytest.raises(ValueError, match="stagee"):
        make_spec(arguments(content), world_size=2)


def test_an_unsupported_family_is_named(arguments, tmp_path):
    config = BloomConfig(vocab_size=BYTE_VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    folder = write_model(tmp_path / "bloom", BloomForCausalLM(config))
    with pytest.raises(
        ValueError,
        match="no rows for 'bloom'. Give --any_family, or paste what it stands for into the sparseforge block",
    ) as raised:
        make_spec(arguments(model=str(folder)), world_size=2)
    assert len(str(raised.value)) < 900
    pasted = json.loads("{" + str(raised.value)[str(raised.value).index('"include": ') :] + "}")
    assert make_spec(arguments(deepspeed_json(**pasted), model=str(folder)), world_size=2).coverage.dense == {}
    chosen = deepspeed_json(include=["*.mlp.*"], allow_dense=["*.query_key_value.*"])
    spec = make_spec(arguments(chosen, model=str(folder), allow_dense=["*.dense.*"]), world_size=2)
    assert [weight.name.split(".")[-2] for weight in spec.weights] == ["dense_h_to_4h", "dense_4h_to_h"]
    assert spec.config.allow_dense == ("*.query_key_value.*", "*.dense.*") and spec.uncovered == []


def test_an_allow_dense_that_is_not_needed_is_a_line(arguments):
    spec = make_spec(arguments(allow_dense=["*.nothing"]), world_size=2)
    line = "allow_dense  *.nothing: not needed, it matches no weight that is undecided\n"
    assert banner(spec, TEXT).count(line) == 1


def test_the_banner_names_what_is_not_covered(arguments):
    spec = dataclasses.replace(make_spec(arguments(), world_size=1), uncovered=["model.odd.weight (1, 1.2%)"])
    text = banner(spec, TEXT)
    assert "not covered  model.odd.weight (1, 1.2%): stays dense; no row of the family table names it\n" in text


def test_the_banner_names_the_choice_of_methods_that_choose_by_it(arguments):
    spec = make_spec(arguments(deepspeed_json(method="ast"), max_steps=20), world_size=1)
    assert "method ast, starting mask by magnitude, chosen anew" in banner(spec, TEXT)
    config = dataclasses.replace(spec.config, method=MethodConfig("new"), curvature=CurvatureConfig())
    text = banner(dataclasses.replace(spec, config=config), TEXT)
    assert re.search(r"^ *mask +method new$", text, re.MULTILINE)


def test_a_family_whose_experts_cannot_be_seen_is_warned_about(arguments, tmp_path):
    """JetMoe keeps its experts, and the projections of its attention, in a class of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1, "kv_channels": 8}
    config = JetMoeConfig(vocab_size=BYTE_VOCABULARY, **sizes, intermediate_size=64, num_local_experts=4)
    folder = str(write_model(tmp_path / "jetmoe", JetMoeForCausalLM(config)))

    def warning(content=None, **flags):
        spec = make_spec(arguments(content, model=folder, any_family=True, **flags), world_size=1)
        return re.search(r"^ *warning +(.*)$", banner(spec, TEXT), re.MULTILINE)

    assert re.match(
        r"only \d\.\d% of the linear weights will be pruned: .*; for these add rows .*register_family", warning()[1]
    )
    assert warning(allow_dense=["*.experts.*"]) is None, "the user has decided"
    assert warning(deepspeed_json(include=["*.kv_proj.weight"])) is None


def test_a_teacher_with_another_vocabulary_is_refused(arguments, tmp_path):
    other = write_model(tmp_path / "other", tiny_llama(vocab_size=300))
    words = f"--teacher .* vocabulary has 300 entries and the student's {BYTE_VOCABULARY}"
    with pytest.raises(ValueError, match=words):
        make_spec(arguments(teacher=str(other)), world_size=2)


def test_a_teacher_for_which_numbers_are_other_tokens_is_refused(arguments, tmp_path):
    other = write_model(tmp_path / "other")
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    tokens = list(vocabulary)

    def renumber(count):
        """Give the first tokens each other's numbers, and write the tokenizer."""
        content["model"]["vocab"] = vocabulary | {tokens[n]: vocabulary[tokens[count - 1 - n]] for n in range(count)}
        write_json(path, content)

    renumber(256)
    first, last = tokens[0], tokens[255]
    words = f"--teacher .*: 256 of 258 numbers are other tokens in .* the first is 0: {last!r} and {first!r}"
    with pytest.raises(ValueError, match=words):
        make_spec(arguments(teacher=str(other)), world_size=2)
    # Some tokens may be called otherwise, and a teacher needs no tokenizer.
    renumber(20)
    make_spec(arguments(teacher=str(other)), world_size=2)
    path.unlink()
    (other / "tokenizer_config.json").unlink()
    make_spec(arguments(teacher=str(other)), world_size=2)


def test_a_pruned_model_is_its_own_teacher_only_if_that_is_said(arguments, model):
    write_json(model / "sparsity.json", {"source": {"dense": "models/dense"}})
    with pytest.raises(
        ValueError, match=r"is sparse already .* made of \(models/dense\): --teacher DENSE, or --teacher "
    ):
        make_spec(arguments(), world_size=2)
    make_spec(arguments(teacher=str(model)), world_size=2)
    make_spec(arguments(deepspeed_json(distillation=None)), world_size=2)


def test_hidden_states_of_a_deeper_teacher_are_refused(arguments, tmp_path):
    other = write_model(tmp_path / "other", tiny_llama(vocab_size=BYTE_VOCABULARY, num_hidden_layers=3))
    hidden = {"hidden": {"weight": 4.0}}
    make_spec(arguments(deepspeed_json(distillation=hidden)), world_size=2)
    with pytest.raises(ValueError, match="the student is 2 layers deep and the teacher 3"):
        make_spec(arguments(deepspeed_json(distillation=hidden), teacher=str(other)), world_size=2)


def test_hidden_states_of_a_teacher_in_another_order_are_refused(arguments, tmp_path):
    other = write_model(tmp_path / "other", tiny_llama(vocab_size=BYTE_VOCABULARY))
    Permutation("mlp", {"layers.0": torch.arange(64)[None].flip(-1)}, {}).save(other)
    content = deepspeed_json(distillation={"hidden": {}})
    make_spec(arguments(content), world_size=2)
    with pytest.raises(ValueError, match="--teacher .* has its channels in another order or basis than .*, the model"):
        make_spec(arguments(content, teacher=str(other)), world_size=2)


@pytest.mark.parametrize("damage", ["config", "cut", "gone", "tokenizer", "index", "empty"])
def test_a_damaged_model_is_refused(arguments, model, damage):
    if damage == "config":
        (model / "config.json").write_text("{")
        message = r"config\.json: not a readable JSON file"
    elif damage == "cut":
        content = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(content[: len(content) // 2])
        message = r"model\.safetensors: not a readable safetensors file"
    elif damage == "gone":
        (model / "model.safetensors").unlink()
        message = r"no model\.safetensors"
    elif damage == "tokenizer":
        (model / "tokenizer.json").write_text("{}")
        message = "tokenizer cannot be read"
    elif damage == "index":
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model-00001.safetensors"}})
        )
        message = r"model-00001\.safetensors: not a readable safetensors file"
    else:
        (model / "config.json").unlink()
        message = r"no config\.json"
    with pytest.raises(ValueError, match=message):
        make_spec(arguments(), world_size=2)


def test_weights_that_are_missing_in_the_file_are_named(arguments, model):
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    spec = make_spec(arguments(), world_size=2)
    with pytest.raises(ValueError, match=r"hold no model\.layers\.1\.mlp\.up_proj\.weight"):
        load_pretrained(spec.model.folder, "--model", torch.float32, None)


def test_a_hub_id_without_a_network_says_so(arguments, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="--model owner/name: no such folder, and no model that can be had from the hub"
    ):
        make_spec(arguments(model="owner/name"), world_size=2)


def test_the_length_of_a_run_is_judged_once_it_is_known(arguments) -> None:
    content = deepspeed_json()
    content["sparseforge"]["method"] = {"update_every": 100}
    assert make_spec(arguments(content, epochs=50.0), world_size=2).config.method.update_every == 100
    with pytest.raises(ValueError, match="update_every = 100 is not valid: masks are frozen at step 2 of 8"):
        make_spec(arguments(content), world_size=2)
    assert make_spec(arguments(content, max_steps=20_000), world_size=2).config.resolved_schedule.freeze_step == 4000


def test_a_damping_that_the_first_masks_do_not_use_is_refused(arguments) -> None:
    """Masks of tiles are Wanda's where the start names none."""
    content = deepspeed_json()
    content["sparseforge"] |= {"pattern": "block16", "start": {"damping": 0.1}}
    with pytest.raises(
        ValueError, match=r"start.damping = 0.1: the first masks are Wanda's here.*block16:0.5 is not n:m"
    ):
        make_spec(arguments(content), world_size=2)
    content["sparseforge"]["start"] = {}
    assert make_spec(arguments(content), world_size=2).config.start is not None


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_a_text_without_a_byte_is_refused_and_an_empty_shard_is_not(tmp_path: Path, flag: str) -> None:
    model = find_model("stdlib_llama", "--model")

    def texts_of(path: Path) -> object:
        arguments = {"dataset": [str(path)]} if flag == "dataset" else {flag: str(path), "eval_split": "train"}
        return find_texts(RunArguments(deepspeed="zero3", **arguments), model)

    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=rf"^--{flag} \S+{name}: {name}, 0 bytes: there is no text in it"):
            texts_of(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^--{flag} \S+: 2 files of split train: .*, 0 bytes: there is no text"):
        texts_of(tmp_path)
    (tmp_path / "more.txt").write_text("text")
    assert texts_of(tmp_path)


def test_bf16_that_a_gpu_emulates_is_not_chosen(monkeypatch):
    """A V100 makes tensors of bf16, and computes with them slower than in fp32."""
    gpu = SimpleNamespace(
        device_name=lambda: "cuda", is_bf16_supported=torch.cuda.is_bf16_supported, is_fp16_supported=lambda: True
    )
    monkeypatch.setattr(spec_module, "get_accelerator", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert spec_module.Hardware.here() == spec_module.Hardware(bf16=False, fp16=True, fused=True)
