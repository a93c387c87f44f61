import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolab import ds_auto, ds_config


def config(**zero):
    return {"zero_optimization": {"stage": 2, **zero}}


def test_sizes_that_say_auto_are_filled_and_others_left():
    raw = config(stage=3, reduce_bucket_size="auto", stage3_prefetch_bucket_size=77, sub_group_size="auto")
    filled, autos = ds_auto.fill_sizes(raw, 121_827_632, 30_720_000)
    assert filled["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 2**20,
        "stage3_prefetch_bucket_size": 77,
        "sub_group_size": 30_720_000,
    }
    assert [auto.key.split(".")[1] for auto in autos] == ["reduce_bucket_size", "sub_group_size"]
    assert raw["zero_optimization"]["reduce_bucket_size"] == "auto"


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (config(offload_optimizer={"device": "cpu"}), 30_720_000),
        (config(stage=1), 2**24),
        (config(), 2**24),
        (config(stage=3, offload_optimizer={"device": "cpu"}), 2**20),
    ],
)
def test_the_bucket_follows_the_stage(zero, expected):
    assert ds_auto.bucket_elements(ds_config.zero_plan(zero), 121_827_632, 30_720_000)[0] == expected


@given(st.integers(0, 3), st.booleans(), st.integers(1, 10**11), st.integers(1, 10**9))
def test_a_bucket_is_never_larger_than_the_model_nor_empty(stage, offload, num_parameters, largest):
    plan = ds_config.ZeroPlan(stage, "cpu" if offload else None, None)
    assert 1 <= ds_auto.bucket_elements(plan, num_parameters, min(largest, num_parameters))[0] <= num_parameters


def test_each_auto_is_explained_by_who_filled_it():
    raw = {**config(reduce_bucket_size="auto"), "train_batch_size": "auto", "gradient_clipping": "auto"}
    resolved = {**config(reduce_bucket_size=9), "train_batch_size": 8, "gradient_clipping": 1.0}
    told = {auto.key: (auto.value, auto.reason) for auto in ds_auto.explain_auto(raw, resolved)}
    assert told["gradient_clipping"] == (1.0, "from --max_grad_norm")
    assert told["train_batch_size"][0] == 8
    assert told["zero_optimization.reduce_bucket_size"][0] == 9
