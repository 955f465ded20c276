"""The compiler's environment. Import this before the first import of cutlass.

Without an architecture the compiler asks a GPU for one, and takes a default that FA4's SM90 code
does not build for where there is none. Values that the user has set are kept.
"""

import os

DEFAULTS = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
