"""Features matched to moments: exact where nothing was matched yet, unbiased, and of less variance than FAVOR+."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linattn import PerformerConfig
from hf_linattn.modeling.cache import LinAttnCacheLayer
from hf_linattn.modeling.far_part import Rows
from hf_linattn.modeling.feature_maps import (
    FEATURE_MAPS,
    FeatureMap,
    moment_matched_features,
    positive_features,
    random_directions,
)
from hf_linattn.modeling.moments import Moments, match_moments, match_row, side_of

from ..helpers import linear_attention, qkv, softmax_attention, with_moments

pytestmark = pytest.mark.core

DIM, SCALE = 3, 0.5
#: names of the maps that can be matched
MATCHED = [name for name, kind in FEATURE_MAPS.items() if "moments" in kind.inits]
ALL_MATCHED = pytest.mark.parametrize("feature_map", MATCHED)
BOTH_SIDES = pytest.mark.parametrize("side", ["query", "key"])


def make_map(feature_map: str, **options: Any) -> FeatureMap:
    settings = {"num_heads": 2, "head_dim": DIM, "num_features": 8, "orthogonal": True, "seed": 0, "init": "moments"}
    return FEATURE_MAPS[feature_map](**{**settings, **options})


def gaussians(tokens: int = 400) -> tuple[Tensor, Tensor]:
    """Queries and keys (heads, tokens, dim) of two heads: Gaussians that are neither centered nor round."""
    generator = torch.Generator().manual_seed(2)
    factors = 0.5 * torch.randn(2, 2, DIM, DIM, generator=generator)
    means = 0.6 * torch.randn(2, 2, 1, DIM, generator=generator)
    query, key = torch.randn(2, 2, tokens, DIM, generator=generator) @ factors + means
    return query, key


def moments_of_gaussians() -> Moments:
    query, key = gaussians()
    return match_moments(query * SCALE**0.5, key * SCALE**0.5)


def some_moments() -> Moments:
    """Any: the estimate is unbiased whether or not they fit the data."""
    feature_map = with_moments(make_map("positive"))
    return Moments(*(x.clone() for x in feature_map.moments))


def estimates(features: Any, query: Tensor, key: Tensor) -> Tensor:
    """phi(q) . phi(k) for each pair of tokens of (heads, tokens, dim), of `features(x, side)`; (heads, tokens)."""
    phi_query, phi_key = (
        features(x.double().unsqueeze(0), side).log2_phi.exp2() for x, side in ((query, "query"), (key, "key"))
    )
    return (phi_query * phi_key).sum(-1).squeeze(0)


def draws(count: int, num_features: int, make_features: Any, query: Tensor, key: Tensor) -> Tensor:
    """Estimates of independent draws of directions, (count, heads, tokens)."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(count):
        directions = torch.stack(
            [random_directions(num_features, DIM, orthogonal=False, generator=generator) for _ in range(len(query))]
        ).double()
        results.append(estimates(partial(make_features, directions), query, key))
    return torch.stack(results)


def matched(moments: Moments, directions: Tensor, x: Tensor, side: str) -> Any:
    moments = Moments(*(tensor.double() for tensor in moments))
    return moment_matched_features(x, side_of(directions, moments, side), SCALE)


def favor(directions: Tensor, x: Tensor, side: str) -> Any:
    return positive_features(x, directions, SCALE)


@pytest.mark.parametrize("moments", [some_moments, moments_of_gaussians])
@pytest.mark.parametrize("hyperbolic", [False, True])
def test_the_estimate_is_unbiased(moments: Any, hyperbolic: bool) -> None:
    query, key = (x[:, :6] for x in gaussians())
    expected = (SCALE * (query.double() * key.double()).sum(-1)).exp()

    def features(directions: Tensor, x: Tensor, side: str) -> Any:
        return matched(moments(), torch.cat((directions, -directions), dim=-2) if hyperbolic else directions, x, side)

    # 100 estimates of 4,000 features each
    samples = draws(100, 4000, features, query, key)
    # 99.99 % of a normal distribution, for 12 pairs
    error = 3.89 * samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() <= error).all()
    # or the interval would say nothing
    assert (error < 0.1 * expected).all()


