"""Configuration of the small vision transformer.

This file is copied into every saved model's folder (``trust_remote_code``), so it imports only transformers.
"""

from typing import Any

from transformers import PreTrainedConfig


class ZeroViTConfig(PreTrainedConfig):
    """Sizes and rates of a ZeroViT model; the defaults are the preset ``vit-tiny`` but for the number of labels.

    ``image_size`` and ``patch_size`` are in pixels, of square images and square patches.

    Raises:
        ValueError: if ``patch_size`` does not divide ``image_size`` or ``num_attention_heads`` ``hidden_size``.
    """

    model_type = "zero-vit"

    image_size: int = 28
    patch_size: int = 7
    num_channels: int = 1
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 256
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for whole, part in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{whole} {getattr(self, whole)} is not a multiple of {part} {getattr(self, part)}. "
                    "Change one of them."
                )

    @property
    def num_patches(self) -> int:
        """Patches of one image, which is the encoder's sequence length."""
        return (self.image_size // self.patch_size) ** 2


__all__ = ["ZeroViTConfig"]
