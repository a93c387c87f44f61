"""The BERT-style family: encoder, masked-LM head, sequence classifier.

The layout is BERT's (layer norm after each residual sum, learned positions, GELU), so that with equal weights it
computes what transformers' BertForMaskedLM does. Three things differ, each for memory or speed:
  - query, key and value are one matrix: one matrix product and one gather instead of three;
  - while training, the masked-LM head sees labelled positions only: at 15% of 8 x 128 tokens and 30,000 words, fp32
    logits and their gradient shrink from 234 MiB to 35 MiB;
  - there is no pooler: the classifier averages over the positions that are not padding.

This file is copied into every saved model's folder (``trust_remote_code``): relative imports only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput

from .configuration_zero_bert import ZeroBertConfig

IGNORED = -100


def label_loss(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Cross entropy in fp32 of ``logits`` [N, classes] against ``labels`` [N]; labels of -100 do not count.

    The sum is divided by ``num_items_in_batch`` where given (the Trainer counts the labels of all micro-batches of a
    step, so that accumulating over uneven ones equals one large batch), else by the labels counted here. Without a
    label the loss is 0 and its gradients are zeros, not NaN.
    """
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


class ZeroBertLayer(GradientCheckpointingLayer):
    """Self-attention and feed-forward, each followed by dropout, residual sum and layer norm.

    Reads ``hidden_size``, ``num_attention_heads``, ``intermediate_size``, the two dropout rates and ``layer_norm_eps``
    of any configuration, so the vision transformer uses it too.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.attention_output = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward_in = nn.Linear(config.hidden_size, config.intermediate_size)
        self.feed_forward_out = nn.Linear(config.intermediate_size, config.hidden_size)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """[B, S, H] to [B, S, H]; ``keep`` is bool [B, 1, 1, S], true where a position may be attended to."""
        batch, length, width = hidden_states.shape
        # [B, S, 3H] -> three views [B, heads, S, H / heads]
        qkv = self.qkv(hidden_states).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attention_dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=keep, dropout_p=dropout)
        context = context.transpose(1, 2).reshape(batch, length, width)
        hidden_states = self.attention_norm(hidden_states + self.dropout(self.attention_output(context)))
        widened = F.gelu(self.feed_forward_in(hidden_states))
        return self.feed_forward_norm(hidden_states + self.dropout(self.feed_forward_out(widened)))


class ZeroBertEmbeddings(nn.Module):
    """Sum of word, position and segment embeddings, then layer norm and dropout: [B, S] to [B, S, H]."""

    def __init__(self, config: ZeroBertConfig) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        if position_ids is None:
            if length > self.max_length:
                raise ValueError(
                    f"sequence length {length} exceeds the model's max_position_embeddings {self.max_length}. "
                    "Shorten or truncate the sequences (--max_length), or build the model with more positions."
                )
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        if token_type_ids is None:
            # One row, broadcast. Looked up and not read from .weight: under ZeRO-3 only the call gathers the weight.
            token_type_ids = input_ids.new_zeros((1, 1))
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.norm(embedded + self.position_embeddings(position_ids)))


class ZeroBertPreTrainedModel(PreTrainedModel):
    """What all heads share. Weights start normal with ``initializer_range``, biases 0, norms 1 (PreTrainedModel's)."""

    config_class = ZeroBertConfig
    base_model_prefix = "bert"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ZeroBertLayer"]
    _supports_sdpa = True

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.embeddings.word_embeddings = value


class ZeroBertModel(ZeroBertPreTrainedModel):
    """The encoder without a head."""

    def __init__(self, config: ZeroBertConfig) -> None:
        super().__init__(config)
        self.embeddings = ZeroBertEmbeddings(config)
        self.layers = nn.ModuleList(ZeroBertLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """``input_ids`` and the optional others are [B, S]; ``last_hidden_state`` is [B, S, H].

        Without ``attention_mask`` nothing is masked. With one, a mask is passed even if it is all ones: to look would
        make the CPU wait for the GPU, and costs more than the faster kernel brings. Leave it out where all are real.

        Raises:
            ValueError: if S exceeds ``max_position_embeddings``.
        """
        hidden_states = self.embeddings(input_ids, token_type_ids, position_ids)
        keep = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            hidden_states = layer(hidden_states, keep)
        return BaseModelOutput(last_hidden_state=hidden_states)


class ZeroBertForMaskedLM(ZeroBertPreTrainedModel):
    """Predicts words: dense, GELU, layer norm, then a decoder with its own weight (untied) and bias."""

    # In force only where the configuration says tie_word_embeddings.
    _tied_weights_keys = {"decoder.weight": "bert.embeddings.word_embeddings.weight"}

    def __init__(self, config: ZeroBertConfig) -> None:
        super().__init__(config)
        self.bert = ZeroBertModel(config)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        num_targets: int | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Inputs are [B, S]. Without ``labels``, ``logits`` is [B, S, V].

        With ``labels`` (-100 where there is nothing to predict) ``logits`` is [labelled positions, V], in the order
        of ``labels[labels != -100]``. Their number must be known on the CPU, so one wait for the GPU is inevitable;
        a caller who knows it (or an upper bound: rows beyond have no label) passes ``num_targets`` and has no wait.
        (Its name must not hold "label": the Trainer takes every such argument for one that each batch brings.)
        Tracing with fake tensors needs ``num_targets``, since there are no labels to count.

        Raises:
            ValueError: if S exceeds ``max_position_embeddings``.
        """
        hidden_states = self.bert(input_ids, attention_mask, token_type_ids, position_ids).last_hidden_state
        if labels is None:
            return MaskedLMOutput(logits=self._logits(hidden_states))
        flat = labels.reshape(-1)
        if num_targets is None:
            places = (flat != IGNORED).nonzero().squeeze(1)
            chosen = flat[places]
        else:
            places = torch.nonzero_static(flat != IGNORED, size=num_targets, fill_value=-1).squeeze(1)
            chosen = torch.where(places < 0, IGNORED, flat[places.clamp(min=0)])
            places = places.clamp(min=0)
        # index_select, not a boolean index: its gradient adds rows instead of sorting them.
        logits = self._logits(hidden_states.reshape(-1, hidden_states.shape[-1]).index_select(0, places))
        return MaskedLMOutput(loss=label_loss(logits, chosen, num_items_in_batch), logits=logits)

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.transform_norm(F.gelu(self.transform(hidden_states))))


class ZeroBertForSequenceClassification(ZeroBertPreTrainedModel):
    """The course's classifier: the mean over positions that are not padding, then one linear map."""

    def __init__(self, config: ZeroBertConfig) -> None:
        super().__init__(config)
        self.bert = ZeroBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Inputs are [B, S], ``labels`` class indices [B] (-100: not counted); ``logits`` is [B, classes].

        Raises:
            ValueError: if S exceeds ``max_position_embeddings``.
        """
        hidden_states = self.bert(input_ids, attention_mask, token_type_ids, position_ids).last_hidden_state
        if attention_mask is None:
            pooled = hidden_states.mean(dim=1)
        else:
            real = attention_mask.to(hidden_states.dtype).unsqueeze(-1)
            pooled = (hidden_states * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
        logits = self.classifier(pooled)
        loss = None if labels is None else label_loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)


__all__ = ["ZeroBertForMaskedLM", "ZeroBertForSequenceClassification", "ZeroBertModel", "ZeroBertPreTrainedModel"]