def test_the_variance_is_lower_than_favors_on_data_of_these_moments() -> None:
    query, key = (x[:, :60] for x in gaussians())
    expected = (SCALE * (query.double() * key.double()).sum(-1)).exp()
    moments = moments_of_gaussians()

    def error(features: Any) -> Tensor:
        samples = draws(200, 32, features, query, key)
        return (samples / expected - 1).square().mean((0, 2))

    ours, favors = error(partial(matched, moments)), error(favor)
    assert (ours < 0.7 * favors).all()
    # each part counts: the tilt, and the balance of queries and keys without it
    assert (ours < error(partial(matched, moments._replace(tilt=torch.zeros_like(moments.tilt))))).all()


def test_moments_of_a_worked_example() -> None:
    """One coordinate of variance 1 around 2 in queries, 4 in keys: both have variance 2 once they are balanced."""
    x = torch.tensor([1.0, -1.0]).view(1, 2, 1)
    moments = match_moments(x + 2, 2 * x)
    assert moments.mean.item() == pytest.approx(2.0)
    assert abs(moments.query_transform.item()) == pytest.approx(2**0.5, rel=1e-3)
    assert abs(moments.key_transform.item()) == pytest.approx(2**-0.5, rel=1e-3)
    phi = 4.0
    tilt = (1 - 2 * phi - ((2 * phi + 1) ** 2 + 8 * phi) ** 0.5) / 16
    assert moments.tilt.item() == pytest.approx(tilt, rel=1e-3)


