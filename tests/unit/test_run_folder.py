import re

from zerolab import run_folder


def test_a_second_run_never_takes_the_folder_of_a_first(tmp_path):
    first = run_folder.make_run_folder(tmp_path / "run")
    (first / "record.json").write_text("{}")
    second = run_folder.make_run_folder(tmp_path / "run")
    (second / "record.json").write_text("{}")
    third = run_folder.make_run_folder(tmp_path / "run")
    assert [folder.name for folder in (first, second, third)] == ["run", "run-2", "run-3"]
    assert run_folder.make_run_folder(tmp_path / "run", resume=True) == first
    assert (first / "record-1.json").exists()  # the earlier record is kept when a run goes on


def test_the_name_says_model_configuration_and_date():
    name = run_folder.default_run_folder("bert-120m", "offload").as_posix()
    assert re.fullmatch(r"runs/bert-120m-offload-\d{8}-\d{6}", name)
    assert run_folder.default_run_folder("/data/llama/config.json", "none").name.startswith("llama-none-")
