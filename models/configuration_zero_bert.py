"""Configuration of the BERT-style family.

This file is copied into every saved model's folder (``trust_remote_code``), so it imports only transformers.
"""

from typing import Any

from transformers import PreTrainedConfig


class ZeroBertConfig(PreTrainedConfig):
    """Sizes and rates of a ZeroBert model; the defaults are the preset ``bert-120m``.

    Raises:
        ValueError: if ``num_attention_heads`` does not divide ``hidden_size``.
    """

    model_type = "zero-bert"

    vocab_size: int = 30_000
    hidden_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 16
    intermediate_size: int = 5120
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}: "
                "every head takes an equal slice. Change one of them."
            )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values; generic labels are written as their number alone.

        transformers spells out a name for each label, which for 30,000 classes makes config.json 1.3 MB.
        """
        content = super().to_dict()
        labels = self.id2label
        if labels is not None and all(name == f"LABEL_{index}" for index, name in labels.items()):
            content.pop("id2label", None)
            content.pop("label2id", None)
            content["num_labels"] = len(labels)
        return content


__all__ = ["ZeroBertConfig"]
