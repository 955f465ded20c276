"""A package of another project is called `kernels` too: neither may break the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What an editable install does: this repository comes first on the path.
TRANSFORMERS = """
import sys
sys.path.insert(0, sys.argv[1])
import kernels
assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
assert not is_kernels_available()
tiny = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                   num_attention_heads=2, num_key_value_heads=1)
logits = LlamaForCausalLM(tiny)(torch.tensor([[1, 2, 3]])).logits
assert logits.shape == (1, 3, 16)
import spec.masks, proofs.mask_mod, kernels.load
"""


def run(code: str) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(ROOT)],
                          capture_output=True, text=True, cwd=ROOT.parent,
                          env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr


def test_transformers_builds_a_model_beside_this_repository() -> None:
    run(TRANSFORMERS)


def test_this_repository_works_where_transformers_came_first() -> None:
    first, rest = TRANSFORMERS.split("import kernels\n", 1)
    run(f"{first}import transformers\nimport kernels\n{rest}")
