"""Add a feature map of one's own to Performer: a class and a row of the table; all else works as with those there.

python examples/feature_map.py google-bert/bert-base-uncased

phi(x) = 1 + softplus(w.x) replaces softmax's kernel instead of estimating it, as ReLU and ELU features do.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn import PerformerConfig, convert
from hf_linattn.modeling.feature_maps import FEATURE_MAPS, Features, RandomFeatureMap


class SoftplusMap(RandomFeatureMap):
    """One feature per random direction."""

    def forward(self, x: Tensor, side: str, scale: float = 1.0, relative: bool = False) -> Features:
        """x (batch, heads, length, dim) -> features (batch, heads, length, m), the same for both sides.

        `scale` is that of the logits q.k, half of which is each side's. `relative` leaves out what is common to all
        features of a token; here nothing is.
        """
        projected = x @ self.directions.to(x.dtype).transpose(-1, -2) * scale**0.5
        return Features(torch.log2(1 + F.softplus(projected)), None)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or folder of an encoder")
    parser.add_argument("--num-features", type=int, default=256)
    args = parser.parse_args(arguments)

    FEATURE_MAPS["softplus"] = SoftplusMap
    config = PerformerConfig(
        feature_map="softplus", num_features=args.num_features, window_size=16, global_tokens=1, exact_length=0
    )
    model = convert(args.model, config, auto_class="AutoModel")
    length = min(config.max_length or 512, model.config.linattn["max_length"])
    ids = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        linear = model(ids).last_hidden_state
        # a window as long as the text is softmax attention
        exact = convert(args.model, PerformerConfig(window_size=length), auto_class="AutoModel")(ids).last_hidden_state
    cosine = float(F.cosine_similarity(linear, exact, dim=-1).mean())
    print(f"mean cosine to softmax over {length} random tokens: {cosine:.3f}")
    return cosine


if __name__ == "__main__":
    main()