def test_matched_transforms_are_inverse_and_tilts_allowed() -> None:
    moments = moments_of_gaussians()
    product = moments.query_transform.transpose(-1, -2) @ moments.key_transform
    torch.testing.assert_close(product, torch.eye(DIM).expand(2, -1, -1), rtol=1e-4, atol=1e-4)
    assert (moments.tilt < 1 / 8).all() and (moments.tilt < 0).all()
    query, key = (x * SCALE**0.5 for x in gaussians())
    centered = (query - query.mean(1, keepdim=True)) @ moments.query_transform.transpose(-1, -2)
    other = key @ moments.key_transform.transpose(-1, -2)
    first, second = (x.transpose(-1, -2) @ x / x.shape[1] for x in (centered, other))
    # one covariance, and no correlation between coordinates
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(first, first.diagonal(dim1=-2, dim2=-1).diag_embed(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("relative", [False, True])
@BOTH_SIDES
@ALL_MATCHED
def test_before_calibration_the_features_are_favors(feature_map: str, side: str, relative: bool) -> None:
    x = torch.randn(2, 2, 5, DIM, generator=torch.Generator().manual_seed(0))
    ours, theirs = make_map(feature_map), make_map(feature_map, init="random")
    torch.testing.assert_close(
        ours(x, side, SCALE, relative).log2_phi, theirs(x, side, SCALE, relative).log2_phi, rtol=1e-5, atol=1e-5
    )


@ALL_MATCHED
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [0, 4])
def test_before_calibration_the_output_is_favors(feature_map: str, causal: bool, window_size: int) -> None:
    options = {"feature_map": feature_map, "num_features": 32, "window_size": window_size}
    ours, theirs = (
        linear_attention(PerformerConfig(init=init, **options), causal=causal) for init in ("moments", "random")
    )
    inputs = qkv(30)
    torch.testing.assert_close(ours(*inputs, scale=SCALE), theirs(*inputs, scale=SCALE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("moments", [some_moments, moments_of_gaussians])
@BOTH_SIDES
def test_learned_features_of_moments_start_as_positive_ones(side: str, moments: Any) -> None:
    learned, positive = make_map("learned"), make_map("positive")
    for feature_map in (learned, positive):
        feature_map.set_moments(moments())
    x = torch.randn(2, 2, 5, DIM, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        learned(x, side, SCALE).log2_phi, positive(x, side, SCALE).log2_phi, rtol=1e-4, atol=1e-4
    )


def test_learned_features_of_moments_train_every_parameter() -> None:
    learned = make_map("learned")
    assert {name for name, _ in learned.named_parameters()} == {
        f"{side}_{what}" for side in ("query", "key") for what in ("directions", "offset", "transform")
    }
    learned(torch.randn(2, 2, 5, DIM), "query").log2_phi.square().sum().backward()
    for name, parameter in learned.named_parameters():
        assert (parameter.grad is not None) == name.startswith("query_")


@ALL_MATCHED
@pytest.mark.parametrize("causal", [False, True])
def test_matched_features_come_nearer_to_softmax(feature_map: str, causal: bool) -> None:
    query, key = (x[None, :, :64] for x in gaussians())
    value = torch.randn(1, 2, 64, DIM, generator=torch.Generator().manual_seed(1))
    past = torch.ones(1, 64, 64).tril().bool() if causal else None
    expected = softmax_attention(query * SCALE, key, value, past)
    errors = []
    for calibrated in (False, True):
        error = 0.0
        for seed in range(20):
            config = PerformerConfig(num_features=16, feature_map=feature_map, init="moments")
            layer = linear_attention(config, causal=causal, head_dim=DIM, seed=seed)
            if calibrated:
                layer.feature_map.set_moments(moments_of_gaussians())
            with torch.no_grad():
                error += float((layer(query, key, value, scale=SCALE) - expected).square().mean())
        errors.append(error)
    assert errors[1] < 0.9 * errors[0]


@ALL_MATCHED
def test_moments_are_saved_with_the_module(feature_map: str) -> None:
    saved, loaded = with_moments(make_map(feature_map)), make_map(feature_map)
    x = torch.randn(2, 2, 5, DIM)
    assert not torch.allclose(saved(x, "query").log2_phi, loaded(x, "query").log2_phi)
    loaded.load_state_dict(saved.state_dict())
    for side in ("query", "key"):
        assert torch.equal(saved(x, side).log2_phi, loaded(x, side).log2_phi)


@BOTH_SIDES
@ALL_MATCHED
def test_features_follow_every_change_of_the_map(feature_map: str, side: str) -> None:
    """Whoever writes into its tensors, and however."""
    changing, x = with_moments(make_map(feature_map)), torch.randn(2, 2, 5, DIM)
    other = with_moments(make_map(feature_map, seed=1))

    def scale_all() -> None:
        for tensor in (*changing.parameters(), *changing.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(0.9)

    def scale_data() -> None:
        # past autograd's counters, as safetensors, Accelerate and DeepSpeed write
        for tensor in (*changing.parameters(), *changing.buffers()):
            if tensor.is_floating_point():
                tensor.data.mul_(0.9)

    with torch.inference_mode():
        changing(x, side)
    assert changing(x.requires_grad_(), side).log2_phi.requires_grad
    x = x.detach()
    with torch.no_grad():
        for change in (
            changing.redraw,
            lambda: changing.set_moments(moments_of_gaussians()),
            lambda: changing.load_state_dict(other.state_dict()),
            lambda: changing.load_state_dict(make_map(feature_map, seed=2).state_dict(), assign=True),
            scale_all,
            scale_data,
            changing.double,
        ):
            change()
            fresh = make_map(feature_map)
            fresh.load_state_dict(changing.state_dict(), assign=True)
            assert torch.equal(changing(x, side).log2_phi, fresh(x, side).log2_phi)


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_follows_what_is_written_past_autograd(causal: bool) -> None:
    """A text that has begun goes on with the features that its sums were made with."""
    config = PerformerConfig(num_features=16, init="moments", window_size=4)
    layer, fresh = (linear_attention(config, causal=causal, head_dim=DIM) for _ in range(2))
    layer.feature_map.set_moments(moments_of_gaussians())
    query, key, value = (x.unsqueeze(0) for x in (*gaussians(), gaussians()[1]))
    with torch.no_grad():
        before = layer(query, key, value)
        cache, rest = LinAttnCacheLayer(), slice(1, None)
        if causal:
            layer(*(x[:, :, :1] for x in (query, key, value)), cache=cache)
        for name, tensor in layer.feature_map.named_buffers():
            if name == "directions":
                tensor.data.mul_(0.5)
        fresh.load_state_dict(layer.state_dict())
        out = layer(query, key, value)
        assert torch.equal(out, fresh(query, key, value))
        assert not torch.allclose(out, before, atol=1e-3)
        if causal:
            out = layer(*(x[:, :, rest] for x in (query, key, value)), cache=cache)
            torch.testing.assert_close(out, before[:, :, rest], rtol=1e-4, atol=1e-4)


def test_redrawing_keeps_the_moments() -> None:
    feature_map = with_moments(make_map("positive"))
    before = {name: tensor.clone() for name, tensor in feature_map.state_dict().items()}
    feature_map.redraw()
    changed = {name for name, tensor in feature_map.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"directions", "draws"}


@pytest.mark.parametrize("feature_map", [name for name in FEATURE_MAPS if name not in MATCHED])
def test_moments_of_a_map_that_has_none_are_refused(feature_map: str) -> None:
    with pytest.raises(ValueError, match=f"not one of 'random' for {FEATURE_MAPS[feature_map].__name__}"):
        make_map(feature_map)
    with pytest.raises(ValueError, match=f"init='moments' is not one of 'random' for feature_map='{feature_map}'"):
        PerformerConfig(feature_map=feature_map, init="moments")


# moments of each row


def row_map(feature_map: str, num_features: int = 8) -> FeatureMap:
    return make_map(feature_map, init="row_moments", num_features=num_features)


def rows_of(tokens: int, lengths: Tensor | None = None) -> Rows:
    return Rows(lengths, tokens, 0, torch.device("cpu"))


def test_the_transforms_of_a_row_balance_its_queries_and_keys() -> None:
    """A^T B = 1, and A (x - nu) and B y have one second moment: what calibration on the row gives, but for a turn."""
    query, key = (x.double().unsqueeze(0) for x in gaussians())
    directions = make_map("positive").draw().double()
    sides = match_row(query, key, rows_of(400), SCALE, directions)
    to_query, to_key = sides["query"].transform[0], sides["key"].transform[0]
    torch.testing.assert_close(to_query.mT @ to_key, torch.eye(DIM).double().expand(2, -1, -1), rtol=1e-6, atol=1e-6)
    x, y = query[0] * SCALE**0.5, key[0] * SCALE**0.5
    z, w = (x - x.mean(1, keepdim=True)) @ to_query.mT, y @ to_key.mT
    second = z.mT @ z / 400
    torch.testing.assert_close(second, w.mT @ w / 400, rtol=2e-3, atol=2e-3)
    calibrated = match_moments(query[0] * SCALE**0.5, key[0] * SCALE**0.5)
    deviations = (calibrated.query_transform.double() @ (x - x.mean(1, keepdim=True)).mT).square().mean(-1)
    torch.testing.assert_close(torch.linalg.eigvalsh(second), deviations.sort(-1).values, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("feature_map", ["positive", "hyperbolic"])
def test_features_of_a_row_are_an_unbiased_estimate_of_less_variance(feature_map: str) -> None:
    query, key = (x[:, :6] for x in gaussians())
    exact = (query.double() * key.double() * SCALE).sum(-1).exp()
    found: dict[str, list[Tensor]] = {"row_moments": [], "random": []}
    for init, estimates_of in found.items():
        for seed in range(400):
            chosen = make_map(feature_map, init=init, num_features=16, seed=seed)
            of_rows = chosen.of_rows(query[None], key[None], rows_of(6), SCALE)
            estimates_of.append(estimates(lambda x, side, f=of_rows: f(x, side, SCALE), query, key))
    matched_draws, plain = (torch.stack(x) for x in found.values())
    error = (matched_draws.mean(0) - exact).abs() / (matched_draws.std(0) / len(matched_draws) ** 0.5)
    assert error.max() < 4.5
    assert ((matched_draws / exact - 1).square().mean() < 0.7 * (plain / exact - 1).square().mean()).item()


@pytest.mark.parametrize("tokens", [1, 2, 5, 700])
def test_a_row_alone_is_the_row_in_a_batch(tokens: int) -> None:
    """However few tokens it has, and however much padding."""
    layer = linear_attention(PerformerConfig(num_features=16, init="row_moments"))
    query, key, value = qkv(800, scale=2.0)
    out = layer(query, key, value, torch.tensor([tokens, 0]))
    assert out.isfinite().all()
    alone = layer(*(x[:1, :, :tokens] for x in (query, key, value)))
    torch.testing.assert_close(out[:1, :, :tokens], alone, rtol=1e-4, atol=1e-4)


def test_a_change_of_the_last_bit_changes_little() -> None:
    """Nothing depends on the sign or the order of eigenvectors; keys that are one direction, over and over, too."""
    layer = linear_attention(PerformerConfig(num_features=16, init="row_moments"))
    query, key, value = qkv(60)
    for keys in (key, key[..., :1].expand_as(key), torch.ones_like(key)):
        out = layer(query, keys, value)
        torch.testing.assert_close(layer(query, keys * (1 + 1e-6), value), out, rtol=1e-3, atol=1e-3)


def test_a_decoder_has_no_moments_of_rows() -> None:
    with pytest.raises(ValueError, match="init='row_moments' cannot be causal"):
        linear_attention(PerformerConfig(num_features=16, init="row_moments"), causal=True)
