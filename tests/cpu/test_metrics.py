"""Metrics: the evaluate modules, what is kept of the logits, and both inside a real Trainer evaluation."""

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import zerolab.metrics
from zerolab.metrics import build_metrics, load_metric, most_likely_class, token_scores


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to open a connection fails the test."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"network used: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def evaluated(task, logits, labels):
    """What the Trainer would report for these logits, batch by batch in the order it does it."""
    compute, preprocess = build_metrics(task)
    kept = preprocess(logits, labels)
    predictions = tuple(part.numpy() for part in kept) if isinstance(kept, tuple) else kept.numpy()
    return compute(SimpleNamespace(predictions=predictions, label_ids=labels.numpy()))


def test_importing_the_metrics_imports_no_evaluate():
    code = "import sys, zerolab.metrics; print('evaluate' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [([1, 2, 3], [1, 2, 3], 1.0), ([1, 2], [2, 1], 0.0), ([5, 5, 5, 5], [5, 0, 5, 5], 0.75)],
)
def test_accuracy_is_the_share_of_equal_ids(predictions, references, expected):
    assert load_metric("accuracy").compute(predictions=predictions, references=references) == {"accuracy": expected}


def test_perplexity_is_exp_of_the_mean_over_tokens():
    # Probabilities 1/2, 1/4, 1/8: mean nll 2 ln 2, perplexity 4.
    nll = np.log(np.array([2.0, 4.0, 8.0]))
    assert load_metric("perplexity").compute(predictions=nll)["perplexity"] == pytest.approx(4.0, rel=1e-6)
    assert load_metric("perplexity").compute(predictions=[1e4])["perplexity"] == math.inf


def test_unknown_metric_and_unknown_task():
    with pytest.raises(FileNotFoundError):
        load_metric("bleurgh")
    with pytest.raises(ValueError, match="translation"):
        build_metrics("translation")


def test_perplexity_by_hand_weighs_tokens_not_rows():
    # Row 0 has three labels with probability 1/2, row 1 one with 1/8; a mean of row means would give 4.
    half, eighth = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.875, 1e-12]]))
    logits = torch.stack([torch.stack([half] * 3), torch.stack([eighth] * 3)])
    labels = torch.tensor([[0, 0, 0], [0, -100, -100]])
    result = evaluated("masked-lm", logits, labels)
    assert result["perplexity"] == pytest.approx(2 ** (6 / 4), rel=1e-5)
    assert result["accuracy"] == 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 7, 2**24])
def test_dense_and_sparse_logits_give_cross_entropy_of_each_label(dtype, chunk, monkeypatch):
    monkeypatch.setattr(zerolab.metrics, "_CHUNK_ELEMENTS", chunk * 11)
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 11) * 4).to(dtype)
    labels = torch.randint(11, (3, 5))
    labels[torch.rand(3, 5) < 0.5] = -100
    labelled = labels != -100
    assert 0 < labelled.sum() < labels.numel()
    expected = F.cross_entropy(logits.float().view(-1, 11), labels.view(-1), reduction="none").view(3, 5)
    spare = torch.randn(2, 11).to(dtype)  # a head given an upper bound of labels returns rows beyond them
    for given in (logits, (logits, "hidden states"), logits[labelled], torch.cat([logits[labelled], spare])):
        ids, nll = token_scores(given, labels)
        assert ids.shape == nll.shape == labels.shape
        assert (ids.dtype, nll.dtype) == (torch.int64, torch.float32)
        torch.testing.assert_close(nll, expected)
        assert torch.equal(ids[labelled], logits.argmax(-1)[labelled])
        assert (ids[~labelled] == -100).all()
        assert (nll[~labelled] == 0).all()


def test_fewer_sparse_rows_than_labels_is_an_error():
    with pytest.raises(ValueError, match="fewer rows than the 4 labels"):
        token_scores(torch.zeros(3, 5), torch.zeros(1, 4, dtype=torch.int64))


def test_a_batch_without_labels():
    labels = torch.full((2, 3), -100)
    assert evaluated("masked-lm", torch.zeros(0, 7), labels) == {}


def test_causal_metrics_are_shifted():
    ids = torch.tensor([[3, 1, 4, 1], [5, 2, 0, 5]])
    certain = F.one_hot(ids.roll(-1, dims=1), 6).float() * 40  # position t names the token at t + 1
    result = evaluated("causal-lm", certain, ids)
    assert result["accuracy"] == 1.0
    assert result["perplexity"] == pytest.approx(1.0, abs=1e-5)
    # A model that repeats its input is right only where a token repeats, which is nowhere here.
    assert evaluated("causal-lm", F.one_hot(ids, 6).float(), ids)["accuracy"] == 0.0
    even = evaluated("causal-lm", torch.zeros(2, 4, 6), ids)
    assert even["perplexity"] == pytest.approx(6.0, rel=1e-5)


@pytest.mark.parametrize("task", ["sequence-classification", "image-classification"])
def test_classes(task):
    logits = torch.tensor([[0.1, 0.9], [2.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.bfloat16)
    assert torch.equal(most_likely_class(logits, None), torch.tensor([1, 0, 1, 0]))
    assert evaluated(task, (logits, None), torch.tensor([1, 0, 0, 0])) == {"accuracy": 0.75}
    assert evaluated(task, logits, torch.tensor([0, 1, 0, 1])) == {"accuracy": 0.0}


def test_trainer_reports_the_perplexity_of_its_own_loss(tmp_path):
    """Uneven numbers of labels: the metric must equal exp of the token mean computed from full logits by hand."""
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = BertForMaskedLM(config).eval()
    ids = torch.randint(5, 50, (5, 8))
    labels = torch.full((5, 8), -100)
    for row in range(5):
        labels[row, : row + 1] = ids[row, : row + 1]
    rows = [{"input_ids": ids[row], "labels": labels[row]} for row in range(5)]
    compute, preprocess = build_metrics("masked-lm")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(
        model, arguments, eval_dataset=rows, compute_metrics=compute, preprocess_logits_for_metrics=preprocess
    )
    reported = trainer.evaluate()
    kept = trainer.predict(rows).predictions
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    nll = F.cross_entropy(logits.view(-1, 50), labels.view(-1))
    right = (logits.argmax(-1) == labels)[labels != -100].float().mean()
    assert reported["eval_perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)
    assert reported["eval_accuracy"] == pytest.approx(float(right))
    assert [part.shape for part in kept] == [(5, 8), (5, 8)]  # no logits were kept
