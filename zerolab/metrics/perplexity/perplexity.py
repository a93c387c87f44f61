"""Perplexity from the negative log-likelihood of each token, as an `evaluate` module that needs no network.

(The Hub's module of that name runs a model of its own choice on text; this one judges the model that was trained.)
"""

# evaluate reads these lines with a regular expression that takes one module a line.
import datasets
import evaluate
import numpy as np


class Perplexity(evaluate.Metric):
    """`compute(predictions=nll)` gives `{"perplexity": exp(mean nll)}`; the mean is over tokens, not over batches."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="exp of the mean negative log-likelihood of the labelled tokens.",
            citation="",
            inputs_description="predictions: the negative natural log of each labelled token's probability.",
            features=datasets.Features({"predictions": datasets.Value("float32")}),
        )

    def _compute(self, predictions: list[float]) -> dict[str, float]:
        # A diverged model overflows to inf, which is the truth and not worth a warning.
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(np.mean(np.asarray(predictions, dtype=np.float64))))}
