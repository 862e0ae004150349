"""The offline reader against real DeepSpeed runs: every stage, dtype and odd layout, against the gathered model."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseforge_ds.checkpoint import rank_files
from sparseforge_ds.checkpoint.reader import Checkpoint
from tests.distributed import run_distributed

PRUNABLE = ["a.weight", "b.weight", "c.weight"]

CASES: dict[str, dict[str, Any]] = {
    "stage0-fp32": {"stage": 0},
    "stage0-bf16": {"stage": 0, "dtype": "bf16"},
    "stage1-fp32": {"stage": 1},
    "stage1-bf16": {"stage": 1, "dtype": "bf16"},
    "stage1-bf16-optimizer": {"stage": 1, "dtype": "bf16", "more": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "stage2-fp32": {"stage": 2},
    "stage2-bf16-round-robin": {"stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}},
    "stage2-fp16": {"stage": 2, "dtype": "fp16"},
    "stage2-aligned": {"stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}},
    "stage3-fp32": {"stage": 3},
    "stage3-bf16-small-sub-groups": {"stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 20}},
    "stage3-fp16": {"stage": 3, "dtype": "fp16"},
}
WORLD_SIZES = {1: ["stage1-fp32", "stage3-bf16-small-sub-groups"], 2: list(CASES), 3: ["stage2-fp32", "stage3-fp32"]}


class OddModel(nn.Module):
    """Shapes that no world size divides, a tied head, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.a = nn.Linear(8, 5)
        self.b = nn.Linear(5, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.c = nn.Linear(7, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 2.5]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        x = x + self.c(self.norm(self.b(self.a(x))))
        return self.head(x).float().pow(2).mean() + self.frozen(x).float().mean()


def run(case: dict[str, Any], folder: str, tag: str, steps: int = 2) -> dict[str, Tensor]:
    """Train `steps` steps with two states of our own in the inner optimizer, save, return the gathered model."""
    import deepspeed

    torch.manual_seed(0)
    model = OddModel()
    weights = dict(model.named_parameters())
    # Vectors, but for frozen ones, have a param group of their own.
    small = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    dtype = case.get("dtype", "fp32")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **case.get("more", {}),
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"]["loss_scale"] = 8
    param_groups = [
        {"params": [weights[name] for name in PRUNABLE], "sparseforge": "prunable", "name": "prunable"},
        {"params": [model.emb.weight], "name": "dense"},
        {"params": small, "name": "small"},
    ]
    name_of = {id(parameter): name for name, parameter in weights.items()}
    names = [[name_of[id(parameter)] for parameter in group["params"]] for group in param_groups]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=param_groups, config=config)

    # Our two states stand beside Adam's, as a forge would have them.
    def remember(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"] if group.get("sparseforge") == "prunable" else []:
                optimizer.state[p]["dense"] = p.detach().float() * 3 + 1
                optimizer.state[p]["mask"] = (p.detach() > 0).float()

    engine.basic_optimizer.register_step_post_hook(remember)
    for _ in range(steps):
        engine.backward(engine(torch.randint(0, 11, (1, 4))))
        engine.step()
    # Save what a forge saves beside them.
    listed = [
        {"name": name, "shape": list(OddModel().get_parameter(name).shape), "input_axis": -1} for name in PRUNABLE
    ]
    state = {"weights": listed, "param_groups": names, "step": steps}
    engine.save_checkpoint(folder, tag=tag, client_state={"sparseforge": state})
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def save_all(folder: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    return {name: run(CASES[name], folder, name) for name in names}


def save_steps(folder: str) -> None:
    for steps in (1, 2):
        run(CASES["stage2-fp32"], folder, f"stage2-{steps}", steps)
        run(CASES["stage3-fp32"], folder, f"stage3-{steps}", steps)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, dict[str, Tensor]]]]:
    result = {}
    for world_size, names in WORLD_SIZES.items():
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        result[world_size] = (folder, run_distributed(save_all, world_size, str(folder), names)[0])
    return result


@pytest.fixture(scope="module")
def steps_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    run_distributed(save_steps, 2, str(folder))
    return folder


