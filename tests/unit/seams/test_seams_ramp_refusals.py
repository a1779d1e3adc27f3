"""Set-ups in which the ramp can't keep its promise are refused with a remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner_gh200.errors import FeatureUnavailable, GH200Error
from simpletuner_gh200.seams.features.ramp.feature import refuse_impossible

PLAIN = SimpleNamespace(distributed_type="DistributedType.MULTI_GPU", state=SimpleNamespace(deepspeed_plugin=None))


def test_an_ordinary_run_is_accepted() -> None:
    config = SimpleNamespace(max_train_steps=10, ramtorch=False)
    assert refuse_impossible(config, PLAIN) is None


@pytest.mark.parametrize(
    ("config", "accelerator", "kind", "named"),
    [
        ({"use_deepspeed_optimizer": True}, PLAIN, FeatureUnavailable, "DeepSpeed"),
        ({}, SimpleNamespace(distributed_type="DistributedType.DEEPSPEED"), FeatureUnavailable, "DeepSpeed"),
        ({}, SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=object())), FeatureUnavailable, "DeepSpeed"),
        ({"ramtorch": True}, PLAIN, FeatureUnavailable, "ramtorch"),
        ({"optimizer_release_gradients": True}, PLAIN, FeatureUnavailable, "optimizer_release_gradients"),
    ],
)
def test_impossible_runs_are_refused(
    config: dict[str, Any], accelerator: Any, kind: type[GH200Error], named: str
) -> None:
    with pytest.raises(kind, match=named) as refused:
        refuse_impossible(SimpleNamespace(**{"max_train_steps": 10, **config}), accelerator)
    assert refused.value.exit_code == 2
