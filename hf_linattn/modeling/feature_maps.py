"""Feature maps phi with E[phi(q) . phi(k)] = exp(q . k), and those that only resemble it.

Every map is given as phi(x) = factor(x) * 2 ** log2_phi(x), so that whoever adds features up can move a
common scale out of the exponent first (why base 2: see `merge`). Inputs are queries and keys (batch,
heads, length, head_dim), and the softmax scale: features are of x * sqrt(scale), which is never formed.

Sources: Choromanski et al. 2021, "Rethinking Attention with Performers" (arXiv:2009.14794), Lemma 1 and
2 and section 2.4; Katharopoulos et al. 2020 (arXiv:2006.16236), equation 7, for `elu`.
"""

import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .far_part import Rows
from .merge import LOG2_E
from .moments import Moments, Side, match_row, neutral_moments, side_of

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
    log2_phi = _products(x, directions, scale**0.5 * LOG2_E)
    if offset is not None:
        offset = offset * LOG2_E
        log2_phi = log2_phi + offset if torch.is_grad_enabled() else log2_phi.add_(offset)
    if half_square is not None:
        # added up first: one pass over the features fewer
        common = (half_square + math.log(directions.shape[-2]) / 2) * LOG2_E
        log2_phi = log2_phi - common if torch.is_grad_enabled() else log2_phi.sub_(common)
    return log2_phi


def _products(x: Tensor, directions: Tensor, scale: float) -> Tensor:
    """Products of x (batch, heads, length, dim) and the directions (heads or batch, heads, m, dim), times the scale."""
    # what is small is scaled, and not the product
    if x.shape[-2] > 1 or directions.ndim > 3:
        return x @ (directions * scale).mT
    # one token per row: one product for all rows, which would else have directions of their own, copied for each
    return ((x * scale).transpose(0, 2) @ directions.mT).transpose(0, 2)


def _square(x: Tensor) -> Tensor:
    """|x|^2 of the last dimension, which stays, with length 1."""
    # by the norm: one pass over x, where squaring and adding up are two
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()


def moment_matched_features(x: Tensor, side: Side, scale: float = 1.0, relative: bool = False) -> Features:
    """Positive features of little variance for queries and keys of some moments: an unbiased estimate of exp(q.k).

    (OPRF, Likhosherstov et al. 2022, arXiv:2205.15317, with one tilt for all coordinates; DERF, Likhosherstov et al.
    2023, arXiv:2302.00787, with matrices; see `moments`.) Arguments else as in `positive_features`.
    """
    half_square = None
    if not relative:
        z = x @ (side.transform.to(x.dtype) * scale**0.5).mT
        half_square = _square(z if side.center is None else z - side.center.to(x.dtype)) / 2
    return Features(_log2_positive(x, side.directions.to(x.dtype), half_square, scale, side.offset.to(x.dtype)), None)


def trigonometric_features(x: Tensor, directions: Tensor, scale: float = 1.0, relative: bool = False) -> Features:
    """exp(|x|^2 / 2) (cos w.x, sin w.x) / sqrt(m), two per direction (equation 5); may have negative mass.

    relative: leave out the exponential.
    """
    angle = _products(x, directions, scale**0.5)
    log2_phi = (
        torch.zeros_like(x[..., :1])
        if relative
        else _square(x) * (scale / 2 * LOG2_E) - math.log2(directions.shape[-2]) / 2
    )
    return Features(log2_phi, torch.cat((angle.cos(), angle.sin()), dim=-1))


