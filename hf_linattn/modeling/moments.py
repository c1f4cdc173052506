"""What random features are matched to: the first two moments of queries and keys, in closed form.

With x and y the queries and keys of a head, each multiplied by the square root of the softmax scale, nu the mean of x,

    exp(x.y) = exp(nu.y) exp((A (x - nu)).(B y))    for any A and B with A^T B = 1

and features estimate the last factor with the less variance, the smaller A (x - nu) + B y is. With M1 = Cov(x),
M2 = E[y y^T] = R R^T (Cholesky) and R^T M1 R = U diag(s^2) U^T,

    A = diag(s^-1/2) U^T R^T,  B = diag(s^1/2) U^T R^-1,  so that Cov(A (x - nu)) = E[B y (B y)^T] = diag(s)
    a_l = (1 - 2 phi_l - sqrt((2 phi_l + 1)^2 + 8 phi_l)) / 16,  phi_l = 2 s_l

a_l is the tilt of least variance (Likhosherstov et al. 2022, arXiv:2205.15317, theorem 3, for each coordinate; the
matrices as in Likhosherstov et al. 2023, arXiv:2302.00787). Moments come from calibration texts, or, in an encoder,
from each row's own queries and keys. Those of a row are turned back by U: eigenvectors are unique up to their sign and
their order, and features that change with them would change with rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import at, spaced_positions
from .far_part import Rows

# Share of the mean variance that is added to each direction: no direction of a sample is without variance.
_RIDGE = 1e-4
#: Queries and keys of a row that its moments are the means over, at equally spaced ranks.
ROW_TOKENS = 512


class Moments(NamedTuple):
    """What features are matched to, per head: see above.

    mean: nu, (heads, dim).
    query_transform, key_transform: A and B, (heads, dim, dim).
    tilt: a, (heads, dim), below 1 / 8: how far directions are weighted towards short ones.
    """

    mean: Tensor
    query_transform: Tensor
    key_transform: Tensor
    tilt: Tensor


class Side(NamedTuple):
    """Features exp(D.x + c - |T x - t|^2 / 2) / sqrt(m) of queries x, or of keys, where t = 0.

    directions: D, (heads or batch, heads, m, dim).
    offset: c, (..., 1, m).
    transform: T, (..., dim, dim).
    center: t, (..., 1, dim); None for keys.
    """

    directions: Tensor
    offset: Tensor
    transform: Tensor
    center: Tensor | None


def neutral_moments(num_heads: int, head_dim: int) -> Moments:
    """Those with which the features are FAVOR+'s."""
    identity = torch.eye(head_dim).repeat(num_heads, 1, 1)
    return Moments(torch.zeros(num_heads, head_dim), identity, identity.clone(), torch.zeros(num_heads, head_dim))


def side_of(directions: Tensor, moments: Moments, side: str) -> Side:
    """What features of queries or of keys have in place of directions (heads, m, dim).

    With z = A (x - nu) or B y, b = sqrt(1 - 4 a) and the factor exp(nu.y) of keys,

        phi_m = exp(sum_l (a_l w_ml^2 + b_l w_ml z_l + log(1 - 4 a_l) / 4) - |z|^2 / 2) / sqrt(m)
    """
    mean, query_transform, key_transform, tilt = (x.to(directions.dtype) for x in moments)
    stretched = directions * (1 - 4 * tilt).sqrt().unsqueeze(-2)
    constant = directions.square() @ tilt.unsqueeze(-1) + (1 - 4 * tilt).log().sum(-1)[..., None, None] / 4
    transform = query_transform if side == "query" else key_transform
    return _side(stretched @ transform, constant, transform, mean, side)


def _side(weighted: Tensor, constant: Tensor, transform: Tensor, mean: Tensor, side: str) -> Side:
    """Args: D of A (x - nu) or B y (..., m, dim); its constant (..., m, 1); A or B; nu (..., dim)."""
    if side == "key":
        return Side(weighted + mean.unsqueeze(-2), constant.mT, transform, None)
    constant = constant - weighted @ mean.unsqueeze(-1)
    return Side(weighted, constant.mT, transform, (transform @ mean.unsqueeze(-1)).mT)


@torch.no_grad()
def match_moments(query: Tensor, key: Tensor) -> Moments:
    """The moments of queries and keys (heads, tokens, head_dim), multiplied by the square root of the softmax scale."""
    query, key = query.double(), key.double()
    mean = query.mean(1)
    centered = query - mean.unsqueeze(1)
    root, deviation, basis = _balance(centered.mT @ centered / query.shape[1], key.mT @ key / key.shape[1])
    roots = deviation.sqrt().unsqueeze(-1)
    to_query = basis.mT @ root.mT / roots
    to_key = roots * _solved(root, basis).mT
    return Moments(mean.float(), to_query.float(), to_key.float(), _tilt(2 * deviation).float())


@torch.no_grad()
def match_row(query: Tensor, key: Tensor, rows: Rows, scale: float, directions: Tensor) -> dict[str, Side]:
    """What features have for each row's own queries and keys (batch, heads, length, dim), by side.

    directions: (heads, m, dim). All of the result are float32 or float64, (batch, heads, ...).
    """
    positions, valid = spaced_positions(rows.valid_lengths, ROW_TOKENS)
    dtype = torch.promote_types(query.dtype, torch.float32)
    count = valid.sum(1).clamp_min(1)[:, None, None, None]
    # zeros where a row has fewer tokens: (batch or 1, 1, tokens, 1)
    valid = valid[:, None, :, None]
    query, key = (at(x.detach(), positions).to(dtype) * (valid * scale**0.5) for x in (query, key))
    mean = query.sum(2, keepdim=True) / count
    centered = (query - mean) * valid
    root, deviation, basis = _balance(centered.mT @ centered / count, key.mT @ key / count)

    def function(values: Tensor) -> Tensor:
        """The matrix of these eigenvalues."""
        return (basis * values.unsqueeze(-2)) @ basis.mT

    tilt = _tilt(2 * deviation)
    stretched = directions.to(dtype) @ function((1 - 4 * tilt).sqrt())
    constant = ((directions.to(dtype) @ function(tilt)) * directions).sum(-1, keepdim=True)
    constant = constant + (1 - 4 * tilt).log().sum(-1)[..., None, None] / 4
    to_query, to_key = function(deviation.rsqrt()) @ root.mT, _solved(root, function(deviation.sqrt())).mT
    return {
        side: _side(stretched @ transform, constant, transform, mean.squeeze(2), side)
        for side, transform in (("query", to_query), ("key", to_key))
    }


def _balance(query_moment: Tensor, key_moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R, s (..., dim) and U of moments (..., dim, dim)."""
    query_moment, key_moment = _regularized(query_moment), _regularized(key_moment)
    root = torch.linalg.cholesky(key_moment)
    squares, basis = torch.linalg.eigh(root.mT @ query_moment @ root)
    # rounding may leave what is smallest below zero
    least = squares[..., -1:] * torch.finfo(squares.dtype).eps
    return root, squares.clamp_min(least.clamp_min(torch.finfo(squares.dtype).tiny)).sqrt(), basis


def _regularized(moment: Tensor) -> Tensor:
    variance = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-6)
    return moment + _RIDGE * variance * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)


def _solved(root: Tensor, right: Tensor) -> Tensor:
    """R^-T X."""
    return torch.linalg.solve_triangular(root.mT, right, upper=True)


def _tilt(phi: Tensor) -> Tensor:
    return (1 - 2 * phi - ((2 * phi + 1).square() + 8 * phi).sqrt()) / 16
