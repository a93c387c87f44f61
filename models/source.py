"""What ``--model`` names: a preset, a config.json, a folder with weights, or a Hub id (no torch)."""

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.presets import PRESETS, Preset

# One name, or owner/name, of the characters that the Hub allows.
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


class ModelError(ValueError):
    """A model that cannot be used. ``str()`` is one line; the parts are attributes, for a report of all problems.

    Attributes:
        field: the option at fault, ``--model`` unless said otherwise.
        value: what was given.
        problem: what is wrong with it.
        remedy: what to do instead.
    """

    def __init__(self, value: str, problem: str, remedy: str, field: str = "--model") -> None:
        super().__init__(f"{field} {value!r}: {problem}. {remedy}")
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


@dataclass(frozen=True)
class ModelSource:
    """Where a model's configuration, and perhaps its weights, come from.

    Attributes:
        spec: what the person typed.
        kind: what it turned out to be.
        path_or_id: the preset's name, the absolute path of the JSON file or of the folder, or the Hub id.
        weights: ``random`` for a preset and a configuration file, else ``pretrained``.
        preset: the preset, where ``kind`` is ``preset``.
    """

    spec: str
    kind: Literal["preset", "config", "folder", "hub"]
    path_or_id: str
    weights: Literal["random", "pretrained"]
    preset: Preset | None = None


def resolve_model(spec: str) -> ModelSource:
    """Decide what ``spec`` names; reads local files, never the network, and imports no torch.

    A preset's name wins over a file of that name, a file or folder over a Hub id.

    Raises:
        ModelError: unknown name, missing path, folder without config.json or weights, unreadable configuration.
    """
    if spec in PRESETS:
        return ModelSource(spec, "preset", spec, "random", PRESETS[spec])
    if not spec.strip():
        raise ModelError(spec, "no model is named", _preset_list())
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(spec, path.resolve())
    if path.is_file():
        if path.suffix != ".json":
            raise ModelError(spec, "this file is no JSON configuration", "Give a config.json or the model's folder.")
        _read_config(spec, path)
        return ModelSource(spec, "config", str(path.resolve()), "random")
    if spec.startswith(("/", "~", ".")) or spec.endswith(("/", ".json")) or "\\" in spec or spec.count("/") > 1:
        raise ModelError(spec, "no such file or folder", _missing_path_remedy(path))
    close = difflib.get_close_matches(spec, PRESETS, n=1, cutoff=0.75)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    if not _HUB_ID.fullmatch(spec):
        raise ModelError(spec, "neither a preset, a path that exists, nor a Hub id", hint + _preset_list())
    if close and "/" not in spec:
        # A bare name is a possible Hub id (gpt2), but one letter off a preset it is far more likely a slip.
        owner = f" Name a Hub model with its owner: owner/{spec}."
        raise ModelError(spec, "no preset of this name", hint + _preset_list() + owner)
    return ModelSource(spec, "hub", spec, "pretrained")


def _preset_list() -> str:
    return f"Presets: {', '.join(PRESETS)}."


def _missing_path_remedy(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    if close:
        return f"Did you mean {str(path.parent / close[0])!r}?"
    return f"Check the path (relative to {Path.cwd()}), or use a preset. {_preset_list()}"


def _folder(spec: str, folder: Path) -> ModelSource:
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            spec, "the folder holds no config.json", "Give the folder that save_pretrained wrote, or a config.json."
        )
    _read_config(spec, config)
    if not any(True for pattern in _WEIGHT_FILES for _ in folder.glob(pattern)):
        remedy = f"Give the folder that save_pretrained wrote, or {str(config)!r} for random weights."
        raise ModelError(spec, "the folder holds no weights (*.safetensors or pytorch_model*.bin)", remedy)
    return ModelSource(spec, "folder", str(folder), "pretrained")


def _read_config(spec: str, path: Path) -> dict[str, Any]:
    """The configuration's JSON object, checked as far as that needs no transformers."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        problem = f"{path.name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise ModelError(spec, problem, "Correct that line.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(spec, f"{path.name} cannot be read: {error}", "Give a readable UTF-8 file.") from error
    if not isinstance(content, dict):
        raise ModelError(
            spec, f"{path.name} holds a {type(content).__name__}, not an object", "Give a transformers config.json."
        )
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        remedy = 'Add the architecture, for example "model_type": "bert", or "zero-bert" for the one of this project.'
        raise ModelError(spec, f"{path.name} has no model_type", remedy)
    return content