@pytest.mark.parametrize(("world_size", "name"), [(w, n) for w, names in WORLD_SIZES.items() for n in names])
def test_weights_are_those_of_the_gathered_model(saved: Any, world_size: int, name: str) -> None:
    folder = saved[world_size][0]
    truth = saved[world_size][1][name]
    checkpoint = Checkpoint(folder / name)
    assert (checkpoint.stage, checkpoint.world_size, checkpoint.step) == (CASES[name]["stage"], world_size, 2)
    assert checkpoint.aliases == {"head.weight": "emb.weight"}
    assert checkpoint.buffers == {"scale"}
    assert set(checkpoint.shapes) == set(truth) - {"head.weight"}
    for key, shape in checkpoint.shapes.items():
        weight = checkpoint.weight(key)
        assert tuple(weight.shape) == shape == tuple(truth[key].shape)
        assert torch.equal(weight.to(truth[key].dtype), truth[key]), key
        if key in PRUNABLE:
            assert weight.dtype == torch.float32
            assert {"dense", "mask", "exp_avg"} <= set(checkpoint.states(key))
            assert torch.equal(checkpoint.state(key, "dense"), weight * 3 + 1)
            assert torch.equal(checkpoint.state(key, "mask"), (weight > 0).float())
        else:
            assert "mask" not in checkpoint.states(key)
    for file in checkpoint.files:
        file.check_bytes()


def test_masters_are_finer_than_the_trained_weights(saved: Any) -> None:
    checkpoint = Checkpoint(saved[2][0] / "stage3-bf16-small-sub-groups")
    weight = checkpoint.weight("a.weight")
    assert not torch.equal(weight, weight.bfloat16().float())
    assert checkpoint.entries["a.weight"].trained_dtype == torch.bfloat16


