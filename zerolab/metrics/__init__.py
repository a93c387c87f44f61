"""What the Trainer's evaluation reports, from metric modules beside this file; it keeps no logits.

`import evaluate` is slow (seconds), so it happens in `build_metrics`: before training, where it disturbs no
measurement of the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IGNORED = -100
# fp32 elements that a chunk of logits may have: 64 MiB.
_CHUNK_ELEMENTS = 2**24

Compute = Callable[[Any], dict[str, float]]
Preprocess = Callable[[Any, Any], Any]


def load_metric(name: str) -> Any:
    """The `evaluate` module `accuracy` or `perplexity` of this project, without the network.

    Raises:
        FileNotFoundError: there is no such module.
    """
    import evaluate

    # A lock file per metric would make processes on one file system wait for each other; each has all the data.
    return evaluate.load(str(Path(__file__).parent / name / f"{name}.py"), keep_in_memory=True)


def build_metrics(task: str) -> tuple[Compute, Preprocess]:
    """`compute_metrics` and `preprocess_logits_for_metrics` for the Trainer.

    Language models get `accuracy` and `perplexity` over all labelled tokens, classifiers `accuracy`.

    Raises:
        ValueError: unknown task.
    """
    accuracy = load_metric("accuracy")
    if task in ("sequence-classification", "image-classification"):

        def compute_classes(prediction: Any) -> dict[str, float]:
            return accuracy.compute(predictions=prediction.predictions, references=prediction.label_ids)

        return compute_classes, most_likely_class
    if task not in ("masked-lm", "causal-lm"):
        raise ValueError(f"task {task!r}: no metrics; use masked-lm, causal-lm, sequence- or image-classification")
    perplexity = load_metric("perplexity")
    shifted = task == "causal-lm"

    def compute_tokens(prediction: Any) -> dict[str, float]:
        ids, nll = prediction.predictions
        labelled = prediction.label_ids != IGNORED
        if shifted:
            labelled[:, 0] = False  # nothing comes before the first token
        if not labelled.any():
            return {}  # a mean of nothing: better absent than NaN
        right = accuracy.compute(predictions=ids[labelled], references=prediction.label_ids[labelled])
        return right | perplexity.compute(predictions=nll[labelled])

    def preprocess(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_scores(logits, labels, shifted=shifted)

    return compute_tokens, preprocess


def most_likely_class(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Logits [B, classes] of any float type (or a tuple that starts with them) to class ids int64 [B]."""
    return _first(logits).argmax(dim=-1)


def token_scores(logits: Any, labels: torch.Tensor, shifted: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """For each label its predicted token and its negative log-likelihood; small, whatever the vocabulary.

    Args:
        logits: [B, S, V], or [n, V] in the order of `labels[labels != -100]` from a head that computes only those
            (rows beyond the labels are ignored); any float type, or a tuple that starts with them.
        labels: int64 [B, S], -100 where there is none.
        shifted: position t of [B, S, V] predicts the label at t + 1 (causal-LM).

    Returns:
        ids int64 [B, S] (-100 without label) and nll float32 [B, S] (0 without label), at the label's own position.

    Raises:
        ValueError: fewer logits than labels.
    """
    import torch

    logits = _first(logits)
    labelled = labels != IGNORED
    if shifted:
        labelled = labelled.clone()
        labelled[:, 0] = False
    places = labelled.reshape(-1).nonzero().squeeze(1)
    sparse = logits.dim() == 2
    if sparse and len(logits) < len(places):
        raise ValueError(f"logits {tuple(logits.shape)}: fewer rows than the {len(places)} labels")
    rows = logits if sparse else logits.reshape(-1, logits.shape[-1])
    ids = torch.full_like(labels, IGNORED).reshape(-1)
    nll = torch.zeros(labels.numel(), dtype=torch.float32, device=labels.device)
    targets = labels.reshape(-1)
    step = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    # In chunks, so that 16-bit logits never exist as a whole in fp32: at [8, 512, 30,000] that is half a gigabyte.
    for start in range(0, len(places), step):
        chosen = places[start : start + step]
        sources = torch.arange(start, start + len(chosen), device=rows.device) if sparse else chosen - int(shifted)
        chunk = rows.index_select(0, sources)
        ids[chosen] = chunk.argmax(dim=-1)
        chunk = chunk.float()
        picked = chunk.gather(1, targets[chosen].unsqueeze(1)).squeeze(1)
        nll[chosen] = chunk.logsumexp(dim=-1) - picked
    return ids.view_as(labels), nll.view_as(labels)


def _first(logits: Any) -> Any:
    return logits[0] if isinstance(logits, (tuple, list)) else logits
