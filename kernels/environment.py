"""The environment of compiler and FA4. Import this before the first import of cutlass.

Without an architecture the compiler asks a GPU for one, and takes a default that FA4's SM90 code
does not build for where there is none. Values that the user has set are kept.
"""

import os

DEFAULTS = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    # FA4's imports ask whether there is a GPU, and of which kind. Asked through CUDA, that leaves
    # processes that are forked later, such as those that compile, without one.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "QUACK_ARCH": "sm_90",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
