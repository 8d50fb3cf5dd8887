"""A GPU for the tests that need one: they skip with the reason, or fail if one is required."""

from __future__ import annotations

import os

import pytest

from sp24cli.errors import NoGpuError
from sp24cli.gpu.device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    try:
        return Device.open()
    except NoGpuError as error:
        if os.environ.get("SP24_REQUIRE_GPU") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        # With --dist loadgroup a worker keeps to few fatbins: a sanitizer takes long to load one.
        entry = item.callspec.params.get("entry") if hasattr(item, "callspec") else None
        # An empty list of kernels gives a parameter that is none of them.
        if fatbin := getattr(entry, "fatbin", ""):
            part = f"{fatbin} {getattr(entry, 'out_type', '')} {getattr(entry, 'order', '')}"
            item.add_marker(pytest.mark.xdist_group(part))
