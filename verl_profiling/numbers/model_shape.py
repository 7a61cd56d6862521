"""The floating-point work of a model by its shape, from its Hugging Face configuration.

Counted are the products of matrices; each multiplication with its addition is two operations. Other
work (norms, activations, sampling, the optimizer) is below 1% in models of common size.

=========== ============================================================= ======================
part        operations of a forward pass                                  source
=========== ============================================================= ======================
weights     2 for each weight of a product and token; of experts, those   Kaplan et al. 2020,
            that a token uses. An embedding is looked up, not multiplied  table 1 (``C_forward``)
head        2 for each weight of the output layer, also where it is tied  the same
attention   4 x layers x heads x head size for each pair of a token with  Dao 2023 (causal FLOPs
            itself or a token before it                                   of FlashAttention-2)
=========== ============================================================= ======================

A backward pass has twice the operations of the forward pass. What a device computes again, to save
memory, or on padding, is no work of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from verl_profiling.manifest import BYTES_OF

_COUNTED = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Kinds of models (``model_type``) whose formulas are checked against torch's FlopCounterMode."""
TRAINING = 3
"""Operations of a forward and a backward pass, as a multiple of those of the forward pass."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that its work follows from.

    Attributes:
        weights: Weights that a token is multiplied with, without the output layer.
        head: Weights of the output layer.
        attention: Layers times heads times head size.
        kv: Numbers that a token adds to the cache of keys and values.
        expert: Weights of one expert, in all layers with experts.
        experts: Number of experts of a layer; 0 without experts.
        active: Number of experts that a token uses.
        bytes: Bytes of a number; ``None`` for quantized weights, or an unknown type.
    """

    weights: int
    head: int
    attention: int
    kv: int
    expert: int = 0
    experts: int = 0
    active: int = 0
    bytes: int | None = None

    def forward(self, tokens: float, pairs: float, outputs: float) -> float:
        """Return the operations of a forward pass.

        Args:
            tokens: Number of tokens, without padding.
            pairs: Number of pairs of a token with itself or a token before it, in its sequence.
            outputs: Number of tokens that the output layer is applied to.
        """
        return 2 * self.weights * tokens + 2 * self.head * outputs + 4 * self.attention * pairs

    def numbers_read(self, tokens: NDArray[Any], cached: NDArray[Any]) -> NDArray[Any]:
        """Return the weights, keys and values that iterations of decoding have to read.

        Of experts, those count that the tokens are expected to use, if all experts are as likely.

        Args:
            tokens: Number of tokens of each iteration, one for each sequence.
            cached: Sum of the lengths of their sequences.
        """
        unused = (1 - self.active / max(self.experts, 1)) ** tokens
        weights = self.weights - self.active * self.expert + self.head
        read: NDArray[Any] = weights + self.experts * self.expert * (1 - unused) + self.kv * cached
        return read


def shape_of(config: Mapping[str, Any], has_head: bool = True) -> ModelShape | str:
    """Return the shape of a model, or why it is unknown.

    Args:
        config: The Hugging Face configuration, as in ``config.json``.
        has_head: Whether the output layer gives a number for each word; a critic's gives one.
    """
    kind = config.get("model_type")
    if kind not in _COUNTED:
        return f"models of the type {kind} are not counted, only {', '.join(_COUNTED)}"
    if config.get("sliding_window") and config.get("use_sliding_window", kind == "mistral"):
        return "sliding windows of attention are not counted"
    try:
        return _shape(config, has_head)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"the model's configuration is not complete: {type(error).__name__}: {error}"


def _shape(config: Mapping[str, Any], has_head: bool) -> ModelShape:
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    of_attention = 2 * hidden * head_size * (heads + kv_heads)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    sparse = 0
    if experts:
        sparse = sum(_has_experts(layer, config) for layer in range(layers))
    dense = 0
    if sparse < layers:
        dense = 3 * hidden * int(config["intermediate_size"])
    weights = layers * of_attention + (layers - sparse) * dense
    expert = active = 0
    if sparse:
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        expert = sparse * 3 * hidden * int(width)
        active = int(config["num_experts_per_tok"])
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        of_router = hidden * experts
        if shared:
            of_router += hidden * (3 * shared + 1)  # the shared expert, and its gate
        weights += sparse * of_router + active * expert
    quantized = config.get("quantization_config")
    kind = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return ModelShape(
        weights=weights,
        head=hidden * (int(config["vocab_size"]) if has_head else 1),
        attention=layers * heads * head_size,
        kv=2 * layers * kv_heads * head_size,
        expert=expert,
        experts=experts,
        active=active,
        bytes=None if quantized else BYTES_OF.get(kind),
    )


def _has_experts(layer: int, config: Mapping[str, Any]) -> bool:
    """Return whether a layer has experts in place of a dense product, as in Qwen's models."""
    is_dense = layer in (config.get("mlp_only_layers") or ())
    return not is_dense and (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0
