"""Feature maps phi with E[phi(q) . phi(k)] = exp(q . k), and those that only resemble it.

Every map is given as phi(x) = factor(x) * 2 ** log2_phi(x), so that whoever adds features up can move a
common scale out of the exponent first (why base 2: see `merge`). Inputs are queries and keys (batch,
heads, length, head_dim), and the softmax scale: features are of x * sqrt(scale), which is never formed.

Sources: Choromanski et al. 2021, "Rethinking Attention with Performers" (arXiv:2009.14794), Lemma 1 and
2 and section 2.4; Katharopoulos et al. 2020 (arXiv:2006.16236), equation 7, for `elu`.
"""

import math
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .merge import LOG2_E

# relu features may all be zero: the constant of the authors' code keeps every key visible
_RELU_EPSILON = 1e-3


class Features(NamedTuple):
    """phi = factor * 2 ** log2_phi; either may have a last dimension of 1, `factor` may be None for ones."""

    log2_phi: Tensor
    factor: Tensor | None


def random_directions(
    num_directions: int, head_dim: int, *, orthogonal: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Gaussian directions, shape (num_directions, head_dim), float32, on the CPU.

    Orthogonal ones are independent blocks of at most `head_dim` exactly orthogonal rows whose norms are
    drawn as those of Gaussian vectors (arXiv:2009.14794, section 2.4), so that each row alone is still
    Gaussian and the estimate stays unbiased.
    """
    if not orthogonal:
        return torch.randn(num_directions, head_dim, generator=generator, device="cpu", dtype=torch.float32)
    blocks = -(-num_directions // head_dim)
    gaussian = torch.randn(blocks, head_dim, head_dim, generator=generator, device="cpu", dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    # the sign makes Q uniform over all rotations, whatever convention the QR routine has
    rotations = q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
    norms = torch.randn(blocks * head_dim, head_dim, generator=generator, device="cpu", dtype=torch.float64)
    # blocks of rotations become one list of rows
    rows = rotations.transpose(-1, -2).reshape(-1, head_dim) * norms.norm(dim=-1, keepdim=True)
    return rows[:num_directions].to(torch.float32)


def positive_features(x: Tensor, directions: Tensor, scale: float = 1.0, relative: bool = False) -> Features:
    """FAVOR+ features exp(w.x - |x|^2 / 2) / sqrt(m), one per direction (Lemma 1); directions (heads, m, d).

    relative: leave out what does not depend on the direction.
    """
    return Features(_log2_positive(x, directions, None if relative else _square(x) * scale / 2, scale), None)


def _log2_positive(
    x: Tensor, directions: Tensor, half_square: Tensor | None, scale: float, offset: Tensor | None = None
) -> Tensor:
    """(sqrt(scale) w.x + offset - half_square - log(m) / 2) * log2(e), in place where no gradient is asked for.

    Without half_square, (sqrt(scale) w.x + offset) * log2(e).
    """
    # what is small is scaled, and not the product
    log2_phi = x @ (directions * (scale**0.5 * LOG2_E)).transpose(-1, -2)
    if offset is not None:
        offset = offset * LOG2_E
        log2_phi = log2_phi + offset if torch.is_grad_enabled() else log2_phi.add_(offset)
    if half_square is not None:
        # added up first: one pass over the features fewer
        common = (half_square + math.log(directions.shape[-2]) / 2) * LOG2_E
        log2_phi = log2_phi - common if torch.is_grad_enabled() else log2_phi.sub_(common)
    return log2_phi


def _square(x: Tensor) -> Tensor:
    """|x|^2 of the last dimension, which stays, with length 1."""
    # by the norm: one pass over x, where squaring and adding up are two
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()


def hyperbolic_features(x: Tensor, directions: Tensor, scale: float = 1.0, relative: bool = False) -> Features:
    """exp(+-w.x - |x|^2 / 2) / sqrt(2 m), two per direction (Lemma 1, the hyperbolic cosine estimator).

    relative: leave out what does not depend on the direction.
    """
    return positive_features(x, torch.cat((directions, -directions), dim=-2), scale, relative)


class Moments(NamedTuple):
    """What features are matched to, per head, in the space of x = q sqrt(scale) and y = k sqrt(scale).

    With nu the mean of x: exp(x.y) = exp(nu.y) exp((x - nu).y) = exp(nu.y) exp((A (x - nu)).(B y)), where A^T B = 1.

    mean: nu, (heads, dim).
    query_transform, key_transform: A and B, (heads, dim, dim).
    tilt: a, (heads, dim), below 1 / 8: how far directions are weighted towards short ones.
    """

    mean: Tensor
    query_transform: Tensor
    key_transform: Tensor
    tilt: Tensor


def _neutral_moments(num_heads: int, head_dim: int) -> Moments:
    """Those with which the features are FAVOR+'s."""
    identity = torch.eye(head_dim).repeat(num_heads, 1, 1)
    return Moments(torch.zeros(num_heads, head_dim), identity, identity.clone(), torch.zeros(num_heads, head_dim))


def _matched(directions: Tensor, moments: Moments, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """D (heads, m, dim), c (heads, 1, m) and T of features exp(D.x + c - |T (x - nu)|^2 / 2), nu for queries only."""
    mean, query_transform, key_transform, tilt = (x.to(directions.dtype) for x in moments)
    transform = query_transform if side == "query" else key_transform
    weighted = (directions * (1 - 4 * tilt).sqrt().unsqueeze(-2)) @ transform
    constant = directions.square() @ tilt.unsqueeze(-1) + (1 - 4 * tilt).log().sum(-1)[:, None, None] / 4
    if side == "query":
        constant = constant - weighted @ mean.unsqueeze(-1)
    else:
        weighted = weighted + mean.unsqueeze(-2)
    return weighted, constant.transpose(-1, -2), transform


def moment_matched_features(
    x: Tensor, directions: Tensor, moments: Moments, side: str, scale: float = 1.0, relative: bool = False
) -> Features:
    """Positive features of little variance for queries and keys of these moments: an unbiased estimate of exp(q.k).

    With z = A (x - nu) or B y, b = sqrt(1 - 4 a) and the factor exp(nu.y) of keys,

        phi_m = exp(sum_l (a_l w_ml^2 + b_l w_ml z_l + log(1 - 4 a_l) / 4) - |z|^2 / 2) / sqrt(m)

    (OPRF, Likhosherstov et al. 2022, arXiv:2205.15317, with one a for all coordinates; DERF, Likhosherstov et al. 2023,
    arXiv:2302.00787, with matrices). Arguments else as in `positive_features`.
    """
    weighted, constant, transform = _matched(directions, moments, side)
    half_square = None
    if not relative:
        z = x @ (transform * scale**0.5).transpose(-1, -2)
        if side == "query":
            # (heads, 1, dim)
            z = z - (transform @ moments.mean.to(x.dtype).unsqueeze(-1)).transpose(-1, -2)
        half_square = _square(z) / 2
    return Features(_log2_positive(x, weighted, half_square, scale, constant), None)


def trigonometric_features(x: Tensor, directions: Tensor, scale: float = 1.0, relative: bool = False) -> Features:
    """exp(|x|^2 / 2) (cos w.x, sin w.x) / sqrt(m), two per direction (equation 5); may have negative mass.

    relative: leave out the exponential.
    """
    angle = x @ (directions * scale**0.5).transpose(-1, -2)
    log2_phi = (
        torch.zeros_like(x[..., :1])
        if relative
        else _square(x) * (scale / 2 * LOG2_E) - math.log2(directions.shape[-2]) / 2
    )
    return Features(log2_phi, torch.cat((angle.cos(), angle.sin()), dim=-1))


def relu_features(x: Tensor, directions: Tensor, scale: float = 1.0, relative: bool = False) -> Features:
    """(relu(w.x) + 0.001) / sqrt(m): generalized attention, not an estimate of exp(q.k) (section 2.2)."""
    factor = (F.relu(x @ (directions * scale**0.5).transpose(-1, -2)) + _RELU_EPSILON) / math.sqrt(directions.shape[-2])
    return Features(torch.zeros_like(x[..., :1]), factor)


def elu_features(x: Tensor) -> Features:
    """(elu(x) + 1) / sqrt(d), one per dimension: no directions, not an estimate of exp(q.k)."""
    return Features(torch.zeros_like(x[..., :1]), (F.elu(x) + 1) / math.sqrt(x.shape[-1]))


class FeatureMap(nn.Module):
    """One layer's feature map for queries and for keys. Subclasses are registered in `FEATURE_MAPS`.

    Args:
        num_features: length m of phi.
        orthogonal: orthogonal or independent directions.
        seed: seed of the layer's directions, drawn per head.
        init: "random", or "moments" for a map that can be matched to the moments of queries and keys (`set_moments`).

    Attributes:
        signed: features can be negative, so that an estimated mass can come out as zero or below.
        matches_moments: there is an `init="moments"`.
        features_per_direction: how many features share one direction.
        num_directions: how many directions there are per head.

    Raises:
        ValueError: `num_features` is no multiple of `features_per_direction`.
    """

    signed: ClassVar[bool] = False
    matches_moments: ClassVar[bool] = False
    features_per_direction: ClassVar[int] = 1

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_features: int,
        orthogonal: bool,
        seed: int,
        init: str = "random",
    ) -> None:
        super().__init__()
        if init != "random" and not self.matches_moments:
            raise ValueError(f"init={init!r} must be 'random' for {type(self).__name__}.")
        if num_features % self.features_per_direction:
            raise ValueError(
                f"num_features={num_features} must be a multiple of {self.features_per_direction} for "
                f"{type(self).__name__}."
            )
        self.num_heads, self.head_dim, self.num_features = num_heads, head_dim, num_features
        self.orthogonal, self.seed, self.init = orthogonal, seed, init
        self.make_tensors()
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        return self.num_features // self.features_per_direction

    def make_tensors(self) -> None:
        """Register parameters and buffers, without values."""

    def draw(self, count: int = 0) -> Tensor:
        """The directions of the `count`-th draw from the seed, (heads, num_directions, head_dim)."""
        generator = torch.Generator("cpu").manual_seed(self.seed + 7919 * count)
        draw = partial(random_directions, orthogonal=self.orthogonal, generator=generator)
        return torch.stack([draw(self.num_directions, self.head_dim) for _ in range(self.num_heads)])

    def set_tensors(self) -> None:
        """Give parameters and buffers their initial values, through `transformers.initialization`."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill whatever was not loaded from a checkpoint; nothing on the meta device."""
        if not any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self.set_tensors()

    def redraw(self) -> None:
        """Draw the random directions anew, where there are any."""

    def set_moments(self, moments: "Moments") -> None:
        """Match the features to queries and keys of these moments, with `init="moments"`."""
        raise NotImplementedError

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        """Features of queries or keys x (batch, heads, length, head_dim), float32.

        Args:
            side: "query" or "key".
            scale: of the softmax.
            relative: leave out, where that is less work, what multiplies all features of a token alike. Of queries
                it cancels where nothing but features is summed up.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}, orthogonal={self.orthogonal}, seed={self.seed}"


class RandomFeatureMap(FeatureMap):
    """A feature map with random directions in a buffer, the same for queries and keys."""

    directions: Tensor
    draws: Tensor
    mean: Tensor
    query_transform: Tensor
    key_transform: Tensor
    tilt: Tensor

    def make_tensors(self) -> None:
        self.register_buffer("directions", torch.empty(self.num_heads, self.num_directions, self.head_dim))
        # how often the directions were drawn anew: recorded, so that a resumed run draws the same ones
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))
        if self.init == "moments":
            for name, tensor in _neutral_moments(self.num_heads, self.head_dim)._asdict().items():
                self.register_buffer(name, torch.empty_like(tensor))

    def set_tensors(self) -> None:
        init.copy_(self.directions, self.draw())
        init.zeros_(self.draws)
        if self.init == "moments":
            for name, tensor in _neutral_moments(self.num_heads, self.head_dim)._asdict().items():
                init.copy_(getattr(self, name), tensor)

    @torch.no_grad()
    def set_moments(self, moments: Moments) -> None:
        for name, tensor in moments._asdict().items():
            getattr(self, name).copy_(tensor)

    @property
    def moments(self) -> Moments | None:
        """What the map was matched to; None with `init="random"`."""
        if self.init == "random":
            return None
        return Moments(self.mean, self.query_transform, self.key_transform, self.tilt)

    @torch.no_grad()
    def redraw(self) -> None:
        self.draws = self.draws + 1
        # a new tensor, not a write into the old one: a backward pass may still need that
        self.directions = self.draw(int(self.draws)).to(self.directions)


class PositiveMap(RandomFeatureMap):
    """FAVOR+: see `positive_features`, and `moment_matched_features`."""

    matches_moments = True

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        if self.moments is not None:
            return moment_matched_features(x, self.directions.to(x.dtype), self.moments, side, scale, relative)
        return positive_features(x, self.directions.to(x.dtype), scale, relative)


class HyperbolicMap(RandomFeatureMap):
    """See `hyperbolic_features`, and `moment_matched_features`."""

    matches_moments = True
    features_per_direction = 2

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        if self.moments is not None:
            directions = torch.cat((self.directions, -self.directions), dim=-2).to(x.dtype)
            return moment_matched_features(x, directions, self.moments, side, scale, relative)
        return hyperbolic_features(x, self.directions.to(x.dtype), scale, relative)


class TrigonometricMap(RandomFeatureMap):
    """See `trigonometric_features`."""

    signed = True
    features_per_direction = 2

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return trigonometric_features(x, self.directions.to(x.dtype), scale, relative)


class ReluMap(RandomFeatureMap):
    """See `relu_features`."""

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return relu_features(x, self.directions.to(x.dtype), scale, relative)


class EluMap(FeatureMap):
    """See `elu_features`: one feature per dimension, whatever `num_features`."""

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return elu_features(x * scale**0.5)


class LearnedMap(FeatureMap):
    """Starts as `PositiveMap`; then trains, per head and apart for queries and keys, the directions, an offset per
    feature and the weight of |x|^2, or, with `init="moments"`, the matrix T of |T x|^2."""

    matches_moments = True

    def make_tensors(self) -> None:
        for side in ("query", "key"):
            directions = torch.empty(self.num_heads, self.num_directions, self.head_dim)
            self.register_parameter(f"{side}_directions", nn.Parameter(directions))
            self.register_parameter(f"{side}_offset", nn.Parameter(torch.empty(self.num_heads, 1, self.num_features)))
            if self.init == "moments":
                transform = torch.empty(self.num_heads, self.head_dim, self.head_dim)
                self.register_parameter(f"{side}_transform", nn.Parameter(transform))
            else:
                self.register_parameter(f"{side}_square", nn.Parameter(torch.empty(self.num_heads, 1, 1)))

    def set_tensors(self) -> None:
        # both sides start with the same draw: only then is phi(q) . phi(k) an estimate of exp(q.k)
        for name, tensor in self._start(_neutral_moments(self.num_heads, self.head_dim)).items():
            init.copy_(getattr(self, name), tensor)

    @torch.no_grad()
    def set_moments(self, moments: Moments) -> None:
        for name, tensor in self._start(moments).items():
            getattr(self, name).copy_(tensor)

    def _start(self, moments: Moments) -> dict[str, Tensor]:
        """Values of the parameters with which the features are those of `moment_matched_features`."""
        values: dict[str, Tensor] = {}
        for side in ("query", "key"):
            directions, offset, transform = _matched(self.draw(), moments, side)
            if side == "query":
                # |T (x - mean)|^2 / 2, written out for the trained form, which has |T x|^2 / 2
                shifted = transform @ moments.mean.unsqueeze(-1)
                directions = directions + (transform.transpose(-1, -2) @ shifted).transpose(-1, -2)
                offset = offset - shifted.square().sum(-2, keepdim=True) / 2
            values |= {f"{side}_directions": directions, f"{side}_offset": offset}
            if self.init == "moments":
                values[f"{side}_transform"] = transform
            else:
                values[f"{side}_square"] = torch.ones(self.num_heads, 1, 1)
        return values

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        directions = getattr(self, f"{side}_directions").to(x.dtype)
        if relative:
            square = None
        elif self.init == "moments":
            square = _square(x @ getattr(self, f"{side}_transform").to(x.dtype).transpose(-1, -2)) * (scale / 2)
        else:
            square = getattr(self, f"{side}_square") * (_square(x) * (scale / 2))
        return Features(_log2_positive(x, directions, square, scale, getattr(self, f"{side}_offset")), None)


#: name in `PerformerConfig.feature_map` -> class
FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "positive": PositiveMap,
    "hyperbolic": HyperbolicMap,
    "trigonometric": TrigonometricMap,
    "relu": ReluMap,
    "elu": EluMap,
    "learned": LearnedMap,
}