def test_unmapping_in_between_changes_nothing(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Checkpoint(saved[2][0] / "stage3-fp32")
    monkeypatch.setattr(rank_files, "RESIDENT_BYTES", 64)
    chunks = Checkpoint(saved[2][0] / "stage3-fp32")
    for name in full.shapes:
        assert torch.equal(full.weight(name), chunks.weight(name))


@pytest.mark.parametrize("name", ["stage0-bf16", "stage2-bf16-round-robin", "stage3-fp32"])
def test_threads_read_what_one_reads(saved: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Checkpoint(saved[2][0] / name)
    wanted = [(key, state) for key in alone.shapes for state in (None, *alone.states(key))]
    expected = [alone.weight(key) if state is None else alone.state(key, state) for key, state in wanted]
    monkeypatch.setattr(rank_files, "RESIDENT_BYTES", 64)  # unmaps at nearly every read
    for _ in range(3):
        shared = Checkpoint(saved[2][0] / name)
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(shared.weight, key) if state is None else pool.submit(shared.state, key, state)
                for key, state in wanted * 5
            ]
            assert all(torch.equal(job.result(), value) for job, value in zip(jobs, expected * 5, strict=True))


@pytest.mark.parametrize(
    "param_groups",
    [3, ["a.weight"], [[*PRUNABLE]], [[*PRUNABLE], ["emb.weight"], ["emb.weight"]], [[], [*PRUNABLE], []]],
)
def test_damaged_names_of_param_groups_are_refused(saved: Any, tmp_path: Path, param_groups: object) -> None:
    shutil.copytree(saved[2][0] / "stage0-fp32", tmp_path / "names")
    file = tmp_path / "names" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["sparseforge"]["param_groups"] = param_groups
    torch.save(content, file)
    with pytest.raises(ValueError, match=f"{file.name}: .*(groups|group|weight)"):
        Checkpoint(tmp_path / "names")


def test_the_newest_checkpoint_is_found(saved: Any, tmp_path: Path) -> None:
    for step in (2, 1000000):
        shutil.copytree(saved[2][0] / "stage3-fp32", tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    (tmp_path / "run" / "checkpoints" / "step_9000000.tmp").mkdir()
    for path in ("run", "run/checkpoints", "run/checkpoints/step_1000000"):
        assert Checkpoint(tmp_path / path).folder.name == "step_1000000"
    for step in (2, 1000000):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        folder.rename(folder.with_name(f"global_step{step}"))
    (tmp_path / "run" / "checkpoints" / "latest").write_text("global_step2\n")
    assert Checkpoint(tmp_path / "run").folder.name == "global_step2"
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_000004")
    with pytest.raises(ValueError, match="latest: names 'step_000004'"):
        Checkpoint(tmp_path / "run")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_files_of_different_steps_are_refused(steps_folder: Path, tmp_path: Path, stage: int, kind: str) -> None:
    shutil.copytree(steps_folder / f"stage{stage}-2", tmp_path / "mixed")
    file = sorted((tmp_path / "mixed").glob(f"*_{kind}_states.pt"))[-1]
    shutil.copy(steps_folder / f"stage{stage}-1" / file.name, file)
    with pytest.raises(ValueError, match=r"_states\.pt: .*step"):
        checkpoint = Checkpoint(tmp_path / "mixed")
        for name in checkpoint.shapes:
            checkpoint.weight(name)


@pytest.mark.parametrize("name", ["stage1-bf16", "stage3-fp32"])
def test_a_missing_file_of_a_rank_is_named(saved: Any, tmp_path: Path, name: str) -> None:
    for index in range(2):
        folder = tmp_path / str(index)
        shutil.copytree(saved[2][0] / name, folder)
        sorted(folder.glob("*_optim_states.pt"))[index].unlink()
        with pytest.raises(ValueError, match=str(folder)):
            Checkpoint(folder)


def test_files_of_another_world_size_are_refused(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[3][0] / "stage2-fp32", tmp_path / "mixed")
    for file in (saved[2][0] / "stage2-fp32").glob("*.pt"):
        shutil.copy(file, tmp_path / "mixed" / file.name)
    with pytest.raises(ValueError, match="3 optimizer files, but it was saved at stage 2 by 2 ranks"):
        Checkpoint(tmp_path / "mixed")
    sorted((tmp_path / "mixed").glob("*rank_2*"))[0].unlink()
    shutil.copy(saved[3][0] / "stage2-fp32" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", tmp_path / "mixed")
    with pytest.raises(ValueError, match="was saved by 3 ranks, the model file by 2"):
        Checkpoint(tmp_path / "mixed")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(saved: Any, tmp_path: Path, keep: float) -> None:
    shutil.copytree(saved[2][0] / "stage2-fp32", tmp_path / "cut")
    file = sorted((tmp_path / "cut").glob("*_optim_states.pt"))[1]
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=f"{file.name}: not a readable checkpoint file"):
        Checkpoint(tmp_path / "cut")


def test_flipped_bytes_of_a_weight_are_found(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[2][0] / "stage3-fp32", tmp_path / "flipped")
    file = sorted((tmp_path / "flipped").glob("*_optim_states.pt"))[0]
    flat = Checkpoint(tmp_path / "flipped").weight("a.weight").flatten()[:4]
    content = file.read_bytes()
    at = content.index(flat.numpy().tobytes())
    file.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
    with pytest.raises(ValueError, match=f"{file.name}: checksum of .* is wrong"):
        [file.check_bytes() for file in Checkpoint(tmp_path / "flipped").files]


def test_the_client_state_is_plain_json(saved: Any) -> None:
    state = Checkpoint(saved[2][0] / "stage2-fp32").client_state["sparseforge"]
    assert json.loads(json.dumps(state)) == state


def test_masters_of_several_dtypes_are_refused(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[2][0] / "stage1-bf16", tmp_path / "cast")
    file = sorted((tmp_path / "cast").glob("*_optim_states.pt"))[1]
    content = torch.load(file, weights_only=False)
    flats = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flats[-1] = flats[-1].detach().bfloat16()
    torch.save(content, file)
    with pytest.raises(ValueError, match="cast: its masters are of several dtypes, torch.bfloat16, torch.float32"):
        Checkpoint(tmp_path / "cast")
