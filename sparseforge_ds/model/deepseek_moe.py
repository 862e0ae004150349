"""DeepSeek-MoE v1 (`model_type: deepseek`, arXiv 2401.06066), which transformers 5 has no class for.

Llama's attention and norms; from layer `first_k_dense_replace` on, the MLP is a mixture of shared and routed experts
(equations 9 to 11), which are transformers' fused ones. Published checkpoints, one file entry per expert, are fused on
loading and taken apart again on saving. No code of a checkpoint is ever executed.

Legend of shape suffixes: B sequences, S tokens of a sequence, T = B * S, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaConfig,
    LlamaPreTrainedModel,
    PreTrainedModel,
    initialization,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts, DeepseekV2MLP
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.olmoe.modeling_olmoe import OlmoeModel

from sparseforge_ds.model.token_losses import IGNORED
from sparseforge_ds.transformers_internals import (
    CACHE,
    MoeCausalLMOutputWithPast,
    OutputRecorder,
    can_return_tuple,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)


class DeepseekConfig(LlamaConfig):
    """Config of the published `config.json`, with the defaults of the class that was published with it."""

    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}

    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    moe_intermediate_size: int = 1407
    """Width of one expert; the shared ones are a single MLP of `n_shared_experts` times this width."""
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    """None: every layer is dense."""
    num_experts_per_tok: int | None = None
    moe_layer_freq: int = 1
    """Layers whose number is a multiple of this are mixtures, from `first_k_dense_replace` on."""
    first_k_dense_replace: int = 0
    """Number of dense layers before the first mixture."""
    norm_topk_prob: bool = False
    """True if the weights of a token's experts are scaled to sum to 1."""
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    """Factor of the expert-level balance loss (equation 12); 0 switches it off."""
    seq_aux: bool = True
    """True if the balance loss is taken in every sequence, False for one over the whole batch."""
    fp32_router: bool = True
    """True if the router computes in fp32. The published code routes in the model's dtype."""

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # names Python files of the checkpoint, which are neither used nor saved
        if self.scoring_func != "softmax":
            raise ValueError(f'scoring_func = "{self.scoring_func}": DeepSeek-MoE v1 only knows "softmax"')
        experts = self.n_routed_experts
        per_token = self.num_experts_per_tok
        if experts is not None and not 1 <= (per_token or 0) <= experts:
            raise ValueError(
                f"num_experts_per_tok = {per_token} with n_routed_experts = {experts}: use an integer from 1 to "
                f"{experts}"
            )
        super().__post_init__(**kwargs)

    def is_mixture(self, layer: int) -> bool:
        """Return True if the MLP of layer number `layer` is a mixture of experts."""
        return (
            self.n_routed_experts is not None
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )


class DeepseekRouter(nn.Module):
    """Router that scores all experts and chooses the best K for each token."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts or 0, config.hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (T, E), weights (T, K) and expert numbers (T, K) for inputs (..., hidden)."""
        dtype = torch.float32 if self.config.fp32_router else hidden.dtype
        logits_TE = F.linear(hidden.reshape(-1, hidden.shape[-1]).to(dtype), self.weight.to(dtype))
        routing_TK, expert_TK = logits_TE.softmax(dim=-1).topk(self.config.num_experts_per_tok or 0, dim=-1)
        if self.config.norm_topk_prob:
            routing_TK = routing_TK / routing_TK.sum(dim=-1, keepdim=True)
        return logits_TE, routing_TK, expert_TK


