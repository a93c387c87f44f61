"""The course's small vision transformer: patches, learned positions, encoder, mean over patches, linear map.

The encoder's layer is ZeroBertLayer, which is torch.nn.TransformerEncoderLayer with GELU and without the dropout
between its two feed-forward maps (that one would keep a mask of the widest activation).

This file is copied into every saved model's folder (``trust_remote_code``): relative imports only.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutput

from .configuration_zero_vit import ZeroViTConfig
from .modeling_zero_bert import ZeroBertLayer, label_loss


class ZeroViTEmbeddings(nn.Module):
    """Patches to vectors: [B, C, image, image] to [B, patches, H]."""

    def __init__(self, config: ZeroViTConfig) -> None:
        super().__init__()
        self.image_shape = (config.num_channels, config.image_size, config.image_size)
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.positions = nn.Parameter(torch.zeros(1, config.num_patches, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if tuple(pixel_values.shape[1:]) != self.image_shape:
            raise ValueError(
                f"pixel_values have shape {list(pixel_values.shape)}, the model takes [batch, *{self.image_shape}] "
                "(channels, height, width). Resize the images, or build the model with their image_size and "
                "num_channels."
            )
        # Images arrive in fp32 whatever the weights are; a convolution takes one type only.
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        return self.dropout(patches.flatten(2).transpose(1, 2) + self.positions)


class ZeroViTPreTrainedModel(PreTrainedModel):
    """Weights start normal with ``initializer_range``, positions too, biases 0, norms 1."""

    config_class = ZeroViTConfig
    # There is no headless model, so no prefix: base_model is the model itself.
    base_model_prefix = ""
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["ZeroBertLayer"]
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ZeroViTEmbeddings):
            init.normal_(module.positions, mean=0.0, std=self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.projection


class ZeroViTForImageClassification(ZeroViTPreTrainedModel):
    """Image classifier; the head reads the mean over all patches, there is no class token."""

    def __init__(self, config: ZeroViTConfig) -> None:
        super().__init__(config)
        self.embeddings = ZeroViTEmbeddings(config)
        self.layers = nn.ModuleList(ZeroBertLayer(config) for _ in range(config.num_hidden_layers))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """``pixel_values`` is [B, C, H, W], ``labels`` class indices [B] (-100: not counted); ``logits`` [B, classes].

        Raises:
            ValueError: if the images have another shape than the configuration says.
        """
        hidden_states = self.embeddings(pixel_values)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = self.classifier(hidden_states.mean(dim=1))
        loss = None if labels is None else label_loss(logits, labels, num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits)


__all__ = ["ZeroViTForImageClassification", "ZeroViTPreTrainedModel"]
