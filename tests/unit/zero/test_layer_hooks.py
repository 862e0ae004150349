"""Hooks and torch.compile: what stands back for hooks, and what does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.eval_frame
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.mask.kernels.fisher import add_fisher_sums
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.layer_hooks import token_gradients, uncompiled
from tests.distributed import ROOT


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.fixture
def flex() -> Iterator[list[str]]:
    """Flex attention that notes how the compiler stands when it is called."""
    before = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    records = []
    ALL_ATTENTION_FUNCTIONS.register("flex_attention", lambda: records.append(stance()))
    yield records
    ALL_ATTENTION_FUNCTIONS.register("flex_attention", before)


def test_flex_attention_stays_compiled(flex: list[str]) -> None:
    """Keep it from forming the scores of all pairs of tokens."""
    stored = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    with uncompiled():
        assert stance() == "force_eager"
        with uncompiled():
            ALL_ATTENTION_FUNCTIONS["flex_attention"]()
        ALL_ATTENTION_FUNCTIONS["flex_attention"]()
        assert stance() == "force_eager"
    assert flex == ["default", "default"] and stance() == "default"
    assert ALL_ATTENTION_FUNCTIONS["flex_attention"] is stored


def test_hooks_on_no_module_leave_compiled_code_as_it_is() -> None:
    with token_gradients({}, lambda *_: None), expert_tokens({}, lambda *_: None):
        assert stance() == "default"


def test_blocks_in_eager_mode_may_end_in_any_order(flex: list[str]) -> None:
    stored = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert stance() == "force_eager"
    ALL_ATTENTION_FUNCTIONS["flex_attention"]()
    second.__exit__(None, None, None)
    assert stance() == "default" and flex == ["default"]
    assert ALL_ATTENTION_FUNCTIONS["flex_attention"] is stored


def test_a_loop_that_ends_by_an_error_ends_with_that_error() -> None:
    script = (
        "import torch._dynamo, contextlib\n"
        "from sparseforge_ds.zero.layer_hooks import uncompiled\n"
        "hooks = contextlib.ExitStack()\n"
        "hooks.enter_context(uncompiled())\n"
        "raise ValueError('of the loop')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: of the loop", done.stderr


def test_settings_of_the_compiler_are_made_once() -> None:
    assert fusing.compiler_settings() is fusing.compiler_settings()


def sums_in_backward(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=False).to(device)
    arguments = torch.randn(12, 24, device=device)
    result = [torch.zeros(size, dtype=torch.float64, device=device) for size in (16, 24)]

    def hear(_name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        add_fisher_sums(grad_TO, input_TI, 1.0, *result)

    with token_gradients({"layer": layer}, hear):
        output = layer(arguments)
        output.square().sum().backward()
    gradient = 2 * output.detach().double()
    square = (gradient.square().T @ arguments.double().square()).cpu()
    return [value.cpu() for value in result] + [square.sum(1), square.sum(0)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_hooks_compile_inside_a_backward_pass(device: str) -> None:
    """Compile in a thread of autograd's, as on a GPU."""
    with fusing.compiled(True):
        outputs, inputs, *expected = sums_in_backward(device)
    torch.testing.assert_close(outputs, expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(inputs, expected[1], rtol=1e-5, atol=0)