def relu_features(x: Tensor, directions: Tensor, scale: float = 1.0, relative: bool = False) -> Features:
    """(relu(w.x) + 0.001) / sqrt(m): generalized attention, not an estimate of exp(q.k) (section 2.2)."""
    factor = (F.relu(_products(x, directions, scale**0.5)) + _RELU_EPSILON) / math.sqrt(directions.shape[-2])
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
        init: "random", or, for a map that can be matched to the moments of queries and keys, "moments" (`set_moments`)
            or "row_moments" (`of_rows`).

    Attributes:
        signed: features can be negative, so that an estimated mass can come out as zero or below.
        inits: which there are.
        features_per_direction: how many features share one direction.
        num_directions: how many directions there are per head.

    Raises:
        ValueError: `num_features` is no multiple of `features_per_direction`.
    """

    signed: ClassVar[bool] = False
    inits: ClassVar[tuple[str, ...]] = ("random",)
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
        if init not in self.inits:
            raise ValueError(
                f"init={init!r} is not one of {', '.join(map(repr, self.inits))} for {type(self).__name__}."
            )
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

    def set_moments(self, moments: Moments) -> None:
        """Match the features to queries and keys of these moments, with `init="moments"`."""
        raise NotImplementedError

    def of_now(self, dtype: torch.dtype) -> Any:
        """The map as its tensors are now, for inputs of this dtype, called as this one is: of one pass, or one text."""
        return self

    def of_rows(self, query: Tensor, key: Tensor, rows: Rows, scale: float) -> Any:
        """The map for queries and keys (batch, heads, length, dim) of these rows, called as this one is."""
        return self.of_now(query.dtype)

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
            for name, tensor in neutral_moments(self.num_heads, self.head_dim)._asdict().items():
                self.register_buffer(name, torch.empty_like(tensor))

    def set_tensors(self) -> None:
        init.copy_(self.directions, self.draw())
        init.zeros_(self.draws)
        if self.init == "moments":
            for name, tensor in neutral_moments(self.num_heads, self.head_dim)._asdict().items():
                init.copy_(getattr(self, name), tensor)

    @torch.no_grad()
    def set_moments(self, moments: Moments) -> None:
        for name, tensor in moments._asdict().items():
            getattr(self, name).copy_(tensor)

    @property
    def moments(self) -> Moments | None:
        """What the map was matched to; None but with `init="moments"`."""
        if self.init != "moments":
            return None
        return Moments(self.mean, self.query_transform, self.key_transform, self.tilt)

    @torch.no_grad()
    def redraw(self) -> None:
        self.draws = self.draws + 1
        # a new tensor, not a write into the old one: a backward pass may still need that
        self.directions = self.draw(int(self.draws)).to(self.directions)


class PositiveMap(RandomFeatureMap):
    """FAVOR+: see `positive_features`, and `moment_matched_features`."""

    inits = ("random", "moments", "row_moments")

    def all_directions(self) -> Tensor:
        """One for each feature, (heads, num_features, head_dim)."""
        return self.directions

    def of_now(self, dtype: torch.dtype) -> Any:
        if self.moments is None:
            return self
        # made once: that takes longer than the features of a token
        return _MatchedMap({side: self._matched(side, dtype, self.moments) for side in ("query", "key")})

    def of_rows(self, query: Tensor, key: Tensor, rows: Rows, scale: float) -> Any:
        if self.init != "row_moments":
            return self.of_now(query.dtype)
        return _MatchedMap(match_row(query, key, rows, scale, self.all_directions()))

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        if self.moments is not None:
            return moment_matched_features(x, self._matched(side, x.dtype, self.moments), scale, relative)
        return positive_features(x, self.all_directions().to(x.dtype), scale, relative)

    def _matched(self, side: str, dtype: torch.dtype, moments: Moments) -> Side:
        return side_of(self.all_directions().to(dtype), moments, side)


class HyperbolicMap(PositiveMap):
    """exp(+-w.x - |x|^2 / 2) / sqrt(2 m), two per direction (Lemma 1, the hyperbolic cosine estimator)."""

    features_per_direction = 2

    def all_directions(self) -> Tensor:
        return torch.cat((self.directions, -self.directions), dim=-2)


class _MatchedMap:
    """Features that are matched to given moments, or to the queries and keys of some rows."""

    signed = False

    def __init__(self, sides: dict[str, Side]) -> None:
        self.sides = sides

    def __call__(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        return moment_matched_features(x, self.sides[side], scale, relative)


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

    inits = ("random", "moments")

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
        for name, tensor in self._start(neutral_moments(self.num_heads, self.head_dim)).items():
            init.copy_(getattr(self, name), tensor)

    @torch.no_grad()
    def set_moments(self, moments: Moments) -> None:
        for name, tensor in self._start(moments).items():
            getattr(self, name).copy_(tensor)

    def _start(self, moments: Moments) -> dict[str, Tensor]:
        """Values of the parameters with which the features are those of `moment_matched_features`."""
        values: dict[str, Tensor] = {}
        for side in ("query", "key"):
            directions, offset, transform, center = side_of(self.draw(), moments, side)
            if center is not None:
                # |T x - t|^2 / 2, written out for the trained form, which has |T x|^2 / 2
                directions = directions + center @ transform
                offset = offset - center.square().sum(-1, keepdim=True) / 2
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
