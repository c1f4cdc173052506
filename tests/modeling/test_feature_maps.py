"""The feature maps: exact numbers, unbiasedness, and the variance that the paper proves."""

import math

import pytest
import torch
from torch import Tensor

from hf_linattn.modeling.feature_maps import (
    FEATURE_MAPS,
    FeatureMap,
    Features,
    RandomFeatureMap,
    positive_features,
    random_directions,
    trigonometric_features,
)

pytestmark = pytest.mark.core

ESTIMATORS = {
    "positive": positive_features,
    "hyperbolic": lambda x, directions: positive_features(x, torch.cat((directions, -directions), dim=-2)),
    "trigonometric": trigonometric_features,
}
# 99.99 % of a normal distribution
QUANTILE = 3.89


def phi(features: Features) -> Tensor:
    values = features.log2_phi.exp2()
    return values if features.factor is None else values * features.factor


def make_map(feature_map: str, **options) -> FeatureMap:
    settings = {"num_heads": 3, "head_dim": 4, "num_features": 8, "orthogonal": True, "seed": 0, **options}
    return FEATURE_MAPS[feature_map](**settings)


def estimates(name: str, x: Tensor, y: Tensor, directions: Tensor) -> Tensor:
    """phi(x) . phi(y) for directions (draws, m, d): one estimate of exp(x.y) per draw, float64."""
    # every draw is a batch entry of one head and one token
    q, k = (v.double().view(1, 1, 1, -1) for v in (x, y))
    directions = directions.double().unsqueeze(1)
    return (phi(ESTIMATORS[name](q, directions)) * phi(ESTIMATORS[name](k, directions))).sum(-1).flatten()


def lemma_2(name: str, x: Tensor, y: Tensor, m: int) -> float:
    """The mean squared error of an estimate from m independent directions (arXiv:2009.14794, Lemma 2)."""
    total, difference = float((x + y).square().sum()), float((x - y).square().sum())
    kernel = math.exp(float(x @ y))
    if name == "trigonometric":
        return math.exp(total) * kernel**-2 * (1 - math.exp(-difference)) ** 2 / (2 * m)
    positive = math.exp(total) * kernel**2 * (1 - math.exp(-total)) / m
    return positive if name == "positive" else positive * (1 - math.exp(-total)) / 2


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    """The mean, and the half width of its confidence interval."""
    return samples.mean().item(), QUANTILE * samples.std().item() / math.sqrt(samples.numel())


def test_the_estimate_of_the_worked_example() -> None:
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    q, k = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    estimate = estimates("positive", q, k, directions[None]).item()
    # e^0.75 and e^-0.25, averaged
    assert estimate == pytest.approx((math.exp(0.75) + math.exp(-0.25)) / 2, rel=1e-12)
    assert round(estimate, 4) == 1.4479
    assert round(math.exp(float(q @ k)), 4) == 1.6487


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize(
    ("x", "y"),
    [((0.5, 0.2, -0.1), (0.3, -0.4, 0.2)), ((0.3, 0.3, 0.3), (0.3, 0.3, 0.3)), ((0.6, 0.0, 0.2), (-0.5, 0.1, 0.0))],
    ids=["any", "same", "opposed"],
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_mean_and_variance_are_those_of_lemma_2(name: str, x: tuple, y: tuple, m: int) -> None:
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (x, y))
    generator = torch.Generator().manual_seed(0)
    directions = random_directions(1_000_000, 3, orthogonal=False, generator=generator).unflatten(0, (-1, m))
    samples = estimates(name, x, y, directions)
    kernel = math.exp(float(x @ y))

    mean, error = mean_and_error(samples)
    assert abs(mean - kernel) <= error + 1e-9  # unbiased
    mse, error = mean_and_error((samples - kernel).square())
    assert abs(mse - lemma_2(name, x, y, m)) <= error + 1e-9
    assert error < 0.2 * mse + 1e-9  # or the interval would say nothing


