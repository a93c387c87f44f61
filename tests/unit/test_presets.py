"""Presets and the meaning of --model, without torch. Parameter counts are derived from the shapes, by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models import PRESETS, TASKS, ModelError, resolve_model

ROOT = Path(__file__).resolve().parents[2]


def layer(width: int, wide: int) -> int:
    """Four square maps, two feed-forward maps, all with bias, and two norms of weight and bias."""
    return 4 * (width * width + width) + (width * wide + wide) + (wide * width + width) + 2 * 2 * width


def bert(name: str) -> tuple[int, int]:
    """(masked-LM, classifier) parameters."""
    c = PRESETS[name].config
    width, vocab = c["hidden_size"], c["vocab_size"]
    embeddings = (vocab + 512 + 2) * width + 2 * width
    encoder = embeddings + c["num_hidden_layers"] * layer(width, c["intermediate_size"])
    masked_lm = encoder + (width * width + width) + 2 * width + (width * vocab + vocab)
    return masked_lm, encoder + width * c["num_labels"] + c["num_labels"]


def vit(name: str) -> int:
    c = PRESETS[name].config
    width, pixels = c["hidden_size"], c["num_channels"] * c["patch_size"] ** 2
    patches = (c["image_size"] // c["patch_size"]) ** 2
    embeddings = pixels * width + width + patches * width
    return embeddings + c["num_hidden_layers"] * layer(width, c["intermediate_size"]) + width * 10 + 10


def test_bert_120m_is_what_its_name_says():
    # 30,720,000 words + 524,288 positions + 2,048 segments + 2,048 norm + 4 x 14,694,400 layers
    # + 1,051,648 transform + 30,750,000 decoder
    masked_lm, classifier = bert("bert-120m")
    assert masked_lm == 30_720_000 + 524_288 + 2_048 + 2_048 + 4 * 14_694_400 + 1_051_648 + 30_750_000
    assert round(masked_lm / 1e6, 1) == 121.8
    assert round(classifier / 1e6, 1) == 120.8


def test_the_other_sizes():
    assert bert("bert-mini") == (5_458_688, 5_392_384)
    assert 0.9e9 < bert("bert-1b")[1] < bert("bert-1b")[0] < 1.1e9
    assert vit("vit-tiny") == 274_698
    assert 95e6 < vit("vit-100m") < 105e6


@pytest.mark.parametrize("name", ["bert-mini", "bert-120m", "bert-1b"])
def test_about_states_the_count(name):
    assert PRESETS[name].about.startswith(f"{bert(name)[0] / 1e6:.1f} M parameters")


@pytest.mark.parametrize(("name", "digits"), [("vit-tiny", 2), ("vit-100m", 1)])
def test_about_states_the_count_of_images(name, digits):
    assert PRESETS[name].about.startswith(f"{vit(name) / 1e6:.{digits}f} M parameters")


def test_every_preset_is_listed_under_its_own_name_with_a_known_task():
    assert [preset.name for preset in PRESETS.values()] == list(PRESETS)
    assert {preset.task for preset in PRESETS.values()} <= set(TASKS)


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["other"] = PRESETS["bert-mini"]
    with pytest.raises(AttributeError):
        PRESETS["bert-mini"].name = "other"


def test_importing_models_and_resolving_needs_no_torch():
    code = (
        "import sys, models; models.resolve_model('bert-mini'); models.resolve_model('owner/name'); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_resolve_each_kind(tmp_path):
    preset = resolve_model("vit-tiny")
    assert (preset.kind, preset.weights, preset.preset) == ("preset", "random", PRESETS["vit-tiny"])

    path = write(tmp_path / "saved", {"model_type": "bert"})
    config = resolve_model(str(path))
    assert (config.kind, config.path_or_id, config.weights, config.preset) == ("config", str(path), "random", None)

    (tmp_path / "saved" / "model.safetensors").touch()
    folder = resolve_model(f"{tmp_path}/saved/")
    assert (folder.kind, folder.path_or_id, folder.weights) == ("folder", str(tmp_path / "saved"), "pretrained")

    for name in ("gpt2", "google-bert/bert-base-uncased", "Qwen/Qwen2.5-0.5B"):
        hub = resolve_model(name)
        assert (hub.spec, hub.kind, hub.path_or_id, hub.weights) == (name, "hub", name, "pretrained")


def test_any_json_name_and_a_relative_path(tmp_path, monkeypatch):
    write(tmp_path / "sizes", {"model_type": "gpt2"}, "small.json")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("sizes/small.json").path_or_id == str(tmp_path / "sizes" / "small.json")


@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [
        ("bert-12m", "no preset of this name", "Did you mean 'bert-120m'?"),
        ("vit-100", "no preset of this name", "Did you mean 'vit-100m'?"),
        ("bert mini", "neither a preset", "Did you mean 'bert-mini'?"),
        ("what is this?", "neither a preset", "Presets: bert-mini, bert-120m"),
        ("", "no model is named", "Presets: bert-mini"),
        ("./nowhere", "no such file or folder", "Check the path"),
        ("/nowhere/at/all", "no such file or folder", "Check the path"),
        ("nowhere.json", "no such file or folder", "preset"),
        ("a/b/c", "no such file or folder", "Check the path"),
    ],
)
def test_names_that_name_nothing(spec, problem, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(spec)
    error = caught.value
    assert (error.field, error.value) == ("--model", spec)
    assert problem in error.problem and remedy in error.remedy
    assert str(error) == f"--model {spec!r}: {error.problem}. {error.remedy}"


def test_a_misspelled_path_names_its_neighbor(tmp_path):
    write(tmp_path, {"model_type": "bert"}, "large.json")
    with pytest.raises(ModelError, match="Did you mean '.*/large.json'"):
        resolve_model(str(tmp_path / "lagre.json"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{\n  "model_type": "bert",\n  "hidden_size" 8\n}', "line 3, column 17"),
        ("[1, 2]", "holds a list, not an object"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": 3}, "has no model_type"),
    ],
)
def test_configurations_that_cannot_be_read(content, problem, tmp_path):
    path = write(tmp_path / "saved", content)
    for spec in (str(path), str(path.parent)):
        with pytest.raises(ModelError, match=problem):
            resolve_model(spec)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve_model(str(path))


def test_folders_and_files_that_hold_no_model(tmp_path):
    with pytest.raises(ModelError, match="holds no config.json"):
        resolve_model(str(tmp_path))
    path = write(tmp_path, {"model_type": "bert"})
    with pytest.raises(ModelError, match="holds no weights") as caught:
        resolve_model(str(tmp_path))
    assert str(path) in caught.value.remedy
    with pytest.raises(ModelError, match="no JSON configuration"):
        resolve_model(str(write(tmp_path, "", "notes.txt")))
