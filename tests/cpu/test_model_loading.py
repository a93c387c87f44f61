"""--model to a model: configurations, tasks, saved folders, and code that travels with the weights."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel, AutoModelForImageClassification, AutoModelForMaskedLM

from models import PRESETS, TASKS, ModelError, ModelSource, loading, resolve_model
from models.configuration_zero_bert import ZeroBertConfig
from models.configuration_zero_vit import ZeroViTConfig
from models.loading import build_model, fits_task, infer_task, load_config, num_parameters
from models.modeling_zero_bert import ZeroBertForMaskedLM, ZeroBertForSequenceClassification, ZeroBertModel
from models.modeling_zero_vit import ZeroViTForImageClassification

BERT = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ROPE = {**BERT, "num_key_value_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
# Other people's architectures: model_type, sizes, the task to infer, all tasks it fits, the class that must be built.
OTHERS = {
    "bert": (BERT, "masked-lm", {"masked-lm", "causal-lm", "sequence-classification"}, "BertForMaskedLM"),
    "distilbert": (
        {"vocab_size": 61, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48},
        "masked-lm", {"masked-lm", "sequence-classification"}, "DistilBertForMaskedLM",
    ),
    "gpt2": (
        {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4},
        "causal-lm", {"causal-lm", "sequence-classification"}, "GPT2LMHeadModel",
    ),
    "llama": (ROPE, "causal-lm", {"causal-lm", "sequence-classification"}, "LlamaForCausalLM"),
    "qwen2": (ROPE, "causal-lm", {"causal-lm", "sequence-classification"}, "Qwen2ForCausalLM"),
    "vit": (IMAGES, "image-classification", {"image-classification"}, "ViTForImageClassification"),
}  # fmt: skip


def source_of(tmp_path, content: dict) -> ModelSource:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return resolve_model(str(path))


def inputs_of(task: str, size: int = 16, channels: int = 3) -> dict[str, torch.Tensor]:
    if task == "image-classification":
        return {"pixel_values": torch.randn(2, channels, size, size), "labels": torch.tensor([0, 1])}
    ids = torch.randint(1, 61, (2, 6))
    return {"input_ids": ids, "labels": ids if task.endswith("-lm") else torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("bert-mini", "masked-lm", 5_458_688),
        ("bert-mini", "sequence-classification", 5_392_384),
        ("bert-120m", "masked-lm", 121_827_632),
        ("bert-120m", "sequence-classification", 120_775_984),
        ("bert-1b", "masked-lm", 933_899_568),
        ("vit-tiny", "image-classification", 274_698),
        ("vit-100m", "image-classification", 100_847_626),
    ],
)
def test_presets_have_the_parameters_counted_by_hand(name, task, count):
    assert num_parameters(load_config(resolve_model(name)), task) == count


def test_presets_build_and_learn_their_task():
    for name, channels, size in (("bert-mini", 1, 1), ("vit-tiny", 1, 28)):
        source = resolve_model(name)
        config = load_config(source)
        task = infer_task(source, config)
        assert task == PRESETS[name].task
        model = build_model(source, config, task)
        assert model.num_parameters() == num_parameters(config, task)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model(**inputs_of(task, size, channels)).loss.item() > 1.0
        assert PRESETS[name].config["num_labels"] == config.num_labels


def test_two_builds_share_nothing_and_the_seed_decides():
    source = resolve_model("vit-tiny")
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(build_model(source, load_config(source), "image-classification").embeddings.positions)
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])


def test_initial_weights():
    source = resolve_model("bert-mini")
    model = build_model(source, load_config(source), "masked-lm")
    images = build_model(resolve_model("vit-tiny"), load_config(resolve_model("vit-tiny")), "image-classification")
    for weight in (model.decoder.weight, model.bert.layers[3].qkv.weight, model.get_input_embeddings().weight,
                   images.embeddings.positions, images.embeddings.projection.weight):  # fmt: skip
        assert weight.std().item() == pytest.approx(0.02, rel=0.05) and abs(weight.mean().item()) < 2e-3
    for name, parameter in (*model.named_parameters(), *images.named_parameters()):
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("norm.weight")))), name


def test_word_embeddings_are_tied_only_on_request():
    sizes = {**BERT, "model_type": "zero-bert"}
    assert not ZeroBertConfig().tie_word_embeddings
    untied, tied = (ZeroBertForMaskedLM(ZeroBertConfig(**sizes, tie_word_embeddings=tie)) for tie in (False, True))
    assert tied.decoder.weight is tied.get_input_embeddings().weight
    assert untied.num_parameters() - tied.num_parameters() == 61 * 32
    assert num_parameters(tied.config, "masked-lm") == tied.num_parameters()


def test_fake_tensors_run_where_the_number_of_labels_is_given():
    source = resolve_model("bert-mini")
    with FakeTensorMode():
        model = build_model(source, load_config(source), "masked-lm")
        ids = torch.zeros(8, 128, dtype=torch.long)
        output = model(ids, attention_mask=torch.ones_like(ids), labels=ids, num_targets=150)
        output.loss.backward()
    assert output.logits.shape == (150, 4096)


@pytest.mark.parametrize("model_type", OTHERS)
def test_any_architecture_from_a_config_json(model_type, tmp_path):
    sizes, inferred, fitting, class_name = OTHERS[model_type]
    source = source_of(tmp_path, {"model_type": model_type, **sizes})
    config = load_config(source)
    assert {task for task in TASKS if fits_task(config, task)} == fitting
    assert infer_task(source, config) == inferred
    assert num_parameters(config, inferred) > 1000
    for task in sorted(fitting):
        config = load_config(source)
        config.pad_token_id = 0
        count = num_parameters(config, task)
        model = build_model(source, config, task)
        assert model.num_parameters() == count
        assert model(**inputs_of(task)).loss.isfinite()
        if task == inferred:
            assert type(model).__name__ == class_name


def test_a_checkpoint_says_its_task(tmp_path):
    source = source_of(tmp_path, {"model_type": "bert", **BERT, "architectures": ["BertForSequenceClassification"]})
    assert infer_task(source, load_config(source)) == "sequence-classification"


def test_a_model_without_a_head_for_the_task(tmp_path):
    source = resolve_model("vit-tiny")
    with pytest.raises(ModelError, match=r"no head for masked-lm\. It fits: image-classification"):
        build_model(source, load_config(source), "masked-lm")
    speech = source_of(tmp_path, {"model_type": "wavlm"})
    with pytest.raises(ModelError, match="fits none of the tasks masked-lm"):
        infer_task(speech, load_config(speech))
    with pytest.raises(ModelError, match="task 'translation': no such task"):
        fits_task(load_config(source), "translation")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"model_type": "brt"}, "brt"),
        ({"model_type": "zero-bert", "hidden_size": 100, "num_attention_heads": 16}, "100 is not a multiple of"),
        ({"model_type": "zero-vit", "image_size": 30}, "image_size 30 is not a multiple of patch_size 7"),
    ],
)
def test_impossible_configurations(content, problem, tmp_path):
    with pytest.raises(ModelError, match="refuses its configuration") as caught:
        load_config(source_of(tmp_path, content))
    assert problem in str(caught.value)


def test_an_unreachable_hub_is_said_at_once(monkeypatch, tmp_path):
    loading._hub_answers.cache_clear()

    def no_route(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(loading.HfApi, "model_info", no_route)
    with pytest.raises(ModelError) as caught:
        load_config(resolve_model("zerolab-tests/no-such-model"))
    loading._hub_answers.cache_clear()
    text = str(caught.value)
    for words in ("zerolab-tests/no-such-model", "could not be reached", "does not exist", "HF_HOME", "local folder"):
        assert words in text


def save(tmp_path, config, model_class):
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.save_pretrained(tmp_path)
    return model, resolve_model(str(tmp_path))


def test_a_saved_folder_gives_the_same_model(tmp_path):
    model, source = save(tmp_path, ZeroBertConfig(**BERT, num_labels=9), ZeroBertForSequenceClassification)
    config = load_config(source)
    assert infer_task(source, config) == "sequence-classification"
    assert config.num_labels == 9 and config.id2label[8] == "LABEL_8"
    assert "id2label" not in json.loads((tmp_path / "config.json").read_text())
    again = build_model(source, config, "sequence-classification").eval()
    assert type(again) is ZeroBertForSequenceClassification
    ids = torch.randint(1, 61, (2, 6))
    assert torch.equal(again(ids).logits, model(ids).logits)
    # The JSON inside the same folder means random weights.
    random = build_model(resolve_model(str(tmp_path / "config.json")), config, "sequence-classification").eval()
    assert not torch.allclose(random(ids).logits, model(ids).logits)


def test_names_of_labels_are_kept(tmp_path):
    ZeroBertConfig(**BERT, id2label={0: "no", 1: "yes"}).save_pretrained(tmp_path)
    assert load_config(resolve_model(str(tmp_path / "config.json"))).id2label == {0: "no", 1: "yes"}


def test_another_number_of_labels_starts_a_new_head_only(tmp_path):
    model, source = save(tmp_path, ZeroBertConfig(**BERT, num_labels=9), ZeroBertForSequenceClassification)
    config = load_config(source)
    config.num_labels = 4
    again = build_model(source, config, "sequence-classification")
    assert again.classifier.weight.shape == (4, 32) and again.classifier.weight.std() > 0
    assert torch.equal(again.bert.layers[1].qkv.weight, model.bert.layers[1].qkv.weight)
    wrong = load_config(source)
    wrong.vocab_size = 70
    with pytest.raises(ModelError, match="cannot be built"):
        build_model(source, wrong, "sequence-classification")


def test_registering_twice_changes_nothing():
    importlib.reload(loading)
    config = ZeroBertConfig(**BERT)
    assert type(AutoModel.from_config(config)) is ZeroBertModel
    assert type(AutoModelForMaskedLM.from_config(config)) is ZeroBertForMaskedLM
    assert type(AutoModelForImageClassification.from_config(ZeroViTConfig())) is ZeroViTForImageClassification


FRESH = """
import sys, torch, transformers
for folder, auto, name, shape in {cases!r}:
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    assert "transformers_modules" in type(model).__module__, type(model)
    inputs, expected = torch.load(folder + "/expected.pt")
    got = model(**{{name: inputs}})[0]
    assert got.shape == shape and torch.equal(got, expected), auto
