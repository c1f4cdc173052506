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

    Attributes:
        signed: features can be negative, so that an estimated mass can come out as zero or below.
        features_per_direction: how many features share one direction.
        num_directions: how many directions there are per head.

    Raises:
        ValueError: `num_features` is no multiple of `features_per_direction`.
    """

    signed: ClassVar[bool] = False
    features_per_direction: ClassVar[int] = 1

    def __init__(self, *, num_heads: int, head_dim: int, num_features: int, orthogonal: bool, seed: int) -> None:
        super().__init__()
        if num_features % self.features_per_direction:
            raise ValueError(
                f"num_features={num_features} must be a multiple of {self.features_per_direction} for "
                f"{type(self).__name__}."
            )
        self.num_heads, self.head_dim, self.num_features = num_heads, head_dim, num_features
        self.orthogonal, self.seed = orthogonal, seed
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

    def make_tensors(self) -> None:
        self.register_buffer("directions", torch.empty(self.num_heads, self.num_directions, self.head_dim))
        # how often the directions were drawn anew: recorded, so that a resumed run draws the same ones
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))

    def set_tensors(self) -> None:
        init.copy_(self.directions, self.draw())
        init.zeros_(self.draws)

    @torch.no_grad()
    def redraw(self) -> None:
        self.draws = self.draws + 1
        # a new tensor, not a write into the old one: a backward pass may still need that
        self.directions = self.draw(int(self.draws)).to(self.directions)


class PositiveMap(RandomFeatureMap):
    """FAVOR+: see `positive_features`."""

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return positive_features(x, self.directions.to(x.dtype), scale, relative)


class HyperbolicMap(RandomFeatureMap):
    """See `hyperbolic_features`."""

    features_per_direction = 2

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
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
    feature and the weight of |x|^2."""

    def make_tensors(self) -> None:
        for side in ("query", "key"):
            directions = torch.empty(self.num_heads, self.num_directions, self.head_dim)
            self.register_parameter(f"{side}_directions", nn.Parameter(directions))
            self.register_parameter(f"{side}_offset", nn.Parameter(torch.empty(self.num_heads, 1, self.num_features)))
            self.register_parameter(f"{side}_square", nn.Parameter(torch.empty(self.num_heads, 1, 1)))

    def set_tensors(self) -> None:
        for side in ("query", "key"):
            # both sides start with the same draw: only then is phi(q) . phi(k) an estimate of exp(q.k)
            init.copy_(getattr(self, f"{side}_directions"), self.draw())
            init.zeros_(getattr(self, f"{side}_offset"))
            init.ones_(getattr(self, f"{side}_square"))

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        directions = getattr(self, f"{side}_directions").to(x.dtype)
        square = None if relative else getattr(self, f"{side}_square") * (_square(x) * (scale / 2))
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
