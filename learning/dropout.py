"""Dropout whose masks depend on a user's seed alone, however users are computed together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ODD = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's step; times a number, that number's own key


class SeededDropout(TorchFunctionMode):
    """While entered, a mask of dropout is a function of seed, step, record and place in the record.

    It knows `functional.dropout`, and attention with dropout. The first axis of the masked tensor
    must be the records'; any other dropout draws from torch's own generator. So does a dropout
    within `torch.utils.checkpoint`, which puts that generator back before it computes again.
    """

    def __init__(self, seeds: torch.Tensor, places: torch.Tensor, step: int = 0):
        """Prepares the masks of a forward over r records.

        Args:
            seeds: of each record's user, int64 of shape (r,); or of one user, of shape ().
            places: each record's place among its user's records in this step, int64 of shape (r,).
            step: of local training, from 0.
        """
        super().__init__()
        self._records = _mixed(_mixed(seeds + _key(step)) + places * _ODD)
        self._calls = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `func`; if it is a dropout, the seeded one is called in its place."""
        kwargs = kwargs or {}
        made = None
        if func is functional.dropout:
            made = self._dropout(*args, **kwargs)
        elif func is functional.scaled_dot_product_attention:
            made = self._attention(*args, **kwargs)
        elif func is functional.multi_head_attention_forward and _drops(args, kwargs):
            with self:
                unfolded = unfolded_attention(args, kwargs)
            return func(*args, **kwargs) if unfolded is None else unfolded
        return func(*args, **kwargs) if made is None else made

    def _dropout(
        self, given: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor | None:
        if not training or not 0 < p < 1 or given.dim() == 0 or len(given) != len(self._records):
            return None
        if _is_computed_again():
            return None
        self._calls += 1
        numbers = torch.arange(given[0].numel(), device=given.device) * _ODD
        bits = _mixed(_mixed(self._records + _key(self._calls))[:, None] + numbers)
        kept = (bits >> 11) & (2**53 - 1) >= round(p * 2**53)
        mask = kept.reshape(given.shape).to(given.dtype) / (1 - p)
        return given.mul_(mask) if inplace else given * mask

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        if not dropout_p or enable_gqa:
            return None
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        shares = self._dropout(scores.softmax(-1), dropout_p)
        return None if shares is None else shares @ value


def unfolded_attention(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, None] | None:
    """Computes torch's self-attention layer by layer; None for any other attention.

    Args:
        args, kwargs: of `functional.multi_head_attention_forward`.
    """
    given = _ATTENTION.bind(*args, **kwargs)
    given.apply_defaults()
    the = given.arguments
    unusual = (
        not the["query"] is the["key"] is the["value"]
        or the["query"].dim() != 3
        or (the["attn_mask"] is not None and not the["is_causal"])
        or any(the[name] is not None for name in ("key_padding_mask", "bias_k"))
        or any(the[n] for n in ("add_zero_attn", "need_weights", "use_separate_proj_weight"))
    )
    if unusual:
        return None
    x = the["query"].transpose(0, 1)  # positions first until here
    x = functional.linear(x, the["in_proj_weight"], the["in_proj_bias"])
    q, k, v = x.unflatten(2, (3, the["num_heads"], -1)).permute(2, 0, 3, 1, 4)
    dropped = the["dropout_p"] if the["training"] else 0.0
    about = {"is_causal": the["is_causal"], "dropout_p": dropped}
    x = functional.scaled_dot_product_attention(q, k, v, **about)
    x = x.transpose(1, 2).flatten(2)
    x = functional.linear(x, the["out_proj_weight"], the["out_proj_bias"])
    return x.transpose(0, 1), None


_ATTENTION = inspect.signature(functional.multi_head_attention_forward)


def _drops(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    the = _ATTENTION.bind(*args, **kwargs).arguments
    return bool(the["dropout_p"] and the.get("training", True))


def _is_computed_again() -> bool:
    """Whether this forward is computed again in the backward, by `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _key(number: int) -> int:
    """A number's own key, as int64 holds it."""
    return (number * _ODD + 2**63) % 2**64 - 2**63


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): int64 in, int64 out."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> shift) & (2 ** (64 - shift) - 1)) * (factor - 2**64)
    return keys ^ (keys >> 31) & (2**33 - 1)
