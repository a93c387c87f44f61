"""The project's models against references with the same weights, and inside a real Trainer."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from models.configuration_zero_bert import ZeroBertConfig
from models.configuration_zero_vit import ZeroViTConfig
from models.modeling_zero_bert import ZeroBertForMaskedLM, ZeroBertForSequenceClassification, label_loss
from models.modeling_zero_vit import ZeroViTForImageClassification

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert_config(**changes) -> ZeroBertConfig:
    return ZeroBertConfig(**{"vocab_size": 61, "max_position_embeddings": 24, "num_labels": 7, **SIZES, **changes})


def vit_config(**changes) -> ZeroViTConfig:
    return ZeroViTConfig(**{"image_size": 12, "patch_size": 4, "num_labels": 5, **SIZES, **changes})


def randomize(model: nn.Module) -> None:
    """Weights at which every part shows: fresh biases are 0 and fresh norms 1, where a mistake could hide."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3)


def text_batch(seed: int = 0, rows: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    """Rows of different lengths; labels at an uneven number of places."""
    torch.manual_seed(seed)
    input_ids = torch.randint(1, 61, (rows, length))
    attention_mask = (torch.arange(length) < torch.randint(5, length + 1, (rows, 1))).long()
    labelled = (torch.rand(rows, length) < torch.linspace(0.1, 0.6, rows).unsqueeze(1)) & attention_mask.bool()
    return {
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "labels": torch.where(labelled, input_ids, -100),
    }


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def copy_layer(ours: nn.Module, attention: nn.Module, projection: nn.Module, pairs: list) -> None:
    """Ours to BERT's: query, key and value are thirds of one matrix."""
    for index, name in enumerate(("query", "key", "value")):
        target = getattr(attention, name)
        target.weight.copy_(ours.qkv.weight.chunk(3)[index])
        target.bias.copy_(ours.qkv.bias.chunk(3)[index])
    for source, target in [(ours.attention_output, projection), *pairs]:
        target.load_state_dict(source.state_dict())


def test_masked_lm_equals_transformers_bert():
    config = bert_config()
    ours = ZeroBertForMaskedLM(config).eval()
    randomize(ours)
    same = {
        name: getattr(config, name) for name in ("vocab_size", "max_position_embeddings", "layer_norm_eps", *SIZES)
    }
    bert = BertForMaskedLM(BertConfig(**same, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        theirs = bert.bert.embeddings
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            getattr(theirs, name).load_state_dict(getattr(ours.bert.embeddings, name).state_dict())
        theirs.LayerNorm.load_state_dict(ours.bert.embeddings.norm.state_dict())
        for mine, layer in zip(ours.bert.layers, bert.bert.encoder.layer, strict=True):
            pairs = [
                (mine.attention_norm, layer.attention.output.LayerNorm),
                (mine.feed_forward_in, layer.intermediate.dense),
                (mine.feed_forward_out, layer.output.dense),
                (mine.feed_forward_norm, layer.output.LayerNorm),
            ]
            copy_layer(mine, layer.attention.self, layer.attention.output.dense, pairs)
        head = bert.cls.predictions
        head.transform.dense.load_state_dict(ours.transform.state_dict())
        head.transform.LayerNorm.load_state_dict(ours.transform_norm.state_dict())
        head.decoder.load_state_dict(ours.decoder.state_dict())

    batch = text_batch()
    segments = (torch.arange(16) > 7).long().expand(4, 16)
    for extra in ({}, {"token_type_ids": segments}, {"position_ids": torch.arange(16).flip(0).unsqueeze(0)}):
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], **extra}
        torch.testing.assert_close(ours(**inputs).logits, bert(**inputs).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(batch["input_ids"]).logits, bert(batch["input_ids"]).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(**batch).loss, bert(**batch).loss, rtol=1e-5, atol=1e-5)


def test_image_classifier_equals_torch_transformer_encoder():
    model = ZeroViTForImageClassification(vit_config()).eval()
    randomize(model)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        for mine, theirs in zip(model.layers, encoder.layers, strict=True):
            theirs.self_attn.in_proj_weight.copy_(mine.qkv.weight)
            theirs.self_attn.in_proj_bias.copy_(mine.qkv.bias)
            theirs.self_attn.out_proj.load_state_dict(mine.attention_output.state_dict())
            theirs.norm1.load_state_dict(mine.attention_norm.state_dict())
            theirs.linear1.load_state_dict(mine.feed_forward_in.state_dict())
            theirs.linear2.load_state_dict(mine.feed_forward_out.state_dict())
            theirs.norm2.load_state_dict(mine.feed_forward_norm.state_dict())
    images = torch.randn(3, 1, 12, 12)
    embedding = model.embeddings
    # A patch is 4 x 4 pixels, read row by row: the convolution written as a matrix product.
    patches = images.reshape(3, 3, 4, 3, 4).permute(0, 1, 3, 2, 4).reshape(3, 9, 16)
    vectors = (
        F.linear(patches, embedding.projection.weight.flatten(1), embedding.projection.bias) + embedding.positions
    )
    expected = F.linear(encoder(vectors).mean(1), model.classifier.weight, model.classifier.bias)
    torch.testing.assert_close(model(images).logits, expected, rtol=1e-4, atol=1e-4)


def test_masked_lm_loss_and_gradients_equal_the_full_head():
    model = ZeroBertForMaskedLM(bert_config(**NO_DROPOUT))
    batch = text_batch()
    labels = batch.pop("labels")
    full = model(**batch).logits
    assert full.shape == (4, 16, 61)
    expected_loss = F.cross_entropy(full.reshape(-1, 61), labels.reshape(-1))
    expected = gradients(model, expected_loss)

    count = int((labels != -100).sum())
    for bound in (None, count, count + 9):
        output = model(**batch, labels=labels, num_targets=bound)
        assert output.logits.shape == (bound or count, 61)
        torch.testing.assert_close(output.logits[:count], full[labels != -100], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output.loss, expected_loss)
        torch.testing.assert_close(gradients(model, output.loss), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("kind", ["masked-lm", "classifier", "image"])
def test_a_batch_without_a_label_gives_zero_and_zero_gradients(kind, items):
    batch = text_batch()
    if kind == "image":
        model = ZeroViTForImageClassification(vit_config())
        output = model(torch.randn(2, 1, 12, 12), labels=torch.tensor([-100, -100]), num_items_in_batch=items)
    else:
        model_class = ZeroBertForMaskedLM if kind == "masked-lm" else ZeroBertForSequenceClassification
        model = model_class(bert_config())
        labels = torch.full_like(batch.pop("labels"), -100)
        labels = labels if kind == "masked-lm" else labels[:, 0]
        output = model(**batch, labels=labels, num_items_in_batch=items)
    assert output.loss.item() == 0.0
    assert all(not gradient.any() and gradient.isfinite().all() for gradient in gradients(model, output.loss).values())


def test_loss_is_divided_by_the_items_of_the_whole_batch():
    logits, labels = torch.randn(5, 3), torch.tensor([0, -100, 2, 1, -100])
    mean = F.cross_entropy(logits[[0, 2, 3]], labels[[0, 2, 3]])
    torch.testing.assert_close(label_loss(logits, labels), mean)
    for items in (12, torch.tensor(12), torch.tensor([12.0])):
        torch.testing.assert_close(label_loss(logits, labels, items).squeeze(), mean * 3 / 12)


def test_loss_is_fp32_whatever_the_weights_are():
    model = ZeroBertForMaskedLM(bert_config()).to(torch.bfloat16)
    output = model(**text_batch())
    assert (output.logits.dtype, output.loss.dtype) == (torch.bfloat16, torch.float32)
    images = ZeroViTForImageClassification(vit_config()).to(torch.bfloat16)
    assert images(torch.randn(2, 1, 12, 12), labels=torch.tensor([0, 1])).loss.dtype == torch.float32


class Rows(torch.utils.data.Dataset):
    """Eight samples of one prepared batch."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.batch.items()}


def one_step(model: nn.Module, batch: dict, folder, micro: int, accumulate: int, **arguments) -> tuple[float, dict]:
    """Loss and weights after one SGD step of a real Trainer over the eight samples, in order."""
    model = copy.deepcopy(model)
    settings = TrainingArguments(
        str(folder), per_device_train_batch_size=micro, gradient_accumulation_steps=accumulate, max_steps=1,
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=1e9, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=Rows(batch))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    loss = trainer.train().training_loss
    return loss, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["masked-lm", "classifier", "image"])
def test_accumulation_equals_one_large_batch(kind, tmp_path):
    batch = text_batch(rows=8)
    if kind == "masked-lm":
        model = ZeroBertForMaskedLM(bert_config(**NO_DROPOUT))
    else:
        # Two of the eight have no label: micro-batches of 1, 2, 1 and 2 labels.
        batch["labels"] = torch.tensor([3, -100, 1, 2, -100, 4, 0, 1])
        model = ZeroBertForSequenceClassification(bert_config(**NO_DROPOUT))
        if kind == "image":
            batch = {"pixel_values": torch.randn(8, 1, 12, 12), "labels": batch["labels"]}
            model = ZeroViTForImageClassification(vit_config(**NO_DROPOUT))
    # At the initial weights all losses are nearly log(classes), and a wrong average would hardly show.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if parameter.dim() == 1 else 5.0)
    parts = [model(**{name: values[i : i + 2] for name, values in batch.items()}).loss.item() for i in (0, 2, 4, 6)]
    expected = model(**batch).loss.item()
    assert abs(sum(parts) / 4 - expected) > 1e-3, "the batch must be one where the mean of means is wrong"

    whole_loss, whole = one_step(model, batch, tmp_path, 8, 1)
    split_loss, split = one_step(model, batch, tmp_path, 2, 4)
    assert whole_loss == pytest.approx(expected, rel=1e-5)
    assert split_loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(whole[name], before) for name, before in model.named_parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["masked-lm", "image"])
def test_gradient_checkpointing_recomputes_and_changes_nothing(kind, reentrant, tmp_path, monkeypatch):
    if kind == "masked-lm":
        model, batch = ZeroBertForMaskedLM(bert_config(**NO_DROPOUT)), text_batch(rows=8)
    else:
        model = ZeroViTForImageClassification(vit_config(**NO_DROPOUT))
        batch = {"pixel_values": torch.randn(8, 1, 12, 12), "labels": torch.arange(8) % 5}
    calls = []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: (calls.append(1), attention(*args, **kwargs))[1]
    )
    _, plain = one_step(model, batch, tmp_path, 8, 1)
    assert len(calls) == 2
    calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5.24 renames the option, 5.17 knows only this name
        arguments = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        _, checkpointed = one_step(model, batch, tmp_path, 8, 1, gradient_checkpointing=True, **arguments)
    assert len(calls) == 4
    torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-7)


def test_padding_changes_nothing():
    config = bert_config()
    short = torch.randint(1, 61, (2, 9))
    padded = F.pad(short, (0, 4), value=17)
    mask = F.pad(torch.ones_like(short), (0, 4))
    language, classifier = ZeroBertForMaskedLM(config).eval(), ZeroBertForSequenceClassification(config).eval()
    for model in (language, classifier):
        randomize(model)
    torch.testing.assert_close(language(padded, mask).logits[:, :9], language(short).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(classifier(padded, mask).logits, classifier(short).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(classifier(padded).logits, classifier(short).logits, rtol=1e-2)
    # A row of padding only, as the last batch of a padded set may hold, must not spoil the others with NaN.
    mask[1] = 0
    assert classifier(padded, mask).logits.isfinite().all()


def test_the_classifier_averages_the_positions():
    model = ZeroBertForSequenceClassification(bert_config()).eval()
    randomize(model)
    ids = torch.randint(1, 61, (2, 9))
    expected = model.classifier(model.bert(ids).last_hidden_state.mean(1))
    torch.testing.assert_close(model(ids).logits, expected)


def test_dropout_in_training_only():
    for hidden, attention, varies in ((0.1, 0.0, True), (0.0, 0.1, True), (0.0, 0.0, False)):
        config = bert_config(hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention)
        model = ZeroBertForMaskedLM(config)
        ids = torch.randint(1, 61, (2, 9))
        assert torch.equal(model.train()(ids).logits, model(ids).logits) != varies
        assert torch.equal(model.eval()(ids).logits, model(ids).logits)
    assert (ZeroBertConfig().hidden_dropout_prob, ZeroBertConfig().attention_probs_dropout_prob) == (0.1, 0.1)
    assert (ZeroViTConfig().hidden_dropout_prob, ZeroViTConfig().attention_probs_dropout_prob) == (0.1, 0.1)


def test_inputs_that_do_not_fit_are_refused():
    model = ZeroBertForMaskedLM(bert_config(max_position_embeddings=8))
    assert model(torch.ones(1, 8, dtype=torch.long)).logits.shape == (1, 8, 61)
    with pytest.raises(ValueError, match=r"length 9 exceeds .* max_position_embeddings 8\. .*--max_length"):
        model(torch.ones(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \[2, 3, 12, 12\].*\(1, 12, 12\)"):
        ZeroViTForImageClassification(vit_config())(torch.randn(2, 3, 12, 12))
