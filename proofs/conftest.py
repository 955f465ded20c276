"""Nothing is proved twice: rows that several tests look at are made once a run."""

from __future__ import annotations

import pytest

from kernels.mask_mods import TARGETS
from proofs.checks import Row, check
from spec.masks import mask


@pytest.fixture(scope="session")
def own_rows() -> list[Row]:
    return list(check(TARGETS, mask))
