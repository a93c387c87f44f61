"""Datasets for one run: `load_data` gives train and eval sets, a collator and a description for the record.

Importing this package costs no torch: `DataArguments` and `check_data` are needed before anything slow is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerolab.data.arguments import DataArguments, DataError, check_data, default_dataset

if TYPE_CHECKING:
    from zerolab.data.loading import Data, load_data

__all__ = ["Data", "DataArguments", "DataError", "check_data", "default_dataset", "load_data"]


def __getattr__(name: str) -> Any:
    if name in ("Data", "load_data"):
        from zerolab.data import loading

        return getattr(loading, name)
    raise AttributeError(f"module 'zerolab.data' has no attribute {name!r}")
