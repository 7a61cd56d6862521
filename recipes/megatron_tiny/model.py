"""A tiny Megatron-core GPT that runs on CPU, through public options only."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import DictConfig


class PlainAttention(MegatronModule):
    """Causal attention with torch's kernel; Megatron's default attention has buffers on the GPU."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Attend; tensors are [sequence, batch, heads, size], the result joins the last two."""
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def build_model(config: DictConfig) -> GPTModel:
    """Return this rank's part of the model."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PlainAttention
    return GPTModel(
        config=TransformerConfig(
            **config.model,
            tensor_model_parallel_size=config.parallel.tp,
            pipeline_model_parallel_size=config.parallel.pp,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            add_bias_linear=False,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
        ),
        transformer_layer_spec=spec,
        vocab_size=config.batch.vocabulary,
        max_sequence_length=config.batch.sequence_length,
        position_embedding_type="learned_absolute",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
