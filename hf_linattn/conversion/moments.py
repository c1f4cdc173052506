"""Closed-form start of random features from the first two moments of queries and keys.

With x and y the queries and keys of a head, each multiplied by the square root of the softmax scale, nu the mean of x,
M1 = Cov(x) and M2 = E[y y^T]:

    G = M1^-1/2 (M1^1/2 M2 M1^1/2)^1/2 M1^-1/2,  so that A = G^1/2 and B = G^-1/2 give A (x - nu) and B y one covariance
    phi_l = E[z_l^2] + E[z'_l^2] of both in its eigenbasis U
    a_l = (1 - 2 phi_l - sqrt((2 phi_l + 1)^2 + 8 phi_l)) / 16

a_l is the tilt of least variance (Likhosherstov et al. 2022, arXiv:2205.15317, theorem 3, for each coordinate; the
matrices as in Likhosherstov et al. 2023, arXiv:2302.00787).
"""

import torch
from torch import Tensor

from ..modeling.feature_maps import Moments

# Share of the mean variance that is added to each direction: no direction of a sample is without variance.
_RIDGE = 1e-4


@torch.no_grad()
def match_moments(query: Tensor, key: Tensor) -> Moments:
    """The moments that features are matched to.

    Args:
        query, key: (heads, tokens, head_dim), multiplied by the square root of the softmax scale.
    """
    query, key = query.double(), key.double()
    mean = query.mean(1)
    centered = query - mean.unsqueeze(1)
    query_moment, key_moment = _moment(centered), _moment(key)
    root = _power(query_moment, 0.5)
    inverse = _power(query_moment, -0.5)
    balance = inverse @ _power(root @ key_moment @ root, 0.5) @ inverse
    to_query, to_key = _power(balance, 0.5), _power(balance, -0.5)
    common = to_query @ query_moment @ to_query
    # (heads, dim, dim): rows are eigenvectors
    basis = torch.linalg.eigh(common).eigenvectors.transpose(-1, -2)
    to_query, to_key = basis @ to_query, basis @ to_key
    phi = _diagonal(to_query, query_moment) + _diagonal(to_key, key_moment)
    tilt = (1 - 2 * phi - ((2 * phi + 1).square() + 8 * phi).sqrt()) / 16
    return Moments(mean.float(), to_query.float(), to_key.float(), tilt.float())


def _moment(x: Tensor) -> Tensor:
    """E[x x^T] of (heads, tokens, dim), regularized: (heads, dim, dim)."""
    moment = x.transpose(-1, -2) @ x / x.shape[1]
    variance = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-12)
    return moment + _RIDGE * variance * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of symmetric positive definite matrices."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(1e-12).pow(exponent).unsqueeze(-2)) @ vectors.transpose(-1, -2)


def _diagonal(transform: Tensor, moment: Tensor) -> Tensor:
    """Second moment of each coordinate of T x, (heads, dim)."""
    return ((transform @ moment) * transform).sum(-1)
