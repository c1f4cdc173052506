"""What an attention matrix is like: its singular values, and where its mass lies.

Sources: Wang et al. 2020, "Linformer" (arXiv:2006.04768), section 3, for the spectrum of the attention matrix;
Choromanski et al. 2021 (arXiv:2009.14794), Lemma 2, for the variance of FAVOR+.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Shares of the energy that the ranks are told for.
SHARES = (0.90, 0.95, 0.99)
# Queries whose weights on all keys are held at a time.
_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """One head of one layer, over all documents. Means over documents, of what are means over their queries.

    Attributes:
        logit_rank, attention_rank: how many singular values hold 90, 95 and 99 per cent of the energy (the sum of
            their squares) of q k^T and of its softmax.
        entropy: of a query's weights, in nats.
        first_mass: weight on the first token.
        window_mass: weight on keys less than each of the window sizes away.
        query_norm, key_norm: root mean square, both with the square root of the softmax scale in them.
        log10_features: log10 of FAVOR+'s m at which the estimate of exp(q.k) has the wanted relative error, mean over
            pairs as often as they are attended to.
    """

    logit_rank: tuple[float, ...]
    attention_rank: tuple[float, ...]
    entropy: float
    first_mass: float
    window_mass: tuple[float, ...]
    query_norm: float
    key_norm: float
    log10_features: float


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """One layer: its heads, and their mean spectra.

    Attributes:
        logit_spectrum, attention_spectrum: singular values in descending order, the first one 1.
        logit_energy, attention_energy: share of the energy that the first 1, 2, ... of them hold.
    """

    layer: int
    heads: tuple[HeadStatistics, ...]
    logit_spectrum: tuple[float, ...]
    attention_spectrum: tuple[float, ...]
    logit_energy: tuple[float, ...]
    attention_energy: tuple[float, ...]


def logit_singular_values(query: Tensor, key: Tensor) -> Tensor:
    """Singular values of q k^T, (..., length, head_dim) -> (..., min(length, head_dim)), descending.

    Without the product: with q = Q_q R_q and k = Q_k R_k they are those of R_q R_k^T, which is head_dim square.
    """
    r_query, r_key = (torch.linalg.qr(x.double(), mode="r")[1] for x in (query, key))
    return torch.linalg.svdvals(r_query @ r_key.transpose(-1, -2)).float()


def attention_singular_values(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    """Singular values of softmax(q k^T), (heads, length, head_dim) -> (heads, length), one head at a time."""
    values = []
    for q, k in zip(query.float(), key.float(), strict=True):
        values.append(torch.linalg.svdvals(_weights(q, k, 0, causal=causal)))
    return torch.stack(values)


def energy(singular_values: Tensor) -> Tensor:
    """Share of the sum of squares that the first 1, 2, ... singular values hold; same shape."""
    squares = singular_values.double().square().cumsum(-1)
    return (squares / squares[..., -1:].clamp_min(1e-300)).float()


def rank_of(cumulative: Tensor, share: float) -> Tensor:
    """How many values it takes for `share` of the energy: (..., values) -> (...)."""
    # what rounding alone keeps below the share is there
    return (cumulative < share - 1e-6).sum(-1) + 1


def _weights(query: Tensor, key: Tensor, start: int, *, causal: bool) -> Tensor:
    """Softmax of queries (..., queries, head_dim), the first of which is the `start`-th, over all keys."""
    logits = query @ key.transpose(-1, -2)
    if causal:
        position = torch.arange(start, start + query.shape[-2], device=query.device)
        later = torch.arange(key.shape[-2], device=query.device) > position[:, None]
        logits = logits.masked_fill(later, float("-inf"))
    return logits.softmax(-1)


class LayerSums:
    """Collects what `LayerStatistics` tells, one document after the other, in memory that does not grow."""

    def __init__(
        self, layer: int, *, causal: bool, window_sizes: tuple[int, ...], spectrum_length: int, feature_error: float
    ) -> None:
        self.layer, self.causal, self.window_sizes = layer, causal, window_sizes
        self.spectrum_length, self.feature_error = spectrum_length, feature_error
        self.documents = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, query: Tensor, key: Tensor) -> None:
        """One document: queries and keys (heads, length, head_dim), with the square root of the scale in them."""
        query, key = query.float(), key.float()
        found = self._mass(query, key)
        found["query_norm"], found["key_norm"] = (x.square().sum(-1).mean(-1) for x in (query, key))
        first_query, first_key = query[:, : self.spectrum_length], key[:, : self.spectrum_length]
        spectra = {
            "logit": (logit_singular_values(first_query, first_key), query.shape[-1]),
            "attention": (attention_singular_values(first_query, first_key, causal=self.causal), self.spectrum_length),
        }
        for name, (values, width) in spectra.items():
            cumulative = energy(values)
            found[f"{name}_rank"] = torch.stack([rank_of(cumulative, share) for share in SHARES], -1).float()
            # a short document has fewer: beyond them there is no value, and all of the energy
            missing = (0, width - values.shape[-1])
            relative = (values / values[..., :1].clamp_min(1e-30)).mean(0)
            found[f"{name}_spectrum"] = torch.nn.functional.pad(relative, missing)
            found[f"{name}_energy"] = torch.nn.functional.pad(cumulative.mean(0), missing, value=1.0)
        self.documents += 1
        for name, value in found.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.double().cpu()

    def _mass(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        length = query.shape[1]
        position = torch.arange(length, device=query.device)
        totals: dict[str, Tensor] = {}
        squares = key.square().sum(-1)
        for begin in range(0, length, _BLOCK):
            block = query[:, begin : begin + _BLOCK]
            weights = _weights(block, key, begin, causal=self.causal)
            distance = (position[begin : begin + _BLOCK, None] - position).abs()
            # |q + k|^2 of every pair
            sums = block.square().sum(-1)[..., None] + squares[:, None] + 2 * block @ key.transpose(-1, -2)
            sums = sums.clamp_min(1e-6)
            needed = (sums + torch.log(-torch.expm1(-sums))) / math.log(10) - 2 * math.log10(self.feature_error)
            found = {
                "entropy": -torch.special.xlogy(weights, weights).sum((1, 2)),
                "first_mass": weights[..., 0].sum(1),
                "window_mass": torch.stack(
                    [(weights * (distance < size)).sum((1, 2)) for size in self.window_sizes], dim=-1
                ),
                "log10_features": (weights * needed).sum((1, 2)),
            }
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value / length
        return totals

    def result(self) -> LayerStatistics:
        """Means over the documents that were added."""
        means = {name: value / self.documents for name, value in self.sums.items()}
        heads = tuple(
            HeadStatistics(
                logit_rank=tuple(means["logit_rank"][head].tolist()),
                attention_rank=tuple(means["attention_rank"][head].tolist()),
                entropy=float(means["entropy"][head]),
                first_mass=float(means["first_mass"][head]),
                window_mass=tuple(means["window_mass"][head].tolist()),
                query_norm=float(means["query_norm"][head]) ** 0.5,
                key_norm=float(means["key_norm"][head]) ** 0.5,
                log10_features=float(means["log10_features"][head]),
            )
            for head in range(len(means["entropy"]))
        )
        spectra = {
            # hundreds of numbers a layer: as many digits as anyone reads
            f"{name}_{kind}": tuple(float(f"{value:.4g}") for value in means[f"{name}_{kind}"].tolist())
            for name in ("logit", "attention")
            for kind in ("spectrum", "energy")
        }
        return LayerStatistics(layer=self.layer, heads=heads, **spectra)