class DeepseekMoE(nn.Module):
    """Mixture of routed and shared experts, in the place of an MLP."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = DeepseekRouter(config)
        self.experts = DeepseekV2Experts(config)
        self.shared_experts = (
            DeepseekV2MLP(config, intermediate_size=config.moe_intermediate_size * config.n_shared_experts)
            if config.n_shared_experts
            else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Add up the outputs of routed and shared experts, (B, S, hidden) -> the same shape."""
        _, routing_TK, expert_TK = self.gate(hidden)
        routed: Tensor = self.experts(hidden.reshape(-1, hidden.shape[-1]), expert_TK, routing_TK).view_as(hidden)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, with a mixture for its MLP if the config says so."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super(LlamaDecoderLayer, self).__init__()  # Llama's own would allocate a dense MLP first
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = DeepseekMoE(config) if config.is_mixture(layer_idx) else DeepseekV2MLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekPreTrainedModel(LlamaPreTrainedModel):
    """Base class of the stack and the language model."""

    config: DeepseekConfig
    config_class = DeepseekConfig
    _no_split_modules = ["DeepseekDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": DeepseekDecoderLayer,
        "attentions": LlamaAttention,
        "router_logits": OutputRecorder(DeepseekRouter, index=0),
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for a decorator in the source of this file, which only imports the experts

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        PreTrainedModel._init_weights(self, module)
        std = self.config.initializer_range
        if isinstance(module, DeepseekRouter):
            initialization.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, DeepseekV2Experts):
            initialization.normal_(module.gate_up_proj, mean=0.0, std=std)
            initialization.normal_(module.down_proj, mean=0.0, std=std)


class DeepseekModel(DeepseekPreTrainedModel):
    """Stack of decoder layers, without a head."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([DeepseekDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    forward = OlmoeModel.forward  # embedding, causal mask, RoPE, our layers, norm; the output has room for the router


class DeepseekForCausalLM(DeepseekPreTrainedModel, GenerationMixin):
    """Language model. The published `architectures` and serving stacks expect this class name."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Compute logits, as causal language models of transformers do; a cache is among `kwargs`.

        In training, `aux_loss` of the output is the balance loss times `aux_loss_alpha`, and part of `loss`. A loop
        that makes its own loss from the logits adds `aux_loss` to it.
        """
        # The balance loss needs the scores of every router.
        balanced = self.training and self.config.aux_loss_alpha > 0 and self.config.n_routed_experts is not None
        if balanced:
            kwargs["output_router_logits"] = True
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        # Generation asks for the logits of the last tokens alone.
        hidden = outputs.last_hidden_state
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, positions])
        aux_loss = self._aux_loss(outputs.router_logits, hidden.shape[0]) if balanced else None
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if aux_loss is not None:
                # A trainer that accumulates sums losses which are divided by all tokens of a step; so must this one be.
                items = kwargs.get("num_items_in_batch")
                share = 1.0 if items is None else (labels[:, 1:] != IGNORED).sum() / items
                loss = loss + share * aux_loss
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _aux_loss(self, router_logits: tuple[Tensor, ...], sequences: int) -> Tensor:
        K = self.config.num_experts_per_tok or 0
        B = sequences if self.config.seq_aux else 1
        losses = [balance_loss(logits_TE.view(B, -1, logits_TE.shape[-1]), K) for logits_TE in router_logits]
        return self.config.aux_loss_alpha * torch.stack(losses).sum()


def balance_loss(logits_BSE: Tensor, K: int) -> Tensor:
    """Return the expert-level balance loss of one layer, () in fp32, before its factor (equations 12 to 14).

    It is the mean over sequences of the sum over experts of f P. P is the mean score of an expert, and f is its share
    of the choices times E.

    Args:
        logits_BSE: of the router.
        K: experts of a token.
    """
    score_BSE = logits_BSE.float().softmax(dim=-1)
    B, S, E = score_BSE.shape
    choice_BC = score_BSE.topk(K, dim=-1).indices.view(B, S * K)
    one_BC = torch.ones_like(choice_BC, dtype=torch.float32)
    count_BE = torch.zeros_like(score_BSE[:, 0]).scatter_add_(1, choice_BC, one_BC)
    return (count_BE * (E / (K * S)) * score_BSE.mean(dim=1)).sum(dim=1).mean()


def register() -> None:
    """Register the family's classes and the fusing of its experts with transformers; a second call does nothing."""
    if DeepseekConfig.model_type in CONFIG_MAPPING and CONFIG_MAPPING[DeepseekConfig.model_type] is DeepseekConfig:
        return
    AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig)
    AutoModel.register(DeepseekConfig, DeepseekModel)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
    # Qwen2-MoE's published experts have the same names.
    register_checkpoint_conversion_mapping(DeepseekConfig.model_type, get_checkpoint_conversion_mapping("qwen2_moe"))
