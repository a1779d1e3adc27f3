from __future__ import annotations

import pytest


@pytest.fixture(params=["native", "python"])
def file_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same outcome is asked of the C code and of what stands in for it where there is no compiler."""
    from simpletuner_gh200.store import batch_stager, discovery, native

    if request.param == "native":
        assert native.usable() is not None, "a C compiler is needed to test the C code"
    else:
        for module in (batch_stager, discovery):
            monkeypatch.setattr(module, "usable", lambda: None)
    return str(request.param)
