"""Models that zerolab can train, and the names by which ``--model`` finds them.

Importing this package costs neither torch nor transformers: presets and the meaning of ``--model`` are plain data, so
bad input can be reported before anything slow is imported. The classes live in ``models.modeling_zero_bert`` and
``models.modeling_zero_vit``; ``models.loading`` registers them with transformers' Auto classes and builds models.
"""

from models.presets import PRESETS, TASKS, Preset
from models.source import ModelError, ModelSource, resolve_model

__all__ = ["PRESETS", "TASKS", "ModelError", "ModelSource", "Preset", "resolve_model"]
