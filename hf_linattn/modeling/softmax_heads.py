"""Heads of a converted layer that stay softmax: they attend to all keys, and a decoder keeps these.

The heads of a layer are parted here, once, and put together again. The far part knows nothing of the heads that stay.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention_interface import softmax_attention
from .blocks import after_end
from .far_part import Settings
from .state import SplitState, State

#: Attention of the other heads: query, key, value, lengths, state and settings -> outputs and the state after them.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, State | None, Settings], tuple[Tensor, State | None]]


class HeadSplit:
    """Which heads of a layer attend exactly, and which linearly.

    Args:
        exact: indices of the heads that stay softmax.
        num_heads: of the queries of the layer.
        group_size: how many neighboring heads of queries share a head of keys and values.
    """

    def __init__(self, exact: Sequence[int], *, num_heads: int, group_size: int) -> None:
        self.exact = list(exact)
        self.linear = [head for head in range(num_heads) if head not in self.exact]
        groups = sorted({head // group_size for head in self.exact})
        # the keys that are kept, by the first head of each group; and which of these each exact head sees
        self.kept = [group * group_size for group in groups]
        self.group = [groups.index(head // group_size) for head in self.exact]
        self.shares_keys = self.group != list(range(len(self.kept)))
        order = self.exact + self.linear
        self.place = [order.index(head) for head in range(num_heads)]

    def attend(
        self,
        linearly: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Tensor | None,
        state: SplitState | None,
        settings: Settings,
        *,
        causal: bool,
    ) -> tuple[Tensor, SplitState | None]:
        """Outputs of all heads, and in a decoder the state after them.

        Args:
            linearly: attends with the other heads.
            query, key, value, lengths: as in `LinearAttention.forward`.
            state: of a decoder, after the tokens before these; None: there are none.
        """
        q, k, v = (x[:, self.linear] for x in (query, key, value))
        out, linear = linearly(q, k, v, lengths, None if state is None else state.linear, settings)
        key, value = key[:, self.kept], value[:, self.kept]
        # of a decoder's new tokens, valid ones stand first: what is padded comes after all that sees it
        mask, after = None if causal else lengths, None
        if causal and linear is not None:
            position = torch.arange(key.shape[2], device=key.device)
            valid = position < (len(position) if lengths is None else lengths[:, None])
            valid = valid.expand(len(key), -1)
            if state is not None:
                key, value = (
                    torch.cat((old, new.to(old.dtype)), dim=2) for old, new in ((state.key, key), (state.value, value))
                )
                mask = valid = torch.cat((state.valid, valid), dim=1)
            after = SplitState(linear, key, value, valid)
        if self.shares_keys:
            key, value = key[:, self.group], value[:, self.group]
        exact = softmax_attention(query[:, self.exact].to(key.dtype), key, value, mask, settings.scale, causal=causal)
        exact = after_end(exact, lengths) if causal else exact
        return torch.cat((exact.to(out.dtype), out), dim=1)[:, self.place], after
