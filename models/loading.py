"""From a ``ModelSource`` to a configuration and a model. Importing this registers the project's own classes."""

import copy
import functools
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from models.configuration_zero_bert import ZeroBertConfig
from models.configuration_zero_vit import ZeroViTConfig
from models.modeling_zero_bert import ZeroBertForMaskedLM, ZeroBertForSequenceClassification, ZeroBertModel
from models.modeling_zero_vit import ZeroViTForImageClassification
from models.presets import TASKS
from models.source import ModelError, ModelSource

_AUTO: dict[str, Any] = {
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
}


def _register() -> None:
    """Make the Auto classes know our models, and make save_pretrained copy their code; harmless when repeated."""
    models = (
        (AutoModel, ZeroBertConfig, ZeroBertModel),
        (AutoModelForMaskedLM, ZeroBertConfig, ZeroBertForMaskedLM),
        (AutoModelForSequenceClassification, ZeroBertConfig, ZeroBertForSequenceClassification),
        (AutoModelForImageClassification, ZeroViTConfig, ZeroViTForImageClassification),
    )
    for config_class in (ZeroBertConfig, ZeroViTConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.register_for_auto_class()
    for auto, config_class, model_class in models:
        auto.register(config_class, model_class, exist_ok=True)
        model_class.register_for_auto_class(auto.__name__)


_register()


def load_config(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's configuration; for a Hub id from the network, or from the local cache where the Hub is unreachable.

    Raises:
        ModelError: the Hub cannot be reached or lacks the id, transformers does not know the architecture, or a value
            in the configuration is impossible.
    """
    try:
        if source.preset is not None:
            return AutoConfig.for_model(source.preset.model_type, **copy.deepcopy(source.preset.config))
        return AutoConfig.from_pretrained(
            source.path_or_id, trust_remote_code=trust_remote_code, local_files_only=_cache_only(source)
        )
    except OSError as error:
        raise _unreachable(source, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"transformers {transformers.__version__} refuses its configuration: {_first_line(error)}"
        remedy = "Correct the value or the model_type; a model with code of its own needs --trust_remote_code."
        raise ModelError(source.spec, problem, remedy) from error


def fits_task(config: PreTrainedConfig, task: str) -> bool:
    """Whether transformers has a model of this configuration for ``task`` (one of ``TASKS``, else ValueError)."""
    auto = _auto_class(task)
    # A model that brings its own code names its classes in auto_map instead.
    return type(config) in auto._model_mapping or auto.__name__ in (getattr(config, "auto_map", None) or {})


def infer_task(source: ModelSource, config: PreTrainedConfig) -> str:
    """The task to train where none is asked for.

    The preset's own; else the one whose class the configuration's ``architectures`` names (a trained checkpoint says
    what it was trained for); else the first of ``TASKS`` that it fits.

    Raises:
        ModelError: the model fits none of them.
    """
    if source.preset is not None:
        return source.preset.task
    fitting = [task for task in TASKS if fits_task(config, task)]
    if not fitting:
        problem = f"a {config.model_type!r} model fits none of the tasks {', '.join(TASKS)}"
        raise ModelError(source.spec, problem, "Choose a model with a language-model or classification head.")
    for task in fitting:
        if set(_class_names(config, task)) & set(config.architectures or ()):
            return task
    return fitting[0]


def build_model(
    source: ModelSource, config: PreTrainedConfig, task: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with fp32 weights: random for a preset or a config.json, else the source's own.

    Always through the Auto classes: under DeepSpeed ZeRO-3 it is they that partition weights as they are made, which
    a directly constructed class would not. With random weights, seed torch before. Where ``config.num_labels`` differs
    from the checkpoint's, the classification head starts anew.

    Raises:
        ModelError: the model does not fit ``task``, or its weights cannot be loaded.
    """
    if not fits_task(config, task):
        fitting = [name for name in TASKS if fits_task(config, name)]
        remedy = f"It fits: {', '.join(fitting)}." if fitting else "Choose another model."
        raise ModelError(source.spec, f"a {config.model_type!r} model has no head for {task}", remedy)
    auto = _auto_class(task)
    try:
        if source.weights == "random":
            return auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        new_head = load_config(source, trust_remote_code).num_labels != config.num_labels
        return auto.from_pretrained(
            source.path_or_id,
            config=config,
            dtype=torch.float32,
            # Only then: elsewhere a weight of another shape is an error that must not pass as a random weight.
            ignore_mismatched_sizes=new_head and task.endswith("classification"),
            trust_remote_code=trust_remote_code,
            local_files_only=_cache_only(source),
        )
    except OSError as error:
        raise _unreachable(source, error) from error
    except ModelError:
        raise
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        remedy = "Check that the weights belong to this configuration; code of its own needs --trust_remote_code."
        raise ModelError(source.spec, f"the model cannot be built: {_first_line(error)}", remedy) from error


def num_parameters(config: PreTrainedConfig, task: str, trust_remote_code: bool = False) -> int:
    """Number of parameters (a shared one counts once) of the model for ``task``, without allocating any.

    Raises:
        KeyError: the configuration does not fit ``task``; ask ``fits_task`` first.
    """
    auto = _auto_class(task)
    # A copy: building writes to the configuration (dtype, attention), and the caller still has to build the model.
    config = copy.deepcopy(config)
    with torch.device("meta"):
        if type(config) in auto._model_mapping:
            # The class itself, not from_config: under ZeRO-3 that one would partition tensors that do not exist.
            model = _one(auto._model_mapping[type(config)])(config)
        else:
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def _auto_class(task: str) -> Any:
    if task not in _AUTO:
        raise ModelError(task, "no such task", f"Tasks: {', '.join(TASKS)}.", field="task")
    return _AUTO[task]


def _one(model_class: Any) -> Any:
    """A few architectures map to several classes, the usual one first."""
    return model_class[0] if isinstance(model_class, (list, tuple)) else model_class


def _class_names(config: PreTrainedConfig, task: str) -> list[str]:
    """Names of the classes that hold this configuration's model for ``task``."""
    auto = _auto_class(task)
    if type(config) in auto._model_mapping:
        found = auto._model_mapping[type(config)]
        return [model_class.__name__ for model_class in (found if isinstance(found, (list, tuple)) else (found,))]
    # auto_map writes "file.Class", with the repository before it where the code lives elsewhere.
    return [config.auto_map[auto.__name__].rsplit(".", 1)[-1]]


def _cache_only(source: ModelSource) -> bool:
    """Whether to read a Hub model from the local cache alone, since the Hub does not answer."""
    return source.kind == "hub" and not _hub_answers(source.path_or_id)


@functools.lru_cache
def _hub_answers(model_id: str) -> bool:
    # One request of five seconds at most. Without it every file of a model is retried for 23 s before transformers
    # says that there is no network, or takes the copy in the cache.
    try:
        HfApi().model_info(model_id, timeout=5)
    except HfHubHTTPError:
        pass  # an answer, even if it is "not found" or "not allowed"; from_pretrained then says which
    except Exception:  # no route, no name, a timeout, offline mode: the HTTP client has a class for each
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _unreachable(source: ModelSource, error: OSError) -> ModelError:
    if source.kind == "hub":
        problem = "the Hugging Face Hub could not be reached, or the id does not exist there or is private"
        remedy = (
            f"Check the id {source.path_or_id!r} and the network; offline, use a local folder, set HF_HOME to a cache "
            "that holds it, or use a preset such as 'bert-120m'."
        )
        return ModelError(source.spec, problem, remedy)
    return ModelError(source.spec, f"cannot be read: {_first_line(error)}", "Check the files in that folder.")
