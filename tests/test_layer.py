"""Norms, MLP and dropout against plain formulas, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megacp.config import ModelConfig
from megacp.grid import Group
from megacp.model.layer import MLP, Noise, Norm
from megacp.model.parallel import Layout

ALONE = Group((0,), 0)


def config(**changes: Any) -> ModelConfig:
    kwargs = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "vocab_size": 16}
    return ModelConfig(**{**kwargs, **changes})


def randomize(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.3)


def norm(kind: str, dtype: torch.dtype, epsilon: float = 1e-5, width: int = 8) -> Norm:
    module = Norm("norm", width, config(normalization=kind, norm_epsilon=epsilon), Layout(ALONE, dtype=dtype))
    randomize(module)
    return module


def plain_norm(x: Tensor, module: Norm) -> Tensor:
    if module.bias is not None:
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.square().mean(-1, keepdim=True) + module.epsilon).sqrt() * module.weight
    return scaled if module.bias is None else scaled + module.bias


def gradients(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and the gradients of x and of the parameters under a fixed random weighting of the output."""
    x = x.detach().requires_grad_()
    out = function(x)
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    wanted = torch.autograd.grad((out * weighting).sum(), [x, *module.parameters()])
    return [out.detach(), *wanted]


def bytes_kept(function: Callable[[], Tensor], module: nn.Module) -> int:
    """By autograd for the backward pass, parameters aside; views of one tensor count once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(size for address, size in kept.items() if address not in parameters)


# --- norms


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8), (0, 8)])
def test_norm_equals_the_formula(kind: str, epsilon: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = norm(kind, torch.float64, epsilon), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(gradients(module, module, x), gradients(lambda x: plain_norm(x, module), module, x))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_of_some_heads_of_a_product(kind: str) -> None:
    """q and k are views with gaps between their rows."""
    torch.manual_seed(0)
    module, x = norm(kind, torch.float64), torch.randn(5, 4, 8, dtype=torch.float64)
    ours = gradients(lambda x: module(x[:, 1:3]), module, x)
    torch.testing.assert_close(ours, gradients(lambda x: plain_norm(x[:, 1:3], module), module, x))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_gradient(kind: str) -> None:
    torch.manual_seed(0)
    module = norm(kind, torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in module.named_parameters()]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *module.parameters()))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e15])
def test_norm_of_small_and_large_rows(scale: float) -> None:
    """float32 squares of 1e15 are still finite, those of a row of zeros do not divide by it."""
    torch.manual_seed(0)
    module = norm("RMSNorm", torch.float32, 1e-8)
    x = scale * torch.randn(4, 8)
    x[0] = 0
    exact = norm("RMSNorm", torch.float64, 1e-8)
    exact.load_state_dict(module.state_dict())
    ours, wanted = gradients(module, module, x), gradients(lambda x: plain_norm(x, exact), exact, x.double())
    for got, expected in zip(ours, wanted, strict=True):
        assert (got.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_in_bfloat16(kind: str) -> None:
    """Statistics are float32: output and gradients are off by roundings of the result, not by sums in bfloat16."""
    torch.manual_seed(0)
    module, x = norm(kind, torch.bfloat16, width=64), torch.randn(4096, 64).bfloat16()
    exact = norm(kind, torch.float64, width=64)
    exact.load_state_dict(module.state_dict())
    ours, wanted = gradients(module, module, x), gradients(lambda x: plain_norm(x, exact), exact, x.double())
    for got, expected in zip(ours, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - expected).norm() <= 0.005 * expected.norm()


def test_rms_norm_keeps_its_input_and_one_number_a_row() -> None:
    module = norm("RMSNorm", torch.bfloat16, width=64)
    x = torch.randn(100, 64).bfloat16().requires_grad_()
    assert bytes_kept(lambda: module(x), module) == 2 * x.numel() + 4 * 100


# --- MLP


def mlp(dtype: torch.dtype = torch.float64, **changes: Any) -> MLP:
    module = MLP("mlp", config(**changes), Layout(ALONE, dtype=dtype), 0.02)
    randomize(module)
    return module


def plain_mlp(x: Tensor, module: MLP, activation: Callable[[Tensor], Tensor], gated: bool) -> Tensor:
    inner = x @ module.up.weight.t() + (0 if module.up.bias is None else module.up.bias)
    inner = activation(inner[:, :12]) * inner[:, 12:] if gated else activation(inner)
    return inner @ module.down.weight.t() + (0 if module.down.bias is None else module.down.bias)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "changes"),
    [
        (silu, {}),
        (gelu, {"swiglu": False}),
        (gelu_tanh, {"swiglu": False, "openai_gelu": True}),
    ],
)
def test_mlp_equals_the_formula(activation: Callable[[Tensor], Tensor], changes: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    module, x = mlp(add_bias_linear=bias, **changes), torch.randn(5, 8, dtype=torch.float64)
    gated = activation is silu
    wanted = gradients(lambda x: plain_mlp(x, module, activation, gated), module, x)
    torch.testing.assert_close(gradients(module, module, x), wanted)


def test_swiglu_gradient() -> None:
    torch.manual_seed(0)
    module = mlp()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_swiglu_in_bfloat16() -> None:
    torch.manual_seed(0)
    module, x = mlp(torch.bfloat16), torch.randn(64, 8).bfloat16()
    exact = mlp()
    exact.load_state_dict(module.state_dict())
    ours = gradients(module, module, x)
    wanted = gradients(lambda x: plain_mlp(x, exact, silu, True), exact, x.double())
    for got, expected in zip(ours, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - expected).norm() <= 0.02 * expected.norm()


def test_swiglu_keeps_little() -> None:
    """x, gate and up, silu(gate) (on a CPU), and the product that the second matrix needs."""
    module = mlp(torch.float32)
    x = torch.randn(100, 8).requires_grad_()
    assert bytes_kept(lambda: module(x), module) <= 4 * 100 * (8 + 24 + 12 + 12)


# --- dropout


def drop(x: Tensor, probability: float = 0.25, place: str = "layers.0.mlp", **changes: Any) -> Tensor:
    return Noise(**{"seed": 1, "ids": (4, 5), "stream": (0, 0), **changes}).dropout(x, probability, place)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_what_it_keeps(probability: float, dtype: torch.dtype) -> None:
    x = torch.ones(100_000, dtype=dtype)
    out = drop(x, probability)
    kept = out != 0
    assert out.dtype == dtype
    assert kept.float().mean().item() == pytest.approx(1 - probability, abs=0.01)
    assert torch.all(out[kept] == torch.tensor(1 / (1 - probability)).to(dtype))


def test_dropout_keeps_the_mean_in_bfloat16() -> None:
    """1/0.9 itself is no bfloat16: as a factor of every element it would be a bias."""
    x = (torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    assert drop(x, 0.1).double().mean() / x.double().mean() == pytest.approx(1.0, abs=1e-3)


def test_dropout_is_the_same_wherever_its_key_is() -> None:
    """Nothing of the process enters: not its global random state, not what was drawn before."""
    x = torch.ones(1000)
    first = drop(x)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    drop(x, place="elsewhere")
    assert torch.equal(drop(x), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2},
        {"ids": (4, 6)},
        {"ids": (45,)},
        {"stream": (1, 0)},
        {"stream": (0, 1)},
        {"place": "layers.0.attention"},
        {"place": "layers.1.mlp"},
    ],
)
def test_dropout_differs_where_its_key_does(changes: dict[str, Any]) -> None:
    """As two independent masks do: both keep 0.75^2 of all."""
    x = torch.ones(100_000)
    first, second = drop(x) != 0, drop(x, **changes) != 0
    assert (first & second).float().mean().item() == pytest.approx(0.75**2, abs=0.01)


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(1000, requires_grad=True)
    drop(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, drop(torch.ones(1000)))


def test_gelu_formulas_are_those_of_torch() -> None:
    x = torch.linspace(-4, 4, 50, dtype=torch.float64)
    torch.testing.assert_close(gelu(x), F.gelu(x))
    torch.testing.assert_close(gelu_tanh(x), F.gelu(x, approximate="tanh"))