assert "models" not in sys.modules
print("same outputs")
"""


def test_code_travels_with_the_weights_into_a_process_that_lacks_the_project(tmp_path):
    text, images = ZeroBertConfig(**BERT, num_labels=9), ZeroViTConfig(num_labels=5)
    ids, pixels = torch.randint(1, 61, (2, 6)), torch.randn(2, 1, 28, 28)
    cases = []
    for auto, config, model_class, name, values in (
        ("AutoModel", text, ZeroBertModel, "input_ids", ids),
        ("AutoModelForMaskedLM", text, ZeroBertForMaskedLM, "input_ids", ids),
        ("AutoModelForSequenceClassification", text, ZeroBertForSequenceClassification, "input_ids", ids),
        ("AutoModelForImageClassification", images, ZeroViTForImageClassification, "pixel_values", pixels),
    ):
        model, _ = save(tmp_path / auto, config, model_class)
        with torch.no_grad():
            expected = model(values)[0]
        torch.save((values, expected), tmp_path / auto / "expected.pt")
        cases.append((str(tmp_path / auto), auto, name, tuple(expected.shape)))
    away = tmp_path / "elsewhere"
    away.mkdir()
    # Neither the project nor a relative entry that may lead to it, but other libraries' paths stay.
    project = os.path.dirname(os.path.dirname(loading.__file__))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(entry for entry in entries if os.path.isabs(entry) and os.path.realpath(entry) != project)
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.update(HF_MODULES_CACHE=str(tmp_path / "modules"), HF_HUB_OFFLINE="1")
    code = "import torch; torch.set_grad_enabled(False)" + FRESH.format(cases=cases)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=away, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip() == "same outputs", done.stderr
