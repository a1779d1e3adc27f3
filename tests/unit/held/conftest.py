from __future__ import annotations

import pytest


@pytest.fixture(params=["native", "python"])
def file_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same outcome is asked of the C code and of what is done where there is no compiler."""
    from simpletuner_gh200.held import bulk, stager, walk

    if request.param == "native":
        assert bulk.library_if_any() is not None, "a C compiler is needed to test the C code"
    else:
        for module in (stager, walk):
            monkeypatch.setattr(module, "library_if_any", lambda: None)
    return str(request.param)