def test_orthogonal_directions_estimate_better_by_what_theorem_2_promises() -> None:
    d = m = 8
    x, y = torch.full((d,), 0.25), torch.linspace(-0.1, 0.4, d)
    kernel = math.exp(float(x @ y))
    generator = torch.Generator().manual_seed(5)
    directions = random_directions(60_000 * m, d, generator=generator).unflatten(0, (-1, m))
    samples = estimates("positive", x, y, directions)

    mean, error = mean_and_error(samples)
    assert abs(mean - kernel) <= error
    mse, error = mean_and_error((samples - kernel).square())
    zero = math.exp(-float(x.square().sum() + y.square().sum()) / 2)
    gain = 2 * (m - 1) / (m * (d + 2)) * (kernel - zero) ** 2
    assert mse + error < lemma_2("positive", x, y, m)
    assert mse - error <= lemma_2("positive", x, y, m) - gain


@pytest.mark.parametrize("num_directions", [3, 8, 19])
def test_orthogonal_directions_are_orthogonal_in_blocks_and_gaussian_alone(num_directions: int) -> None:
    d = 8
    rows = random_directions(num_directions, d, generator=torch.Generator().manual_seed(0)).double()
    assert rows.shape == (num_directions, d)
    for start in range(0, num_directions, d):
        block = torch.nn.functional.normalize(rows[start : start + d])
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)).double(), atol=1e-6, rtol=0)
    many = random_directions(80_000, d, generator=torch.Generator().manual_seed(1)).double()
    covariance = many.T @ many / len(many)
    torch.testing.assert_close(covariance, torch.eye(d).double(), atol=0.03, rtol=0)
    # a chi distribution's norms, not rows of one fixed length
    assert many.square().sum(-1).var().item() == pytest.approx(2 * d, rel=0.05)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_a_map_has_its_number_of_features(feature_map: str) -> None:
    features = phi(make_map(feature_map)(torch.randn(2, 3, 5, 4), "query"))
    assert features.shape == (2, 3, 5, 4 if feature_map == "elu" else 8)
    assert (features > 0).all() or FEATURE_MAPS[feature_map].signed


@pytest.mark.parametrize("orthogonal", [True, False])
def test_directions_come_from_the_seed_alone_and_differ_between_heads(orthogonal: bool) -> None:
    first = make_map("positive", orthogonal=orthogonal)
    torch.manual_seed(123)
    again = make_map("positive", orthogonal=orthogonal)
    other = make_map("positive", orthogonal=orthogonal, seed=1)
    assert torch.equal(first.directions, again.directions)
    assert not torch.equal(first.directions, other.directions)
    assert not torch.equal(first.directions[0], first.directions[1])


def test_making_a_map_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_map("positive").redraw()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("side", ["query", "key"])
def test_learned_starts_as_positive(side: str) -> None:
    x = torch.randn(2, 3, 5, 4)
    learned, positive = make_map("learned"), make_map("positive")
    torch.testing.assert_close(learned(x, side).log2_phi, positive(x, side).log2_phi)


def test_learned_trains_every_parameter_apart_for_queries_and_keys() -> None:
    learned = make_map("learned")
    assert {name for name, _ in learned.named_parameters()} == {
        f"{side}_{what}" for side in ("query", "key") for what in ("directions", "offset", "square")
    }
    learned(torch.randn(2, 3, 5, 4), "query").log2_phi.square().sum().backward()
    for name, parameter in learned.named_parameters():
        assert (parameter.grad is not None) == name.startswith("query_")


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_redraw_changes_random_directions_and_nothing_else(feature_map: str) -> None:
    module, twin = make_map(feature_map), make_map(feature_map)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.redraw()
    twin.redraw()
    changed = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == ({"directions", "draws"} if issubclass(FEATURE_MAPS[feature_map], RandomFeatureMap) else set())
    for name, tensor in twin.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


def test_a_saved_count_of_draws_goes_on_where_it_stopped() -> None:
    module, resumed = make_map("positive"), make_map("positive")
    module.redraw()
    resumed.load_state_dict(module.state_dict())
    module.redraw()
    resumed.redraw()
    assert torch.equal(module.directions, resumed.directions)


@pytest.mark.parametrize(
    "feature_map", [name for name, kind in FEATURE_MAPS.items() if kind.features_per_direction == 2]
)
def test_an_odd_number_of_features_is_refused_where_directions_give_two(feature_map: str) -> None:
    name = FEATURE_MAPS[feature_map].__name__
    with pytest.raises(ValueError, match=f"num_features=7 must be a multiple of 2 for {name}"):
        make_map(feature_map, num_features=7)
