from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _importable(pytestconfig: pytest.Config) -> Iterator[None]:
    """Ranks import tests.multi_gpu in processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(pytestconfig.rootpath), prepend=":")
        yield
