"""The share of predictions that equal their reference, as an `evaluate` module that needs no network."""

# evaluate reads these lines with a regular expression that takes one module a line.
import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """`compute(predictions=ids, references=ids)` gives `{"accuracy": share in 0..1}`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions, references: integer class or token ids, one each.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
